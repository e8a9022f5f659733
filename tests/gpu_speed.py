"""Speed and memory of the update on one NVIDIA GPU, in under 8 minutes: python tests/gpu_speed.py   (no vLLM, random weights)

1. update() of rlep.py for the shapes of Qwen2.5-1.5B and -7B, all weights and LoRA, with --micro_tokens swept: tokens per second,
   MFU, peak memory beside the plan's figure. What by the plan does not fit runs with activation checkpointing, then with 8-bit
   moments too, or is left out with a line.
2. The head alone, forward and backward: response_logprobs, which works chunk by chunk, against a fused linear cross-entropy
   (pip install cut-cross-entropy or liger-kernel).

MFU: 6 FLOPs per weight and token (LoRA 4: the frozen weights get no gradient), attention and recomputation left out, of this GPU's
own bfloat16 matrix product, measured first. --tiny: small shapes, also on a CPU, to see that the script works.
"""
import argparse
import gc
import os
import random
import sys
import tempfile
import time
import types

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

import model  # noqa: E402
import plan  # noqa: E402
import rlep  # noqa: E402
from settings import Settings  # noqa: E402

COMMON = dict(bos_token_id=None, eos_token_id=1, num_hidden_layers=28, num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151936)
SHAPES = {"1.5B": dict(COMMON, hidden_size=1536, intermediate_size=8960, num_attention_heads=12),
          "7B": dict(COMMON, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)}
TINY = {"tiny": dict(COMMON, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=512)}
SECONDS = 400  # after this nothing new is begun
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def free() -> None:
    """Drop what is left of the last measurement: a policy holds itself in a cycle."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(function) -> tuple[float, float]:
    """Seconds and peak GiB (nan on a CPU) of the second of two calls."""
    for _ in range(2):
        free()
        start = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / plan.GIB if CUDA else float("nan")


def random_policy(config, **options) -> model.Policy:
    """load_policy() with random weights, made on the device, where it would read a file."""
    def from_config(path, **options):
        with DEVICE:
            return AutoModelForCausalLM.from_config(config, **options)

    tokenizer = type("Tokenizer", (), {"eos_token_id": 1, "__len__": lambda self: config.vocab_size})()
    real = model.AutoModelForCausalLM, model.load_tokenizer
    model.AutoModelForCausalLM, model.load_tokenizer = types.SimpleNamespace(from_pretrained=from_config), lambda path: tokenizer
    try:
        return model.load_policy("random", device=DEVICE.type, **options)
    finally:
        model.AutoModelForCausalLM, model.load_tokenizer = real


def make_groups(tokens: int, vocab: int) -> list[rlep.Group]:
    """Groups of 8 answers of 200 to 1,800 tokens to a prompt of 150, in all about so many tokens; a twentieth of that for --tiny."""
    rng, groups, made, scale = random.Random(0), [], 0, 1 if tokens > 10000 else 20
    while made < tokens:
        prompt = rng.choices(range(vocab), k=150 // scale)
        rows = [rlep.Row(rng.choices(range(vocab), k=rng.randint(200, 1800) // scale), 1.0, True, "stop", False, advantage=(-1.0) ** i) for i in range(8)]
        for row in rows:
            row.old_logprobs = torch.full((len(row.ids),), -10.0, device=DEVICE)
            made += len(prompt) + len(row.ids)
        groups.append(rlep.Group({"prompt_ids": prompt}, rows))
    return groups


def planned(settings: Settings, sizes: dict, **changes) -> float:
    """GiB of the update by the plan; sizes: of the model, without and with activation checkpointing."""
    s = Settings(**vars(settings) | changes)
    m = plan.memory(s, sizes[s.activation_checkpointing])
    return (sum(m[k] for k in ("weights", "gradients", "optimizer", "gathered", "logits")) + m["per token"] * s.micro_tokens) / plan.GIB


def sweep(name: str, config: Qwen2Config, lora_rank: int, budgets: list[int], peak: float, room: float, began: float) -> None:
    """Print a line for each --micro_tokens."""
    name += " LoRA" if lora_rank else " all weights"
    groups = make_groups(max(budgets), config.vocab_size)
    tokens = sum(len(g.question["prompt_ids"]) + sum(len(row.ids) for row in g.rows) for g in groups)  # a prompt is computed once
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        s = Settings(model=folder, gpus=1, lora_rank=lora_rank, device=DEVICE.type, micro_tokens=budgets[0], mini_batch=len(groups))
        sizes = {on: plan.sizes(Settings(**vars(s) | {"activation_checkpointing": on})) for on in (False, True)}
    s.optimizer_8bit = not lora_rank and planned(s, sizes, activation_checkpointing=True) > room
    least = planned(s, sizes, activation_checkpointing=True)
    if least > room or time.perf_counter() - began > SECONDS:
        return print(f"| {name} | left out: " + (f"{least:.0f} GiB by the plan, {room:.0f} are there" if least > room else "no time left") + " |")
    free()
    policy = random_policy(config, lora_rank=lora_rank, activation_checkpointing=True)
    optimizer = model.make_optimizer(policy, 1e-6, 0.1, 0.9, 0.999, s.optimizer_8bit)
    weights = sum(p.numel() for p in policy.model.parameters()) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    for s.micro_tokens in budgets:
        s.activation_checkpointing = planned(s, sizes, activation_checkpointing=False) > room
        needed = planned(s, sizes)
        policy.model.train(s.activation_checkpointing)  # checkpointing acts in train mode only
        line = f"| {name}{', checkpointing' * s.activation_checkpointing}{', 8-bit moments' * s.optimizer_8bit} | {s.micro_tokens:,} | "
        if needed > room or time.perf_counter() - began > SECONDS:
            print(f"{line}left out: " + ("does not fit" if needed > room else "no time left") + f" | | | {needed:.2f} |")
            continue
        try:
            seconds, gib = measured(lambda: rlep.update(policy, optimizer, s, groups, None))
            print(f"{line}{tokens / seconds:,.0f} | {(4 if lora_rank else 6) * weights * tokens / seconds / peak:.1%} | {gib:.2f} | {needed:.2f} |", flush=True)
        except torch.OutOfMemoryError:
            print(f"{line}OUT OF MEMORY | | | {needed:.2f} |", flush=True)
            optimizer.zero_grad(set_to_none=True)


def fused_head():
    """A name, and a function from hidden states (N, H), weight (V, H) and targets (N,) to their N log-probs, or to the sum; or None."""
    try:
        from cut_cross_entropy import linear_cross_entropy
        return "cut-cross-entropy", lambda h, w, t: -linear_cross_entropy(h, w, t, reduction="none")
    except ImportError:
        pass
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        # its gradient takes one factor for all tokens: the sum, to compare times; the policy loss has a weight per token
        return "liger-kernel, the sum", lambda h, w, t: -liger_fused_linear_cross_entropy(h, w, t, reduction="sum")
    except ImportError:
        return None


def heads(config: Qwen2Config, tokens: int) -> None:
    """The head of this shape alone, on given hidden states, and whether both ways give the same gradient."""
    config.num_hidden_layers = 1
    policy, fused = random_policy(config), fused_head()
    hidden = torch.randn(1, tokens, config.hidden_size, device=DEVICE, dtype=policy.compute_dtype, requires_grad=True)
    ids, weights = torch.randint(config.vocab_size, (tokens,)).tolist(), torch.randn(tokens - 1, device=DEVICE)
    policy.decoder = lambda *args, **kwargs: types.SimpleNamespace(last_hidden_state=hidden)

    def chunked():
        return model.response_logprobs(policy, [ids[:1]], [ids[1:]], 1.0)[0][0]

    def by_library():
        return fused[1](hidden[0, :-1], policy.head.weight.to(hidden.dtype), torch.tensor(ids[1:], device=DEVICE))

    def backward(function):
        hidden.grad = policy.head.weight.grad = None
        out = function()
        (out * weights if out.dim() else out).sum().backward()

    gradients = []
    for name, function in [("chunked", chunked)] + ([(fused[0], by_library)] if fused else []):
        seconds, gib = measured(lambda: backward(function))
        gradients.append(hidden.grad.float())
        gap = (gradients[-1] - gradients[0]).norm() / gradients[0].norm()
        print(f"head of {config.hidden_size} x {config.vocab_size:,}, {tokens:,} tokens, {name}: {1000 * seconds:.0f} ms, peak {gib:.1f} GiB, "
              f"gradient off by {gap:.1e}", flush=True)
    if not fused:
        print("no fused head to compare with: pip install cut-cross-entropy, or liger-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not CUDA and not args.tiny:
        sys.exit("error: no GPU here; --tiny shows on a CPU that the script works")
    began = time.perf_counter()
    x = torch.randn(2 * (512 if args.tiny else 8192,), device=DEVICE, dtype=torch.bfloat16 if CUDA else torch.float32)
    peak = 20 * len(x) ** 3 / measured(lambda: [x @ x for _ in range(10)])[0]
    room = (torch.cuda.mem_get_info()[0] / plan.GIB if CUDA else 8) * plan.ROOM
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}: matrix product {peak / 1e12:.3g} TFLOP/s, room {room:.0f} GiB")
    print("| update of | micro_tokens | tokens/s | MFU | peak GiB | plan GiB |\n|---|---|---|---|---|---|")
    shapes = TINY if args.tiny else SHAPES
    for name, shape in shapes.items():
        for lora_rank in (0, 32):
            sweep(name, Qwen2Config(**shape), lora_rank, [512, 2048] if args.tiny else [4096, 8192, 16384, 32768], peak, room, began)
    heads(Qwen2Config(**next(iter(shapes.values()))), 1024 if args.tiny else 8192)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
