"""experiments/run.py: RLEP against its baseline and the controls that a sceptic asks for, on small tasks, with error bars.

    python experiments/run.py                                              # all arms, five seeds: an hour on two cores
    python experiments/run.py --arms=baseline,rlep,grpo-2x --seeds=0,1,2 --jobs=2 --out=runs/experiments
    python experiments/run.py --arms=baseline,rlep --lr=4e-4               # other options go to rlep.py
    python experiments/run.py --task=words --out=runs/words                # on word problems (words.py) instead of sums (tiny.py)
    python experiments/run.py --out=experiments --seeds=                   # table and figure again from a results.jsonl

A seed is one of everything: base model, training and held-out questions, sampling, replay draws. An arm is a line of ARMS, on
top of the options that run_small.sh gives the embedded default, and the task's own. Everything runs through the command lines of
the task's program and rlep.py, --jobs of them at a time. Run again, it goes on where it stopped. --out then holds the run folders (<arm>-s<seed>, as
plot.py likes them) and logs/, and

    results.jsonl    one object per arm and seed: options, command, commit, final avg@16, curve, steps to x%, ...
    results.md       the table;  figure.png: accuracy over steps, one panel per arm with the baseline behind it
"""
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from data import InputError  # noqa: E402
from plot import first_step, read_metrics, series  # noqa: E402
from settings import parse  # noqa: E402

# label -> options of rlep.py train. "x2" is twice the default's value; --model=<arm> starts from that arm's end instead of the
# base model; --pool=<pool> names a line of POOLS, where replay takes "seed" unless told otherwise. A new arm is a new line.
ARMS = {
    "baseline": "",                                                 # GRPO
    "rlep": "--replay=2",
    "rlep-m1": "--replay=1",
    "rlep-m4": "--replay=4",
    "grpo-2x": "--steps=x2",                                        # as many steps as seed run and RLEP together
    "sft": "--rollouts=0 --replay=2",                               # supervised fine-tuning on the pool alone
    "sft-fast": "--rollouts=0 --replay=2 --lr=1e-3",                # ... at a rate that suits it better
    "sft-grpo": "--model=sft",                                      # ... and then GRPO
    "base-pool": "--replay=2 --pool=base",                          # successes of the base model
    "hard-only": "--replay=2 --replay_hard=0.25",
    "hard-collected": "--replay=2 --replay_rate=0.5",               # hard by the collection's success rate
    "negative": "--replay=2 --replay_failures=1 --pool=failures",
    "no-std": "--replay=2 --advantage_std=false",
    "no-std-baseline": "--advantage_std=false",
    "fresh-baseline": "--replay=2 --replay_baseline=fresh",         # replayed rows do not move their group's mean and std
    "dynamic": "--dynamic_sampling",                                # DAPO
    "half-batch": "--mini_batch=x0.5",
    "rlep-half-batch": "--replay=2 --mini_batch=x0.5",
    "shortest": "--replay=2 --replay_select=shortest",
    "likeliest": "--replay=2 --replay_select=likeliest",
    "unlikeliest": "--replay=2 --replay_select=unlikeliest",
    "grow-pool": "--replay=2 --grow_pool",                          # its own successes too
}
# label -> the program that makes base model and questions, and options of rlep.py where they differ from the embedded default's
TASKS = {
    "sums": ("tiny.py", ""),
    "words": ("experiments/words.py", "--response_limit=48 --lr=5e-5"),
}
POOLS = {"seed": "--model=baseline", "base": "--model=base", "failures": "--model=baseline --keep_failures"}  # options of collect
MACHINE = ("--device=cpu", "--sampler=torch")  # the same numbers whatever else a machine has
SHARES = (0.5, 0.75, 0.9, 1.0)  # of the baseline's best held-out accuracy
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)  # Student's t, 1.. degrees of freedom


# ---------------------------------------------------------------------------------------------------------- statistics


def steps_to(steps: np.ndarray, values: np.ndarray, baseline: np.ndarray, share: float) -> float:
    """The first of the steps (S,) at which the arm's mean over seeds reaches `share` of the best of the baseline's mean; inf if none.

    values (seeds, S), baseline (seeds, S'): held-out accuracy of the same seeds."""
    step = first_step(steps, values, share * baseline.mean(0).max())
    return np.inf if step is None else step


def bootstrap(statistic, count: int, draws: int = 2000) -> tuple[float, float]:
    """95% percentile interval of statistic(indices) over seeds drawn with replacement from `count`; may hold inf."""
    rng = np.random.default_rng(0)
    values = sorted(statistic(rng.integers(count, size=count)) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def standard_error(x) -> float:
    """Of the mean over seeds; nan for a single seed."""
    return float(np.std(x, ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def paired_interval(a, b) -> tuple[float, float, float]:
    """Mean of a - b over seeds and its 95% t interval (Student's t, n - 1 degrees of freedom); nan bounds for a single seed."""
    d = np.subtract(a, b)
    half = T_975[min(len(d) - 2, len(T_975) - 1)] * standard_error(d) if len(d) > 1 else float("nan")
    return float(d.mean()), float(d.mean() - half), float(d.mean() + half)


# ---------------------------------------------------------------------------------------------------------------- runs


def tiny_options() -> dict[str, list[str]]:
    """Options of the embedded default by phase (common, train, collect, evaluation), from run_small.sh, their one place."""
    with open(os.path.join(ROOT, "run_small.sh")) as f:
        without_gpu = f.read().split("\nelse\n")[1]
    return {name: value.split() for name, value in re.findall(r"^ +(\w+)=\(([^)]*)\)", without_gpu, re.M)}


def arm_options(arm: str, extra: list[str]) -> dict[str, str]:
    """--name -> value of rlep.py train for the arm: the default's, then the user's, then the arm's own."""
    tiny, out = tiny_options(), {}
    for option in [*tiny["common"], *tiny["train"], *extra, *ARMS[arm].split()]:
        name, _, value = option.partition("=")
        out[name] = f"{float(out[name]) * float(value[1:]):g}" if re.fullmatch(r"x[\d.]+", value) else value or "true"
    if any(name in out for name in ("--replay", "--replay_failures")):
        out.setdefault("--pool", "seed")
    return out


class Runner:
    """Runs what an arm needs, each command once, with its output in logs/. Thread-safe."""

    def __init__(self, out: str, task: str, tiny: list[str], extra: list[str]):
        self.out, self.task, self.tiny, self.extra, self.locks = out, task, tiny, extra, defaultdict(threading.Lock)

    def command(self, name: str, *args: str) -> None:
        """Run `python args`, unless it has been run to its end before: <log>.done tells. A thread that comes second waits.
        InputError with the log's end if it fails."""
        with self.locks[name]:
            path = os.path.join(self.out, "logs", name + ".log")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.exists(path + ".done"):
                with open(path + ".done") as f:
                    if json.load(f) == list(args):
                        return
            with open(path, "a") as log:
                code = subprocess.run([sys.executable, *args], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=subprocess.STDOUT).returncode
            if code:
                with open(path, errors="replace") as log:
                    raise InputError(f"{name} ended with exit code {code}, see {path}: {(log.read().strip().splitlines() or ['no output'])[-1]}")
            with open(path + ".done", "w") as f:
                json.dump(args, f)

    def model(self, name: str, seed: int) -> str:
        """Folder of the base model, or of an arm's run, made if need be."""
        if name == "base":
            folder = os.path.join(self.out, f"seed{seed}", "tiny")
            self.command(f"tiny-s{seed}", TASKS[self.task][0], f"--out={folder}", f"--seed={seed}", *self.tiny)
            return os.path.join(folder, "base")
        self.command(f"{name}-s{seed}", *self.train_command(name, seed))
        return os.path.join(self.out, f"{name}-s{seed}")

    def pool(self, name: str, seed: int) -> str:
        tiny, path = tiny_options(), os.path.join(self.out, f"seed{seed}", f"pool-{name}.jsonl")
        model, *options = POOLS[name].split()
        model = self.model(model.removeprefix("--model="), seed)
        self.command(f"pool-{name}-s{seed}", "rlep.py", "collect", f"--model={model}", f"--data={self.data(seed, 'train')}", *tiny["common"],
                     *tiny["collect"], *self.extra, *options, f"--seed={seed}", *MACHINE, f"--pool={path}")
        return path

    def data(self, seed: int, part: str) -> str:
        return os.path.join(os.path.dirname(self.model("base", seed)), part + ".jsonl")

    def train_command(self, arm: str, seed: int) -> list[str]:
        """The command line of an arm; what it starts from is there when this returns."""
        options, run = arm_options(arm, self.extra), os.path.join(self.out, f"{arm}-s{seed}")
        options["--model"] = self.model(options.get("--model", "base"), seed)
        if "--pool" in options:
            options["--pool"] = self.pool(options["--pool"], seed)
        if "--grow_pool" in options:  # it writes to its pool: a copy
            copy = os.path.join(self.out, f"seed{seed}", f"pool-{arm}.jsonl")
            if not os.path.isdir(run):
                with open(options["--pool"], "rb") as source, open(copy, "wb") as target:
                    target.write(source.read())
            options["--pool"] = copy
        options |= {"--data": self.data(seed, "train"), "--eval_data": self.data(seed, "test"), "--seed": str(seed), "--out": run}
        return ["rlep.py", "train", *(f"{name}={value}" for name, value in options.items()), *MACHINE]

    def result(self, arm: str, seed: int) -> dict:
        """Train and evaluate one arm of one seed, and what is to be known of it."""
        tiny, baseline, run = tiny_options(), self.model("baseline", seed), self.model(arm, seed)
        evaluation = os.path.join(self.out, f"seed{seed}", f"eval-{arm}")
        self.command(f"eval-{arm}-s{seed}", "rlep.py", "eval", f"--model={run}", f"--data={self.data(seed, 'test')}", *tiny["common"],
                     *tiny["evaluation"], *self.extra, f"--seed={seed}", *MACHINE, f"--out={evaluation}")
        with open(os.path.join(evaluation, "eval.json")) as f:
            scores = {name.split("/")[-1]: value for name, value in json.load(f)["metrics"].items()}
        n = max(int(name[4:]) for name in scores if name.startswith("avg@"))
        records, held_out = read_metrics(run), r"eval/.+/avg@\d+"
        curve, reference = series(records, held_out), series(read_metrics(baseline), held_out)
        steps, values, best = np.array(list(curve)), np.array([list(curve.values())]), np.array([list(reference.values())])
        reached = {f"{share:.0%}": steps_to(steps, values, best, share) for share in SHARES}
        fresh = arm_options(arm, self.extra).get("--rollouts") != "0"  # else there are none to tell of
        trained = records[1:]  # the first record is the evaluation of what training starts from
        return {"arm": arm, "seed": seed, "task": self.task, "options": arm_options(arm, self.extra), "tiny": self.tiny, "command": "python " + " ".join(self.train_command(arm, seed)),
                "commit": commit(), "samples": n, "final": scores[f"avg@{n}"], "pass": scores.get(f"pass@{n}"), "curve": curve,
                "steps_to": {share: None if step == np.inf else step for share, step in reached.items()},  # of this seed's baseline
                "dead_groups": float(np.mean([r["dead_groups"] for r in trained])) if fresh else None,  # mean over the run
                "entropy": float(np.mean([r["entropy"] for r in trained[-5:]])) if fresh else None, "length": scores["length"],
                "seconds": sum(r["time/step"] for r in trained)}


def commit() -> str:
    """Of the checkout, "+" when tracked files are changed; "unknown" outside of git."""
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


# ---------------------------------------------------------------------------------------------------- table and figure


def load_results(path: str) -> dict[str, dict[int, dict]]:
    """arm -> seed -> result."""
    results = defaultdict(dict)
    if os.path.exists(path):
        with open(path) as f:
            for result in (json.loads(line) for line in f if line.endswith("\n")):
                results[result["arm"]][result["seed"]] = result
    return results


def curves(seeds: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (S,) that all results have, and their accuracies (seeds, S)."""
    steps = sorted(set.intersection(*({int(step) for step in r["curve"]} for r in seeds)))
    return np.array(steps), np.array([[{int(k): v for k, v in r["curve"].items()}[step] for step in steps] for r in seeds])


def table(results: dict[str, dict[int, dict]]) -> str:
    """Markdown. An arm is compared with the baseline on the seeds that both have."""
    n = next(iter(next(iter(results.values())).values()))["samples"]
    rows = [f"| arm | seeds | 50% | 75% | 90% | 100% of the baseline's best at step | final avg@{n} | minus baseline | dead groups | entropy | length | minutes |",
            "|" + "---|" * 12]
    show = lambda step, last: f"> {last}" if step == np.inf else f"{step:g}"  # noqa: E731
    for arm in [a for a in ARMS if a in results]:
        seeds = sorted(results[arm].keys() & results["baseline"].keys())
        mine, theirs = ([results[name][seed] for seed in seeds] for name in (arm, "baseline"))
        (steps, values), (_, base) = curves(mine), curves(theirs)
        reach = []
        for share in SHARES:
            low, high = bootstrap(lambda i: steps_to(steps, values[i], base[i], share), len(seeds)) if len(seeds) > 1 else (np.nan, np.nan)
            reach.append(show(steps_to(steps, values, base, share), steps[-1])
                         + (f" [{show(low, steps[-1])}, {show(high, steps[-1])}]" if len(seeds) > 1 else ""))
        final, base_final = [r["final"] for r in mine], [r["final"] for r in theirs]
        gain, low, high = paired_interval(final, base_final)
        average = lambda name, form: "" if mine[0][name] is None else format(np.mean([r[name] for r in mine]), form)  # noqa: E731
        rows.append(f"| {arm} | {len(seeds)} | {' | '.join(reach)} | {np.mean(final):.3f}{f' ± {standard_error(final):.3f}' if len(seeds) > 1 else ''} | "
                    + ("" if arm == "baseline" else f"{gain:+.3f}" + (f" [{low:+.3f}, {high:+.3f}]" if len(seeds) > 1 else ""))
                    + f" | {average('dead_groups', '.2f')} | {average('entropy', '.2f')} | {average('length', '.1f')} | {np.mean([r['seconds'] for r in mine]) / 60:.1f} |")
    if "rlep" in results and len(seeds := sorted(results["rlep"].keys() & results["baseline"].keys())) > 1:
        (steps, values), (base_steps, base) = (curves([results[arm][seed] for seed in seeds]) for arm in ("rlep", "baseline"))
        for share in (0.9, 1.0):
            ratio = lambda i: steps_to(steps, values[i], base[i], share) / max(steps_to(base_steps, base[i], base[i], share), 1)  # noqa: E731, B023
            low, high = bootstrap(ratio, len(seeds))
            rows.append(f"\nrlep reaches {share:.0%} of the baseline's best in {ratio(np.arange(len(seeds))):.2f} [{low:.2f}, {high:.2f}] of the baseline's steps to it"
                        + (" (inf: never)." if high == np.inf else "."))
    commits = sorted({r["commit"] for seeds in results.values() for r in seeds.values()})
    tasks = sorted({r.get("task", "sums") for seeds in results.values() for r in seeds.values()})
    notes = ["", "Steps: where the arm's mean curve first reaches that share of the best of the baseline's mean curve, with 95% bootstrap intervals over",
             "seeds. Final: mean over seeds ± standard error. Minus baseline: paired by seed, with the 95% t interval over seeds. Dead groups: mean over",
             "the run; entropy (nats): of its last five steps; length: tokens, of the final evaluation; minutes: wall time of training, without evaluation.",
             "An arm of which fewer seeds are done is compared with the baseline on those.",
             "", f"Task: {', '.join(tasks)}. Commit {', '.join(commits)}; options beside it in results.jsonl."]
    return "\n".join(rows + notes) + "\n"


def draw(results: dict[str, dict[int, dict]], path: str) -> None:
    """A panel per arm: mean held-out accuracy over steps and the band of ± one standard error over seeds; the baseline in grey."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [a for a in ARMS if a in results and a != "baseline"] or ["baseline"]
    columns = min(4, len(arms))
    figure, axes = plt.subplots(-(-len(arms) // columns), columns, figsize=(3.4 * columns, 2.6 * -(-len(arms) // columns)), sharey=True, squeeze=False,
                                constrained_layout=True)
    for axis, arm in zip(axes.flat, arms):
        for name, color in (("baseline", "gray"), (arm, "C0")):
            seeds = [results[name][seed] for seed in sorted(results[name])]
            steps, values = curves(seeds)
            mean, error = values.mean(0), values.std(0, ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
            axis.plot(steps, mean, color=color, label=name)
            axis.fill_between(steps, mean - error, mean + error, alpha=0.25, color=color, lw=0)
        axis.set(title=f"{arm} ({len(results[arm])} seeds)", xlabel="step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(arms):]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out accuracy")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: list[str]) -> None:
    own = {"arms": ",".join(ARMS), "seeds": "0,1,2,3,4", "jobs": "2", "out": "runs/experiments", "task": "sums", "tiny": ""}
    if "-h" in args or "--help" in args:
        print(__doc__ + "\n" + "\n".join(f"--{name:<6} [{default}]" for name, default in own.items()) + f"\n--task: {' or '.join(TASKS)}; --tiny: options of its program")
        return
    extra = []
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        if name in own and equals:
            own[name] = value
        else:
            extra.append(arg)
    unknown = [arm for arm in own["arms"].split(",") if arm not in ARMS]
    if unknown:
        raise InputError(f"--arms: no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
    if own["task"] not in TASKS:
        raise InputError(f"--task: no task {own['task']!r}; there are {', '.join(TASKS)}")
    if not re.fullmatch(r"(\d+(,\d+)*)?", own["seeds"]) or not re.fullmatch(r"[1-9]\d*", own["jobs"]):
        raise InputError(f"--seeds={own['seeds']} --jobs={own['jobs']}: seeds are whole numbers with commas between, jobs one from 1 on")
    extra = TASKS[own["task"]][1].split() + extra
    parse("train", ["--model=x", "--data=x", "--out=x", *(f"{name}={value}" for name, value in arm_options("baseline", extra).items())])
    arms = ["baseline", *(arm for arm in own["arms"].split(",") if arm != "baseline")]  # nothing can be said without it
    seeds = [int(seed) for seed in own["seeds"].split(",") if seed]
    path, runner = os.path.join(own["out"], "results.jsonl"), Runner(own["out"], own["task"], own["tiny"].split(), extra)
    results = load_results(path)
    if any(r.get("task", "sums") != own["task"] for by_seed in results.values() for r in by_seed.values()):
        raise InputError(f"{path}: holds results of another task than {own['task']}; choose another --out or --task")
    for r in (r for by_seed in results.values() for seed, r in by_seed.items() if r["arm"] in arms and seed in seeds):
        if (r["options"], r["tiny"]) != (arm_options(r["arm"], extra), runner.tiny):
            raise InputError(f"{path}: holds {r['arm']} with other options; choose another --out")
    # seed by seed, the next one's baseline first, so that no worker waits long for it
    todo = sorted(((i - (arm == "baseline"), arm, seed) for i, seed in enumerate(seeds) for arm in arms if seed not in results[arm]),
                  key=lambda t: (t[0], t[1] != "baseline"))
    start, lock = time.time(), threading.Lock()

    def work(task) -> None:
        _, arm, seed = task
        result = runner.result(arm, seed)
        with lock, open(path, "a") as f:
            f.write(json.dumps(result) + "\n")
            results[arm][seed] = result
            print(f"{arm} seed {seed}: avg@{result['samples']} {result['final']:.3f}   ({time.time() - start:.0f} s)", flush=True)

    with ThreadPoolExecutor(int(own["jobs"])) as workers:
        try:
            for future in [workers.submit(work, task) for task in todo]:
                future.result()
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    results = {arm: by_seed for arm, by_seed in results.items() if by_seed}
    if not results:
        raise InputError(f"{path}: holds no results; name --seeds to run")
    text = table(results)
    with open(os.path.join(own["out"], "results.md"), "w") as f:
        f.write(text)
    draw(results, os.path.join(own["out"], "figure.png"))
    print(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
