"""sampler.py: where responses come from. One small surface, used by train, collect and eval:

    wake()      claim the sampler's memory and take over the policy's weights
    generate()  prompts of token ids -> n Samples each
    sleep()     free the memory: sampler and trainer take turns on one GPU
    close()     end it

TorchSampler is plain PyTorch on the trainer's own weights. VLLMSampler is vLLM in the trainer's process; each wake()
swaps the weights, and the first answers after it prove that the swap was right (the canary).

Legend: P prompts, B rows decoded together, V vocabulary, H hidden size.
"""
import contextlib
import copy
import dataclasses
import importlib.util
import os
import random
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from attention import GrowingLayer, Prefix, pack
from data import InputError
from model import Policy, logits, response_logprobs, whole, whole_weights


BLOCK = 256  # ids


@dataclass
class Sample:
    """One response as sampled."""

    ids: list[int]  # stop id included
    finish_reason: str  # "stop": ended by a stop id; "length": cut at the limit
    logprobs: list[float]  # of each id under the distribution it was drawn from


class TorchSampler:
    """The plain PyTorch sampler. It shares the trainer's weights, so push, wake and sleep have nothing to do.

    Except where the policy is sharded over ranks: there they hold a whole copy, for ranks decode at their own pace and a
    sharded forward waits for all of them. rows: how many responses are decoded at a time.
    """

    name = "torch"

    def __init__(self, policy: Policy, rows: int = 256):
        self.policy, self.rows = policy, rows
        self.sharded = any(isinstance(p, DTensor) for p in policy.model.parameters())
        self.decodes = None if self.sharded else policy  # the policy that generate() reads

    def push(self) -> None: ...

    @torch.no_grad()
    def wake(self) -> None:
        if self.sharded:
            config = copy.deepcopy(self.policy.config)
            config.vocab_size, config.dtype = self.policy.vocab, self.policy.compute_dtype
            with self.policy.device:
                plain = AutoModelForCausalLM.from_config(config, dtype=self.policy.compute_dtype).eval()
            state = plain.state_dict()
            for name, tensor in plain_weights(self.policy, {name: tensor.shape for name, tensor in state.items()}):
                state[name].copy_(tensor)
            self.decodes = dataclasses.replace(self.policy, model=plain, lora=False)

    def sleep(self) -> None:
        if self.sharded:
            self.decodes = None

    def close(self) -> None: ...

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], *, max_tokens: int, temperature: float,
                 top_p: float = 1.0, progress: str | None = None) -> list[list[Sample]]:
        """n samples of each of P prompts (token ids). seeds: one integer per prompt, far apart (derive_seed).

        temperature 0 is greedy. Sample i of a prompt draws from its own stream, keyed by (seed, i): it does not depend
        on the other prompts, on n, or on the batch. progress: label of a progress bar, None for no bar.
        """
        was_training = self.decodes.model.training
        self.decodes.model.eval()  # checkpointing of activations, active in train mode, would switch the KV cache off
        done: dict[tuple[int, int], Sample] = {}
        jobs = [(p, i) for p in sorted(range(len(prompts)), key=lambda p: len(prompts[p])) for i in range(n)]
        bar = tqdm(total=len(jobs), desc=progress, unit="answer", leave=False, disable=None if progress else True)
        for start in range(0, len(jobs), self.rows):
            batch = jobs[start:start + self.rows]
            samples = self._decode([prompts[p] for p, _ in batch], [(seeds[p], i) for p, i in batch], max_tokens,
                                   temperature, top_p)
            done.update(zip(batch, samples))
            bar.update(len(batch))
        bar.close()
        self.decodes.model.train(was_training)
        return [[done[p, i] for i in range(n)] for p in range(len(prompts))]

    def _decode(self, prompts, keys, max_tokens, temperature, top_p) -> list[Sample]:
        """Decode one batch with a KV cache; equal neighbouring prompts are computed and kept once, finished rows are dropped."""
        policy, device = self.decodes, self.decodes.device
        packed, _ = pack(prompts, [[]] * len(prompts), device)
        last = torch.tensor([before[0] for before in packed.before], device=device)  # (B,): the last token of the row's prompt
        position = packed.positions[last] + 1  # (B,): where the next token stands
        cache, any_mask = Cache(layer_class_to_replicate=GrowingLayer), packed.ids.new_ones(1, 1, 1, 1)  # a mask that attention() ignores
        with policy.autocast():
            hidden = policy.decoder(input_ids=packed.ids[None], position_ids=packed.positions[None], attention_mask=any_mask, packed=packed,
                                    past_key_values=cache, use_cache=True).last_hidden_state[0, last]  # (B, H)
        which = torch.searchsorted(torch.tensor([end for _, end in packed.prompts], device=device), last, right=True)  # (B,): its prompt
        prefix = Prefix([(layer.keys[0], layer.values[0]) for layer in cache.layers], packed.prompts, which)
        cache = Cache(layer_class_to_replicate=GrowingLayer)  # of the rows' own tokens
        draws = None
        if temperature > 0:
            draws = torch.tensor(np.stack([np.random.Generator(np.random.Philox(key=[seed, i])).random(max_tokens)
                                           for seed, i in keys]), device=device)  # (B, max_tokens) uniform
        active = torch.arange(len(prompts), device=device)  # the rows still in the batch
        out_ids = torch.zeros(len(prompts), max_tokens, dtype=torch.long, device=device)
        out_logprobs = torch.zeros(len(prompts), max_tokens, device=device)
        length = torch.full((len(prompts),), max_tokens, device=device)
        stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        stops = torch.tensor(policy.stop_ids, device=device)
        for t in range(max_tokens):
            with policy.autocast():
                z = logits(policy, policy.head(hidden), temperature or 1.0)  # (B, V)
            ids, logprobs = draw(z, draws[active, t] if draws is not None else None, top_p)
            out_ids[active, t], out_logprobs[active, t] = ids, logprobs
            ended = torch.isin(ids, stops)
            ended &= ~stopped[active]  # rows that wait to be dropped go on producing tokens that nobody reads
            length[active[ended]] = t + 1
            stopped[active[ended]] = True
            keep = (~stopped[active]).nonzero()[:, 0]
            if len(keep) == 0 or t + 1 == max_tokens:
                break
            if len(keep) < 0.9 * len(active):  # compacting copies the cache: not for every single row
                if t:
                    cache.batch_select_indices(keep)
                prefix.keep(prefix.which[keep])
                active, ids, position = active[keep], ids[keep], position[keep]
            with policy.autocast():
                hidden = policy.decoder(input_ids=ids[:, None], position_ids=position[:, None], attention_mask=any_mask, prefix=prefix,
                                        past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            position = position + 1
        return [Sample(ids[:n], "stop" if s else "length", lp[:n]) for ids, lp, n, s in zip(
            out_ids.tolist(), out_logprobs.tolist(), length.tolist(), stopped.tolist())]


def draw(z: torch.Tensor, uniform: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids (B,) from logits z (B, V) by inverting the cumulative distribution at uniform (B,); None takes the best.

    With top_p < 1 only the smallest set of ids whose probability reaches top_p is left, renormalised. Returns the ids
    and their log-probs (B,) under the distribution drawn from; greedy ids carry their log-prob at temperature 1.
    """
    if uniform is None:
        best = z.log_softmax(-1).max(-1)
        return best.indices, best.values
    if top_p < 1:
        ordered, order = z.softmax(-1).sort(-1, descending=True)
        drop = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered >= top_p)
        z = z.masked_fill(drop, float("-inf"))
    logprobs = z - z.logsumexp(-1, keepdim=True)  # (B, V)
    # in float64, as 152k probabilities of float32 do not add up to 1; in two steps, a block of ids and the id in it, as most
    # blocks are then only added up
    blocks = F.pad(logprobs, (0, -z.shape[-1] % BLOCK), value=float("-inf")).exp().unflatten(-1, (-1, BLOCK))  # (B, V / BLOCK, BLOCK)
    mass = blocks.sum(-1).double()
    block, goal = _invert(mass, uniform.double() * mass.sum(-1))
    inside = blocks[torch.arange(len(z), device=z.device), block].double()  # (B, BLOCK)
    ids = block * BLOCK + _invert(inside, goal / mass.gather(-1, block[:, None])[:, 0] * inside.sum(-1))[0]
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def _invert(mass: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of mass (B, K) first exceeds goal (B,), and how far into that entry; never at an entry of 0."""
    total = mass.cumsum(-1)
    index = torch.searchsorted(total, torch.minimum(goal, total[:, -1] * (1 - 1e-15))[:, None], right=True)
    return index[:, 0], goal - (total.gather(-1, index) - mass.gather(-1, index))[:, 0]


# ---------------------------------------------------------------------------------------------------------------- vLLM


# vLLM reads these when it is imported: the engine in this process; no threads bound, which would leave torch with one
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} | dict(os.environ) | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def no_vllm(policy: Policy) -> str:
    """Why vLLM cannot sample from this policy on this machine; "" where it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    for adapter in policy.model.peft_config.values() if policy.lora else ():
        if adapter.use_dora or adapter.modules_to_save or adapter.bias != "none":
            return "vLLM gets plain LoRA only, no DoRA, biases or modules_to_save"
    if policy.device.type == "cpu":
        if torch.version.cuda:
            return "vLLM for GPUs is installed, and this runs on the CPU"
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        head = getattr(policy.config, "head_dim", None) or policy.config.hidden_size // policy.config.num_attention_heads
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if head not in sizes:
            return f"vLLM on a CPU takes attention heads of {', '.join(map(str, sizes))}, not {head}"
    return ""


def make_sampler(policy: Policy, s, longest: int):
    """The sampler that --sampler asks for, with a line that says which and why. longest: tokens of prompt + response."""
    why = "--sampler=torch" if s.sampler == "torch" else no_vllm(policy)
    if why and s.sampler == "vllm":
        raise InputError(f"--sampler=vllm: {why}; use --sampler=torch")
    if why:
        print(f"sampler: plain PyTorch ({why})", flush=True)
        return TorchSampler(policy, s.sampler_rows)
    start = time.perf_counter()
    sampler = VLLMSampler(policy, longest, rows=s.sampler_rows, memory_fraction=s.gpu_memory_fraction, push=s.push)
    swap = "adapters" if sampler.serves_adapter else "all weights" + (", LoRA merged in" if policy.lora else "")
    print(f"sampler: vLLM in this process ({'asked for' if s.sampler == 'vllm' else 'it is installed'}), swaps "
          f"{swap}; built in {time.perf_counter() - start:.0f} s", flush=True)
    return sampler


@torch.no_grad()
def plain_weights(policy: Policy, shapes: dict[str, torch.Size], merge: bool = True):
    """The policy as the plain model of its architecture: (name, tensor) for every entry of `shapes`, one at a time.

    Names of tied weights are all there: an engine that gets the embedding alone keeps a stale head, and says nothing.
    LoRA is merged out of place, W + scale * B A in float32: the base is never written, so it cannot drift. A 4-bit base
    is dequantised to a copy. merge=False leaves LoRA out. Raises InputError where a tensor is not what the engine needs.
    """
    base = policy.model.get_base_model() if policy.lora else policy.model
    for name, shape in shapes.items():
        path, _, key = name.rpartition(".")
        module = base.get_submodule(path)
        layer = getattr(module, "base_layer", module)  # peft puts its layer around the plain one
        tensor = getattr(layer, key)
        if hasattr(tensor, "quant_state"):
            import bitsandbytes

            tensor = bitsandbytes.functional.dequantize_4bit(tensor.data, tensor.quant_state)
        tensor = whole(tensor)
        if merge and key == "weight" and layer is not module:
            for adapter in module.active_adapters:
                a, b = (whole(side[adapter].weight).float() for side in (module.lora_A, module.lora_B))
                tensor = tensor.float() + module.scaling[adapter] * (b @ a)
        if layer in (policy.head, base.get_input_embeddings()):
            tensor = tensor[:policy.vocab]  # the ids beyond are masked in the trainer; the engine does not have them
        if tensor.shape != shape or not tensor.is_floating_point():
            raise InputError(f"weight swap: {name} is {tuple(tensor.shape)} of {tensor.dtype}, the engine needs floats of {tuple(shape)}")
        yield name, tensor.to(policy.compute_dtype)


@contextlib.contextmanager
def globals_kept():
    """vLLM reseeds the global generators and replaces torch.set_num_threads on a CPU: put back what was there."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    yield
    torch.set_num_threads = set_threads
    torch.set_num_threads(threads)
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def refuse_expandable_segments(environment) -> None:
    """vLLM's sleep mode takes memory from CUDA in a way that expandable segments break."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise InputError(f"{name}={environment[name]}: vLLM cannot free its memory with expandable_segments; unset it, "
                             "or use --sampler=torch")


def canary(gaps: np.ndarray, policy: Policy, temperature: float) -> tuple[float, float]:
    """Mean and largest |gap| of sampler and trainer log-probs of the same tokens; InputError beyond what numerics explain.

    The limit is on the mean: in bfloat16 single rare tokens may differ by more than 1. float32 on a CPU: at most 6e-5 on
    tiny models and 9e-5 on SmolLM2 (measured), so 1e-3 leaves room and still sees one layer that missed a few updates.
    bfloat16, with other kernels in the engine: 0.01 to 0.03 is what others report, so 0.1; that sees weights or an adapter
    that never arrived (whole nats), but not one stale layer after an update at lr 1e-6: watch mismatch_mean grow for that.
    Temperature divides logits, and so their errors.
    """
    gaps = np.abs(gaps)
    mean, largest = float(gaps.mean()), float(gaps.max())
    exact = policy.compute_dtype == torch.float32 and policy.device.type == "cpu"
    limit = (1e-3 if exact else 0.1) / min(temperature or 1.0, 1.0)
    if not mean <= limit:  # NaN fails as well
        raise InputError(f"canary: log-probs of vLLM and of the trainer differ by {mean:.2g} nats per token, {largest:.2g} at "
                         f"most; rounding explains {limit:.2g}. vLLM does not sample from the policy: weights or an adapter "
                         "did not arrive, or its cache is stale. Nothing was trained on these answers; --sampler=torch goes on")
    return mean, largest


class VLLMSampler:
    """vLLM in the trainer's own process, hence no child processes. Same surface and samples' meaning as TorchSampler.

    The engine never reads a checkpoint: it starts with dummy weights and has no answer before the first push. Its
    vocabulary ends where the tokenizer's does. longest: tokens of prompt + response; rows: decoded at a time;
    memory_fraction: of the GPU, for weights and KV cache while awake; push: "merged" weights or the "adapter" alone.
    """

    name = "vllm"

    def __init__(self, policy: Policy, longest: int, rows: int = 256, memory_fraction: float = 0.4, push: str = "merged"):
        self.policy, self.on_gpu = policy, policy.device.type == "cuda"
        self.serves_adapter = push == "adapter"
        if self.serves_adapter and not policy.lora:
            raise InputError("--push=adapter: there is no adapter; it needs --lora_rank")
        # level 2 drops the engine's weights, the next wake brings all of them; an adapter alone needs the base kept (1)
        self.level, self.request, self.pushes = 1 if self.serves_adapter else 2, None, 0
        self.proven, self.mismatch, self.swap_seconds = False, (0.0, 0.0), 0.0
        if self.on_gpu:
            refuse_expandable_segments(os.environ)
        with globals_kept():
            self._build(longest, rows, memory_fraction)
        self._check_names()
        if self.serves_adapter:
            self._reload(merge=False)
        self.sleep()

    def _build(self, longest: int, rows: int, memory_fraction: float) -> None:
        """(1) The engine, from the policy's architecture alone."""
        from vllm import LLM

        config = copy.deepcopy(self.policy.config)
        config.vocab_size, config.dtype, config.pad_token_id = self.policy.vocab, self.policy.compute_dtype, None
        if hasattr(config, "quantization_config"):  # a 4-bit base is pushed dequantised
            del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(plain).__name__]
        self.shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
        options = {}
        if self.serves_adapter:
            rank = next(iter(self.policy.model.peft_config.values())).r
            options |= dict(enable_lora=True, max_loras=1, max_lora_rank=next(r for r in (8, 16, 32, 64, 128, 256, 512) if r >= rank))
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options |= dict(distributed_executor_backend="external_launcher")  # one engine per rank, on the trainer's group
        if self.on_gpu:
            options |= dict(enable_sleep_mode=True, gpu_memory_utilization=memory_fraction)
        else:  # no sleep mode, no graphs; prompts whole: vLLM 0.32 cannot split a seeded request's prompt on a CPU. A prompt's
            # whole blocks are computed once for its n samples; the usual block of 128 is longer than many prompts
            options |= dict(enforce_eager=True, kv_cache_memory_bytes=1 << 30, enable_chunked_prefill=False, block_size=32,
                            max_num_batched_tokens=max(longest, 4096))
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
                           dtype=str(self.policy.compute_dtype)[6:], max_model_len=longest, max_num_seqs=rows,
                           enable_prefix_caching=True, logprobs_mode="processed_logprobs", seed=0, **options)

    def _check_names(self) -> None:
        """Every weight of the engine must be in what push() sends; one left out would keep its old value without a word."""
        packed, names = self.llm.apply_model(lambda model: (getattr(model, "packed_modules_mapping", {}),
                                                            [name for name, _ in model.named_parameters()]))[0]
        for name in names:
            name = name.replace(".base_layer.", ".")
            path, module, key = ["", *name.rsplit(".", 2)][-3:]
            parts = [f"{path}.{part}.{key}" for part in packed.get(module, [])] or [name]  # q_proj, k_proj, v_proj -> qkv_proj
            if ".lora_" not in name and not set(parts) <= set(self.shapes):
                raise InputError(f"vLLM's {name} is no weight of {self.policy.config.model_type} in transformers; use --sampler=torch")

    def _reload(self, merge: bool) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(self.policy, self.shapes, merge)})

    def push(self) -> None:
        """(2) Send the policy's weights, or its adapter, into the engine. wake() calls this."""
        self.pushes += 1
        if not self.serves_adapter:
            self._reload(merge=True)
            return
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:
            sharded = isinstance(next(self.policy.model.parameters()), DTensor)
            self.policy.model.save_pretrained(folder, state_dict=whole_weights(self.policy, everywhere=True) if sharded else None)
            if self.request is not None:
                self.llm.llm_engine.remove_lora(self.request.lora_int_id)
            # ever new names and ids: under a known one the engine goes on with the adapter, and the cache, that it has
            self.request = LoRARequest(f"push-{self.pushes}", self.pushes, folder)
            if not self.llm.llm_engine.add_lora(self.request):
                raise RuntimeError("vLLM did not load the adapter")

    def wake(self) -> None:
        """Memory for the weights, the weights, then memory for the KV cache, so that copies in flight have room."""
        start = time.perf_counter()
        self._free()
        self.llm.wake_up(tags=["weights"])
        self.push()
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM kept its prefix cache: a request is still running")
        self._free()
        self.llm.wake_up(tags=["kv_cache"])
        self.proven, self.swap_seconds = False, time.perf_counter() - start

    def sleep(self) -> None:
        self.llm.sleep(level=self.level)

    def _free(self) -> None:
        if self.on_gpu:  # vLLM maps memory that torch's cache does not know of: give back what is only cached
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], *, max_tokens: int, temperature: float,
                 top_p: float = 1.0, progress: str | None = None) -> list[list[Sample]]:
        """(3) As TorchSampler.generate. Sample i has seed + i: seeds must be far apart, as derive_seed's are."""
        from vllm import SamplingParams

        copies = n if temperature > 0 else min(n, 1)  # greedy samples are all the same one
        if not copies or not prompts:
            return [[] for _ in prompts]
        stops = [i for i in self.policy.stop_ids if i < self.policy.vocab]
        params = [SamplingParams(n=copies, seed=seed, temperature=temperature, top_p=top_p, max_tokens=max_tokens, logprobs=0,
                                 stop_token_ids=stops, ignore_eos=True, detokenize=False) for seed in seeds]
        with globals_kept():  # its CPU kernel takes from torch's global generator, beside the seeds
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=bool(progress),
                                        lora_request=self.request)
        samples = [[Sample(list(x.token_ids), x.finish_reason, [top[i].logprob for i, top in zip(x.token_ids, x.logprobs)])
                    for x in output.outputs] for output in outputs]
        if not self.proven:
            self._prove(prompts, samples, temperature, top_p)
        return [(group * n)[:n] for group in samples]

    @torch.no_grad()
    def _prove(self, prompts, samples, temperature, top_p) -> None:
        """(4) The canary: one answer to each of 8 prompts, spread over the batch, must have the trainer's log-probs."""
        gaps = []
        for p in np.linspace(0, len(prompts) - 1, 8).astype(int):  # one at a time: long answers fit; always 8: ranks keep pace
            x = samples[p][0]
            ours = response_logprobs(self.policy, [prompts[p]], [x.ids], temperature or 1.0)[0][0].cpu().numpy()
            gap = np.array(x.logprobs) - ours
            gaps.append(gap - gap.clip(0, -np.log(top_p)))  # top_p < 1 renormalises what is left: by at most -log(top_p)
        self.mismatch, self.proven = canary(np.concatenate(gaps), self.policy, temperature), True
