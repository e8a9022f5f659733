"""Never lost, never invented: torn files, killed writers, full disks, several writers and readers at once."""
import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import replay  # noqa: E402
from data import InputError  # noqa: E402
from replay import Pool  # noqa: E402


def record(number, size=3):
    """Record number i: all of its content follows from i, so that an invented or mixed-up one is noticed."""
    return {"question_id": f"q{number % 5}", "response": f"way {number} " + "é" * size, "response_ids": [number] * size + [2],
            "finish_reason": "stop", "reward": 1.0, "step": number}


def numbers(path):
    """Numbers of the records that a reader sees, in file order; fails if one of them is not as it was written."""
    pool = Pool(path, readonly=True)
    found = [r for q in pool.questions for r in pool.draw(q, 1 << 20, 0, 0)]
    assert len(found) == len(pool)
    for r in found:
        expected = record(r["step"], len(r["response_ids"]) - 1)
        assert {key: r[key] for key in expected} == expected
    return sorted(r["step"] for r in found)


def in_child(work) -> int:
    """Fork, work, leave without any clean-up of the test runner's; returns the child's id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def finished(*pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "p.jsonl")


# -- torn files -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batches, index", [([[0], [1], [2]], False), ([[0, 1, 2]], False), ([[0, 1, 2]], True), ([[0]], True)])
def test_truncated_at_every_byte_of_the_last_record(path, capsys, batches, index):
    with Pool(path) as pool:
        for batch in batches:
            pool.append([record(n) for n in batch])
    whole, kept_index = Path(path).read_bytes(), Path(path + ".index").read_bytes()
    last = sum(map(len, batches)) - 1
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        Path(path).write_bytes(whole[:cut])
        Path(path + ".index").unlink(missing_ok=True)
        if index:  # the index of the whole file is still there
            Path(path + ".index").write_bytes(kept_index)
        there = list(range(last + (cut >= len(whole) - 1)))  # without its newline only, the record is still whole
        assert numbers(path) == there
        capsys.readouterr()
        with Pool(path) as pool:
            pool.append([record(77)])
            assert len(pool) == len(there) + 1
        torn = start < cut < len(whole) - 1
        assert (f"removed a torn last line of {cut - start} bytes" in capsys.readouterr().err) == torn
        assert numbers(path) == there + [77]
        assert [json.loads(line)["step"] for line in Path(path).read_text().splitlines()] == there + [77]


def test_killed_in_the_middle_of_a_write(path):
    """The writer is killed by SIGKILL when it has written the first k bytes of an append of 3 records: k at and around the
    ends of the lines, and every 13th."""
    Pool(path).append([record(0)])
    base = os.path.getsize(path)
    batch = [record(n) for n in (1, 2, 3)]
    ends = [len(replay.to_line(replay.complete(r), 2 - i)) for i, r in enumerate(batch)]
    size = sum(ends)
    around = {sum(ends[:n]) + d for n in range(4) for d in (-2, -1, 0, 1)}
    for k in sorted(k for k in around | set(range(0, size, 13)) if 0 <= k <= size):
        os.truncate(path, base)

        def work(k=k):
            write = os.write

            def deadly(fd, data):
                write(fd, bytes(data[:k]))
                os.kill(os.getpid(), signal.SIGKILL)
            os.write = deadly
            Pool(path).append(batch)
        assert finished(in_child(work)) == [-signal.SIGKILL]
        whole = [n for n in (1, 2, 3) if sum(ends[:n]) <= k + 1]
        assert numbers(path) == [0] + whole
        with Pool(path) as pool:
            assert pool.append(batch, once=True) == 3 - len(whole), "the same append again completes it"
        assert numbers(path) == [0, 1, 2, 3]


def test_kill_minus_nine_at_random_moments(path):
    """100 writers, one after the other, each killed at a random moment, every other one on a slow disk (so that most of those
    leave half an append); every acknowledged record is there afterwards."""
    rng, next_number, acknowledged = random.Random(0), 0, set()
    deaths = torn = 0
    started = time.monotonic()
    assert finished(in_child(lambda: Pool(path).append([record(0)]))) == [0]
    usual = time.monotonic() - started  # a busy machine gets more time, so that it is killed in the same places
    next_number = 8
    for turn in range(100):
        read_end, write_end = os.pipe()
        first = next_number

        def work():
            pool, number, write = Pool(path), first, os.write
            if turn % 2:
                os.write = lambda fd, data: time.sleep(0.0005) or write(fd, bytes(data[:1500]))
            while True:
                batch = [record(number + i, size=1 + (number * 7919 + i) % 3000) for i in range(1 + number % 7)]
                pool.append(batch)
                number += len(batch)
                write(write_end, b"%d\n" % number)
        pid = in_child(work)
        os.close(write_end)
        time.sleep(rng.random() * min(max(0.03, usual), 0.1))
        os.kill(pid, signal.SIGKILL)
        deaths += finished(pid) == [-signal.SIGKILL]
        with os.fdopen(read_end, "rb") as pipe:
            done = pipe.read().split(b"\n")[:-1]
        acknowledged |= set(range(first, int(done[-1]))) if done else set()
        if os.path.exists(path):
            data = Path(path).read_bytes()
            torn += not data.endswith(b"\n") and data != b""
            steps = Pool(path)._rows["step"].tolist()
            assert acknowledged <= set(steps) and len(steps) == len(set(steps))
            next_number = max(steps, default=-1) + 8  # also past what was written without being acknowledged
    found = numbers(path)
    assert deaths == 100 and acknowledged <= set(found) and len(acknowledged) > 10 and torn > 3
    print(f"100 kills, {torn} left a torn line, {len(acknowledged)} acknowledged, {len(found)} found")


# -- full disk --------------------------------------------------------------------------------------------------------

def test_write_that_stops_in_the_middle_leaves_the_pool_as_it_was(path, monkeypatch):
    pool = Pool(path)
    pool.append([record(0)])
    before, write = Path(path).read_bytes(), os.write
    for k in range(0, 300, 7):
        written = []

        def full(fd, data):
            if written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(k)
            return write(fd, bytes(data[:k]))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(InputError, match="No space left on device.*the pool is as it was"):
            pool.append([record(1), record(2)])
        monkeypatch.setattr(os, "write", write)
        assert Path(path).read_bytes() == before and numbers(path) == [0]
    pool.append([record(1), record(2)])
    assert numbers(path) == [0, 1, 2] and len(pool) == 3


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_full_disk(small_disk):
    path, kept = str(small_disk / "p.jsonl"), []
    pool = Pool(path)
    with pytest.raises(InputError, match="cannot append .*No space left on device"):
        for n in range(0, 10_000, 5):
            pool.append([record(n + i, size=700) for i in range(5)])
            kept += range(n, n + 5)
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(b"x" * 1000)
    pool.close()  # no room for the index either: no error
    assert len(kept) > 20 and numbers(path) == kept and sorted(os.listdir(small_disk)) == ["filler", "p.jsonl"]
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    with Pool(path) as pool:
        pool.append([record(9999)])
    assert numbers(path) == kept + [9999] and sorted(os.listdir(small_disk)) == ["filler", "p.jsonl", "p.jsonl.index"]


# -- several at once --------------------------------------------------------------------------------------------------

def test_writers_at_once_take_turns(path):
    def writer(first):
        pool = Pool(path)
        for n in range(first, first + 400, 8):
            pool.append([record(n + i, size=50) for i in range(8)])
    assert finished(*[in_child(lambda first=first: writer(first)) for first in (0, 1000, 2000)]) == [0, 0, 0]
    assert numbers(path) == [*range(400), *range(1000, 1400), *range(2000, 2400)]
    steps = [json.loads(line)["step"] for line in Path(path).read_text().splitlines()]
    assert all(steps[i:i + 8] == list(range(steps[i], steps[i] + 8)) for i in range(0, 1200, 8)), "appends are not mixed"


def test_two_pools_in_one_process(path):
    one, two = Pool(path), Pool(path)
    one.append([record(0)]), two.append([record(1)]), one.append([record(2)])
    assert numbers(path) == [0, 1, 2] and len(one) == 3 and two.refresh() == 1


def test_writer_that_does_not_let_go_is_told(path):
    Pool(path).append([record(0)])
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(InputError, match="another process has been writing for"):
            Pool(path, wait=0.2).append([record(1)])
        assert 0.2 <= time.monotonic() - started < 5
        assert numbers(path) == [0], "readers are not blocked"
    Pool(path, wait=0.2).append([record(1)])
    assert numbers(path) == [0, 1]


def test_readers_never_see_a_part_of_an_append(path):
    """A writer that writes 100 bytes at a time, a reader that re-opens and one that refreshes all the while."""
    Pool(path).append([record(i) for i in range(7)])

    def writer():
        write = os.write

        def slow(fd, data):
            time.sleep(0.0003)
            return write(fd, bytes(data[:100]))
        os.write = slow
        pool = Pool(path)
        for n in range(7, 35, 7):
            pool.append([record(n + i, size=60) for i in range(7)])
    pid = in_child(writer)
    reader, seen, partial = Pool(path, readonly=True), [], 0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        partial += os.path.getsize(path) > reader._end
        reader.refresh()
        seen += [len(Pool(path, readonly=True)), len(reader)]
    reader.refresh()
    assert set(seen) <= {7, 14, 21, 28, 35} and seen[::2] == sorted(seen[::2]) and seen[1::2] == sorted(seen[1::2])
    assert len(set(seen)) > 2 and partial > 10, "the reader did look in between"
    assert len(reader) == 35 and numbers(path) == list(range(35))


def test_reader_while_the_pool_is_repaired(path):
    with Pool(path) as pool:
        pool.append([record(n) for n in range(5)])
    reader, writer = Pool(path, readonly=True), Pool(path)
    replay.repair(path)
    assert len(reader.draw("q1", 1, 0, 0)) == 1, "the old file is still open"
    writer.append([record(5)])
    assert reader.refresh() and len(reader) == 6 and numbers(path) == list(range(6))


def test_repair_killed_at_any_moment_leaves_a_pool(path, monkeypatch):
    for fatal in ("fsync", "link", "replace"):
        Path(path).unlink(missing_ok=True)
        Pool(path).append([record(0), record(1)])
        with open(path, "ab") as file:
            file.write(b"damage\n")

        def work(fatal=fatal):
            setattr(os, fatal, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            replay.repair(path)
        assert finished(in_child(work)) == [-signal.SIGKILL]
        assert numbers(path) == [0, 1] and b"damage" in Path(path).read_bytes()
        replay.repair(path)
        assert numbers(path) == [0, 1] and b"damage" not in Path(path).read_bytes()
