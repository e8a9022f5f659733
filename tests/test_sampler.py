"""What sampler.py and the mismatch correction do without an engine; with the real one: test_vllm.py."""
import math

import numpy as np
import pytest
import torch
from conftest import make_model

import model as M
import rlep
import sampler as S
from data import InputError
from settings import Settings


def row(sampler_logprobs, old_logprobs, **more):
    return rlep.Row([5] * len(old_logprobs), 1.0, True, "stop", **{"replayed": False} | more,
                    sampler_logprobs=sampler_logprobs, old_logprobs=torch.tensor(old_logprobs))


def test_importance_weights_by_hand():
    r = row([-1.0, -2.0, -3.0], [-1.0, -1.5, -1.0])
    torch.testing.assert_close(rlep.importance_weights(r, "token", 2.0), torch.tensor([1.0, math.exp(0.5), 2.0]))  # e^2 is cut
    assert rlep.importance_weights(r, "none", 2.0) == 1.0
    assert rlep.importance_weights(r, "sequence", 2.0).tolist() == [0, 0, 0]  # e^2.5 as a whole
    assert rlep.importance_weights(r, "sequence", 13.0).tolist() == [1, 1, 1]
    assert rlep.importance_weights(row([-1.0, -1.0], [-1.5, -1.5]), "sequence", 2.0).tolist() == [0, 0]  # less likely counts too
    assert rlep.importance_weights(row(None, [-1.0], replayed=True), "token", 2.0) == 1.0


@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
def test_corrected_loss_is_the_weighted_one(make_policy, correction):
    """One update by hand: the gradient of sum(weight * advantage * rho) over all response tokens."""
    s, grads = Settings(questions=1, mini_batch=1, lr=0.0, grad_clip=1e9), []
    for by_hand in (False, True):
        policy = make_policy()
        rows = [rlep.Row([3, 4, 5, 1], 1.0, True, "stop", False, [-1.0, -2.0, -3.0, -4.0], advantage=0.7),
                rlep.Row([6, 7, 1], -1.0, False, "stop", False, [-9.0, -0.1, -3.0], advantage=-1.3), rlep.Row([8, 1], 1.0, True, "stop", True, advantage=0.7)]
        group = rlep.Group({"prompt_ids": [2, 9, 4]}, rows)
        rlep.score_old(policy, s, [group])
        for r in rows:
            r.weights = rlep.importance_weights(r, correction, 2.0)
        kept = []
        if by_hand:
            logprobs, _, _ = M.response_logprobs(policy, [[2, 9, 4]] * 3, [r.ids for r in rows], 1.0)
            sum(-(r.advantage * r.weights * (row[:len(r.ids)] - r.old_logprobs).exp()).sum() / 9 for r, row in zip(rows, logprobs)).backward()
            kept = [p.grad.clone() for p in policy.parameters()]
        else:
            optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
            optimizer.zero_grad = lambda **_: kept.extend(p.grad.clone() for p in policy.parameters())  # before they are dropped
            rlep.update(policy, optimizer, s, [group], None)
        grads.append(kept)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_canary_limits(make_policy):
    policy = make_policy()
    assert S.canary(np.array([1e-5, -3e-5]), policy, 1.0) == pytest.approx((2e-5, 3e-5))
    for gaps in ([2e-3, 2e-3], [0.0, float("nan")], [0.0, float("inf")]):
        with pytest.raises(InputError, match="canary: .* does not sample from the policy"):
            S.canary(np.array(gaps), policy, 1.0)
    S.canary(np.array([2e-3]), policy, 0.1)  # a low temperature magnifies what rounding does
    policy.compute_dtype = torch.bfloat16
    S.canary(np.array([0.03, 0.0]), policy, 1.0)
    with pytest.raises(InputError, match="rounding explains 0.1"):
        S.canary(np.array([0.3, 0.0]), policy, 1.0)


@pytest.mark.parametrize("load_4bit", [False, True])
def test_plain_weights_are_those_that_peft_merges(tmp_path, load_4bit):
    policy = M.load_policy(make_model(tmp_path / "m", hidden=64, extra_vocab=45), lora_rank=4, load_4bit=load_4bit, device="cpu")
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(0, 0.1)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    plain = M.load_policy(str(tmp_path / "m"), device="cpu", train=False)
    shapes = {name: t[:policy.vocab].shape if name in ("lm_head.weight", "model.embed_tokens.weight") else t.shape
              for name, t in plain.model.state_dict().items()}
    weights = dict(S.plain_weights(policy, shapes))
    assert weights.keys() == shapes.keys() and "lm_head.weight" in weights  # tied, and there by name
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        expected = policy.model(ids).logits[..., :policy.vocab]
        plain.model.load_state_dict({name: torch.cat([t, torch.zeros(plain.head.weight.shape[0] - policy.vocab, 64)]) if name in ("lm_head.weight", "model.embed_tokens.weight") else t
                                     for name, t in weights.items()})
        torch.testing.assert_close(plain.model(ids).logits[..., :policy.vocab], expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())  # out of place
    with pytest.raises(InputError, match="q_proj.weight is .* the engine needs"):
        list(S.plain_weights(policy, shapes | {"model.layers.0.self_attn.q_proj.weight": torch.Size([3, 3])}))


def test_which_sampler_and_why(make_policy, monkeypatch, capsys):
    policy = make_policy()
    for found, asked, told in ((None, "auto", "vLLM is not installed"), (object(), "torch", "--sampler=torch")):
        monkeypatch.setattr(S.importlib.util, "find_spec", lambda name, found=found: found)
        assert S.make_sampler(policy, Settings(sampler=asked), 64).name == "torch"
        assert f"sampler: plain PyTorch ({told}" in capsys.readouterr().out
    monkeypatch.setattr(S.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--sampler=vllm: vLLM is not installed"):
        S.make_sampler(policy, Settings(sampler="vllm"), 64)


def test_expandable_segments_are_refused():
    S.refuse_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with pytest.raises(InputError, match=f"{name}=.*expandable_segments"):
            S.refuse_expandable_segments({name: "max_split_size_mb:64, expandable_segments: True"})


def test_qlora_trains_and_its_8_bit_optimizer_resumes_bit_equal(tmp_path):
    """The next step after a save is the one without it."""
    policy = M.load_policy(make_model(tmp_path / "m", hidden=64), lora_rank=64, load_4bit=True, device="cpu")
    optimizer = M.make_optimizer(policy, 1e-2, 0.1, 0.9, 0.999, eight_bit=True)

    def step(policy, optimizer):
        logprobs, mask, _ = M.response_logprobs(policy, [[2, 3]], [[4, 5, 1]], 1.0)
        (-logprobs.sum() / mask.sum()).backward()
        M.optimizer_step(policy, optimizer, 1.0)
        return float(logprobs.detach().sum())

    first = [step(policy, optimizer) for _ in range(3)]
    assert first[2] > first[0]
    M.save_checkpoint(policy, str(tmp_path / "ckpt"), optimizer, {"step": 3})
    again = M.load_policy(str(tmp_path / "ckpt"), load_4bit=True, device="cpu")
    other = M.make_optimizer(again, 1e-2, 0.1, 0.9, 0.999, eight_bit=True)
    assert M.load_trainer_state(str(tmp_path / "ckpt"), other)["step"] == 3
    assert any(state["state1"].dtype == torch.uint8 for state in other.state.values() if "state1" in state)  # 8 bits there
    assert [step(policy, optimizer) for _ in range(3)] == [step(again, other) for _ in range(3)]
    for a, b in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_4_bits_need_an_adapter(tmp_path):
    with pytest.raises(InputError, match="--load_4bit: 4-bit weights do not train"):
        M.load_policy(make_model(tmp_path / "m"), load_4bit=True, device="cpu")
