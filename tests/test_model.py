"""model.py and sampler.py: log-probs, loss, gradients, checkpoints, sampling."""
import json
import math
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, MistralConfig, PhiConfig, StableLmConfig

import attention
import model as M
import tiny
from data import InputError
from sampler import TorchSampler, draw

PROMPTS = [[3, 14, 5, 16], [7, 13, 2, 14, 4, 16], [9, 16]]
RESPONSES = [[5, 17, 2, 3, 1], [17, 4, 1], [2, 2, 2, 2, 2, 2, 2, 17, 8]]


def plain_logprobs(policy, prompt, response, temperature=1.0):
    """The reference: one unpadded row through the whole model, log-softmax over the known ids."""
    z = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1].float()
    z = z[:, :policy.vocab] / temperature
    return z.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------------- the loss


def hand_loss(ratio, advantage, **kwargs):
    """policy_loss of one token with the given ratio and advantage."""
    loss, stats = M.policy_loss(torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([advantage]),
                                torch.ones(1, 1, dtype=torch.bool), 1, **kwargs)
    return float(loss), {name: float(v) for name, v in stats.items()}


@pytest.mark.parametrize("ratio, advantage, expected, active", [
    (1.0, 2.0, -2.0, None),           # on policy: minus the advantage
    (1.5, 2.0, -2.56, "clip_high"),   # 1.28 * 2: no more gain above 1 + clip_high
    (1.25, 2.0, -2.5, None),          # between 1.2 and 1.28 nothing is clipped: the bounds are not symmetric
    (0.5, 2.0, -1.0, None),           # a right answer that became unlikely is pulled back in full
    (0.5, -2.0, 1.6, "clip_low"),     # 0.8 * 2: no more gain below 1 - clip_low
    (1.5, -2.0, 3.0, None),
    (15.0, -2.0, 20.0, "clip_dual"),  # dual clip: at most 10 |A|
    (15.0, 2.0, -2.56, "clip_high"),  # which does not touch positive advantages
])
def test_loss_by_hand(ratio, advantage, expected, active):
    loss, stats = hand_loss(ratio, advantage)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert {name for name, v in stats.items() if v and name != "ratio"} == ({active} if active else set())


def test_loss_is_a_token_mean_over_the_denominator():
    """Two rows of 3 and 1 tokens: each token weighs 1 / 4, not each row 1 / 2."""
    logprobs = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    loss, _ = M.policy_loss(logprobs, torch.zeros(2, 3), torch.tensor([1.0, -3.0]), mask, 4)
    loss.backward()
    assert loss.item() == pytest.approx((-3 + 3) / 4)
    assert logprobs.grad.tolist() == [[-0.25, -0.25, -0.25], [0.75, 0, 0]]


def test_loss_ignores_what_stands_in_the_padding():
    logprobs = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    loss, stats = M.policy_loss(logprobs, torch.tensor([[-1.0, float("inf")]]), torch.tensor([1.0]), torch.tensor([[True, False]]), 1)
    loss.backward()
    assert loss.item() == -1 and logprobs.grad.tolist() == [[-1.0, 0.0]] and stats["ratio"].tolist() == [1.0]


def test_loss_of_a_fully_masked_batch_is_zero_with_zero_gradient():
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss, _ = M.policy_loss(logprobs, torch.randn(2, 3), torch.ones(2), torch.zeros(2, 3, dtype=torch.bool), 0)
    loss.backward()
    assert loss.item() == 0 and not logprobs.grad.any()


def test_loss_takes_advantages_per_token():
    logprobs = torch.zeros(1, 2)
    loss, _ = M.policy_loss(logprobs, logprobs, torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool), 2)
    assert loss.item() == -2


# ----------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_the_plain_computation(make_policy, tied, temperature):
    policy = make_policy(tied=tied, extra_vocab=5)
    logprobs, mask, entropy = M.response_logprobs(policy, PROMPTS, RESPONSES, temperature, with_entropy=True)
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
        expected = plain_logprobs(policy, p, r, temperature)
        assert mask[i].sum() == len(r) and mask[i, :len(r)].all()
        torch.testing.assert_close(logprobs[i, :len(r)], expected, atol=1e-5, rtol=0)
        assert not logprobs[i, len(r):].any()
        z = policy.model(input_ids=torch.tensor([p + r])).logits[0, len(p) - 1:-1, :policy.vocab] / temperature
        torch.testing.assert_close(entropy[i, :len(r)], torch.distributions.Categorical(logits=z).entropy(), atol=1e-4, rtol=0)


def test_logprobs_do_not_depend_on_padding_even_with_learned_positions(tmp_path):
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
                               bos_token_id=None, eos_token_id=1)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = M.load_policy(str(tmp_path), device="cpu")
    together, _, _ = M.response_logprobs(policy, PROMPTS, RESPONSES, 1.0)
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
        alone, _, _ = M.response_logprobs(policy, [p], [r], 1.0)
        torch.testing.assert_close(together[i, :len(r)], alone[0], atol=1e-5, rtol=0)
    samples = TorchSampler(policy).generate(PROMPTS, 3, [1, 2, 3], max_tokens=8, temperature=1.0)  # and in the sampler
    for p, group in zip(PROMPTS, samples):
        for x in group:
            torch.testing.assert_close(torch.tensor(x.logprobs), plain_logprobs(policy, p, x.ids), atol=1e-4, rtol=0)


class Widest(TorchDispatchMode):
    """Sees every tensor that is computed: the elements of the largest one with a column for each id of the vocabulary."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.size, self.calls = weight, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.shape[-1:] == self.weight.shape[:1] and out.shape != self.weight.T.shape:
            self.size, self.calls = max(self.size, out.numel()), self.calls + 1
        return out


def test_no_whole_logits_tensor(make_policy, monkeypatch):
    """Forward and backward never compute more logits than a chunk holds, and the chunks give the same values and gradients."""
    policy = make_policy()
    results = []
    for chunk in (M.LOGITS_CHUNK["cpu"], 3 * policy.head.weight.shape[0]):
        monkeypatch.setitem(M.LOGITS_CHUNK, "cpu", chunk)
        with Widest(policy.head.weight) as seen:
            logprobs, mask, _ = M.response_logprobs(policy, PROMPTS, RESPONSES, 1.0)
            forward = seen.calls
            logprobs.sum().backward()
        assert 0 < seen.size <= chunk and 0 < forward < seen.calls
        results.append((logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
        policy.model.zero_grad()
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


def test_the_heads_gradient_in_bfloat16_does_not_depend_on_the_chunks(tmp_path, monkeypatch):
    """A sum over some hundred chunks, added up in float32; in bfloat16 it would be 5% off."""
    policy, rng = M.load_policy(make_model(tmp_path / "model", tied=False), device="cpu", compute_dtype="bfloat16"), random.Random(0)
    rows, advantages, gradients = [[rng.randrange(4, 40) for _ in range(100)] for _ in range(12)], torch.randn(12), []
    for chunk in (M.LOGITS_CHUNK["cpu"], 2 * policy.head.weight.shape[0]):
        monkeypatch.setitem(M.LOGITS_CHUNK, "cpu", chunk)
        logprobs, mask, _ = M.response_logprobs(policy, [r[:8] for r in rows], [r[8:] for r in rows], 1.0)
        M.policy_loss(logprobs, logprobs.detach(), advantages, mask, mask.sum())[0].backward()
        gradients.append(policy.head.weight.grad.clone())
        policy.head.weight.grad = None
    assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[0].norm()


@pytest.mark.parametrize("dtype, exact", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_head_gradients_equal_the_plain_ones_in_float64(monkeypatch, dtype, exact):
    """Unknown ids, a temperature, four chunks; a frozen weight gets no gradient; the entropy has none."""
    n, hidden_size, vocab, known = 11, 16, 40, 33
    monkeypatch.setitem(M.LOGITS_CHUNK, "cpu", 3 * vocab)
    policy = SimpleNamespace(vocab=known, compute_dtype=dtype)
    rng = torch.Generator().manual_seed(0)
    hidden, weight, grad = (torch.randn(*shape, generator=rng) for shape in ((n, hidden_size), (vocab, hidden_size), (n,)))
    targets = torch.randint(known, (n,), generator=rng)
    plain = [x.double().requires_grad_() for x in (hidden, weight)]
    z = (plain[0] @ plain[1].T)[:, :known] / 0.6
    expected = z.log_softmax(-1)[torch.arange(n), targets]
    (expected * grad).sum().backward()
    ours = [x.requires_grad_() for x in (hidden, weight)]
    logprobs, entropy = M.HeadLogprobs.apply(*ours, targets, policy, 0.6, True)
    (logprobs * grad).sum().backward()
    entropies = torch.distributions.Categorical(logits=z).entropy()
    for a, b in [(logprobs, expected), (entropy, entropies), *((a.grad, b.grad) for a, b in zip(ours, plain))]:
        assert (a - b).norm() < exact * b.norm()
    assert not entropy.requires_grad and not weight.grad[known:].any()
    again = M.HeadLogprobs.apply(hidden, weight.detach(), targets, policy, 0.6, False)
    assert torch.equal(again[0], logprobs) and again[1] is None
    [gradient] = torch.autograd.grad((again[0] * grad).sum(), hidden)
    assert torch.equal(gradient, hidden.grad)


def test_eos_is_trained_when_pad_is_eos(make_policy):
    policy = make_policy(pad_is_eos=True)
    assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id == 1
    logprobs, mask, _ = M.response_logprobs(policy, [[3, 16], [4, 16]], [[17, 5, 1], [17, 1]], 1.0)
    assert mask.tolist() == [[True, True, True], [True, True, False]]
    [gradient] = torch.autograd.grad(logprobs[1, 1], policy.head.weight)  # the EOS of the shorter, padded row
    assert gradient[1].abs().sum() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_is_independent_of_micro_batches(make_policy, tied):
    """One denominator: whatever the grouping, the gradient of the mini-batch is the same to 1e-6."""
    policy = make_policy(tied=tied)
    old = [plain_logprobs(policy, p, r).detach() + 0.3 * torch.randn(len(r), generator=torch.Generator().manual_seed(0)) for p, r in zip(PROMPTS, RESPONSES)]
    advantages = torch.tensor([1.0, -0.7, 0.4])
    gradients = []
    for budget in (1, 20, 10**6):
        groups = attention.micro_batches(PROMPTS, RESPONSES, budget)
        assert sorted(i for g in groups for i in g) == [0, 1, 2] and len(groups) == {1: 3, 20: 2, 10**6: 1}[budget]
        for group in groups:
            logprobs, mask, _ = M.response_logprobs(policy, [PROMPTS[i] for i in group], [RESPONSES[i] for i in group], 1.0)
            padded = torch.nn.utils.rnn.pad_sequence([old[i] for i in group], batch_first=True)
            loss, _ = M.policy_loss(logprobs, padded, advantages[group], mask, sum(map(len, RESPONSES)))
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        policy.model.zero_grad()
    for other in gradients[1:]:
        assert (gradients[0] - other).abs().max() < 1e-6


def test_micro_batches_respect_the_budget():
    prompts = [[1] * 10, [2] * 5, [1] * 10, [2] * 5, [1] * 10, [3] * 90]
    responses = [[7] * n for n in (30, 10, 40, 60, 10, 33)]
    groups = attention.micro_batches(prompts, responses, 100)
    assert groups == [[4, 0, 2], [1, 3], [5]]  # 10 + 10 + 30 + 40, the prompt once; 5 + 10 + 60; a longer row alone
    assert attention.micro_batches([], [], 100) == []


def test_packed_tokens_are_prompts_once_and_what_predicts_a_token():
    packed, order = attention.pack([[1, 2], [3], [1, 2], [1, 2]], [[4, 5, 6], [7, 8], [], [9]], "cpu")
    assert order == [2, 3, 0, 1] and packed.ids.tolist() == [1, 2, 3, 4, 5, 7] and packed.positions.tolist() == [0, 1, 0, 2, 3, 1]
    assert [packed.before[i][:n] for i, n in enumerate((3, 2, 0, 1))] == [[1, 3, 4], [2, 5], [], [1]]


def test_packed_logprobs_and_gradients_are_those_of_each_row_alone(make_policy):
    """Groups, uneven lengths in several buckets, a one-token and an empty response, against transformers' own forward."""
    policy, rng = make_policy(extra_vocab=5), np.random.default_rng(0)
    prompts = [list(p) for p in ([3, 14, 2], [5, 12, 6, 15, 4], [9])]
    rows = [(prompts[k], rng.integers(2, 30, n).tolist()) for k, n in ((0, 1), (1, 9), (0, 40), (0, 7), (2, 3), (1, 1), (0, 0), (1, 8), (0, 39))]
    weight = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(0))
    logprobs, mask, _ = M.response_logprobs(policy, [p for p, _ in rows], [r for _, r in rows], 0.7)
    (logprobs * weight).sum().backward()
    ours = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.model.zero_grad()
    for i, (p, r) in enumerate(rows):
        assert mask[i].sum() == len(r)
        if r:
            alone = plain_logprobs(policy, p, r, 0.7)
            torch.testing.assert_close(logprobs[i, :len(r)], alone, atol=1e-5, rtol=0)
            (alone * weight[i, :len(r)]).sum().backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_decoding_keeps_a_prompt_once_for_rows_that_come_and_go(make_policy):
    """Uneven prompts, one of them twice and apart, rows that stop at different times: log-probs as in the plain computation."""
    policy = make_policy(extra_vocab=5)
    prompts = [[3, 14, 2], [5, 12, 6], [3, 14, 2], [9], list(range(2, 30))]
    samples = TorchSampler(policy, rows=12).generate(prompts, 5, [1, 2, 3, 4, 5], max_tokens=30, temperature=1.0)
    alone = TorchSampler(policy, rows=1).generate(prompts[2:3], 5, [3], max_tokens=30, temperature=1.0)[0]
    assert [x.ids for x in alone] == [x.ids for x in samples[2]] and len({len(x.ids) for group in samples for x in group}) > 3
    for p, group in zip(prompts, samples):
        for x in group:
            torch.testing.assert_close(torch.tensor(x.logprobs), plain_logprobs(policy, p, x.ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [MistralConfig, StableLmConfig])
def test_architectures_are_checked(tmp_path, kind):
    """A sliding window is kept, in the trainer and the sampler; an attention that takes no packed tokens is refused."""
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=1, sliding_window=5)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if kind is StableLmConfig:
        with pytest.raises(InputError, match="stablelm"):
            M.load_policy(str(tmp_path), device="cpu")
        return
    policy = M.load_policy(str(tmp_path), device="cpu")
    response = list(range(2, 22))
    expected = plain_logprobs(policy, [3, 4], response)
    torch.testing.assert_close(M.response_logprobs(policy, [[3, 4]], [response], 1.0)[0][0], expected, atol=1e-5, rtol=0)
    policy.config.sliding_window = None
    assert (plain_logprobs(policy, [3, 4], response) - expected).abs().max() > 1e-3
    policy.config.sliding_window = 5
    for x in TorchSampler(policy).generate([[3, 4]], 3, [1], max_tokens=20, temperature=1.0)[0]:
        torch.testing.assert_close(torch.tensor(x.logprobs), plain_logprobs(policy, [3, 4], x.ids), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- loading and training


def test_master_weights_are_float32_and_move_at_a_small_rate(tmp_path):
    """A bfloat16 checkpoint trains in float32: at lr 1e-6 nearly every weight with a gradient moves in one step."""
    folder = make_model(tmp_path / "m")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    policy = M.load_policy(folder, device="cpu")
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = M.make_optimizer(policy, 1e-6, 0.0, 0.9, 0.999)
    M.response_logprobs(policy, PROMPTS, RESPONSES, 1.0)[0].sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters()]
    M.optimizer_step(policy, optimizer, 1.0)
    moved = torch.cat([((p != b) & (g.abs() > 1e-7)).flatten() for p, b, g in zip(policy.parameters(), before, gradients)]).sum()
    assert moved > 0.98 * torch.cat([(g.abs() > 1e-7).flatten() for g in gradients]).sum()


def test_a_gradient_that_is_not_finite_changes_nothing(make_policy):
    policy = make_policy()
    optimizer = M.make_optimizer(policy, 1e-2, 0.1, 0.9, 0.999)
    before = [p.detach().clone() for p in policy.parameters()]
    for value in (float("nan"), float("inf")):
        policy.parameters()[0].grad = torch.full_like(policy.parameters()[0], value)
        assert not math.isfinite(M.optimizer_step(policy, optimizer, 1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters())) and policy.parameters()[0].grad is None


def test_stop_ids_are_the_union(make_policy):
    policy = make_policy(second_stop=17)
    assert policy.stop_ids == [1, 17]
    samples = TorchSampler(policy).generate(PROMPTS, 20, [1, 2, 3], max_tokens=30, temperature=1.0)
    ends = {x.ids[-1] for group in samples for x in group if x.finish_reason == "stop"}
    assert ends == {1, 17}
    assert all(not set(x.ids[:-1]) & {1, 17} for group in samples for x in group)


def test_the_folders_own_tokenizer_is_loaded(tmp_path):
    """transformers 5 takes Qwen2's tokenizer class for any Qwen2 folder, whatever tokenizer.json says."""
    policy = M.load_policy(make_model(tmp_path / "m"), device="cpu")
    M.save_checkpoint(policy, str(tmp_path / "ckpt"))
    for folder in ("m", "ckpt"):
        tokenizer = M.load_tokenizer(str(tmp_path / folder))
        assert tokenizer("6+4" + tiny.ANSWER + "10")["input_ids"] == tiny.make_tokenizer()("6+4" + tiny.ANSWER + "10")["input_ids"]
        assert len(tokenizer) == len(tiny.SYMBOLS)


def test_activation_checkpointing_and_lora_change_no_gradient_or_start(tmp_path):
    folder = make_model(tmp_path / "m")
    plain, saving = M.load_policy(folder, device="cpu"), M.load_policy(folder, device="cpu", activation_checkpointing=True)
    for policy in (plain, saving):
        M.response_logprobs(policy, PROMPTS, RESPONSES, 1.0)[0].sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)
    samples = TorchSampler(saving).generate(PROMPTS, 2, [1, 2, 3], max_tokens=4, temperature=1.0)
    assert samples == TorchSampler(plain).generate(PROMPTS, 2, [1, 2, 3], max_tokens=4, temperature=1.0) and saving.model.training
    adapted = M.load_policy(folder, device="cpu", lora_rank=4)  # B is zero at first: the base itself
    torch.testing.assert_close(M.response_logprobs(adapted, PROMPTS, RESPONSES, 1.0)[0], M.response_logprobs(plain, PROMPTS, RESPONSES, 1.0)[0])
    assert all("lora" in name for name, p in adapted.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("config", [
    Gemma2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.1),
    PhiConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)])  # its head has a bias
def test_models_that_change_their_logits_are_refused(tmp_path, config):
    tokenizer = tiny.make_tokenizer()
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=config.model_type):
        M.load_policy(str(tmp_path), device="cpu")


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_checkpoint_is_an_ordinary_folder_and_continues_exactly(tmp_path, lora_rank):
    folder = make_model(tmp_path / "base")

    def step(policy, optimizer):
        M.response_logprobs(policy, PROMPTS, RESPONSES, 1.0)[0].sum().backward()
        M.optimizer_step(policy, optimizer, 1.0)

    policy = M.load_policy(folder, device="cpu", lora_rank=lora_rank)
    optimizer = M.make_optimizer(policy, 1e-2, 0.1, 0.9, 0.999)
    step(policy, optimizer)
    M.save_checkpoint(policy, str(tmp_path / "ckpt"), optimizer, {"step": 1, "position": 7})
    step(policy, optimizer)

    again = M.load_policy(str(tmp_path / "ckpt"), device="cpu", lora_rank=lora_rank)
    other = M.make_optimizer(again, 1e-2, 0.1, 0.9, 0.999)
    assert M.load_trainer_state(str(tmp_path / "ckpt"), other) == {"step": 1, "position": 7}
    step(again, other)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters()))

    if lora_rank:
        from peft import PeftModel
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ckpt")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ckpt")
    reference = M.load_policy(str(tmp_path / "ckpt"), device="cpu", train=False)
    ids = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, reference.model(input_ids=ids).logits)


def test_save_is_whole_or_absent(tmp_path, make_policy, monkeypatch):
    """Die between any two writes: the folder has its final name only when it is complete."""
    policy = make_policy()
    target = str(tmp_path / "ckpt")
    for victim in ("save_pretrained", "fsync", "rename"):
        with monkeypatch.context() as patch:
            def die(*args, **kwargs):
                raise KeyboardInterrupt
            patch.setattr(*{"save_pretrained": (policy.tokenizer, "save_pretrained"), "fsync": (os, "fsync"), "rename": (os, "rename")}[victim], die)
            with pytest.raises(KeyboardInterrupt):
                M.save_checkpoint(policy, target)
        assert not os.path.exists(target)
    M.save_checkpoint(policy, target)
    assert os.path.exists(target + "/model.safetensors") and not os.path.exists(target + ".tmp")


# ------------------------------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [True, False])
def test_sampler_logprobs_equal_the_trainers(make_policy, temperature, tied):
    """Mixed prompt lengths (left padding), finished rows dropped, padded vocabulary: to 1e-4, and no unknown id."""
    policy = make_policy(tied=tied, extra_vocab=6)
    policy.stop_ids = list(range(1, 46, 6))  # a random model seldom meets its one EOS
    samples = TorchSampler(policy, rows=7).generate(PROMPTS, 5, [11, 22, 33], max_tokens=12, temperature=temperature)
    rows = [(p, x) for p, group in zip(PROMPTS, samples) for x in group]
    logprobs, mask, _ = M.response_logprobs(policy, [p for p, _ in rows], [x.ids for _, x in rows], temperature)
    for i, (_, x) in enumerate(rows):
        torch.testing.assert_close(torch.tensor(x.logprobs), logprobs[i, :len(x.ids)].detach(), atol=1e-4, rtol=0)
        assert max(x.ids) < policy.vocab
        assert (x.finish_reason == "stop") == (x.ids[-1] in policy.stop_ids) and len(x.ids) <= 12
    assert len({x.finish_reason for _, x in rows}) == 2


def test_greedy_equals_transformers_generate(make_policy):
    policy = make_policy()
    for p in PROMPTS:
        [[x]] = TorchSampler(policy).generate([p], 1, [0], max_tokens=10, temperature=0)
        expected = policy.model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=10, pad_token_id=0)[0, len(p):].tolist()
        assert x.ids == expected


def test_samples_depend_on_their_own_seed_alone(make_policy):
    policy = make_policy()
    sampler = TorchSampler(policy)
    all_of = sampler.generate(PROMPTS, 4, [1, 2, 3], max_tokens=10, temperature=1.0)
    [alone] = TorchSampler(policy, rows=1).generate([PROMPTS[1]], 6, [2], max_tokens=10, temperature=1.0)
    assert [x.ids for x in alone[:4]] == [x.ids for x in all_of[1]]
    assert len({tuple(x.ids) for x in alone}) > 1
    assert all_of == sampler.generate(PROMPTS, 4, [1, 2, 3], max_tokens=10, temperature=1.0)
    assert all_of != sampler.generate(PROMPTS, 4, [1, 2, 4], max_tokens=10, temperature=1.0)


def test_draw_follows_the_distribution_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, float("-inf"), -1.0]).expand(20000, 5)
    uniform = torch.rand(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, logprobs = draw(logits, uniform, 1.0)
    expected = logits[0].softmax(-1)
    counts = torch.bincount(ids, minlength=5)
    assert counts[3] == 0
    keep = expected > 0
    chi_square = ((counts - 20000 * expected)[keep] ** 2 / (20000 * expected)[keep]).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[ids])
    # probabilities .64 .24 .09 0 .03: top-p 0.8 keeps the first two, renormalised
    ids, logprobs = draw(logits, uniform, 0.8)
    assert set(ids.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, F.log_softmax(logits[0, :2], -1)[ids])


def test_seeds_are_far_apart():
    seeds = {M.derive_seed(run, "rollout", i) for run in range(20) for i in range(500)}
    assert len(seeds) == 10000
    ordered = sorted(seeds)
    assert min(b - a for a, b in zip(ordered, ordered[1:])) > 64  # sample i may use seed + i


def test_adapter_folder_names_its_base(tmp_path):
    policy = M.load_policy(make_model(tmp_path / "base"), device="cpu", lora_rank=4)
    M.save_checkpoint(policy, str(tmp_path / "adapter"))
    with open(tmp_path / "adapter" / "adapter_config.json") as f:
        assert json.load(f)["base_model_name_or_path"] == str(tmp_path / "base")
    with pytest.raises(InputError, match="rank 4"):
        M.load_policy(str(tmp_path / "adapter"), device="cpu", lora_rank=8)
