"""Benchmark of the experience pool at the paper's scale: 17,398 questions, up to 64 trajectories each.

    python tests/bench/pool.py --records=1100000 --folder=/tmp/pool-bench     # about 8 GB of disk, deleted afterwards

Every figure is taken in a process of its own, so that its memory is its own. "cold" means that the pool was put out of
the page cache before. Prints a table; targets are those of the paper's pool (1.1 million records), on 2 plain cores.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
import replay  # noqa: E402
from replay import Pool  # noqa: E402

QUESTIONS, PER_QUESTION = 17398, 64
WORDS = ("so we have the sum of and is x y then \\frac{1}{2} \\sqrt{3} = + - ^2 \\(a+b\\) equals therefore which gives n "
         "let us first compute that each side must be an integer hence \\angle ABC 12 360 $f(x)$ since for all\n\n").split(" ")


def generate(path: str, records: int, seed: int = 0) -> None:
    """Write a pool in the layout that append() writes. Lengths: log-normal, mean about 1,000 tokens, at most 3072."""
    rng = random.Random(seed)
    bodies = []
    for _ in range(2000):
        n = min(3000, int(rng.lognormvariate(6.78, 0.55)))
        text = " ".join(rng.choice(WORDS) for _ in range(int(n * 0.62)))  # about 3.1 characters per token
        ids = ",".join(str(min(151642, int(rng.paretovariate(0.45)) + 10)) for _ in range(n - 2))  # small ids are common
        bodies.append((text, json.dumps(text)[1:-1], ids, n))
    with open(path, "wb", buffering=1 << 22) as file:
        for i in range(records):
            question = i // PER_QUESTION % QUESTIONS
            text, escaped, ids, n = bodies[rng.randrange(len(bodies))]
            if i % PER_QUESTION == 0:
                problem = " ".join(rng.choice(WORDS) for _ in range(60))
            record = {"question_id": f"q{question:016x}", "response": "", "response_ids": [], "finish_reason": "stop",
                      "reward": 1.0, "sampler_logprob": -round(rng.random() * n * 0.5, 3), "success_rate": 0.5,
                      "tokenizer": "0123456789abcdef", "source": "math_dapo", "run": "seed-7b", "step": 400,
                      "tokens": n, "digest": replay.text_digest(f"{i}. {text}"), "model": "Qwen2.5-Math-7B",
                      "temperature": 0.7, "top_p": 0.95, "answer": "42", "problem": problem}
            line = replay.to_line(record, PER_QUESTION - 1 - i % PER_QUESTION).decode()
            line = line.replace('"response": ""', f'"response": "{i}. {escaped}"').replace("[]}", f"[{i % 100000},{ids},2]}}")
            file.write(line.encode())


def status(key: str, source: str = "status") -> float:
    """A memory figure of this process in MB."""
    with open(f"/proc/self/{source}") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))


def evict(path: str) -> None:
    """Put a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(path: str) -> None:
    """In a fresh process: open, draw; print the figures as JSON."""
    started, started_cpu = time.perf_counter(), time.process_time()
    pool = Pool(path, readonly=True, tokenizer="0123456789abcdef", max_tokens=3072)
    figures = {"open": time.perf_counter() - started, "open cpu": time.process_time() - started_cpu}
    chosen = random.Random(0).sample(pool.questions, min(512, len(pool.questions)))
    times, cpu = [], []
    for step in range(32):  # "warm": each step draws other records, so all the candidates are read once before
        if step == 1:
            for question in chosen:
                pool.draw(question, PER_QUESTION, seed=0, step=0)
        started, started_cpu = time.perf_counter(), time.process_time()
        drawn = [pool.draw(question, 2, seed=0, step=step, text=False) for question in chosen]  # as training does
        times.append(time.perf_counter() - started), cpu.append(time.process_time() - started_cpu)
    assert all(len(records) == 2 for records in drawn)
    times, cpu = sorted(times[1:]), sorted(cpu[1:])
    figures |= {"draw": times[len(times) // 2], "draw cpu": cpu[len(cpu) // 2], "draw best": times[0], "draw best cpu": cpu[0],
                "peak": status("VmHWM"), "resident": status("VmRSS"), "proportional": status("Pss", "smaps_rollup")}
    print(json.dumps(figures))


def run(path: str, processes: int = 1) -> list[dict]:
    children = [subprocess.Popen([sys.executable, __file__, f"--measure={path}"], stdout=subprocess.PIPE)
                for _ in range(processes)]
    return [json.loads(child.communicate()[0]) for child in children]


def append_rate(path: str, rows: int = 8192) -> float:
    """Records per second of one append, index and fsync included."""
    with Pool(path, readonly=True) as pool:
        records = [record for question in pool.questions[:rows // 32] for record in pool.draw(question, 32, 0, 0)]
    started = time.perf_counter()
    with Pool(path) as pool:
        started = time.perf_counter()
        pool.append(records)
        return len(records) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=QUESTIONS * PER_QUESTION)
    parser.add_argument("--folder", help="where to make the pool (default: a temporary folder); it is deleted afterwards")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="do not delete the pool")
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    if options.folder:
        os.makedirs(options.folder, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="pool-bench-", dir=options.folder)
    path = os.path.join(folder, "pool.jsonl")
    try:
        started = time.perf_counter()
        generate(path, options.records)
        size = os.path.getsize(path)
        print(f"{options.records} records, {size / 1e9:.2f} GB, {size / options.records:.0f} bytes each, written in "
              f"{time.perf_counter() - started:.0f} s; orjson is {'in use' if replay.orjson else 'not installed'}", flush=True)
        evict(path)
        cold, = run(path)
        os.unlink(path + ".index")
        built, = run(path)
        opened, = run(path)
        index = os.path.getsize(path + ".index")
        eight = run(path, 8)
        rate = append_rate(path)
        table = [("open without an index, file cold", f"{cold['open']:.1f} s (CPU {cold['open cpu']:.1f} s)", "60 s"),
                 ("open without an index, file in the page cache", f"{built['open']:.1f} s (CPU {built['open cpu']:.1f} s)", "60 s"),
                 ("open with an index", f"{opened['open']:.2f} s", "2 s"),
                 ("peak resident memory while indexing", f"{built['peak']:.0f} MB", "400 MB"),
                 ("resident memory, opened with an index, after draws", f"{opened['resident']:.0f} MB", "400 MB"),
                 ("draw 2 for each of 512 questions, warm, median of 31", f"{1e3 * opened['draw']:.0f} ms (CPU {1e3 * opened['draw cpu']:.0f} ms)", "50 ms"),
                 ("the same, best of 31", f"{1e3 * opened['draw best']:.0f} ms (CPU {1e3 * opened['draw best cpu']:.0f} ms)", "50 ms"),
                 ("8 processes: slowest open", f"{max(f['open'] for f in eight):.2f} s", ""),
                 ("8 processes: proportional memory each", f"{sum(f['proportional'] for f in eight) / 8:.0f} MB", ""),
                 ("index file", f"{index / 1e6:.0f} MB", ""),
                 ("append 8,192 records at once, fsync and index included", f"{rate:.0f} records/s", "")]
        print("\n| what | measured | target |\n|---|---|---|")
        for what, measured, target in table:
            print(f"| {what} | {measured} | {target} |")
    finally:
        if options.keep:
            print(f"kept: {path}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
