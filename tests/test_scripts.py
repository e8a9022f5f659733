"""The scripts and the small programs, run as a user runs them."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, refused, run

import plot
import tiny
from data import InputError, load_questions
from verify import is_correct


def bash(*args, **env):
    return subprocess.run(["bash", *args], cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
                          env={**os.environ, "VENV": sys.prefix, **env})


def test_run_small_from_start_to_curves_and_again(tmp_path):
    """Every phase with a small base model and few steps; run again it finds everything done and changes nothing."""
    options = ["--questions=4", "--rollouts=4", "--mini_batch=2", "--steps=2", "--samples=8", "--min_correct=1"]
    env = {"OUT": str(tmp_path), "TINY": "--train=12 --test=4 --arithmetic_steps=400 --strategy_steps=5"}
    first = bash("run_small.sh", *options, **env)
    assert first.returncode == 0, first.stdout + first.stderr
    for name in ("baseline-s0", "rlep-s0"):
        assert {"config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "curves.png"} <= set(os.listdir(tmp_path / name))
    settings = [json.loads((tmp_path / name / "config.json").read_text())["settings"] for name in ("baseline-s0", "rlep-s0")]
    assert {k for k in settings[0] if settings[0][k] != settings[1][k]} == {"replay", "pool", "out"}  # nothing else differs
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "coverage:" in first.stdout and first.stdout.count("avg@8") >= 2
    assert "baseline" in first.stdout.split("arm  ")[-1] and "rlep" in first.stdout.split("arm  ")[-1]

    before = {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl")}
    again = bash("run_small.sh", *options, **env)
    assert again.returncode == 0 and again.stdout.count("finished: 2 steps") == 2, again.stdout + again.stderr
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl")}

    for extra, words in (["--lrr=1"], "nearest is --lr"), (["--steps=2", "--seed=4"], "now 4"):
        bad = bash("run_small.sh", *options, *extra, **env)
        assert bad.returncode == 2 and words in bad.stderr and "Traceback" not in bad.stderr


@pytest.mark.parametrize("script", ["setup.sh", "run_small.sh", "tests/run.sh", ".ci/run"])
def test_scripts_parse(script):
    assert bash("-n", script).returncode == 0


def test_tiny_questions_are_right_and_held_out(tmp_path):
    import random
    rng, taken = random.Random(0), set()
    tiny.write_questions(tmp_path / "test.jsonl", rng, 50, "test", taken)
    tiny.write_questions(tmp_path / "train.jsonl", rng, 200, "train", taken)
    test, train = load_questions(str(tmp_path / "test.jsonl")), load_questions(str(tmp_path / "train.jsonl"))
    assert (len(test), len(train)) == (50, 200) and not {q["problem"] for q in test} & {q["problem"] for q in train}
    tokenizer = tiny.make_tokenizer()
    for _ in range(200):
        text, *rest = tiny.make_question(rng)
        response = tiny.make_response(rng, *rest, 0.5)
        ids = tokenizer(response)["input_ids"]
        assert tokenizer.decode(ids) == response and tokenizer.unk_token_id not in ids and None not in ids
    for q in train:
        assert is_correct(tiny.ANSWER + q["answer"], q["answer"]) and not is_correct(tiny.ANSWER + q["answer"] + "1", q["answer"])


def test_tiny_refuses(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "holds other files" in refused("tiny.py", f"--out={tmp_path}")
    assert "--train" in refused("tiny.py", f"--out={tmp_path}/a", "--train=0")


# ---------------------------------------------------------------------------------------------------------------- plot


def write_run(folder, curve):
    folder.mkdir()
    lines = [{"step": step, "accuracy": v, "eval/test/avg@4": v} for step, v in curve.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_table_and_curves_of_several_seeds(tmp_path):
    write_run(tmp_path / "base-s0", {0: 0.0, 10: 0.2, 20: 0.4})
    write_run(tmp_path / "base-s1", {0: 0.2, 10: 0.4, 20: 0.6})
    write_run(tmp_path / "rlep-s0", {0: 0.1, 10: 0.5, 20: 0.7})
    out = run("plot.py", *sorted(tmp_path.glob("*-s*")), f"--out={tmp_path}/c.png").stdout
    base, rlep = [line.split() for line in out.splitlines() if line.startswith(("base", "rlep"))]
    assert base == ["base", "2", "0.500", "±", "0.100", "0.500", "10", "20", "20", "20"]
    assert rlep == ["rlep", "1", "0.700", "0.700", "10", "10", "10", "10"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_plot_reads_a_run_that_is_going_on(tmp_path):
    write_run(tmp_path / "run", {0: 0.0, 10: 0.2})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as f:
        f.write('{"step": 20, "accu')
    steps, values = plot.arm_curve([plot.read_metrics(tmp_path / "run")], "accuracy")
    assert steps.tolist() == [0, 10] and plot.first_step(steps, values, 0.2) == 10 and plot.first_step(steps, np.array([[0, 0.1]]), 0.2) is None


def test_plot_refuses(tmp_path):
    assert "no metrics.jsonl" in refused("plot.py", tmp_path)
    assert "unknown option" in refused("plot.py", "a", "--output=x")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(InputError, match="metrics.jsonl:2"):
        plot.read_metrics(tmp_path)


def test_gpu_speed_on_small_shapes():
    """The script prepared for a GPU runs through: it would break unseen when what it calls changes."""
    out = run("tests/gpu_speed.py", "--tiny").stdout
    assert len([line for line in out.splitlines() if line.startswith("| tiny ") and "%" in line]) == 4
    assert "left out" not in out and "chunked: " in out
