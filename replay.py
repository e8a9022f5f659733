"""replay.py: the experience pool, one JSONL file of verified trajectories; append, open, draw, import, look, repair.

    python replay.py stats  pool.jsonl [--data=questions.jsonl] [--plot=pool.png]   # what is in it
    python replay.py show   pool.jsonl QUESTION_ID [--number=3]                     # trajectories to read
    python replay.py check  pool.jsonl [--verify] [--repair]                        # damage, with line numbers
    python replay.py import SOURCE --pool=pool.jsonl [--tokenizer=FOLDER]           # RLEP parquet (pieces too), jsonl of
                                   # {problem, answer, responses}, another pool, or a data set's name on the hub
    python replay.py export pool.jsonl OUT.parquet [--data=...]                     # the reference's parquet layout

    with Pool("pool.jsonl") as pool:
        pool.append([{"question_id": "q1", "response": "... \\boxed{4}", "response_ids": [5, 6, 2],
                      "finish_reason": "stop", "reward": 1.0}])
        pool.draw("q1", m=2, seed=0, step=3)    # at most 2 records, always the same ones for this seed and step

A record is one JSON object a line: first the small keys of HEAD, from which the index is built without parsing the line,
then what else the caller gave (model, temperature, ...), at the end `answer` (gold), `problem`, `response` (text) and
`response_ids` (as sampled, stop id included). A line that a person wrote with its keys in another order is as good; it is
parsed in full. The index, pool.jsonl.index, may be deleted at any time.

A training that grows its pool gives its records `run` and `step`, appends with once=True and draws with run=..., max_age=...
In step s it then sees what it made in steps s - max_age to s - 1 (and all of the other runs): a step repeated after a
crash adds nothing twice and draws what an uninterrupted run would.

Where this departs from the reference implementation, on purpose:
  * a question with fewer than M trajectories gives fewer rows; there are no empty dummy replays;
  * token ids are stored as sampled, with the tokenizer's fingerprint; text is tokenised only on import, once;
  * an answer cut off at the length limit never enters (the reference appends EOS to it), one longer than the response
    limit is not drawn (the reference cuts it, loses its answer and trains it down);
  * a draw takes distinct texts first, without replacement, and is a pure function of (seed, step, question id) and of the
    set of eligible texts; it uses no global random state, so ranks agree and a resumed run repeats it.
"""
import argparse
import contextlib
import difflib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import time
import zlib
from collections import Counter

import numpy as np
from tqdm import tqdm

from data import INSTRUCTION, InputError, load_questions, read_rows, to_question
from verify import verify_batch

try:
    import orjson  # not needed; draws take three quarters of the time with it
except ImportError:
    orjson = None

# ---------------------------------------------------------------------------------------------------------------------
# The record

_TEXT, _WHOLE, _REAL = rb'("[^"\\]*(?:\\.[^"\\]*)*")', rb"([0-9]{1,9})", rb"(-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
HEAD = {                         # the small keys, in this order; those that are None are left out of the line
    "question_id": _TEXT,        # any text
    "reward": _REAL,             # the verified reward, without length penalty: 1, or 0 and less for a stored failure
    "finish_reason": _TEXT,      # "stop": the answer ended by itself
    "tokens": _WHOLE,            # len(response_ids)
    "sampler_logprob": _REAL,    # sum over the response's tokens
    "success_rate": _REAL,       # of the question, when it was collected
    "tokenizer": _TEXT,          # fingerprint(tokenizer)
    "source": _TEXT,             # data set
    "run": _TEXT,                # the training that sampled it ...
    "step": _WHOLE,              # ... and in which step
    "more": _WHOLE,              # how many records of the same append follow: readers see an append as a whole
    "digest": rb'"([0-9a-f]{16})"'}  # hash of the response text: two trajectories are distinct if these differ
ESSENTIAL = ("question_id", "response", "response_ids", "finish_reason", "reward")  # must be given
TAIL = ("answer", "problem", "response", "response_ids")
_HEAD_PATTERN = re.compile(rb"\{" + b"".join(
    (b'"%s": %s, ' if key in (*ESSENTIAL, "tokens", "digest") else b'(?:"%s": %s, )?') % (key.encode(), form) for key, form in HEAD.items()))
_START, _RESPONSE, _IDS = b'{"question_id"', b', "response": "', b', "response_ids": ['  # never inside a text: its quotes are escaped
_FORMS = (  # keys, what their values must be, in words; 1e30: not NaN, fits float32
    (("question_id", "response", "finish_reason", "tokenizer", "source", "run"), lambda v: isinstance(v, str), "text"),
    (("reward", "sampler_logprob", "success_rate"), lambda v: isinstance(v, (int, float)) and abs(v) < 1e30, "a finite number"),
    (("step",), lambda v: type(v) is int and 0 <= v < 10**9, "a whole number"),
    (("response_ids",), lambda v: isinstance(v, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in v), "a list of token ids"))

SUCCESS, FAILURE, UNFIT = 0, 1, 2  # kinds of records in the index; UNFIT is never drawn
# One row of the index. 56 bytes: 1.1 million trajectories take 62 MB, mapped from disk and shared between processes.
ROW = np.dtype([("offset", "i8"), ("digest", "u8"), ("length", "i4"), ("question", "i4"), ("tokens", "i4"), ("step", "i4"), ("logprob", "f4"),
                ("success_rate", "f4"), ("tokenizer", "i4"), ("source", "i4"), ("run", "i4"), ("kind", "u1")], align=True)
NO_STEP = -1
LONGEST = 1 << 28  # bytes of a line that may enter; the index stops at four times that, which is no pool
_MIX = [tuple(np.array(pair, "u8")) for pair in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))]  # splitmix64's end


def text_digest(text: str) -> str:
    """16 hex digits of a hash of the response text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def to_line(record: dict, more: int) -> bytes:
    """The record as one line: the keys of HEAD first, long ones last, token ids without spaces."""
    record = {key: value for key, value in (record | {"more": more or None}).items() if value is not None}
    keys = [*(key for key in HEAD if key in record), *(key for key in record if key not in HEAD and key not in TAIL),
            *(key for key in TAIL[:-1] if key in record)]
    fields = {key: record[key] for key in keys}
    try:
        line = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # a lone surrogate; \ud800 is the only way to write it
        line = json.dumps(fields, allow_nan=False).encode()
    return line[:-1] + _IDS + ",".join(map(str, record["response_ids"])).encode() + b"]}\n"


def from_line(line: bytes) -> dict:
    """The record of a line, as it stands there. Raises ValueError with the reason if the line is damaged."""
    if len(line) > LONGEST:
        raise ValueError(f"longer than {LONGEST >> 20} MB")
    try:
        record = json.loads(line)  # not JSON or not UTF-8: a ValueError too
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if reason := shape_error(record):
        raise ValueError(reason)
    return record


def parse(line: bytes, text: bool = True) -> dict:
    """from_line() for a line that the index knows, in a third of the time: most of it are token ids, which orjson or numpy reads
    faster, if they come last, as to_line() writes them. text=False: the response before them need not be read."""
    with contextlib.suppress(ValueError, RecursionError):  # a lone surrogate; by hand and cut inside of another object; damaged
        if orjson is not None:
            return orjson.loads(line)
        ids = line.rfind(_IDS)
        end = ids if text else line.find(_RESPONSE, 0, ids)
        if end > 0 and line.find(b"]", ids) == len(line) - 2:
            record = json.loads(line[:end].decode() + "}")
            # At anything but numbers numpy stops and warns; the reader sees that the number of tokens does not fit.
            record["response_ids"] = np.fromstring(line[ids + len(_IDS):-2], "u4", sep=",").tolist()
            return record
    return from_line(line)


def complete(record: dict) -> dict:
    """The record with tokens and digest as its content has them, whatever it says itself (a person may have edited it)."""
    return record | {"reward": float(record["reward"]), "tokens": len(record["response_ids"]), "digest": text_digest(record["response"])}


def shape_error(record: object) -> str | None:
    """What is wrong with the form of a record, whatever it says; None if nothing."""
    if not isinstance(record, dict):
        return f"a record must be an object, found {type(record).__name__}"
    for keys, fits, form in _FORMS:
        for key in keys:
            value = record.get(key)
            if value is None and key in ESSENTIAL:
                return f'"{key}" is missing'
            if value is not None and not fits(value):
                return f'"{key}" must be {form}, found {value!r:.50}'


@functools.lru_cache(4096)
def kind_of(reward: float | bytes, finish_reason: str | bytes) -> int:
    """An answer that was cut off is neither success nor failure: nobody knows how it would have ended. (bytes: as in a line)"""
    if finish_reason not in ("stop", b'"stop"'):
        return UNFIT
    return SUCCESS if float(reward) == 1 else FAILURE if float(reward) <= 0 else UNFIT


def fingerprint(tokenizer) -> str:
    """A short hash of what decides token ids: vocabulary (added tokens too), merges, beginning and end ids.

    Padding and truncation settings are left out: programs change them at will and they do not touch a response's ids."""
    parts = [sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])), [tokenizer.bos_token_id, tokenizer.eos_token_id]]
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        merges = json.loads(backend.to_str())["model"].get("merges", [])
        parts.append([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Codes(dict):
    """Text -> its number in the index. Also looked up by the text as it stands in a line, with or without escapes."""

    def __init__(self, names=(None,)):
        super().__init__((name, code) for code, name in enumerate(names))
        self.names = list(names)

    def __missing__(self, raw: bytes) -> int:
        text = json.loads(raw)
        self[raw] = code = self.setdefault(text, len(self.names))
        if code == len(self.names):
            self.names.append(text)
        return code


@contextlib.contextmanager
def writer_lock(path: str, wait: float = 60.0):
    """The pool's file, made if missing, open for appending and locked against other writers. Raises InputError if another
    writer holds the lock for `wait` seconds. The kernel drops the lock of a killed process."""
    deadline = time.monotonic() + wait
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    break
            os.close(fd)  # another writer, or a repair put a new file here meanwhile
            if time.monotonic() > deadline:
                raise InputError(f"{path}: another process has been writing for {wait:g} s; wait for it or stop it")
            time.sleep(0.01)
    except OSError as error:
        raise InputError(f"{path}: cannot write here ({error.strerror})") from None
    try:
        yield fd
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# The pool

class Pool(contextlib.AbstractContextManager):
    """The trajectories of one JSONL file.

    len(pool) counts the verified successes, pool.questions are the ids that have one. Options: `readonly` (the file must
    exist), `tokenizer` (fingerprint of the model's; a pool made with another one is refused), `max_tokens` (the response
    limit), `stop_ids` (ids that may end a response), `wait` (seconds for which an append waits for another writer).

    Readers take no lock. A writer holds an exclusive lock on the file during each append, so that several processes may
    append to one pool; a reader hides an append that is under way and shows it as a whole when it is done."""

    def __init__(self, path, *, readonly=False, tokenizer=None, max_tokens=None, stop_ids=None, wait=60.0):
        self.path, self.readonly, self.tokenizer, self.max_tokens, self.wait = os.fspath(path), readonly, tokenizer, max_tokens, wait
        self.stop_ids = None if stop_ids is None else set(stop_ids)
        self._fd, self._warned = None, set()
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise InputError(f"{self.path} {'is a folder' if os.path.isdir(self.path) else 'is no file'}; a pool is a .jsonl file")
        if readonly and not os.path.exists(self.path):
            raise InputError(f"{self.path}: no such pool; make one with `python rlep.py collect` or `python replay.py import`")
        self._forget()
        self.refresh()
        self._save_index()

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Keep the index of what was appended; the pool itself is always on disk already."""
        if self._fd is not None:
            self._save_index()
        self.__del__()

    def __del__(self):
        if getattr(self, "_fd", None) is not None:
            os.close(self._fd)
            self._fd = None

    def __len__(self) -> int:
        return int(np.count_nonzero(self._rows["kind"] == SUCCESS))

    def __contains__(self, question_id: str) -> bool:
        return len(self._candidates(question_id)[0]) > 0

    @property
    def failures(self) -> int:
        """Stored wrong answers (append(..., allow_failed=True)); never part of len() and of ordinary draws."""
        return int(np.count_nonzero(self._rows["kind"] == FAILURE))

    @property
    def questions(self) -> list[str]:
        """Ids of the questions with at least one success, in the order in which they entered."""
        codes, first = np.unique(self._rows["question"][self._rows["kind"] == SUCCESS], return_index=True)
        return [self._codes.names[code] for code in codes[np.argsort(first)]]

    # -- draw -----------------------------------------------------------------------------------------------------------

    def draw(self, question_id: str, m: int, seed: int, step: int, *, select: str = "random", repeats: bool = False,
             failures: bool = False, run: str | None = None, max_age: int | None = None, text: bool = True) -> list[dict]:
        """Up to m trajectories of the question with distinct texts; [] for a question that the pool does not know.

        Every distinct text gets a pseudo-random key from (seed, step, question id, text); the m smallest keys win. That
        is uniform without replacement, the same in every process, and does not depend on the order of the file. (Of
        records with one and the same text the first in the file stands for all.)
        select:   "random", "shortest", "likeliest" or "unlikeliest" (mean sampler log-prob per token); ties at random.
        repeats:  with fewer than m distinct texts, go round them again instead of giving fewer.
        failures: draw from the stored wrong answers instead.
        run, max_age: see append(); records that this run sampled count only from the next step on, for max_age steps.
        text:     False leaves out `response`, which saves an eighth of the time; training needs the ids only."""
        found, digests = self._candidates(question_id, failures, step, run, max_age)
        if len(found) == 0 or m < 1:
            return []
        seed_key = f"{int(seed)}\0{int(step)}\0{question_id}".encode("utf-8", "surrogatepass")
        keys = digests ^ np.frombuffer(hashlib.blake2b(seed_key, digest_size=8).digest(), "<u8")
        for shift, factor in _MIX:
            keys ^= keys >> shift
            keys *= factor
        order = keys.argsort(kind="stable")
        keys, distinct = keys[order], np.ones(len(order), bool)
        np.not_equal(keys[1:], keys[:-1], out=distinct[1:])  # equal texts have equal keys
        found = found[order[distinct]]
        if select != "random":
            found = found[np.argsort(self._score(self._rows[found], select, question_id), kind="stable")]
        picks = np.resize(found, m) if repeats else found[:m]
        return [self._read(question_id, number, text) for number in picks.tolist()]

    def count(self, question_id: str, failures: bool = False) -> int:
        """How many distinct texts draw() can choose from."""
        return len(np.unique(self._candidates(question_id, failures)[1]))

    def success_rate(self, question_id: str) -> float | None:
        """The question's success rate when it was collected (mean over its records); None if no record carries one."""
        rates = self._rows["success_rate"][self._candidates(question_id)[0]]
        rates = rates[~np.isnan(rates)]
        return float(rates.mean()) if len(rates) else None

    def _candidates(self, question_id, failures=False, step=None, run=None, max_age=None) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the index rows of one question that may be drawn, in file order, and their digests."""
        kind = FAILURE if failures else SUCCESS
        if kind not in self._by_question:  # rows that may be drawn, sorted by question: made when first needed
            fits = self._rows["kind"] == kind
            if self.max_tokens is not None:
                fits &= self._rows["tokens"] <= self.max_tokens
            order = np.flatnonzero(fits)
            order = order[np.argsort(self._rows["question"][order], kind="stable")].astype(np.int32)
            starts = np.searchsorted(self._rows["question"][order], np.arange(len(self._codes.names) + 1))
            self._by_question[kind] = order, self._rows["digest"][order], starts.tolist()
        code = self._codes.get(question_id, 0)
        order, digests, starts = self._by_question[kind]
        found, digests = order[starts[code]:starts[code + 1]], digests[starts[code]:starts[code + 1]]
        if run is not None:
            age = step - self._rows["step"][found]
            mine = self._rows["run"][found] == self._codes.get(run, -1)
            fits = ~mine | (age > 0) & (age <= (np.inf if max_age is None else max_age))
            found, digests = found[fits], digests[fits]
        return found, digests

    def _score(self, rows: np.ndarray, select: str, question_id: str) -> np.ndarray:
        """What `select` sorts by, smallest first."""
        if select == "shortest":
            return rows["tokens"]
        if select not in ("likeliest", "unlikeliest"):
            raise InputError(f"select={select!r}: choose random, shortest, likeliest or unlikeliest")
        mean_logprob = rows["logprob"] / rows["tokens"]
        if np.isnan(mean_logprob).any():
            raise InputError(f"{self.path}: select={select} needs sampler_logprob, which {np.isnan(mean_logprob).sum()} of "
                             f"{len(rows)} trajectories of question {question_id!r} do not carry (imported as text?)")
        return -mean_logprob if select == "likeliest" else mean_logprob

    def _read(self, question_id: str, number: int, text: bool) -> dict:
        """The record of an index row."""
        offset, length, tokens = (self._rows[field].item(number) for field in ("offset", "length", "tokens"))
        try:
            record = parse(os.pread(self._fd, length, offset), text)
            if record["question_id"] != question_id or len(record["response_ids"]) != tokens:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.path}: byte {offset} does not hold the trajectory that the index says. Was the file "
                             f"edited while in use? Run `python replay.py check {self.path}`") from None
        for key in ("more",) if text else ("more", "response"):
            record.pop(key, None)
        return record

    # -- append ---------------------------------------------------------------------------------------------------------

    def refusal(self, record: dict, allow_failed: bool = False) -> str | None:
        """Why this record may not enter the pool; None if it may."""
        if reason := shape_error(record):
            return reason
        reward, finish_reason, ids, tokenizer = (record.get(key) for key in ("reward", "finish_reason", "response_ids", "tokenizer"))
        mine = {self.tokenizer} if self.tokenizer else self._tokenizers
        if finish_reason != "stop":
            return f'not ended: finish_reason is {finish_reason!r}, only answers that ended by themselves enter ("stop")'
        if kind_of(reward, "stop") not in ((SUCCESS, FAILURE) if allow_failed else (SUCCESS,)):
            return f"not verified: reward is {reward}, only verified successes (reward 1) enter"
        if not ids:
            return "empty: no response_ids"
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return f"too long: {len(ids)} tokens, the response limit is {self.max_tokens}"
        if self.stop_ids is not None and ids[-1] not in self.stop_ids:
            return f"no stop id: the last id is {ids[-1]}, a response ends with one of {sorted(self.stop_ids)}"
        if tokenizer and mine and tokenizer not in mine:
            return f"other tokenizer: its ids are of {tokenizer}, the pool's of {', '.join(sorted(mine))}"

    def knows(self, question_id: str, text: str) -> bool:
        """Is this text in the pool for this question, as a success or a failure?"""
        digest = np.uint64(int(text_digest(text), 16))
        return any(digest in self._candidates(question_id, failures)[1] for failures in (False, True))

    def append(self, records: list[dict], *, allow_failed: bool = False, once: bool = False) -> int:
        """Append all records, or none: a record that may not enter is an error that names it and the reason.

        Returns how many were written. On return they are on disk; a process killed at any moment, or a full disk, leaves
        the earlier records as they were. allow_failed: wrong answers (reward <= 0) may enter, for draw(failures=True).
        once: leave out records that are there already with the same run, step, question and text. A training that grows
        its pool passes once=True and records with `run` and `step`: after a crash the repeated steps then add nothing
        twice, and as draw(run=...) sees only earlier steps, the resumed run draws what an uninterrupted one would."""
        if self.readonly:
            raise InputError(f"{self.path} was opened with readonly=True")
        for number, record in enumerate(records):
            if reason := self.refusal(record, allow_failed):
                question = record.get("question_id") if isinstance(record, dict) else None
                raise InputError(f"{self.path}: record {number} of {len(records)} (question {question!r:.80}) is refused: {reason}; "
                                 "nothing of this append was written")
        records = [complete(record) | {"tokenizer": record.get("tokenizer") or self.tokenizer} for record in records]
        if not records:
            return 0
        with writer_lock(self.path, self.wait) as fd:
            self.refresh(_locked=True)
            if torn := os.fstat(fd).st_size - self._end:
                print(f"{self.path}: removed a torn last line of {torn} bytes (left by a writer that was killed)", file=sys.stderr)
                self._cut(fd)
            if once:
                records = self._unseen(records)
            try:
                lines = [to_line(record, more) for more, record in zip(reversed(range(len(records))), records)]
            except (ValueError, TypeError, RecursionError) as error:  # NaN, a set, ... among the keys that the caller added
                raise InputError(f"{self.path}: a record cannot be written as JSON ({error}); nothing of this append was written") from None
            if (longest := max(map(len, lines), default=0)) > LONGEST:
                raise InputError(f"{self.path}: a record of {longest >> 20} MB is too long; nothing of this append was written")
            if lines:
                self._write(fd, b"".join(lines))
        return len(records)

    def _cut(self, fd: int) -> None:
        """Cut the file back to what is indexed."""
        os.ftruncate(fd, self._end)
        self._mtime = os.fstat(fd).st_mtime_ns

    def _write(self, fd: int, data: bytes) -> None:
        """All of data at the end of the file and on disk, or the file as it was."""
        if self._end and os.pread(self._fd, 1, self._end - 1) != b"\n":
            data = b"\n" + data  # the last line is whole, but for its newline
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view):]
            os.fsync(fd)
        except OSError as error:
            self._cut(fd)
            raise InputError(f"{self.path}: cannot append {len(data)} bytes ({error.strerror}); the pool is as it was. "
                             "Make room and run the same command again") from error
        self.refresh(_locked=True)

    def _unseen(self, records: list[dict]) -> list[dict]:
        """The records that the pool does not hold yet; copies count, so that a text sampled twice stays there twice."""
        there, new = {}, []
        for record in records:
            question, step = record["question_id"], record.get("step")
            if question not in there:
                rows = self._rows[self._rows["question"] == self._codes.get(question, -1)]
                there[question] = Counter(zip(*(rows[field].tolist() for field in ("digest", "run", "step"))))
            key = (int(record["digest"], 16), self._codes.get(record.get("run"), -1), NO_STEP if step is None else step)
            if there[question][key] > 0:
                there[question][key] -= 1
            else:
                new.append(record)
        return new

    # -- index ----------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._rows = self._space = np.zeros(0, ROW)
        self._end = self._damaged = self._saved = self._mtime = 0
        self._codes, self._tail, self._by_question, self._tokenizers = Codes(), b"", {}, set()

    def refresh(self, _locked: bool = False) -> int:
        """Take in what was appended since the last look, by this or another process; how many records that were."""
        if not os.path.exists(self.path):
            return 0
        before = len(self._rows)
        if self._fd is None or not os.path.samestat(os.stat(self.path), os.fstat(self._fd)):  # new, or replaced by a repair
            self.__del__()
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise InputError(f"{self.path}: cannot read the pool ({error.strerror})") from None
            before = 0
            self._forget()
            self._load_index()
        stat = os.fstat(self._fd)
        if (stat.st_size, stat.st_mtime_ns) != (self._end, self._mtime):
            if self._end and (stat.st_size <= self._end or self._tail_hash() != self._tail):  # changed, not only grown
                before = 0
                self._forget()
            self._index_lines(hide_unfinished=not _locked)
            if not _locked and self._end < os.fstat(self._fd).st_size:
                # Something is unfinished at the end: an append that is under way, or what a killed writer left. A shared lock
                # tells. If a writer is at work it is refused, and the append shows, as a whole, at a later refresh. If none
                # is, the complete lines among it are as good as any.
                with open(self.path, "rb") as probe, contextlib.suppress(BlockingIOError):
                    fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    self._index_lines(hide_unfinished=False)
                    torn = os.fstat(self._fd).st_size - self._end
                    self._tell(torn, f"the last line is torn ({torn} bytes of a writer that was killed); the next append removes it")
            self._tail, self._by_question = self._tail_hash(), {}
        self._check_content(self._rows[before:])
        return len(self._rows) - before

    def _index_lines(self, hide_unfinished: bool) -> None:
        """Add the lines from self._end on to the index; an append that is not complete only if not hide_unfinished."""
        stat, chunks, rows, damaged = os.fstat(self._fd), [], [], []
        batch_start, more_before = self._end, 0
        for offset, block, begin, end in self._lines(self._end, stat.st_size, last=not hide_unfinished):
            try:
                row, more = self._row(offset, block, begin, end)
            except ValueError:
                if block[begin:end].strip():
                    damaged.append(offset)
                continue
            if more_before == 0 or more != more_before - 1:
                batch_start = offset
            more_before = more
            rows.append(row)
            if len(rows) == 1 << 16:
                chunks.append(np.array(rows, ROW))
                rows = []
        rows = np.concatenate([*chunks, np.array(rows, ROW)])
        if hide_unfinished and more_before:
            self._position = batch_start
            rows, damaged = rows[rows["offset"] < batch_start], [offset for offset in damaged if offset < batch_start]
        old, new = len(self._rows), len(self._rows) + len(rows)
        if new > len(self._space):  # with room to spare, so that many small appends do not copy it every time
            self._space = np.empty(new + new // 4 if old else new, ROW)
            self._space[:old] = self._rows
        self._space[old:new] = rows
        self._rows = self._space[:new]
        self._end, self._mtime, self._damaged = self._position, stat.st_mtime_ns, self._damaged + len(damaged)

    def _lines(self, start: int, stop: int, last: bool):
        """(offset in the file, block, begin and end in the block) of every line with a newline between two bytes of the file;
        leaves self._position after them. last: a last line without a newline counts too if it is whole, that is, if it parses."""
        size, block, begin = 1 << 20, b"", 0
        self._tell(stop - start > 1 << 30, f"indexing {(stop - start) / 1e9:.1f} GB")
        while start < stop:
            os.posix_fadvise(self._fd, start, 1 << 25, os.POSIX_FADV_WILLNEED)  # the disk reads on while we look at it
            block, begin = os.pread(self._fd, min(size, stop - start), start), 0
            while (end := block.find(b"\n", begin)) >= 0:
                yield start + begin, block, begin, end
                begin = end + 1
            if len(block) < min(size, stop - start) or start + len(block) == stop:  # cut shorter by someone, or done
                break
            size = size if begin else 4 * size  # a line longer than the block
            if size > 4 * LONGEST:
                raise InputError(f"{self.path}: no line ends within {len(block) >> 20} MB after byte {start}; this is no pool")
            start += begin
        if last and block[begin:].strip():
            with contextlib.suppress(ValueError):
                from_line(block[begin:])
                yield start + begin, block, begin, len(block)
                begin = len(block)
        self._position = start + begin

    def _row(self, offset: int, block: bytes, begin: int, end: int) -> tuple[tuple, int]:
        """(index row, more) of a line, from its first keys if they are as to_line() writes them. ValueError if damaged."""
        head = _HEAD_PATTERN.match(block, begin, end)
        # A second start of a record in the line: two lines were glued together. (In a text, the quotes are escaped.)
        if head is None or block[end - 2:end] != b"]}" or block.find(_START, begin + 1, end) > 0:
            head = _HEAD_PATTERN.match(to_line(complete(from_line(block[begin:end])), more=0))
        question, reward, finish, tokens, logprob, rate, tokenizer, source, run, step, more, digest = head.groups()
        code = self._codes
        return (offset, int(digest, 16), end - begin, code[question], int(tokens), int(step or NO_STEP), logprob or "nan",
                rate or "nan", code[tokenizer], code[source], code[run], kind_of(reward, finish)), int(more or 0)

    def _check_content(self, rows: np.ndarray) -> None:
        """Refuse ids of another tokenizer; tell what else a user should know of these new rows."""
        uses, see = np.bincount(rows["tokenizer"], minlength=1), f"see `python replay.py check {self.path}`"
        self._tokenizers |= {self._codes.names[code] for code in np.flatnonzero(uses)} - {None}
        if self.tokenizer:
            for name in self._tokenizers - {self.tokenizer}:
                count = np.count_nonzero(self._rows["tokenizer"] == self._codes[name])
                raise InputError(f"{self.path}: {count} of {len(self._rows)} trajectories hold ids of another tokenizer ({name}, the model "
                                 f"has {self.tokenizer}); convert: `python replay.py import {self.path} --pool=NEW.jsonl --tokenizer=MODEL`")
            self._tell(uses[0], f"{uses[0]} trajectories do not say their tokenizer; their ids are taken to be the model's")
        unfit = np.count_nonzero(rows["kind"] == UNFIT)
        self._tell(self._damaged, f"{self._damaged} damaged lines are left out; {see}")
        self._tell(unfit, f"{unfit} records are no verified, finished answers and are never drawn; {see}")

    def _tell(self, count: int, message: str) -> None:
        if count and message not in self._warned:
            self._warned.add(message)
            print(f"{self.path}: {message}", file=sys.stderr)

    def _tail_hash(self) -> bytes:
        """A hash of the last 4 KB that are indexed: if it changed, the pool did not only grow."""
        start = max(0, self._end - 4096)
        return hashlib.blake2b(os.pread(self._fd, self._end - start, start), digest_size=8).digest()

    def _load_index(self) -> None:
        """Take the index beside the pool if it is whole and belongs to this file, or to what the file was before it grew."""
        try:
            with open(self.path + ".index", "rb") as file:
                crc, line = file.read(8), file.readline()
                header = json.loads(line)
                rows = np.asarray(np.memmap(file, ROW, "r", offset=file.tell(), shape=(header["rows"],)))
            if crc.decode() != f"{zlib.crc32(rows.view(np.uint8), zlib.crc32(line)):08x}" or header["layout"] != str(ROW.descr):
                return
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
            return  # none, or not whole, or of another version: the pool itself is what counts
        stat, self._end = os.fstat(self._fd), header["end"]
        same = stat.st_size == self._end and stat.st_mtime_ns == header["mtime"]
        grown = stat.st_size > self._end and stat.st_ino == header["inode"]
        if not (same or grown) or self._tail_hash().hex() != header["tail"]:
            self._end = 0
            return
        self._rows, self._mtime, self._damaged, self._saved = rows, header["mtime"], header["damaged"], len(rows)
        self._tail, self._codes = bytes.fromhex(header["tail"]), Codes(header["names"])

    def _save_index(self) -> None:
        """Write the index to a temporary name and rename it. That a folder cannot be written to is no error."""
        if len(self._rows) == self._saved:
            return
        header = {"layout": str(ROW.descr), "rows": len(self._rows), "end": self._end, "mtime": self._mtime, "names": self._codes.names,
                  "inode": os.fstat(self._fd).st_ino, "tail": self._tail.hex(), "damaged": self._damaged}
        line, rows = json.dumps(header).encode(), self._rows.view(np.uint8)
        line += b" " * (-(len(line) + 9) % 64) + b"\n"  # the rows are mapped: keep them aligned
        temporary = f"{self.path}.index.{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                file.write(b"%08x" % zlib.crc32(rows, zlib.crc32(line)) + line)
                file.write(rows)
            os.replace(temporary, self.path + ".index")
            self._saved = len(self._rows)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


# ---------------------------------------------------------------------------------------------------------------------
# The command line

VERDICT = {True: "right", False: "wrong answer", None: "gold answer not readable"}


def say(text: str) -> None:
    """Print; what answers hold is hostile: control characters and lone surrogates are shown as escapes."""
    print(re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], text))


def batches(items, size: int = 4096):
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


def verify_records(records: list[dict], workers: int) -> list[bool | None]:
    """Today's verdicts; None where the gold answer cannot be read."""
    return verify_batch([r["response"] for r in records], [r.get("answer") or "" for r in records], workers=workers,
                        ids=[r["question_id"] for r in records])


def check(options) -> int:
    """Read every line in full and list the faults with their line numbers; exit code 1 if there are any."""
    if not os.path.isfile(options.pool):
        raise InputError(f"{options.pool}: no pool (a .jsonl file) there")
    lines = total = unverifiable = 0
    for batch in batches(file_lines(options.pool)):
        found = [(number, *inspect_line(line)) for number, line in batch]
        faults = [(number, fault) for number, _, those in found for fault in those]
        if options.verify:
            stored = [(number, record) for number, record, _ in found if record and isinstance(record.get("answer"), str)]
            unverifiable += sum(record is not None for _, record, _ in found) - len(stored)
            for (number, r), right in zip(stored, verify_records([r for _, r in stored], options.workers)):
                if right is not (r["reward"] > 0):
                    faults.append((number, f"question {r['question_id']}: stored as reward {r['reward']:g}, today's verifier says "
                                           f"{VERDICT[right]} (gold {r['answer']!r}, response ends {r['response'][-60:]!r})"))
        for number, fault in sorted(faults)[:max(0, options.number - total)]:
            say(f"{options.pool}:{number}: {fault}")
        lines, total = lines + len(batch), total + len(faults)
    say(f"{options.pool}: {lines} lines, {total} faults"
        + (f" (the first {options.number} are listed; --number)" if total > options.number else "")
        + (f"; {unverifiable} records have no gold answer to verify against" if unverifiable else ""))
    if options.repair:
        repair(options.pool)
    return 1 if total else 0


def file_lines(path: str):
    """(line number, line) of the pool's lines as they are, with a progress bar."""
    with open(path, "rb") as file, tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, disable=None) as bar:
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            if line.strip():
                yield number, line


def inspect_line(line: bytes) -> tuple[dict | None, list[str]]:
    """The record of a line (None if it cannot be read or may not be in a pool) and what is wrong with it."""
    try:
        stored = from_line(line)
    except ValueError as error:
        return None, [f"damaged: {error}"]
    record = complete(stored)
    if kind_of(record["reward"], record["finish_reason"]) == UNFIT or not record["response_ids"]:
        return None, ["may not be in a pool: reward {reward:g}, finish_reason {finish_reason!r}, {tokens} tokens".format(**record)]
    faults = [f"{key} is {stored[key]!r}, its content gives {record[key]!r} (edited by hand?)"
              for key in ("tokens", "digest") if stored.get(key) not in (None, record[key])]
    return record, faults + ([] if line.endswith(b"\n") else ["no newline at the end"])


def repair(path: str) -> None:
    """Put a clean copy, good records only and freshly written, in the place of the pool; the old file stays beside it."""
    path, kept, left_out = os.path.realpath(path) if os.path.islink(path) else path, 0, 0
    with writer_lock(path), open(path + ".clean", "wb") as clean:
        for _, line in file_lines(path):
            record, _ = inspect_line(line)
            if record is None:
                left_out += 1  # was a record glued to a torn one? By a program that appends without repairing
                record, _ = inspect_line(line[max(line.rfind(_START), 0):])
            if record is not None:
                clean.write(to_line(record, more=0))
                kept += 1
        clean.flush()
        os.fsync(clean.fileno())
        old = next(name for n in itertools.count(1) if not os.path.exists(name := f"{path}.damaged-{n}"))
        os.link(path, old)  # a second name for the old file, then the exchange: at no moment is there no pool
        os.replace(path + ".clean", path)
    say(f"{path}: clean copy with {kept} records; {left_out} lines left out; the old file is kept as {old}")


def stats(options) -> int:
    """What is in the pool, from its index alone."""
    with Pool(options.pool, readonly=True) as pool:
        rows, questions, names = pool._rows[pool._rows["kind"] == SUCCESS], pool.questions, pool._codes.names
        say(f"{options.pool}: {len(questions)} questions, {len(rows)} trajectories, {pool.failures} failures, "
            f"{os.path.getsize(options.pool) / 1e6:.1f} MB")
    if len(rows) == 0:
        return 0
    rows = rows[np.lexsort((rows["digest"], rows["question"]))]
    new_text = np.append(True, (np.diff(rows["question"]) != 0) | (np.diff(rows["digest"]) != 0))
    each, distinct = (np.unique(those["question"], return_counts=True)[1] for those in (rows, rows[new_text]))
    print(f"distinct trajectories: {distinct.sum()}\n\nper question  questions (all)  questions (distinct only)")
    for low, high in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, np.inf)):
        label = f"{low}" if low == high else f"{low}-{high}" if high < np.inf else f"{low} and more"
        all_, different = (np.sum((counts >= low) & (counts <= high)) for counts in (each, distinct))
        print(f"{label:>12}  {all_:>15}  {different:>25}")
    low, median, high = np.percentile(rows["tokens"], (5, 50, 95))
    print(f"\ntokens: mean {rows['tokens'].mean():.0f}, median {median:.0f}, 5% below {low:.0f}, 5% above {high:.0f}, "
          f"longest {rows['tokens'].max()}\nwith log-probs: {np.sum(~np.isnan(rows['logprob']))}")
    for field in ("source", "tokenizer", "run"):
        for code, count in zip(*np.unique(rows[field], return_counts=True)):
            say(f"{field} {names[code] or '(not given)'}: {count}")
    if options.data:
        wanted, there = {question["id"] for question in load_questions(options.data)}, set(questions)
        print(f"coverage of {options.data}: {len(wanted & there)} of {len(wanted)} questions "
              f"({len(wanted & there) / len(wanted):.1%}); {len(there - wanted)} questions of the pool are not in it")
    if options.plot:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        left.hist([each, distinct], np.arange(0.5, each.max() + 1.6, max(1, each.max() // 32)), label=["all", "distinct"])
        left.set(xlabel="trajectories per question", ylabel="questions", title=os.path.basename(options.pool))
        left.legend()
        right.hist(rows["tokens"], 60)
        right.set(xlabel="tokens per trajectory", ylabel="trajectories", title=f"{len(rows)} trajectories")
        try:
            figure.savefig(options.plot, dpi=120)
        except ValueError as error:
            raise InputError(f"--plot={options.plot}: {error}") from None
        print(f"picture: {options.plot}")
    return 0


def show(options) -> int:
    """Print trajectories of a question to read."""
    with Pool(options.pool, readonly=True) as pool:
        records = pool.draw(options.question, max(1, options.number), options.seed, step=0, failures=options.failures)
        if not records:
            near = " or ".join(difflib.get_close_matches(options.question, pool.questions))
            raise InputError(f"{options.pool}: no trajectory of question {options.question!r}" + (near and f"; did you mean {near}?"))
        say(f"question {options.question}, {pool.count(options.question, options.failures)} distinct trajectories\n"
            f"problem: {records[0].get('problem', '(not stored)')}\ngold answer: {records[0].get('answer', '(not stored)')}")
    for number, record in enumerate(records, 1):
        small = [f"{key} {record[key]}" for key in record if key not in (*TAIL, "question_id", "digest")]
        say(f"\n--- {number}: {', '.join(small)}\n{record['response']}")
    return 0


def import_source(options) -> int:
    """Verify the answers of a source, tokenise those that are text, append them; count kept and refused by reason."""
    counts, tokenizer, stops = Counter(), None, None
    if options.tokenizer:
        tokenizer, options.stop_id, stops = load_tokenizer(options.tokenizer, options.stop_id)
    with Pool(options.pool, tokenizer=tokenizer and fingerprint(tokenizer), max_tokens=options.max_tokens, stop_ids=stops) as pool:
        for batch in batches(tqdm(source_records(options.source), unit=" answers", disable=None)):
            counts += import_batch(pool, batch, tokenizer, options)
        if not counts:
            raise InputError(f"{options.source}: holds no answers; see `python replay.py --help` for the layouts")
        say(f"{options.source}: {sum(counts.values())} answers")
        for outcome, count in counts.most_common():
            say(f"  {count:>8}  {outcome}")
        say(f"{options.pool}: {len(pool)} trajectories of {len(pool.questions)} questions")
    return 0


def source_records(source: str):
    """One record per answer of a source: whole ones from a pool, without ids from published data sets and jsonl."""
    for where, row in read_rows(source):
        if isinstance(row, dict) and "response_ids" in row:
            if reason := shape_error(row):
                raise InputError(f"{where}: {reason}; run `python replay.py check {source}`")
            yield complete(row)
            continue
        question = to_question(row, where, os.path.basename(source).split(".")[0])
        texts = row["responses"] if "responses" in row else question.get("candidates") or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InputError(f'{where}: "responses" must be a list of texts')
        for text in texts:
            yield {"question_id": question["id"], "problem": question["problem"], "answer": question["answer"],
                   "source": question["source"], "response": text, "finish_reason": "stop", "reward": 1.0}


def import_batch(pool: Pool, batch: list[dict], tokenizer, options) -> Counter:
    """Append what may enter of these records; how many had which outcome. Only texts that are new for their question."""
    counts, fit, seen = Counter(), [], set()
    if tokenizer is None and not all("response_ids" in record for record in batch):
        raise InputError(f"{options.source}: answers without token ids; give --tokenizer=FOLDER of the model to train on them")
    for record, right in zip(batch, itertools.repeat(True) if options.no_verify else verify_records(batch, options.workers)):
        key = record["question_id"], record["response"]
        if not record["response"].strip():
            counts["refused: empty"] += 1
        elif re.search("[\ud800-\udfff]", record["response"]):
            counts["refused: no Unicode text (a lone surrogate)"] += 1
        elif right is None or not (right or options.failures):
            counts[f"refused: {VERDICT[right]}"] += 1
        elif key in seen or pool.knows(*key):
            counts["left out: the pool has this text"] += 1
        else:
            seen.add(key)
            fit.append(record if options.no_verify else record | {"reward": 1.0 if right else -1.0})
    tokenize_records(fit, pool, tokenizer, options)
    reasons = [pool.refusal(record, allow_failed=options.failures) for record in fit]
    counts.update("kept" if reason is None else f"refused: {reason.split(':')[0]}" for reason in reasons)
    pool.append([record for record, reason in zip(fit, reasons) if reason is None], allow_failed=options.failures)
    return counts


def tokenize_records(records: list[dict], pool: Pool, tokenizer, options) -> None:
    """Give ids to records that have none, or have another tokenizer's; these end with the stop id. The sampler's log-probs
    belong to the old ids and go with them."""
    records = [r for r in records if tokenizer and ("response_ids" not in r or r.get("tokenizer") != pool.tokenizer)]
    if records:
        words = [r["response"].removesuffix(tokenizer.decode([options.stop_id])) for r in records]
        try:
            encoded = tokenizer(words, add_special_tokens=False)["input_ids"]
        except Exception as error:  # the tokenizers library raises nothing more special
            raise InputError(f"--tokenizer={options.tokenizer} cannot encode answers of {options.source}: {error}") from None
        for record, ids in zip(records, encoded):
            record |= {"response_ids": ids + [options.stop_id], "tokenizer": pool.tokenizer, "sampler_logprob": None}


def load_tokenizer(folder: str, stop_id: int | None):
    """(tokenizer, the id to end imported answers with, all ids that may end an answer). Those are the tokenizer's and the
    generation config's, which differ for some base models; the first one is the tokenizer's, unless --stop_id says else."""
    from transformers import AutoTokenizer, GenerationConfig
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"--tokenizer={folder}: {str(error).splitlines()[0]}") from None
    stops = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # none there
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        stops |= set(more if isinstance(more, list) else [more])
    stops.discard(None)
    stop = tokenizer.eos_token_id if stop_id is None else stop_id
    if stop is None or (stops and stop not in stops):
        raise InputError(f"--stop_id={stop_id}: give one of those that end an answer: {sorted(stops) or 'the folder names none'}")
    if len(stops) > 1:
        print(f"answers given as text will end with {stop}; {folder} also knows {sorted(stops - {stop})} (--stop_id)")
    return tokenizer, stop, stops | {stop}


def export(options) -> int:
    """Write the pool as a training parquet in the layout of the reference: one row per question, texts as candidates."""
    import pyarrow
    import pyarrow.parquet as parquet
    text, message = pyarrow.string(), pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
    reward = pyarrow.struct({"ground_truth": text, "style": text, "candidates": pyarrow.list_(text)})
    schema = pyarrow.schema({"data_source": text, "prompt": pyarrow.list_(message), "ability": text, "reward_model": reward,
                             "extra_info": pyarrow.struct({"index": text}), "id": text})  # "id" is ours: it comes back on import
    temporary, total = options.out + ".tmp", 0
    with Pool(options.pool, readonly=True) as pool:
        questions = load_questions(options.data) if options.data else [{"id": name} for name in pool.questions]
        with parquet.ParquetWriter(temporary, schema) as writer:
            for batch in batches(tqdm(questions, unit=" questions", disable=None), 64):  # readers hold a row group in memory
                rows = []
                for question in batch:
                    records = pool.draw(question["id"], pool.count(question["id"]), seed=0, step=0)
                    question = (records[0] if records else {}) | question
                    if not question.get("problem") or not question.get("answer"):
                        raise InputError(f"{options.pool}: question {question['id']!r} is stored without its problem or answer; "
                                         "give --data=QUESTIONS")
                    prompt = question.get("prompt") or INSTRUCTION[0] + question["problem"] + INSTRUCTION[1]
                    total += len(records)
                    rows.append({"data_source": question.get("source") or "rlep", "ability": "math", "id": question["id"],
                                 "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                                 "reward_model": {"ground_truth": question["answer"], "style": "rule",
                                                  "candidates": [record["response"] for record in records]},
                                 "extra_info": {"index": question["id"]}})
                try:
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                except UnicodeEncodeError as error:
                    raise InputError(f"{options.pool}: question {batch[0]['id']!r:.50} or one of the next {len(batch) - 1} holds "
                                     f"{error.object[error.start]!r}, which is no Unicode and has no place in a parquet file") from None
    os.replace(temporary, options.out)
    print(f"{options.out}: {len(questions)} questions, {total} candidates (distinct texts)")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, *places: str, **choices) -> None:
        """places: arguments that must be given; choices: option = (default or its type, help)."""
        sub = commands.add_parser(name, help=function.__doc__.split(";")[0].split(".")[0], description=function.__doc__)
        sub.set_defaults(function=function)
        for place in places:
            sub.add_argument(place)
        for key, (default, words) in choices.items():
            if default is False:
                sub.add_argument(f"--{key}", action="store_true", help=words)
            else:
                form, default = (default, None) if isinstance(default, type) else (type(default), default)
                sub.add_argument(f"--{key}", type=form, default=default, help=words, required=key == "pool")

    workers = (os.cpu_count(), "verifier processes (default: all cores)")
    command("stats", stats, "pool", data=(str, "data set (as for rlep.py) whose coverage to tell"), plot=(str, "picture to draw"))
    command("show", show, "pool", "question", number=(3, "how many (default 3)"), seed=(0, "another seed, other trajectories"),
            failures=(False, "stored wrong answers instead"))
    command("check", check, "pool", verify=(False, "verify the stored answers again, list the disagreements"), workers=workers,
            repair=(False, "replace the pool by a clean copy, keep the old file beside it"), number=(20, "list at most so many (default 20)"))
    command("import", import_source, "source", pool=(str, "append to this pool"), workers=workers,
            tokenizer=(str, "the model's folder; needed for answers that are text"),
            stop_id=(int, "id that ends the answers (default: the tokenizer's eos)"),
            max_tokens=(int, "response limit; longer answers are refused"),
            failures=(False, "keep wrong answers as failures (negative replay)"),
            no_verify=(False, "trust the source that its answers are right"))
    command("export", export, "pool", "out", data=(str, "data set: export exactly its questions, with its own prompts"))
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, OSError) as error:  # OSError: a full disk, a folder that is not there
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
