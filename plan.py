"""plan.py: what a training run holds in each GPU's memory and what a step costs, told before it starts: no GPU, no weights.

    python rlep.py plan --model=Qwen/Qwen2.5-Math-7B --gpus=8 --gpu_memory=80 --activation_checkpointing

takes train's options beside its own. The model is built on the meta device: shapes alone. What the backward pass keeps is not
a formula per architecture but counted: autograd runs on the meta tensors, and every tensor it saves is added up.
"""
import contextlib
import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data import InputError
from model import LOGITS_CHUNK
from settings import Settings

GIB = 1 << 30
ROOM = 0.94  # of the memory: the rest is CUDA's context, NCCL's buffers and gaps
MEAN_PROMPT = 150  # tokens


class Attention(torch.autograd.Function):
    """A stand-in for a fused attention kernel, which keeps its inputs, its output and a number per row, but no scores."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], device=q.device))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


@contextlib.contextmanager
def fused_attention():
    real = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, *args, **kwargs: Attention.apply(q, k, v)
    yield
    torch.nn.functional.scaled_dot_product_attention = real


def saved_bytes(decoder, config, tokens: int, dtype: torch.dtype, sharded: bool) -> int:
    """Bytes that autograd keeps of `tokens` tokens through the layers. Sharded weights come in dtype; else autocast casts."""
    kept, weights = {}, {p.untyped_storage()._cdata for p in decoder.parameters()}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = (storage, storage.nbytes())  # the storage too, so that its address is not used again
        return tensor

    length = min(tokens, 1024)
    hidden = torch.empty(tokens // length, length, config.hidden_size, device="meta", requires_grad=True,
                         dtype=dtype if sharded else torch.float32)
    mask = torch.empty(tokens // length, 1, length, length, dtype=torch.bool, device="meta")  # a 4-d one is taken as it is
    cast = contextlib.nullcontext() if sharded or dtype == torch.float32 else torch.autocast("cpu", dtype, cache_enabled=False)
    with fused_attention(), torch.autograd.graph.saved_tensors_hooks(count, lambda x: x), cast:
        decoder(inputs_embeds=hidden, attention_mask=mask, use_cache=False)
    return sum(size for _, size in kept.values())


def sizes(s: Settings) -> dict[str, float]:
    """Parameters of the model and of its parts, and bytes per token: of activations kept, of a layer's, of the KV cache."""
    try:
        config = AutoConfig.from_pretrained(s.model)
    except (OSError, ValueError) as e:
        raise InputError(f"--model={s.model}: no model there: {str(e).splitlines()[0]}") from None
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decoder, dtype = model.get_decoder(), torch.float32 if compute_bytes(s) == 4 else torch.bfloat16
    layers = next(m for m in decoder.children() if isinstance(m, torch.nn.ModuleList))
    total, layer = (sum(p.numel() for p in m.parameters()) for m in (model, layers[0]))
    matrices = sum(m.weight.numel() for m in decoder.modules() if isinstance(m, torch.nn.Linear))
    lora = s.lora_rank * sum(sum(m.weight.shape) for m in decoder.modules() if isinstance(m, torch.nn.Linear))
    sharded = s.gpus > 1
    if sharded:
        model.to(dtype)
    tokens = 2048
    every = saved_bytes(decoder, config, tokens, dtype, sharded) / tokens
    depth, one = len(layers), layers[:1]
    decoder.layers = one
    config.num_hidden_layers = 1
    first = saved_bytes(decoder, config, tokens, dtype, sharded) / tokens
    per_layer = (every - first) / max(depth - 1, 1)
    boundary = config.hidden_size * (compute_bytes(s) if sharded else 4)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"total": total, "layer": layer, "root": total - layer * depth, "matrices": matrices, "lora": lora, "depth": depth,
            "vocab": config.vocab_size, "hidden": config.hidden_size, "attention": config.num_attention_heads * head_dim,
            "per_layer": per_layer, "kept": (boundary * depth + first) if s.activation_checkpointing else every,
            "kv": 2 * depth * heads * head_dim * compute_bytes(s)}


def compute_bytes(s: Settings) -> int:
    return 4 if s.dtype == "float32" or (s.dtype == "auto" and s.device == "cpu") else 2


def memory(s: Settings, z: dict[str, float]) -> dict[str, float]:
    """Bytes per GPU of each thing; "per token" is what a token of a micro-batch adds while training."""
    width, trained = compute_bytes(s), z["lora"] or z["total"]
    frozen = z["total"] * (0.57 if s.load_4bit else width) if z["lora"] else 0
    out = {"weights": (4 * trained + frozen) / s.gpus, "gradients": 4 * trained / s.gpus,
           "optimizer": (2 if s.optimizer_8bit else 8) * trained / s.gpus}
    # the head's gradient of a micro-batch; in bfloat16 also the head's cast and a product
    head = z["vocab"] * z["hidden"] * (0 if z["lora"] else 4 if width == 4 else 8)
    if s.gpus > 1:  # whole weights, the root's in float32 and two layers'; the head's gradient, with what makes it or a layer's beside it
        root = (width if z["lora"] else 4) * z["root"]
        out["gathered"] = root + 2 * width * z["layer"] + (0 if z["lora"] else max(head, 4 * z["vocab"] * z["hidden"] + (width + 4) * z["layer"]))
        out["reduced"] = root + (0 if z["lora"] else 8 * z["root"])  # at the end, without activations: the root's gradient, and its copy on the way
    else:  # what autocast keeps of the weights in bfloat16
        out["gathered"] = head + (0 if width == 4 or z["lora"] else 2 * z["matrices"])
    # float32 logits, and their exponentials for the entropy (the backward pass: and their gradient in width bytes, no more)
    rows = min(max(1, LOGITS_CHUNK["cpu" if s.device == "cpu" else "cuda"] // z["vocab"]), s.micro_tokens)
    out["logits"] = rows * z["vocab"] * 2 * 4
    out["per token"] = z["kept"] + 2 * 4 * z["hidden"]  # the last hidden states and their gradient beside it
    return out


def show(s: Settings) -> dict[str, float]:
    """Print the plan; returns its figures."""
    z = sizes(s)
    m = memory(s, z)
    room = s.gpu_memory * GIB * ROOM
    state = m["weights"] + m["gradients"] + m["optimizer"]
    fixed, at_rest = state + m["gathered"] + m["logits"], m["weights"] + m["optimizer"]
    training = max(fixed + m["per token"] * s.micro_tokens, state + m.get("reduced", 0))
    largest = max(0, math.floor((room - fixed) / m["per token"] / 256) * 256)
    engine = s.gpu_memory_fraction * s.gpu_memory * GIB
    engine_weights = z["total"] * compute_bytes(s)
    cache = engine - engine_weights
    longest = s.prompt_limit + s.response_limit

    rows = s.questions * (s.rollouts + s.replay + s.replay_failures)
    sampled, trained = s.questions * s.rollouts * s.mean_length, rows * (s.mean_length + MEAN_PROMPT)
    matmul = 2 * (z["total"] - z["root"] + z["vocab"] * z["hidden"])  # FLOPs of a token forward; the embedding multiplies nothing
    token = matmul + 2 * z["depth"] * z["attention"] * (s.mean_length + MEAN_PROMPT)  # and of attention to half the row, twice
    score, update = trained * token, trained * token * (4 if s.activation_checkpointing else 3)
    speed = s.gpus * s.gpu_tflops * 1e12 * s.mfu
    seconds = {"sample": sampled / (s.sampler_speed * s.gpus), "score": score / speed, "update": update / speed}

    def gib(x):
        return f"{x / GIB:8.2f} GiB"
    print(f"plan: {s.model}: {z['total']:,} parameters, {z['lora'] or z['total']:,} train, on {s.gpus} GPUs of {s.gpu_memory:g} GiB\n")
    print("held on each GPU by the trainer, always")
    for name, text in (("weights", "weights, float32" + (" and frozen base" if z["lora"] else "")), ("optimizer", "optimizer, two moments")):
        print(f"  {text:<52}{gib(m[name])}")
    print(f"sampling: with vLLM asleep                            {gib(at_rest)}")
    print(f"  vLLM awake: weights                                 {gib(engine_weights)}")
    print(f"  vLLM awake: KV cache, {max(cache, 0) / z['kv']:11,.0f} tokens             {gib(cache)}")
    print(f"  in all                                              {gib(at_rest + engine)}  of {room / GIB:.1f}")
    print("update")
    for name, text in (("gradients", "gradients, float32"), ("gathered", "weights and gradients whole, of a layer at a time"), ("logits", "the head, a chunk of logits at a time")):
        print(f"  {text:<52}{gib(m[name])}")
    print(f"  activations of --micro_tokens={s.micro_tokens:<22}{gib(m['per token'] * s.micro_tokens)}")
    print(f"  in all                                              {gib(training)}  of {room / GIB:.1f}")
    print(f"largest --micro_tokens that fits: {largest:,}; the longest row has {longest:,}\n")
    print(f"per step, at {s.mean_length:,} tokens a response: {sampled:,} sampled, {trained:,} trained; {(score + update) / 1e15:,.0f} PFLOP")
    print(f"  seconds at {s.sampler_speed:,} tokens a second and GPU, and {s.mfu:.0%} of {s.gpu_tflops:g} TFLOP/s: "
          + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + f", in all {sum(seconds.values()):.0f}")
    for line in advice(s, training, at_rest + engine, cache, z["kv"] * longest, largest, room):
        print(line)
    return {**z, **m, "training": training, "sampling": at_rest + engine, "largest": largest, "cache": cache, "sampled": sampled,
            "trained": trained, "flops": score + update, "seconds": sum(seconds.values())}


def advice(s, training, sampling, cache, one_row, largest, room) -> list[str]:
    """What to lower where it does not fit."""
    lines = []
    longest = s.prompt_limit + s.response_limit
    if training > room and largest >= longest:
        lines.append(f"DOES NOT FIT: the update; lower --micro_tokens to {largest} or less")
    elif largest < longest:
        lines.append("DOES NOT FIT: one row is too much for the update; " + ("" if s.activation_checkpointing else "add --activation_checkpointing, ")
                     + "more GPUs, --lora_rank=32, or a lower --response_limit")
    if cache < one_row:
        lines.append("DOES NOT FIT: vLLM has no room for one answer; raise --gpu_memory_fraction")
    if sampling > room:
        lines.append("DOES NOT FIT: sampling; lower --gpu_memory_fraction, or take more GPUs")
    return lines or ["fits"]
