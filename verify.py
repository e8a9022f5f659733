"""Does the final answer of a response equal the gold answer?  The reward of the whole project is this file.

    python verify.py "<gold>" "<response>"      what was extracted, how both sides were read, which stage decided, why
    python verify.py responses.jsonl            score a file of {"answer": gold, "response": text} rows, table by reason

    extract_answer(response) -> str | None      is_equiv(answer, gold) -> bool      is_correct(response, gold) -> bool
    verify_batch(responses, golds, workers=2, time_limit=1.0) -> list[bool | None]  None: leave this question out
    Verifier(workers, time_limit): the same with .counts (by kind) and .close();    canonical(answer): key for maj@k

Stages, each only for what the one before left open:
  1 extract   the last balanced \\boxed{} or \\fbox{}, else the last line `Answer: ...`; nothing else is an answer.
  2 string    the two texts are the same once wrappers, Unicode spellings and spaces are normalised.
  3 exact     a small parser of our own (LaTeX and plain notation) builds a tree and folds rationals as it goes, the size
              of a result bounded before it is computed; values of different types are never equal.
  4 residue   rational expressions in symbols, i, pi, e and square roots of integers map to a 300-bit prime field. A ring
              homomorphism keeps equalities, so a residue other than 0 proves "different"; a chance 0 has probability
              below 2^-200 (taking pi and e as algebraically independent; literals over 250 bits go on to stage 5).
  5 numeric   the rest (trig, logs, cube roots, nested radicals): ball arithmetic with mpmath, every value with a bound of
              its error. "Different" is decided only where the difference exceeds its bound; "equal" when it doesn't at 30
              points with 60 digits, nor at 3 to 5 of them with 200 + 2 * (digits in the literals) and a bound below
              10^-100 (relative, or 10^-(100 + digits) absolute). Runs in a worker process.

No model text reaches eval, sympify or a LaTeX library; sympy isn't needed at all. All stages do bounded work by
construction, counted in steps and not in seconds, so that a verdict depends on nothing but the two texts; stage 5 also has
a memory limit, and its process is killed and replaced when over its time. Undecided is "not correct" and counted: limits
exceeded, towers of powers, functions that aren't in the table, sums, integrals, limits, equations solved on one side only
(x^2 = 4 against x = 2 or x = -2), |x| < 2 against -2 < x < 2, an order of irrational interval ends. A gold that can't be
read gives None and is reported once; one beyond the parser (an integral) is read as text and matched whole.

Conventions chosen where usage differs:
  - symbols are real; an identity must hold wherever both sides are defined as real functions, so sqrt(1/n) = 1/sqrt(n),
    sqrt(x^2) = |x|, but sqrt(x^2) != x. `log` without base may be base e or 10, the same on both sides.
  - unreduced fractions and arithmetic left undone equal their value (2+3 is 5); 28\\% is 28, never 0.28; degrees are never
    radians; no unit conversion: units on one side are ignored, on both sides they must be the same.
  - words compare without case, single letters with case; scaled equations are equal, an inequality equals its interval.
  - a box beats an Answer line; "the answer is 42" is not an answer line; boxes joined by "or", "and" or "," are a list.
  - an equation with two different names (x = 5, y = 5) differs; \\{5\\} is the value 5; \\sqrt2 \\approx 1.41 is no answer.
"""
import argparse
import atexit
import json
import math
import os
import random
import re
import selectors
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter, deque
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import product

# Limits: each is checked before the work it bounds is begun.
MAX_CHARS = 4096                # of an answer
MAX_TOKENS = 1500               # of an answer, once split
MAX_DEPTH = 25                  # nesting in the parser (8 Python frames a level: far from the recursion limit)
MAX_ITEMS = 60                  # of two lists, left to pair after the items that are the same are removed
INT_BITS = 20_000               # of a folded integer (2006! has 19,120); bigger results stay unevaluated
FRACTION_BITS = 3_000           # of both operands of a fraction operation: their gcd takes quadratic time
MAX_NODES, MAX_SIZE = 200, 400  # tree nodes, digits in the literals: of an expression in the numeric stage
MAX_WORK = 60_000               # steps (a few microseconds each) of reading one text, and of comparing one pair
WORKER_BYTES = 256 << 20        # address space of a worker process
BUDGET = threading.local()      # steps left: counted, not timed, so that the verdict is the same on any machine


class Unreadable(Exception):
    """Text this reader can't make a value of, or a pair it can't decide; the message is the kind that is counted."""


def spend(steps):
    BUDGET.left = getattr(BUDGET, "left", MAX_WORK) - steps
    if BUDGET.left < 0:
        raise Unreadable("limit")


class Hard(Exception):
    """Only the numeric stage can decide, and this process isn't a worker."""


# ---------------------------------------------------------------------------------------------------------------------
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
        words = re.sub(r"\\text(?:bf)?|\\mathbf|[\s#>*_`{(\"'$|-]", " ", lead[cut + 1:]).lower().split()
        if m and cut >= 0 and LEADS.issuperset(words):
            rest = text[m.end():m.end() + 2 * MAX_CHARS]
            line, _, more = rest.partition("\n")
            if line.strip(" \t\r*_`$") in ("", "\\[", "\\(") or line.count("\\begin") > line.count("\\end"):
                return re.split(r"\n[ \t\r]*\n", rest.lstrip("*_ \t\r\n"), maxsplit=1)[0]
            return line
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


# ---------------------------------------------------------------------------------------------------------------------
# Stage 2, one spelling: Unicode to LaTeX, then tokens.

SPELL = {"\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "\u00d7": r"\times ", "\u2715": r"\times ",
         "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u2022": r"\cdot ", "\u2217": "*",
         "\u00f7": r"\div ", "\u2215": "/", "\u2044": "/", "\u221a": r"\surd ", "\u221b": r"\cbrt ", "\u221e": r"\infty ",
         "\u2264": r"\le ", "\u2a7d": r"\le ", "\u2266": r"\le ", "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2267": r"\ge ",
         "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u222a": r"\cup ", "\u2229": r"\cap ",
         "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u2216": r"\setminus ", "\u00b0": r"\degree ", "\u00ba": r"\degree ",
         "\u2032": "'", "\u2248": r"\approx ", "\u2227": r"\land ", "\u2228": r"\lor ", "\u230a": r"\lfloor ",
         "\u230b": r"\rfloor ", "\u2308": r"\lceil ", "\u2309": r"\rceil ", "\u27e8": r"\langle ", "\u27e9": r"\rangle ",
         "\u2220": r"\angle ", "\u2223": "|", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}",
         "\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u00a0": r"\,", "\u2009": r"\,", "\u202f": r"\,",
         "\u2007": r"\,", "\u2008": r"\,", "\u2006": r"\,", "\u2005": r"\,", "\u200a": r"\,"}
SPELL = {ord(k): v for k, v in SPELL.items()} | dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u2061\u2062"))
SCRIPT = {ord(a): b for a, b in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ₀₁₂₃₄₅₆₇₈₉₍₎ₙ", "0123456789+-()nx0123456789()n", strict=True)}
GREEK = {c: "\\" + unicodedata.name(chr(c)).split()[3].lower().replace("lamda", "lambda") + " " for c in range(0x3b1, 0x3ca)
         if c != 0x3c2}
GREEK |= {c - 32: v[0] + v[1].upper() + v[2:] for c, v in GREEK.items()} | {0x3d5: r"\phi ", 0x3d1: r"\theta "}
NAMES = {v.strip("\\ ").lower() for v in GREEK.values()} - {"omicron"}


def latex(s):
    """ASCII for the Unicode spellings of mathematics (full-width, bold, superscript, vulgar fractions, Greek)."""
    if s.isascii():
        return s
    s = re.sub(r"((?:[0-9]\u0305)+)", lambda m: r"\overline{" + m[1].replace("\u0305", "") + "}", s)
    s = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ]+", lambda m: "^{" + m[0].translate(SCRIPT) + "}", s)
    s = re.sub("[₀-₉₍₎ₙ]+", lambda m: "_{" + m[0].translate(SCRIPT) + "}", s)
    s = re.sub("[\u00bc-\u00be\u2150-\u215e\u2189]",
               lambda m: r"\frac{%s}{%s}" % tuple(unicodedata.normalize("NFKC", m[0]).split("\u2044")), s)
    s = unicodedata.normalize("NFKC", s.translate(SPELL).replace("\uff5e", "~")).translate(SPELL).translate(GREEK)
    return s if len(s) <= 2 * MAX_CHARS else "\0"             # NFKC may expand a character eighteenfold


UNITS = {}                             # spelling -> one name
for _names in """cm cms centimeter centimeters centimetre centimetres|mm millimeter millimeters millimetre millimetres
m meter meters metre metres|km kilometer kilometers kilometre kilometres|in inch inches|ft foot feet|yd yard yards
mi mile miles|mph|s sec secs second seconds|min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months
yr year years|g gram grams|kg kilogram kilograms|mg milligram milligrams|lb lbs pound pounds|oz ounce ounces|ton tons
l L liter liters litre litres|ml mL milliliter milliliters|gal gallon gallons|deg degree degrees degs|rad radian radians
dollar dollars usd USD bucks|cent cents|euro euros EUR|gbp GBP|rs Rs rupee rupees|yuan|yen|% percent pct|Hz hertz
N newton newtons|J joule joules|W watt watts|V volt volts|K kelvin|kph|person people|child children|man men|woman women
fish|sheep|mice|geese|celsius|fahrenheit|Pa pascal pascals|cup cups|acre acres|unit units""".replace("\n", "|").split("|"):
    UNITS |= {_spelling: _names.split(" ")[0] for _spelling in _names.split()}
MONEY = {"\\$": "dollar", "\u20ac": "euro", "\u00a3": "gbp", "\u00a5": "yen", "\u20b9": "rs", "\u00a2": "cent"}
NOT_UNITS = set("""or and more less than least most about not million thousand hundred dozen billion trillion half squared
    cubed factorial to through between even odd except if when mod modulo plus minus times is are was as by millions thousands
    hundreds dozens billions trillions tens perhaps pairs halves thirds quarters fifths sixths eighths tenths hundredths ish
    maybe possibly at approximately roughly nearly almost over under up unless but nor versus vs otherwise depends no yes any
    others twos this does has always sometimes minutes-ish radians""".split())
FUNCTIONS = set("""sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln lg exp sqrt cbrt abs
    floor ceil max min gcd lcm surd cis""".split())
OPS = dict(zip("""times cdot ast div le leq leqslant ge geq geqslant lt gt ne neq in cup setminus backslash pm mp lbrace rbrace
    lvert rvert vert mid colon langle rangle lfloor rfloor lceil rceil land wedge lor vee choose over lbrack rbrack""".split(),
    r"""* * * / <= <= <= >= >= >= < > != != in cup setminus setminus pm mp \{ \}
    | | | : : <( )> lfloor rfloor lceil rceil and and or or choose over [ ]""".split(), strict=True))
IGNORED = set("""left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits
    nolimits quad qquad middle hline""".split())
WORDY = set("text textbf textit textrm textsf textnormal mathrm mathbf mathit mathsf mbox hbox operatorname emph".split())
WRAPPERS = WORDY | set("boxed fbox underline boldsymbol bm mathcal vec overrightarrow".split())
BASES = dict(zip("two three four five six seven eight nine ten eleven twelve sixteen".split(), [*range(2, 13), 16], strict=True))
TOKEN = re.compile(r"""
  (?P<space>(?:\s|~|\$|\\[ ,;:!>()\[\]])+)
| (?P<rep>[0-9]*\.[0-9]*\\(?:overline|bar|dot)\s*\{?[0-9]+\}?|[0-9]+\.\([0-9]+\))
| (?P<base>(?<![0-9A-Za-z])[0-9A-F]{1,64}\s?_(?:\{\s*\(?[0-9]{1,2}\)?\s*\}|[0-9]{1,2}))
| (?P<sci>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,12}(?![0-9A-Za-z.]))
| (?P<mixed>[0-9]+(?:\s|\\[ ,;])+[0-9]+\s*/\s*[0-9]+(?!\.?[0-9]))
| (?P<num>[0-9]+(?:\.[0-9]+|\.(?![0-9.]))?|\.[0-9]+)
| \\(?P<cmd>[A-Za-z]+)\*?
| (?P<op>\\\\(?:\[[0-9.]+[a-z]{2}\])?|\\[{}%$|]|\*\*|<=|>=|!=|==|[-+*/^_!()\[\]{}|,;=<>%:&'\u20ac\u00a3\u00a5\u20b9\u00a2])
| (?P<word>[A-Za-z]+)""", re.X)
THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:(?:\s|\\ )[0-9]{3})+)(?!,?[0-9]|\s*/)(?:\.[0-9]+)?")
PHRASE = re.compile(r"\s*([A-Za-z]+(?:[ .-]{1,2}(?!and\b|or\b)[A-Za-z]+){0,5})\.?\s*")
SUBSCRIPT = re.compile(r"'*(?:\s*_\s*(?:\{[^{}]{1,20}\}|[0-9]+|[A-Za-z]|\\[A-Za-z]+))?'*")
REWRITES = [(re.compile(a), b) for a, b in (
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\,|\\!|\\;)(?=[0-9]{3}(?![0-9]))", ""),                      # 10{,}000
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", r"\\degree "),
    (r"\\degree\s*(?:\\(?:text|mathrm|textrm)\s*\{\s*)?([CF])(?![A-Za-z])\s*\}?", r"\\degree \1"),
    (r"(?<=[0-9]) ?x ?(?=10 ?(?:\^|\*\*))", r"\\times "),
    (r"per cent\b", "percent"), (r"\\textdegree(?![a-z])", r"\\degree "), (r"\\pounds(?![a-z])", "\u00a3"),
    (r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![A-Za-z]))", "'"),
    (r"\s*(?:\\text\s*\{)?\s*\(?\s*(?:in )?\s*base[ -]?(?:\\text\{)?([0-9]+|[a-z]+)\s*\)?\s*\}?\s*\)?$", r"_{\1}"),
    (r"_\s*\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:base )?([0-9]+|[a-z]+)\s*\}?\s*\}$",
     lambda m: "_{%s}" % BASES.get(m[1], m[1])),
    (r"^\s*(?:\(|\\(?:text|mathrm)\s*\{)([0-9A-F]+)[)}]\s*_", r"\1_"),
    (r"^\s*(?:\\text\s*\{\s*)?(?:[Tt]he )?(?!(?:%s)\b)[A-Za-z][a-z]{3,}(?: [a-z]+){0,3}\s*\}?\s*="
     % "|".join(sorted(FUNCTIONS)), "name="))]                                               # Area = 12


def unit_tokens(words, loose):
    """Tokens of a unit phrase (`cm`, `square feet`, `miles per hour`, `red apples`); None when it isn't one."""
    out, power = [], 1
    for w in words:
        low = w if w in UNITS else w.lower()
        if low in ("square", "sq", "cubic", "cu"):
            power = 2 if low[0] == "s" else 3
        elif low == "per":
            out.append(("/", ""))
        elif low in ("squared", "cubed") and out:
            out += [("^", ""), ("num", "2" if low[0] == "s" else "3")]
        elif low in UNITS and (len(low) > 1 or loose):
            out.append(("unit", UNITS[low]))
            out += [("^", ""), ("num", str(power))] * (power > 1)
            power = 1
        else:
            break
    else:
        return out if power == 1 else None
    last = words[-1]                   # any other plural noun, unless a word may change the value (5 million, 5 or more)
    if last[-1:] == "s" and last[-2:] != "ss" and len(last) > 3 and all(w.islower() for w in words) \
            and not NOT_UNITS.intersection(words) and not (FUNCTIONS | {"pi"}).intersection(words):
        return [("unit", " ".join(words))]
    return None


class Tokens(list):
    """(kind, text) pairs of a text; an operator is its own kind. mode 1 reads 2e-1 as 2*e - 1 and log as base 10."""

    def __init__(self, text, mode=0):
        s = text
        for pattern, new in REWRITES:
            s = pattern.sub(new, s)
        self.text, self.mode, self.pos, self.stack = s, mode, 0, []
        self.depth, self.comma_space = 0, re.search(r",\s", s) is not None
        while self.pos < len(s):
            m = TOKEN.match(s, self.pos)
            if not m or len(self) > MAX_TOKENS:
                raise Unreadable("limit" if m else "character")
            self.pos = m.end()
            getattr(self, "on_" + m.lastgroup)(m)
        if self.stack:
            raise Unreadable("incomplete")
        self.append(("eof", ""))

    def put(self, kind, text=""):
        self.append((kind, text))

    def after_value(self):
        return self and self[-1][0] in ("num", "const", "unit", ")", "]", "}", "|", "sym")

    def on_space(self, m):
        pass

    def on_rep(self, m):
        whole, frac, cycle = re.fullmatch(r"([0-9]*)\.([0-9]*)[^0-9]*([0-9]+)\D?", m[0]).groups()
        if len(m[0]) > 60:
            raise Unreadable("limit")
        value = Fraction(int(whole + frac + cycle or 0) - int(whole + frac or 0), 10 ** len(frac) * (10 ** len(cycle) - 1))
        self.put("num", value)

    def on_base(self, m):
        digits, base = m[0].split("_")
        base = int(base.strip("{}() "))
        if 2 <= base <= 36 and any(c.isdigit() for c in digits) and all(int(c, 36) < base for c in digits.strip()):
            self.put("base", f"{digits.strip().lstrip('0') or '0'}_{base}")
        else:
            self.fallback(m)

    def fallback(self, m):             # the same place again, as a plain number or word
        self.pos = m.start()
        m = re.compile(r"(?P<num>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<word>[A-Za-z]+)").match(self.text, self.pos)
        self.pos = m.end()
        getattr(self, "on_" + m.lastgroup)(m)

    def on_sci(self, m):
        if self.mode and "e" in m[0]:
            return self.fallback(m)
        mantissa, power = re.split("[eE]", m[0])
        self += [("(", ""), ("num", mantissa), ("*", ""), ("num", "10"), ("^", ""), ("{", "")]
        self += [("-", "")] * (power[0] == "-") + [("num", power.lstrip("+-")), ("}", ""), (")", "")]

    def on_mixed(self, m):
        if THOUSANDS.match(self.text, m.start()):
            return self.fallback(m)
        whole, top, bottom = re.findall("[0-9]+", m[0])
        if len(m[0]) > 300 or int(top) >= int(bottom):
            raise Unreadable("syntax")
        self.put("num", int(whole) + Fraction(int(top), int(bottom)))

    def on_num(self, m):
        t = THOUSANDS.match(self.text, m.start())
        if len(m[0]) > 4000:           # int() refuses 4300 digits, which full-width text may still reach
            raise Unreadable("limit")
        if t and ("," not in t[0] or not self.depth or self.comma_space or ",0" in t[0]):
            self.pos = t.end()         # in brackets a comma separates, unless the others have a space or a group is 0xx
            return self.put("num", re.sub(r"[,\s\\]", "", t[0]))
        self.put("num", m[0])

    def on_op(self, m):
        op = m[0]
        if op[:2] == "\\\\":
            op = "\\\\"
        if op == "{":
            self.stack.append("{")
        elif op == "}":
            if not self.stack:
                raise Unreadable("incomplete")
            if self.stack.pop() != "{":
                return
        elif op in ("(", "[", "\\{"):
            self.depth += 1
        elif op in (")", "]", "\\}"):
            self.depth -= 1
        if op in ("%", "\\%") or op in MONEY:
            return self.put("unit", MONEY.get(op, "%"))
        self.put({"**": "^", "==": "=", "\\|": "|"}.get(op, op))

    def on_cmd(self, m):
        name, s = m["cmd"], self.text
        if name in OPS:
            op = OPS[name]
            self.depth += (op in ("\\{", "<(")) - (op in ("\\}", ")>"))
            self.put(op)
        elif name in IGNORED:
            self.pos += name in ("left", "right") and s[self.pos:self.pos + 1] == "."
        elif name in WRAPPERS:
            self.wrapper(name)
        elif name in ("frac", "dfrac", "tfrac", "cfrac", "sqrt", "binom", "dbinom", "tbinom"):
            self.put(name[-4:] if name[-4:] in ("frac", "sqrt") else "binom")
        elif name in ("pi", "infty"):
            self.put(*("const", "pi") if name == "pi" else ("inf", ""))
        elif name == "degree":
            scale = re.compile(r"\s*[CF]").match(s, self.pos)
            self.put("unit", "deg")
            if scale:
                self.pos = scale.end()
                self.put("unit", "celsius" if "C" in scale[0] else "fahrenheit")
        elif name in ("emptyset", "varnothing"):
            self += [("\\{", ""), ("\\}", "")]
        elif name in ("mathbb", "angle", "triangle", "overline", "bar", "hat", "tilde", "widehat"):
            inner = re.compile(r"\s*\{?\s*([A-Za-z]+)\s*\}?").match(s, self.pos)
            if not inner or inner[0].count("{") != inner[0].count("}"):
                raise Unreadable("syntax")
            self.pos = inner.end()
            self.put("reals" if name == "mathbb" and inner[1] == "R" else "sym", name + " " + inner[1])
        elif name in ("begin", "end"):
            env = re.compile(r"\s*\{([a-zA-Z*]+)\}(?:\s*\{[lcr| ]*\})?").match(s, self.pos)
            if not env:
                raise Unreadable("syntax")
            self.pos = env.end()
            self.put(name, env[1])
        elif name in FUNCTIONS or name in ("cbrt",):
            self.put("fn", name)
        elif name.lower().removeprefix("var") in NAMES or name in ("ell",):
            self.symbol(name.removeprefix("var"))
        else:
            raise Unreadable("command")

    def wrapper(self, name):
        """`\\text{...}` and the like: a unit phrase, or its content with the braces dropped."""
        brace = re.compile(r"\s*\{").match(self.text, self.pos)
        if not brace:
            return
        phrase = PHRASE.match(self.text, brace.end())
        if phrase and name in WORDY and self.text[phrase.end():phrase.end() + 1] == "}":
            units = unit_tokens(re.split("[ .-]+", phrase[1]), True)
            if units is not None and (self.after_value() or self and self[-1][0] in "{/" and phrase[1] in UNITS):
                self += units
                self.pos = phrase.end() + 1
                return
        self.pos = brace.end()
        self.stack.append("text" if name in WORDY else "wrap")

    def on_word(self, m):
        w, s, low = m[0], self.text, m[0].lower()
        textual = "text" in self.stack
        spaced = s[m.start() - 1:m.start()] in (" ", "~", "}", ",") or textual
        over = self and self[-1][0] in ("/", "*") and any(t[0] == "unit" for t in self[-8:])      # km/h
        counted = self.after_value() and self[-1][0] != "sym" and (spaced or len(w) > 1 and self[-1][0] == "num")
        phrase = PHRASE.match(s, m.start())
        if (over or counted) and low not in ("and", "or") and not (self[-1][0] == "const" and low in ("hr", "mi", "rs")):
            units = unit_tokens(re.split("[ .-]+", phrase[1]), spaced or over)
            if units is not None and (low != "in" or s[phrase.end():phrase.end() + 1] in ("", "^", ",", "}")):
                self += units
                self.pos = phrase.end()
                return
        if low in ("and", "or", "in"):
            self.put(low)
        elif low in ("infinity", "infty", "inf", "oo"):
            self.put("inf")
        elif w in ("U", "union", "cup") and self and self[-1][0] in (")", "]", "\\}") and re.match(r"[ \\]*[(\[{l]", s[m.end():]):
            self.put("cup")
        elif low == "pi":
            self.put("const", "pi")
        elif w in FUNCTIONS:
            self.put("fn", w)
        elif w in UNITS and UNITS[w] in MONEY.values() and not self:
            self.put("unit", UNITS[w])
        elif low in NAMES and len(w) > 2:
            self.symbol(w)
        elif not textual and (run := re.fullmatch("(sin|cos|tan|ln|log|sqrt|pi)([a-z]{1,2})", w)):     # sinx, 2pir
            self.put(*("const", "pi") if run[1] == "pi" else ("fn", run[1]))
            for c in run[2]:
                self.symbol(c)
        elif len(w) > 3 and w != "name" or len(w) > 1 and textual:
            self.put("word", w)
        elif w == "name":
            self.put("sym", w)
        else:
            for c in w[:-1]:
                self.put(*("const", c) if c in "ei" else ("sym", c))
            self.symbol(w[-1])

    def symbol(self, name):
        m = SUBSCRIPT.match(self.text, self.pos)
        self.pos = m.end()
        tail = re.sub(r"\\(?:text|mathrm)|[\s{}\\]", "", m[0])
        self.put(*("const", name) if name in "ei" and not tail else ("sym", name + tail))


# ---------------------------------------------------------------------------------------------------------------------
# Stage 3, exact: expression trees. ("num", Fraction) ("sym", name) ("const", pi|e|i) ("inf", sign) ("unit", name)
# ("pm", which) ("add", ...) ("mul", ...) ("pow", base, exponent) ("fn", name, ...). Constructors fold rationals.

def num(x):
    return ("num", Fraction(x))


ZERO, ONE, MINUS, TWO, HALF, I = num(0), num(1), num(-1), num(2), num(Fraction(1, 2)), ("const", "i")
INFINITE = ("inf", 1)


def bits(q):
    return q.numerator.bit_length() + q.denominator.bit_length()


def small(p, q):
    """May p and q be added or multiplied? Integers up to INT_BITS; a gcd of two big numbers costs too much."""
    low, high = sorted((bits(p), bits(q)))
    return high <= FRACTION_BITS or high <= INT_BITS and (p.denominator == q.denominator == 1 or low <= 200)


def add(*terms):
    total, rest = Fraction(0), []
    spend(len(terms))
    for t in (u for t in terms for u in (t[1:] if t[0] == "add" else (t,))):
        if t[0] == "inf" and len(terms) > 1:
            raise Unreadable("undefined")
        if t[0] == "num" and small(total, t[1]):
            total += t[1]
        else:
            rest.append(t)
    rest += [("num", total)] if total or not rest else []
    return rest[0] if len(rest) == 1 else ("add", *rest)


def mul(*factors):
    total, rest = Fraction(1), []
    spend(sum(len(t) - 1 if t[0] == "mul" else 1 for t in factors))
    for t in (u for t in factors for u in (t[1:] if t[0] == "mul" else (t,))):
        if t[0] == "num" and small(total, t[1]):
            total *= t[1]
        else:
            rest.append(t)
    if any(t[0] == "inf" for t in rest):
        if len(rest) > 1 or not total:
            raise Unreadable("undefined")
        return ("inf", rest[0][1] if total > 0 else -rest[0][1])
    if total == 0:
        return ZERO
    rest = ([("num", total)] if total != 1 or not rest else []) + rest
    return rest[0] if len(rest) == 1 else ("mul", *rest)


def neg(t):
    return mul(MINUS, t)


def inverse(t):
    return power(t, MINUS)


def root(n, k):
    """The exact k-th root of n >= 0, or None."""
    if k == 2:
        r = math.isqrt(n)
    elif n.bit_length() > 2000 or k > 64:
        return None
    else:
        low, high = 0, 1 << (n.bit_length() // k + 1)
        while low < high:              # at most 1000 halvings
            r = (low + high + 1) // 2
            low, high = (r, high) if r ** k <= n else (low, r - 1)
        r = low
    return r if r ** k == n else None


def power(base, e):
    spend(1)
    if base[0] == "inf":
        raise Unreadable("undefined")
    if e == ZERO and base != ZERO:
        return ONE
    if e == ONE or base == ONE:
        return base
    if base[0] == e[0] == "num":
        b, q = base[1], e[1]
        if b == 0:
            if q <= 0:
                raise Unreadable("undefined")
            return ZERO
        if b < 0 and q.denominator % 2:                        # odd roots of negative numbers are the real ones
            if q.denominator > 1:
                return mul(power(MINUS, num(q.numerator % 2)) if q.numerator % 2 else ONE, power(num(-b), e))
        elif b < 0 and q.denominator == 2:
            return mul(power(I, num(q.numerator % 4)), power(num(-b), e))
        if q.denominator == 1 and abs(q) * bits(b) <= INT_BITS:
            return ("num", b ** int(q))
        if q.denominator > 1 and b > 0 and bits(b) <= INT_BITS:
            top, bottom = root(b.numerator, q.denominator), root(b.denominator, q.denominator)
            if top and bottom:
                return power(num(Fraction(top, bottom)), num(q.numerator))
    if base == I and e[0] == "num" and e[1].denominator == 1:
        return (ONE, I, MINUS, neg(I))[int(e[1] % 4)] if base[0] == "const" and e != ONE else base
    if base[0] == "mul" and e[0] == "num" and e[1].denominator == 1:
        return mul(*(power(f, e) for f in base[1:]))
    return ("pow", base, e)


def func(name, *args):
    """A function of the table; names that are others in disguise are rewritten, rational cases folded."""
    x = args[0]
    if len(args) != (2 if name == "binom" else 1) and name not in ("max", "min", "gcd", "lcm"):
        raise Unreadable("arguments")
    if name in ("sin", "cos", "tan", "cot", "sec", "csc"):
        x = walk(x, lambda t: mul(("const", "pi"), num(Fraction(1, 180))) if t == ("unit", "deg") else t)
        if x == ZERO:
            return func_zero(name)
        sin, cos = ("fn", "sin", x), ("fn", "cos", x)
        return {"sin": sin, "cos": cos, "tan": mul(sin, inverse(cos)), "cot": mul(cos, inverse(sin)), "sec": inverse(cos),
                "csc": inverse(sin)}[name]
    if name == "cis":
        return add(func("cos", x), mul(I, func("sin", x)))
    if name in ("sinh", "cosh", "tanh"):
        up, down = power(("const", "e"), x), power(("const", "e"), neg(x))
        s, c = add(up, neg(down)), add(up, down)
        return mul(s, HALF) if name == "sinh" else mul(c, HALF) if name == "cosh" else mul(s, inverse(c))
    if name in ("sqrt", "surd", "cbrt", "exp"):
        return power(("const", "e"), x) if name == "exp" else power(x, num(Fraction(1, 3)) if name == "cbrt" else HALF)
    if name in ("ln", "log", "lg"):
        if x == ZERO:
            raise Unreadable("undefined")
        natural = ZERO if x == ONE else ONE if x == ("const", "e") else ("fn", "ln", x)
        return natural if name == "ln" else mul(natural, inverse(("fn", "ln", num(10))))
    if all(a[0] == "num" for a in args):
        values = [a[1] for a in args]
        whole = all(v.denominator == 1 for v in values)
        v = values[0]
        if name in ("abs", "floor", "ceil"):
            return num({"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](v))
        if name in ("max", "min"):
            return num(max(values) if name == "max" else min(values))
        if name in ("gcd", "lcm") and whole and len(values) < 20:
            return num((math.gcd if name == "gcd" else math.lcm)(*map(int, values)))
        if name == "!" and whole and 0 <= v <= 2100:
            spend(int(v))
            return num(math.factorial(int(v)))
        if name == "binom" and whole and 0 <= v <= 2000 and values[1] >= 0:
            spend(int(v))
            return num(math.comb(int(v), int(values[1])))
        if name == "!" and (not whole or v < 0):
            raise Unreadable("undefined")
    if name == "binom":
        k = args[1]
        if k[0] == "num" and 0 <= k[1] <= 30 and k[1].denominator == 1:
            spend(20 * int(k[1]))
            terms = [add(x, num(-j)) for j in range(int(k[1]))]
            return mul(num(Fraction(1, math.factorial(int(k[1])))), *terms)
        return mul(func("!", x), inverse(mul(func("!", k), func("!", add(x, neg(k))))))
    if name in ("gcd", "lcm"):
        raise Unreadable("arguments")
    return ("fn", {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name), *args)


def func_zero(name):
    if name in ("cot", "csc"):
        raise Unreadable("undefined")
    return ZERO if name in ("sin", "tan") else ONE


BUILD = {"add": add, "mul": mul, "pow": power, "fn": func}


def walk(v, f):
    """A value with f applied to its leaves, expressions folded anew."""
    spend(1)
    if v[0] in BUILD:
        return BUILD[v[0]](*(x if isinstance(x, str) else walk(x, f) for x in v[1:]))
    if v[0] in ("num", "sym", "const", "inf", "unit", "pm"):
        return f(v)
    return tuple(walk(x, f) if isinstance(x, tuple) and x and isinstance(x[0], str) else x for x in v)


def leaves(v):
    if v[0] in ("num", "sym", "const", "inf", "unit", "pm"):
        yield v
    else:
        for x in v[1:]:
            if isinstance(x, tuple) and x:
                yield from leaves(x)


def symbols(v):
    return sorted({x[1] for x in leaves(v) if x[0] == "sym"})


def show(v):
    """A value as text with sums and products in a fixed order: for people, and equal for equal trees."""
    if not isinstance(v, tuple):
        return str(v)
    spend(1)
    tag, rest = v[0], v[1:]
    if tag == "num":
        q = v[1]
        return str(q) if bits(q) < 1000 else f"{q.numerator:#x}/{q.denominator:#x}"
    if tag in ("sym", "const", "unit", "text", "base"):
        return v[1] if tag != "unit" else f"[{v[1]}]"
    if tag == "inf":
        return "-oo" if v[1] < 0 else "oo"
    if tag in ("add", "mul"):
        return "(" + {"add": " + ", "mul": "*"}[tag].join(sorted(map(show, rest))) + ")"
    if tag == "pow":
        return f"{show(v[1])}^{show(v[2])}"
    if tag == "fn":
        return f"{v[1]}({', '.join(map(show, v[2:]))})"
    if tag == "int":
        return f"{'(['[v[3]]}{show(v[1])}, {show(v[2])}{')]'[v[4]]}"
    return f"{tag}{{{', '.join(sorted(map(show, rest)) if tag in ('set', 'or', 'rel', 'union') else map(show, rest))}}}"


EXPRESSION = {"num", "sym", "const", "inf", "unit", "pm", "add", "mul", "pow", "fn"}


def scalar(v):
    if v[0] not in EXPRESSION:
        raise Unreadable("type")
    return v


# ---------------------------------------------------------------------------------------------------------------------
# The parser, recursive descent over the tokens. Values beyond expressions: ("set", ...) ("tuple", ...) ("vec", ...)
# ("mat", row, ...) ("union", ("int", low, high, low closed, high closed), ...) ("rel", (op, left, right), ...)
# ("or", ...) ("eq", left, right, name) ("in", element, set) ("ratio", ...) ("base", digits) ("text", words).

SIGNS = {"+": 1, "-": -1, "pm": 1, "mp": -1}
SEPARATORS = (",", ";", "and", "or")
RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "in")
BEFORE_UNIT = {"num", "sym", "const", "unit", ")", "]", "}", "|", "!", "/", "*"}
CLOSERS = {"(": (")", "]"), "[": (")", "]"), "<(": (")>",)}
STARTS = set("num base sym const inf unit fn frac sqrt binom ( [ { | lfloor lceil begin <(".split())
NAME = re.compile(r"s(\^(\{-n\}|-n|\{\(n\)\}))?(\([sn](,[sn])*\))?|S+|\|S+\||\(s(,s)+\)")


class Parser:
    def __init__(self, text, mode=0):
        self.toks, self.mode = Tokens(text, mode), mode
        self.i = self.depth = self.bars = self.pms = 0
        self.tied = any(t[0] == "mp" for t in self.toks)

    @property
    def kind(self):
        return self.toks[self.i][0]

    def take(self, kind=None):
        tok = self.toks[self.i]
        if kind and tok[0] != kind:
            raise Unreadable("incomplete" if tok[0] == "eof" else "syntax")
        self.i += tok[0] != "eof"
        return tok

    def enter(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("depth")

    def whole(self):
        v = collect(*self.items(True))
        self.take("eof")
        return v

    def items(self, expand):
        """Elements and the separators between them, up to whatever closes the list."""
        found, seps = [], set()
        while True:
            v = self.relation()
            found += signs(v) if expand else [v]
            if self.kind not in SEPARATORS:
                return found, seps
            seps.add(self.take()[0])
            if self.kind in ("and", "or"):                     # ", and"
                seps.add(self.take()[0])

    def relation(self):
        start = self.i
        sides, ops = [self.union()], []
        if self.kind == ":" and sides[0][0] == "num":
            while self.kind == ":":
                self.take()
                sides.append(scalar(self.union()))
            return ("ratio", *sides)
        name = self.name(start, self.i) if self.kind == "=" else None
        while self.kind in RELATIONS:
            ops.append(self.take()[0])
            sides.append(self.union())
        if not ops:
            return sides[0]
        if set(ops) == {"="}:
            return equation(sides, name)
        if ops == ["in"]:
            region = as_region(sides[1]) if sides[1][0] != "set" else sides[1]
            return region if region and sides[0][0] == "sym" else ("in", sides[0], sides[1])
        if "=" in ops or "in" in ops:
            raise Unreadable("syntax")
        pairs = zip(ops, map(scalar, sides), map(scalar, sides[1:]))
        pairs = [(op.replace(">", "<"), b, a) if op[0] == ">" else (op, a, b) for op, a, b in pairs]
        return ("rel", *([p for p in pairs if p[1] != neg(INFINITE) and p[2] != INFINITE] or pairs))

    def name(self, start, end):
        """What the left of `=` names: the symbol, "*" for f(x), AB and the like, None when it is no name."""
        toks = self.toks[start:end]
        kinds = {"sym": "s", "num": "n"}
        letters = len(toks) > 1 and toks[1][0] != "("          # AB, but f(x)
        shape = "".join("S" if k == "sym" and letters and t.isupper() else kinds.get(k, k) for k, t in toks)
        if shape == "s":
            return toks[0][1] if toks[0][1][:5] not in ("name", "angle", "trian", "overl") else "*"
        return "*" if NAME.fullmatch(shape) else None

    def union(self):
        left = self.sum()
        while self.kind in ("cup", "setminus") or self.kind == "-" and left[0] == "union":
            op = self.take()[0]
            a, b = as_region(left), as_region(self.sum())
            if not a or not b:
                raise Unreadable("type")
            left = ("union", *a[1:], *b[1:]) if op == "cup" else without(a, b)
        return left

    def sum(self):
        terms = []
        while True:
            sign = ONE
            while self.kind in SIGNS:
                k = self.take()[0]
                sign = mul(sign, num(SIGNS[k]))
                if k in ("pm", "mp"):
                    sign = mul(sign, ("pm", 0 if self.tied else self.pms))
                    self.pms += 1
            t = self.product()
            if t[0] not in EXPRESSION:
                if terms or sign != ONE and t[0] != "mat":
                    raise Unreadable("type")
                return t if sign == ONE else scale(sign, t)
            terms.append(mul(sign, t))
            if self.kind not in SIGNS:
                return add(*terms)

    def product(self):
        factors = [self.powers()]
        while True:
            if self.kind in ("*", "/"):
                op, sign = self.take()[0], ONE
                while self.kind in ("+", "-"):
                    sign = sign if self.take()[0] == "+" else neg(sign)
                f = mul(sign, scalar(self.powers()))
                factors.append(f if op == "*" else inverse(f))
            elif self.kind in STARTS and not (self.kind == "|" and self.bars) and \
                    (self.kind != "num" or len(factors) == 1 and factors[0][0] == "unit" and factors[0][1] in MONEY.values()):
                factors.append(self.powers())
            else:
                break
        if len(factors) == 1:
            return factors[0]
        others = [f for f in factors if f[0] == "mat"]
        if others:
            if len(others) > 1:
                raise Unreadable("type")
            return scale(mul(*(scalar(f) for f in factors if f[0] != "mat")), others[0])
        return mul(*map(scalar, factors))

    def powers(self):
        base, marks = self.primary(), 0
        while self.kind in ("^", "!"):
            marks += 1
            if marks > 4:
                raise Unreadable("depth")
            if self.take()[0] == "!":
                base = func("!", scalar(base))
            else:
                e = self.exponent()
                base = power(scalar(base), e)
        return base

    def exponent(self):
        self.enter()
        sign = ONE
        while self.kind in ("+", "-"):
            sign = sign if self.take()[0] == "+" else neg(sign)
        e = scalar(self.primary())
        if self.kind == "^":
            self.take()
            e = power(e, self.exponent())
        self.depth -= 1
        return mul(sign, e)

    def primary(self):
        self.enter()
        kind, text = self.take()
        if kind == "num":
            v = self.mixed(text) if self.kind == "frac" and isinstance(text, str) and text.isdigit() else num(text)
        elif kind in ("sym", "const", "unit"):
            v = (kind, text)
            if kind == "unit" and (self.i < 2 or self.toks[self.i - 2][0] not in BEFORE_UNIT) and not (
                    self.kind in STARTS and text in MONEY.values()) and not (self.i > 1 and text not in ("%", "deg")):
                raise Unreadable("syntax")                     # a unit of nothing would be worth 1
            if kind == "sym" and text.rstrip("'")[:1] in tuple("fghFG") and len(text.rstrip("'")) == 1 and self.kind == "(":
                self.take()
                args, _ = self.items(False)
                self.take(")")
                v = ("sym", f"{text}({', '.join(map(show, args))})")
        elif kind == "inf":
            v = INFINITE
        elif kind == "base":
            v = ("base", text)
        elif kind == "reals":
            v = ("union", ("int", neg(INFINITE), INFINITE, False, False))
        elif kind == "fn":
            v = self.function(text)
        elif kind in CLOSERS:
            v = self.bracket(kind)
        elif kind == "{":
            v = self.group()
        elif kind == "\\{":
            v = self.braces()
        elif kind in ("|", "lfloor", "lceil"):
            saved, self.bars = self.bars, kind == "|"
            v = func({"|": "abs", "lfloor": "floor", "lceil": "ceil"}[kind], scalar(self.sum()))
            self.bars = saved
            self.take(kind.replace("l", "r", 1) if kind != "|" else "|")
        elif kind == "frac":
            top = self.argument()
            v = mul(top, inverse(self.argument()))
        elif kind == "binom":
            top = self.argument()
            v = func("binom", top, self.argument())
        elif kind == "sqrt":
            v = self.root()
        elif kind == "begin":
            v = self.matrix(text)
        else:
            raise Unreadable({"eof": "incomplete", "}": "incomplete", "word": "words"}.get(kind, "syntax"))
        self.depth -= 1
        return v

    def mixed(self, whole):
        """`2\\frac{1}{2}`: digits only and a proper fraction is a mixed number; any other fraction is a factor."""
        start = self.i
        v = self.primary()
        body = [t for k, t in self.toks[start + 1:self.i] if k not in ("{", "}")]
        if not all(isinstance(t, str) and t.isdigit() for t in body) or v[0] != "num":
            return mul(num(whole), v)
        if not 0 < v[1] < 1:
            raise Unreadable("syntax")
        return add(num(whole), v)

    def argument(self):
        """The argument of a TeX command: a group, or one digit of a number, or one symbol."""
        kind, text = self.toks[self.i]
        if kind == "num" and isinstance(text, str) and len(text) > 1:
            if len(text) > 2 or not text.isdigit():
                raise Unreadable("syntax")
            self.toks[self.i] = (kind, text[1:])
            return num(text[0])
        if kind in ("unit", "|"):
            raise Unreadable("syntax")
        return scalar(self.primary())

    def root(self):
        index = TWO
        if self.kind == "[":
            self.take()
            index = scalar(self.sum())
            self.take("]")
        if self.kind == "num" and len(str(self.toks[self.i][1])) > 1:
            raise Unreadable("syntax")                         # \sqrt12: root of 1 or of 12?
        return power(scalar(self.primary()), inverse(index))

    def group(self):
        saved, self.bars = self.bars, 0
        found, seps = self.items(False)
        if self.kind in ("choose", "over"):
            op = self.take()[0]
            below = scalar(self.sum())
            above = scalar(collect(found, seps))
            found, seps = [func("binom", above, below) if op == "choose" else mul(above, inverse(below))], set()
        self.take("}")
        self.bars = saved
        return collect(found, seps)

    def braces(self):
        """A set. `\\{x \\mid x > 3\\}` is its condition."""
        saved, self.bars = self.bars, 0
        v = ("set",)
        if self.kind != "\\}":
            found, seps = self.items(True)
            if self.kind == ":" and len(found) == 1 and found[0][0] in ("sym", "in", "union"):
                self.take()
                v = collect(*self.items(True))
                if v[0] not in ("rel", "or", "union"):
                    raise Unreadable("syntax")
            else:
                v = ("set", *found)
        self.take("\\}")
        self.bars = saved
        return v

    def bracket(self, opening):
        saved, self.bars = self.bars, 0
        found, seps = self.items(False)
        closer = self.take()[0]
        self.bars = saved
        if closer not in CLOSERS[opening] or {"and", "or"} & seps:
            raise Unreadable("incomplete" if closer == "eof" else "syntax")
        if len(found) == 1:
            if (opening, closer) in (("(", "]"), ("[", ")")):
                raise Unreadable("syntax")
            return found[0] if opening != "<(" else ("tuple", *found)
        if opening == "(" and closer == ")" or opening == "<(":
            return ("tuple", *found)
        if len(found) == 2 and all(v[0] in EXPRESSION for v in found) and not less(found[1], found[0]):
            return ("union", ("int", *found, opening == "[", closer == "]"))
        if opening != "[" or closer != "]":
            raise Unreadable("syntax")
        rows = [("row", *(v[1][1:3] if v[0] == "union" else v[1:])) for v in found if v[0] in ("vec", "union")]
        if len(rows) == len(found) and len({len(r) for r in rows}) == 1:
            return ("mat", *rows)
        return ("vec", *found)

    def function(self, name):
        e, base = None, None
        while self.kind == "^" or self.kind == "sym" and self.toks[self.i][1].startswith("_"):
            self.take()
            e = self.exponent()
        if self.kind == "_":
            self.take()
            whole = self.kind == "num" and self.toks[self.i + 1][0] in STARTS              # \log_10 x, but \log_23
            base = num(self.take()[1]) if whole else self.argument()
            if self.kind == "^":
                self.take()
                e = self.exponent()
        if self.kind in ("(", "{"):
            closer = {"(": ")", "{": "}"}[self.take()[0]]
            saved, self.bars = self.bars, 0
            args = [scalar(v) for v in self.items(False)[0]]
            self.take(closer)
            self.bars = saved
        else:
            args = [self.operand(name)]
        if e == MINUS and name in ("sin", "cos", "tan"):
            name, e = "arc" + name, None
        if name == "log" and len(args) == 2:
            args, base = args[:1], args[1]
        if base is not None and name != "log":
            raise Unreadable("arguments")
        if base is not None:
            v = mul(func("ln", *args), inverse(func("ln", base)))
        else:
            v = func("ln" if name == "log" and not self.mode else name, *args)
        return v if e is None else power(v, e)

    def operand(self, name):
        """What a function without brackets takes: `\\sin 2x`, `\\ln\\sin x`, up to the next operator or function."""
        sign = ONE
        while self.kind in ("+", "-"):
            sign = sign if self.take()[0] == "+" else neg(sign)
        factors = []
        while not factors or self.kind in STARTS - {"fn", "num", "(", "["} and not (self.kind == "|" and self.bars):
            factors.append(scalar(self.powers()))
            if name in ("surd", "sqrt", "cbrt"):
                break
        return mul(sign, *factors)

    def matrix(self, env):
        if env not in ("matrix", "pmatrix", "bmatrix", "array", "smallmatrix", "Bmatrix"):
            raise Unreadable("environment")
        rows = [[]]
        while self.kind != "end" or self.toks[self.i][1] != env:
            if self.kind == "\\\\":
                self.take()
                rows.append([])
            elif rows[-1] and self.kind == "&" or not rows[-1]:
                if rows[-1]:
                    self.take()
                rows[-1].append(scalar(self.sum()))
            else:
                raise Unreadable("syntax")
        self.i += 1
        rows = [("row", *r) for r in rows if r]
        if len({len(r) for r in rows}) != 1:
            raise Unreadable("syntax")
        return ("mat", *rows)


def scale(k, matrix):
    return ("mat", *(("row", *(mul(k, x) for x in row[1:])) for row in matrix[1:]))


def signs(v):
    """The values a `\\pm` stands for. Several \\pm are independent; with a \\mp they go together."""
    which = sorted({x[1] for x in leaves(v) if x[0] == "pm"})
    if not which:
        return [v]
    if len(which) > 3 or v[0] == "rel":
        raise Unreadable("limit" if len(which) > 3 else "type")
    out = []
    for choice in product((ONE, MINUS), repeat=len(which)):
        sign = dict(zip(which, choice, strict=True))
        out.append(walk(v, lambda t, sign=sign: sign[t[1]] if t[0] == "pm" else t))
    return out


def equation(sides, name):
    """`a = b = c` stands for c (all its numbers must agree); `name = value` remembers the name."""
    if len(sides) > 2:
        if len({s for s in sides if s[0] == "num"}) > 1:
            raise Unreadable("type")
        return ("eq", sides[-1], sides[-1], name or "*")
    if name and name != "*" and sides[1][0] in EXPRESSION and name in symbols(sides[1]):
        name = None                    # x = 2x + 3 gives x no value
    return ("eq", *sides, name)


def collect(found, seps):
    """One value of a list: a single element is itself; inequalities join to a system or to alternatives."""
    if len(found) == 1:
        return found[0]
    if all(v[0] in ("rel", "or") for v in found):
        joined = ("rel", *(pair for v in found for pair in v[1:]))
        if "or" in seps or any(v[0] == "or" for v in found):
            return ("or", *found)
        if "and" not in seps and as_region(joined) == ("union",):
            return ("or", *found)      # x < 1, x > 3: nothing is both
        return joined
    return ("set", *found)


# ---------------------------------------------------------------------------------------------------------------------
# Equality by type. Different types are different; only relations and intervals, and one-element sets, are bridged.

def as_region(v):
    """Intervals, inequalities in one symbol and sets of points as a union of intervals; None for anything else."""
    if v[0] == "union":
        return merge(v[1:])
    if v[0] == "tuple" and len(v) == 3 and all(x[0] in EXPRESSION for x in v[1:]):
        if all(x[0] in ("num", "inf") for x in v[1:]) and not less(v[1], v[2]):
            return None
        return merge([("int", v[1], v[2], False, False)])
    if v[0] == "set" and all(x[0] == "union" for x in v[1:]):
        return merge([i for x in v[1:] for i in x[1:]])
    if v[0] == "set" and all(x[0] in EXPRESSION for x in v[1:]):
        return merge([("int", x, x, True, True) for x in v[1:]])
    if v[0] == "or":
        parts = [as_region(x) for x in v[1:]]
        return merge([i for p in parts for i in p[1:]]) if all(parts) and len({symbols(x)[0] for x in v[1:]}) == 1 else None
    if v[0] == "rel" and len(v) < 12:
        low, high, outs = (neg(INFINITE), False), (INFINITE, False), []
        names = {s for pair in v[1:] for x in pair[1:] for s in symbols(x)}
        if len(names) != 1:
            return None
        x = ("sym", names.pop())
        for op, a, b in v[1:]:
            if op == "!=" and x in (a, b):
                outs.append(b if a == x else a)
            elif a == x and (high[0] == INFINITE or less(b, high[0]) or b == high[0]) and not symbols(b):
                high = (b, op == "<=" and (b != high[0] or high[1]))
            elif b == x and (low[0] == neg(INFINITE) or less(low[0], a) or a == low[0]) and not symbols(a):
                low = (a, op == "<=" and (a != low[0] or low[1]))
            elif not (x in (a, b) and not symbols(b if a == x else a)):
                return solved(v, x)
        region = merge([("int", low[0], high[0], low[1], high[1])])
        return without(region, ("union", *(("int", p, p, True, True) for p in outs))) if outs else region
    return None


def solved(v, x):
    """Linear inequalities with rational coefficients, each solved for x; None for others."""
    pairs = []
    for op, a, b in v[1:]:
        d = add(a, neg(b))
        at = [walk(d, lambda t, k=k: num(k) if t == x else t) for k in (0, 1)]
        slope = add(at[1], neg(at[0]))
        if slope[0] != "num" or slope == ZERO or not linear(d, at[0], slope, x):
            return None
        bound = mul(neg(at[0]), inverse(slope))
        pairs.append((op, x, bound) if slope[1] > 0 else (op, bound, x))
    return as_region(("rel", *pairs)) if pairs != list(v[1:]) else None


def linear(d, constant, slope, x):
    try:
        return zero(d, add(constant, mul(slope, x)), False)
    except Hard:
        return False


def less(a, b):
    """a < b, where both are rational or infinite (else False: no order is claimed)."""
    if a[0] == b[0] == "num":
        return a[1] < b[1]
    return (a[0], b[0]) in (("inf", "num"), ("inf", "inf")) and a[1] < 0 and b != a or (a[0], b) == ("num", INFINITE)


def merge(intervals):
    """A union of intervals in canonical order, overlapping ones joined, where the ends are rational."""
    parts = []
    for i in intervals:
        _, low, high, lc, hc = i
        if low == high and not (lc and hc) or less(high, low):
            continue
        if i not in parts:
            parts.append(i)
    if len(parts) > MAX_ITEMS:
        raise Unreadable("limit")
    if not all(x[0] in ("num", "inf") for i in parts for x in i[1:3]):
        return ("union", *parts)
    value = {"num": lambda t: t[1], "inf": lambda t: t[1] * Fraction(10) ** 400}
    parts.sort(key=lambda i: (value[i[1][0]](i[1]), not i[3]))
    out = []
    for i in parts:
        last = out[-1] if out else None
        if last and (less(i[1], last[2]) or i[1] == last[2] and (i[3] or last[4])):
            if less(last[2], i[2]) or last[2] == i[2]:
                closed = i[4] or (last[4] and last[2] == i[2])
                out[-1] = ("int", last[1], i[2], last[3], closed)
        else:
            out.append(i)
    return ("union", *out)


def without(region, points):
    """region minus single points, cut where they lie in order; a single point cuts even when it isn't rational."""
    out = list(region[1:])
    for _, p, q, _, _ in points[1:]:
        if p != q:
            raise Unreadable("type")
        for i in out:
            if not (less(p, i[1]) or less(i[2], p)):
                inside = less(i[1], p) and less(p, i[2]) or i[1:3] == (neg(INFINITE), INFINITE)
                if not inside and p not in i[1:3]:
                    raise Unreadable("type")
                out.remove(i)
                out += [("int", i[1], p, i[3], False), ("int", p, i[2], False, i[4])]
                break
    return merge(out)


def kind_of(v):
    return "expression" if v[0] in EXPRESSION else v[0]


def same(g, a, deep):
    """Do gold value g and answer value a agree? Hard: only the numeric stage knows."""
    if g[0] == "set" and len(g) == 2:
        g = g[1]
    if a[0] == "set" and len(a) == 2:
        a = a[1]
    if g == a:
        return True
    if "eq" in (g[0], a[0]):
        return same_equation(g, a, deep)
    kg, ka = kind_of(g), kind_of(a)
    if kg == ka:
        if kg == "expression":
            return same_expression(g, a, deep)
        if kg in ("tuple", "vec", "ratio", "mat", "row", "in"):
            return len(g) == len(a) and all(same(x, y, deep) for x, y in zip(g[1:], a[1:], strict=True))
        if kg in ("set", "or") and same_bag(g[1:], a[1:], same, deep):
            return True
        if kg == "rel" and same_bag(g[1:], a[1:], same_inequality, deep):
            return True
        if kg in ("base", "text"):
            return g == a
    if {kg, ka} == {"set", "tuple"}:   # x = 2, y = 3 is the point (2, 3)
        g, a = (assigned(v) if v[0] == "set" else v for v in (g, a))
        return bool(g and a) and same(g, a, deep)
    if not {kg, ka} & {"union", "rel", "or"} or (kg == ka == "rel" and symbols(g) != symbols(a)):
        return False
    g, a = as_region(g), as_region(a)
    return bool(g and a) and same_bag(g[1:], a[1:], same_interval, deep)


def assigned(v):
    """The point a list of `name = value` gives, its names in alphabetical order; None for other lists."""
    names = {x[3]: x[2] for x in v[1:] if x[0] == "eq" and x[3] and x[3] != "*"}
    return ("tuple", *(names[n] for n in sorted(names))) if len(names) == len(v) - 1 > 1 else None


def same_interval(g, a, deep):
    return g[3:] == a[3:] and same_expression(g[1], a[1], deep) and same_expression(g[2], a[2], deep)


def same_bag(gs, answers, equal, deep):
    """Order-free: every element has an equal on the other side."""
    gs, answers = list(dict.fromkeys(gs)), list(dict.fromkeys(answers))
    left, right = [g for g in gs if g not in answers], [a for a in answers if a not in gs]
    if max(len(left), len(right)) > MAX_ITEMS:
        raise Unreadable("limit")
    if equal is same and len({n for x in gs + answers if x[0] == "eq" and (n := x[3]) != "*"}) > 1 and \
            not all(x[0] == "eq" for x in gs + answers):
        return False                   # x = 2, y = 3 isn't the list 2, 3
    return all(any(equal(g, a, deep) for a in answers) for g in left) and \
        all(any(equal(g, a, deep) for g in gs) for a in right)


def same_equation(g, a, deep):
    if g[0] == a[0] == "eq":
        names = {g[3], a[3]}
        if None not in names and (len(names) == 1 or "*" in names) and same(g[2], a[2], deep):
            return True
        if kind_of(g[1]) == kind_of(g[2]) == kind_of(a[1]) == kind_of(a[2]) == "expression":
            return ratio(add(g[1], neg(g[2])), add(a[1], neg(a[2])), deep) is not None
        return False
    named, other = (g, a) if g[0] == "eq" else (a, g)
    if named[3] is None:
        return False
    return same(named[2], a, deep) if named is g else same(g, named[2], deep)


def same_inequality(g, a, deep):
    """Relations (op, left, right), flips done: the differences must be in a constant ratio, positive where it matters."""
    if g[0] != a[0] or g == a:
        return g == a
    r = ratio(add(g[1], neg(g[2])), add(a[1], neg(a[2])), deep)
    return r is not None and (g[0] == "!=" or r[0] == "num" and r[1] > 0)


def ratio(g, a, deep):
    """The non-zero constant g / a as a tree, or None. It is read off at one point, then shown to hold everywhere."""
    if "inf" in (g[0], a[0]) or symbols(g) != symbols(a) or not symbols(g):
        return None
    for k in (2, 3, 5):                # a point where a isn't 0
        def at(t, k=k):
            return num(k + 3 * names.index(t[1])) if t[0] == "sym" else t
        names = symbols(g)
        try:
            ga, aa = walk(g, at), walk(a, at)
        except Unreadable:             # undefined at this point
            continue
        if zero(aa, ZERO, deep) or zero(ga, ZERO, deep):
            continue
        r = mul(ga, inverse(aa))
        return r if zero(g, mul(r, a), deep) else None
    return None


def units(v):
    """(the expression without units, the units as text): units on one side only are ignored."""
    found = sorted({x[1] for x in leaves(v) if x[0] == "unit"})
    if not found or found == ["unit"]:
        return walk(v, lambda t: ONE if t[0] == "unit" else t), ""
    if v[0] == "add":                  # 30 degrees + 45 degrees, but not 3 + 2 cm
        names = {units(t)[1] for t in v[1:]}
        if len(names) != 1:
            raise Unreadable("units")
        return walk(v, lambda t: ONE if t[0] == "unit" else t), names.pop()
    parts = v[1:] if v[0] == "mul" else (v,)
    shape = show(mul(*(p for p in parts if any(x[0] == "unit" for x in leaves(p)))))
    shape = shape if all(x[0] in ("unit", "num") for p in parts for x in leaves(p)) else " ".join(found)
    return walk(v, lambda t: ONE if t[0] == "unit" else t), re.sub(r"^\(?-?[0-9/]+\*", "", shape)


def same_expression(g, a, deep):
    if symbols(g) or symbols(a):       # beside symbols a letter is one too: pi r^2 h, 2 m
        g, a = (walk(v, lambda t: ("sym", t[1]) if t[0] == "unit" and len(t[1]) == 1 and t[1].isalpha() else t) for v in (g, a))
    g, ug = units(g)
    a, ua = units(a)
    if ug and ua and ug != ua:
        return False
    return zero(g, a, deep)


def zero(g, a, deep):
    """Is g - a the zero function? Exact where it can be, by residue where that decides, else numeric."""
    if g == a or g[0] == a[0] == "num":
        return g == a
    if "inf" in (g[0], a[0]):
        return False
    if show(g) == show(a):
        return True
    for v in (g, a):
        if any(x[0] in ("unit", "inf", "pm") for x in leaves(v)):
            raise Unreadable("type")
    exact = [True]
    try:
        r = (residue(g, exact) - residue(a, exact)) % PRIME
    except ZeroDivisionError:          # a denominator of residue 0: no evidence either way
        r, exact = 1, [False]
    if r == 0 or exact[0]:
        return r == 0
    if not deep:
        raise Hard
    return numeric_zero(g, a)


# ---------------------------------------------------------------------------------------------------------------------
# Stage 4: residues. The prime is 1 modulo 8 and modulo all odd primes up to 113, so -1 and those primes are squares.

PRIME = 0x85e8a53685fa40551f1769f7217b4bc67ba1dbff3072bc9ed86360dcbb8cc96324124f0d609
EIGHTH = next(z for z in (pow(k, (PRIME - 1) // 8, PRIME) for k in range(2, 300)) if pow(z, 4, PRIME) == PRIME - 1)


def image(name):
    """A fixed pseudo-random residue for a symbol, pi, e, or (by its text) an expression this stage can't look into."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=48).digest(), "big") % PRIME


@lru_cache(maxsize=4096)
def square_root(n):
    """Residue of the square root of n > 0, a product over its primes so that sqrt(ab) = sqrt(a) sqrt(b); or None."""
    r = 1
    for q in range(2, 1000):
        while n % q == 0:
            n //= q
            r = r * prime_root(q) % PRIME if prime_root(q) else 0
    if n > 1_000_000:
        s = math.isqrt(n)
        return r * s % PRIME or None if s * s == n else None
    return r * (prime_root(n) if n > 1 else 1) % PRIME or None


@lru_cache(maxsize=4096)
def prime_root(q):
    x = pow(q, (PRIME + 7) // 16, PRIME)                       # off by an eighth root of unity at most
    return next((y for k in range(8) if (y := x * pow(EIGHTH, k, PRIME) % PRIME) * y % PRIME == q), 0)


def residue(v, exact):
    """Image of an expression in the field; exact[0] becomes False if parts were taken as unknowns."""
    spend(20 if v[0] == "pow" else 2)
    tag = v[0]
    if tag == "num":
        if bits(v[1]) > 250:           # long enough to be made to hit the prime
            exact[0] = False
            return image(show(v))
        return v[1].numerator * pow(v[1].denominator, -1, PRIME) % PRIME
    if tag == "const" and v[1] == "i":
        return EIGHTH * EIGHTH % PRIME
    if tag in ("sym", "const"):
        return image(tag + " " + v[1])
    if tag == "add":
        return sum(residue(x, exact) for x in v[1:]) % PRIME
    if tag == "mul":
        r = 1
        for x in v[1:]:
            r = r * residue(x, exact) % PRIME
        return r
    if tag == "pow" and v[2][0] == "num" and bits(v[2][1]) < 64:
        e = v[2][1]
        r = None
        if e.denominator == 1:
            r = residue(v[1], exact)
        elif e.denominator == 2 and v[1][0] == "num" and v[1][1] > 0 and bits(v[1][1]) <= 250:
            spend(300)
            top, bottom = square_root(v[1][1].numerator), square_root(v[1][1].denominator)
            r = top * pow(bottom, -1, PRIME) if top and bottom else None
        if r is not None:
            if e < 0 and r % PRIME == 0:
                raise ZeroDivisionError
            return pow(r, e.numerator, PRIME)
    exact[0] = False
    return image(show(v))


# ---------------------------------------------------------------------------------------------------------------------
# Stage 5: ball arithmetic. A ball is (value, bound of its error); functions are real unless i occurs.

class Undefined(Exception):
    """An expression has no real value at a point, or no useful bound."""


class Balls:
    def __init__(self, mp, digits, env, real):
        self.mp, self.env, self.real, self.digits = mp, env, real, digits

    def __call__(self, v):
        with self.mp.workdps(self.digits + 10):
            self.eps = self.mp.mpf(10) ** -self.digits
            try:
                return self.ball(v)
            except (ZeroDivisionError, ValueError, OverflowError, TypeError) as problem:
                raise Undefined from problem

    def ball(self, v):
        mp, tag = self.mp, v[0]
        if tag in ("num", "sym"):
            q = v[1] if tag == "num" else self.env[v[1]]
            x = mp.mpf(q.numerator) / q.denominator
            return x, abs(x) * self.eps
        if tag == "const":
            return (mp.mpc(0, 1), mp.mpf(0)) if v[1] == "i" else (+getattr(mp, v[1]), self.eps)
        if tag == "add":
            parts = [self.ball(x) for x in v[1:]]
            return mp.fsum(p[0] for p in parts), mp.fsum(p[1] + abs(p[0]) * self.eps for p in parts)
        if tag == "mul":
            x, r = self.ball(v[1])
            for t in v[2:]:
                y, s = self.ball(t)
                x, r = x * y, abs(x) * s + abs(y) * r + r * s + abs(x * y) * self.eps
            return x, r
        if tag == "pow":
            return self.pow(v[1], v[2])
        return self.function(v[1], *(self.ball(x) for x in v[2:]))

    def pow(self, base, exponent):
        mp = self.mp
        if base == ("const", "e"):
            return self.exp(*self.ball(exponent))
        x, r = self.ball(base)
        e, s = self.ball(exponent)
        q = exponent[1] if exponent[0] == "num" else None
        near = mp.nint(mp.re(e))
        if q is None and not self.real_part_only(e) and abs(e - near) <= s < 1e-9 and abs(near) < 10**6:
            q = Fraction(int(near))    # an integer point makes an integer exponent
        if q is not None and (q.denominator == 1 or self.real and q.denominator % 2 and x < 0) and abs(q) < 10**7:
            if abs(x) <= 2 * r * (1 + abs(q)):
                if q < 0:
                    raise Undefined
                return mp.mpf(0), (abs(x) + r) ** abs(mp.mpf(q.numerator) / q.denominator)
            if q.denominator == 1:
                y = x ** int(q)
            else:
                y = abs(x) ** (mp.mpf(q.numerator) / q.denominator) * (-1) ** (q.numerator % 2)
            return y, abs(y) * (2 * abs(q.numerator) * r / abs(x) + (abs(q.numerator) + 4) * self.eps)
        if abs(x) <= 2 * r:
            if not (mp.re(e) > s):
                raise Undefined
            return mp.mpf(0), (abs(x) + r) ** mp.re(e)
        y, t = self.log(x, r)
        return self.exp(y * e, abs(y) * s + abs(e) * t + s * t + abs(y * e) * self.eps)

    def real_part_only(self, e):
        return isinstance(e, self.mp.mpc) and e.imag != 0

    def exp(self, x, r):
        if abs(x) > 10**7 or r > 1:
            raise Undefined
        y = self.mp.exp(x)
        return y, abs(y) * (2 * r + self.eps)

    def log(self, x, r):
        mp = self.mp
        if abs(x) <= 2 * r or self.real and mp.re(x) < 0:
            raise Undefined
        if mp.re(x) < 0 and abs(mp.im(x)) <= r and mp.im(x) != 0:
            raise Undefined            # too near the cut to know the side
        y = mp.log(x)
        return y, 2 * r / abs(x) + abs(y) * self.eps + self.eps

    def function(self, name, *args):
        mp, (x, r) = self.mp, args[0]
        if name == "ln":
            return self.log(x, r)
        if name in ("sin", "cos"):
            if abs(x) > 10**12 or r > 1:
                raise Undefined
            return getattr(mp, name)(x), 2 * mp.cosh(abs(mp.im(x)) + r) * (r + self.eps)
        if name == "abs":
            return abs(x), r
        if self.real_part_only(x):
            raise Undefined
        x = mp.re(x)
        if name == "arctan":
            return mp.atan(x), r + self.eps
        if name in ("arcsin", "arccos"):
            if abs(x) > 1 + r:
                raise Undefined
            x = max(min(x, mp.mpf(1)), mp.mpf(-1))
            slope = 1 - (abs(x) + r) ** 2
            bound = r / mp.sqrt(slope) if slope > r else 4 * mp.sqrt(r)
            return (mp.asin if name == "arcsin" else mp.acos)(x), bound + self.eps
        if name in ("floor", "ceil"):
            if abs(x - mp.nint(x)) <= r:
                raise Undefined
            return getattr(mp, name)(x), mp.mpf(0)
        if name in ("max", "min"):
            return (max if name == "max" else min)(mp.re(b[0]) for b in args), max(b[1] for b in args)
        if name == "!" and -0.99 < x < 10**6 and r < 0.001:
            y = mp.factorial(x)
            return y, abs(y) * (r * (200 + 2 * mp.log(abs(x) + 2)) + 4 * self.eps)
        raise Undefined


def measure(v):
    """(tree nodes, digits in its numbers)"""
    if v[0] == "num":
        return 1, bits(v[1]) * 0.31
    parts = [measure(x) for x in v[1:] if isinstance(x, tuple)]
    return 1 + sum(p[0] for p in parts), sum(p[1] for p in parts)


def points(g, a, names):
    """Fixed pseudo-random rational points: small, around 1, and beyond every number that occurs; both signs."""
    rng = random.Random(show(g) + show(a))
    wide = max([abs(x[1]) for v in (g, a) for x in leaves(v) if x[0] == "num" and abs(x[1]) < 10**9] + [1])
    for k in range(30):
        span = (1, 3, 2 * wide, Fraction(1, 2), 10)[k % 5]
        yield {n: span * Fraction(rng.randint(1, 10**6), 10**6 + 3) * (1 if k % 3 == 0 else rng.choice((1, -1))) for n in names}


def numeric_zero(g, a):
    import mpmath
    (n1, s1), (n2, s2) = measure(g), measure(a)
    size = int(s1 + s2)
    if n1 + n2 > MAX_NODES or size > MAX_SIZE:
        raise Unreadable("undecided")
    names = sorted(set(symbols(g)) | set(symbols(a)))
    real = not any(x == I for v in (g, a) for x in leaves(v))
    fine = 200 + 2 * size

    def differ(digits, env):
        spend((n1 + n2) * (4 if digits == 60 else 24))
        at = Balls(mpmath.mp, digits, env, real)
        (x, r), (y, s) = at(g), at(a)
        with mpmath.mp.workdps(digits + 10):
            if abs(x - y) > r + s:
                return True
            if digits == fine and r + s > mpmath.mpf(10) ** -100 * max(abs(x), abs(y), mpmath.mpf(10) ** -size):
                raise Undefined
            return False

    def agreeing(tries):
        good = []
        for env in tries:
            try:
                if differ(60, env):
                    return None
                good.append(env)
            except Undefined:
                continue
        sure = 0
        for env in good[:5 if names else 1]:
            try:
                if differ(fine, env):
                    return None
                sure += 1
            except Undefined:
                continue
        return sure
    sure = agreeing(points(g, a, names) if names else [{}])
    if sure == 0 and names:            # n!, (-1)^n: whole numbers
        sure = agreeing({n: Fraction(k + 2 * j) for j, n in enumerate(names)} for k in range(1, 9))
    if sure is None:
        return False
    if sure < (3 if names else 1):
        raise Unreadable("undecided")
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The decision for a pair of texts.

INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
CHOICE = re.compile(r"(?:option |choice )?(?:\(?([A-J])[).:]? ?|\(([A-J])\)[.:]? ?(\S.*)|([A-J])[).:] ?(\S.*))")
MATHS = re.compile(r"[\\^_{}=<>+*/]")


@lru_cache(maxsize=50_000)
def read(text, mode=0):
    """(value, None), or (("text", words), kind of problem) where the parser can't read it."""
    text = trim(text)
    if text is None:
        return ("text", ""), "empty"
    plain = ""
    BUDGET.left = MAX_WORK
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
    if problem in (None, "words", "command", "environment", "syntax", "type", "arguments", "character") and value[1:] != ("",):
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
        BUDGET.left = MAX_WORK
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


# ---------------------------------------------------------------------------------------------------------------------
# Workers: `verify.py --worker` children that answer one JSON line per pair. Started by exec, not fork: a trainer with CUDA
# can't be forked. A worker ends when its input closes or its parent is gone; the parent kills it when it is over time.

class Worker:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, bufsize=0)
        self.ready, self.out, self.task, self.number = False, b"", None, 0
        self.deadline = time.monotonic() + 60                  # to start, on a busy machine

    def send(self, pair, seconds):
        self.task, self.number, self.deadline = pair, self.number + 1, time.monotonic() + seconds
        self.limits = self.cpu() + seconds, time.monotonic() + 10 * seconds
        try:
            self.process.stdin.write(json.dumps([self.number, *pair]).encode() + b"\n")
        except BrokenPipeError:        # it died: its output ends too, which receive() reports
            pass

    def receive(self):
        """The result of the task, "ready", or None while there is none; EOFError when the worker is gone."""
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            raise EOFError
        self.out += data
        line, newline, rest = self.out.partition(b"\n")
        if not newline:
            return None
        self.out = rest
        number, *result = json.loads(line)
        return "ready" if number == 0 else tuple(result) if number == self.number else None

    def cpu(self):
        """Seconds of processor time it has used; wall-clock time where the system doesn't tell."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as f:
                used = f.read().rsplit(b")", 1)[1].split()
        except OSError:
            return time.monotonic()
        return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")

    def over(self):
        """Is its time up? A worker that waits for a busy processor gets more, up to ten times the limit."""
        if self.deadline > time.monotonic():
            return False
        rest = min(self.limits[0] - self.cpu(), self.limits[1] - time.monotonic()) if self.task else 0
        self.deadline = time.monotonic() + rest
        return rest <= 0

    def end(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def work():
    """A worker's loop: read a pair, decide it with the numeric stage allowed, answer."""
    import resource
    import mpmath  # noqa: F401  before the first pair, so that its time limit isn't spent on the import
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    parent = os.getppid()
    print("[0]", flush=True)           # ready
    buffer = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ)
        while os.getppid() == parent:
            if not waiting.select(5):
                continue
            data = os.read(0, 65536)
            if not data:
                return
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                number, answer, gold = json.loads(line)
                try:
                    reply = judge(answer, gold, True)
                except MemoryError:
                    reply = (False, "numeric", "undecided: memory")
                print(json.dumps([number, *reply]), flush=True)


class Verifier:
    """Workers started once and kept; counts by kind; safe to call from any thread, and in a process forked from this one."""

    def __init__(self, workers=2, time_limit=1.0):
        self.size, self.time_limit = max(1, workers), time_limit
        self.counts, self.reported = Counter(), set()
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self):                   # a forked child has no workers of its own yet and must not use its parent's
        for w in getattr(self, "workers", []):
            w.process.stdin.close()
            w.process.stdout.close()
        self.workers, self.lock, self.decided = [], threading.Lock(), {}

    def verify_batch(self, responses, golds, ids=None):
        """A verdict per response; None where the gold is unreadable, which is reported once with its question."""
        answers = [extract_answer(r) for r in responses]
        golds = [str(g) if isinstance(g, (int, float)) else g for g in golds]
        if len(answers) != len(golds):
            raise ValueError(f"{len(answers)} responses, {len(golds)} golds: give one gold per response")
        results, hard = [self.easy(a, g) for a, g in zip(answers, golds, strict=True)], {}
        for k, result in enumerate(results):
            if result is None:
                hard.setdefault((answers[k], golds[k]), []).append(k)
        for pair, result in self.solve(list(hard)).items():
            for k in hard[pair]:
                results[k] = result
        for k, (verdict, stage, why) in enumerate(results):
            kind = why if why.startswith("undecided") or stage in ("none", "gold") else "correct" if verdict else "wrong"
            self.counts[kind if stage != "gold" else "unreadable gold: " + why] += 1
            if why.startswith("answer: "):
                self.counts["unread " + why] += 1
            if verdict is None and str(golds[k]) not in self.reported:
                self.reported.add(str(golds[k]))
                print(f"verify: gold {str(golds[k])[:80]!a} of question {ids[k] if ids else k} can't be read ({why}); "
                      "the question is left out", file=sys.stderr)
        return [r[0] for r in results]

    def easy(self, answer, gold):
        """(verdict, stage, why) from the stages that run here; None when a worker has to decide."""
        if not isinstance(gold, str):
            return None, "gold", "not text"
        if answer is None:
            bad = readable(gold)
            return (None, "gold", bad) if bad else (False, "none", "no answer")
        try:
            return judge(answer, gold)
        except Hard:
            return self.decided.get((answer, gold))

    def solve(self, pairs):
        """Results of hard pairs. A worker gets one at a time, so that a long one holds up nobody."""
        results, queue, crashed = {}, deque(pairs), set()
        if not pairs:
            return results
        with self.lock, selectors.DefaultSelector() as waiting:
            def watch(w):
                waiting.register(w.process.stdout, selectors.EVENT_READ, w)
                feed(w)

            def feed(w):
                if w.ready and queue:
                    w.send(queue.popleft(), self.time_limit)
                elif w.ready:
                    w.task, w.deadline = None, math.inf

            def drop(w, why):
                waiting.unregister(w.process.stdout)
                self.workers.remove(w)
                w.end()
                if not w.ready:
                    raise RuntimeError("verify.py: a worker process doesn't start; `python verify.py --worker` shows why")
                if w.task and why == "crash" and w.task not in crashed:
                    crashed.add(w.task)                        # perhaps it died while idle: once more
                    queue.appendleft(w.task)
                elif w.task:
                    results[w.task] = (False, "numeric", f"undecided: {why}")

            for w in self.workers:
                watch(w)
            while len(results) < len(pairs):
                busy = sum(w.task is not None for w in self.workers)
                for _ in range(min(self.size, busy + len(queue)) - len(self.workers)):
                    self.workers.append(Worker())
                    watch(self.workers[-1])
                soonest = min(w.deadline for w in self.workers)
                for event, _ in waiting.select(max(0.0, min(soonest - time.monotonic(), 60.0))):
                    w = event.data
                    try:
                        reply = w.receive()
                    except EOFError:
                        drop(w, "crash")
                        continue
                    if reply == "ready":
                        w.ready = True
                        feed(w)
                    elif reply is not None:
                        results[w.task] = reply
                        feed(w)
                for w in [w for w in self.workers if w.over()]:
                    drop(w, "time")
        if len(self.decided) < 100_000:
            self.decided.update(results)
        return results

    def close(self):
        with self.lock:
            for w in self.workers:
                w.end()
            self.workers = []


SHARED, SHARED_LOCK = {}, threading.Lock()


def shared(workers, time_limit):
    with SHARED_LOCK:
        if (workers, time_limit) not in SHARED:
            SHARED[workers, time_limit] = Verifier(workers, time_limit)
            atexit.register(SHARED[workers, time_limit].close)
        return SHARED[workers, time_limit]


def decide(answer, gold, time_limit=0.6):
    """(verdict, stage, why) of a bare answer."""
    v = shared(1, time_limit)
    return v.easy(answer, gold) or v.solve([(answer, gold)])[answer, gold]


def is_equiv(answer, gold):
    return isinstance(answer, str) and decide(answer, gold)[0] is True


def is_correct(response, gold):
    answer = extract_answer(response)
    return answer is not None and is_equiv(answer, gold)


def verify_batch(responses, golds, workers=2, time_limit=1.0, ids=None):
    return shared(workers, time_limit).verify_batch(responses, golds, ids)


def canonical(answer):
    """A key for majority voting: equal answers mostly have the same, never slow, never raises."""
    if not isinstance(answer, str):
        return ""
    v, problem = read(answer)
    BUDGET.left = MAX_WORK
    try:
        return v[1] if problem else key(v)
    except Unreadable:
        return trim(answer) or ""


def key(v):
    if v[0] == "eq":
        return key(v[2])
    if v[0] == "set" and len(v) == 2:
        return key(v[1])
    if v[0] in EXPRESSION:
        v = units(v)[0]
        try:
            return show(v) if v[0] in ("num", "sym") else f"{residue(v, [True]):x}"
        except ZeroDivisionError:
            return show(v)
    parts = [key(x) if isinstance(x, tuple) else str(x) for x in v[1:]]
    return f"{v[0]}({'; '.join(sorted(set(parts)) if v[0] in ('set', 'or', 'rel', 'union') else parts)})"


# ---------------------------------------------------------------------------------------------------------------------
# The command line.

def explain(gold, response):
    answer = extract_answer(response)
    for label, text in (("gold", gold), ("answer", answer)):
        if text is not None:
            value, problem = read(text)
            BUDGET.left = MAX_WORK
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
            fail(f'{path}:{n}: each row needs "answer" (the gold) and "response" (a text) or "responses" (a list of texts)')
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
            verdicts = verify_batch(*map(list, list(zip(*part, strict=True))[:2]), workers, time_limit, [p[2] for p in part])
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
        epilog=r"""examples:  python verify.py "\frac{1}{2}" "so \boxed{0.5}"   or   python verify.py responses.jsonl""")
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
