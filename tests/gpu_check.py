"""What only a GPU can show, in one script of under 8 minutes: python tests/gpu_check.py (one NVIDIA GPU of 24 GB or more, vLLM).
--rehearse: a third of it on a CPU with two small layers, memory aside, to see that the script works.

1. swap and canary with sleep level 2 (all weights; LoRA merged) and level 1 (the adapter alone) on a random 0.5B Qwen2: the
   difference of log-probs before and after a training step, the memory that sleep gives back, the time of a swap;
2. a swap that does not happen is stopped by the canary;
3. two RLEP steps through rlep.py with vLLM, with full weights and with LoRA, from a small pool.

Prints a line per check; exits with 1 if one failed.
"""
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

import tiny  # noqa: E402
from data import InputError  # noqa: E402
from model import derive_seed, load_policy, load_tokenizer, make_optimizer, optimizer_step, response_logprobs  # noqa: E402
from replay import Pool, fingerprint  # noqa: E402
from sampler import VLLMSampler  # noqa: E402

REHEARSAL = sys.argv[1:] == ["--rehearse"]
DEVICE = "cpu" if REHEARSAL else "cuda"
FAILED = []


def check(name: str, passed: bool, told: str) -> None:
    print(f"{'ok    ' if passed else 'FAILED'} {name}: {told}", flush=True)
    if not passed:
        FAILED.append(name)


def alone(function, *args, **options) -> None:
    """Run a check in a process of its own: vLLM's sleep mode takes one engine per process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            FAILED.extend(process.submit(function, *args, **options).result())
        except Exception as e:
            check(f"{function.__name__}{args[1:]}", False, repr(e)[-600:])


def gib_in_use() -> float:
    """Of the whole GPU: what vLLM maps is not in torch's own count."""
    if REHEARSAL:
        return 0.0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def make_base(folder: str) -> None:
    """A random model of Qwen2.5-0.5B's shape and vocabulary, with the tiny tokenizer: most of its ids must be masked."""
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    shape = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
    if REHEARSAL:
        shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
                                         pad_token_id=0, initializer_range=0.05))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(base: str, folder: str) -> None:
    """Eight sums, and two stored answers to each."""
    rng, tokenizer = random.Random(0), load_tokenizer(base)
    sums = [(rng.randint(1, 9), rng.randint(1, 9), i) for i in range(8)]
    with open(f"{folder}/questions.jsonl", "w") as f:
        f.writelines(json.dumps({"id": str(i), "problem": f"{a}+{b}=", "prompt": f"{a}+{b}=", "answer": str(a + b), "source": "sums"}) + "\n"
                     for a, b, i in sums)
    with Pool(f"{folder}/pool.jsonl", tokenizer=fingerprint(tokenizer)) as pool:
        for a, b, i in sums:
            pool.append([{"question_id": str(i), "problem": f"{a}+{b}=", "answer": str(a + b), "response": f"{k}\nAnswer: {a + b}",
                          "response_ids": [2 + k, 3, 4, 1], "finish_reason": "stop", "reward": 1.0, "sampler_logprob": -1.0} for k in range(2)])


def check_swap(base: str, name: str, push: str = "merged", **loading) -> list[str]:
    """Returns the names of what failed."""
    policy = load_policy(base, device=DEVICE, **loading)
    optimizer = make_optimizer(policy, 1e-3, 0.0, 0.9, 0.999)
    before = gib_in_use()
    start = time.perf_counter()
    sampler = VLLMSampler(policy, 1024, rows=128, memory_fraction=0.4, push=push)
    built, asleep = time.perf_counter() - start, gib_in_use()
    prompts = [[2 + (i * j) % 20 for i in range(100)] for j in range(1, 9)]
    means, swaps, awake = [], [], 0.0
    for step in range(3):
        sampler.wake()
        awake = max(awake, gib_in_use())
        samples = sampler.generate(prompts, 8, [derive_seed(step, i) for i in range(8)], max_tokens=128, temperature=1.0)  # canary inside
        sampler.sleep()
        means.append(sampler.mismatch[0])
        swaps.append(sampler.swap_seconds)
        logprobs, mask, _ = response_logprobs(policy, prompts, [group[0].ids for group in samples], 1.0)
        (logprobs.sum() / mask.sum()).backward()
        optimizer_step(policy, optimizer, 1.0)
    check(f"{name}: swap and canary", max(means) < 0.1, f"mean differences {', '.join(f'{m:.4f}' for m in means)}; swaps "
          f"{', '.join(f'{s:.2f}' for s in swaps)} s; built in {built:.0f} s")
    check(f"{name}: sleep level {sampler.level} frees", REHEARSAL or gib_in_use() < awake - 2, f"{before:.1f} GiB before the engine, {asleep:.1f} "
          f"asleep, {awake:.1f} awake, {gib_in_use():.1f} asleep after training")
    if push == "merged":
        with torch.no_grad():
            for p in policy.parameters():  # so far that the last weights are wrong as well, should they still be in the memory
                p.add_(torch.randn_like(p), alpha=0.05)
        sampler.push = lambda: None  # awake with memory that was never filled
        sampler.wake()
        try:
            sampler.generate(prompts, 1, list(range(8)), max_tokens=64, temperature=1.0)
            check(f"{name}: canary stops a missing swap", False, f"difference {sampler.mismatch}")
        except InputError as e:
            check(f"{name}: canary stops a missing swap", True, str(e)[:90])
    sampler.close()
    return FAILED


def check_run(base: str, folder: str, name: str, *options: str) -> None:
    """rlep.py as a user runs it: two steps of 4 questions, 8 fresh and 2 replayed answers each."""
    out = f"{folder}/{name.replace(' ', '-')}"
    command = [sys.executable, "rlep.py", "train", f"--model={base}", f"--data={folder}/questions.jsonl", f"--pool={folder}/pool.jsonl",
               "--replay=2", "--questions=4", "--mini_batch=2", "--rollouts=8", "--response_limit=256", "--overlong_buffer=0",
               "--steps=2", "--lr=1e-5", "--save_every=2", "--sampler=vllm", f"--device={DEVICE}", f"--out={out}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return check(f"rlep.py, {name}", False, (done.stdout + done.stderr)[-600:])
    with open(f"{out}/metrics.jsonl") as f:
        last = [json.loads(line) for line in f][-1]
    check(f"rlep.py, {name}", last["replay/rows"] == 8 and last["mismatch_mean"] < 0.1,
          ", ".join(f"{key} {last[key]:.4g}" for key in ("mismatch_mean", "mismatch_max", "is_weight", "grad_norm", "time/sample", "time/step")))


def main() -> None:
    if not REHEARSAL and not torch.cuda.is_available():
        sys.exit("error: no GPU here; --rehearse shows on a CPU that the script works")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base"
        make_base(base)
        make_data(base, folder)
        alone(check_swap, base, "LoRA merged", lora_rank=16)
        check_run(base, folder, "QLoRA adapter", "--lora_rank=16", "--load_4bit", "--push=adapter", "--optimizer_8bit")
        if not REHEARSAL:
            alone(check_swap, base, "full weights")
            alone(check_swap, base, "LoRA adapter", lora_rank=16, push="adapter")
            check_run(base, folder, "full weights")
            check_run(base, folder, "LoRA", "--lora_rank=16", "--activation_checkpointing")
    print(f"{time.perf_counter() - start:.0f} s; {len(FAILED)} failed", flush=True)
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
