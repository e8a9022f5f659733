"""How the time of a training step grows: with questions, answers per question, their length, the vocabulary, and ranks.

    python tests/bench/scaling.py [--out=scaling.png] [--sweeps=tokens,ranks]

One size changes at a time, from 4 questions x 8 answers x 64 tokens, vocabulary 512 (the model and the clock of step.py). CPU
seconds of one process, as in step.py; with ranks of the first one. Prints a table with the exponent fitted to step, sampling and
training (1: linear), and draws it.
"""
import argparse
import functools
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import step as bench  # noqa: E402

sys.path.insert(0, str(bench.ROOT))
import rlep  # noqa: E402, F401: once, here; the processes that measure are forked

START = {**bench.BASE, "questions": 4, "compare": False}
SWEEPS = {  # size: values, and what is to be expected
    "questions": ((4, 8, 16), "linear: rows do not depend on each other; below 1 while a decoding step of few rows costs as much as one of more"),
    "group": ((4, 8, 16), "below 1: a group's prompt is computed once, and more rows make decoding steps wider, not more"),
    "tokens": ((32, 64, 128), "linear in the weights' part, and the prompt's share shrinks; attention, which grows with the square, is small at this length"),
    "vocab": ((512, 8192, 65536), "flat while the layers' 3.9M weights prevail, towards 1 as the head's 256 per id do"),
    "ranks": ((1, 2), "-1 would be ideal; gathering weights, reducing gradients and waiting for each other take the rest")}


def slope(xs: list[float], ys: list[float]) -> float:
    """The exponent of the power law through the points, by least squares on logarithms."""
    xs, ys = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)


@functools.cache
def measure(changes: tuple, ranks: int, steps: int, micro: int) -> dict[str, float]:
    """CPU seconds per step: all, sampling, training."""
    case = START | dict(changes)
    with tempfile.TemporaryDirectory() as folder:
        bench.make_folder(Path(folder), case)
        if ranks > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            result = bench.run(launcher, "ours", folder, case, steps, micro)
        else:
            fork = multiprocessing.get_context("fork")
            queue = fork.SimpleQueue()

            def child():
                with open(os.devnull, "w") as sys.stdout:
                    queue.put(bench.ours(Path(folder), case, steps, micro))

            process = fork.Process(target=child)
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"failed on {case}")
            result = queue.get()
    m = {part: bench.median([result], part) for part in ("step", *bench.PARTS)}
    return {"step": m["step"], "sample": m["sample"], "train": m["old log-probs"] + m["forward+backward"] + m["optimizer"]}


def draw(results: dict, path: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.2), squeeze=False)
    for axis, (size, points) in zip(axes[0], results.items()):
        xs = list(points)
        for part, style in (("step", "o-"), ("sample", "s--"), ("train", "^--")):
            axis.loglog(xs, [points[x][part] for x in xs], style, label=part, markersize=4)
        first, power = points[xs[0]]["step"], -1 if size == "ranks" else 1
        axis.loglog(xs, [first * (x / xs[0]) ** power for x in xs], color="0.7", zorder=0, label="linear" if power > 0 else "ideal")
        axis.set_xticks(xs, [f"{x:,}" for x in xs])
        axis.minorticks_off()
        axis.set(xlabel=size, title=f"exponent {slope(xs, [points[x]['step'] for x in xs]):.2f}")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("CPU seconds per step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", default=",".join(SWEEPS))
    parser.add_argument("--steps", type=int, default=3, help="timed in each process")
    parser.add_argument("--micro_tokens", type=int, default=2048)
    parser.add_argument("--out", default="scaling.png")
    args = parser.parse_args()
    if set(args.sweeps.split(",")) - set(SWEEPS):
        parser.error(f"no such sweep; there are: {', '.join(SWEEPS)}")
    results = {}
    print("| size | CPU seconds per step | exponent: step | sample | train | expected |\n|---|---|---|---|---|---|")
    for size in args.sweeps.split(","):
        values, expected = SWEEPS[size]
        points = results[size] = {}
        for value in values:
            ranks, changed = (value, ()) if size == "ranks" else (1, ((size, value),) if START[size] != value else ())
            points[value] = measure(changed, ranks, args.steps, args.micro_tokens)
        exponents = [f"{slope(values, [points[v][part] for v in values]):.2f}" for part in ("step", "sample", "train")]
        seconds = ", ".join(f"{points[v]['step']:.2f}" for v in values)
        print(f"| {size} {', '.join(f'{v:,}' for v in values)} | {seconds} | {' | '.join(exponents)} | {expected} |", flush=True)
    draw(results, args.out)
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
