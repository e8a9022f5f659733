"""A training step of this program against TRL's GRPOTrainer: the same model, questions, group and rewards, in one run.

    python tests/bench/step.py                                        # ours alone
    python tests/bench/step.py --trl_python=/path/to/python           # and TRL, from an environment that has trl 1.16
    python tests/bench/step.py --cases=g8,uneven --repeats=3 --steps=5

Each run is a process of its own, ours and TRL's in turn (A B A B), on one thread; medians over all timed steps. Ours is
train() of rlep.py as it stands; TRL is GRPOTrainer with Hugging Face generate(), as its users have it without vLLM. Times are
CPU seconds, worker processes included, so that a loaded machine does not distort them; memory is the peak of the process and
its workers together, in MiB. Every answer has an advantage on both sides (rewards are handed out, right and wrong in turn, after
the texts were really verified), so nothing is skipped. TRL's rows of an update are one micro-batch (--trl_micro=4: four).

useful tokens: prompt and response of every row, as if each row were computed alone and without padding.
useful FLOPs: 2 per weight of the layers for every useful token forward, 4 more backward, and the same of the head for response
tokens only; attention is left out. peak: the best sgemm of the same process. A share may exceed what is computed where a prompt
is computed once for its whole group. computed: tokens that went through the first layer's MLP, in the update ("-": not seen).

"uneven": EOS has about 1 chance in 66, so lengths are geometric, cut at 256; both sides are divided by their useful tokens.
"""
import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("sample", "verify", "old log-probs", "forward+backward", "optimizer", "push")
BASE = dict(vocab=512, prompt=30, questions=8, group=8, tokens=64, updates=1, replay=0, uneven=False, compare=True)
CASES = {"g8": {}, "g8 2 updates": dict(updates=2), "g8 M=2": dict(replay=2), "g18": dict(group=18), "g18 2 updates": dict(group=18, updates=2),
         "prompt 300": dict(prompt=300, questions=4), "uneven": dict(tokens=256, uneven=True), "vocab 151936": dict(vocab=151936, questions=4)}
EOS, KNOWN = 2, 66  # in uneven cases only ids below KNOWN are sampled


def make_folder(folder: Path, case: dict) -> None:
    """A random Qwen2 of 3.93M weights in its layers and a tied head, a tokenizer of a byte a token, and the questions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging as transformers_logging

    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=case["vocab"], hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=EOS, pad_token_id=0)).save_pretrained(folder)
    rng = random.Random(0)
    with open(folder / "questions.jsonl", "w") as f:
        for i in range(case["questions"]):
            a, b = rng.randrange(1000), rng.randrange(1000)
            text = f"Q: {a} + {b} = ? last digit. A:"
            story = "Ann counts apples, Bob counts pears; then they add them up. " * 20
            text = story[:round((case["prompt"] - len(text)) * rng.uniform(0.6, 1.4))] + text if case["prompt"] > 60 else text
            f.write(json.dumps({"id": str(i), "problem": text, "prompt": text, "answer": str((a + b) % 10)}) + "\n")


class Clock:
    """CPU seconds and tokens of the parts of a step. A part within a part counts for the inner one alone."""

    def __init__(self):
        import psutil

        self.me, self.steps, self.open, self.inner = psutil.Process(), [], [], 0.0
        self.now, self.start = Counter(), (time.process_time(), time.perf_counter(), 0.0)

    @contextlib.contextmanager
    def part(self, name: str):
        start, outer, self.inner = time.process_time(), self.inner, 0.0
        self.open.append(name)
        yield
        self.open.pop()
        spent = time.process_time() - start
        self.now[name] += spent - self.inner
        self.inner = outer + spent

    def wrap(self, owner, name: str, part, see=None) -> None:
        """Time every call of owner.name as `part`, or as what part() says; see(result, *args) may count something."""
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            with self.part(part() if callable(part) else part):
                result = function(*args, **kwargs)
            if see:
                see(result, *args, **kwargs)
            return result
        setattr(owner, name, timed)

    def watch(self, model) -> None:
        """Count the tokens that the layers compute."""
        model.get_decoder().layers[0].mlp.register_forward_pre_hook(
            lambda module, args: self.now.update({f"computed {(self.open or ['?'])[-1]}": args[0].numel() // args[0].shape[-1]}))

    def step(self, *_) -> None:
        """The end of a step."""
        workers = sum(sum(child.cpu_times()[:2]) for child in self.me.children(recursive=True))
        end = time.process_time(), time.perf_counter(), workers
        cpu, wall, workers = (b - a for a, b in zip(self.start, end))
        self.now.update({"step": cpu + workers, "wall": wall, "verify": workers})  # nothing else has workers
        self.steps.append(dict(self.now))
        self.now, self.start = Counter(), end

    def result(self) -> dict:
        processes = [self.me, *self.me.children(recursive=True)]
        peak = sum(int(Path(f"/proc/{p.pid}/status").read_text().split("VmHWM:")[1].split()[0]) for p in processes) / 1024
        return {"steps": self.steps[1:], "peak": peak}  # the first step warms up


def sgemm_peak() -> float:
    """The best FLOP/s of a float32 matrix product on this core, of three sizes."""
    import torch

    best = 0.0
    for n in (512, 1024, 2048):
        x, y = torch.randn(n, n), torch.randn(n, n)
        for _ in range(6):
            start = time.process_time()
            torch.mm(x, y)
            best = max(best, 2 * n ** 3 / (time.process_time() - start))
    return best


def suppressed(case: dict) -> list[int]:
    return list(range(KNOWN, case["vocab"])) if case["uneven"] else [EOS]


def hf_generate(policy, case: dict, prompts: list[list[int]], n: int) -> int:
    """transformers' own loop on the same weights, padded on the left, with TRL's settings. Returns useful response tokens."""
    import torch

    rows = [p for p in prompts for _ in range(n)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in rows])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows])
    out = policy.model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                                max_new_tokens=case["tokens"], eos_token_id=EOS, suppress_tokens=suppressed(case))[:, width:]
    ended = (out == EOS).int()
    return int((ended.cumsum(1) - ended == 0).sum())


def ours(folder: Path, case: dict, steps: int, micro: int) -> dict:
    """train() of rlep.py with a clock around its parts."""
    sys.path.insert(0, str(ROOT))
    import rlep
    import settings
    from replay import Pool
    from sampler import TorchSampler
    from verify import Verifier

    clock, seen = Clock(), {}
    real_load, real_verify = rlep.load_policy, Verifier.verify_batch

    def load(*args, **kwargs):
        seen["policy"] = policy = real_load(*args, **kwargs)
        policy.vocab = KNOWN if case["uneven"] else case["vocab"]
        policy.stop_ids = [EOS if case["uneven"] else case["vocab"]]  # an id that is never sampled
        clock.watch(policy.model)
        return policy

    def verify(self, responses, golds):
        with clock.part("verify"):
            return [i % 2 == 0 for i, _ in enumerate(real_verify(self, responses, golds))]

    def sampled(result, self, prompts, n, *args, **options):
        seen["sampling"] = prompts, n
        clock.now.update({"useful sample": sum(len(x.ids) for g in result for x in g), "prompt sample": n * sum(map(len, prompts))})

    def updated(result, policy, optimizer, s, groups, *rest):
        rows = [(len(g.question["prompt_ids"]), len(row.ids)) for g in groups for row in g.rows]
        clock.now.update({"useful update": sum(r for _, r in rows), "prompt update": sum(p for p, _ in rows)})

    rlep.load_policy, Verifier.verify_batch = load, verify
    rlep.save_run = lambda *args: seen.update(clock.result())  # at the end, while the workers still live
    for owner, name, part, *see in ((TorchSampler, "generate", "sample", sampled), (TorchSampler, "wake", "push"), (rlep, "score_old", "old log-probs"),
                                    (rlep, "update", "forward+backward", updated), (rlep, "optimizer_step", "optimizer"),
                                    (rlep, "progress_line", "log", clock.step)):
        clock.wrap(owner, name, part, *see)
    options = dict(model=folder, data=folder / "questions.jsonl", out=folder / "out", questions=case["questions"], rollouts=case["group"],
                   mini_batch=case["questions"] // case["updates"], response_limit=case["tokens"], overlong_buffer=0, micro_tokens=micro, lr=1e-6,
                   warmup=0, steps=steps + 1, save_every=10**6, verify_workers=1, device="cpu", sampler="torch", overwrite="true")
    if case["replay"]:
        rng = random.Random(0)
        (folder / "pool.jsonl").unlink(missing_ok=True)
        with Pool(str(folder / "pool.jsonl"), tokenizer=rlep.fingerprint(rlep.load_tokenizer(str(folder)))) as pool:
            pool.append([{"question_id": str(i), "response": f"{i} {k}", "response_ids": rng.choices(range(3, KNOWN), k=case["tokens"]), "reward": 1.0,
                          "finish_reason": "stop", "sampler_logprob": -1.0} for i in range(case["questions"]) for k in range(8)])
        options |= dict(pool=folder / "pool.jsonl", replay=case["replay"])
    rlep.train(settings.parse("train", [f"--{name}={value}" for name, value in options.items()]))
    seen["policy"].model.set_attn_implementation("sdpa")  # transformers' own, for its own loop
    generate = []
    for _ in range(steps if case["compare"] else 0):
        start = time.process_time()
        tokens = hf_generate(seen["policy"], case, *seen["sampling"])
        generate.append((time.process_time() - start) / tokens)
    return {"steps": seen["steps"], "peak": seen["peak"], "generate": generate, "gemm": sgemm_peak()}


def trl(folder: Path, case: dict, steps: int, micro: int) -> dict:
    """GRPOTrainer with a clock around its parts."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    clock = Clock()

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % case["updates"] == 0:
                clock.step()

    def generated(result, prompt_ids, *args, **kwargs):
        made, asked = sum(map(len, result[0])), sum(map(len, prompt_ids))
        clock.now.update({"useful sample": made, "prompt sample": asked, "useful update": made, "prompt update": asked})

    def rewards(completions, **columns):
        return [1.0 - 2.0 * (i % 2) for i, _ in enumerate(completions)]

    with open(folder / "questions.jsonl") as f:
        questions = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in f])
    rows = case["questions"] * case["group"] // case["updates"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows // micro, gradient_accumulation_steps=micro,
        steps_per_generation=micro * case["updates"], num_generations=case["group"], max_completion_length=case["tokens"], temperature=1.0,
        top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", learning_rate=1e-6, lr_scheduler_type="constant",
        weight_decay=0.1, max_steps=(steps + 1) * case["updates"], logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, shuffle_dataset=False, generation_kwargs={"suppress_tokens": suppressed(case)})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = GRPOTrainer(model=model, reward_funcs=rewards, args=config, train_dataset=questions, callbacks=[Steps()],
                          processing_class=PreTrainedTokenizerFast.from_pretrained(folder))
    clock.watch(model)
    for owner, name, part, *see in (
            (trainer, "_generate_single_turn", "sample", generated), (trainer, "_calculate_rewards", "verify"), (torch.optim.AdamW, "step", "optimizer"),
            (trainer, "_get_per_token_logps_and_entropies", lambda: "forward+backward" if torch.is_grad_enabled() else "old log-probs"),
            (trainer, "compute_loss", "forward+backward"), (trainer.accelerator, "backward", "forward+backward"),
            (trainer.accelerator, "clip_grad_norm_", "optimizer")):
        clock.wrap(owner, name, part, *see)
    trainer.train()
    return {**clock.result(), "gemm": sgemm_peak()}


def run(launcher: list[str], side: str, folder: str, case: dict, steps: int, micro: int) -> dict:
    """One process of one side on one case (or several ranks, by the launcher)."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    done = subprocess.run([*launcher, __file__, f"--side={side}", f"--folder={folder}", f"--case={json.dumps(case)}", f"--steps={steps}",
                           f"--micro_tokens={micro}"], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed on {case}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(Path(folder, "result.json").read_text())


def median(runs: list[dict], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for r in runs for step in r["steps"])


def row(name: str, runs: list[dict], case: dict) -> dict[str, float]:
    """Print a side's line of the table. Returns what is compared: CPU seconds per useful token, and memory."""
    m = {part: median(runs, part) for part in (*PARTS, "step", *(f"{kind} {part}" for kind in ("useful", "prompt") for part in ("sample", "update")))}
    layers, head, gemm = 4 * (256 * 256 * 3 + 3 * 256 * 1024), case["vocab"] * 256, statistics.median(r["gemm"] for r in runs)
    share = {}
    for part, what, passes in (("sample", "sample", 2), ("forward+backward", "update", 6)):
        flops = passes * ((m[f"prompt {what}"] + m[f"useful {what}"]) * layers + m[f"useful {what}"] * head)
        share[part] = flops / m[part] / gemm
    computed, peak = median(runs, "computed forward+backward"), statistics.median(r["peak"] for r in runs)
    tokens = m["prompt update"] + m["useful update"]
    print(f"| {name} | {m['step']:.2f} | " + " | ".join(f"{m[part]:.2f}" for part in PARTS) + f" | {m['step'] - sum(m[p] for p in PARTS):.2f} | {peak:,.0f} | "
          + (f"{tokens / computed:.0%}" if computed else "-") + f" | {share['sample']:.0%} | {share['forward+backward']:.0%} | {gemm / 1e9:.0f} |", flush=True)
    return {"step": m["step"] / m["useful sample"], "sample": m["sample"] / m["useful sample"], "forward+backward": m["forward+backward"] / tokens,
            "memory": peak, "tokens": tokens, "train": m["old log-probs"] + m["forward+backward"] + m["optimizer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="of: " + ", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side per case")
    parser.add_argument("--steps", type=int, default=3, help="timed in each process")
    parser.add_argument("--trl_python", default=sys.executable, help="the interpreter of an environment with trl")
    parser.add_argument("--trl_micro", type=int, default=1, help="micro-batches of a TRL update")
    parser.add_argument("--micro_tokens", type=int, default=1024, help="rlep.py's setting")
    for name in ("side", "folder", "case"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:  # one side's process
        result = {"ours": ours, "trl": trl}[args.side](Path(args.folder), json.loads(args.case), args.steps, args.micro_tokens)
        if os.environ.get("RANK", "0") == "0":
            Path(args.folder, "result.json").write_text(json.dumps(result))
        return
    names = args.cases.split(",")
    if set(names) - set(CASES):
        parser.error(f"no such case; there are: {', '.join(CASES)}")
    has_trl = subprocess.run([args.trl_python, "-c", "import trl"], capture_output=True).returncode == 0
    print(f"ours{' and TRL' if has_trl else ' alone: no trl in ' + args.trl_python}; 4 layers of width 256, {args.steps} steps in each of {args.repeats} "
          f"processes a side; --micro_tokens={args.micro_tokens}, TRL {args.trl_micro} micro-batch(es)\n")
    print("| CPU s per step | step | " + " | ".join(PARTS) + " | other | MiB | useful of computed | sample of peak | fwd+bwd of peak | sgemm GFLOP/s |")
    print("|---" * (len(PARTS) + 8) + "|")
    notes, lines = [], {}
    for name in names:
        case, runs = {**BASE, **CASES[name]}, {"ours": [], "trl": []}
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), case)
            for _ in range(args.repeats):
                runs["ours"].append(run([sys.executable], "ours", folder, case, args.steps, args.micro_tokens))
                if has_trl and not case["replay"]:
                    runs["trl"].append(run([args.trl_python], "trl", folder, case, args.steps, args.trl_micro))
        lines[name] = mine = row(f"{name}: ours", runs["ours"], case)
        generate = statistics.median(v for r in runs["ours"] for v in r["generate"])
        notes.append(f"{name}: sampler {1 / mine['sample']:,.0f} tokens a CPU second, generate() {1 / generate:,.0f}: {generate / mine['sample']:.2f}x")
        if runs["trl"]:
            theirs = row(f"{name}: TRL", runs["trl"], case)
            notes[-1] += "; ours / TRL: " + ", ".join(f"{part} {mine[part] / theirs[part]:.2f}" for part in ("step", "sample", "forward+backward", "memory"))
        plain = lines.get(name.split()[0])
        if case["replay"] and plain:
            notes.append(f"{name}: {mine['tokens'] / plain['tokens'] - 1:+.1%} tokens to train on, {mine['train'] / plain['train'] - 1:+.1%} time to train")
    print("\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
