"""sampler.py against the real vLLM engine, on a CPU: bash tests/run.sh vllm. Skipped where vLLM is not installed."""
import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm", reason="needs the real engine: bash tests/run.sh vllm")

from conftest import ROOT, make_model, run  # noqa: E402

import model as M  # noqa: E402
import rlep  # noqa: E402
import sampler as S  # noqa: E402
import tiny  # noqa: E402
from data import InputError  # noqa: E402
from settings import Settings  # noqa: E402

PROMPTS = [[2, 13, 3, 12, 4, 15], [5, 12, 6, 15], [7 + i % 9 for i in range(150)]]  # the last one fills cache blocks
SMALL = dict(max_tokens=24, temperature=0.8)


def save_model(folder, tied=True, extra_vocab=0, **config):
    """A random Qwen2 with heads of 32, the smallest that vLLM's CPU attention takes."""
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**dict(
        vocab_size=len(tokenizer) + extra_vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id) | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


KINDS = {"tied": dict(extra_vocab=45), "untied": dict(tied=False, extra_vocab=45), "LoRA merged": dict(lora_rank=4),
         "LoRA merged, untied": dict(lora_rank=4, tied=False), "LoRA adapter": dict(lora_rank=4, push="adapter"),
         "LoRA bfloat16": dict(lora_rank=4, compute_dtype="bfloat16"),
         "QLoRA merged": dict(lora_rank=8, load_4bit=True), "QLoRA adapter": dict(lora_rank=8, load_4bit=True, push="adapter")}


@pytest.fixture(scope="module")
def built(request, tmp_path_factory):
    """An engine on a random policy of the kind; pytest runs the tests of a kind one after the other, so it is built once."""
    options = dict(KINDS[request.param])
    loading = {name: options.pop(name) for name in ("lora_rank", "load_4bit", "compute_dtype") if name in options}
    push = options.pop("push", "merged")
    policy = M.load_policy(save_model(tmp_path_factory.mktemp("model") / "model", **options), device="cpu", **loading)
    start = [p.detach().clone() for p in policy.parameters()]
    sampler = S.VLLMSampler(policy, 200, rows=64, push=push)
    yield sampler, start
    sampler.close()


@pytest.fixture
def engine(built):
    """The sampler, its policy as at the start."""
    sampler, start = built
    with torch.no_grad():
        for p, value in zip(sampler.policy.parameters(), start):
            p.copy_(value)
            p.grad = None
    return sampler


def kinds(*names):
    return pytest.mark.parametrize("built", names, indirect=True)


def sample(sampler, seed=0, n=4, **options):
    seeds = [M.derive_seed(seed, i) for i in range(len(PROMPTS))]
    sampler.wake()
    samples = sampler.generate(PROMPTS, n, seeds, **SMALL | options)
    sampler.sleep()
    return samples


def gaps(policy, samples):
    """Sampler minus trainer log-probs of every token."""
    out = []
    for prompt, group in zip(PROMPTS, samples):
        with torch.no_grad():
            ours = M.response_logprobs(policy, [prompt] * len(group), [x.ids for x in group], SMALL["temperature"])[0]
        out += [torch.tensor(x.logprobs) - row[:len(x.ids)] for x, row in zip(group, ours)]
    return torch.cat(out)


def train_step(policy, optimizer, samples):
    """A step away from the sampled answers; large enough that every weight matters."""
    for prompt, group in zip(PROMPTS, samples):
        logprobs, mask, _ = M.response_logprobs(policy, [prompt] * len(group), [x.ids for x in group], SMALL["temperature"])
        (logprobs.sum() / mask.sum()).backward()
    assert M.optimizer_step(policy, optimizer, 1.0) > 0


def moved(sampler, steps=1, lr=1e-2):
    """Train the policy for some steps on the sampler's answers; the engine then holds older weights."""
    optimizer = M.make_optimizer(sampler.policy, lr, 0.0, 0.9, 0.999)
    for step in range(steps):
        train_step(sampler.policy, optimizer, sample(sampler, step))


# ------------------------------------------------------------------------------------------------------ the whole program

SIZES = ["--questions=16", "--rollouts=16", "--mini_batch=4", "--response_limit=8", "--overlong_buffer=0", "--lr=5e-4", "--weight_decay=0",
         "--warmup=2", "--eval_every=100", "--eval_samples=8", "--verify_workers=1", "--device=cpu", "--sampler_rows=64"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """48 sums, and a base model that has half learnt them: it is trained on right answers until it gives about every third."""
    folder = str(tmp_path_factory.mktemp("world"))
    policy = M.load_policy(save_model(f"{folder}/random", initializer_range=0.05), device="cpu")
    rng, optimizer = random.Random(0), M.make_optimizer(policy, 3e-3, 0.0, 0.9, 0.999)
    sums = rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], 48)
    with open(f"{folder}/train.jsonl", "w") as f:
        f.writelines(json.dumps({"id": f"{a}+{b}", "problem": f"{a}+{b}=", "prompt": f"{a}+{b}=", "answer": str(a + b), "source": "sums"}) + "\n"
                     for a, b in sums)
    prompts = [policy.tokenizer(f"{a}+{b}=")["input_ids"] for a, b in sums]
    # the tokenizer of tiny.py itself: loaded from a Qwen2 folder it splits text by Qwen2's rules
    responses = [tiny.make_tokenizer()(f"{tiny.ANSWER}{a + b}")["input_ids"] + policy.stop_ids for a, b in sums]
    chance = 0.0
    while chance < 0.3:
        logprobs, mask, _ = M.response_logprobs(policy, prompts, responses, 1.0)
        chance = float(logprobs.detach().sum(-1).exp().mean())
        (-logprobs.sum() / mask.sum()).backward()
        M.optimizer_step(policy, optimizer, 1.0)
    M.save_checkpoint(policy, f"{folder}/base")
    return {"model": f"{folder}/base", "data": f"{folder}/train.jsonl"}


def arguments(world, out, *more):
    return [f"--model={world['model']}", f"--data={world['data']}", f"--eval_data={world['data']}", *SIZES, "--sampler=vllm", f"--out={out}", *more]


def records(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "tokens_per"))} for line in f]


def weights(out):
    return torch.cat([p.flatten() for p in M.load_policy(rlep.resolve_model(str(out)), device="cpu").parameters()])


def test_rlep_on_vllm_reaches_what_the_plain_sampler_reaches(world, tmp_path, capsys):
    """Baseline, collect, replay training, eval, by either sampler."""
    reached = {}
    for kind in ("torch", "vllm"):
        out, steps = tmp_path / kind, ["--steps=25", "--save_every=25", f"--sampler={'auto' if kind == 'vllm' else kind}"]
        rlep.main(["train", *arguments(world, out / "baseline", *steps)])
        rlep.main(["collect", f"--model={out}/baseline", f"--data={world['data']}", f"--pool={out}/pool.jsonl", "--samples=8", "--min_correct=1",
                   "--response_limit=8", "--device=cpu", "--verify_workers=1", steps[-1]])
        rlep.main(["train", *arguments(world, out / "rlep", *steps, "--replay=2", f"--pool={out}/pool.jsonl")])
        assert f"sampler: {'vLLM in this process (it is installed)' if kind == 'vllm' else 'plain PyTorch'}" in capsys.readouterr().out
        log = records(out / "rlep")
        assert log[-1]["replay/rows"] > 0 and max(r["mismatch_max"] for r in log[1:]) < 1e-3
        assert ("is_weight" in log[-1]) == (kind == "vllm")
        reached[kind] = [r["eval/sums/avg@8"] for r in (log[0], records(out / "baseline")[-1], log[-1])]
    with capsys.disabled():
        print("\navg@8 of base / baseline / RLEP: " + ", ".join(f"{k} {' / '.join(f'{x:.3f}' for x in v)}" for k, v in reached.items()))
    np.testing.assert_allclose(reached["vllm"], reached["torch"], atol=0.12)  # 48 questions of 8 answers, and other draws in training
    assert reached["vllm"][2] > reached["vllm"][0] + 0.05


def test_killed_run_leaves_no_process_and_continues_as_if_nothing_had_happened(world, tmp_path):
    rlep.main(["train", *arguments(world, tmp_path / "whole", "--steps=4", "--save_every=1")])
    command = ["train", *arguments(world, tmp_path / "killed", "--steps=4", "--save_every=1")]
    process = subprocess.Popen([sys.executable, "rlep.py", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not rlep.checkpoints(str(tmp_path / "killed")):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # the verifier's workers notice that their parent is gone
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    rlep.main(command)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert torch.equal(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


TWO_RANKS = """
import sys, torch, torch.distributed as dist
sys.path[:0] = [{root!r}, {tests!r}]
import test_vllm as T, model as M, sampler as S
dist.init_process_group("gloo")
rank = dist.get_rank()
policy = M.load_policy({model!r}, device="cpu")  # under torchrun: sharded
sampler = S.VLLMSampler(policy, 200, rows=64)
optimizer = M.make_optimizer(policy, 2e-2, 0.1, 0.9, 0.999)
worst, drawn = [], []
for step in range(3):
    samples = T.sample(sampler, 2 * step + rank)
    drawn.append([x.ids for group in samples for x in group])
    worst.append(float(T.gaps(policy, samples).abs().max()))
    for prompt, group in zip(T.PROMPTS, samples):
        logprobs, mask, _ = M.response_logprobs(policy, [prompt] * len(group), [x.ids for x in group], 0.8)
        (logprobs.sum() / mask.sum()).backward()
    optimizer.step(), optimizer.zero_grad()
both = [None, None]
dist.all_gather_object(both, drawn)
assert both[0] != both[1] and max(worst) < 1e-4, worst
print("rank", rank, "worst", worst)
sampler.close()
if dist.is_initialized():
    dist.destroy_process_group()
"""


def test_two_ranks_each_with_an_engine_of_its_own(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS.format(root=ROOT, tests=os.path.dirname(__file__), model=save_model(tmp_path / "model", tied=False, extra_vocab=45)))
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, timeout=240)
    assert result.stdout.count("worst") == 2


def test_the_program_on_two_ranks_with_an_adapter(world, tmp_path):
    """torchrun rlep.py: training with evaluations, where sharded LoRA goes into each rank's engine as an adapter, then collection."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "rlep.py")
    run(*torchrun, "train", *arguments(world, tmp_path / "run", "--steps=2", "--eval_every=2", "--lr=1e-2", "--lora_rank=4", "--push=adapter"))
    log = records(tmp_path / "run")
    assert log[0]["eval/sums/avg@8"] > 0.2 and log[2]["updates"] == 4 and 0 < max(r["mismatch_max"] for r in log[1:]) < 1e-3
    result = run(*torchrun, "collect", f"--model={tmp_path}/run", f"--data={world['data']}", f"--pool={tmp_path}/pool.jsonl", "--samples=8",
                 "--min_correct=1", "--response_limit=8", "--device=cpu", "--verify_workers=1", "--sampler=vllm")
    assert "coverage:" in result.stdout and "Invalid process group" not in result.stderr


def test_what_vllm_cannot_do_is_told_in_a_line(world, tmp_path, capsys):
    with pytest.raises(InputError, match="--push=adapter: there is no adapter; it needs --lora_rank"):
        rlep.main(["train", *arguments(world, tmp_path / "run", "--push=adapter")])
    with pytest.raises(InputError, match="vLLM on a CPU takes attention heads of 32, .*, not 8; use --sampler=torch"):
        rlep.main(["train", *arguments(world | {"model": make_model(tmp_path / "narrow")}, tmp_path / "other")])
    assert S.make_sampler(M.load_policy(str(tmp_path / "narrow"), device="cpu"), Settings(), 64).name == "torch"
    assert "sampler: plain PyTorch (vLLM on a CPU takes" in capsys.readouterr().out


def test_nothing_global_is_changed_and_no_child_is_left(tmp_path):
    def state():
        return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(),
                torch.set_num_threads, torch.get_default_dtype(), torch.is_grad_enabled())

    policy = M.load_policy(save_model(tmp_path / "model"), device="cpu")
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = state()
    sampler = S.VLLMSampler(policy, 200)
    sample(sampler)
    assert state() == before and not psutil.Process().children(recursive=True)
    sampler.close()
    assert not torch.distributed.is_initialized()


def test_the_gpu_checks_work_as_far_as_a_cpu_goes():
    assert "; 0 failed" in run("tests/gpu_check.py", "--rehearse").stdout


TEXTS = ["What is 7 times 8? Think step by step.", "Once upon a time there was a fox who", "Question: a train leaves at 9:40 and needs 85 minutes. "
         "When does it arrive?\nAnswer: 85 minutes are 1 hour and 25 minutes. " * 6]


def in_float64(policy):
    """The same policy without adapters and 4-bit layers, in float64."""
    config = copy.deepcopy(policy.config)
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = plain.state_dict()
    for name, tensor in S.plain_weights(policy, {name: tensor.shape for name, tensor in state.items()}):
        state[name].copy_(tensor)
    return dataclasses.replace(policy, model=plain.double(), lora=False)


@pytest.mark.skipif(not os.environ.get("SMALL_MODEL"), reason="SMALL_MODEL=folder of a real model, as SmolLM2-135M-Instruct, to run it")
@pytest.mark.parametrize("push, loading", [("merged", {}), ("merged", dict(lora_rank=8)), ("adapter", dict(lora_rank=8)),
                                           ("merged", dict(lora_rank=8, load_4bit=True)), ("adapter", dict(lora_rank=8, load_4bit=True))])
def test_a_real_model(push, loading, monkeypatch, capsys):
    """On text: PROMPTS are in SmolLM2 a row of control tokens it never met, each of which makes a state of 2.5e4 in layer 11; a
    token at the edge of that is rounded by 2e-3 in plain float32 PyTorch as well, seen against float64."""
    torch.manual_seed(0)
    policy = M.load_policy(os.environ["SMALL_MODEL"], device="cpu", **loading)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [policy.tokenizer(text)["input_ids"] for text in TEXTS])
    sampler = S.VLLMSampler(policy, 400, rows=16, push=push)
    optimizer, worst = M.make_optimizer(policy, 1e-4, 0.0, 0.9, 0.999), {"sampler - trainer": [], "trainer - float64": []}
    for step in range(2):
        samples = sample(sampler, step, n=2)
        ours, exact = gaps(policy, samples), gaps(in_float64(policy), samples)
        worst["sampler - trainer"].append(float(ours.abs().max()))
        worst["trainer - float64"].append(float((exact - ours).abs().max()))
        if step == 0:
            train_step(policy, optimizer, samples)
    with capsys.disabled():
        print(f"\n{push}, {loading or 'full'}: largest difference before, after a step: " + "; ".join(
            f"{k} {a:.1e}, {b:.1e}" for k, (a, b) in worst.items()) + f"; swap {sampler.swap_seconds:.2f} s")
    sampler.close()
    assert gaps(policy, samples).numel() > 50 and max(worst["sampler - trainer"]) < 1e-4 and max(worst["trainer - float64"]) < 1e-4


# ---------------------------------------------------------------------------------------------------------------- equal

@kinds(*[kind for kind in KINDS if "bfloat" not in kind])
def test_logprobs_equal_the_trainers_before_and_after_training(engine, request):
    sampler = engine
    policy, worst, seen = sampler.policy, [], []
    optimizer = M.make_optimizer(policy, 2e-2, 0.1, 0.9, 0.999)
    for step in range(4):
        samples = sample(sampler, step)
        gap = gaps(policy, samples)
        worst.append(float(gap.abs().max()))
        assert sampler.mismatch[1] <= worst[-1] + 1e-6  # the canary looked at some of the same tokens
        seen.append(samples)
        train_step(policy, optimizer, samples)
    print(f"{request.node.callspec.id}: largest difference after 0, 1, 2, 3 steps: " + ", ".join(f"{w:.1e}" for w in worst))
    assert max(worst) < 1e-4
    assert gaps(policy, seen[-1]).abs().mean() > 0.02  # the steps were no small ones
    flat = [x for samples in seen for group in samples for x in group]
    assert all(max(x.ids) < policy.vocab for x in flat)
    assert {x.finish_reason for x in flat} == {"stop", "length"}
    for x in flat:
        assert len(x.ids) == len(x.logprobs)
        assert (x.ids[-1] in policy.stop_ids) == (x.finish_reason == "stop") and not set(x.ids[:-1]) & set(policy.stop_ids)


@kinds("tied")
def test_greedy_is_the_plain_samplers_and_nucleus_is_proven_too(engine):
    sampler = engine
    moved(sampler)
    sampler.wake()
    ours = sampler.generate(PROMPTS, 2, [1, 2, 3], max_tokens=24, temperature=0)
    plain = S.TorchSampler(sampler.policy).generate(PROMPTS, 2, [1, 2, 3], max_tokens=24, temperature=0)
    assert [[x.ids for x in group] for group in ours] == [[x.ids for x in group] for group in plain]
    for a, b in zip(ours, plain):
        np.testing.assert_allclose(a[0].logprobs, b[0].logprobs, atol=1e-4)
    sampler.proven = False
    sampler.generate(PROMPTS, 4, [1 << 40, 2 << 40, 3 << 40], max_tokens=24, temperature=0.7, top_p=0.9)
    assert sampler.proven and sampler.mismatch[1] < 1e-4
    assert sampler.generate([], 2, [], **SMALL) == [] and sampler.generate(PROMPTS, 0, [1, 2, 3], **SMALL) == [[], [], []]


@kinds("tied")
def test_seeds_repeat_and_do_not_overlap(engine):
    sampler = engine
    first = sample(sampler, 1, n=8)
    assert [[x.ids for x in g] for g in first] == [[x.ids for x in g] for g in sample(sampler, 1, n=8)]
    assert [[x.ids for x in g] for g in first] != [[x.ids for x in g] for g in sample(sampler, 2, n=8)]
    assert len({tuple(x.ids) for x in first[0]}) > 4
    sampler.wake()  # more prompt tokens than the engine takes at a time
    crowd = sampler.generate([[2 + (i * j) % 20 for i in range(100)] for j in range(1, 61)], 1, [M.derive_seed(j) for j in range(60)], **SMALL)
    assert len(crowd) == 60 and all(len(group) == 1 for group in crowd)
    sampler.sleep()


@kinds("tied")
def test_samples_of_a_question_share_the_computation_of_its_prompt(engine):
    sampler, computed = engine, []
    hook = sampler.llm.apply_model(lambda model: model.model.embed_tokens.register_forward_pre_hook(lambda _, ids: computed.append(len(ids[0]))))[0]
    sampler.wake()
    for prompt in ([2 + i % 7 for i in range(100)], PROMPTS[2], PROMPTS[2]):
        sampler.generate([prompt], 8, [1], max_tokens=1, temperature=1.0)
    hook.remove()
    sampler.sleep()
    # blocks of 32 once: 3 of them and 8 times 4 tokens, 4 and 8 times 22; of the second request, those 8 times 22
    assert computed == [96 + 8 * 4, 128 + 8 * 22, 8 * 22]


# --------------------------------------------------------------------------------------------------------------- canary


def broken_swap(monkeypatch, change):
    """Let change(name, tensor) stand for each tensor on its way into the engine."""
    right = S.plain_weights
    monkeypatch.setattr(S, "plain_weights", lambda *args: ((name, change(name, tensor)) for name, tensor in right(*args)))


@kinds("tied")
@pytest.mark.parametrize("stale", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_canary_sees_a_stale_layer_and_a_stale_tied_head(engine, monkeypatch, stale):
    sampler = engine
    old = {name: tensor.clone() for name, tensor in S.plain_weights(sampler.policy, sampler.shapes)}
    moved(sampler, 3, lr=1e-3)
    with monkeypatch.context() as patch:
        broken_swap(patch, lambda name, tensor: old[name] if name == stale else tensor)
        with pytest.raises(InputError, match="canary: .* does not sample from the policy"):
            sample(sampler)
    assert gaps(sampler.policy, sample(sampler)).abs().max() < 1e-4  # a right swap heals it


@kinds("tied")
def test_canary_sees_a_stale_prefix_cache(engine, monkeypatch):
    sampler = engine
    optimizer = M.make_optimizer(sampler.policy, 1e-3, 0.0, 0.9, 0.999)
    sampler.wake()
    for _ in range(3):  # never asleep: going to sleep drops the cache as well
        train_step(sampler.policy, optimizer, sampler.generate(PROMPTS, 4, [1, 1 << 20, 1 << 40], **SMALL))
    monkeypatch.setattr(sampler.llm, "reset_prefix_cache", lambda: True)
    sampler.wake()
    with pytest.raises(InputError, match="canary"):
        sampler.generate(PROMPTS, 4, [1, 1 << 20, 1 << 40], **SMALL)
    monkeypatch.setattr(sampler.llm, "reset_prefix_cache", lambda: False)  # a refusal is not passed over
    with pytest.raises(RuntimeError, match="prefix cache"):
        sampler.wake()


@kinds("LoRA merged")
def test_canary_sees_a_zeroed_adapter_merged(engine, monkeypatch):
    sampler = engine
    moved(sampler, 3, lr=1e-3)
    right = S.plain_weights
    monkeypatch.setattr(S, "plain_weights", lambda policy, shapes, merge: right(policy, shapes, False))
    with pytest.raises(InputError, match="canary"):
        sample(sampler)


@kinds("LoRA adapter")
def test_canary_sees_an_adapter_that_is_not_applied(engine, monkeypatch):
    sampler = engine
    moved(sampler, 3, lr=1e-3)
    sampler.wake()
    assert sampler.request.lora_int_id == sampler.pushes >= 4  # an id of its own for each push
    monkeypatch.setattr(sampler, "request", None)
    with pytest.raises(InputError, match="canary"):
        sampler.generate(PROMPTS, 4, [1, 2, 3], **SMALL)


@kinds("tied")
def test_canary_sees_that_nothing_was_pushed(engine, monkeypatch):
    sampler = engine
    moved(sampler, 3, lr=1e-3)
    monkeypatch.setattr(sampler, "push", lambda: None)
    with pytest.raises(InputError, match="canary"):
        sample(sampler)


@kinds("tied")
def test_weights_that_would_be_left_out_are_refused(engine, monkeypatch):
    sampler = engine
    monkeypatch.setattr(sampler, "shapes", dict(sampler.shapes))
    del sampler.shapes["lm_head.weight"]
    sampler._check_names()  # tied: the engine has one matrix, under the name of the embedding
    del sampler.shapes["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(InputError, match="qkv_proj"):
        sampler._check_names()


@kinds("LoRA bfloat16")
def test_the_base_is_bit_equal_after_50_swaps_and_the_engine_owns_its_copy(engine):
    sampler = engine
    moved(sampler, 1)
    frozen = {name: p.clone() for name, p in sampler.policy.model.named_parameters() if not p.requires_grad}
    for _ in range(50):
        sampler.push()
    now = dict(sampler.policy.model.named_parameters())
    assert frozen and all(torch.equal(p, now[name]) for name, p in frozen.items())
    first = sample(sampler)
    assert gaps(sampler.policy, first).abs().mean() < 0.1 and sampler.mismatch[0] > 0
    sampler.wake()
    first = sampler.generate(PROMPTS, 2, [1, 2, 3], **SMALL)
    with torch.no_grad():
        for p in sampler.policy.model.parameters():
            p.mul_(1.5)
    again = sampler.generate(PROMPTS, 2, [1, 2, 3], **SMALL)
    sampler.sleep()
    assert [[x.ids for x in g] for g in first] == [[x.ids for x in g] for g in again]  # the trainer's tensors are not the engine's


@kinds("LoRA adapter")
def test_adapters_are_saved_as_peft_folders_that_peft_and_vllm_load(engine, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sampler = engine
    moved(sampler, 2)
    M.save_checkpoint(sampler.policy, str(tmp_path / "adapter"))
    again = M.load_policy(str(tmp_path / "adapter"), device="cpu", train=False)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sampler.policy.config._name_or_path, dtype=torch.float32), tmp_path / "adapter")
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(again.model(ids).logits, sampler.policy.model(ids).logits)
    torch.testing.assert_close(plain(ids).logits, sampler.policy.model(ids).logits)
    assert gaps(again, sample(sampler)).abs().max() < 1e-4  # vLLM loaded the same kind of folder
