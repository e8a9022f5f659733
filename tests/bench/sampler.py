"""Tokens per second of the plain sampler, Hugging Face generate() and vLLM in one run, and the time of a weight swap.

    OMP_NUM_THREADS=1 python tests/bench/sampler.py --model=runs/tiny/base          # or any small model's folder; needs vLLM

Every sampler answers the same prompts with the same number of tokens, without stopping early. Repeated, in turn, because a
shared machine's speed changes from minute to minute; the table has medians, per second of the clock and of CPU time.
"""
import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch  # noqa: E402

from model import derive_seed, load_policy  # noqa: E402
from sampler import TorchSampler, VLLMSampler  # noqa: E402


def hf_generate(policy, prompts: list[list[int]], n: int, tokens: int) -> int:
    """transformers' own loop, in one batch padded on the left. Returns tokens made."""
    rows = [p for p in prompts for _ in range(n)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in rows])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows])
    policy.model.set_attn_implementation("sdpa")  # transformers' own, for its own loop
    out = policy.model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
    policy.model.set_attn_implementation("rlep")
    return (out.shape[1] - width) * len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal LM with attention heads of 32 or more")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="per prompt, all decoded together")
    parser.add_argument("--prompt_tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32, help="made per sample")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    policy = load_policy(args.model, device="auto", train=False)
    policy.stop_ids = [policy.vocab]  # never sampled: every sampler makes all its tokens
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, policy.vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    seeds = [derive_seed("bench", i) for i in range(args.prompts)]
    rows = args.prompts * args.samples
    start = time.perf_counter()
    engine = VLLMSampler(policy, args.prompt_tokens + args.tokens, rows=rows)
    built = time.perf_counter() - start
    options = dict(max_tokens=args.tokens, temperature=1.0)

    def count(samples):
        return sum(len(x.ids) for group in samples for x in group)

    kinds = {"plain PyTorch": lambda: count(TorchSampler(policy, rows).generate(prompts, args.samples, seeds, **options)),
             "Hugging Face generate()": lambda: hf_generate(policy, prompts, args.samples, args.tokens),
             "vLLM": lambda: count(engine.generate(prompts, args.samples, seeds, **options))}
    speeds, swaps = {kind: [] for kind in kinds}, []
    for repeat in range(args.repeats + 1):
        engine.wake()
        swaps.append(engine.swap_seconds)
        engine.generate(prompts[:1], 1, seeds[:1], **options)  # the canary, out of the timing
        for kind, sample in kinds.items():
            clock, cpu = time.perf_counter(), time.process_time()
            tokens = sample()
            clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
            assert tokens == rows * args.tokens
            if repeat:  # the first round warms up
                speeds[kind].append((tokens / clock, tokens / cpu))
        engine.sleep()
    print(f"{sum(p.numel() for p in policy.model.parameters()):,} parameters, {args.prompts} prompts of {args.prompt_tokens} tokens, "
          f"{args.samples} samples each of {args.tokens} tokens, {torch.get_num_threads()} thread(s)")
    print("| sampler | tokens per second | per CPU second |\n|---|---|---|")
    for kind, runs in speeds.items():
        print(f"| {kind} | {statistics.median(r[0] for r in runs):,.0f} | {statistics.median(r[1] for r in runs):,.0f} |")
    print(f"vLLM: built in {built:.1f} s; a swap takes {statistics.median(swaps[1:]) * 1000:,.0f} ms")
    engine.close()


if __name__ == "__main__":
    main()
