"""Does the final answer of a response equal the gold answer?  The reward of the whole project is this file.

    python verify.py "<gold>" "<response>"      what was extracted, how both sides were read, which stage decided, why
    python verify.py responses.jsonl            score a file of {"answer": gold, "response": text} rows, table by reason

    extract_answer(response) -> str | None      is_equiv(answer, gold) -> bool      is_correct(response, gold) -> bool
    verify_batch(responses, golds, workers=2, time_limit=1.0) -> list[bool | None]  None: leave this question out
    Verifier(workers, time_limit): the same with .counts (by kind) and .close();    canonical(answer): key for maj@k

Stages, each only for what the one before left open:
  1 extract   the last balanced \\boxed{} or \\fbox{}, else the last line `Answer: ...`; nothing else is an answer.
  2 string    integers, words, choice letters: the same once wrappers, Unicode spellings and spaces are normalised.
  3 exact     notation.py reads both to values, algebra.py compares them: rationals exactly, values of different types
              never equal, algebraic expressions by a residue.
  4 numeric   the rest (trig, logs, cube roots, nested radicals) by interval arithmetic, in a worker process with a
              memory limit, killed and replaced when over its time.

No model text reaches eval, sympify or a LaTeX library. All stages do bounded work by construction, counted in steps and
not in seconds. Undecided is "not correct" and counted: limits exceeded, towers of powers, functions that aren't in the
table, sums, integrals, limits, equations solved on one side only (x^2 = 4 against x = 2 or x = -2), an order of
irrational interval ends. A gold that can't be read gives None and is reported once; one beyond the parser (an integral)
is matched whole as text.

Conventions chosen where usage differs:
  - symbols are real; an identity must hold wherever both sides are defined as real functions, so sqrt(1/n) = 1/sqrt(n),
    sqrt(x^2) = |x|, but sqrt(x^2) != x. `log` without base may be base e or 10, the same on both sides.
  - unreduced fractions and arithmetic left undone equal their value (2+3 is 5); 28\\% is 28, never 0.28; degrees are
    never radians; no unit conversion: units on one side are ignored, on both sides they must be the same.
  - words compare without case, single letters with case; scaled equations are equal, an inequality equals its interval.
  - a box beats an Answer line; "the answer is 42" is not an answer line; boxes joined by "or", "and" or "," are a list.
  - an equation with two different names (x = 5, y = 5) differs; \\{5\\} is the value 5; \\sqrt2 \\approx 1.41 and
    5 million are no answers.
"""
import argparse
import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import unicodedata
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from algebra import EXPRESSION, Hard, Unreadable, begin, kind_of, residue, same, show, units
from notation import MAX_CHARS, WORDY, Parser, latex

WORKER_BYTES = 256 << 20        # address space of a worker process


# -------------------------------------------------------------------------------------------------------------------
# Stage 1, extraction. Find the last marker, then scan braces: no regex runs over the whole text.

BRACE = re.compile(r"\\.|[{}]", re.S)
BOX = re.compile(r"\\f?box(?:ed)?\s{0,9}\{")
JOIN = re.compile(r"(?:[\s$,;*]|\\quad|\\text\{|\\[,()]|\}|or\b|and\b)+")  # between boxes that form a list
COLON = re.compile(r"answers?[\s}*_`]{0,6}[:\uff1a]", re.I)
LEADS = set("so thus hence therefore and the my our final correct short numerical".split())


def closing(text, start):
    """Index of the brace that closes the one at `start`; None if it isn't closed within the length of an answer."""
    depth = 0
    for m in BRACE.finditer(text, start, start + 2 * MAX_CHARS):
        depth += {"{": 1, "}": -1}.get(m[0], 0)
        if depth == 0:
            return m.start()
    return None


def last_box(text, end):
    """(start, start of content, end of content) of the last box beginning before `end`; None: no box; False: cut."""
    for _ in range(1000):
        end = text.rfind("box", 0, end)
        if end < 0:
            return None
        start = text.rfind("\\", max(0, end - 2), end)
        m = BOX.match(text, start)
        if m:
            close = closing(text, m.end() - 1)
            return (start, m.end(), close) if close is not None else False
        if text[start:start + 20].strip() in ("\\boxed", "\\fbox"):
            return False               # the text ends here; elsewhere, `\boxed` without a brace is no box
    return None


def extract_answer(response):
    """The final answer of a response, or None. A box that is cut at the end is None, whatever came before it."""
    if not isinstance(response, str):
        return None
    box = last_box(response, len(response))
    if not box:
        return trim(answer_line(response)) if box is None else None
    parts = [response[box[1]:box[2]]]
    for _ in range(8):                 # the outermost of nested boxes; all of `\boxed{3} or \boxed{4}`
        before = last_box(response, box[0])
        if not before:
            break
        between = response[before[2] + 1:box[0]]
        if before[2] > box[2]:
            outer = response[before[1]:before[2]]
            parts = [outer] if outer.strip(" $") != response[box[0]:box[2] + 1] else parts
        elif len(between) < 40 and JOIN.fullmatch(between) and re.search("[,;]|or|and", between):
            parts.insert(0, response[before[1]:before[2]])
        else:
            break
        box = before
    return trim(", ".join(dict.fromkeys(p.strip() for p in parts)))


def answer_line(text):
    """What follows the last `Answer:` that begins a line or sentence; the paragraph after it if the line ends there."""
    low = text.lower() if text.isascii() else text.replace("\u0130", "I").lower()  # the one letter that changes length
    end = len(low)
    for _ in range(1000):
        end = low.rfind("answer", 0, end)
        m = end >= 0 and COLON.match(text, end)
        if end < 0:
            return None
        lead = "\n" + text[:end] if end < 60 else text[end - 60:end]
        cut = max(lead.rfind(c) for c in "\n.!?:")
        words = re.sub(r"\\text(?:bf)?|\\mathbf|[\s#>*_`{(\"'$|\u200b-]", " ", lead[cut + 1:]).lower().split()
        if m and cut >= 0 and LEADS.issuperset(words):
            rest = text[m.end():m.end() + 2 * MAX_CHARS]
            line, _, _ = rest.partition("\n")
            if line.strip(" \t\r*_`$") in ("", "\\[", "\\(") or line.count("\\begin") > line.count("\\end"):
                return re.split(r"\n[ \t\r]*\n", rest.lstrip("*_ \t\r\n"), maxsplit=1)[0]
            return re.sub(r"^[*_]+ ", "", line)                # of `*Answer:* 5`
    return None


EDGES = (("**", "**"), ("__", "__"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("`", "`"))
QUOTES = (('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("*", "*"))


def trim(s):
    """The answer without delimiters, markdown, quotes and final stops; None when empty, `?`, dots or too long."""
    if s is None or len(s) > 2 * MAX_CHARS:
        return None
    before = None
    while s != before:                 # each round shortens s
        before, s = s, s.strip().strip("\u200b\ufeff")
        if s[-1:] in tuple(".,;:") and s[-2:-1] not in ("\\", "."):
            s = s[:-1]
        s = s.rstrip("\\")              # of a final `\\ `, `\\,` or line break
        for left, right in EDGES:      # one side may stand alone: the other was outside the line
            s = s.removeprefix(left)
            s = s[:-len(right)] if s.endswith(right) and s[-len(right) - 1:-len(right)] != "\\" else s
        for left, right in QUOTES:
            s = s[1:-1] if len(s) > 2 and s[0] == left and s[-1] == right else s
    return s if s.strip("?. \u2026_-$\\") and len(s) <= MAX_CHARS else None


# -------------------------------------------------------------------------------------------------------------------
# The decision for a pair of texts.

INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
CHOICE = re.compile(r"(?:option |choice )?(?:\(?([A-J])[).:]? ?|\(([A-J])\)[.:]? ?(\S.*)|([A-J])[).:] ?(\S.*))")


@lru_cache(maxsize=50_000)
def read(text, mode=0):
    """(value, None), or (("text", words), kind of problem) where the parser can't read it."""
    text = trim(text)
    if text is None:
        return ("text", ""), "empty"
    plain = ""
    begin()
    try:
        plain = re.sub(r"\s+", " ", latex(text))
        if any(unicodedata.category(c) in ("Cc", "Cs", "Co", "Cf") for c in plain):
            return ("text", ""), "character"
        return Parser(plain, mode).whole(), None
    except Unreadable as problem:
        return ("text", plain and words(plain)), str(problem)
    except RecursionError:             # the caller itself is deep in its stack
        return ("text", ""), "recursion"


def words(s):
    """Text without wrappers and space around signs; words without case, single letters with case."""
    s = latex(trim(s) or "")
    for _ in range(3):
        s = re.sub(r"\\(?:%s)\s*\{([^{}]*)\}" % "|".join(sorted(WORDY)), r"\1", s)
    s = re.sub(r"[$~]|\\[,;:!> ()\[\]]|\\(?:left|right|displaystyle)(?![A-Za-z])", " ", s)
    s = re.sub(r"[A-Za-z]{2,}", lambda m: m[0].lower(), s) if "\\" not in s else s
    return re.sub(r" (?=[^\w ])|(?<=[^\w ]) ", "", re.sub(r"(?<!\.)\.$", "", re.sub(r"\s+", " ", s).strip()))


def readable(gold):
    """Why a gold can't be read, or None. Words and formulas beyond the parser are read as text, to be matched whole."""
    value, problem = read(gold)
    beyond = (None, "words", "command", "environment", "syntax", "type", "arguments", "character")
    if problem in beyond and value[1:] != ("",):
        text = latex(trim(gold))
        closed = closing("{" + text + "}", 0) == len(text) + 1
        return None if closed and re.search(r"[^\W_]|\\[A-Za-z]|\\\{", text) else "braces"
    return problem or "empty"


@lru_cache(maxsize=100_000)
def judge(answer, gold, deep=False):
    """(verdict, stage, why); the verdict is None when the gold is unreadable. Hard: ask a worker."""
    i, j = INTEGER.fullmatch(answer.strip(" $")), INTEGER.fullmatch(gold.strip(" $"))
    if i and j:
        return int(i[0]) == int(j[0]), "string", "integers"
    bad = readable(gold)
    if bad:
        return None, "gold", bad
    (a, problem), (g, gold_problem) = read(answer), read(gold)
    if not problem and not gold_problem:
        verdict, stage, why = compare(answer, gold, deep)
    elif "text" in (a[0], g[0]) and problem not in ("incomplete", "empty"):
        verdict, stage, why = same_words(words(answer), words(gold)), "string", "words"
    else:
        verdict, stage, why = False, "type", f"answer: {problem}" if problem else "gold is text"
    if not verdict:
        letter = choice(answer, gold)
        if letter is not None:
            return letter, "string", "choice letter"
    return verdict, stage, why


def same_words(a, g):
    """Texts that are the same, or lists of the same words."""
    lists = [{x.strip() for x in re.split(r"[,;]|\band\b|\bor\b", s)} for s in (a, g)]
    return a == g or bool(re.fullmatch(r"[a-zA-Z ,;]+", a)) and lists[0] == lists[1]


def compare(answer, gold, deep):
    """Compare two readable texts; a text with `2e-1` or `log` has two usual readings, the same for both sides."""
    ambiguous = re.search(r"[0-9][eE][+-]?[0-9]|log", gold + answer)
    why, hard = "values differ", False
    for mode in (0, 1)[:2 if ambiguous else 1]:
        (a, p), (g, q) = read(answer, mode), read(gold, mode)
        if p or q:
            continue
        begin()
        try:
            if same(g, a, deep):
                return True, "numeric" if deep else "exact", "equal values"
            if kind_of(g) != kind_of(a):
                why = f"{kind_of(a)} for {kind_of(g)}"
        except Hard:
            hard = True
        except Unreadable as problem:
            why = f"undecided: {problem}"
        except RecursionError:
            why = "undecided: recursion"
    if hard:
        raise Hard
    return False, "numeric" if deep else "exact", why


def choice(answer, gold):
    """Choice letters: `(C)`, `C`, `C. 42`, `Option C`. None: this isn't about choices."""
    g, a = CHOICE.fullmatch(words(gold)), CHOICE.fullmatch(words(answer))
    if not g or not g[1] or not a:
        return None
    value = a[3] or a[5]               # after the letter one value may stand, nothing that could be a second choice
    if value and (not re.match(r"-?[0-9\\]", value) or read(value)[1] or kind_of(read(value)[0]) != "expression"):
        return None
    return g[1] == (a[1] or a[2] or a[4])


# -------------------------------------------------------------------------------------------------------------------
# Workers: `verify.py --worker` children that answer one JSON line per pair. Started by exec, not fork: a trainer with
# CUDA can't be forked. A worker ends when its input closes; the kernel ends it when a pair has used up its time.

class Worker:
    process = None

    def start(self):
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, bufsize=0)
        if self.line(60) != b"ready\n":
            self.end()
            raise RuntimeError("verify.py: a worker process doesn't start; `python verify.py --worker` shows why")

    def line(self, seconds):
        """One line of its output; b"" when it is gone, None when it takes too long."""
        out = b""
        while not out.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                return b""
            out += data
        return out

    def ask(self, pair, seconds):
        """(verdict, stage, why). A worker on a busy machine may take ten times as long as its processor time."""
        for attempt in (1, 2):         # one that died while it was idle: once more
            if not self.process:
                self.start()
            try:
                self.process.stdin.write(json.dumps([seconds, *pair]).encode() + b"\n")
                reply = self.line(10 * seconds)
            except BrokenPipeError:
                reply = b""
            if reply:
                return tuple(json.loads(reply))
            if self.end() == -signal.SIGPROF or reply is None:
                return False, "numeric", "undecided: time"
        return False, "numeric", "undecided: crash"

    def end(self):
        """The exit status of the process, killed if it still runs."""
        process, self.process = self.process, None
        if process:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            return process.wait()


def work():
    """A worker's loop: read a pair, decide it with the numeric stage allowed, answer."""
    import resource
    import mpmath  # noqa: F401  before the first pair, so that its time limit isn't spent on the import
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)              # ends the process
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, answer, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))
        try:
            reply = judge(answer, gold, True)
        except MemoryError:
            reply = (False, "numeric", "undecided: memory")
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


class Verifier:
    """Workers started once and kept; counts by kind; safe from any thread, and in a process forked from this one."""

    def __init__(self, workers=2, time_limit=1.0):
        self.size, self.time_limit = max(1, workers), time_limit
        self.counts, self.reported, self.workers = Counter(), set(), []
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self):                   # a forked child has no workers of its own yet and must not use its parent's
        for w in self.workers:
            if w.process:
                w.process.stdin.close()
                w.process.stdout.close()
        self.workers, self.lock, self.decided = [], threading.Lock(), {}

    def verify_batch(self, responses, golds, ids=None):
        """A verdict per response; None where the gold is unreadable, which is reported once with its question."""
        answers = [extract_answer(r) for r in responses]
        golds = [str(g) if isinstance(g, (int, float)) else g for g in golds]
        if len(answers) != len(golds):
            raise ValueError(f"{len(answers)} responses, {len(golds)} golds: give one gold per response")
        results = self.decide(list(zip(answers, golds, strict=True)))
        for k, (verdict, stage, why) in enumerate(results):
            kind = why if why.startswith("undecided") or stage == "none" else "correct" if verdict else "wrong"
            self.counts[kind if stage != "gold" else "unreadable gold: " + why] += 1
            if why.startswith("answer: "):
                self.counts["unread " + why] += 1
            gold = str(golds[k])
            if verdict is None and gold not in self.reported:
                self.reported.add(gold)
                print(f"verify: gold {gold[:80]!a} of question {ids[k] if ids else k} can't be read ({why}); "
                      "the question is left out", file=sys.stderr)
        return [r[0] for r in results]

    def decide(self, pairs):
        """(verdict, stage, why) of every pair (answer, gold); workers decide what this process can't."""
        results = [easy(*pair) for pair in pairs]
        hard = {pairs[k] for k, r in enumerate(results) if r is None}
        with self.lock:
            solved = {pair: self.decided[pair] for pair in hard if pair in self.decided}
            self.solve(sorted(hard - solved.keys()), solved)
        return [solved[pair] if r is None else r for pair, r in zip(pairs, results, strict=True)]

    def solve(self, pairs, solved):
        """Adds the results of pairs. A worker gets one at a time, so that a long one holds up nobody."""
        size, queue = min(self.size, len(pairs)), deque(pairs)
        self.workers += [Worker() for _ in range(size - len(self.workers))]

        def run(worker):               # in a thread that only waits for its worker
            while queue:
                try:
                    pair = queue.popleft()
                except IndexError:     # another thread was faster
                    return
                solved[pair] = worker.ask(pair, self.time_limit)
        if size == 1:
            run(self.workers[0])
        elif size:
            with ThreadPoolExecutor(size) as threads:
                list(threads.map(run, self.workers[:size]))
        if len(self.decided) < 100_000:
            self.decided |= {pair: solved[pair] for pair in pairs}

    def close(self):
        with self.lock:
            for w in self.workers:
                w.end()
            self.workers = []


def easy(answer, gold):
    """(verdict, stage, why) from the stages that run in this process; None when a worker has to decide."""
    if not isinstance(gold, str):
        return None, "gold", "not text"
    if answer is None:
        bad = readable(gold)
        return (None, "gold", bad) if bad else (False, "none", "no answer")
    try:
        return judge(answer, gold)
    except Hard:
        return None


SHARED, SHARED_LOCK = {}, threading.Lock()


def shared(workers, time_limit):
    with SHARED_LOCK:
        if (workers, time_limit) not in SHARED:
            SHARED[workers, time_limit] = Verifier(workers, time_limit)
            atexit.register(SHARED[workers, time_limit].close)
        return SHARED[workers, time_limit]


def decide(answer, gold):
    """(verdict, stage, why) of a bare answer."""
    return shared(1, 0.6).decide([(answer, gold)])[0]


def is_equiv(answer, gold):
    return isinstance(answer, str) and decide(answer, gold)[0] is True


def is_correct(response, gold):
    return is_equiv(extract_answer(response), gold)


def verify_batch(responses, golds, workers=2, time_limit=1.0, ids=None):
    return shared(workers, time_limit).verify_batch(responses, golds, ids)


def canonical(answer):
    """A key for majority voting: equal answers mostly have the same, never slow, never raises."""
    if not isinstance(answer, str):
        return ""
    v, problem = read(answer)
    begin()
    try:
        return v[1] if problem else key(v)
    except Unreadable:
        return trim(answer) or ""


def key(v):
    if v[0] == "eq" or v[0] == "set" and len(v) == 2:
        return key(v[2] if v[0] == "eq" else v[1])
    if v[0] in EXPRESSION:
        v = units(v)[0]
        try:
            return show(v) if v[0] in ("num", "sym") else f"{residue(v, [True]):x}"
        except ZeroDivisionError:
            return show(v)
    parts = [key(x) if isinstance(x, tuple) else str(x) for x in v[1:]]
    return f"{v[0]}({'; '.join(sorted(set(parts)) if v[0] in ('set', 'or', 'rel', 'union') else parts)})"


# -------------------------------------------------------------------------------------------------------------------
# The command line.

def explain(gold, response):
    answer = extract_answer(response)
    for label, text in (("gold", gold), ("answer", answer)):
        if text is not None:
            value, problem = read(text)
            begin()
            print(f"{label:<10}{text!a}  read as  {ascii(show(value))}  ({problem or kind_of(value)})")
    if answer is None:
        print("verdict   wrong: no balanced box, no answer line, or nothing in it (stage: extract)")
        return
    verdict, stage, why = decide(answer, gold)
    name = "the gold is unreadable" if verdict is None else "correct" if verdict else "wrong"
    print(f"verdict   {name}: {why} (stage: {stage})")


def rows_of(path):
    """(gold, responses, labels or None, id) per row; the first bad row ends the program with a line that names it."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().removesuffix("\n").split("\n")         # not splitlines: texts may hold U+2028
    except (OSError, UnicodeDecodeError) as problem:
        fail(f"{path}: can't be read ({problem}); give a JSONL file")
    rows = []
    for n, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as problem:
            fail(f"{path}:{n}: not JSON ({problem.msg}); each line is one object")
        texts = row.get("responses", [row.get("response")]) if isinstance(row, dict) else None
        if not isinstance(texts, list) or "answer" not in row or not all(isinstance(t, str) for t in texts):
            fail(f'{path}:{n}: each row needs "answer" (the gold) and "response" (a text) or "responses" (a list)')
        rows.append((row["answer"], texts, row.get("correct"), row.get("id", f"line {n}")))
    return rows


def fail(message):
    print(f"verify.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def score(path, workers, time_limit):
    from tqdm import tqdm
    rows, right, total, agree, labels = rows_of(path), 0, 0, 0, 0
    with tqdm(total=sum(len(r[1]) for r in rows), unit=" responses", disable=None) as bar:
        for k in range(0, len(rows), 64):
            part = [(text, gold, qid) for gold, texts, _, qid in rows[k:k + 64] for text in texts]
            texts, golds, ids = map(list, zip(*part, strict=True)) if part else ([], [], [])
            verdicts = verify_batch(texts, golds, workers, time_limit, ids)
            given = [x for _, texts, correct, _ in rows[k:k + 64] for x in (correct or [None] * len(texts))]
            right, total = right + verdicts.count(True), total + len(verdicts)
            labels += sum(x is not None for x in given)
            agree += sum(x is not None and x == bool(v) for x, v in zip(given, verdicts, strict=True))
            bar.update(len(verdicts))
    print(f"{'reason':<40}{'responses':>10}")
    for kind, n in shared(workers, time_limit).counts.most_common():
        print(f"{kind:<40}{n:>10}")
    print(f"{right} of {total} correct" + (f"; {agree} of {labels} labels agree" if labels else ""))


def main():
    p = argparse.ArgumentParser(
        description="Is the final answer of a response equal to the gold answer?",
        epilog=r"""examples: python verify.py "\frac{1}{2}" "so \boxed{0.5}"   or   python verify.py responses.jsonl""")
    p.add_argument("gold", help="the gold answer; or alone, a JSONL file of rows with answer and response or responses")
    p.add_argument("response", nargs="?", help="the whole response, with its box or answer line")
    p.add_argument("--workers", type=int, default=2, help="processes for the numeric stage (2)")
    p.add_argument("--time_limit", type=float, default=1.0, help="seconds for one pair there (1.0)")
    args = p.parse_args()
    if args.response is None:
        score(args.gold, args.workers, args.time_limit)
    else:
        explain(args.gold, args.response)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
