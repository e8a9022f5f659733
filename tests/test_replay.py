"""The pool as a library: what enters, what is drawn, the index, growing pools. Faults are in test_replay_faults.py."""
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import replay  # noqa: E402
from data import InputError  # noqa: E402
from replay import Pool  # noqa: E402


def record(question="q1", number=0, **more):
    return {"question_id": question, "problem": "2 + 2 = ?", "answer": "4", "response": f"way {number}: \\boxed{{4}}",
            "response_ids": [5, 6 + number, 2], "finish_reason": "stop", "reward": 1.0, **more}


def texts(records):
    return [r["response"] for r in records]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "p.jsonl")


# -- what enters ------------------------------------------------------------------------------------------------------

def test_append_and_draw_give_back_what_went_in(path):
    given_ = record(tokenizer="abc", sampler_logprob=-1.5, model="m", step=3, run="r", temperature=0.7, extra={"a": [1]})
    pool = Pool(path)
    assert len(pool) == 0 and pool.questions == [] and pool.draw("q1", 2, seed=0, step=3) == []
    assert not os.path.exists(path), "looking at a pool makes no file"
    assert pool.append([given_]) == 1
    assert len(pool) == 1 and pool.questions == ["q1"] and "q1" in pool and "q2" not in pool
    drawn, = pool.draw("q1", 2, seed=0, step=3)
    assert drawn == given_ | {"tokens": 3, "digest": replay.text_digest(given_["response"])}
    assert pool.draw("q1", 2, seed=0, step=3, text=False) == [{key: drawn[key] for key in drawn if key != "response"}]
    line = Path(path).read_text()
    assert line.startswith('{"question_id": "q1", "reward": 1.0, ') and line.endswith('"response_ids": [5,6,2]}\n')


def test_essential_keys_are_enough(path):
    essential = {key: record()[key] for key in replay.ESSENTIAL}
    pool = Pool(path)
    pool.append([essential])
    assert pool.draw("q1", 1, 0, 0) == [essential | {"tokens": 3, "digest": replay.text_digest(essential["response"])}]
    for key in essential:
        with pytest.raises(InputError, match=f'"{key}" is missing'):
            pool.append([{k: v for k, v in essential.items() if k != key}])


@pytest.mark.parametrize("change, reason", [
    ({"reward": -1.0}, "not verified"), ({"reward": 0}, "not verified"), ({"reward": 0.5}, "not verified"),
    ({"reward": float("nan")}, "finite"), ({"reward": "1"}, "finite"), ({"finish_reason": "length"}, "not ended"),
    ({"response_ids": []}, "empty"), ({"response_ids": [1.0]}, "token ids"), ({"response_ids": [-1]}, "token ids"),
    ({"response_ids": [5] * 8 + [2]}, "too long: 9 tokens, the response limit is 8"), ({"response_ids": [5]}, "no stop id"),
    ({"tokenizer": "other"}, "other tokenizer"), ({"question_id": 7}, "text"), ({"response": None}, "missing"),
    ({"step": "3"}, "whole number")])
def test_what_may_not_enter_is_refused_with_its_reason(path, change, reason):
    pool = Pool(path, tokenizer="mine", max_tokens=8, stop_ids=[2, 3])
    pool.append([record(number=1)])
    before = Path(path).read_bytes()
    with pytest.raises(InputError, match=reason):
        pool.append([record(number=2), record(number=3) | change])
    assert Path(path).read_bytes() == before, "all of an append or nothing"
    assert reason in pool.refusal(record() | change) and pool.refusal(record()) is None
    assert len(pool) == 1


def test_records_in_the_file_that_may_not_enter_are_never_drawn(path, capsys):
    lines = [record(number=0), record(number=1, finish_reason="length"), record(number=2, reward=0.5)]
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in lines))
    pool = Pool(path)
    assert len(pool) == 1 and texts(pool.draw("q1", 9, 0, 0)) == [lines[0]["response"]]
    assert "2 records are no verified" in capsys.readouterr().err


def test_failures_are_kept_apart(path):
    pool = Pool(path)
    pool.append([record(number=0), record(number=1, reward=-1.0), record("q2", 2, reward=-1.0)], allow_failed=True)
    assert len(pool) == 1 and pool.failures == 2 and pool.questions == ["q1"]
    assert texts(pool.draw("q1", 5, 0, 0)) == [record(number=0)["response"]]
    assert texts(pool.draw("q1", 5, 0, 0, failures=True)) == [record(number=1)["response"]]
    assert pool.draw("q2", 5, 0, 0) == [] and len(pool.draw("q2", 5, 0, 0, failures=True)) == 1
    assert [r["response"] for r in Pool(path).draw("q1", 5, 0, 0)] == [record(number=0)["response"]]
    with pytest.raises(InputError, match="not ended"):
        pool.append([record(reward=-1.0, finish_reason="length")], allow_failed=True)


def test_too_long_for_the_response_limit_is_not_drawn(path):
    Pool(path).append([record(number=0), record(number=1, response_ids=[5] * 20 + [2])])
    assert texts(Pool(path, max_tokens=20).draw("q1", 2, 0, 0)) == [record(number=0)["response"]]
    assert len(Pool(path, max_tokens=21).draw("q1", 2, 0, 0)) == 2


def test_tokenizer_of_another_model_is_refused(path, capsys):
    with Pool(path, tokenizer="mine") as pool:
        pool.append([record()])
    assert Pool(path, tokenizer="mine").draw("q1", 1, 0, 0)[0]["tokenizer"] == "mine", "filled in on append"
    with pytest.raises(InputError, match="1 of 1 trajectories hold ids of another tokenizer.*import"):
        Pool(path, tokenizer="other")
    assert len(Pool(path)) == 1, "to look at it, no tokenizer is needed"
    with pytest.raises(InputError, match="other tokenizer: its ids are of other, the pool's of mine"):
        Pool(path).append([record(number=1, tokenizer="other")])
    Pool(path).append([record(number=1)])
    capsys.readouterr()
    assert len(Pool(path, tokenizer="mine")) == 2
    assert "1 trajectories do not say their tokenizer" in capsys.readouterr().err


def test_missing_pools_and_folders(tmp_path, path):
    with pytest.raises(InputError, match="no such pool"):
        Pool(path, readonly=True)
    with pytest.raises(InputError, match="is a folder"):
        Pool(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="is no file"):
        Pool(tmp_path / "fifo")
    Pool(path).append([record()])
    with pytest.raises(InputError, match="readonly"):
        Pool(path, readonly=True).append([record()])
    deep = tmp_path / "new" / "folder" / "p.jsonl"
    Pool(deep).append([record()])
    assert len(Pool(str(deep), readonly=True)) == 1


# -- draws ------------------------------------------------------------------------------------------------------------

def test_distinct_first_without_replacement_fewer_or_repeats(path):
    pool = Pool(path)
    pool.append([record(number=n) for n in (0, 0, 0, 1, 1, 2)])
    assert len(pool) == 6 and pool.count("q1") == 3
    for step in range(50):
        drawn = texts(pool.draw("q1", 2, 0, step))
        assert len(set(drawn)) == len(drawn) == 2
        assert len(set(texts(pool.draw("q1", 9, 0, step)))) == len(pool.draw("q1", 9, 0, step)) == 3
        again = texts(pool.draw("q1", 7, 0, step, repeats=True))
        assert len(again) == 7 and sorted(Counter(again).values()) == [2, 2, 3] and again[:2] == drawn
    assert pool.draw("q1", 0, 0, 0) == [] and pool.draw("nobody", 3, 0, 0, repeats=True) == []


@pytest.mark.parametrize("vary", ["seed", "step", "question"])
def test_draws_are_uniform(path, vary):
    pool, n, draws = Pool(path), 6, 3000
    questions = [f"q{i}" for i in range(draws if vary == "question" else 1)]
    pool.append([record(q, number) for q in questions for number in range(n)])
    drawn = [texts(pool.draw(questions[i if vary == "question" else 0], 2, seed=i if vary == "seed" else 1,
                             step=i if vary == "step" else 1)) for i in range(draws)]

    def chi_square(outcomes, kinds):
        counts = Counter(outcomes)
        assert len(counts) <= kinds
        return sum((counts[key] - draws / kinds) ** 2 / (draws / kinds) for key in counts) + \
            (kinds - len(counts)) * draws / kinds

    # Limits: the 99.9% points of chi-square with 5, 14 and 29 degrees of freedom. The draws are fixed, so is the outcome.
    assert chi_square((d[0] for d in drawn), n) < 20.5
    assert chi_square((frozenset(d) for d in drawn), 15) < 36.1
    assert chi_square((tuple(d) for d in drawn), 30) < 58.3
    overlap = Counter(len(set(a) & set(b)) for a, b in zip(drawn, drawn[1:]))  # neighbours do not know of each other
    expected = {0: 6 / 15, 1: 8 / 15, 2: 1 / 15}
    assert sum((overlap[k] - p * (draws - 1)) ** 2 / (p * (draws - 1)) for k, p in expected.items()) < 13.8


def test_draw_is_a_pure_function(path, tmp_path):
    records = [record(q, n) for q in ("a", "b", "ü") for n in range(20)]
    pool = Pool(path)
    pool.append(records)
    calls = [(q, seed, step) for q in ("a", "b", "ü") for seed in (0, 1, -5, 1 << 70) for step in range(5)]
    expected = {call: texts(pool.draw(call[0], 3, *call[1:])) for call in calls}
    assert len({tuple(v) for v in expected.values()}) > 55, "and depends on each of its arguments"
    random.seed(1), np.random.seed(1)
    state = random.getstate(), np.random.get_state()[1].tolist()
    random.Random(0).shuffle(calls)
    assert all(texts(pool.draw(q, 3, seed, step)) == expected[q, seed, step] for q, seed, step in calls)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "no global random state is used"
    shuffled = Pool(tmp_path / "shuffled.jsonl")  # order of the file, other questions and repeats play no part
    others = [record("c", 1), record("a", 3), record("a", 3)]
    for r in random.Random(0).sample(records + others, len(records) + 3):
        shuffled.append([r])
    assert all(texts(shuffled.draw(q, 3, seed, step)) == expected[q, seed, step] for q, seed, step in calls)
    assert all(texts(pool.draw(q, 9, seed, step))[:3] == expected[q, seed, step] for q, seed, step in calls)


def test_same_draws_in_eight_processes(path):
    pool = Pool(path)
    pool.append([record(f"q{q}", n) for q in range(20) for n in range(10)])
    expected = [r["response_ids"] for q in range(20) for r in pool.draw(f"q{q}", 2, 3, 4)]
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from replay import Pool; pool = Pool({path!r}, readonly=True)\n"
            "print([r['response_ids'] for q in reversed(range(20)) for r in pool.draw(f'q{q}', 2, 3, 4)[::-1]][::-1])")
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                                 env=os.environ | {"PYTHONHASHSEED": str(i)}) for i in range(8)]
    assert [json.loads(child.communicate()[0]) for child in children] == [expected] * 8


def test_selection_rules(path):
    pool = Pool(path)
    pool.append([record(number=n, response_ids=[5] * length + [2], sampler_logprob=logprob, success_rate=0.25)
                 for n, length, logprob in ((0, 9, -1.0), (1, 4, -5.0), (2, 6, -2.1), (3, 4, -10.0))])
    number = {record(number=n)["response"]: n for n in range(4)}

    def drawn(select, m, step=0):
        return [number[text] for text in texts(pool.draw("q1", m, 0, step, select=select))]
    assert drawn("likeliest", 4) == [0, 2, 1, 3] and drawn("unlikeliest", 2) == [3, 1]  # -.1, -1, -.3, -2 per token
    assert {tuple(drawn("shortest", 3, step)) for step in range(20)} == {(1, 3, 2), (3, 1, 2)}, "ties are drawn at random"
    assert pool.success_rate("q1") == 0.25 and pool.success_rate("q2") is None
    with pytest.raises(InputError, match="select='longest': choose"):
        drawn("longest", 1)
    pool.append([record(number=4)])
    with pytest.raises(InputError, match="needs sampler_logprob, which 1 of 5"):
        drawn("likeliest", 1)


# -- unusual lines ----------------------------------------------------------------------------------------------------

strange_text = st.text(st.characters(), max_size=30)  # any code point, lone surrogates included


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(strange_text, strange_text, st.lists(st.integers(0, 160_000), min_size=1, max_size=5),
                          st.none() | st.floats(-1e6, 0), st.none() | st.integers(0, 9999), strange_text), min_size=1, max_size=6))
def test_any_content_comes_back_and_the_index_agrees_with_a_full_parse(tmp_path_factory, rows):
    path = str(tmp_path_factory.mktemp("p") / "p.jsonl")
    records = [{"question_id": q, "response": text, "response_ids": ids, "finish_reason": "stop", "reward": 1.0, "source": source}
               | ({} if logprob is None else {"sampler_logprob": logprob}) | ({} if step is None else {"step": step})
               for q, text, ids, logprob, step, source in rows]
    with Pool(path) as pool:
        pool.append(records)
    pool = Pool(path, readonly=True)
    assert pool.questions == list(dict.fromkeys(r["question_id"] for r in records))
    lines = [json.loads(line) for line in Path(path).read_bytes().split(b"\n")[:-1]]
    for line, r in zip(lines, records, strict=True):
        assert {k: line[k] for k in r} == r
    for question in pool.questions:
        first = {r["response"]: r for r in reversed(records) if r["question_id"] == question}
        drawn = pool.draw(question, 99, 0, 0)
        assert sorted(texts(drawn)) == sorted(first)
        assert all(d["response_ids"] == first[d["response"]]["response_ids"] for d in drawn)
    # the same records, written by hand: other key order, spaces, escapes, Windows line ends, blank lines, no last newline
    other = path + "2"
    Path(other).write_bytes(b"\r\n\n".join(json.dumps(dict(reversed(r.items())), indent=None).encode() for r in lines))
    second = Pool(other, readonly=True)
    for name in replay.ROW.names:
        if name not in ("offset", "length", "question", "tokenizer", "source", "run"):
            np.testing.assert_array_equal(pool._rows[name], second._rows[name], name)
    assert second.questions == pool.questions
    for question in pool.questions:
        assert texts(second.draw(question, 3, 1, 2)) == texts(pool.draw(question, 3, 1, 2))


def test_hand_edited_lines_are_taken_by_their_content(path):
    Pool(path).append([record(number=0), record(number=1), record(number=2)])
    lines = Path(path).read_text().splitlines()
    edited = json.loads(lines[1])
    edited["tokenizer"], edited["response_ids"] = "abc", [9, 9, 9, 9]
    lines[1] = json.dumps(edited)  # keeps "tokens": 3, and puts the new key last
    lines[2] = lines[2].replace("way 2", "WAY 2")
    Path(path).write_text("\n".join(lines) + "\n")
    pool = Pool(path)
    assert pool._rows["tokens"].tolist() == [3, 4, 3] and len(pool.draw("q1", 3, 0, 0)) == 3
    assert pool._codes.names[pool._rows["tokenizer"][1]] == "abc"


def test_damaged_lines_are_left_out_and_told(path, capsys):
    with Pool(path) as pool:
        pool.append([record(number=n) for n in range(4)])
    lines = Path(path).read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:40] + b"\n"  # cut
    lines[2] = lines[2][:90] + lines[3]  # two glued together, as a program does that appends to a torn line
    Path(path).write_bytes(lines[0] + lines[1] + b"\0" * 50 + b"\n[1]\n" + lines[2] + lines[3])
    pool = Pool(path)
    assert sorted(texts(pool.draw("q1", 9, 0, 0))) == [record(number=0)["response"], record(number=3)["response"]]
    assert "4 damaged lines are left out" in capsys.readouterr().err
    pool.append([record(number=5)])
    assert len(pool) == len(Pool(path)) == 3


@pytest.mark.parametrize("change", [  # of the line's bytes: what comes first is replaced
    (b"{", b"\xef\xbb\xbf{"),  # a byte order mark
    (b"}\n", b"}\r\n"), (b"[5,6,2]}", b"[5, 6,  2], \"z\": [1]}"), (b'"response": "', b'"x": {"a": 1, "response": "no"}, "response": "'),
    (b'"response": "', b'"response_ids": [1], "response": "')])  # twice: the last counts, as in any JSON
def test_unusual_lines_are_read_as_json_reads_them(path, change):
    line = replay.to_line(replay.complete(record()), 0).replace(*change, 1)
    Path(path).write_bytes(line)
    expected = json.loads(line)
    for text in (True, False):
        drawn, = Pool(path).draw("q1", 1, 0, 0, text=text)
        assert all(drawn[key] == expected[key] for key in expected if text or key != "response")
        assert drawn["response_ids"] == [5, 6, 2] and drawn.get("response", "") in ("", expected["response"])


def test_nesting_without_end_is_damage(path, capsys):
    deep = b"[" * 100_000 + b"]" * 100_000
    good = replay.to_line(replay.complete(record()), 0)
    Path(path).write_bytes(good + deep + b"\n" + good.replace(b'"q1"', b'"q2"').replace(b'"answer"', b'"x": ' + deep + b', "answer"'))
    pool = Pool(path)
    assert "1 damaged lines" in capsys.readouterr().err and len(pool.draw("q1", 2, 0, 0)) == 1
    for text in (True, False):
        with pytest.raises(InputError, match="does not hold the trajectory.*check"):
            pool.draw("q2", 1, 0, 0, text=text)


def test_a_record_that_could_not_be_read_back_does_not_enter(path, monkeypatch):
    monkeypatch.setattr(replay, "LONGEST", 1 << 20)
    pool = Pool(path)
    pool.append([record(number=0), record(number=1, response="x" * 1_000_000)])
    for bad, reason in ((record(number=2, response="x" * 3_000_000), "a record of 2 MB is too long"),
                        (record(number=3, extra=float("nan")), "as JSON"), (record(number=4, extra={1, 2}), "as JSON")):
        with pytest.raises(InputError, match=reason):
            pool.append([record(number=9), bad])
    assert len(pool) == len(Pool(path)) == 2 and len(Pool(path).draw("q1", 9, 0, 0)) == 2
    Path(path + "2").write_bytes(b"x" * (5 << 20))
    with pytest.raises(InputError, match="no line ends within 4 MB after byte 0; this is no pool"):
        Pool(path + "2")


# -- index ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes of pools were read to build indexes."""
    read, lines = [0], Pool._lines

    def counting(self, start, stop, last):
        read[0] += stop - start
        return lines(self, start, stop, last)
    monkeypatch.setattr(Pool, "_lines", counting)
    return read


def test_index_is_reused_extended_and_rebuilt(path, bytes_read):
    with Pool(path) as pool:
        pool.append([record(f"q{n}", n) for n in range(50)])
    size, bytes_read[0] = os.path.getsize(path), 0
    expected = texts(Pool(path).draw("q3", 1, 0, 0))
    assert bytes_read[0] == 0, "not changed: the index is enough"
    with open(path, "ab") as file:
        file.write(replay.to_line(replay.complete(record("new", 1)), 0))
    assert len(Pool(path)) == 51 and bytes_read[0] == os.path.getsize(path) - size, "grown: only the new part is read"
    bytes_read[0] = 0
    assert len(Pool(path)) == 51 and bytes_read[0] == 0, "and the extended index was kept"
    data = Path(path).read_bytes()
    with open(path, "r+b") as file:  # changed in place, same length
        file.write(data.replace(b'"q0"', b'"Q0"'))
    os.utime(path, ns=(1, 1))
    assert Pool(path).questions[0] == "Q0" and bytes_read[0] == len(data)
    os.unlink(path)
    Path(path).write_bytes(data[:size])
    os.utime(path, ns=(2, 2))
    assert len(Pool(path)) == 50 and texts(Pool(path).draw("q3", 1, 0, 0)) == expected


def test_pool_replaced_by_a_longer_one_is_read_anew(path):
    with Pool(path) as pool:
        pool.append([record("old", 1)])
    os.unlink(path)
    with Pool(path) as pool:
        pool.append([record("new", n) for n in range(5)])
    assert Pool(path).questions == ["new"]


def test_damaged_index_does_no_harm(path):
    with Pool(path) as pool:
        pool.append([record(f"q{n % 3}", n) for n in range(9)])
    expected = [texts(Pool(path).draw(f"q{n}", 2, 0, 0)) for n in range(3)]
    good = Path(path + ".index").read_bytes()
    rng = random.Random(0)
    damaged = [b"", b"{}\n", b"[]\n", good[:-1], good[:100], good + b"x"]
    for _ in range(150):
        at = rng.randrange(len(good))
        damaged.append(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1:])
    for index in damaged:
        Path(path + ".index").write_bytes(index)
        assert [texts(Pool(path).draw(f"q{n}", 2, 0, 0)) for n in range(3)] == expected


def test_index_that_cannot_be_written_is_no_error(path):
    os.mkdir(path + ".index")
    with Pool(path) as pool:
        pool.append([record()])
    assert len(Pool(path, readonly=True)) == 1
    assert sorted(os.listdir(os.path.dirname(path))) == ["p.jsonl", "p.jsonl.index"], "and nothing is left behind"


def test_file_edited_while_open_is_an_error_not_a_wrong_answer(path):
    pool = Pool(path)
    pool.append([record(number=n) for n in range(3)])
    data = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.write(data[7:])
    with pytest.raises(InputError, match="does not hold the trajectory"):
        [pool.draw("q1", 3, 0, 0)]


# -- growing pools ----------------------------------------------------------------------------------------------------

def test_age_limit(path):
    pool = Pool(path)
    pool.append([record(number=0)])  # collected before: always there
    for step in range(6):
        pool.append([record(number=10 + step, run="me", step=step), record(number=20 + step, run="other", step=step)])

    def ages(step, **how):
        return sorted(r["step"] for r in pool.draw("q1", 99, 0, step, **how) if r.get("run") == "me")
    assert ages(3, run="me") == [0, 1, 2] and ages(3, run="me", max_age=1) == [2] and ages(0, run="me") == []
    assert ages(3) == list(range(6)), "without run, a pool like any other"
    assert len(pool.draw("q1", 99, 0, 2, run="me", max_age=0)) == 7, "max_age=0: nothing of this run, all of the others"


def test_readers_see_appended_records_after_refresh(path):
    Pool(path).append([record(number=0)])
    writer, reader = Pool(path), Pool(path, readonly=True)
    for n in range(1, 5):
        writer.append([record(number=n), record("new", n)])
        assert len(reader) == 2 * n - 1 and reader.refresh() == 2 and len(reader) == 2 * n + 1
        assert [texts(reader.draw(q, 3, 0, n)) for q in ("q1", "new")] == [texts(writer.draw(q, 3, 0, n)) for q in ("q1", "new")]
    assert reader.refresh() == 0


def train(path, first, last, crash_in=None):
    """A stand-in for a training that grows its pool: draws, then appends what it sampled in this step."""
    pool, log = Pool(path), []
    for step in range(first, last):
        log.append([texts(pool.draw(f"q{q}", 2, 7, step, run="me", max_age=4)) for q in range(3)])
        rng = random.Random(step)
        fresh = [record(f"q{q}", rng.randrange(8), run="me", step=step) for q in range(3) for _ in range(rng.randrange(4))]
        if step == crash_in:
            fresh = fresh[:len(fresh) // 2]  # what a crash in the middle of the write leaves
        pool.append(fresh, once=True)
    return log


def test_growing_pool_is_exact_after_crash_and_resume(path, tmp_path):
    straight = train(path, 0, 20)
    for crash, checkpoint in itertools.product((5, 11, 14), (0, 4, 5)):
        other = tmp_path / f"{crash}-{checkpoint}.jsonl"
        log = train(other, 0, crash + 1, crash_in=crash)
        assert log[:checkpoint] + train(other, checkpoint, 20) == straight
        assert len(Pool(other)) == len(Pool(path)), "repeated steps add nothing twice"
    lines = sorted(json.dumps(r, sort_keys=True) for r in map(json.loads, Path(path).read_text().splitlines()) if r.pop("more", 1))
    others = sorted(json.dumps(r, sort_keys=True) for r in map(json.loads, other.read_text().splitlines()) if r.pop("more", 1))
    assert lines == others


def test_once_counts_copies(path):
    pool = Pool(path)
    twice = [record(number=1, step=2), record(number=1, step=2), record(number=2, step=2)]
    assert pool.append(twice[:1], once=True) == 1
    assert pool.append(twice, once=True) == 2 and pool.append(twice, once=True) == 0
    assert pool.append([record(number=1, step=3)], once=True) == 1 and len(pool) == 4
    assert pool.append([record(number=1, step=2)]) == 1, "without once, all enters"


# -- fingerprint ------------------------------------------------------------------------------------------------------

def make_tokenizer(words=("4", "way", "boxed"), eos="<end>"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<end>", "<pad>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>", unk_token="<unk>")


def test_fingerprint(tmp_path):
    tokenizer = make_tokenizer()
    mark = replay.fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path / "t")
    from transformers import AutoTokenizer
    again = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert replay.fingerprint(again) == mark == replay.fingerprint(make_tokenizer())
    again.padding_side, again.pad_token = "left", "<end>"
    again(["4", "way way"], padding=True, truncation=True, max_length=2)
    assert replay.fingerprint(again) == mark, "padding and truncation do not matter"
    assert replay.fingerprint(make_tokenizer(("way", "4", "boxed"))) != mark
    assert replay.fingerprint(make_tokenizer(eos="<pad>")) != mark
    again.add_tokens(["new"])
    assert replay.fingerprint(again) != mark
