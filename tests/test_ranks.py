"""Several ranks under torchrun, on CPUs with gloo: the same numbers as one process, checkpoints, kills, failures."""
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
from conftest import ROOT, make_model, run
from test_rlep import SIZES, records, train, weights, world  # noqa: F401

import attention
import model as M
import ranks
import rlep
import updates
from data import InputError

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


# --------------------------------------------------------------------------------------------------- sharing out the rows


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_micro_batches_for_several_ranks(ways):
    rng = random.Random(ways)
    for count in (0, 1, 3, 40, 200):
        prompts, responses = [[i // 4] * 5 for i in range(count)], [[1] * rng.choice((3, 20, 100, 400)) for _ in range(count)]
        groups = attention.micro_batches(prompts, responses, 800, ways)
        size = [sum(len(responses[i]) for i in g) + 5 * len({i // 4 for i in g}) for g in groups]
        assert sorted(i for g in groups for i in g) == list(range(count)) and len(groups) % ways == 0
        assert max(size, default=0) <= 800
        turns = [groups[i:i + ways] for i in range(0, len(groups), ways)]
        assert all(any(turn) for turn in turns)  # no turn of empty ones alone
        if count == 200:  # the ranks finish together: the tokens of a turn are those of its slowest rank
            assert sum(max(size[i:i + ways]) for i in range(0, len(size), ways)) < 1.35 * sum(size) / ways
    # a little more than one budget: not one full group and a small rest
    groups = attention.micro_batches([[i // 8] * 30 for i in range(32)], [[1] * 64] * 32, 2100, ways)
    assert ways == 1 or len(groups) == ways and len({len(group) for group in groups}) == 1


def test_one_process_is_one_rank():
    assert (ranks.RANK, ranks.RANKS) == (0, 1) and ranks.share([1, 2]) == ranks.merge([1, 2]) == [1, 2]
    assert ranks.gather(3) == [3] and ranks.first(max, 1, 2) == 2 and ranks.add({"a": 1})["b"] == 0


# ----------------------------------------------------------------------------------------- the same numbers for any ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "tied", tied=True)
    make_model(folder / "untied", tied=False, extra_vocab=5, seed=3)
    return folder


@pytest.fixture(scope="module")
def single(models):
    real = rlep.optimizer_step
    yield {case: updates.case_results(case, models) for case in updates.CASES}
    rlep.optimizer_step = real


def same_updates(single, several):
    for case, one in single.items():
        many = several[case]
        size = max(s["grad_norm"] for s in one["sums"])  # sum of the norms of a step's gradients
        for a, b in zip(one["gradients"], many["gradients"], strict=True):
            assert (a - b).abs().max() < 1e-6 * max(1.0, size), case
        assert (one["weights"] - many["weights"]).abs().max() < 1e-6, case
        for a, b in zip(one["old"], many["old"]):
            assert (a - b).abs().max() < 1e-5, case
        for a, b in zip(one["sums"], many["sums"]):
            for name in {**a, **b}:
                exact = 1e-6 if name == "loss" else 1e-5  # the others are sums over tokens and over updates
                assert b.get(name, 0) == pytest.approx(a.get(name, 0), rel=exact, abs=exact), (case, name)


def test_two_ranks(models, single, tmp_path):
    """Loss, gradients and weights after three steps: uneven groups and lengths, dead groups, one row for two ranks."""
    run(*TORCHRUN, "tests/updates.py", models, tmp_path / "out.pt", env=ENV)
    same_updates(single, torch.load(tmp_path / "out.pt")["shard"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus(models, world, tmp_path):  # noqa: F811
    """nccl: the same updates as one GPU's in float32; a run in bfloat16 keeps old log-probs near those of its sampler's copy."""
    step, one = rlep.optimizer_step, {case: updates.case_results(case, models, "cuda") for case in updates.CASES}
    rlep.optimizer_step = step
    run(*TORCHRUN, "tests/updates.py", models, tmp_path / "out.pt", "cuda", env=ENV)
    same_updates(one, torch.load(tmp_path / "out.pt")["shard"])
    run(*command(world, tmp_path / "run", "--steps=3", "--sampler=torch", "--device=cuda", "--dtype=bfloat16", "--activation_checkpointing"), env=ENV)
    assert all(0 < r["mismatch_mean"] < 0.1 and r["skipped_updates"] == 0 for r in records(tmp_path / "run")[1:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four GPUs")])])
def test_two_nodes_of_two_ranks(models, single, tmp_path, device):
    """The same with four: replicas on two nodes with shards within each, and sharded over all four."""
    if device == "cuda":
        step, single = rlep.optimizer_step, {case: updates.case_results(case, models, device) for case in updates.CASES}
        rlep.optimizer_step = step

    def node(i):
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", f"--node_rank={i}",
                                 "--master_addr=127.0.0.1", f"--master_port={port}", "tests/updates.py", models, tmp_path / "out.pt", device],
                                cwd=ROOT, env={"CUDA_VISIBLE_DEVICES": ("0,1", "2,3")[i], **ENV}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    port = random.Random().randrange(20000, 30000)
    nodes = [node(0), node(1)]
    outputs = [n.communicate(timeout=300)[0] for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], "\n".join(outputs)
    results = torch.load(tmp_path / "out.pt")
    assert set(results) == {"shard", "replicate, shard"}
    for several in results.values():
        same_updates(single, several)


# --------------------------------------------------------------------------------------------------- whole runs, and kills


def command(world, out, *args):  # noqa: F811
    return [*TORCHRUN, "rlep.py", "train", f"--model={world['model']}", f"--data={world['data']}", f"--eval_data={world['test']}", *SIZES,
            "--replay=2", f"--pool={world['pool']}", "--micro_tokens=100", f"--out={out}", *args]


def workers(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        return [int(pid) for pid in f.read().split()]


def same_losses(a, b):
    for x, y in zip(records(a), records(b), strict=True):
        assert x.keys() == y.keys()
        for name in x:
            assert y[name] == pytest.approx(x[name], rel=1e-4, abs=1e-5), (x["step"], name)
    assert (weights(a) - weights(b)).abs().max() < 1e-4  # lr 1e-3: AdamW carries a rounding of a tiny gradient into the weight


def test_killed_ranks_and_other_numbers_of_ranks(world, tmp_path):  # noqa: F811
    """Two ranks, one of them killed: all are down at once. Continued by two, then by one process, then by two: as one
    process from start to end. Rank 0 alone prints and writes."""
    train(world, tmp_path / "one", "--steps=8", "--micro_tokens=100", "--lr=1e-4")
    out, rng = tmp_path / "many", random.Random()
    process = subprocess.Popen([sys.executable, *command(world, out, "--steps=8", "--lr=1e-4")], cwd=ROOT, env=ENV, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    next(line for line in process.stdout if line.startswith("step 1/"))
    time.sleep(0.3 * rng.random())  # in step 2 or 3, or in a save
    pids = workers(process)
    start = time.monotonic()
    if pids:
        os.kill(rng.choice(pids), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode and time.monotonic() - start < 60
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "rlep" in open(f"/proc/{pid}/cmdline").read()]
    done = run(*command(world, out, "--steps=4", "--lr=1e-4"), env=ENV).stdout
    assert done.count("policy:") == 1
    train(world, out, "--steps=6", "--micro_tokens=100", "--lr=1e-4")
    run(*command(world, out, "--steps=8", "--lr=1e-4"), env=ENV)
    same_losses(tmp_path / "one", out)
    assert not [name for name in os.listdir(out / "checkpoints") if not name.startswith("step-0")]
    from transformers import AutoModelForCausalLM
    exported = AutoModelForCausalLM.from_pretrained(rlep.checkpoints(str(out))[-1])
    assert exported.dtype == torch.float32 and exported.config.tie_word_embeddings


def test_the_best_checkpoint_is_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (2, 3, 4, 6):
        (folder / f"step-{step:06d}").mkdir(parents=True)
    lines = [{"step": step, "eval/a/avg@4": v, "eval/b/avg@4": 0.5, "eval/a/pass@4": 1} for step, v in ((0, 0.9), (2, 0.4), (4, 0.6), (5, 0.7), (6, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3}]))
    assert rlep.best_checkpoint(str(tmp_path)) == str(folder / "step-000004")


def test_eval_is_the_same_for_any_number_of_ranks(world, tmp_path):  # noqa: F811
    """Every response, bit for bit; 10 questions of two data sets, one of them known by name."""
    with open(world["data"]) as f:
        questions = [json.loads(line) | {"source": source} for line, source in zip(f, ["AIME-2024", "org/own"] * 5)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    args = ["rlep.py", "eval", f"--model={world['model']}", f"--data={tmp_path}/test.jsonl", "--samples=8", "--response_limit=16", "--device=cpu", "--verify_workers=1"]
    outputs = []
    for n in (1, 2, 3):
        start = TORCHRUN[:-1] + (f"--nproc_per_node={n}",) if n > 1 else ()
        printed = run(*start, *args, f"--out={tmp_path}/{n}", env=ENV).stdout
        outputs.append([(tmp_path / str(n) / name).read_text().replace(f"{tmp_path}/{n}", "") for name in ("responses.jsonl", "eval.json")]
                       + [line for line in printed.splitlines() if "avg@8" in line])
        assert len(outputs[0][0].splitlines()) == 80 and outputs[-1] == outputs[0]
    aime, own = outputs[0][2:]
    assert aime.startswith("AIME-2024: 5 questions  avg@8 0.") and " ± 0." in aime and "(paper, avg@32 of 7B: baseline 0.382, RLEP 0.399)" in aime
    assert own.startswith("org/own: 5 questions") and "paper" not in own


# --------------------------------------------------------------------------------------------------------------- failures


def test_ten_gradients_in_a_row_that_are_not_finite(models):
    policy = M.load_policy(str(models / "tied"), device="cpu")
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    optimizer = M.make_optimizer(policy, 1e-3, 0.1, 0.9, 0.999)

    def step(value):
        for p in policy.parameters():
            p.grad = torch.full_like(p, value)
        return M.optimizer_step(policy, optimizer, 1.0)
    for _ in range(9):
        assert step(float("nan")) != 0
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in policy.parameters()])) and policy.not_finite == 9
    step(1.0)
    assert policy.not_finite == 0
    for _ in range(9):
        step(float("inf"))
    with pytest.raises(InputError, match="10 gradients in a row"):
        step(float("nan"))


def test_a_full_disk_leaves_the_checkpoints(world, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "run"
    train(world, out, "--steps=2")
    monkeypatch.setattr(rlep.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match="a checkpoint takes 0.00121 GB, 1e-06 GB are free"):
        train(world, out, "--steps=3")
    monkeypatch.undo()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(M.torch, "save", full)  # where the estimate was too low: in the middle of writing
    with pytest.raises(OSError):
        train(world, out, "--steps=3")
    monkeypatch.undo()
    assert [os.path.basename(c) for c in rlep.checkpoints(str(out))] == ["step-000001", "step-000002"]
    train(world, out, "--steps=3")
    assert [r["step"] for r in records(out)] == [0, 1, 2, 3] and "step-000003" in os.listdir(out / "checkpoints")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_full(world, tmp_path):  # noqa: F811
    """For real: room for the weights and moments, not for the tokenizer beside them. What was cut off is not in the way afterwards."""
    disk, size = tmp_path / "disk", 1 << 23
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        out = disk / "run"
        train(world, out, "--steps=2", "--keep=1", "--micro_tokens=100")
        one = sum(f.stat().st_size for f in (out / "checkpoints" / "step-000002").rglob("*"))
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - one + 4096))
        full = run(*command(world, out, "--steps=3", "--keep=1"), check=False, env=ENV)
        assert full.returncode and "complete checkpoints are left as they were" in full.stderr and "Traceback" in full.stderr
        assert sorted(os.listdir(out / "checkpoints")) == ["step-000002", "step-000003.tmp"], full.stderr
        (disk / "filler").unlink()
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(bytes(free - one // 2))  # room once the torn one is gone
        train(world, out, "--steps=3", "--keep=1", "--micro_tokens=100")
        kept = {"step-000003", os.path.basename(rlep.best_checkpoint(str(out)))}  # the newest, and the best where that is another
        assert [r["step"] for r in records(out)] == [0, 1, 2, 3] and set(os.listdir(out / "checkpoints")) == kept
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


FAILING = """
import resource, sys, time, torch
sys.path.insert(0, {root!r})
import ranks, rlep, sampler
def fail(*args, **kwargs):
    if {when}:
        {what}
    return real(*args, **kwargs)
real, {target} = {target}, fail
sys.excepthook = ranks.report_crash
rlep.main(sys.argv[1:])
"""


NO_MORE = "resource.setrlimit(resource.RLIMIT_AS, ((32 << 20) + resource.getpagesize() * int(open('/proc/self/statm').read().split()[0]),) * 2)"


@pytest.mark.parametrize("target, what, words", [
    ("rlep.update", "raise torch.OutOfMemoryError('CUDA out of memory')", ["rank 1: out of memory in update: lower --micro_tokens", "in fail"]),
    ("rlep.update", NO_MORE, ["rank 1: out of memory in update: lower --micro_tokens", "in fail"]),  # for real
    ("rlep.load_policy", "time.sleep(1000)", ["rank 1: load took longer than --phase_minutes=0.3", "in fail"]),
    ("sampler.TorchSampler.generate", "time.sleep(1000)", ["rank 1: sample took longer than --phase_minutes=0.3", "in fail"])])
def test_a_rank_that_dies_or_hangs_takes_all_down(world, tmp_path, target, what, words):  # noqa: F811
    """Within a minute, with a traceback, and the line that says what to do."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=ROOT, target=target, what=what, when="ranks.RANK == 1"))
    if what == NO_MORE:  # the update must need more than that
        world = world | {"model": make_model(tmp_path / "model", layers=6, hidden=512)}
    args = [a for a in command(world, tmp_path / "run", "--steps=2", "--phase_minutes=0.3") if not a.startswith("--eval_data")]
    args[args.index("rlep.py")] = script
    start = time.monotonic()
    result = run(*args, check=False, env=ENV, timeout=120)
    assert result.returncode and time.monotonic() - start < 100
    for word in words:
        assert word in result.stderr, result.stderr
