"""rlep.py: RLEP, reinforcement learning with experience replay (arXiv 2507.07451), the whole loop.

    python rlep.py train   --model=BASE --data=train.jsonl --out=runs/baseline                # 1. the GRPO baseline
    python rlep.py collect --model=runs/baseline --data=train.jsonl --pool=pool.jsonl         # 2. its verified answers
    python rlep.py train   --model=BASE --data=train.jsonl --pool=pool.jsonl --replay=2 --out=runs/rlep   # 3. RLEP
    python rlep.py eval    --model=runs/rlep --data=test.jsonl --samples=32                   # avg@k, maj@k, pass@k

On several GPUs: torchrun --nproc_per_node=8 rlep.py train ..., the same file and options (ranks.py).
RLEP differs from its baseline in --replay alone. Read train() first: a step is eight short blocks, replay is the third.

Where this departs from the reference implementation:
- a question with fewer than M stored answers gets fewer replays, not empty dummies that shift its group's mean;
- mini-batches are counted in questions, so that RLEP takes as many updates per step as its baseline;
- the loss has one denominator per mini-batch; a replayed answer keeps its verified reward, is never cut, and is drawn as
  a pure function of (seed, step, question); metrics are those of fresh answers, the replayed ones' stand beside them.

Legend: P questions per step, G fresh rollouts and M replays per question, B rows, T tokens.
"""
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import glob
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import sys
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import plan
import ranks
from attention import micro_batches
from data import InputError, load_questions, prompt_ids
from model import (Policy, checkpoint_bytes, derive_seed, load_policy, load_tokenizer, load_trainer_state, make_optimizer, optimizer_step,
                   policy_loss, response_logprobs, save_checkpoint)
from replay import Pool, fingerprint
from sampler import canary, make_sampler
from settings import COMMANDS, Settings, fields_of, help_text, parse
from verify import Verifier, canonical, extract_answer


@dataclass
class Row:
    """One answer in the batch, fresh or replayed."""

    ids: list[int]  # response tokens, stop id included
    reward: float
    correct: bool
    finish_reason: str
    replayed: bool
    sampler_logprobs: list[float] | None = None  # of fresh rows
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None  # (len(ids),), under the policy at the start of the step
    weights: torch.Tensor | float = 1.0  # (len(ids),): importance weights of the advantage, where the sampler is another engine
    entropy: float = 0.0  # mean over the tokens, nats


@dataclass
class Group:
    """A question with its rows: G fresh ones, then up to M replayed."""

    question: dict
    rows: list[Row]


# ----------------------------------------------------------------------------------------------- rewards and advantages


def overlong_penalty(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft penalty for a response of `length` tokens: 0 up to limit - buffer, then linearly down to -factor at
    the limit. A buffer of 0 means no penalty."""
    if buffer <= 0:
        return 0.0
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0) * factor


def group_advantages(rewards, groups, use_std: bool = True, in_baseline=None) -> torch.Tensor:
    """Advantages over each group (paper eq. 5): A_i = (r_i - mean(r)) / std(r), fresh and replayed rows together.

    rewards: B numbers, None or NaN for a row that could not be scored: it gets advantage 0 and stays out of mean and std.
    groups: B labels; the rows of a group need not be neighbours, and groups may differ in size. std is the sample
    standard deviation, as in the reference. A group whose rewards are all equal (to 1e-6), or of one row, has advantage
    exactly 0. use_std=False leaves the division out (Dr. GRPO). in_baseline: B booleans, the rows that make up mean and
    std, None for all; where those agree with each other, std counts as 1. Returns float32 (B,).
    """
    rewards = [math.nan if r is None else float(r) for r in rewards]
    groups = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} group labels")
    members = defaultdict(list)
    for i, group in enumerate(groups):
        if not math.isnan(rewards[i]):
            members[group].append(i)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for rows in members.values():
        r = np.array([rewards[i] for i in rows])
        if r.max() - r.min() > 1e-6:  # else std is a rounding residue, and dividing by it makes a signal from nothing
            base = r[[in_baseline[i] for i in rows]] if in_baseline is not None else r
            base = base if len(base) else r
            spread = use_std and base.max() - base.min() > 1e-6
            advantages[rows] = torch.from_numpy((r - base.mean()) / (base.std(ddof=1) if spread else 1.0))
    return advantages.float()


# ------------------------------------------------------------------------------------------------- questions, in order


def load_data(spec: str, s: Settings, tokenizer, verifier: Verifier, label: str, first: int = 0) -> list[dict]:
    """Questions with their "prompt_ids". Prompts over the limit and golds that the verifier cannot read are left out,
    with a line that counts them. first: use only so many questions; 0 uses all."""
    say = functools.partial(print, f"{label}:", flush=True)
    questions = load_questions(spec, say)[:first or None]
    for question in questions:
        question["prompt_ids"] = prompt_ids(question, tokenizer)
    short = [q for q in questions if 0 < len(q["prompt_ids"]) <= s.prompt_limit]
    if len(short) < len(questions):
        say(f"{len(questions) - len(short)} questions left out: prompt empty or over --prompt_limit={s.prompt_limit} tokens")
    verdicts = verifier.verify_batch([f"\\boxed{{{q['answer']}}}" for q in short], [q["answer"] for q in short])
    unreadable = [q for q, verdict in zip(short, verdicts) if verdict is None]
    if unreadable:
        say(f"{len(unreadable)} questions left out: gold answer not readable, as in {unreadable[0]['id']}: {unreadable[0]['answer'][:60]!r}")
    if len(unreadable) == len(short):
        raise InputError(f"{spec}: no question is left; raise --prompt_limit={s.prompt_limit} or mend the gold answers")
    return [q for q, verdict in zip(short, verdicts) if verdict is not None]


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, "order", epoch)).permutation(size)


def question_at(questions: list[dict], seed: int, position: int) -> dict:
    """The question at `position` of the endless stream: a seeded permutation of the data for each epoch."""
    epoch, index = divmod(position, len(questions))
    return questions[epoch_order(seed, epoch, len(questions))[index]]


# ------------------------------------------------------------------------------------------------ the parts of one step


def decode(tokenizer, samples) -> list[str]:
    """Response texts, without the stop id and other special tokens."""
    return [tokenizer.decode(sample.ids, skip_special_tokens=True) for sample in samples]


def answers(s: Settings, questions: list[dict], n: int, seeds: list[int], sampler, verifier: Verifier, progress: str | None = None) -> list[list[tuple]]:
    """n samples of each question as (sample, text, verdict); a verdict may be None. Every rank takes its share, and gets all."""
    mine = ranks.share(questions)
    samples = sampler.generate([q["prompt_ids"] for q in mine], n, ranks.share(seeds), max_tokens=s.response_limit,
                               temperature=s.temperature, top_p=s.top_p, progress=progress if ranks.FIRST else None)
    texts = decode(sampler.policy.tokenizer, [x for group in samples for x in group])
    checked = iter(zip(texts, verifier.verify_batch(texts, [q["answer"] for q in mine for _ in range(n)])))
    return ranks.merge([[(x, *next(checked)) for x in group] for group in samples])


def sample_groups(s: Settings, questions: list[dict], position: int, sampler, verifier: Verifier) -> list[Group]:
    """G fresh, verified rollouts of each of the P questions at `position` of the stream.

    Reward +1 or -1 (paper §3.2) plus the overlong penalty. A row without a verdict is left out, never scored.
    """
    batch = [question_at(questions, s.seed, position + i) for i in range(s.questions)]
    seeds = [derive_seed(s.seed, "rollout", position + i) for i in range(s.questions)]
    groups = []
    for question, group in zip(batch, answers(s, batch, s.rollouts, seeds, sampler, verifier, "sample")):
        rows = []
        for x, _, correct in group:
            if correct is not None:
                penalty = overlong_penalty(len(x.ids), s.response_limit, s.overlong_buffer, s.overlong_factor)
                rows.append(Row(x.ids, (1.0 if correct else -1.0) + penalty, correct, x.finish_reason, False, x.logprobs))
        groups.append(Group(question, rows))
    return groups


def informative(group: Group) -> bool:
    """Do the fresh rollouts disagree? (DAPO's filter; replayed rows are not asked)"""
    return len({row.correct for row in group.rows if not row.replayed}) > 1


def replay_rows(s: Settings, pool: Pool, group: Group, step: int, run: str) -> list[Row]:
    """Up to M stored answers for the group's question; fewer where the pool has fewer."""
    question = group.question["id"]
    if sum(row.correct for row in group.rows) > s.replay_hard * len(group.rows):  # ablation: hard questions only
        return []
    if s.replay_rate < 1 and (pool.success_rate(question) or 0.0) > s.replay_rate:  # ablation: by the collection's success rate
        return []
    only = dict(run=run, max_age=s.grow_age or None, text=False)  # of this run's own answers, those of earlier steps
    draws = pool.draw(question, s.replay, s.seed, step, select=s.replay_select, repeats=s.replay_repeats, **only)
    draws += pool.draw(question, s.replay_failures, s.seed, step, failures=True, **only)  # ablation: negative replay
    return [Row(d["response_ids"], d["reward"], d["reward"] > 0, d["finish_reason"], True) for d in draws]


def grow_pool(pool: Pool, groups: list[Group], step: int, run: str, tokenizer) -> None:
    """Append the step's right fresh answers. After a crash the repeated step appends nothing twice (once=True)."""
    for group in groups:
        q, rows = group.question, [row for row in group.rows if row.correct and row.finish_reason == "stop"]
        texts = decode(tokenizer, rows)
        pool.append([{"question_id": q["id"], "problem": q["problem"], "answer": q["answer"], "response": text, "response_ids": row.ids,
                      "finish_reason": "stop", "reward": 1.0, "sampler_logprob": sum(row.sampler_logprobs), "run": run, "step": step,
                      "source": q["source"]} for row, text in zip(rows, texts)], once=True)


def my_micro_batches(rows: list[tuple], s: Settings) -> list[list[int]]:
    """This rank's micro-batches of the (prompt, row) pairs, as indices. Every rank has the same number, maybe empty ones:
    under FSDP2 a forward or backward pass is a collective."""
    return ranks.share(micro_batches([p for p, _ in rows], [row.ids for _, row in rows], s.micro_tokens, ranks.RANKS))


def take(policy: Policy, rows: list[tuple], micro: list[int]):
    """Prompts and rows of a micro-batch; of an empty one a row without response, which adds nothing to any sum."""
    nothing = ([0], Row([], 0.0, False, "", False, old_logprobs=torch.zeros(0, device=policy.device)))
    return zip(*([rows[i] for i in micro] or [nothing]))


@torch.no_grad()
def score_old(policy: Policy, s: Settings, groups: list[Group]) -> None:
    """Old log-probs of every row, replayed ones too, under the policy as it is before the step's first update (eq. 4).
    The same function as in the update: rho is 1 at the first mini-batch."""
    rows, scored = [(g.question["prompt_ids"], row) for g in groups for row in g.rows], []
    for micro in my_micro_batches(rows, s):
        prompts, chosen = take(policy, rows, micro)
        scored += scores(micro, *response_logprobs(policy, prompts, [row.ids for row in chosen], s.temperature, True))
    keep_old(policy, rows, scored)


def scores(micro: list[int], logprobs, mask, entropy) -> list[tuple]:
    """(index, log-probs (T,), mean entropy) of each row of a micro-batch, from response_logprobs()."""
    return list(zip(micro, logprobs.detach().cpu(), (entropy.detach().sum(-1) / mask.sum(-1)).tolist()))


def keep_old(policy: Policy, rows: list[tuple], scored: list[tuple]) -> None:
    """Give every row the old log-probs and the entropy that one of the ranks has computed."""
    for i, logprobs, entropy in (x for part in ranks.gather(scored) for x in part):
        row = rows[i][1]
        row.old_logprobs, row.entropy = logprobs[:len(row.ids)].to(policy.device), entropy


def importance_weights(row: Row, correction: str, cap: float) -> torch.Tensor | float:
    """Weights (len(ids),) that make up for a fresh answer drawn from the sampler's probabilities, not from the trainer's.

    token: trainer / sampler probability of each token, truncated at cap (TIS). sequence: 1, or 0 for an answer whose
    probabilities differ by more than the factor cap as a whole; long answers gather more of it. A replayed row has 1.
    """
    if row.replayed or correction == "none":
        return 1.0
    log_ratio = row.old_logprobs - torch.tensor(row.sampler_logprobs, device=row.old_logprobs.device)
    if correction == "token":
        return log_ratio.exp().clamp(max=cap)
    return torch.full_like(log_ratio, float(log_ratio.sum().abs() <= math.log(cap)))


def update(policy: Policy, optimizer, s: Settings, groups: list[Group], reference: Policy | None) -> dict[str, float]:
    """One optimizer update per `mini_batch` questions, over their fresh and replayed rows. Returns sums for metrics.

    Rows that score_old() left alone, where the step has one update only, take that update's log-probs for the old ones."""
    sums, counts = defaultdict(float), Counter()
    for start in range(0, len(groups), s.mini_batch):
        rows = [(g.question["prompt_ids"], row) for g in groups[start:start + s.mini_batch] for row in g.rows]
        denominator = sum(len(row.ids) for _, row in rows)  # of the whole mini-batch, of all ranks, before the first micro-batch
        if reference is None:  # a row of advantage 0 has gradient 0: it counts in the denominator and is not computed
            rows = [(p, row) for p, row in rows if row.advantage]
        first, scored = any(row.old_logprobs is None for _, row in rows), []
        for micro in my_micro_batches(rows, s):
            prompts, chosen = take(policy, rows, micro)
            logprobs, mask, entropy = response_logprobs(policy, prompts, [row.ids for row in chosen], s.temperature, first)
            if first:
                old_logprobs = logprobs.detach()  # (B, T)
                scored += scores(micro, logprobs, mask, entropy)
            else:
                old_logprobs = pad_sequence([row.old_logprobs for row in chosen], batch_first=True)
            advantages = pad_sequence([row.advantage * row.weights * torch.ones(len(row.ids), device=policy.device) for row in chosen],
                                      batch_first=True)  # (B, T)
            loss, stats = policy_loss(logprobs, old_logprobs, advantages, mask, denominator, s.clip_low, s.clip_high, s.dual_clip)
            if reference is not None:  # ablation: KL to the base model, k3 estimator
                with torch.no_grad():
                    base, _, _ = response_logprobs(reference, prompts, [row.ids for row in chosen], s.temperature)
                gap = torch.where(mask, base - logprobs, 0.0)
                kl = (gap.exp() - gap - 1).sum() / denominator
                loss = loss + s.kl_coef * kl
                sums["kl"] += float(kl.detach())
            (loss * ranks.RANKS).backward()  # FSDP2 averages over the ranks; the token mean is a sum with one denominator
            sums["loss"] += float(loss.detach())
            for name, values in [*stats.items(), ("trained_tokens", mask.sum(-1))]:  # fresh and replayed rows apart
                for row, value in zip(chosen, values.tolist()):
                    sums["replay/" * row.replayed + name] += value
        if first:
            keep_old(policy, rows, scored)
        norm = optimizer_step(policy, optimizer, s.grad_clip)
        counts += Counter(updates=1, skipped_updates=not math.isfinite(norm), grad_norm=norm if math.isfinite(norm) else 0.0)
    return ranks.add(sums) | counts


def mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def mismatch(fresh: list[Row]) -> np.ndarray:
    """|sampler log-prob - old log-prob| of every fresh token that has both."""
    return np.concatenate([np.abs(np.subtract(row.sampler_logprobs, row.old_logprobs.cpu().numpy())) for row in fresh
                           if row.old_logprobs is not None] or [[0.0]])


def step_metrics(s: Settings, groups: list[Group], sums: dict[str, float]) -> dict[str, float]:
    """Metrics of one step, of fresh rows; those of replayed rows begin with replay/. README.md explains each."""
    fresh = [row for g in groups for row in g.rows if not row.replayed]
    replayed = [row for g in groups for row in g.rows if row.replayed]
    gaps = mismatch(fresh)
    updates, with_replay = max(sums["updates"], 1), s.replay + s.replay_failures > 0
    out = {"reward": mean(row.reward for row in fresh), "accuracy": mean(row.correct for row in fresh),
           "length": mean(len(row.ids) for row in fresh), "truncated": mean(row.finish_reason == "length" for row in fresh),
           "entropy": mean(row.entropy for row in fresh if row.old_logprobs is not None), "questions": len(groups), "rows": len(fresh),
           "dead_groups": mean(not any(row.advantage for row in g.rows) for g in groups),
           "dead_groups_fresh": mean(not informative(g) for g in groups),
           "mismatch_mean": float(gaps.mean()), "mismatch_max": float(gaps.max()), "loss": sums["loss"] / updates,
           "grad_norm": sums["grad_norm"] / updates, "updates": sums["updates"], "skipped_updates": sums["skipped_updates"]}
    weights = torch.cat([row.weights for row in fresh if torch.is_tensor(row.weights)] or [torch.ones(0)])
    if len(weights):
        out |= {"is_weight": float(weights.mean()), "is_cut": float(((weights == 0) | (weights >= s.is_cap)).float().mean())}
    if s.kl_coef:
        out["kl"] = sums["kl"] / updates
    if with_replay:
        out |= {"replay/rows": len(replayed), "replay/questions": sum(any(row.replayed for row in g.rows) for g in groups),
                "replay/reward": mean(row.reward for row in replayed), "replay/length": mean(len(row.ids) for row in replayed),
                "replay/advantage": mean(row.advantage for row in replayed),
                "replay/old_logprob": mean(float(row.old_logprobs.mean()) for row in replayed if row.old_logprobs is not None)}
    for prefix in ["", "replay/"] if with_replay else [""]:
        tokens = sums[prefix + "trained_tokens"]
        out |= {prefix + name: sums[prefix + name] / max(tokens, 1) for name in ("ratio", "clip_low", "clip_high", "clip_dual")}
        out[prefix + "trained_tokens"] = tokens
    return out


# ---------------------------------------------------------------------------------------------------------- evaluation


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from n samples of which c are right: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: list[str | None], correct: list[bool]) -> float:
    """maj@k of one question: is the most frequent answer right? Equally frequent ones share; no answer is no vote."""
    votes, right = Counter(), {}
    for answer, ok in zip(answers, correct):
        if answer is not None:
            key = canonical(answer)
            votes[key] += 1
            right[key] = right.get(key, False) or ok
    return mean(right[key] for key, count in votes.items() if count == max(votes.values()))


def evaluate(s: Settings, questions: list[dict], n: int, sampler, verifier: Verifier) -> tuple[dict, list[dict]]:
    """n samples of each question. Returns metrics "eval/<source>/<metric>" and one record per response.

    avg@n is the mean accuracy, se its standard error over questions. Seeds depend on the run's seed and the question
    alone, so that two evaluations differ in the policy only.
    """
    seeds = [derive_seed(s.seed, "eval", q["id"]) for q in questions]
    sampler.wake()
    groups = answers(s, questions, n, seeds, sampler, verifier, "evaluate")
    sampler.sleep()
    records = [{"id": q["id"], "source": q["source"], "correct": bool(ok), "answer": q["answer"], "extracted": extract_answer(text),
                "finish_reason": x.finish_reason, "tokens": len(x.ids), "problem": q["problem"], "response": text}
               for q, group in zip(questions, groups) for x, text, ok in group]
    by_source = defaultdict(list)
    for i in range(0, len(records), n):
        by_source[records[i]["source"]].append(records[i:i + n])
    metrics = {}
    for source, groups in by_source.items():
        right = [[r["correct"] for r in group] for group in groups]
        rates = np.mean(right, -1)  # (questions,)
        scores = {"questions": len(groups), f"avg@{n}": float(rates.mean()),
                  "se": float(rates.std(ddof=1) / math.sqrt(len(rates))) if len(rates) > 1 else 0.0,
                  f"maj@{n}": mean(majority([r["extracted"] for r in group], ok) for group, ok in zip(groups, right))}
        for k in sorted({min(1 << b, n) for b in range(1, 11)} - {1}):
            scores[f"pass@{k}"] = mean(pass_at_k(n, sum(ok), k) for ok in right)
        scores["length"] = mean(r["tokens"] for group in groups for r in group)
        scores["truncated"] = mean(r["finish_reason"] == "length" for group in groups for r in group)
        metrics |= {f"eval/{source}/{name}": value for name, value in scores.items()}
    return metrics, records


# ---------------------------------------------------------------------------------------------------------- run folder

RESUME_MAY_CHANGE = {"steps", "save_every", "keep", "overwrite", "verify_workers", "gpu_memory_fraction", "phase_minutes", "profile", "log"}  # what leaves the steps done as they are


def write_json(path: str, value) -> None:
    with open(path + ".tmp", "w") as f:
        json.dump(value, f, indent=1)
    os.replace(path + ".tmp", path)


def append_jsonl(path: str, records: list[dict]) -> None:
    with open(path, "a") as f:
        f.write("".join(json.dumps(record) + "\n" for record in records))
        f.flush()
        os.fsync(f.fileno())


def keep_lines(path: str, keep) -> list[dict]:
    """Rewrite a jsonl file to the records for which keep(record), without a torn last line; returns them."""
    if not os.path.exists(path):
        return []
    with open(path) as f:
        lines = [line for line in f if line.endswith("\n") and keep(json.loads(line))]
    with open(path + ".tmp", "w") as f:
        f.writelines(lines)
    os.replace(path + ".tmp", path)
    return [json.loads(line) for line in lines]


def checkpoints(run: str) -> list[str]:
    """Complete checkpoints of a run folder, oldest first."""
    folder = os.path.join(run, "checkpoints")
    names = [n for n in os.listdir(folder) if re.fullmatch(r"step-\d{6,}", n)] if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names, key=lambda n: int(n[5:]))]


def resolve_model(path: str) -> str:
    """A run folder stands for its newest checkpoint."""
    if not os.path.isdir(os.path.join(path, "checkpoints")):
        return path
    if not checkpoints(path):
        raise InputError(f"--model={path}: this run has no checkpoint yet")
    return checkpoints(path)[-1]


def open_run(s: Settings) -> tuple[str | None, object]:
    """Lock the run folder and look into it. Returns the checkpoint to continue from, None to start, and the lock to hold.

    A folder that is no run, or the run of other settings, is left alone: InputError tells the difference.
    """
    if os.path.isfile(s.out):
        raise InputError(f"--out={s.out}: is a file; name a folder")
    os.makedirs(s.out, exist_ok=True)
    lock = open(os.path.join(s.out, ".lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"--out={s.out}: another process is running in this folder") from None
    old, config = None, os.path.join(s.out, "config.json")
    if os.path.exists(config):
        with open(config) as f:
            old = json.load(f).get("settings")  # a model folder has a config.json too, but no settings in it
    if old is None and set(os.listdir(s.out)) - {".lock", "config.json.tmp"}:
        raise InputError(f"--out={s.out}: holds files but is no run folder; choose another")
    if old is None or s.overwrite:
        return None, lock
    for name, value in dataclasses.asdict(s).items():
        if name not in RESUME_MAY_CHANGE and old.get(name) != value:
            raise InputError(f"--out={s.out}: holds a run with --{name}={old.get(name)}, now {value}; choose another "
                             "folder, or --overwrite to delete that run")
    return (checkpoints(s.out) or [None])[-1], lock


def begin_run(s: Settings, done: int, fresh: bool) -> str:
    """Write config.json, and cut the logs back to the step to continue from: what comes after is made again, the same.
    A checkpoint that was cut off goes, so that it takes no room from the next.
    A fresh start with --overwrite deletes the old run first. Returns the run's id, which it keeps for life."""
    for name in os.listdir(s.out) if fresh and s.overwrite else []:
        path = os.path.join(s.out, name)
        shutil.rmtree(path) if os.path.isdir(path) else name != ".lock" and os.remove(path)
    config, run = os.path.join(s.out, "config.json"), uuid.uuid4().hex[:12]
    if os.path.exists(config):
        with open(config) as f:
            run = json.load(f)["run"]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "numpy")}
    write_json(config, {"command": "train", "run": run, "settings": dataclasses.asdict(s), "versions": versions,
                                                    "python": sys.version.split()[0]})
    for torn in glob.glob(os.path.join(glob.escape(s.out), "checkpoints", "*.tmp")):
        shutil.rmtree(torn)
    for name in ("metrics.jsonl", "samples.jsonl"):
        keep_lines(os.path.join(s.out, name), lambda record: not fresh and record["step"] <= done)
    return run


def save_run(policy: Policy, optimizer, s: Settings, step: int, position: int) -> None:
    """Checkpoint the step, then drop the oldest beyond --keep, but not the best."""
    os.makedirs(os.path.join(s.out, "checkpoints"), exist_ok=True)
    needed = checkpoint_bytes(policy, optimizer)
    free = ranks.first(lambda: shutil.disk_usage(s.out).free)
    if free < needed:
        raise InputError(f"--out={s.out}: a checkpoint takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free; the earlier ones "
                         "are left as they were: make room, and the same command continues from the newest")
    state = {"step": step, "position": position, "python_rng": random.getstate()}
    save_checkpoint(policy, os.path.join(s.out, "checkpoints", f"step-{step:06d}"), optimizer, state)
    if ranks.FIRST and s.keep:
        for old in set(checkpoints(s.out)[:-s.keep]) - {best_checkpoint(s.out)}:
            shutil.rmtree(old)


def best_checkpoint(run: str) -> str | None:
    """The checkpoint of the best evaluation (mean avg@k over the data sets; of equals the latest); None without any."""
    scores = {}
    with open(os.path.join(run, "metrics.jsonl")) as f:
        for record in map(json.loads, f):
            values = [v for k, v in record.items() if re.fullmatch(r"eval/.*/avg@\d+", k)]
            if values:
                scores[os.path.join(run, "checkpoints", f"step-{record['step']:06d}")] = mean(values)
    return max((c for c in checkpoints(run) if c in scores), key=lambda c: (scores[c], c), default=None)


# --------------------------------------------------------------------------------------------------------------- train


def describe(s: Settings, questions: list[dict], policy: Policy, sampler) -> None:
    """Print the resolved settings and the sizes that follow from them, before the first step."""
    print("settings: " + " ".join(f"--{name}={getattr(s, name)}" for name in fields_of("train")))
    trained, total = sum(p.numel() for p in policy.parameters()), sum(p.numel() for p in policy.model.parameters())
    print(f"policy: {trained:,} of {total:,} parameters train, on {policy.device} in {str(policy.compute_dtype)[6:]}; "
          f"stop ids {policy.stop_ids}; sampler: {sampler.name}")
    rows = s.questions * (s.rollouts + s.replay + s.replay_failures)
    print(f"per step: {s.questions} groups of {s.rollouts} fresh + {s.replay + s.replay_failures} replayed rows = {rows} rows, at most "
          f"{rows * s.response_limit:,} response tokens; {math.ceil(s.questions / s.mini_batch)} updates of {s.mini_batch} questions")
    print(f"in all: {s.steps} steps = {s.steps * s.questions / len(questions):.2f} epochs of {len(questions)} questions", flush=True)


def longest_row(policy: Policy, s: Settings, questions: list[dict]) -> int:
    """Tokens of the longest prompt with the longest response; InputError if the model cannot take as many."""
    longest = max(len(q["prompt_ids"]) for q in questions) + s.response_limit
    limit = getattr(policy.config, "max_position_embeddings", longest)
    if longest > limit:
        raise InputError(f"--response_limit={s.response_limit}: {longest} tokens with the longest prompt, but the model ends at {limit}")
    return longest


def progress_line(record: dict, s: Settings, seconds: float) -> str:
    left = int((s.steps - record["step"]) * seconds)
    line = (f"step {record['step']}/{s.steps}  reward {record['reward']:+.3f}  accuracy {record['accuracy']:.3f}  "
            f"length {record['length']:.1f}  entropy {record['entropy']:.3f}  clip {record['clip_low'] + record['clip_high']:.4f}  "
            f"dead {record['dead_groups']:.2f}  {record['tokens_per_second']:,.0f} tok/s  {record['time/step']:.2f} s  "
            f"left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
    if "time/swap" in record:  # another engine samples
        line += f"  mismatch {record['mismatch_mean']:.1e}"
    return line + "".join(f"  {k[5:]} {v:.3f}" for k, v in record.items() if re.fullmatch(r"eval/.*/avg@\d+", k))


def profiled(s: Settings, steps: range):
    """The steps. With --profile the second of this process (the first one warms up) is recorded: trace-<step>.json in the run
    folder, for ui.perfetto.dev or chrome://tracing, and its ten largest costs are printed."""
    for step in steps:
        if not s.profile or step != steps[:2][-1]:
            yield step
            continue
        with torch.profiler.profile() as profiler:
            yield step
        if ranks.FIRST:
            profiler.export_chrome_trace(os.path.join(s.out, f"trace-{step:06d}.json"))
            print(profiler.key_averages().table(sort_by=f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total", row_limit=10))


def open_log(s: Settings, run: str, done: int):
    """A function (record, step) that sends a step's metrics to where --log says."""
    if s.log == "wandb":
        import wandb

        return wandb.init(project="rlep", name=s.out, dir=s.out, id=run, resume="allow", config=dataclasses.asdict(s)).log
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(os.path.join(s.out, "tensorboard"), purge_step=done + 1)  # a step made again replaces the old one
    return lambda record, step: [board.add_scalar(name, value, step) for name, value in record.items()] and board.flush()


def train(s: Settings) -> None:
    """GRPO, and RLEP with --replay. Continues by itself from the newest checkpoint of --out."""
    ranks.start(s.device, s.phase_minutes)
    checkpoint, lock = open_run(s) if ranks.FIRST else (None, None)
    checkpoint = ranks.first(lambda: checkpoint)
    model = checkpoint or resolve_model(s.model)
    tokenizer = load_tokenizer(model)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = ranks.first(load_data, s.data, s, tokenizer, verifier, "data", s.max_questions)
    held_out = ranks.first(load_data, s.eval_data, s, tokenizer, verifier, "eval_data") if s.eval_data else []
    if min(s.questions, len(held_out) or s.questions) < ranks.RANKS:
        raise InputError(f"{ranks.RANKS} ranks need at least as many --questions and held-out questions, for each takes its share")
    policy = load_policy(model, lora_rank=s.lora_rank, lora_alpha=s.lora_alpha, device=s.device, compute_dtype=s.dtype,
                         load_4bit=s.load_4bit, activation_checkpointing=s.activation_checkpointing)
    reference = load_policy(resolve_model(s.model), load_4bit=s.load_4bit, device=s.device, compute_dtype=s.dtype, train=False) if s.kl_coef else None
    optimizer = make_optimizer(policy, s.lr, s.weight_decay, s.beta1, s.beta2, s.optimizer_8bit)
    sampler = make_sampler(policy, s, longest_row(policy, s, questions + held_out))
    pool = None
    if s.pool and ranks.FIRST:
        pool = Pool(s.pool, readonly=not s.grow_pool, tokenizer=fingerprint(tokenizer), max_tokens=s.response_limit)
        covered = sum(q["id"] in pool for q in questions)
        print(f"pool: {len(pool)} answers; {covered} of {len(questions)} questions covered")
        if not covered and not s.grow_pool:
            raise InputError(f"--pool={s.pool}: holds no answer to any question of --data={s.data}; was it collected on other data?")
    describe(s, questions, policy, sampler)

    done, position = 0, 0
    if checkpoint:
        state = load_trainer_state(checkpoint, optimizer)
        done, position = state["step"], state["position"]
        random.setstate(state["python_rng"])
        print(f"continuing after step {done} of {s.steps}" if done < s.steps else
              f"finished: {done} steps are done; a larger --steps continues, --overwrite starts again", flush=True)
    run = ranks.first(begin_run, s, done, checkpoint is None)
    send = open_log(s, run, done) if s.log and ranks.FIRST else None

    draw_again = 0.0  # when the curves are due: drawing takes a second, a small model's five steps may too

    def log(step: int, record: dict, records: list[dict]) -> None:
        """Append to metrics.jsonl; after an evaluation also one response of each of four questions, and the curves."""
        nonlocal draw_again
        if not ranks.FIRST:
            return
        if send:
            send(record, step)
        append_jsonl(os.path.join(s.out, "samples.jsonl"), [{"step": step, **r} for r in records[:4 * s.eval_samples:s.eval_samples]])
        append_jsonl(os.path.join(s.out, "metrics.jsonl"), [{"step": step, **record}])
        start = time.monotonic()
        if records and (step == s.steps or start > draw_again):
            import plot
            plot.draw([s.out], os.path.join(s.out, "curves.png"))
            draw_again = time.monotonic() + 20 * (time.monotonic() - start)

    if not checkpoint and held_out:
        ranks.phase("evaluate", s.phase_minutes)
        metrics, records = evaluate(s, held_out, s.eval_samples, sampler, verifier)
        log(0, metrics, records)
        print("step 0:" + "".join(f"  {k[5:]} {v:.3f}" for k, v in metrics.items() if "/avg@" in k), flush=True)

    pace = None  # seconds per step, smoothed
    for step in profiled(s, range(done + 1, s.steps + 1)):
        clock, verified = [time.perf_counter()], Counter(verifier.counts)

        # 1-2. sample G fresh rollouts per question from the current policy, and verify them
        ranks.phase("sample", s.phase_minutes)
        groups, sampled = [], []
        sampler.wake()  # vLLM takes over the policy's weights here
        while len(groups) < s.questions and len(sampled) < (s.dynamic_tries if s.dynamic_sampling else 1):
            fresh = sample_groups(s, questions, position, sampler, verifier)
            position += s.questions
            sampled.append(mean(row.correct for group in fresh for row in group.rows))
            groups += [group for group in fresh if informative(group)] if s.dynamic_sampling else fresh  # ablation: DAPO
        groups = groups[:s.questions]  # whole groups
        sampler.sleep()
        clock.append(time.perf_counter())

        # 3. replay: add up to M stored answers to each question's group
        if s.pool:
            if s.grow_pool:  # ablation: the pool takes in what this run finds
                ranks.first(grow_pool, pool, groups, step, run, tokenizer)
            for group, replayed in zip(groups, ranks.first(lambda: [replay_rows(s, pool, group, step, run) for group in groups])):
                group.rows = group.rows + replayed

        # 4. advantages over each mixed group
        rows = [row for group in groups for row in group.rows]
        labels = [i for i, group in enumerate(groups) for _ in group.rows]
        in_baseline = [s.replay_baseline == "shared" or not row.replayed for row in rows]  # ablation: replay beside its group
        advantages = group_advantages([row.reward for row in rows], labels, s.advantage_std, in_baseline)
        if s.rollouts == 0:  # control: supervised fine-tuning on the pool alone
            advantages = torch.ones(len(rows))
        for row, advantage in zip(rows, advantages.tolist()):
            row.advantage = advantage

        # 5. old log-probs of all rows under the current policy; those of the only update of a step are the old ones
        ranks.phase("score", s.phase_minutes)
        if len(groups) > s.mini_batch or sampler.name == "vllm":
            score_old(policy, s, groups)
        if sampler.name == "vllm":  # every answer proves the weight swap
            canary(mismatch([row for row in rows if not row.replayed]), policy, s.temperature)
        correction = s.is_correction if s.is_correction != "auto" else "token" if sampler.name == "vllm" else "none"
        for row in rows:  # ablation: sampler and trainer taken for one (--is_correction=none)
            row.weights = importance_weights(row, correction, s.is_cap)
        clock.append(time.perf_counter())

        # 6. one optimizer update per mini-batch of questions
        ranks.phase("update", s.phase_minutes)
        lr = s.lr * min(1.0, step / max(s.warmup, 1))
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr
        sums = update(policy, optimizer, s, groups, reference)
        clock.append(time.perf_counter())

        # 7. log and evaluate
        record = {**step_metrics(s, groups, sums), "lr": lr, "position": position, "sampled_batches": len(sampled), "sampled_accuracy": mean(sampled),
                  **{f"verify/{kind}": n for kind, n in sorted(ranks.add(Counter(verifier.counts) - verified).items())}}
        if sampler.name == "vllm":
            record["time/swap"] = sampler.swap_seconds
        last, records = step == s.steps, []
        if held_out and (last or step % s.eval_every == 0):
            ranks.phase("evaluate", s.phase_minutes)
            metrics, records = evaluate(s, held_out, s.eval_samples, sampler, verifier)
            record |= metrics
        clock.append(time.perf_counter())
        sample_time, score_time, update_time, eval_time = np.diff(clock).tolist()
        total = sample_time + score_time + update_time
        record |= {"time/sample": sample_time, "time/score": score_time, "time/update": update_time, "time/eval": eval_time,
                   "time/step": total, "tokens_per_second": record["length"] * record["rows"] / total}
        log(step, record, records)
        pace = total + eval_time if pace is None else 0.9 * pace + 0.1 * (total + eval_time)
        print(progress_line({"step": step, **record}, s, pace), flush=True)

        # 8. save
        if last or step % s.save_every == 0:
            ranks.phase("save", s.phase_minutes)
            save_run(policy, optimizer, s, step, position)
    sampler.close()
    verifier.close()
    ranks.stop()
    if ranks.FIRST:
        lock.close()


# ------------------------------------------------------------------------------------------------------------- collect


def collect(s: Settings) -> None:
    """K samples of every question; the verified ones become the experience pool (paper §3.2).

    Beside the pool, <pool>.done records the outcome of each question: stopped and run again, none is done twice.
    """
    ranks.start(s.device, s.phase_minutes)
    model = resolve_model(s.model)
    tokenizer = load_tokenizer(model)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = ranks.first(load_data, s.data, s, tokenizer, verifier, "data", s.max_questions)
    os.makedirs(os.path.dirname(s.pool) or ".", exist_ok=True)
    with Pool(s.pool, tokenizer=fingerprint(tokenizer), max_tokens=s.response_limit) if ranks.FIRST else contextlib.nullcontext() as pool:
        done = ranks.first(open_done, s, model)
        policy = load_policy(model, load_4bit=s.load_4bit, device=s.device, compute_dtype=s.dtype, train=False)
        sampler = make_sampler(policy, s, longest_row(policy, s, questions))
        todo = [q for q in questions if q["id"] not in done]
        print(f"collect: {s.samples} samples of {len(todo)} questions ({len(questions) - len(todo)} done before)", flush=True)
        sampler.wake()
        # vLLM takes up a waiting answer as soon as one ends: of large batches it spends less time on the last few
        size = max(1, s.sampler_rows * (8 if sampler.name == "vllm" else 1) // s.samples) * ranks.RANKS
        bar = tqdm(total=len(todo), desc="collect", unit="question", disable=None if ranks.FIRST else True)
        for batch in (todo[i:i + size] for i in range(0, len(todo), size)):
            ranks.phase("sample", s.phase_minutes)
            groups = answers(s, batch, s.samples, [derive_seed(s.seed, "collect", q["id"]) for q in batch], sampler, verifier)
            for question, group in zip(batch, groups) if ranks.FIRST else ():
                samples, texts, verdicts = zip(*group)
                records, outcome = pool_records(s, question, samples, texts, verdicts)
                origin = {"model": model, "tokenizer": fingerprint(tokenizer), "temperature": s.temperature, "top_p": s.top_p}
                # a crash may come between these two lines: once=True then adds nothing that the pool already has
                pool.append([r | origin for r in records], allow_failed=s.keep_failures, once=True)
                append_jsonl(s.pool + ".done", [outcome])
                done[question["id"]] = outcome
                bar.update()
        bar.close()
        if ranks.FIRST:
            outcomes = [done[q["id"]] for q in questions]
            stored = sum(outcome["stored"] > 0 for outcome in outcomes)
            print(f"coverage: {stored} of {len(questions)} questions ({stored / len(questions):.1%}); "
                  f"{sum(o['correct'] for o in outcomes) / sum(o['samples'] for o in outcomes):.1%} of the samples right; "
                  f"{len(pool)} answers in {s.pool}")
    sampler.close()
    verifier.close()
    ranks.stop()


def open_done(s: Settings, model: str) -> dict[str, dict]:
    """Outcomes of the questions that are done, by id. The file's first line holds the settings: others are refused."""
    path = s.pool + ".done"
    header = {"model": model, **{name: getattr(s, name) for name in ("samples", "temperature", "top_p", "response_limit",
                                                                      "min_correct", "keep_failures", "seed")}}
    lines = keep_lines(path, lambda record: True)
    for name, value in header.items() if lines else ():
        if lines[0].get(name) != value:
            raise InputError(f"--pool={s.pool}: is being collected with --{name}={lines[0].get(name)}, now {value}; name another pool")
    if not lines:
        append_jsonl(path, [header])
    return {line["question_id"]: line for line in lines[1:]}


def pool_records(s: Settings, question: dict, samples: list, texts: list[str], verdicts: list) -> tuple[list[dict], dict]:
    """What enters the pool of one question's samples, and its outcome. A cut answer never enters, whatever it says."""
    right = [bool(verdict) and x.finish_reason == "stop" for verdict, x in zip(verdicts, samples)]
    wanted = [(ok and sum(right) >= s.min_correct) or (s.keep_failures and not ok and x.finish_reason == "stop")
              for ok, x in zip(right, samples)]
    records = [{"question_id": question["id"], "problem": question["problem"], "answer": question["answer"], "response": text,
                "response_ids": x.ids, "finish_reason": x.finish_reason, "reward": 1.0 if ok else -1.0,
                "sampler_logprob": sum(x.logprobs), "success_rate": mean(right), "source": question["source"]}
               for want, ok, x, text in zip(wanted, right, samples, texts) if want]
    stored = sum(right) if sum(right) >= s.min_correct else 0
    return records, {"question_id": question["id"], "samples": len(samples), "correct": sum(right), "stored": stored}


# ---------------------------------------------------------------------------------------------------------------- eval


def evaluate_command(s: Settings) -> None:
    """Print avg@k with its standard error, maj@k and pass@k per data set; with --out keep them and every response."""
    ranks.start(s.device, s.phase_minutes)
    settings = {k: v for k, v in dataclasses.asdict(s).items() if k not in ("overwrite", "phase_minutes")}
    stored = os.path.join(s.out, "eval.json") if s.out else ""
    if os.path.exists(stored) and not s.overwrite:
        with open(stored) as f:
            before = json.load(f)
        for name, value in settings.items():
            if before["settings"].get(name) != value:
                raise InputError(f"--out={s.out}: holds an evaluation with --{name}={before['settings'].get(name)}, now {value}; "
                                 "choose another folder, or --overwrite")
        print_scores(before["metrics"], s.samples)
        return ranks.stop()
    model = resolve_model(s.model)
    verifier = Verifier(workers=s.verify_workers, time_limit=s.verify_seconds)
    questions = ranks.first(load_data, s.data, s, load_tokenizer(model), verifier, "data", s.max_questions)
    policy = load_policy(model, load_4bit=s.load_4bit, device=s.device, compute_dtype=s.dtype, train=False)
    sampler = make_sampler(policy, s, longest_row(policy, s, questions))
    ranks.phase("evaluate", s.phase_minutes)
    metrics, records = evaluate(s, questions, s.samples, sampler, verifier)
    print_scores(metrics, s.samples)
    if s.out and ranks.FIRST:
        os.makedirs(s.out, exist_ok=True)
        with open(os.path.join(s.out, "responses.jsonl"), "w") as f:
            f.writelines(json.dumps(record) + "\n" for record in records)
        write_json(stored, {"settings": settings, "metrics": metrics})
    sampler.close()
    verifier.close()
    ranks.stop()


PAPER = {"aime24": (0.382, 0.399), "aime25": (0.198, 0.223), "amc23": (0.770, 0.822)}  # best avg@32 of baseline and RLEP, 7B model


def print_scores(metrics: dict, n: int) -> None:
    """A line per data set, with the paper's numbers for its sets, known by any usual name: aime24, AIME-2024, aime_2024..."""
    for source in dict.fromkeys(name[5:].rpartition("/")[0] for name in metrics):
        m = {name.rpartition("/")[2]: value for name, value in metrics.items() if name[5:].rpartition("/")[0] == source}
        known = re.search(r"(aime|amc)[-_]?(?:20)?(2\d)(?!\d)", source.lower())
        paper = PAPER.get("".join(known.groups())) if known else None
        print(f"{source}: {m.pop('questions')} questions  avg@{n} {m.pop(f'avg@{n}'):.3f} ± {m.pop('se'):.3f}"
              + (f" (paper, avg@32 of 7B: baseline {paper[0]:.3f}, RLEP {paper[1]:.3f})" if paper else "")
              + "".join(f"  {name} {value:.3f}" for name, value in m.items()))


def main(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(__doc__ + "\n" + "".join(f"{name:<8} {text}\n" for name, text in COMMANDS.items()) + "\npython rlep.py COMMAND --help tells its options.")
    elif args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, 1, 0.0)[0]
        raise InputError(f"{args[0]}: unknown command; the nearest is {near} (of {', '.join(COMMANDS)})")
    elif "-h" in args or "--help" in args:
        print(help_text(args[0]))
    else:
        {"train": train, "collect": collect, "eval": evaluate_command, "plan": plan.show}[args[0]](parse(args[0], args[1:]))


if __name__ == "__main__":
    sys.excepthook = ranks.report_crash
    try:
        main(sys.argv[1:])
    except InputError as e:
        ranks.refuse(e)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
