"""rlep.py: RLEP, reinforcement learning with experience replay (arXiv 2507.07451), the whole loop.

    python rlep.py train   --model=BASE --data=train.jsonl --out=runs/baseline                # 1. the GRPO baseline
    python rlep.py collect --model=runs/baseline --data=train.jsonl --pool=pool.jsonl         # 2. its verified answers
    python rlep.py train   --model=BASE --data=train.jsonl --pool=pool.jsonl --replay=2 --out=runs/rlep   # 3. RLEP
    python rlep.py eval    --model=runs/rlep --data=test.jsonl --samples=32                   # avg@k, maj@k, pass@k

A baseline differs from RLEP in --replay alone. Read train() first: one step is eight short blocks, replay is the third.

Where this departs from the reference implementation, each with a test:
- a question with fewer than M stored answers gets fewer replays, not empty dummies that shift its group's mean;
- mini-batches are counted in questions, so that RLEP takes as many updates per step as its baseline;
- the loss has one denominator per mini-batch; a replayed answer keeps its verified reward, is never cut, and is drawn as
  a pure function of (seed, step, question); every metric is for fresh answers, with the replayed ones beside.

Legend: P questions per step, G fresh rollouts and M replays per question, B rows, T tokens.
"""
import dataclasses
import difflib
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm

import model as M
from data import InputError, load_questions, prompt_ids
from replay import Pool, fingerprint
from verify import Verifier, canonical, extract_answer

# ------------------------------------------------------------------------------------------------------------ settings


def option(default, commands: str, group: str, text: str):
    """A field of Settings: its default, the commands that use it (t rain, c ollect, e val), its group and help text."""
    return field(default=default, metadata={"commands": commands, "group": group, "help": text})


@dataclass
class Settings:
    """Every setting, flat. Defaults are the paper's for Qwen2.5-Math-7B; run_small.sh passes smaller ones."""

    model: str = option("", "tce", "model", "folder or hub name of a causal LM, an adapter folder, or a run folder (its newest checkpoint)")
    lora_rank: int = option(0, "t", "model", "rank of LoRA adapters on every matrix but the head; 0 trains all weights")
    lora_alpha: int = option(32, "t", "model", "LoRA scale: the update is alpha / rank * B A")
    device: str = option("auto", "tce", "model", "auto, cpu or cuda")
    dtype: str = option("auto", "tce", "model", "of activations: auto (bfloat16 on a GPU), float32 or bfloat16; weights that train are float32")
    activation_checkpointing: bool = option(False, "t", "model", "recompute activations in the backward pass: less memory, a third more time")

    data: str = option("", "tce", "data", "questions: jsonl, parquet or hub names, several joined by commas (layouts: data.py)")
    eval_data: str = option("", "t", "data", "held-out questions for evaluation during training")
    max_questions: int = option(0, "tce", "data", "use the first this many questions only; 0 uses all")
    prompt_limit: int = option(1024, "tce", "data", "tokens; questions with a longer prompt are left out and counted")
    response_limit: int = option(3072, "tce", "data", "tokens; a response is cut there, and a longer stored one is not replayed")

    questions: int = option(512, "t", "rollout", "P: questions per step")
    rollouts: int = option(16, "t", "rollout", "G: fresh rollouts per question")
    temperature: float = option(1.0, "tce", "rollout", "of sampling, and of the log-probs in the loss; 0 is greedy (eval only)")
    top_p: float = option(1.0, "tce", "rollout", "nucleus sampling: keep the likeliest ids up to this probability")
    dynamic_sampling: bool = option(False, "t", "rollout", "DAPO: sample on until P groups have fresh rollouts both right and wrong")
    dynamic_tries: int = option(10, "t", "rollout", "batches of P questions to try per step under dynamic sampling")
    sampler_rows: int = option(256, "tce", "rollout", "responses decoded at a time by the plain PyTorch sampler")

    pool: str = option("", "tc", "replay", "JSONL file of verified answers: train draws from it, collect fills it")
    replay: int = option(0, "t", "replay", "M: stored answers added to each question's group; 0 is the GRPO baseline")
    replay_repeats: bool = option(False, "t", "replay", "fill up to M with repeats where a question has fewer distinct answers")
    replay_select: str = option("random", "t", "replay", "which answers: random, shortest, likeliest or unlikeliest")
    replay_hard: float = option(1.0, "t", "replay", "replay only where at most this share of the fresh rollouts is right; 1 replays everywhere")
    replay_failures: int = option(0, "t", "replay", "stored wrong answers added as well (negative replay; collect with --keep_failures)")

    overlong_buffer: int = option(512, "t", "reward", "tokens before response_limit over which the penalty grows; 0 is off")
    overlong_factor: float = option(1.0, "t", "reward", "penalty at response_limit")
    advantage_std: bool = option(True, "t", "reward", "divide advantages by the group's std; false is Dr. GRPO")
    verify_workers: int = option(2, "tce", "reward", "processes that verify answers")
    verify_seconds: float = option(1.0, "tce", "reward", "time limit of one verification; over it counts as wrong")

    mini_batch: int = option(64, "t", "loss", "questions per optimizer update")
    clip_low: float = option(0.2, "t", "loss", "eps_low: ratios are clipped below 1 - this")
    clip_high: float = option(0.28, "t", "loss", "eps_high: ratios are clipped above 1 + this")
    dual_clip: float = option(10.0, "t", "loss", "c: with a negative advantage a token's loss is at most c |A|")
    kl_coef: float = option(0.0, "t", "loss", "weight of a KL penalty to --model (k3 estimator); 0 is off")

    lr: float = option(1e-6, "t", "optimizer", "AdamW learning rate after warm-up")
    warmup: int = option(10, "t", "optimizer", "steps of linear warm-up")
    weight_decay: float = option(0.1, "t", "optimizer", "AdamW weight decay")
    beta1: float = option(0.9, "t", "optimizer", "AdamW beta1")
    beta2: float = option(0.999, "t", "optimizer", "AdamW beta2")
    grad_clip: float = option(1.0, "t", "optimizer", "largest norm of the gradient")
    micro_tokens: int = option(32768, "t", "optimizer", "tokens of a micro-batch, padding included; lower it when memory runs out")

    steps: int = option(400, "t", "run", "rollout steps")
    eval_every: int = option(5, "t", "run", "steps between evaluations")
    eval_samples: int = option(4, "t", "run", "samples per held-out question during training")
    save_every: int = option(20, "t", "run", "steps between checkpoints")
    keep: int = option(2, "t", "run", "newest checkpoints kept; 0 keeps all")
    samples: int = option(32, "ce", "run", "K: samples per question")
    min_correct: int = option(2, "c", "run", "questions with fewer correct samples stay out of the pool")
    keep_failures: bool = option(False, "c", "run", "store wrong answers too, for --replay_failures")
    seed: int = option(0, "tce", "run", "of data order, sampling and replay draws")
    out: str = option("", "te", "run", "run folder")
    overwrite: bool = option(False, "te", "run", "delete what --out holds from an earlier run and start again")


COMMANDS = {"train": "train a policy with GRPO, or with RLEP when --replay is given",
            "collect": "sample answers to every question and store the verified ones in the pool",
            "eval": "avg@k, maj@k and pass@k per data set"}
DEFAULTS = {"train": {}, "collect": {"samples": 64, "temperature": 0.7, "top_p": 0.95}, "eval": {}}  # the paper's
REQUIRED = {"train": ("model", "data", "out"), "collect": ("model", "data", "pool"), "eval": ("model", "data")}
RESUME_MAY_CHANGE = {"steps", "save_every", "keep", "overwrite", "verify_workers"}  # what does not touch the steps done


def fields_of(command: str) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(Settings) if command[0] in f.metadata["commands"]}


def help_text(command: str) -> str:
    lines = [f"python rlep.py {command} --name=value ...    {COMMANDS[command]}", ""]
    defaults, group = {**dataclasses.asdict(Settings()), **DEFAULTS[command]}, None
    for name, f in fields_of(command).items():
        if f.metadata["group"] != group:
            group = f.metadata["group"]
            lines.append(f"{group}:")
        value = "required" if name in REQUIRED[command] else str(defaults[name]).lower() if f.type is bool else defaults[name]
        lines.append(f"  --{name:<25} {f.metadata['help']} [{'none' if value == '' else value}]")
    return "\n".join(lines)


def parse_value(name: str, kind: type, text: str):
    """The option's text as int, float, bool or str; raises InputError with the kind that was expected."""
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise InputError(f"--{name}={text}: expected {wanted}") from None


def parse_settings(command: str, args: list[str]) -> Settings:
    """Command line to Settings. Raises InputError for an unknown, unused, repeated or ill-typed option."""
    known, every = fields_of(command), {f.name for f in dataclasses.fields(Settings)}
    values = {}
    for arg in args:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not name:
            raise InputError(f"{arg!r}: options are written --name=value; see python rlep.py {command} --help")
        if name not in known:
            if name in every:
                raise InputError(f"--{name}: not used by {command}; see python rlep.py {command} --help")
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise InputError(f"--{name}: unknown option; the nearest is --{near[0]}")
        if name in values:
            raise InputError(f"--{name}: given twice")
        if not equals and known[name].type is not bool:
            raise InputError(f"--{name}: needs a value, --{name}={known[name].default}")
        values[name] = parse_value(name, known[name].type, text if equals else "true")
    s = Settings(**{**DEFAULTS[command], **values})
    check_settings(command, s)
    return s


def check_settings(command: str, s: Settings) -> None:
    """Raise InputError for the first setting that makes no sense, and say what would."""
    at_least = {"questions": 1, "rollouts": 1, "prompt_limit": 1, "response_limit": 1, "sampler_rows": 1, "mini_batch": 1,
                "micro_tokens": 1, "steps": 1, "eval_every": 1, "eval_samples": 1, "save_every": 1, "samples": 1,
                "min_correct": 1, "verify_workers": 1, "dynamic_tries": 1, "lora_rank": 0, "lora_alpha": 1, "replay": 0,
                "replay_failures": 0, "max_questions": 0, "keep": 0, "overlong_buffer": 0, "overlong_factor": 0, "warmup": 0,
                "weight_decay": 0, "kl_coef": 0, "lr": 0, "temperature": 0, "seed": 0, "dual_clip": 1, "clip_low": 0, "clip_high": 0}
    choices = {"device": ("auto", "cpu", "cuda"), "dtype": ("auto", "float32", "bfloat16"),
               "replay_select": ("random", "shortest", "likeliest", "unlikeliest")}
    for name in fields_of(command):
        value = getattr(s, name)
        if name in REQUIRED[command] and not value:
            raise InputError(f"--{name} is required; see python rlep.py {command} --help")
        if name in at_least and value < at_least[name]:
            raise InputError(f"--{name}={value}: must be at least {at_least[name]}")
        if name in choices and value not in choices[name]:
            raise InputError(f"--{name}={value}: must be one of {', '.join(choices[name])}")
        if name in ("grad_clip", "verify_seconds") and value <= 0:
            raise InputError(f"--{name}={value}: must be above 0")
        if name in ("beta1", "beta2") and not 0 <= value < 1:
            raise InputError(f"--{name}={value}: must be in [0, 1)")
        if name == "top_p" and not 0 < value <= 1:
            raise InputError(f"--top_p={value}: must be in (0, 1]")
        if name == "replay_hard" and not 0 <= value <= 1:
            raise InputError(f"--replay_hard={value}: must be in [0, 1]")
    if command == "train":
        if s.temperature == 0 or s.top_p < 1:
            raise InputError("train needs --temperature above 0 and --top_p=1: the loss scores the full distribution")
        if (s.replay or s.replay_failures) and not s.pool:
            raise InputError(f"--replay={s.replay}: needs --pool=pool.jsonl; python rlep.py collect makes one")
        if s.pool and not (s.replay or s.replay_failures):
            raise InputError("--pool is given but --replay is 0: add --replay=2, or leave --pool out for the baseline")
        if s.mini_batch > s.questions:
            raise InputError(f"--mini_batch={s.mini_batch}: larger than --questions={s.questions}")
        if s.overlong_buffer > s.response_limit:
            raise InputError(f"--overlong_buffer={s.overlong_buffer}: larger than --response_limit={s.response_limit}")
    if s.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device=cuda: PyTorch finds no CUDA device here; use --device=cpu")


# ----------------------------------------------------------------------------------------------- rewards and advantages


def overlong_penalty(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong penalty for a response of `length` tokens: 0 up to limit - buffer, then linear down to
    -factor at the limit. buffer 0 means no penalty."""
    if buffer <= 0:
        return 0.0
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0) * factor


def group_advantages(rewards, groups, use_std: bool = True) -> torch.Tensor:
    """Advantages over each group (paper eq. 5): A_i = (r_i - mean(r)) / std(r), fresh and replayed rows together.

    rewards: B numbers, None or NaN for a row that could not be scored: it gets advantage 0 and stays out of mean and std.
    groups: B hashable labels; rows of a group need not be neighbours and groups may differ in size. std is the sample
    standard deviation, as in the reference. A group whose rewards are all equal (to 1e-6), or of one row, has advantage 0
    exactly. use_std=False leaves the division out (Dr. GRPO). Returns float32 (B,).
    """
    rewards = [math.nan if r is None else float(r) for r in rewards]
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} group labels")
    members = defaultdict(list)
    for i, group in enumerate(groups.tolist() if hasattr(groups, "tolist") else groups):
        if not math.isnan(rewards[i]):
            members[group].append(i)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for rows in members.values():
        r = np.array([rewards[i] for i in rows])
        if r.max() - r.min() > 1e-6:  # else the std is a rounding residue, and dividing by it makes a signal from nothing
            advantages[rows] = torch.from_numpy((r - r.mean()) / (r.std(ddof=1) if use_std else 1.0))
    return advantages.float()


@dataclass
class Row:
    """One answer in the batch, fresh or replayed."""

    ids: list[int]  # response tokens, stop id included
    reward: float  # what the advantage is made of
    correct: bool
    finish_reason: str
    replayed: bool
    sampler_logprobs: list[float] | None = None  # of fresh rows
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None  # (len(ids),)
    entropy: float = 0.0  # mean over tokens, nats


@dataclass
class Group:
    """A question with its rows."""

    question: dict
    prompt: list[int]
    rows: list[Row]


# ----------------------------------------------------------------------------------------------------- questions, order


def load_data(spec: str, s: Settings, tokenizer, verifier: Verifier, label: str) -> list[dict]:
    """Questions with prompt ids under "prompt_ids". Too long prompts and golds that the verifier cannot read are left out,
    each with a line that counts them."""
    say = functools.partial(print, f"{label}:", flush=True)
    questions = load_questions(spec, say)
    if s.max_questions:
        questions = questions[:s.max_questions]
    for question in questions:
        question["prompt_ids"] = prompt_ids(question, tokenizer)
    short = [q for q in questions if 0 < len(q["prompt_ids"]) <= s.prompt_limit]
    if len(short) < len(questions):
        say(f"{len(questions) - len(short)} questions left out: prompt empty or over {s.prompt_limit} tokens")
    verdicts = verifier.verify_batch([f"\\boxed{{{q['answer']}}}" for q in short], [q["answer"] for q in short])
    readable = [q for q, verdict in zip(short, verdicts) if verdict is not None]
    if len(readable) < len(short):
        bad = next(q for q, verdict in zip(short, verdicts) if verdict is None)
        say(f"{len(short) - len(readable)} questions left out: gold answer not readable, for one {bad['id']}: {bad['answer'][:60]!r}")
    if not readable:
        raise InputError(f"{spec}: no question is left; raise --prompt_limit={s.prompt_limit} or mend the gold answers")
    return readable


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng(M.derive_seed(seed, "order", epoch)).permutation(size)


def question_at(questions: list[dict], seed: int, position: int) -> dict:
    """The question at `position` of the endless stream: a seeded permutation of the data for each epoch."""
    epoch, index = divmod(position, len(questions))
    return questions[permutation(seed, epoch, len(questions))[index]]


# ------------------------------------------------------------------------------------------------ the parts of one step


def sample_groups(s: Settings, questions: list[dict], position: int, sampler, verifier: Verifier, label: str) -> list[Group]:
    """G fresh, verified rollouts for each of the P questions at `position` of the stream. Reward +1 or -1 (paper §3.2)
    plus the overlong penalty; rows without a verdict are left out."""
    batch = [question_at(questions, s.seed, position + i) for i in range(s.questions)]
    seeds = [M.derive_seed(s.seed, "rollout", position + i) for i in range(s.questions)]
    samples = sampler.generate([q["prompt_ids"] for q in batch], s.rollouts, seeds, max_tokens=s.response_limit,
                               temperature=s.temperature, progress=label)
    texts = decode(sampler.policy, [x for group in samples for x in group])
    verdicts = iter(verifier.verify_batch(texts, [q["answer"] for q in batch for _ in range(s.rollouts)]))
    groups = []
    for question, group in zip(batch, samples):
        rows = []
        for sample, correct in zip(group, verdicts):
            if correct is None:
                continue
            reward = (1.0 if correct else -1.0) + overlong_penalty(len(sample.ids), s.response_limit, s.overlong_buffer, s.overlong_factor)
            rows.append(Row(sample.ids, reward, correct, sample.finish_reason, False, sample.logprobs))
        groups.append(Group(question, question["prompt_ids"], rows))
    return groups


def decode(policy, samples) -> list[str]:
    """Response texts without the stop id and other special tokens."""
    return policy.tokenizer.batch_decode([x.ids for x in samples], skip_special_tokens=True)


def informative(group: Group) -> bool:
    """Do the fresh rollouts disagree? (DAPO's filter; replayed rows are not asked)"""
    return len({row.correct for row in group.rows}) > 1


def replay_rows(s: Settings, pool: Pool, group: Group, step: int) -> list[Row]:
    """Up to M stored answers for the group's question, and stored wrong ones if asked; fewer where there are fewer."""
    right = sum(row.correct for row in group.rows)
    if right > s.replay_hard * len(group.rows):  # ablation: replay on hard questions only
        return []
    draws = pool.draw(group.question["id"], s.replay, s.seed, step, select=s.replay_select, repeats=s.replay_repeats)
    draws += pool.draw(group.question["id"], s.replay_failures, s.seed, step, failures=True)  # ablation: negative replay
    return [Row(d["response_ids"], d["reward"], d["reward"] > 0, d["finish_reason"], True) for d in draws]


@torch.no_grad()
def score_old(policy: M.Policy, s: Settings, groups: list[Group]) -> None:
    """Old log-probs of every row, replayed ones included, under the policy as it is before this step's first update
    (paper eq. 4). Same function as in the update: the ratio is 1 at the first mini-batch."""
    rows = [(group.prompt, row) for group in groups for row in group.rows]
    for micro in M.micro_batches([len(p) + len(r.ids) for p, r in rows], s.micro_tokens):
        chosen = [rows[i] for i in micro]
        logprobs, mask, entropy = M.response_logprobs(policy, [p for p, _ in chosen], [r.ids for _, r in chosen], s.temperature, True)
        for k, (_, row) in enumerate(chosen):
            row.old_logprobs, row.entropy = logprobs[k, :len(row.ids)], float(entropy[k].sum() / len(row.ids))


def update(policy: M.Policy, optimizer, s: Settings, groups: list[Group], reference: M.Policy | None) -> dict:
    """One optimizer update per mini_batch questions over their fresh and replayed rows. Returns sums for the metrics."""
    sums = defaultdict(float)
    for start in range(0, len(groups), s.mini_batch):
        rows = [(g.prompt, row) for g in groups[start:start + s.mini_batch] for row in g.rows]
        denominator = sum(len(row.ids) for _, row in rows)  # one per mini-batch, known before the first micro-batch
        if reference is None:  # a row with advantage 0 has gradient 0 exactly: it counts in the denominator, is not computed
            rows = [(p, row) for p, row in rows if row.advantage]
        for micro in M.micro_batches([len(p) + len(row.ids) for p, row in rows], s.micro_tokens):
            prompts, chosen = [rows[i][0] for i in micro], [rows[i][1] for i in micro]
            logprobs, mask, _ = M.response_logprobs(policy, prompts, [row.ids for row in chosen], s.temperature)
            old_logprobs = torch.nn.utils.rnn.pad_sequence([row.old_logprobs for row in chosen], batch_first=True)
            advantages = torch.tensor([row.advantage for row in chosen], device=policy.device)
            loss, stats = M.policy_loss(logprobs, old_logprobs, advantages, mask, denominator, s.clip_low, s.clip_high, s.dual_clip)
            if reference is not None:  # ablation: KL to the base model, k3 estimator
                with torch.no_grad():
                    base, _, _ = M.response_logprobs(reference, prompts, [row.ids for row in chosen], s.temperature)
                gap = torch.where(mask, base - logprobs, 0.0)
                loss = loss + s.kl_coef * (gap.exp() - gap - 1).sum() / denominator
                sums["kl"] += float((gap.exp() - gap - 1).sum().detach())
            loss.backward()
            sums["loss"] += float(loss.detach())
            for name, values in stats.items():  # per row, so that fresh and replayed can be told apart
                for row, value in zip(chosen, values.tolist()):
                    sums[f"{'replay' if row.replayed else 'fresh'}/{name}"] += value
            for row in chosen:
                sums[f"{'replay' if row.replayed else 'fresh'}/trained_tokens"] += len(row.ids)
        norm = M.optimizer_step(policy, optimizer, s.grad_clip)
        sums["updates"] += 1
        sums["skipped_updates"] += not math.isfinite(norm)
        sums["grad_norm"] += norm if math.isfinite(norm) else 0.0
    return sums


def step_metrics(groups: list[Group], sums: dict, s: Settings) -> dict:
    """Metrics of one step; README.md explains each. Fresh rows; those of replayed rows begin with replay/."""
    fresh = [row for g in groups for row in g.rows if not row.replayed]
    replayed = [row for g in groups for row in g.rows if row.replayed]
    mean = lambda values: float(np.mean(values)) if len(values) else 0.0  # noqa: E731
    gaps = [abs(a - b) for row in fresh for a, b in zip(row.sampler_logprobs, row.old_logprobs.tolist())]
    out = {"reward": mean([row.reward for row in fresh]), "accuracy": mean([row.correct for row in fresh]),
           "length": mean([len(row.ids) for row in fresh]), "truncated": mean([row.finish_reason == "length" for row in fresh]),
           "entropy": mean([row.entropy for row in fresh]), "dead_groups": mean([not any(row.advantage for row in g.rows) for g in groups]),
           "dead_groups_fresh": mean([not informative(g) for g in groups]), "questions": len(groups), "rows": len(fresh),
           "mismatch_mean": mean(gaps), "mismatch_max": max(gaps, default=0.0), "loss": sums["loss"] / max(sums["updates"], 1),
           "grad_norm": sums["grad_norm"] / max(sums["updates"], 1), "updates": int(sums["updates"]),
           "skipped_updates": int(sums["skipped_updates"])}
    if s.kl_coef:
        out["kl"] = sums["kl"] / max(sum(len(row.ids) for row in fresh + replayed) , 1)
    if s.replay or s.replay_failures:
        out |= {"replay/rows": len(replayed), "replay/questions": sum(any(row.replayed for row in g.rows) for g in groups),
                "replay/reward": mean([row.reward for row in replayed]), "replay/length": mean([len(row.ids) for row in replayed]),
                "replay/advantage": mean([row.advantage for row in replayed]),
                "replay/old_logprob": mean([float(row.old_logprobs.mean()) for row in replayed])}
    for kind in ["fresh", "replay"] if replayed else ["fresh"]:
        prefix = "replay/" if kind == "replay" else ""
        tokens = max(sums[f"{kind}/trained_tokens"], 1)
        out |= {prefix + name: sums[f"{kind}/{name}"] / tokens for name in ("ratio", "clip_low", "clip_high", "clip_dual")}
        out[prefix + "trained_tokens"] = int(sums[f"{kind}/trained_tokens"])
    return out


# ---------------------------------------------------------------------------------------------------------- evaluation


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from n samples of which c are right: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: list[str | None], correct: list[bool]) -> float:
    """maj@k of one question: is the most frequent answer right? Equal counts share the vote. No answer is no vote."""
    votes, right = defaultdict(int), {}
    for answer, ok in zip(answers, correct):
        if answer is not None:
            key = canonical(answer)
            votes[key] += 1
            right[key] = right.get(key, False) or ok
    top = [key for key, count in votes.items() if count == max(votes.values())]
    return sum(right[key] for key in top) / len(top) if top else 0.0


def evaluate(s: Settings, questions: list[dict], n: int, sampler, verifier: Verifier) -> tuple[dict, list[dict]]:
    """n samples of each question. Returns metrics "eval/<source>/<metric>" and one record per response.

    avg@n: mean accuracy; its standard error is over questions. Seeds depend on run seed and question alone, so that two
    evaluations differ by the policy only.
    """
    samples = sampler.generate([q["prompt_ids"] for q in questions], n, [M.derive_seed(s.seed, "eval", q["id"]) for q in questions],
                               max_tokens=s.response_limit, temperature=s.temperature, top_p=s.top_p, progress="evaluate")
    flat = [x for group in samples for x in group]
    texts = decode(sampler.policy, flat)
    verdicts = verifier.verify_batch(texts, [q["answer"] for q in questions for _ in range(n)])
    records, by_source = [], defaultdict(list)
    for i, question in enumerate(questions):
        mine = slice(i * n, i * n + n)
        correct = [bool(v) for v in verdicts[mine]]
        answers = [extract_answer(text) for text in texts[mine]]
        by_source[question["source"]].append((correct, answers, flat[mine]))
        records += [{"id": question["id"], "source": question["source"], "correct": ok, "finish_reason": x.finish_reason,
                     "tokens": len(x.ids), "answer": question["answer"], "extracted": answer, "problem": question["problem"], "response": text}
                    for ok, x, answer, text in zip(correct, flat[mine], answers, texts[mine])]
    metrics = {}
    for source, results in by_source.items():
        rates = np.array([np.mean(correct) for correct, _, _ in results])
        name = f"eval/{source}/"
        metrics[name + "questions"] = len(results)
        metrics[name + f"avg@{n}"] = float(rates.mean())
        metrics[name + "se"] = float(rates.std(ddof=1) / math.sqrt(len(rates))) if len(rates) > 1 else 0.0
        metrics[name + f"maj@{n}"] = float(np.mean([majority(answers, correct) for correct, answers, _ in results]))
        for k in sorted({1 << b for b in range(1, 11) if 1 << b <= n} | ({n} if n > 1 else set())):
            metrics[name + f"pass@{k}"] = float(np.mean([pass_at_k(n, sum(correct), k) for correct, _, _ in results]))
        metrics[name + "length"] = float(np.mean([len(x.ids) for _, _, group in results for x in group]))
        metrics[name + "truncated"] = float(np.mean([x.finish_reason == "length" for _, _, group in results for x in group]))
    return metrics, records


# ---------------------------------------------------------------------------------------------------------- run folder


def write_json(path: str, value) -> None:
    with open(path + ".tmp", "w") as f:
        json.dump(value, f, indent=1)
    os.replace(path + ".tmp", path)


def append_jsonl(path: str, records: list[dict]) -> None:
    with open(path, "a") as f:
        f.write("".join(json.dumps(record) + "\n" for record in records))
        f.flush()
        os.fsync(f.fileno())


def cut_jsonl(path: str, last_step: int) -> None:
    """Drop the lines of steps after `last_step`, and a torn last line: they will be made again, the same."""
    if not os.path.exists(path):
        return
    with open(path) as f:
        lines = [line for line in f if line.endswith("\n") and json.loads(line)["step"] <= last_step]
    with open(path + ".tmp", "w") as f:
        f.writelines(lines)
    os.replace(path + ".tmp", path)


def checkpoints(run: str) -> list[str]:
    """Complete checkpoints of a run folder, oldest first."""
    folder = os.path.join(run, "checkpoints")
    names = [n for n in os.listdir(folder) if re.fullmatch(r"step-\d{6,}", n)] if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names, key=lambda n: int(n[5:]))]


def resolve_model(path: str) -> str:
    """A run folder stands for its newest checkpoint."""
    if os.path.isdir(os.path.join(path, "checkpoints")):
        found = checkpoints(path)
        if not found:
            raise InputError(f"--model={path}: this run has no checkpoint yet")
        return found[-1]
    return path


def open_run(s: Settings) -> tuple[str | None, object]:
    """Make or reopen the run folder. Returns the checkpoint to continue from (None: start) and the lock to hold.

    A folder of another kind, or of a run with other settings, is never touched without --overwrite.
    """
    config = os.path.join(s.out, "config.json")
    if os.path.isfile(s.out):
        raise InputError(f"--out={s.out}: is a file; name a folder")
    os.makedirs(s.out, exist_ok=True)
    lock = open(os.path.join(s.out, ".lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"--out={s.out}: another process is running in this folder") from None
    entries = [name for name in os.listdir(s.out) if name not in (".lock", "config.json.tmp")]
    if entries and not os.path.exists(config):
        raise InputError(f"--out={s.out}: holds files but no config.json, so it is not a run folder; choose another")
    if entries and s.overwrite:
        for name in entries:
            path = os.path.join(s.out, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    elif entries:
        with open(config) as f:
            before = json.load(f)["settings"]
        for name, value in dataclasses.asdict(s).items():
            if name not in RESUME_MAY_CHANGE and before.get(name) != value:
                raise InputError(f"--out={s.out}: holds a run with --{name}={before.get(name)}, now {value}; "
                                 "choose another folder, or --overwrite to delete that run")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "numpy")}
    write_json(config, {"command": "train", "settings": dataclasses.asdict(s), "versions": versions,
                        "python": platform.python_version(), "machine": platform.machine()})
    os.makedirs(os.path.join(s.out, "checkpoints"), exist_ok=True)
    found = checkpoints(s.out)
    return (found[-1] if found else None), lock


def save_run(policy: M.Policy, optimizer, s: Settings, step: int, position: int) -> None:
    """Checkpoint the step, then drop the oldest beyond --keep."""
    target = os.path.join(s.out, "checkpoints", f"step-{step:06d}")
    if not os.path.exists(target):
        M.save_checkpoint(policy, target, optimizer, {"step": step, "position": position, "python_rng": random.getstate()})
    for old in checkpoints(s.out)[:-s.keep] if s.keep else []:
        shutil.rmtree(old)


# ------------------------------------------------------------------------------------------------------------ commands


def describe(s: Settings, questions: list[dict], policy: M.Policy) -> None:
    """Print the resolved settings and what follows from them, before the first step."""
    print("settings: " + " ".join(f"--{k}={getattr(s, k)}" for k in fields_of("train")))
    rows, limit = s.questions * (s.rollouts + s.replay + s.replay_failures), s.response_limit
    trained = sum(p.numel() for p in policy.parameters())
    print(f"policy: {trained:,} trained of {sum(p.numel() for p in policy.model.parameters()):,} parameters on {policy.device}, "
          f"activations {str(policy.compute_dtype)[6:]}, stop ids {policy.stop_ids}, sampler torch")
    print(f"per step: {s.questions} groups of {s.rollouts} fresh + {s.replay} replayed rows = {rows} rows, "
          f"at most {rows * limit:,} response tokens, {math.ceil(s.questions / s.mini_batch)} updates of {s.mini_batch} questions")
    print(f"in all: {s.steps} steps = {s.steps * s.questions / len(questions):.2f} epochs of {len(questions)} questions", flush=True)


def progress_line(record: dict, s: Settings, seconds: float) -> str:
    left = int((s.steps - record["step"]) * seconds)
    clip = record["clip_low"] + record["clip_high"]
    line = (f"step {record['step']}/{s.steps}  reward {record['reward']:+.3f}  accuracy {record['accuracy']:.3f}  length {record['length']:.1f}  "
            f"entropy {record['entropy']:.3f}  clip {clip:.4f}  dead {record['dead_groups']:.2f}  {record['tokens_per_second']:,.0f} tok/s  "
            f"{record['time/step']:.2f} s  left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
    scores = "  ".join(f"{k.split('/')[1]} {v:.3f}" for k, v in record.items() if re.fullmatch(r"eval/.*/avg@\d+", k))
    return line + (f"  | {scores}" if scores else "")


def train(s: Settings) -> None:
    """GRPO, and RLEP with --replay: see the module's head. Resumes by itself from the newest checkpoint."""
    resume, lock = open_run(s)
    policy = M.load_policy(resume or resolve_model(s.model), lora_rank=s.lora_rank, lora_alpha=s.lora_alpha, device=s.device,
                           compute_dtype=s.dtype, activation_checkpointing=s.activation_checkpointing)
    reference = M.load_policy(resolve_model(s.model), device=s.device, compute_dtype=s.dtype, train=False) if s.kl_coef else None
    optimizer = M.make_optimizer(policy, s.lr, s.weight_decay, s.beta1, s.beta2)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = load_data(s.data, s, policy.tokenizer, verifier, "data")
    held_out = load_data(s.eval_data, s, policy.tokenizer, verifier, "eval_data") if s.eval_data else []
    longest = max(len(q["prompt_ids"]) for q in questions + held_out) + s.response_limit
    if longest > getattr(policy.config, "max_position_embeddings", longest):
        raise InputError(f"--response_limit={s.response_limit}: with the longest prompt {longest} tokens, but the model ends at {policy.config.max_position_embeddings}")
    pool = None
    if s.pool:
        pool = Pool(s.pool, readonly=True, tokenizer=fingerprint(policy.tokenizer), max_tokens=s.response_limit)
        covered = sum(q["id"] in pool for q in questions)
        print(f"pool: {len(pool)} answers; {covered} of {len(questions)} questions covered")
        if not covered:
            raise InputError(f"--pool={s.pool}: holds no question of --data={s.data}; was it collected on other data?")
    sampler = M.TorchSampler(policy, s.sampler_rows)
    describe(s, questions, policy)
    metrics_path, samples_path = (os.path.join(s.out, name) for name in ("metrics.jsonl", "samples.jsonl"))

    def log(record: dict, samples: list[dict]) -> None:
        append_jsonl(samples_path, samples)
        append_jsonl(metrics_path, [record])
        if samples:
            import plot
            plot.draw([s.out], os.path.join(s.out, "curves.png"))

    def evaluation(step: int) -> tuple[dict, list[dict]]:
        if not held_out:
            return {}, []
        sampler.push(), sampler.wake()
        metrics, records = evaluate(s, held_out, s.eval_samples, sampler, verifier)
        sampler.sleep()
        return metrics, [{"step": step, **r} for r in records[:4 * s.eval_samples:s.eval_samples]]

    done, position = 0, 0
    if resume:
        state = M.load_trainer_state(resume, optimizer)
        done, position = state["step"], state["position"]
        random.setstate(state["python_rng"])
        print(f"continuing after step {done}")
    for path in (metrics_path, samples_path):
        cut_jsonl(path, done if resume else -1)
    if not resume:
        metrics, samples = evaluation(0)
        log({"step": 0, **metrics}, samples)
        print("step 0: " + ("  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if "avg@" in k) or "no --eval_data"), flush=True)
    if done >= s.steps:
        print(f"{s.out}: finished, {done} steps; --steps=N continues to more, --overwrite starts again")

    seconds = None
    for step in range(done + 1, s.steps + 1):
        clock = [time.perf_counter()]

        # 1-2. sample G fresh rollouts per question from the current policy, and verify them
        sampler.push(), sampler.wake()
        groups, batches = [], 0
        while len(groups) < s.questions and batches < (s.dynamic_tries if s.dynamic_sampling else 1):
            fresh = sample_groups(s, questions, position, sampler, verifier, f"step {step}")
            position, batches = position + s.questions, batches + 1
            groups += [g for g in fresh if informative(g)] if s.dynamic_sampling else fresh
        groups = groups[:s.questions]  # whole groups
        sampler.sleep()
        clock.append(time.perf_counter())

        # 3. replay: add up to M stored answers to each question's group
        for group in groups if pool is not None else []:
            group.rows = group.rows + replay_rows(s, pool, group, step)

        # 4. advantages over each mixed group of G + M rows
        rows = [row for group in groups for row in group.rows]
        labels = [i for i, group in enumerate(groups) for _ in group.rows]
        for row, advantage in zip(rows, group_advantages([row.reward for row in rows], labels, s.advantage_std).tolist()):
            row.advantage = advantage

        # 5. old log-probs of all rows under the current policy
        score_old(policy, s, groups)
        clock.append(time.perf_counter())

        # 6. one optimizer update per mini-batch of questions
        lr = s.lr * min(1.0, step / max(s.warmup, 1))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        sums = update(policy, optimizer, s, groups, reference)
        clock.append(time.perf_counter())

        # 7. log and evaluate
        last = step == s.steps
        record = {"step": step, **step_metrics(groups, sums, s), "lr": lr, "position": position, "sampled_batches": batches,
                  **{f"verify/{kind}": count for kind, count in sorted(verifier.counts.items())}}
        metrics, samples = evaluation(step) if last or step % s.eval_every == 0 else ({}, [])
        clock.append(time.perf_counter())
        took = [b - a for a, b in zip(clock, clock[1:])]
        record |= {**metrics, **dict(zip(("time/sample", "time/score", "time/update", "time/eval"), took)), "time/step": sum(took[:3]),
                   "tokens_per_second": sum(len(row.ids) for row in rows) / sum(took[:3])}
        log(record, samples)
        seconds = sum(took) if seconds is None else 0.9 * seconds + 0.1 * sum(took)
        print(progress_line(record, s, seconds), flush=True)

        # 8. save
        if last or step % s.save_every == 0:
            save_run(policy, optimizer, s, step, position)
    verifier.close()
    lock.close()


def collect(s: Settings) -> None:
    """K samples of every question; the verified ones become the experience pool (paper §3.2). Can be stopped and run again."""
    path = resolve_model(s.model)
    policy = M.load_policy(path, device=s.device, compute_dtype=s.dtype, train=False)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = load_data(s.data, s, policy.tokenizer, verifier, "data")
    sampler = M.TorchSampler(policy, s.sampler_rows)
    tokenizer, done_path = fingerprint(policy.tokenizer), s.pool + ".done"
    header = {"collect": {k: getattr(s, k) for k in ("model", "samples", "temperature", "top_p", "response_limit", "seed", "min_correct", "keep_failures")}}
    done = read_done(done_path, header, s)
    per_batch = max(1, s.sampler_rows // s.samples)
    todo = [q for q in questions if q["id"] not in done]
    print(f"collect: {s.samples} samples of {len(todo)} questions ({len(questions) - len(todo)} done before)", flush=True)
    sampler.push(), sampler.wake()
    with Pool(s.pool, tokenizer=tokenizer, max_tokens=s.response_limit) as pool:
        for start in tqdm(range(0, len(todo), per_batch), desc="collect", unit="batch", disable=None):
            batch = todo[start:start + per_batch]
            samples = sampler.generate([q["prompt_ids"] for q in batch], s.samples, [M.derive_seed(s.seed, "collect", q["id"]) for q in batch],
                                       max_tokens=s.response_limit, temperature=s.temperature, top_p=s.top_p)
            texts = decode(policy, [x for group in samples for x in group])
            verdicts = verifier.verify_batch(texts, [q["answer"] for q in batch for _ in range(s.samples)])
            for i, (question, group) in enumerate(zip(batch, samples)):
                mine = slice(i * s.samples, (i + 1) * s.samples)
                records, outcome = pool_records(s, question, group, texts[mine], verdicts[mine], path, tokenizer)
                # a crash may come between these two lines: once=True adds nothing that the pool already has
                pool.append(records, allow_failed=s.keep_failures, once=True)
                append_jsonl(done_path, [outcome])
                done[question["id"]] = outcome
        covered = [done[q["id"]] for q in questions if done[q["id"]]["stored"]]
        right = sum(d["correct"] for d in done.values()) / max(sum(d["samples"] for d in done.values()), 1)
        print(f"coverage: {len(covered)} of {len(questions)} questions ({len(covered) / len(questions):.1%}); {right:.1%} of the samples "
              f"are right; {len(pool)} answers in {s.pool}")
    verifier.close()


def read_done(path: str, header: dict, s: Settings) -> dict[str, dict]:
    """Outcomes of the questions collected so far, by id; starts the file if there is none. Other settings are refused."""
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        append_jsonl(path, [header])
        return {}
    with open(path) as f:
        text = f.read()
    if not text.endswith("\n"):  # torn by a crash: that question is done again
        text = text[:text.rfind("\n") + 1]
        with open(path + ".tmp", "w") as f:
            f.write(text)
        os.replace(path + ".tmp", path)
    lines = [json.loads(line) for line in text.splitlines()] or [header]
    for name, value in header["collect"].items():
        if lines[0]["collect"].get(name) != value:
            raise InputError(f"--pool={s.pool}: was collected with --{name}={lines[0]['collect'].get(name)}, now {value}; name another pool")
    if not text:
        append_jsonl(path, [header])
    return {line["question_id"]: line for line in lines[1:]}


def pool_records(s: Settings, question: dict, samples: list, texts: list[str], verdicts: list, model: str, tokenizer: str) -> tuple[list[dict], dict]:
    """The pool records of one question's samples and its outcome. Cut answers never enter, whatever they say."""
    right = [bool(v) and x.finish_reason == "stop" for v, x in zip(verdicts, samples)]
    enough = sum(right) >= s.min_correct
    records = []
    for ok, sample, text in zip(right, samples, texts):
        if (ok and enough) or (not ok and s.keep_failures and sample.finish_reason == "stop"):
            records.append({"question_id": question["id"], "problem": question["problem"], "answer": question["answer"], "response": text,
                            "response_ids": sample.ids, "finish_reason": sample.finish_reason, "reward": 1.0 if ok else -1.0,
                            "sampler_logprob": sum(sample.logprobs), "success_rate": sum(right) / len(right), "model": model,
                            "temperature": s.temperature, "top_p": s.top_p, "tokenizer": tokenizer, "source": question["source"]})
    return records, {"question_id": question["id"], "samples": len(samples), "correct": sum(right), "stored": len(records)}


def evaluation_command(s: Settings) -> None:
    """Print avg@k with its standard error, maj@k and pass@k per data set; with --out keep them and all responses."""
    if s.out:
        if os.path.exists(os.path.join(s.out, "eval.json")) and not s.overwrite:
            raise InputError(f"--out={s.out}: holds an evaluation already; choose another folder, or --overwrite")
        os.makedirs(s.out, exist_ok=True)
    policy = M.load_policy(resolve_model(s.model), device=s.device, compute_dtype=s.dtype, train=False)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = load_data(s.data, s, policy.tokenizer, verifier, "data")
    sampler = M.TorchSampler(policy, s.sampler_rows)
    sampler.push(), sampler.wake()
    metrics, records = evaluate(s, questions, s.samples, sampler, verifier)
    for source in dict.fromkeys(q["source"] for q in questions):
        mine = {k.rsplit("/", 1)[1]: v for k, v in metrics.items() if k.startswith(f"eval/{source}/")}
        scores = "  ".join(f"{k} {v:.3f}" for k, v in mine.items() if re.match(r"maj|pass|truncated", k))
        print(f"{source}: {mine['questions']} questions  avg@{s.samples} {mine[f'avg@{s.samples}']:.3f} ± {mine['se']:.3f}  {scores}  length {mine['length']:.1f}")
    if s.out:
        append_jsonl(os.path.join(s.out, "responses.jsonl.tmp"), records)
        os.replace(os.path.join(s.out, "responses.jsonl.tmp"), os.path.join(s.out, "responses.jsonl"))
        write_json(os.path.join(s.out, "eval.json"), {"settings": dataclasses.asdict(s), "metrics": metrics})
    verifier.close()


def main(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(__doc__ + "\n" + "\n".join(f"{c:<8} {text}" for c, text in COMMANDS.items()) + "\n\npython rlep.py COMMAND --help tells its options.")
        return
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1, 0.0)[0]
        raise InputError(f"{command}: unknown command; the nearest is {near} (of {', '.join(COMMANDS)})")
    if "-h" in rest or "--help" in rest:
        print(help_text(command))
        return
    {"train": train, "collect": collect, "eval": evaluation_command}[command](parse_settings(command, rest))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
