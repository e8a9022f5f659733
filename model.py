"""model.py: the policy, its log-probs, the clipped token-mean loss, the optimizer, checkpoints.

Used by rlep.py and sampler.py, no command line of its own.

Legend: P prompts, G fresh rollouts, M replays, B rows, T tokens, S tokens of a micro-batch packed end to end, N response
tokens, H hidden size, V vocabulary. Tensors carry their shape in a comment.

What is fast sits in attention.py and in HeadLogprobs; tests/test_model.py holds both to the plain computation, a row at a
time through transformers' own forward.

Where this departs from the reference implementation:
- the loss has one denominator, the response tokens of the whole mini-batch; the reference averages per micro-batch;
- rows are packed without padding, so no id is taken for a pad: a model whose pad is its EOS still learns to stop;
- logits of ids that the tokenizer does not know are masked, in the sampler and in the trainer alike;
- stop ids are the union of the tokenizer's and the generation config's: what ends a rollout, ends a replay and is
  trained on is the same id.
"""
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import types
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed.checkpoint as sharded_checkpoint
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import ranks
from attention import pack
from data import InputError

transformers_logging.disable_progress_bar()  # loading and saving are quick beside the rest
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says on a CPU that a faster kernel could be had

NOT_FINITE_LIMIT = 10  # one such gradient is skipped and counted; as many in a row are no accident
LOGITS_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 26}  # elements of float32 logits alive at a time, by device (64, 256 MiB): never all


def derive_seed(*parts: object) -> int:
    """A 62-bit seed from its parts. Hashed, so that neighbouring steps and questions get seeds far apart."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 2


# ---------------------------------------------------------------------------------------------------------- the policy


@dataclass
class Policy:
    """A causal LM with what the loop must know about it."""

    model: torch.nn.Module  # a Hugging Face model, or a PeftModel around one
    tokenizer: object
    stop_ids: list[int]  # ids that end a response; the tokenizer's own EOS first
    vocab: int  # ids below this are known to the tokenizer; logits above are masked
    device: torch.device
    compute_dtype: torch.dtype  # of activations; trainable weights are always float32
    lora: bool
    not_finite: int = 0  # gradients in a row that were not finite

    def __post_init__(self):
        inner = self.model.get_base_model() if self.lora else self.model
        self.decoder, self.head = inner.get_decoder(), inner.get_output_embeddings()
        self.config = inner.config
        self.score = functools.partial(_flat_logprobs, self)

    def autocast(self):
        """Matrix products in compute_dtype; a no-op in float32. Weights are cast anew at each use: copies of
        all of them would be kept where no gradient needs them."""
        on = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=False) if on else contextlib.nullcontext()

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def adapter_base(path: str) -> str | None:
    """The base model that an adapter folder names; None if `path` is no adapter folder."""
    config = os.path.join(path, "adapter_config.json")
    if not os.path.isfile(config):
        return None
    with open(config) as f:
        return json.load(f)["base_model_name_or_path"]


def load_tokenizer(path: str):
    """The tokenizer of a model folder or hub name, or of an adapter folder or its base. Raises InputError."""
    if not os.path.isdir(path) and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise InputError(f"--model={path}: no such folder")
    base = adapter_base(path)
    if base and not os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        path = base
    own = os.path.join(path, "tokenizer_config.json")
    if os.path.isfile(own):
        with open(own) as f:  # AutoTokenizer would put the model type's class in its place: a Qwen2 with another tokenizer
            if json.load(f).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
                return PreTrainedTokenizerFast.from_pretrained(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise InputError(f"--model={path}: no tokenizer there: {str(e).splitlines()[0]}") from None


def stop_ids(model, tokenizer) -> list[int]:
    """Ids that end a response: the tokenizer's EOS and every EOS of the generation config.

    Qwen2.5 base models name <|endoftext|> in one place and <|im_end|> in the other; a model that stops on the one that
    is not looked for seems to be truncated always.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    if not ids:
        raise InputError("neither the tokenizer nor the generation config of this model names an EOS id; set one")
    return ids


def load_policy(path: str, *, lora_rank: int = 0, lora_alpha: int = 32, load_4bit: bool = False, device: str = "auto",
                compute_dtype: str = "auto", activation_checkpointing: bool = False, train: bool = True) -> Policy:
    """Load a Hugging Face causal LM, or a peft adapter on its base, from a folder or by hub name.

    Trainable weights are float32 whatever the checkpoint holds: at lr 1e-6, bfloat16 AdamW moves 2% of the weights in
    20 steps. A frozen base (LoRA) is kept in compute_dtype, or with load_4bit in NF4 (QLoRA). Dropout is off throughout, so that old and new log-probs
    come from the same function. Raises InputError where the model cannot be loaded or its head is not a plain matrix.
    """
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if compute_dtype == "auto":
        compute_dtype = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, compute_dtype)
    tokenizer = load_tokenizer(path)
    path = os.path.abspath(path) if os.path.isdir(path) else path  # an adapter names its base for good
    adapter = adapter_base(path)
    base, full, options = adapter or path, train and not lora_rank and not adapter, {}
    if load_4bit:
        if full:
            raise InputError("--load_4bit: 4-bit weights do not train; add --lora_rank=32, or start from an adapter")
        options = dict(device_map={"": device}, quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype))
    sharded = train and ranks.RANKS > 1
    if sharded and load_4bit:
        raise InputError("--load_4bit: a 4-bit base cannot be sharded over ranks; run it in one process, or leave --load_4bit out")
    try:  # to be sharded: as the file has it, on the CPU, where the ranks of a node share the file's pages
        model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rlep", dtype=("auto" if sharded else torch.float32) if full else dtype, **options)
    except (OSError, ValueError) as e:
        raise InputError(f"--model={base}: cannot load this model: {str(e).splitlines()[0]}") from None
    stops = stop_ids(model, tokenizer)
    if adapter or lora_rank:
        from peft import LoraConfig, PeftModel, get_peft_model

        if adapter:
            model = PeftModel.from_pretrained(model, path, is_trainable=train)
            if train and lora_rank and lora_rank != model.peft_config["default"].r:
                raise InputError(f"--lora_rank={lora_rank}: the adapter in {path} has rank {model.peft_config['default'].r}")
        else:  # every matrix but the head; B starts at zero, so the adapted model starts as the base
            model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=lora_alpha, lora_dropout=0.0,
                                                     target_modules="all-linear", task_type="CAUSAL_LM"))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
        elif hasattr(module, "support_avx512bf16_for_cpu"):  # 4-bit: on some CPUs bitsandbytes would repack the weights in
            module.support_avx512bf16_for_cpu = False  # place for inference, rounded and in an order nothing else reads
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    place = torch.device("cpu") if sharded else device
    model.to(place).train(activation_checkpointing)  # checkpointing acts in train mode only; without dropout both agree
    policy = Policy(model, tokenizer, stops, min(len(tokenizer), model.get_output_embeddings().weight.shape[0]), place,
                    dtype, bool(adapter or lora_rank))
    _check(policy, path)
    if sharded:
        shard(policy, device)
        if full:
            model.float()  # of the share only
    return policy


def shard(policy: Policy, device: torch.device) -> None:
    """FSDP2: of every weight, gradient and moment each rank keeps its share, in float32; the weights of one layer at a time
    are gathered to compute with, in compute_dtype. Embedding and head are one group, so that tied ones stay one tensor; it is
    gathered in float32, so that its gradient stays float32. Gradients are reduced and added up in float32, as in one
    process; in bfloat16 the one difference is that the states between layers are bfloat16 here and float32 there."""
    options, layers = dict(mesh=ranks.mesh(device.type), reshard_after_forward=True), {}
    if policy.compute_dtype != torch.float32:
        layers["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    for layer in next(m for m in policy.decoder.children() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer, **options, **layers)
    fully_shard(policy.model, **options)
    policy.device = device
    # FSDP2 gathers at forward(); our way in is _flat_logprobs
    policy.model.score = types.MethodType(lambda model, *args: _flat_logprobs(policy, *args), policy.model)
    register_fsdp_forward_method(policy.model, "score")
    policy.score = policy.model.score


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP2 may have sharded. A collective: all ranks ask for the same ones in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(policy: Policy, everywhere: bool = False) -> dict[str, torch.Tensor]:
    """All weights of a sharded policy on the CPU (LoRA: the adapter's), tied ones once in memory. All ranks call it
    together; the result is the first rank's alone, the others get {} (unless everywhere)."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in policy.model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or not policy.lora:
            names.setdefault(tensor, []).append(name)
    weights = {}
    for tensor, known_as in names.items():
        gathered = whole(tensor.detach())
        if ranks.FIRST or everywhere:
            weights |= dict.fromkeys(known_as, gathered.cpu())
    return weights


@torch.no_grad()
def _check(policy: Policy, path: str) -> None:
    """The log-probs below pack tokens and apply the head themselves: refuse an architecture for which that gives others than
    its own forward."""
    tokens = [i % policy.vocab for i in range(5, 25)]
    prompts, responses = [tokens[:3], tokens[:3], tokens[4:9]], [tokens[9:17], tokens[5:7], tokens[17:]]
    refusal = InputError(f"--model={path}: the log-probs of this architecture ({policy.config.model_type}) are not those of its own "
                         "forward: its head is no plain matrix, it changes its logits after it, or its attention takes no packed tokens; see _check in model.py")
    if type(policy.head) is not torch.nn.Linear or policy.head.bias is not None:  # HeadLogprobs takes the weight alone
        raise refusal
    try:
        ours, _, _ = response_logprobs(policy, prompts, responses, 1.0)
    except (RuntimeError, TypeError):
        raise refusal from None
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        with policy.autocast():
            z = policy.model(input_ids=torch.tensor([prompt + response], device=policy.device), use_cache=False).logits[0, len(prompt) - 1:-1]
        own = z[:, :policy.vocab].float().log_softmax(-1).gather(-1, torch.tensor(response, device=policy.device)[:, None])[:, 0]
        if not torch.allclose(ours[i, :len(response)], own, atol=1e-3 if policy.compute_dtype == torch.float32 else 0.2, rtol=0):
            raise refusal


# ----------------------------------------------------------------------------------------------- log-probs and the loss


def logits(policy: Policy, out: torch.Tensor, temperature: float) -> torch.Tensor:
    """What the head puts out (N, V), used up, as float32 logits (N, K) of the sampling distribution: of the K ids that the
    tokenizer knows, over temperature. The rows left out pad the matrix to a round size; no such id could be decoded.

    The one definition of the policy's distribution: the sampler and the trainer both call it.
    """
    return out.float()[:, :policy.vocab].div_(temperature)


class HeadLogprobs(torch.autograd.Function):
    """hidden (N, H), the head's weight (V, H), targets (N,) -> log-probs (N,) of the targets, and the entropy (N,) of each
    distribution in nats, without gradient, or None. LOGITS_CHUNK logits at a time, computed again in the backward pass.

    d logprob / d z = (one-hot(target) - softmax(z)) / temperature, z the head's output. Products are in policy.compute_dtype; the
    weight's gradient adds up in one float32 buffer (V, H) (in bfloat16 it would be 5% off with 500 chunks), and there is none for a frozen weight (LoRA).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, policy, temperature, with_entropy):
        w, rows = weight.to(policy.compute_dtype), max(1, LOGITS_CHUNK[hidden.device.type] // len(weight))

        def chunk(h, t):  # a function, so that its logits are gone when the next ones come; here and below all in place
            z = logits(policy, F.linear(h.to(w.dtype), w), temperature)  # (n, K)
            top = z.amax(-1, keepdim=True)  # (n, 1)
            at_target = z.sub_(top).gather(-1, t[:, None])
            p = z.exp() if with_entropy else z.exp_()  # but for the factor 1 / total
            total = p.sum(-1, keepdim=True)
            entropy = total.log() - p.mul_(z).sum(-1, keepdim=True) / total if with_entropy else total
            return at_target - total.log(), top, total, entropy

        logprobs, top, total, entropy = map(torch.cat, zip(*map(chunk, hidden.split(rows), targets.split(rows))))  # (N, 1) each
        logprobs, entropy = logprobs[:, 0], entropy[:, 0]
        ctx.save_for_backward(hidden, weight, targets, top, total)  # softmax: exp(z - top) / total, without the rounding of a log
        ctx.policy, ctx.temperature, ctx.rows = policy, temperature, rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, targets, top, total = ctx.saved_tensors
        w, known, grad = weight.to(ctx.policy.compute_dtype), ctx.policy.vocab, (grad / ctx.temperature)[:, None]
        minus, grad_hidden = -grad / total, torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for n in (slice(i, i + ctx.rows) for i in range(0, len(hidden), ctx.rows)):
            h = hidden[n].to(w.dtype)
            z = logits(ctx.policy, F.linear(h, w), ctx.temperature)  # (n, K)
            z = z.sub_(top[n]).exp_().mul_(minus[n]).scatter_add_(1, targets[n, None], grad[n]).to(w.dtype)
            grad_hidden[n] = z @ w[:known]
            if grad_weight is not None and w.dtype == torch.float32:
                grad_weight[:known].addmm_(z.T, h)
            elif grad_weight is not None:
                grad_weight[:known] += z.T @ h
            del z
        return grad_hidden, grad_weight, None, None, None, None


def _flat_logprobs(policy, packed, source, targets, temperature, with_entropy):
    """Log-probs (N,) of the targets (N,), each predicted by the state at `source` (N,) of the packed tokens, and entropies
    (N,) or None."""
    with policy.autocast():
        hidden = policy.decoder(input_ids=packed.ids[None], position_ids=packed.positions[None], attention_mask=packed.ids.new_ones(1, 1, 1, 1),
                                use_cache=False, packed=packed).last_hidden_state[0]  # (S, H)
        hidden = hidden.index_select(0, source)  # (N, H)
        return HeadLogprobs.apply(hidden, policy.head.weight, targets, policy, temperature, with_entropy)


def response_logprobs(policy: Policy, prompts: list[list[int]], responses: list[list[int]], temperature: float,
                      with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probs of response tokens under the policy at `temperature` (paper eq. 4: pi_theta(o_t | q, o_<t)).

    prompts, responses: B lists of token ids. Returns logprobs (B, T), response_mask (B, T) bool and entropy (B, T) or
    None, T the longest response; positions outside the mask are 0. Tokens are packed: each distinct prompt is computed once
    for all its rows, nothing is padding, and a row's values do not depend on the other rows. Only positions that predict a
    response token go through the head, LOGITS_CHUNK logits at a time, recomputed in the backward pass.

    With several ranks a collective: all call it equally often, one that has nothing to do with a row without response.
    """
    packed, order = pack(prompts, responses, policy.device)
    lengths = torch.tensor([len(r) for r in responses], device=policy.device)
    response_mask = torch.arange(int(lengths.max()), device=policy.device) < lengths[:, None]  # (B, T)
    # the one shift: a token is predicted by the state before it, the first one by the prompt's last
    source = [i for row in order for i in packed.before[row][:len(responses[row])]]
    targets = [i for row in order for i in responses[row]]
    slot = [row * response_mask.shape[1] + t for row in order for t in range(len(responses[row]))]
    source, targets, slot = (torch.tensor(x, dtype=torch.long, device=policy.device) for x in (source, targets, slot))  # (N,) each
    flat, flat_entropy = policy.score(packed, source, targets, temperature, with_entropy)

    def unflatten(flat):  # (N,) -> (B, T), zeros outside the mask
        return torch.zeros(response_mask.numel(), device=policy.device).index_copy(0, slot, flat.float()).view(response_mask.shape)

    return unflatten(flat), response_mask, unflatten(flat_entropy) if with_entropy else None


def policy_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor,
                denominator: float, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 10.0,
                ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped token-mean loss (paper eq. 4, negated; dual clip as in the reference).

    logprobs, old_logprobs, response_mask: (B, T); advantages: (B,), or (B, T) when tokens are weighted.
    denominator: response tokens of the *whole mini-batch over all ranks*, so that micro-batches add up to the token mean.

        rho = exp(logprobs - old_logprobs)
        loss_t = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A);  for A < 0 at most dual_clip |A|

    Returns the loss (scalar) and sums over tokens, to be divided by token counts by the caller: "ratio", "clip_low",
    "clip_high", "clip_dual" (tokens where that bound is active), each (B,).
    """
    mask = response_mask.bool()
    adv = (advantages if advantages.dim() == 2 else advantages[:, None]).to(logprobs.dtype).expand_as(logprobs)  # (B, T)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)  # padding may hold anything, even NaN
    ratio = log_ratio.exp()
    plain, clipped = -ratio * adv, -ratio.clamp(1 - clip_low, 1 + clip_high) * adv
    token_loss = torch.maximum(plain, clipped)
    bounded = torch.where(adv < 0, torch.minimum(token_loss, -dual_clip * adv), token_loss)
    loss = torch.where(mask, bounded, 0.0).sum() / max(float(denominator), 1.0)
    with torch.no_grad():
        active = mask & (clipped > plain)
        stats = {"ratio": torch.where(mask, ratio, 0.0).sum(-1),
                 "clip_high": (active & (adv > 0)).sum(-1).float(),
                 "clip_low": (active & (adv < 0)).sum(-1).float(),
                 "clip_dual": (mask & (adv < 0) & (token_loss > -dual_clip * adv)).sum(-1).float()}
    return loss, stats


# ----------------------------------------------------------------------------------------------------------- optimizer


def make_optimizer(policy: Policy, lr: float, weight_decay: float, beta1: float, beta2: float, eight_bit: bool = False):
    """AdamW on float32 master weights. eight_bit keeps its moments in 8 bits, on a GPU in pages that the host may take."""
    if eight_bit:
        if ranks.RANKS > 1:
            raise InputError("--optimizer_8bit: 8-bit moments cannot be sharded over ranks; leave it out, sharding saves more")
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

        kind = PagedAdamW8bit if policy.device.type == "cuda" else AdamW8bit
        return kind(policy.parameters(), lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, fused=True)


def optimizer_step(policy: Policy, optimizer, max_norm: float) -> float:
    """Clip the gradient to max_norm and step. A gradient that is not finite changes nothing. Returns its norm."""
    norm = float(whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)))
    if np.isfinite(norm) and norm > 0:  # norm 0: no token had a signal; weight decay and momentum rest as well
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    policy.not_finite = 0 if np.isfinite(norm) else policy.not_finite + 1
    if policy.not_finite >= NOT_FINITE_LIMIT:
        raise InputError(f"{policy.not_finite} gradients in a row were not finite and changed nothing: the run is broken; start "
                         "again with a lower --lr or --grad_clip, or with --dtype=float32")
    return norm


def checkpoint_bytes(policy: Policy, optimizer) -> int:
    """What save_checkpoint writes on all ranks together, or a little less: the tokenizer and headers come on top."""
    weights = policy.parameters() if policy.lora else set(policy.model.parameters())
    moments = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    return sum(x.numel() * x.element_size() for x in [*weights, *moments])


# --------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(policy: Policy, folder: str, optimizer=None, state: dict | None = None) -> None:
    """Write an ordinary Hugging Face folder (or peft adapter) with tokenizer, and trainer.pt to resume from. With several
    ranks each writes its share of the optimizer's state into optimizer/, and the first one the rest.

    Written beside, flushed to disk, renamed whole: after a crash the folder is complete or absent.
    """
    tmp, several = folder + ".tmp", isinstance(next(policy.model.parameters()), DTensor)
    ranks.first(shutil.rmtree, tmp, True)
    weights = whole_weights(policy) if several else None
    if several and optimizer is not None:
        moments = {str(i): values for i, values in optimizer.state_dict()["state"].items()}
        sharded_checkpoint.save(moments, checkpoint_id=os.path.join(tmp, "optimizer"))
    ranks.first(_save_rest, policy, folder, weights, optimizer, state or {})


def _save_rest(policy, folder, weights, optimizer, state) -> None:
    tmp = folder + ".tmp"
    policy.model.save_pretrained(tmp, state_dict=weights)
    policy.tokenizer.save_pretrained(tmp)
    if optimizer is not None:
        moments = {"optimizer": optimizer.state_dict()} if weights is None else {}
        torch.save({**moments, "torch_rng": torch.get_rng_state(), **state}, os.path.join(tmp, "trainer.pt"))
    for root, _, names in os.walk(tmp):
        for name in names:
            with open(os.path.join(root, name), "rb") as f:
                os.fsync(f.fileno())
    os.rename(tmp, folder)


def load_trainer_state(folder: str, optimizer) -> dict:
    """Restore the optimizer and torch's RNG from a checkpoint; returns the loop's own state. The weights are the folder.
    A checkpoint of any number of ranks goes on with any other."""
    state = torch.load(os.path.join(folder, "trainer.pt"), weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state.pop("optimizer", None) or {"param_groups": optimizer.state_dict()["param_groups"], "state": {}}
    for i, values in saved["state"].items():  # one process wrote these whole
        if isinstance(parameters[i], DTensor):
            saved["state"][i] = {name: v if v.dim() == 0 else distribute_tensor(v.to(parameters[i].device), parameters[i].device_mesh,
                                 parameters[i].placements, src_data_rank=None) for name, v in values.items()}
    shares = os.path.join(folder, "optimizer")
    if os.path.isdir(shares):  # several ranks wrote these; every rank reads what its share is now
        known = sharded_checkpoint.FileSystemReader(shares).read_metadata().state_dict_metadata
        for i, p in enumerate(parameters):
            if f"{i}.step" in known:
                saved["state"][i] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p.detach()), "exp_avg_sq": torch.zeros_like(p.detach())}
        sharded_checkpoint.load({str(i): values for i, values in saved["state"].items()}, checkpoint_id=shares)
    optimizer.load_state_dict(saved)
    torch.set_rng_state(state.pop("torch_rng"))
    return state
