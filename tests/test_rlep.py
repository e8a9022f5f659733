"""rlep.py and settings.py: advantages, the mixed batch, the step, resume, the run folder, collect, eval, bad input."""
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, make_model, refused, run

import model as M
import rlep
import settings
import tiny
from data import InputError
from replay import Pool
from sampler import TorchSampler
from verify import Verifier

SIZES = ["--questions=4", "--rollouts=4", "--mini_batch=2", "--response_limit=16", "--overlong_buffer=0", "--lr=1e-3",
         "--warmup=2", "--eval_every=2", "--eval_samples=2", "--save_every=1", "--verify_workers=1", "--device=cpu"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A briefly trained tiny base model, right now and then, with 10 training and 6 held-out questions, and a pool."""
    folder = tmp_path_factory.mktemp("world")
    run("tiny.py", f"--out={folder}/tiny", "--train=10", "--test=6", "--arithmetic_steps=300", "--strategy_steps=10")
    w = {"model": f"{folder}/tiny/base", "data": f"{folder}/tiny/train.jsonl", "test": f"{folder}/tiny/test.jsonl", "pool": f"{folder}/pool.jsonl"}
    tokenizer = M.load_tokenizer(w["model"])
    with open(w["data"]) as f, Pool(w["pool"], tokenizer=rlep.fingerprint(tokenizer)) as pool:
        for i, question in enumerate(map(json.loads, f)):
            texts = [f"{k}{tiny.ANSWER}{question['answer']}" for k in range(i % 4)]  # 0 to 3 distinct answers
            pool.append([{"question_id": question["id"], "response": text, "response_ids": tokenizer(text)["input_ids"] + [1],
                          "finish_reason": "stop", "reward": 1.0, "sampler_logprob": -k} for k, text in enumerate(texts)])
    return w


def train(w, out, *args, replay=True):
    """Run rlep.train in this process."""
    pool = ["--replay=2", f"--pool={w['pool']}"] if replay else []
    rlep.train(settings.parse("train", [f"--model={w['model']}", f"--data={w['data']}", f"--eval_data={w['test']}", *SIZES, *pool, *args, f"--out={out}"]))


def records(out, name="metrics.jsonl"):
    """The records without what a clock put there."""
    with open(os.path.join(out, name)) as f:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "tokens_per"))} for line in f]


def weights(out):
    return torch.cat([p.flatten() for p in M.load_policy(rlep.resolve_model(str(out)), device="cpu").parameters()])


# ----------------------------------------------------------------------------------------------- rewards and advantages


def test_advantages_by_hand():
    """Four rows: mean 0, sample std sqrt(4/3); a group of its own for each label, in any order."""
    s = (4 / 3) ** -0.5
    got = rlep.group_advantages([1, 1, 1, -1, -1, -1], ["a", "b", "a", "a", "b", "a"])
    torch.testing.assert_close(got, torch.tensor([s, 2 ** -0.5, s, -s, -(2 ** -0.5), -s]))
    assert rlep.group_advantages([1, -1], [0, 0], use_std=False).tolist() == [1, -1]


def test_advantages_of_uneven_groups_and_shuffled_rows():
    rewards, groups = [1, -1, -1, 1, 1, 1, -0.5], [0, 0, 0, 1, 1, 2, 1]
    straight = rlep.group_advantages(rewards, groups)
    order = [6, 2, 0, 5, 3, 1, 4]
    assert torch.equal(rlep.group_advantages([rewards[i] for i in order], torch.tensor([groups[i] for i in order])), straight[order])
    assert straight[5] == 0  # a group of one
    for g in (0, 1):
        rows = straight[[i for i, x in enumerate(groups) if x == g]]
        assert rows.sum().abs() < 1e-6 and rows.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [0.35, 1.0, -1.0, 0.1 + 0.2])
def test_equal_rewards_have_no_advantage(value):
    assert not rlep.group_advantages([value] * 18, [0] * 18).any()
    nearly = [value, value + 1e-8, value - 1e-8]
    assert not rlep.group_advantages(nearly, [0] * 3).any()


def test_a_solved_group_stays_silent_whatever_the_pool_lacks():
    """16 of 16 right and no, one or two replays: no spurious advantage (dummy replays would give +0.24 or +0.34)."""
    for m in (0, 1, 2):
        assert not rlep.group_advantages([1.0] * (16 + m), [0] * (16 + m)).any()


def test_unscored_rows_stay_out_of_mean_and_std():
    got = rlep.group_advantages([1.0, None, -1.0, float("nan")], [0] * 4)
    assert got[1] == got[3] == 0
    torch.testing.assert_close(got[[0, 2]], rlep.group_advantages([1.0, -1.0], [0, 0]))
    assert not rlep.group_advantages([None, 1.0], [0, 0]).any()


def test_advantages_by_the_fresh_rows_alone():
    """Fresh 1, -1, -1: mean -1/3, std sqrt(4/3); the replay stands outside. Where fresh rows agree, std counts as 1."""
    fresh, s = [True] * 3 + [False], (4 / 3) ** 0.5
    advantages = lambda rewards, *use_std: rlep.group_advantages(rewards, [0] * 4, *use_std, in_baseline=fresh)  # noqa: E731
    torch.testing.assert_close(advantages([1, -1, -1, 1]), torch.tensor([4 / 3, -2 / 3, -2 / 3, 4 / 3]) / s)
    torch.testing.assert_close(advantages([1, -1, -1, 1], False), torch.tensor([4 / 3, -2 / 3, -2 / 3, 4 / 3]))
    assert advantages([-1, -1, -1, 1]).tolist() == [0, 0, 0, 2] and not advantages([1, 1, 1, 1]).any()


def test_overlong_penalty():
    limits = dict(limit=100, buffer=20, factor=1.0)
    assert [rlep.overlong_penalty(n, **limits) for n in (0, 80, 81, 90, 100, 120)] == [0, 0, -0.05, -0.5, -1, -1]
    assert rlep.overlong_penalty(100, 100, 20, 0.5) == -0.5 and rlep.overlong_penalty(100, 100, 0) == 0


def test_question_order_is_a_permutation_per_epoch_and_pure():
    questions = [{"id": i} for i in range(7)]
    stream = [rlep.question_at(questions, 3, i)["id"] for i in range(21)]
    assert all(sorted(stream[e:e + 7]) == list(range(7)) for e in (0, 7, 14)) and stream[:7] != stream[7:14]
    assert stream[10] == rlep.question_at(questions, 3, 10)["id"]
    assert stream != [rlep.question_at(questions, 4, i)["id"] for i in range(21)]


# ------------------------------------------------------------------------------------------------------ the mixed batch


def mixed_groups(w, policy, **changes):
    """The groups of step 1 as train() makes them, up to the old log-probs."""
    s = settings.Settings(questions=8, rollouts=4, mini_batch=4, response_limit=16, overlong_buffer=0, replay=2, **changes)
    verifier = Verifier(workers=1, time_limit=1.0)
    questions = rlep.load_data(w["data"], s, policy.tokenizer, verifier, "data")
    groups = rlep.sample_groups(s, questions, 0, TorchSampler(policy), verifier)
    verifier.close()
    pool = Pool(w["pool"], readonly=True)
    for group in groups:
        group.rows = group.rows + rlep.replay_rows(s, pool, group, 1, "run")
    rows = [row for group in groups for row in group.rows]
    labels = [i for i, group in enumerate(groups) for _ in group.rows]
    for row, advantage in zip(rows, rlep.group_advantages([r.reward for r in rows], labels).tolist()):
        row.advantage = advantage
    rlep.score_old(policy, s, groups)
    return s, groups, pool


def test_ratio_is_one_at_the_first_mini_batch(world):
    """For fresh and replayed rows, whatever the micro-batches were when the old log-probs were taken."""
    policy = M.load_policy(world["model"], device="cpu")
    s, groups, _ = mixed_groups(world, policy, micro_tokens=60, temperature=0.6)
    rows = [(g.question["prompt_ids"], row) for g in groups for row in g.rows]
    assert {row.replayed for _, row in rows} == {True, False}
    logprobs, mask, _ = M.response_logprobs(policy, [p for p, _ in rows], [row.ids for _, row in rows], 0.6)
    old = torch.nn.utils.rnn.pad_sequence([row.old_logprobs for _, row in rows], batch_first=True)
    assert ((logprobs - old).exp() - 1)[mask].abs().max() < 1e-5
    for _, row in rows:
        if not row.replayed:  # and the sampler's are the trainer's
            torch.testing.assert_close(torch.tensor(row.sampler_logprobs), row.old_logprobs, atol=1e-4, rtol=0)


def test_gradient_of_the_update_is_independent_of_micro_batches(world, monkeypatch):
    policy = M.load_policy(world["model"], device="cpu")
    s, groups, _ = mixed_groups(world, policy)
    seen = []

    def capture(policy, optimizer, max_norm):
        seen.append(torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in policy.parameters()]))
        policy.model.zero_grad()
        return 1.0

    monkeypatch.setattr(rlep, "optimizer_step", capture)
    for budget in (1, 70, 10**6):
        rlep.update(policy, None, dataclasses.replace(s, micro_tokens=budget), groups, None)
    assert len(seen) == 6  # two mini-batches of 4 questions each time, replays or not
    for i in (0, 1):
        assert seen[i].abs().max() > 1e-3
        assert (seen[i] - seen[i + 2]).abs().max() < 1e-6 and (seen[i] - seen[i + 4]).abs().max() < 1e-6


def test_the_only_update_of_a_step_needs_no_old_logprobs_before_it(world, monkeypatch):
    """The same gradient, ratios, old log-probs and entropies as with a pass before it."""
    policy = M.load_policy(world["model"], device="cpu")
    s, groups, _ = mixed_groups(world, policy)
    s, seen = dataclasses.replace(s, mini_batch=8, micro_tokens=70), []
    monkeypatch.setattr(rlep, "optimizer_step", lambda policy, *_: seen.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
                        or policy.model.zero_grad() or 1.0)
    before = rlep.update(policy, None, s, groups, None)
    rows = [row for g in groups for row in g.rows]
    scored = [(row.old_logprobs, row.entropy) for row in rows]
    for row in rows:
        row.old_logprobs, row.entropy = None, 0.0
    after = rlep.update(policy, None, s, groups, None)
    assert (seen[0] - seen[1]).norm() < 1e-6 * seen[0].norm() and seen[0].norm() > 1e-3
    assert after["ratio"] == after["trained_tokens"] == before["trained_tokens"] > 0
    for row, (old, entropy) in zip(rows, scored):
        assert (row.old_logprobs is None) == (row.advantage == 0)
        if row.advantage:
            torch.testing.assert_close(row.old_logprobs, old, atol=1e-5, rtol=0)
            assert row.entropy == pytest.approx(entropy, abs=1e-4)


def test_denominator_counts_every_response_token_of_the_mini_batch(world, monkeypatch):
    policy = M.load_policy(world["model"], device="cpu")
    s, groups, _ = mixed_groups(world, policy)
    seen = []
    monkeypatch.setattr(rlep, "policy_loss", lambda *args: seen.append(args[4]) or M.policy_loss(*args))
    rlep.update(policy, M.make_optimizer(policy, 0.0, 0.0, 0.9, 0.999), s, groups, None)
    assert set(seen) == {sum(len(row.ids) for g in half for row in g.rows) for half in (groups[:4], groups[4:])}


def test_replayed_rows_on_the_real_path(world, tmp_path, monkeypatch):
    """In the update of a real run, a replayed row's ids are the pool's, its reward the verified one, its group its
    question's; a question with fewer stored answers has fewer rows; updates per step are those of the baseline."""
    steps, trained = [], set()
    real_update, real_logprobs = rlep.update, rlep.response_logprobs

    def watch_update(policy, optimizer, s, groups, reference):
        steps.append(groups)
        return real_update(policy, optimizer, s, groups, reference)

    def watch_logprobs(policy, prompts, responses, temperature, with_entropy=False):
        if torch.is_grad_enabled():
            trained.update((tuple(p), tuple(r)) for p, r in zip(prompts, responses))
        return real_logprobs(policy, prompts, responses, temperature, with_entropy)

    monkeypatch.setattr(rlep, "update", watch_update)
    monkeypatch.setattr(rlep, "response_logprobs", watch_logprobs)
    train(world, tmp_path / "run", "--steps=4")
    pool, sizes = Pool(world["pool"], readonly=True), set()
    for step, groups in enumerate(steps, 1):
        for group in groups:
            replayed = [row for row in group.rows if row.replayed]
            drawn = pool.draw(group.question["id"], 2, 0, step)
            assert [row.ids for row in replayed] == [d["response_ids"] for d in drawn]
            assert all(row.reward == 1.0 and row.ids[-1] == 1 for row in replayed)
            assert len({tuple(row.ids) for row in replayed}) == len(replayed) == min(2, pool.count(group.question["id"]))
            sizes.add(len(group.rows))
            expected = rlep.group_advantages([row.reward for row in group.rows], [0] * len(group.rows))
            assert [row.advantage for row in group.rows] == expected.tolist()
            prompt = tuple(group.question["prompt_ids"])
            assert all((prompt, tuple(row.ids)) in trained for row in group.rows if row.advantage)
    assert sizes == {4, 5, 6}
    train(world, tmp_path / "baseline", "--steps=4", replay=False)
    for name in ("run", "baseline"):
        assert [r["updates"] for r in records(tmp_path / name)[1:]] == [2] * 4
    record = records(tmp_path / "run")[1]
    assert record["replay/rows"] > 0 and record["replay/reward"] == 1 and record["rows"] == 16
    assert not any(k.startswith("replay/") for k in records(tmp_path / "baseline")[1])


def test_metrics_are_of_fresh_rows():
    fresh = [rlep.Row([5, 1], -1.0, False, "stop", False, [-1.0, -1.0], 0.0, torch.tensor([-1.0, -1.5])),
             rlep.Row([5, 5, 5, 1], 1.0, True, "length", False, [-1.0] * 4, 0.0, torch.tensor([-1.0] * 4))]
    replayed = rlep.Row([7] * 10, 1.0, True, "stop", True, None, 0.5, torch.tensor([-2.0] * 10))
    sums = rlep.defaultdict(float, {"updates": 2, "loss": 1.0, "replay/trained_tokens": 10, "replay/clip_high": 5})
    m = rlep.step_metrics(settings.Settings(replay=2), [rlep.Group({}, [*fresh, replayed])], sums)
    assert (m["reward"], m["accuracy"], m["length"], m["truncated"], m["rows"]) == (0, 0.5, 3, 0.5, 2)
    assert (m["replay/length"], m["replay/old_logprob"], m["replay/clip_high"], m["clip_high"]) == (10, -2, 0.5, 0)
    assert m["mismatch_max"] == 0.5 and m["mismatch_mean"] == pytest.approx(0.5 / 6) and m["loss"] == 0.5


def test_dynamic_sampling_takes_whole_informative_groups(world, tmp_path, monkeypatch):
    seen = []
    real = rlep.update
    monkeypatch.setattr(rlep, "update", lambda policy, o, s, groups, r: seen.append(groups) or real(policy, o, s, groups, r))
    train(world, tmp_path / "run", "--steps=3", "--questions=2", "--mini_batch=1", "--dynamic_sampling", "--dynamic_tries=20", "--lr=1e-5")
    for groups in seen:
        assert 0 < len(groups) <= 2
        for group in groups:
            fresh = [row for row in group.rows if not row.replayed]
            assert len(fresh) == 4 and len({row.correct for row in fresh}) == 2
    logged = records(tmp_path / "run")[1:]
    assert max(r["sampled_batches"] for r in logged) > 1
    assert [r["position"] for r in logged] == [2 * sum(r["sampled_batches"] for r in logged[:i + 1]) for i in range(3)]


@pytest.mark.parametrize("options", [
    ["--advantage_std=false"], ["--kl_coef=0.1"], ["--replay_hard=0.5"], ["--replay_select=shortest"], ["--replay_select=likeliest"],
    ["--replay_repeats"], ["--replay_rate=0.5"], ["--replay_baseline=fresh"], ["--rollouts=0"], ["--lora_rank=4", "--kl_coef=0.1"], ["--activation_checkpointing"], ["--overlong_buffer=14"], ["--max_questions=3"]])
def test_ablations_run(world, tmp_path, options):
    train(world, tmp_path / "run", "--steps=2", *options)
    last = records(tmp_path / "run")[-1]
    assert last["step"] == 2 and last["skipped_updates"] == 0 and all(v == v for v in last.values())
    if "--kl_coef=0.1" in options:
        assert last["kl"] > 0
    if "--rollouts=0" in options:
        assert last["rows"] == 0 and last["replay/trained_tokens"] > 0 and last["replay/advantage"] == 1
    if "--overlong_buffer=14" in options:
        assert last["reward"] < 2 * last["accuracy"] - 1


def test_negative_replay(world, tmp_path):
    tokenizer = M.load_tokenizer(world["model"])
    with open(world["data"]) as f:
        ids = [json.loads(line)["id"] for line in f]
    with Pool(tmp_path / "pool.jsonl", tokenizer=rlep.fingerprint(tokenizer)) as pool:
        for i in ids:
            pool.append([{"question_id": i, "response": text, "response_ids": tokenizer(text)["input_ids"] + [1], "finish_reason": "stop", "reward": r}
                         for text, r in ((tiny.ANSWER + "1", 1.0), (tiny.ANSWER + "2", -1.0))], allow_failed=True)
    w = world | {"pool": str(tmp_path / "pool.jsonl")}
    train(w, tmp_path / "run", "--steps=1", "--replay_failures=1")
    assert records(tmp_path / "run")[1]["replay/reward"] == 0 and records(tmp_path / "run")[1]["replay/rows"] == 8
    train(w, tmp_path / "without", "--steps=1")
    assert records(tmp_path / "without")[1]["replay/reward"] == 1 and records(tmp_path / "without")[1]["replay/rows"] == 4


def test_growing_pool_takes_in_right_answers_and_replays_those_of_earlier_steps(world, tmp_path, monkeypatch):
    seen, real = [], rlep.update
    monkeypatch.setattr(rlep, "update", lambda policy, o, s, groups, r: seen.append(groups) or real(policy, o, s, groups, r))
    w = world | {"pool": str(tmp_path / "pool.jsonl")}
    options = ["--grow_pool", "--lr=1e-5", "--rollouts=16", "--max_questions=4"]
    train(w, tmp_path / "run", "--steps=4", *options)
    found = set()  # (question, ids) of right answers of the steps before
    for groups in seen:
        for group in groups:
            for row in group.rows:
                assert not row.replayed or (group.question["id"], tuple(row.ids)) in found
        found |= {(g.question["id"], tuple(r.ids)) for g in groups for r in g.rows if r.correct and r.finish_reason == "stop"}
    assert sum(row.replayed for groups in seen for g in groups for row in g.rows) > 0
    stored = [json.loads(line) for line in open(w["pool"])]
    assert {(r["question_id"], tuple(r["response_ids"])) for r in stored} == found and {r["step"] for r in stored} <= {1, 2, 3, 4}

    w = world | {"pool": str(tmp_path / "other.jsonl")}  # stopped after a step that is then made again
    train(w, tmp_path / "other", "--steps=2", *options)
    train(w, tmp_path / "other", "--steps=4", "--save_every=100", *options)
    import shutil
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step-000004")
    train(w, tmp_path / "other", "--steps=4", *options)
    assert records(tmp_path / "other") == records(tmp_path / "run")
    assert [{k: v for k, v in json.loads(line).items() if k not in ("run", "more")} for line in open(w["pool"])] == [
        {k: v for k, v in r.items() if k not in ("run", "more")} for r in stored]


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.fixture(scope="session")
def uninterrupted(world, tmp_path_factory):
    """6 steps of 4 from 10 questions: epochs end within steps 3 and 5."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(world, out, "--steps=6")
    return out


def same_run(a, b):
    assert records(a) == records(b)
    assert records(a, "samples.jsonl") == records(b, "samples.jsonl")
    assert torch.equal(weights(a), weights(b))


def test_resume_equals_uninterrupted(world, uninterrupted, tmp_path):
    """Metrics, replay picks, samples and weights, bit for bit, across an epoch boundary."""
    out = tmp_path / "run"
    for steps in (2, 4, 6):
        train(world, out, f"--steps={steps}")
    same_run(out, uninterrupted)
    assert [r["step"] for r in records(out)] == list(range(7))


def test_profile_changes_nothing(world, uninterrupted, tmp_path, capsys):
    """The second step of each process is recorded; one may switch it on for a run that goes on."""
    out = tmp_path / "run"
    train(world, out, "--steps=2")
    assert not list(out.glob("trace-*"))
    capsys.readouterr()
    train(world, out, "--steps=6", "--profile")
    same_run(out, uninterrupted)
    trace, = out.glob("trace-*")
    assert trace.name == "trace-000004.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::embedding", "aten::_fused_adamw_"} <= names
    costs = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "%" in line and line.split()[-1].isdigit()]
    assert len(costs) == 10 and costs[0].startswith("aten::")


def test_killed_at_random_moments_equals_uninterrupted(world, uninterrupted, tmp_path):
    """SIGKILL the program as a user runs it, again and again; then let it finish."""
    out, rng = tmp_path / "run", random.Random(5)
    command = [sys.executable, "rlep.py", "train", f"--model={world['model']}", f"--data={world['data']}", f"--eval_data={world['test']}", *SIZES,
               "--replay=2", f"--pool={world['pool']}", "--steps=6", f"--out={out}"]
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:  # let it come as far as the steps, then kill within one
            if line.startswith("step"):
                break
        time.sleep(rng.random() * 0.15)  # short: a step takes a tenth of a second
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert kills >= 3
    train(world, out, "--steps=6")
    same_run(out, uninterrupted)
    assert not [name for name in os.listdir(out / "checkpoints") if not name.startswith("step-0")]


def test_keep(world, tmp_path):
    train(world, tmp_path / "run", "--steps=4", "--keep=3", replay=False)
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-000002", "step-000003", "step-000004"]


def test_metrics_go_to_tensorboard(world, tmp_path):
    """A step that a crash made again counts once. Where it is not installed, a line says so."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        with pytest.raises(InputError, match="--log=tensorboard: is not installed; pip install tensorboard"):
            train(world, tmp_path / "run", "--steps=2", "--log=tensorboard")
        return
    train(world, tmp_path / "run", "--steps=2", "--save_every=2", "--log=tensorboard")
    train(world, tmp_path / "run", "--steps=3", "--save_every=3", "--log=tensorboard")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    train(world, tmp_path / "run", "--steps=4", "--save_every=4", "--log=tensorboard")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for name in ("reward", "grad_norm"):
        assert [(e.step, e.value) for e in board.Scalars(name)] == [(r["step"], pytest.approx(r[name])) for r in records(tmp_path / "run") if r["step"]]


WANDB = """
def init(**options):
    assert options["id"] and options["resume"] == "allow" and options["config"]["replay"] == 2
    return __import__(__name__)
def log(data, step=None):
    print("wandb", step, sorted(data)[:3])
"""


def test_metrics_go_to_wandb(world, tmp_path):
    """A module of that name that has the two calls; the service itself needs an account."""
    (tmp_path / "wandb.py").write_text(WANDB)
    out = run("rlep.py", "train", f"--model={world['model']}", f"--data={world['data']}", f"--pool={world['pool']}", *SIZES, "--replay=2", "--steps=2",
              "--log=wandb", f"--out={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)}).stdout
    assert [line.split()[1] for line in out.splitlines() if line.startswith("wandb")] == ["1", "2"]


def test_run_folder_holds_what_the_readme_says(uninterrupted):
    assert set(os.listdir(uninterrupted)) == {".lock", "config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "curves.png"}
    with open(uninterrupted / "metrics.jsonl") as f:
        assert all(line.startswith('{"step": ') for line in f)
    with open(uninterrupted / "config.json") as f:
        assert json.load(f)["settings"]["replay"] == 2
    assert (uninterrupted / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_run_folders_are_never_overwritten(world, tmp_path, capsys):
    out = tmp_path / "run"
    train(world, out, "--steps=2", replay=False)
    before = {name: (out / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    train(world, out, "--steps=2", replay=False)  # finished: nothing is done
    assert "finished" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--lr=0.001, now 0.002"):
        train(world, out, "--steps=2", "--lr=0.002", replay=False)
    assert before == {name: (out / name).read_bytes() for name in before}
    train(world, out, "--steps=1", "--lr=0.002", "--overwrite", replay=False)
    assert [r["step"] for r in records(out)] == [0, 1]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    for extra in ([], ["--overwrite"]):
        with pytest.raises(InputError, match="no run folder"):
            train(world, foreign, "--steps=1", *extra)
    assert os.listdir(foreign) == ["thesis.tex"] or set(os.listdir(foreign)) == {"thesis.tex", ".lock"}
    with pytest.raises(InputError, match="is a file"):
        train(world, foreign / "thesis.tex", "--steps=1")


def test_two_processes_cannot_share_a_run_folder(world, tmp_path):
    s = settings.parse("train", [f"--model={world['model']}", f"--data={world['data']}", f"--out={tmp_path}/run"])
    _, lock = rlep.open_run(s)
    with pytest.raises(InputError, match="another process"):
        train(world, tmp_path / "run", "--steps=1", replay=False)
    lock.close()


def test_a_mistake_before_the_first_step_leaves_no_run_behind(world, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match="no such file"):
        train(world | {"test": "nowhere.jsonl"}, out, "--steps=1", replay=False)
    train(world, out, "--steps=1", "--lr=0.5", replay=False)
    assert len(records(out)) == 2


# ------------------------------------------------------------------------------------------------------- collect, eval

COLLECT = ["--samples=64", "--temperature=1", "--top_p=1", "--response_limit=16", "--min_correct=1", "--sampler_rows=128", "--verify_workers=1", "--device=cpu"]


def test_collect_killed_again_and_again_loses_and_doubles_nothing(world, tmp_path):
    def command(pool):
        return [sys.executable, "rlep.py", "collect", f"--model={world['model']}", f"--data={world['data']}", *COLLECT, f"--pool={pool}"]

    whole = run(*command(tmp_path / "whole.jsonl")[1:])
    assert "coverage: " in whole.stdout
    rng = random.Random(1)
    for _ in range(4):
        process = subprocess.Popen(command(tmp_path / "killed.jsonl"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith("collect"):
                break
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.communicate()
    last = run(*command(tmp_path / "killed.jsonl")[1:])
    assert last.stdout.splitlines()[-1].split(" in /")[0] == whole.stdout.splitlines()[-1].split(" in /")[0]

    def content(name):
        with open(tmp_path / name) as f:
            return sorted(f.read().splitlines())
    assert content("whole.jsonl") == content("killed.jsonl")
    assert content("whole.jsonl.done") == content("killed.jsonl.done")
    assert len(content("whole.jsonl.done")) == 11  # a header and each of the 10 questions once
    for line in content("whole.jsonl"):
        record = json.loads(line)
        assert record["reward"] == 1 and record["finish_reason"] == "stop" and record["response_ids"][-1] == 1
    again = refused("rlep.py", "collect", f"--model={world['model']}", f"--data={world['data']}", *COLLECT, "--samples=4", f"--pool={tmp_path}/whole.jsonl")
    assert "--samples=64, now 4" in again


def test_collect_keeps_questions_with_enough_right_answers_only():
    s = settings.Settings(min_correct=2)
    question = {"id": "q", "problem": "p", "answer": "1", "source": "s"}
    from sampler import Sample
    samples = [Sample([5, 1], "stop", [-1.0, -0.5]), Sample([6, 1], "stop", [-1.0, -1.0]), Sample([7, 7], "length", [-1.0, -1.0])]
    kept, outcome = rlep.pool_records(s, question, samples, ["a", "b", "c"], [True, True, True])
    assert [r["response_ids"] for r in kept] == [[5, 1], [6, 1]] and outcome["correct"] == 2  # a cut answer never counts
    assert kept[0]["sampler_logprob"] == -1.5
    kept, outcome = rlep.pool_records(s, question, samples, ["a", "b", "c"], [True, False, True])
    assert kept == [] and outcome == {"question_id": "q", "samples": 3, "correct": 1, "stored": 0}
    kept, _ = rlep.pool_records(dataclasses.replace(s, keep_failures=True), question, samples, ["a", "b", "c"], [True, False, None])
    assert [(r["response"], r["reward"]) for r in kept] == [("b", -1.0)]


def test_pass_at_k_and_majority():
    assert rlep.pass_at_k(4, 1, 1) == 0.25 and rlep.pass_at_k(4, 1, 2) == 0.5 and rlep.pass_at_k(4, 4, 3) == 1 and rlep.pass_at_k(4, 0, 4) == 0
    assert rlep.majority(["1", "1", "2"], [True, True, False]) == 1
    assert rlep.majority(["1", "2", "2", None, None, None], [True, False, False, False, False, False]) == 0  # no answer is no vote
    assert rlep.majority(["1", "2"], [True, False]) == 0.5  # equally frequent
    assert rlep.majority([None, None], [False, False]) == 0


def test_eval_command(world, uninterrupted, tmp_path):
    args = ["rlep.py", "eval", f"--model={uninterrupted}", f"--data={world['test']}", "--samples=4", "--response_limit=16", "--device=cpu", f"--out={tmp_path}/e"]
    first = run(*args)
    with open(tmp_path / "e" / "eval.json") as f:
        metrics = json.load(f)["metrics"]
    with open(tmp_path / "e" / "responses.jsonl") as f:
        responses = [json.loads(line) for line in f]
    right = [[r["correct"] for r in responses[i:i + 4]] for i in range(0, 24, 4)]
    rates = torch.tensor(right).double().mean(-1)
    assert metrics["eval/tiny-test/questions"] == 6 and len(responses) == 24
    assert metrics["eval/tiny-test/avg@4"] == pytest.approx(rates.mean().item())
    assert metrics["eval/tiny-test/se"] == pytest.approx((rates.std() / 6 ** 0.5).item())
    assert metrics["eval/tiny-test/pass@4"] == pytest.approx(sum(map(any, right)) / 6)
    line = next(line for line in first.stdout.splitlines() if line.startswith("tiny-test"))
    assert line in run(*args).stdout  # asked again, the stored result
    assert "--samples=4, now 2" in refused(*args, "--samples=2")


# ------------------------------------------------------------------------------------------------------------ bad input

MUST = ["--model=m", "--data=d", "--out=o"]


@pytest.mark.parametrize("args, reason", [
    (["--clip_hihg=0.2"], "nearest is --clip_high"), (["--lr=fast"], "expected a number"), (["--steps=2.5"], "expected a whole number"),
    (["--advantage_std=maybe"], "expected true or false"), (["--lr"], "needs a value"), (["lr=1"], "written --name=value"), (["--"], "written --name=value"),
    (["--steps=0"], "at least 1"), (["--lr=nan"], "expected a number"), (["--device=tpu"], "one of auto, cpu, cuda"), (["--clip_low=1.5"], "at most 1"),
    (["--replay=2"], "needs --pool"), (["--pool=p.jsonl"], "--replay is 0"), (["--mini_batch=1000"], "larger than --questions"),
    (["--overlong_buffer=9999"], "larger than --response_limit"), (["--temperature=0"], "above 0"), (["--top_p=0.9"], "--top_p=1"),
    (["--rollouts=0"], "needs --replay"), (["--model="], "--model is required")])
def test_bad_options(args, reason):
    with pytest.raises(InputError, match=reason) as caught:
        settings.parse("train", MUST + args)
    assert "\n" not in str(caught.value)


def test_options_of_other_commands_are_noted_and_later_ones_win(capsys):
    s = settings.parse("collect", ["--model=m", "--data=d", "--pool=p", "--lr=1", "--seed=1", "--seed=2"])
    assert s.seed == 2 and (s.samples, s.temperature, s.top_p) == (64, 0.7, 0.95)
    assert "--lr has no effect on collect" in capsys.readouterr().out


def test_paper_defaults():
    s = settings.parse("train", MUST)
    assert (s.prompt_limit, s.response_limit, s.questions, s.rollouts, s.mini_batch, s.lr, s.warmup, s.weight_decay, s.grad_clip, s.overlong_buffer,
            s.clip_low, s.clip_high, s.dual_clip, s.eval_every, s.save_every, s.steps, s.dynamic_sampling, s.kl_coef, s.temperature, s.top_p) == (
            1024, 3072, 512, 16, 64, 1e-6, 10, 0.1, 1.0, 512, 0.2, 0.28, 10.0, 5, 20, 400, False, 0.0, 1.0, 1.0)


def test_the_program_answers_bad_input_with_one_line(world, tmp_path):
    assert "nearest is --lr" in refused("rlep.py", "train", "--lrr=1")
    assert "nearest is train" in refused("rlep.py", "trian")
    assert "no such folder" in refused("rlep.py", "eval", "--model=/no/such/model", f"--data={world['test']}")
    assert "no such pool" in refused("rlep.py", "train", f"--model={world['model']}", f"--data={world['data']}", *SIZES, "--replay=2", "--pool=nowhere.jsonl", f"--out={tmp_path}/o")
    assert "the model ends at 64" in refused("rlep.py", "train", f"--model={world['model']}", f"--data={world['data']}", *SIZES, "--response_limit=100", f"--out={tmp_path}/o")
    assert "no question is left" in refused("rlep.py", "eval", f"--model={world['model']}", f"--data={world['test']}", "--prompt_limit=2")
    other = make_model(tmp_path / "other")
    assert "no run folder" in refused("rlep.py", "train", f"--model={other}", f"--data={world['data']}", *SIZES, f"--out={other}")
    assert "has no checkpoint yet" in refused("rlep.py", "eval", f"--model={_empty_run(tmp_path)}", f"--data={world['test']}")


def _empty_run(tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    return tmp_path / "empty"


def test_a_pool_of_another_data_set_is_refused(world, tmp_path):
    with pytest.raises(InputError, match="holds no answer to any question"):
        train(world | {"data": world["test"]}, tmp_path / "run", "--steps=1")


@pytest.mark.parametrize("command", ["train", "collect", "eval"])
def test_help_tells_every_option(command):
    text = settings.help_text(command)
    for name in settings.fields_of(command):
        assert f"--{name} " in text
    assert all(f.metadata["help"] and f.metadata["group"] for f in dataclasses.fields(settings.Settings))
