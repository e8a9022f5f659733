"""Benchmark of verify.py: the table of cases by kind, real answers, throughput, a training step's batch, hostile text.

    python tests/bench/verify.py                      math-verify 0.9.0 is measured in the same run where it is installed
    python tests/bench/verify.py --responses=rows.jsonl    rows of {"answer", "responses", "correct": labels}

In the table the peer gets gold and bare answer in `$...$`, as behind an extraction of the last box or answer line.
"""
import argparse
import json
import logging
import random
import string
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import verify  # noqa: E402

try:
    import math_verify
    logging.disable(logging.CRITICAL)
except ImportError:
    math_verify = None


def peer_equal(answer, gold):
    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${answer}$"))


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start


def table():
    """Agreement by kind, both ways round where the case holds both ways."""
    ours, peers, slow, kinds = Counter(), Counter(), (0.0, "", ""), Counter()
    false_positives = Counter()
    for line in (ROOT / "tests" / "verify_cases.tsv").read_text(encoding="utf-8").split("\n"):
        if not line or line.startswith("# "):
            continue
        gold, answer, verdict, kind = line.split("\t")
        for g, a in [(gold, answer)] + [(answer, gold)] * (verdict in ("T", "F")):
            kinds[kind] += 1
            right = verdict.startswith("T")
            got, spent = timed(verify.is_equiv, a, g)
            slow = max(slow, (spent, g, a))
            ours[kind] += got is right
            false_positives["ours"] += got and not right
            if math_verify and kind != "hostile":
                got = peer_equal(a, g)
                peers[kind] += got is right
                false_positives["peer"] += got and not right
    print(f"{'kind':<16}{'pairs':>7}{'verify.py':>12}{'math-verify':>13}")
    for kind, n in sorted(kinds.items()):
        peer = f"{100 * peers[kind] / n:.1f} %" if math_verify and kind != "hostile" else "-"
        print(f"{kind:<16}{n:>7}{100 * ours[kind] / n:>10.1f} %{peer:>13}")
    n = sum(kinds.values())
    m = n - kinds["hostile"]
    peer = f"{100 * sum(peers.values()) / m:.1f} %" if math_verify else "-"
    print(f"{'all':<16}{n:>7}{100 * sum(ours.values()) / n:>10.1f} %{peer:>13}")
    print(f"false positives: verify.py {false_positives['ours']}, math-verify {false_positives['peer'] if math_verify else '-'}")
    print(f"slowest pair: {slow[0] * 1e3:.0f} ms, gold {slow[1][:40]!a}, answer {slow[2][:60]!a}\n")


def responses(path):
    if not path.exists():
        return print(f"no {path.name}: agreement with labels and throughput are skipped\n")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    pairs = [(t, r["answer"], label) for r in rows for t, label in zip(r["responses"], r["correct"], strict=True)]
    got, spent = timed(lambda: [verify.is_correct(t, g) for t, g, _ in pairs])
    agree = sum(a is label for a, (_, _, label) in zip(got, pairs, strict=True))
    print(f"{path.name}: {agree} of {len(pairs)} labels agree; {len(pairs) / spent:,.0f} responses a second (one process, cold caches)")
    if math_verify:
        peer, peer_spent = timed(lambda: [math_verify.verify(math_verify.parse(f"${g}$"), math_verify.parse(t)) for t, g, _ in pairs])
        agree = sum(a is label for a, (_, _, label) in zip(peer, pairs, strict=True))
        print(f"  math-verify: {agree} labels agree; {len(pairs) / peer_spent:,.0f} a second; verify.py is {peer_spent / spent:.0f} times as fast")
    print()


def batch(questions=512, group=18):
    """A training step: integer golds and formulas, responses of about 4,000 characters, half of them right."""
    rng = random.Random(0)
    formulas = [("\\sin 2x", "2\\sin x\\cos x"), ("\\frac{\\sqrt2}{2}", "\\cos 45^\\circ"), ("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}")]
    texts, golds = [], []
    for q in range(questions):
        gold, right = (str(rng.randint(0, 9999)),) * 2 if q % 20 else rng.choice(formulas)
        for _ in range(group):
            words = "".join(rng.choices(string.ascii_lowercase + "    .\n${}\\", k=4000)).replace("\\b", "b")
            answer = right if rng.random() < 0.5 else str(rng.randint(0, 9999)) if q % 20 else f"{right}+{rng.random():.3f}"
            texts.append(words + f"\n\\boxed{{{answer}}}.")
            golds.append(gold)
    v = verify.Verifier(workers=2)
    got, spent = timed(v.verify_batch, texts, golds)
    print(f"batch of {len(texts):,}: {spent:.2f} s with 2 workers, 1 in 20 questions a formula for the numeric stage; "
          f"{sum(map(bool, got)):,} right; {dict(v.counts)}")
    v.close()


def hostile():
    import test_verify
    spent, wrong, peak = [], 0, 0
    for h in test_verify.HOSTILE:
        for form in ("%s", "\\boxed{%s}", "so\nAnswer: %s"):
            got, t = timed(verify.is_correct, form.replace("%s", h), "x^2+1")
            spent.append((t, form, h))
            wrong += got
    for pid in ["self"] + [w.process.pid for v in verify.SHARED.values() for w in v.workers]:
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            peak = max(peak, int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024)
    worst = max(spent)
    print(f"hostile: {len(test_verify.HOSTILE)} texts in 3 forms, {wrong} false positives, {sum(t > 1 for t, _, _ in spent)} over 1 s; "
          f"slowest {worst[0] * 1e3:.0f} ms ({worst[2][:30]!a}); peak memory of a process {peak} MB")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--responses", type=Path, default=ROOT.parent / "shared" / "data" / "math_responses.jsonl", help="rows with labels")
    args = p.parse_args()
    print("peer:", "math-verify" if math_verify else "none (math-verify isn't installed)", "\n")
    responses(args.responses)
    table()
    batch()
    hostile()


if __name__ == "__main__":
    main()
