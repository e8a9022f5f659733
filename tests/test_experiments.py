"""experiments/run.py: its statistics by hand, and two arms of two seeds as a user runs them, in two calls."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, refused, run

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import run as experiments  # noqa: E402
from settings import parse  # noqa: E402

BASELINE = np.array([[0.0, 0.2, 0.4, 0.3], [0.0, 0.4, 0.6, 0.5]])  # mean 0, .3, .5, .4: best .5
RLEP = np.array([[0.1, 0.4, 0.4, 0.5], [0.3, 0.4, 0.4, 0.6]])  # mean .2, .4, .4, .55
STEPS = np.array([0, 5, 10, 15])


def test_steps_to_by_hand():
    assert [experiments.steps_to(STEPS, RLEP, BASELINE, share) for share in (0.3, 0.8, 1.0, 1.2)] == [0, 5, 15, np.inf]
    assert [experiments.steps_to(STEPS, BASELINE, BASELINE, share) for share in (0.5, 1.0)] == [5, 10]


def test_bootstrap_is_over_seeds():
    assert experiments.bootstrap(lambda i: float(np.array([3.0, 3.0, 3.0])[i].mean()), 3) == (3, 3)
    # of two seeds with values 0 and 1 the mean is 0, .5 or 1, with probability 1/4, 1/2 and 1/4
    assert experiments.bootstrap(lambda i: float(i.mean()), 2) == (0, 1)
    low, high = experiments.bootstrap(lambda i: float(np.arange(101.0)[i].mean()), 101)  # 50 ± 1.96 * 29.2 / sqrt(101)
    assert low == pytest.approx(44.3, abs=0.6) and high == pytest.approx(55.7, abs=0.6)
    assert experiments.bootstrap(lambda i: np.inf if 0 in i else 1.0, 2)[1] == np.inf  # never reached in some draws


def test_paired_interval_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t(2) = 4.303; what the seeds have in common cancels."""
    mean, low, high = experiments.paired_interval([101, 52, 13], [100, 50, 10])
    assert (mean, low, high) == pytest.approx((2, 2 - 4.303 / 3 ** 0.5, 2 + 4.303 / 3 ** 0.5))
    assert experiments.standard_error([1, 2, 3]) == pytest.approx(1 / 3 ** 0.5)
    assert np.isnan(experiments.paired_interval([1], [2])[1]) and np.isnan(experiments.standard_error([1]))


def test_every_arm_is_a_valid_command_line():
    """Also: an arm differs from the default in the options of its line alone, and the default's are run_small.sh's."""
    tiny = experiments.tiny_options()
    assert set(tiny) == {"common", "train", "collect", "evaluation"}
    for arm, line in experiments.ARMS.items():
        options = experiments.arm_options(arm, [])
        s = parse("train", [f"{name}={value}" for name, value in ({"--model": "x", "--data": "x", "--out": "x"} | options).items()])
        assert s.warmup == int(options["--warmup"]) and ("--pool" in options) == bool(s.replay)
        assert options.get("--pool", "seed") in experiments.POOLS and options.get("--model", "baseline") in experiments.ARMS
        default = experiments.arm_options("baseline", [])
        assert {k for k in options if options[k] != default.get(k)} - {"--pool"} == {o.partition("=")[0] for o in line.split()} - {"--pool"}
    assert float(experiments.arm_options("grpo-2x", [])["--steps"]) == 2 * float(experiments.arm_options("rlep", [])["--steps"])
    assert "--steps=7" in [f"{k}={v}" for k, v in experiments.arm_options("baseline", ["--steps=7"]).items()]
    assert experiments.arm_options("grpo-2x", ["--steps=7"])["--steps"] == "14"


def test_every_task_is_a_program_and_valid_options():
    for program, line in experiments.TASKS.values():
        assert os.path.exists(os.path.join(ROOT, program))
        options = experiments.arm_options("baseline", line.split())
        assert {tuple(option.split("=")) for option in line.split()} <= options.items()
        parse("train", ["--model=x", "--data=x", "--out=x", *(f"{name}={value}" for name, value in options.items())])
    assert experiments.TASKS["sums"] == ("tiny.py", "")  # run_small.sh's options alone


def test_table_by_hand(tmp_path):
    """Two seeds of both arms and a third of the baseline alone, which the comparison leaves out."""
    result = lambda arm, seed, values, final: {  # noqa: E731
        "arm": arm, "seed": seed, "curve": {str(step): v for step, v in zip(STEPS, values)}, "final": final, "samples": 16, "dead_groups": 0.5,
        "entropy": 1.25, "length": 7.0, "seconds": 90.0, "commit": "abc"}
    results = [result("baseline", i, values, final) for i, (values, final) in enumerate(zip([*BASELINE, BASELINE[0]], (0.3, 0.5, 0.9)))]
    results += [result("rlep", i, values, final) for i, (values, final) in enumerate(zip(RLEP, (0.5, 0.6)))]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
    results = experiments.load_results(tmp_path / "results.jsonl")
    row = [cell.strip() for cell in experiments.table(results).splitlines()[3].split("|")[1:-1]]
    # differences .2 and .1: mean .15, standard error .05, t(1) = 12.706. Draws hold seed 0 twice (baseline's best .4, of which RLEP has
    # .1, then all), seed 1 twice (best .6, of which RLEP has half at 0, two thirds at 5, all at 15), or both
    assert row == ["rlep", "2", "5 [0, 5]", "5 [5, 15]", "15 [5, 15]", "15 [5, 15]", "0.550 ± 0.050", "+0.150 [-0.485, +0.785]", "0.50", "1.25", "7.0", "1.5"]
    text = experiments.table(results)  # to 90%: 15 of the baseline's 10; seed 0 twice: 5 of 10; seed 1 twice: 15 of 10
    assert "rlep reaches 90% of the baseline's best in 1.50 [0.50, 1.50] of the baseline's steps to it." in text
    experiments.draw(results, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_two_seeds_two_arms_in_two_calls(tmp_path):
    def call(*args):
        return subprocess.run([sys.executable, "experiments/run.py", f"--out={tmp_path}", "--steps=2", "--questions=4", "--rollouts=4", "--mini_batch=2",
                               "--samples=8", "--min_correct=1", "--eval_every=1", "--tiny=--train=12 --test=4 --arithmetic_steps=300 --strategy_steps=5",
                               *args], cwd=ROOT, capture_output=True, text=True)

    first = call("--arms=rlep", "--seeds=0")
    assert first.returncode == 0, first.stderr
    assert "finished" not in (tmp_path / "logs" / "baseline-s0.log").read_text()  # what RLEP starts from was not run again
    before = {p: p.read_bytes() for p in tmp_path.rglob("*-s0/metrics.jsonl")}
    lines = (tmp_path / "results.jsonl").read_text()
    second = call("--arms=baseline", "--seeds=0,1")
    assert second.returncode == 0, second.stderr
    assert len(before) == 2 and before == {p: p.read_bytes() for p in tmp_path.rglob("*-s0/metrics.jsonl")}  # seed 0 is left alone
    assert (tmp_path / "results.jsonl").read_text().startswith(lines) and "seed 0" not in second.stdout

    results = experiments.load_results(tmp_path / "results.jsonl")
    assert {(arm, seed) for arm in results for seed in results[arm]} == {("baseline", 0), ("baseline", 1), ("rlep", 0)}
    r = results["rlep"][0]
    assert list(r["curve"]) == ["0", "1", "2"] and r["samples"] == 8 and 0 <= r["final"] <= 1 and r["options"]["--replay"] == "2"
    assert "--replay=2" in r["command"] and "--seed=0" in r["command"] and r["commit"] and r["seconds"] > 0
    questions = [(tmp_path / f"seed{seed}/tiny/train.jsonl").read_text() for seed in (0, 1)]
    assert questions[0] != questions[1]
    assert "| rlep | 1 |" in (tmp_path / "results.md").read_text() and (tmp_path / "figure.png").exists()

    other = call("--arms=rlep", "--seeds=0", "--lr=1e-3")
    assert other.returncode == 2 and "other options" in other.stderr and "Traceback" not in other.stderr
    other = call("--arms=rlep", "--seeds=7", "--task=words")  # not even of other seeds
    assert other.returncode == 2 and "another task than words" in other.stderr and "Traceback" not in other.stderr


def test_the_other_task(tmp_path):
    """Its program makes the base model, its options reach every phase, the user's come after them."""
    out = run("experiments/run.py", "--task=words", "--arms=rlep", "--seeds=0", f"--out={tmp_path}", "--steps=1", "--questions=4", "--rollouts=4",
              "--mini_batch=2", "--samples=4", "--min_correct=1", "--eval_every=1", "--eval_samples=1", "--response_limit=40",
              "--tiny=--train=8 --test=4 --arithmetic_steps=60 --strategy_steps=5", timeout=600).stdout
    results = experiments.load_results(tmp_path / "results.jsonl")
    assert set(results) == {"baseline", "rlep"} and results["rlep"][0]["task"] == "words" and "Task: words." in out
    assert results["rlep"][0]["options"]["--response_limit"] == "40"
    assert "How many" in (tmp_path / "seed0/tiny/train.jsonl").read_text()
    assert "another task than sums" in refused("experiments/run.py", f"--out={tmp_path}", "--seeds=1")
    assert "another task than sums" in refused("experiments/run.py", f"--out={tmp_path}", "--seeds=")


def test_refuses(tmp_path):
    out = f"--out={tmp_path}/x"
    assert "no arm 'rlpe'" in refused("experiments/run.py", "--arms=rlpe", out)
    assert "nearest is --steps" in refused("experiments/run.py", "--step=3", out)
    assert "no task 'word'" in refused("experiments/run.py", "--task=word", out)
    assert "--jobs=0" in refused("experiments/run.py", "--jobs=0", out)
