"""plot.py: curves of one or several runs as a PNG, and the table that goes with them.

    python plot.py runs/baseline runs/rlep --out=curves.png
    python plot.py runs/baseline-s0 runs/baseline-s1 runs/rlep-s0 runs/rlep-s1 --out=curves.png

Runs whose names differ in a final -s<seed> alone are seeds of one arm: drawn as their mean, with a band from the lowest
to the highest. The first arm is the baseline: a dashed line marks its best held-out accuracy, and the table tells the
step at which each arm first reaches it.
"""
import json
import os
import re
import sys

import numpy as np

from data import InputError

PANELS = [("held-out accuracy", r"eval/.+/avg@\d+"), ("training accuracy (fresh)", "accuracy"), ("response length (tokens)", "length"),
          ("entropy (nats)", "entropy"), ("dead groups (share)", "dead_groups"), ("clipped tokens (share)", "clip_high")]


def read_metrics(run: str) -> list[dict]:
    """The records of a run's metrics.jsonl; a torn last line, of a run that is going on, is left out."""
    path = os.path.join(run, "metrics.jsonl")
    if not os.path.isfile(path):
        raise InputError(f"{run}: no metrics.jsonl there; name run folders of python rlep.py train")
    records = []
    with open(path) as f:
        for number, line in enumerate(f, 1):
            if line.endswith("\n"):
                try:
                    records.append(json.loads(line))
                except ValueError:
                    raise InputError(f"{path}:{number}: not a JSON object; mend or delete the line") from None
    return records


def series(records: list[dict], pattern: str) -> dict[int, float]:
    """step -> value of the metric whose name matches; the mean where several do (evaluation sets)."""
    out = {}
    for record in records:
        values = [v for k, v in record.items() if re.fullmatch(pattern, k)]
        if values:
            out[record["step"]] = float(np.mean(values))
    return out


def arms_of(runs: list[str]) -> dict[str, list[list[dict]]]:
    """Arm name -> the metrics of its seeds."""
    arms = {}
    for run in runs:
        name = re.sub(r"-s\d+$", "", os.path.basename(os.path.normpath(run)))
        arms.setdefault(name, []).append(read_metrics(run))
    return arms


def arm_curve(seeds: list[list[dict]], pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (S,) that all seeds have, and the values (seeds, S)."""
    curves = [series(records, pattern) for records in seeds]
    steps = sorted(set.intersection(*(set(c) for c in curves)))
    return np.array(steps), np.array([[c[step] for step in steps] for c in curves])


def first_step(steps: np.ndarray, values: np.ndarray, goal: float) -> int | None:
    """The first step at which the mean curve reaches the goal."""
    reached = np.flatnonzero(values.mean(0) >= goal)
    return int(steps[reached[0]]) if len(reached) else None


def table(arms: dict) -> str:
    """Final and best held-out accuracy of each arm, and the steps at which it reaches shares of the baseline's best."""
    rows, best = [], None
    for name, seeds in arms.items():
        steps, values = arm_curve(seeds, PANELS[0][1])
        if not len(steps):
            continue
        mean = values.mean(0)
        best = mean.max() if best is None else best
        error = values[:, -1].std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
        reach = [first_step(steps, values, share * best) for share in (0.5, 0.75, 0.9, 1.0)]
        rows.append(f"{name:<20} {len(seeds):>5} {mean[-1]:>8.3f} {'' if np.isnan(error) else f'± {error:.3f}':>8} {mean.max():>8.3f} "
                    + " ".join(f"{'-' if r is None else r:>6}" for r in reach))
    head = f"{'arm':<20} {'seeds':>5} {'final':>8} {'':>8} {'best':>8} " + " ".join(f"{f'{p}%':>6}" for p in (50, 75, 90, 100))
    return "\n".join([head + "   <- step that reaches this share of the first arm's best", *rows])


def draw(runs: list[str], path: str) -> None:
    """Draw the panels and save them as PNG at `path`, whole or not at all."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = arms_of(runs)
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    for axis, (title, pattern) in zip(axes.flat, PANELS):
        best = None
        for name, seeds in arms.items():
            steps, values = arm_curve(seeds, pattern)
            if not len(steps):
                continue
            [line] = axis.plot(steps, values.mean(0), label=f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name)
            if len(seeds) > 1:
                axis.fill_between(steps, values.min(0), values.max(0), alpha=0.2, color=line.get_color())
            if pattern == PANELS[0][1] and len(arms) > 1:  # where each arm reaches the baseline's best
                best = values.mean(0).max() if best is None else best
                axis.axhline(best, color="gray", lw=0.8, ls="--")
                reached = first_step(steps, values, best)
                if reached is not None:
                    axis.plot([reached], [best], "o", color=line.get_color())
                    axis.annotate(f"step {reached}", (reached, best), textcoords="offset points", xytext=(4, -12), fontsize=8)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.savefig(path + ".tmp", format="png", dpi=110)
    plt.close(figure)
    os.replace(path + ".tmp", path)


def main(args: list[str]) -> None:
    out = [a.removeprefix("--out=") for a in args if a.startswith("--out=")]
    runs = [a for a in args if not a.startswith("-")]
    if "--help" in args or "-h" in args or not args:
        print(__doc__)
        return
    unknown = [a for a in args if a.startswith("-") and not a.startswith("--out=")]
    if unknown or not runs or len(out) > 1:
        raise InputError(f"{unknown[0]}: unknown option; there is --out=curves.png" if unknown else "name one or more run folders, and one --out=curves.png")
    path = out[0] if out else "curves.png"
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise InputError(f"--out={path}: its folder does not exist")
    draw(runs, path)
    print(table(arms_of(runs)))
    print(f"curves: {path}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
