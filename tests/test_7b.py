"""run_7b.sh in its smoke mode, and the plan."""
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, make_model, refused, run

import plan
import settings

QWEN_7B = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 4096}


def script(*args, **env):
    return subprocess.run(["bash", "run_7b.sh", *args], cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
                          env={**os.environ, "VENV": sys.prefix, "SMOKE": "1", **env})


def test_smoke(tmp_path):
    """Every phase of the RLEP arm on two ranks; a phase alone is skipped when it is done."""
    first = script(OUT=str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    with open(tmp_path / "baseline" / "config.json") as f, open(tmp_path / "rlep" / "config.json") as g:
        a, b = json.load(f)["settings"], json.load(g)["settings"]
    assert {k for k in a if a[k] != b[k]} == {"replay", "pool", "out"}
    assert "coverage:" in first.stdout and first.stdout.count("avg@8") == 2 and (tmp_path / "curves.png").stat().st_size > 1000
    again = script(OUT=str(tmp_path), PHASES="baseline")
    assert again.returncode == 0 and "finished: 2 steps are done" in again.stdout and "coverage" not in again.stdout
    dapo = script(OUT=str(tmp_path), ARM="dapo", PHASES="dapo")
    assert dapo.returncode == 0, dapo.stdout + dapo.stderr
    with open(tmp_path / "dapo" / "config.json") as f:
        c = json.load(f)["settings"]
    assert {k for k in a if a[k] != c[k]} == {"dynamic_sampling", "out"}  # and the mini-batch, which the smoke mode sets last
    for env, words in ((dict(ARM="ppo"), "must be rlep, baseline, dapo or bs32"), (dict(PHASES="colect"), "colect is none of")):
        bad = script(OUT=str(tmp_path), **env)
        assert bad.returncode == 2 and words in bad.stderr


def test_the_script_has_the_papers_settings():
    """What run_7b.sh spells out is what rlep.py defaults to."""
    with open(os.path.join(ROOT, "run_7b.sh")) as f:
        lines = f.read().split("train=(")[1].split("\n)")[0]
    options = [word for word in lines.split() if word.startswith("--")]
    s, default = settings.parse("train", ["--model=m", "--data=d", "--out=o", *options]), settings.Settings(model="m", data="d", out="o")
    differing = {name for name in settings.fields_of("train") if getattr(s, name) != getattr(default, name)}
    assert differing == {"is_correction", "activation_checkpointing", "sampler_rows", "phase_minutes"} and len(options) > 20


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


def test_plan_of_7b_by_hand(qwen, capsys):
    """A layer: q 3584x3584+3584, k and v 3584x512+512 each, o 3584x3584, three of 3584x18944, two norms."""
    got = plan.show(settings.parse("plan", [f"--model={qwen}", "--activation_checkpointing"]))
    layer = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584 + 3 * 3584 * 18944 + 2 * 3584
    assert layer == 233_057_792 and got["layer"] == layer
    total = 28 * layer + 2 * 152064 * 3584 + 3584
    assert total == 7_615_616_512 and got["total"] == total
    assert got["weights"] == got["gradients"] == total * 4 / 8 and got["optimizer"] == total
    assert got["kv"] == 2 * 28 * 4 * 128 * 2 == 57_344
    # whole at one moment: embedding, head and last norm in float32, two layers in bfloat16, the head's gradient in float32 beside its cast and
    # a product in bfloat16; at the end the first of these, their gradient, and its copy to be added up over ranks
    root = 2 * 152064 * 3584 + 3584
    assert got["gathered"] == 4 * root + 2 * 2 * layer + (4 + 2 + 2) * 152064 * 3584 and got["reduced"] == 3 * 4 * root
    # one layer keeps, in bfloat16 unless said: two norms (input 2h as float32 4h, scaled 2h, output 2h), q and out h each, k and v spread to
    # h each, a float32 for each of 28 heads; gate, its silu, up and their product, each f
    by_hand = 2 * (4 + 2 + 2) * 3584 + 4 * 2 * 3584 + 4 * 28 + 4 * 2 * 18944
    assert got["per_layer"] == pytest.approx(by_hand, rel=0.15)
    assert got["kept"] == pytest.approx(28 * 2 * 3584 + got["per_layer"], rel=0.1)  # checkpointed: a layer's input, and the layer at work
    assert got["cache"] == pytest.approx(0.4 * 80 * 2**30 - 2 * total)
    assert (got["sampled"], got["trained"]) == (512 * 16 * 1000, 512 * 16 * 1150)
    assert got["flops"] == pytest.approx(5 * 2 * (total - 152064 * 3584) * 512 * 16 * 1150, rel=0.05)  # 1 to score, 4 to update; attention is small
    out = capsys.readouterr().out
    assert out.endswith("fits\n") and 32768 < got["largest"] < 200_000
    exact = plan.show(settings.parse("plan", [f"--model={qwen}", "--activation_checkpointing", f"--micro_tokens={got['largest']}"]))
    assert exact["training"] < 80 * 2**30 * plan.ROOM < exact["training"] + 512 * exact["per token"]


@pytest.mark.parametrize("options, words", [
    ([], "lower --micro_tokens to"), (["--gpu_memory=24"], "add --activation_checkpointing, more GPUs"), (["--gpu_memory_fraction=0.1"], "raise --gpu_memory_fraction"),
    (["--gpu_memory_fraction=0.95"], "lower --gpu_memory_fraction"), (["--gpus=1", "--lora_rank=32", "--activation_checkpointing"], "fits")])
def test_plan_says_what_to_lower(qwen, capsys, options, words):
    plan.show(settings.parse("plan", [f"--model={qwen}", *options]))
    assert words in capsys.readouterr().out


MEASURE = """
import sys, torch
sys.path.insert(0, {root!r})
import model as M, ranks
def peak():
    with open("/proc/self/status") as f:
        return 1024 * int(next(line for line in f if line.startswith("VmHWM")).split()[1])
ranks.start("cpu", 0)
M.load_tokenizer({path!r})
start = peak()
policy = M.load_policy({path!r}, device="cpu", activation_checkpointing={checkpointing})
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak begins anew: loading holds the whole file for a moment
optimizer = M.make_optimizer(policy, 1e-6, 0.1, 0.9, 0.999)
for i in range(4):  # two updates of two micro-batches
    rows = [[i % 30 + 2 for i in range({length})]] * ({tokens} // {length})
    lp, mask, _ = M.response_logprobs(policy, [r[:8] for r in rows], [r[8:] for r in rows], 1.0)
    M.policy_loss(lp, lp.detach(), torch.ones(len(rows)), mask, mask.sum())[0].backward()
    del lp, mask
    if i % 2:
        M.optimizer_step(policy, optimizer, 1.0)
print(f"measured {{peak() - start}};", file=sys.stderr)
ranks.stop()
"""


@pytest.mark.parametrize("gpus, checkpointing, tokens", [(1, False, 2048), (1, True, 8192), (2, False, 2048), (2, True, 8192)])
def test_plan_against_measured_memory(tmp_path, gpus, checkpointing, tokens):
    """Of each rank. SMALL_MODEL=folder takes a real model, as SmolLM2-135M."""
    path, length = os.environ.get("SMALL_MODEL"), 128
    if path:
        tokens = 1024
    else:
        path = make_model(tmp_path / "model", layers=6, hidden=256)
    script = tmp_path / "measure.py"
    script.write_text(MEASURE.format(root=ROOT, path=path, checkpointing=checkpointing, length=length, tokens=tokens))
    result = run("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", script, timeout=600,
                 env={"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"})
    measured = [float(number) for number in re.findall(r"measured (\d+);", result.stderr)]
    s = settings.parse("plan", [f"--model={path}", f"--gpus={gpus}", "--device=cpu", f"--micro_tokens={tokens}", f"--activation_checkpointing={checkpointing}"])
    planned = plan.show(s)["training"]
    print(f"{gpus} ranks: measured {measured}, planned {planned:.0f}: {planned / max(measured):.3f}")
    assert len(measured) == gpus and [planned] * gpus == pytest.approx(measured, rel=0.15)


def test_plan_refuses(tmp_path):
    assert "no model there" in refused("rlep.py", "plan", f"--model={tmp_path}/none")
