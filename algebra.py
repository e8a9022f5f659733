"""Reads an answer, in LaTeX or plain notation, to a value, and decides whether two values are equal: verify.py's algebra.

    parse(text) -> value                    same(gold, answer, deep) -> bool                    show(value) -> str

  spelling   latex(text): Unicode mathematics to ASCII; Tokens: numbers, operators, names, functions, units, words.
  values     nested tuples, the tag first. Expressions: ("num", Fraction) ("sym", name) ("const", pi|e|i) ("inf", sign)
             ("unit", name) ("pm", which) ("add", ...) ("mul", ...) ("pow", base, exponent) ("fn", name, ...).
             Beyond: ("set", ...) ("tuple", ...) ("vec", ...) ("mat", row, ...) ("ratio", ...) ("in", element, set)
             ("union", ("int", low, high, low closed, high closed), ...) ("rel", (op, left, right), ...) ("or", ...)
             ("eq", left, right, name) ("base", digits) ("text", words).
  exact      the constructors fold rationals, the size of a result bounded before it is computed.
  residue    rational expressions in symbols, i, pi, e and square roots map to a 300-bit prime field. A ring homomorphism
             keeps equalities, so residues that differ prove "different"; equal by chance has probability below 2^-200
             (taking pi and e as algebraically independent; literals over 250 bits go on to the next stage).
  numeric    the rest: mpmath's interval arithmetic. "Different" where the intervals are apart; "equal" where they aren't
             at 12 points with 60 digits, nor at 3 to 5 of them with 200 + 2 * (digits in the literals) and a width below
             10^-100 (relative, or 10^-(100 + digits) absolute). Without deep=True this stage raises Hard instead.

Nothing here evaluates text. Work is bounded by construction and counted in steps, not in seconds, so that a verdict depends
on nothing but the two texts. What can't be read or decided raises Unreadable, its message the kind to count.
"""
import math
import random
import re
import threading
import unicodedata
from fractions import Fraction
from functools import lru_cache, reduce
from hashlib import blake2b
from itertools import product

# Limits: each is checked before the work it bounds is begun.
MAX_CHARS = 4096                # of an answer
MAX_TOKENS = 1500               # of an answer, once split
MAX_DEPTH = 25                  # nesting in the parser (some 10 Python frames a level: far from the recursion limit)
MAX_ITEMS = 60                  # of two lists, left to pair after the items that are the same are removed
INT_BITS = 20_000               # of a folded integer (2006! has 19,120); bigger results stay unevaluated
FRACTION_BITS = 3_000           # of both operands of a fraction operation: their gcd takes quadratic time
MAX_NODES, MAX_SIZE = 200, 400  # tree nodes, digits in the literals: of an expression in the numeric stage
MAX_WORK = 60_000               # steps (a few microseconds each) of reading one text, and of comparing one pair
BUDGET = threading.local()      # steps left: counted, not timed, so that the verdict is the same on any machine


class Unreadable(Exception):
    """Text this reader can't make a value of, or a pair it can't decide; the message is the kind that is counted."""


class Hard(Exception):
    """Only the numeric stage can decide, and this process isn't a worker."""


def begin():
    BUDGET.left = MAX_WORK


def spend(steps):
    BUDGET.left -= steps
    if BUDGET.left < 0:
        raise Unreadable("limit")


# ---------------------------------------------------------------------------------------------------------------------
# Spelling: Unicode to LaTeX, then tokens.

SPELL = dict(zip("−–—‐‑×✕·⋅∙•∗÷∕⁄√∛∞≤⩽≦≥⩾≧≠±∓∪∩∈∅∖°º′≈∧∨⌊⌋⌈⌉⟨⟩∠∣",
                 r"- - - - - \times \times \cdot \cdot \cdot \cdot * \div / / \surd \cbrt \infty \le \le \le \ge \ge \ge "
                 r"\ne \pm \mp \cup \cap \in \emptyset \setminus \degree \degree ' \approx \land \lor \lfloor \rfloor \lceil "
                 r"\rceil \langle \rangle \angle |".split(), strict=True))
SPELL = {ord(k): v + " " * (v[0] == "\\") for k, v in SPELL.items()}
SPELL |= {ord(c): "\\mathbb{%s}" % unicodedata.normalize("NFKC", c) for c in "ℝℤℕℚℂ"}
SPELL |= dict.fromkeys([0xa0, 0x2007, 0x202f, *range(0x2005, 0x200b)], r"\,")               # thin and no-break spaces
SPELL |= dict.fromkeys([0x200b, 0x200c, 0x200d, 0x2060, 0xfeff, 0x2061, 0x2062])            # zero width: dropped
SCRIPT = {ord(a): b for a, b in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ₀₁₂₃₄₅₆₇₈₉₍₎ₙ", "0123456789+-()nx0123456789()n", strict=True)}
GREEK = {c: "\\" + unicodedata.name(chr(c)).split()[3].lower().replace("lamda", "lambda") + " "
         for c in range(0x3b1, 0x3ca) if c != 0x3c2}
GREEK |= {c - 32: v[0] + v[1].upper() + v[2:] for c, v in GREEK.items()} | {0x3d5: r"\phi ", 0x3d1: r"\theta "}
NAMES = {v.strip("\\ ").lower() for v in GREEK.values()} - {"omicron"}


def latex(s):
    """ASCII for the Unicode spellings of mathematics (full-width, bold, superscript, vulgar fractions, Greek)."""
    if s.isascii():
        return s
    s = re.sub(r"((?:[0-9]\u0305)+)", lambda m: r"\overline{" + m[1].replace("\u0305", "") + "}", s)
    s = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ]+", lambda m: "^{" + m[0].translate(SCRIPT) + "}", s)
    s = re.sub("[₀-₉₍₎ₙ]+", lambda m: "_{" + m[0].translate(SCRIPT) + "}", s)
    s = re.sub("[¼-¾⅐-⅞↉]", lambda m: r"\frac{%s}{%s}" % tuple(unicodedata.normalize("NFKC", m[0]).split("\u2044")), s)
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
MONEY = {"\\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rs", "¢": "cent"}
CURRENCIES = set(MONEY.values())
NOT_UNITS = set("""or and more less than least most about not half squared cubed factorial to through between even odd except
    if when mod modulo plus minus times is are was as by tens dozen dozens perhaps pairs halves thirds quarters ish maybe
    possibly at approximately roughly nearly almost over under up unless but nor versus vs otherwise depends no yes any others
    twos this does has always sometimes pi radians""".split())
MULTIPLES = re.compile("(?:.*(?:hundred|thousand|illion)|lakh|crore|gross|.*(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|"
                       "teen|tie|dred|sand|llion)th)(?:s|es)?")
FUNCTIONS = set("""sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln lg exp sqrt cbrt abs
    floor ceil max min gcd lcm surd cis""".split())
COMMANDS = {a: (b, "") for a, b in zip(
    """times cdot ast div le leq leqslant ge geq geqslant lt gt ne neq in cup setminus backslash pm mp lbrace rbrace
    lvert rvert vert mid colon langle rangle lfloor rfloor lceil rceil land wedge lor vee choose over lbrack rbrack
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom infty""".split(),
    r"""* * * / <= <= <= >= >= >= < > != != in cup setminus setminus pm mp \{ \}
    | | | : : <( )> lfloor rfloor lceil rceil and and or or choose over [ ]
    frac frac frac frac sqrt binom binom binom inf""".split(), strict=True)}
COMMANDS = {f: ("fn", f) for f in FUNCTIONS} | COMMANDS | {"pi": ("const", "pi"), "degree": ("unit", "deg")}
IGNORED = set("""left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits
    nolimits quad qquad middle hline""".split())
WORDY = set("text textbf textit textrm textsf textnormal mathrm mathbf mathit mathsf mbox hbox operatorname emph".split())
WRAPPERS = WORDY | set("boxed fbox underline boldsymbol bm mathcal vec overrightarrow".split())
BASES = dict(zip("two three four five six seven eight nine ten eleven twelve sixteen".split(), [*range(2, 13), 16],
                 strict=True))
TOKEN = re.compile(r"""
  (?P<space>(?:\s|~|\$|\\[ ,;:!>()\[\]])+)
| (?P<base>(?<![0-9A-Za-z])(?=[A-F]*[0-9])[0-9A-F]{1,64}\s?_(?:\{\s*\(?[0-9]{1,2}\)?\s*\}|[0-9]{1,2}))
| (?P<num>[0-9]*\.[0-9]*\\(?:overline|bar|dot)\s*\{?[0-9]+\}?|[0-9]+\.\([0-9]+\)
    |(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,12}(?![0-9A-Za-z.])|[0-9]+(?:\.[0-9]+|\.(?![0-9.]))?|\.[0-9]+)
| \\(?P<cmd>[A-Za-z]+)\*?
| (?P<op>\\\\(?:\[[0-9.]+[a-z]{2}\])?|\\[{}%$|]|\*\*|<=|>=|!=|==|[-+*/^_!()\[\]{}|,;=<>%:&'€£¥₹¢])
| (?P<word>[A-Za-z]+)""", re.X)
THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:(?:\s|\\ )[0-9]{3})+)(?!,?[0-9]|\s*/)(?:\.[0-9]+)?")
PHRASE = re.compile(r"\s*([A-Za-z]+(?:[ .-]{1,2}(?!and\b|or\b)[A-Za-z]+){0,5})\.?\s*")
SUBSCRIPT = re.compile(r"'*(?:\s*_\s*(?:\{[^{}]{1,20}\}|[0-9]+|[A-Za-z]|\\[A-Za-z]+))?'*")
REWRITES = [(re.compile(a), b) for a, b in (
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\,|\\!|\\;)(?=[0-9]{3}(?![0-9]))", ""),                      # 10{,}000
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\textdegree(?![a-z])", r"\\degree "),
    (r"\\degree\s*(?:\\(?:text|mathrm|textrm)\s*\{\s*)?([CF])(?![A-Za-z])\s*\}?",
     lambda m: r"\text{deg celsius}" if m[1] == "C" else r"\text{deg fahrenheit}"),
    (r"(?<=[0-9]) ?x ?(?=10 ?(?:\^|\*\*))", r"\\times "),
    (r"^\s*~\s*(?=[0-9])", r"\\approx "), (r"per cent\b", "percent"), (r"\\pounds(?![a-z])", "£"),
    (r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![A-Za-z]))", "'"),
    (r"\s*(?:\\text\s*\{)?\s*\(?\s*(?:in )?\s*base[ -]?(?:\\text\{)?([0-9]+|[a-z]+)\s*\)?\s*\}?\s*\)?$", r"_{\1}"),
    (r"_\s*\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:base )?([0-9]+|[a-z]+)\s*\}?\s*\}$",
     lambda m: "_{%s}" % BASES.get(m[1], m[1])),
    (r"^\s*(?:\(|\\(?:text|mathrm)\s*\{)([0-9A-F]+)[)}]\s*_", r"\1_"),
    (r"^\s*(?:\\text\s*\{\s*)?(?:[Tt]he )?(?!(?:%s)\b)[A-Za-z][a-z]{3,}(?: [a-z]+){0,3}\s*\}?\s*="
     % "|".join(sorted(FUNCTIONS)), "name="))]                                               # Area = 12


def unit_tokens(phrase, loose):
    """Tokens of a unit phrase (`cm`, `square feet`, `miles per hour`, `red apples`); None when it isn't one."""
    out, power, phrase = [], 1, re.split("[ .-]+", phrase)
    if phrase[-1] == "old" and UNITS.get(phrase[-2:][0]) in ("day", "week", "month", "yr"):
        phrase.pop()
    for w in phrase:
        low = w if w in UNITS or len(w) == 1 else w.lower()
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
    last = phrase[-1]                  # any other plural noun, unless a word may change the value (5 million, 5 or more)
    if last[-1:] == "s" and last[-2:] != "ss" and len(last) > 3 and all(w.islower() for w in phrase) \
            and not (NOT_UNITS | FUNCTIONS).intersection(phrase) \
            and not any(MULTIPLES.fullmatch(w) for w in phrase):
        return [("unit", " ".join(phrase))]
    return None


class Tokens(list):
    """(kind, text) pairs of a text; an operator is its own kind. mode 1 reads 2e-1 as 2*e - 1 and log as base 10."""

    def __init__(self, text, mode=0):
        for pattern, new in REWRITES:
            text = pattern.sub(new, text)
        self.text, self.mode, self.pos = text, mode, 0
        self.braces = []               # open ones: "{" of a group, "text" or "wrap" of a wrapper that is dropped
        self.depth, self.comma_space = 0, re.search(r",\s", text) is not None
        while self.pos < len(text):
            m = TOKEN.match(text, self.pos)
            if not m or len(self) > MAX_TOKENS:
                raise Unreadable("limit" if m else "character")
            self.pos = m.end()
            if m.lastgroup != "space":
                getattr(self, "on_" + m.lastgroup)(m)
        if self.braces:
            raise Unreadable("incomplete")
        self.append(("eof", ""))

    def put(self, kind, text=""):
        self.depth += (kind in ("(", "[", "\\{", "<(")) - (kind in (")", "]", "\\}", ")>"))
        self.append((kind, text))

    def match(self, pattern):
        """What the pattern matches from here, which is then read; None if it doesn't."""
        m = re.compile(pattern).match(self.text, self.pos)
        self.pos = m.end() if m else self.pos
        return m

    def after_value(self):
        return self and self[-1][0] in ("num", "const", "unit", ")", "]", "}", "|", "sym")

    def on_base(self, m):
        digits, base = m[0].split("_")
        digits, base = digits.strip(), int(base.strip("{}() "))
        if not 2 <= base <= 36 or any(int(c, 36) >= base for c in digits):
            raise Unreadable("syntax")
        self.put("base", f"{digits.lstrip('0') or '0'}_{base}")

    def on_num(self, m):
        t = THOUSANDS.match(self.text, m.start())
        if len(m[0]) > 4000:           # int() refuses 4300 digits, which full-width text may still reach
            raise Unreadable("limit")
        if t and ("," not in t[0] or not self.depth or self.comma_space or ",0" in t[0]):
            self.pos = t.end()         # in brackets a comma separates, unless the others have a space or a group is 0xx
            return self.put("num", re.sub(r"[,\s\\]", "", t[0]))
        text = m[0]
        if self.mode and (mantissa := re.match(r"[0-9.]+(?=e)", text)):
            text = mantissa[0]
            self.pos = m.start() + len(text)
        self.put("num", text)

    def on_op(self, m):
        op = m[0]
        if op == "{":
            self.braces.append("{")
        elif op == "}":
            if not self.braces:
                raise Unreadable("incomplete")
            if self.braces.pop() != "{":
                return
        if op in ("%", "\\%") or op in MONEY:
            self.put("unit", MONEY.get(op, "%"))
        else:
            self.put("\\\\" if op[:2] == "\\\\" else {"**": "^", "==": "=", "\\|": "|"}.get(op, op))

    def on_cmd(self, m):
        name = m["cmd"]
        if name in COMMANDS:
            self.put(*COMMANDS[name])
        elif name in IGNORED:
            if name in ("left", "right"):
                self.match(r"\.")
        elif name in WRAPPERS:
            self.wrapper(name)
        elif name in ("emptyset", "varnothing"):
            self += [("\\{", ""), ("\\}", "")]
        elif name in ("mathbb", "angle", "triangle", "overline", "bar", "hat", "tilde", "widehat"):
            inner = self.match(r"\s*(?:\{\s*([A-Za-z]+)\s*\}|([A-Za-z]+))")
            if not inner:
                raise Unreadable("syntax")
            letters = inner[1] or inner[2]
            self.put("reals" if name == "mathbb" and letters == "R" else "sym", name + " " + letters)
        elif name in ("begin", "end"):
            env = self.match(r"\s*\{([a-zA-Z*]+)\}(?:\s*\{[lcr| ]*\})?")
            if not env:
                raise Unreadable("syntax")
            self.put(name, env[1])
        elif name.lower().removeprefix("var") in NAMES or name == "ell":
            self.symbol(name.removeprefix("var"))
        else:
            raise Unreadable("command")

    def wrapper(self, name):
        """`\\text{...}` and the like: a unit phrase, or its content with the braces dropped."""
        if not self.match(r"\s*\{"):
            return
        phrase = PHRASE.match(self.text, self.pos)
        if phrase and name in WORDY and self.text[phrase.end():phrase.end() + 1] == "}":
            units = unit_tokens(phrase[1], True)
            if units is not None and (self.after_value() or self and self[-1][0] in "{/" and phrase[1] in UNITS):
                self += units
                self.pos = phrase.end() + 1
                return
        self.braces.append("text" if name in WORDY else "wrap")

    def on_word(self, m):
        w, s, low = m[0], self.text, m[0].lower()
        textual = "text" in self.braces
        if self.units(m, textual):
            return
        if low in ("and", "or", "in"):
            self.put(low)
        elif low in ("infinity", "infty", "inf", "oo"):
            self.put("inf")
        elif w in ("U", "union", "cup") and self and self[-1][0] in (")", "]", "\\}") and re.match(r"[ \\]*[(\[{l]", s[m.end():]):
            self.put("cup")
        elif low == "pi" or w in FUNCTIONS:
            self.put(*COMMANDS[low])
        elif not self and UNITS.get(w) in CURRENCIES:
            self.put("unit", UNITS[w])
        elif low in NAMES and len(w) > 2:
            self.symbol(w)
        elif not textual and (run := re.fullmatch("(sin|cos|tan|ln|log|sqrt|pi)([a-z]{1,2})", w)):     # sinx, 2pir
            self.put(*COMMANDS[run[1]])
            for c in run[2]:
                self.symbol(c)
        elif w != "name" and len(w) > (1 if textual else 3):
            self.put("word", w)
        elif w == "name":
            self.put("sym", w)
        else:
            for c in w[:-1]:
                self.put("const" if c in "ei" else "sym", c)
            self.symbol(w[-1])

    def units(self, m, textual):
        """Reads a unit phrase after a value (5 cm, 12 years old) or after the slash of another unit (km/h)."""
        w, last = m[0], self[-1][0] if self else ""
        spaced = self.text[m.start() - 1:m.start()] in (" ", "~", "}", ",") or textual
        over = last in ("/", "*") and any(kind == "unit" for kind, _ in self[-8:])
        counted = self.after_value() and last != "sym" and (spaced or len(w) > 1 and last == "num")
        if not (over or counted) or last == "const" and w.lower() in ("hr", "mi", "rs"):       # pi hr is pi * h * r
            return False
        phrase = PHRASE.match(self.text, m.start())
        units = unit_tokens(phrase[1], spaced or over)
        if units is None or w.lower() == "in" and self.text[phrase.end():phrase.end() + 1] not in ("", "^", ",", "}"):
            return False
        self += units
        self.pos = phrase.end()
        return True

    def symbol(self, name):
        m = self.match(SUBSCRIPT)
        tail = re.sub(r"\\(?:text|mathrm)|[\s{}\\]", "", m[0])
        self.put(*("const", name) if name in "ei" and not tail else ("sym", name + tail))


# ---------------------------------------------------------------------------------------------------------------------
# Expressions. The constructors fold rationals.

def num(x):
    return ("num", Fraction(x))


ZERO, ONE, MINUS, TWO, HALF, I = num(0), num(1), num(-1), num(2), num(Fraction(1, 2)), ("const", "i")
INFINITE, LOWEST = ("inf", 1), ("inf", -1)
PI, E, ALL = ("const", "pi"), ("const", "e"), ("union", ("int", LOWEST, INFINITE, False, False))
EXPRESSION = {"num", "sym", "const", "inf", "unit", "pm", "add", "mul", "pow", "fn"}
LEAVES = {"num", "sym", "const", "inf", "unit", "pm"}


def bits(q):
    return q.numerator.bit_length() + q.denominator.bit_length()


def small(p, q):
    """May p and q be added or multiplied? Integers up to INT_BITS; a gcd of two big numbers costs too much."""
    low, high = sorted((bits(p), bits(q)))
    return high <= FRACTION_BITS or high <= INT_BITS and (p.denominator == q.denominator == 1 or low <= 200)


def fold(tag, total, terms, join):
    """(the rationals among the terms joined, the other terms), nested sums or products opened up."""
    rest = []
    for t in terms:
        spend(len(t) if t[0] == tag else 1)
        for u in t[1:] if t[0] == tag else (t,):
            if u[0] == "num" and small(total, u[1]):
                total = join(total, u[1])
            else:
                rest.append(u)
    return total, rest


def add(*terms):
    total, rest = fold("add", Fraction(0), terms, Fraction.__add__)
    if len(terms) > 1 and any(t[0] == "inf" for t in rest):
        raise Unreadable("undefined")
    rest += [("num", total)] if total or not rest else []
    return rest[0] if len(rest) == 1 else ("add", *rest)


def mul(*factors):
    total, rest = fold("mul", Fraction(1), factors, Fraction.__mul__)
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
    """The k-th root of n > 0 where it is an integer that a float can suggest; else None."""
    r = math.isqrt(n) if k == 2 else round(math.exp(math.log(n) / k)) if math.log(n) < 34 * k else 0
    return r if k < 1000 and r ** k == n else None


def power(base, e):
    spend(1)
    if base[0] == "inf":
        raise Unreadable("undefined")
    if e == ZERO and base != ZERO:
        return ONE
    if e == ONE or base == ONE:
        return base
    whole = e[0] == "num" and e[1].denominator == 1
    if base[0] == e[0] == "num":
        b, q = base[1], e[1]
        if b == 0:
            if q <= 0:
                raise Unreadable("undefined")
            return ZERO
        if b < 0 and not whole and q.denominator % 2:          # odd roots of negative numbers are the real ones
            return mul(num((-1) ** (q.numerator % 2)), power(num(-b), e))
        if b < 0 and q.denominator == 2:
            return mul(power(I, num(q.numerator % 4)), power(num(-b), e))
        if whole and abs(q) * bits(b) <= INT_BITS:
            return ("num", b ** int(q))
        if not whole and b > 0 and bits(b) <= INT_BITS:
            top, bottom = root(b.numerator, q.denominator), root(b.denominator, q.denominator)
            if top and bottom:
                return power(num(Fraction(top, bottom)), num(q.numerator))
    if base == I and whole:
        return (ONE, I, MINUS, ("mul", MINUS, I))[int(e[1] % 4)]
    if base[0] == "mul" and whole:
        return mul(*(power(f, e) for f in base[1:]))
    return ("pow", base, e)


# Functions that are others in disguise.
DEFINED = {
    "tan": lambda x: mul(func("sin", x), inverse(func("cos", x))),
    "cot": lambda x: mul(func("cos", x), inverse(func("sin", x))),
    "sec": lambda x: inverse(func("cos", x)), "csc": lambda x: inverse(func("sin", x)),
    "cis": lambda x: add(func("cos", x), mul(I, func("sin", x))),
    "sinh": lambda x: mul(HALF, add(power(E, x), neg(power(E, neg(x))))),
    "cosh": lambda x: mul(HALF, add(power(E, x), power(E, neg(x)))),
    "tanh": lambda x: mul(func("sinh", x), inverse(func("cosh", x))),
    "exp": lambda x: power(E, x), "sqrt": lambda x: power(x, HALF), "surd": lambda x: power(x, HALF),
    "cbrt": lambda x: power(x, num(Fraction(1, 3))),
    "log": lambda x: mul(func("ln", x), inverse(("fn", "ln", num(10)))), "lg": lambda x: func("log", x),
    "asin": lambda x: func("arcsin", x), "acos": lambda x: func("arccos", x), "atan": lambda x: func("arctan", x)}
KNOWN = {("sin", ZERO): ZERO, ("cos", ZERO): ONE, ("ln", ONE): ZERO, ("ln", E): ONE}
RATIONAL = {"abs": abs, "floor": math.floor, "ceil": math.ceil, "max": lambda *v: max(v), "min": lambda *v: min(v)}
INTEGRAL = {"gcd": math.gcd, "lcm": math.lcm, "!": math.factorial, "binom": math.comb}


def func(name, *args):
    """A function of the table; names that are others in disguise are rewritten, rational cases folded."""
    x = args[0]
    if len(args) != (2 if name == "binom" else 1) and name not in ("max", "min", "gcd", "lcm"):
        raise Unreadable("arguments")
    size = sum(1 for _ in leaves(x)) if name in DEFINED or name == "binom" else 1
    if name in DEFINED:
        spend(4 * size)                # of the copies of x: nested ones would grow without bound
        return DEFINED[name](x)
    if name in ("sin", "cos"):
        x = walk(x, lambda t: mul(PI, num(Fraction(1, 180))) if t == ("unit", "deg") else t)
        args = (x,)
    if (name, x) in KNOWN:
        return KNOWN[name, x]
    if name == "ln" and x == ZERO:
        raise Unreadable("undefined")
    values = [a[1] for a in args if a[0] == "num"]
    if len(values) == len(args):
        if name in RATIONAL:
            return num(RATIONAL[name](*values))
        natural = all(v.denominator == 1 and 0 <= v for v in values)
        if name in INTEGRAL and natural and len(values) < 20 and (values[0] <= 2100 or name in ("gcd", "lcm")):
            spend(20 + min(int(values[0]), 2100))
            return num(INTEGRAL[name](*map(int, values)))
        if name == "!" and not natural:
            raise Unreadable("undefined")
    if name == "binom":
        k = args[1]
        if k[0] == "num" and 0 <= k[1] <= 30 and k[1].denominator == 1:
            spend((20 + size) * int(k[1]))
            terms = [add(x, num(-j)) for j in range(int(k[1]))]
            return mul(num(Fraction(1, math.factorial(int(k[1])))), *terms)
        return mul(func("!", x), inverse(mul(func("!", k), func("!", add(x, neg(k))))))
    if name in ("gcd", "lcm"):
        raise Unreadable("arguments")
    return ("fn", name, *args)


BUILD = {"add": add, "mul": mul, "pow": power, "fn": func}


def walk(v, f):
    """A value with f applied to its leaves, expressions folded anew."""
    spend(1)
    if v[0] in BUILD:
        return BUILD[v[0]](*(x if isinstance(x, str) else walk(x, f) for x in v[1:]))
    if v[0] in LEAVES:
        return f(v)
    return tuple(walk(x, f) if isinstance(x, tuple) and x and isinstance(x[0], str) else x for x in v)


def leaves(v):
    spend(1)
    if v[0] in LEAVES:
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
    tag, rest = v[0], [show(x) for x in v[1:]] if v[0] != "num" else ()
    if tag == "num":
        q = v[1]
        return str(q) if bits(q) < 1000 else f"{q.numerator:#x}/{q.denominator:#x}"
    if tag in ("sym", "const", "text", "base"):
        return v[1]
    if tag in ("add", "mul"):
        return "(" + {"add": " + ", "mul": "*"}[tag].join(sorted(rest)) + ")"
    if tag == "int":
        return f"{'(['[v[3]]}{rest[0]}, {rest[1]}{')]'[v[4]]}"
    simple = {"unit": "[%s]", "pow": "%s^%s", "inf": "%soo"}.get(tag)
    if simple:
        return simple % (*rest,) if tag != "inf" else "-oo" if v[1] < 0 else "oo"
    if tag == "fn":
        return f"{rest[0]}({', '.join(rest[1:])})"
    return f"{tag}{{{', '.join(sorted(rest) if tag in ('set', 'or', 'rel', 'union') else rest)}}}"


def scalar(v):
    if v[0] not in EXPRESSION:
        raise Unreadable("type")
    return v


def number(text):
    """A decimal, `0.1\\overline{6}`, `0.(3)` or `1.5e-3`."""
    if not isinstance(text, str):
        return num(text)
    if "\\" in text or "(" in text:
        if len(text) > 60:
            raise Unreadable("limit")
        whole, part, cycle = re.fullmatch(r"([0-9]*)\.([0-9]*)[^0-9]*([0-9]+)\D?", text).groups()
        ninths = int(whole + part + cycle) - int(whole + part or 0)
        return num(Fraction(ninths, 10 ** len(part) * (10 ** len(cycle) - 1)))
    mantissa, _, exponent = text.lower().partition("e")
    return mul(num(mantissa), power(num(10), num(exponent))) if exponent else num(text)


# ---------------------------------------------------------------------------------------------------------------------
# The parser, recursive descent over the tokens.

SIGNS = {"+": 1, "-": -1, "pm": 1, "mp": -1}
SEPARATORS = (",", ";", "and", "or")
RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "in")
BEFORE_UNIT = {"num", "sym", "const", "unit", ")", "]", "}", "|", "!", "/", "*"}
CLOSERS = {"(": (")", "]"), "[": (")", "]"), "<(": (")>",)}
STARTS = set("num base sym const inf unit fn frac sqrt binom ( [ { | lfloor lceil begin <(".split())
NAME = re.compile(r"s(\^(\{-n\}|-n|\{\(n\)\}))?(\([sn](,[sn])*\))?|S+|\|S+\||\(s(,s)+\)")
AROUND = {"|": ("abs", "|"), "lfloor": ("floor", "rfloor"), "lceil": ("ceil", "rceil")}


class Parser:
    def __init__(self, text, mode=0):
        self.toks, self.mode = Tokens(text, mode), mode
        self.i = self.depth = self.pms = 0
        self.bar = False               # does a `|` close here?
        self.tied = any(t[0] == "mp" for t in self.toks)

    @property
    def kind(self):
        return self.toks[self.i][0]

    def take(self, *kinds):
        tok = self.toks[self.i]
        if kinds and tok[0] not in kinds:
            raise Unreadable("incomplete" if tok[0] == "eof" else "syntax")
        self.i += tok[0] != "eof"
        return tok

    def enter(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("depth")

    def inside(self, read, *closers, bar=False):
        """(what `read` reads, the closing token after it)"""
        saved, self.bar = self.bar, bar
        found = read()
        closer = self.take(*closers)[0]
        self.bar = saved
        return found, closer

    def sign(self):
        sign = ONE
        while self.kind in ("+", "-"):
            sign = sign if self.take()[0] == "+" else neg(sign)
        return sign

    def whole(self):
        return collect(*self.inside(lambda: self.items(True), "eof")[0])

    def items(self, expand=False):
        """(elements, separators between them), up to whatever closes the list."""
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
        return ("rel", *([p for p in pairs if p[1] != LOWEST and p[2] != INFINITE] or pairs))

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
            left = merge(a[1:] + b[1:]) if op == "cup" else reduce(intersect, map(outside, b[1:]), a)
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
                op = self.take()[0]
                f = mul(self.sign(), scalar(self.powers()))
                factors.append(f if op == "*" else inverse(f))
            elif self.kind in STARTS and not (self.kind == "|" and self.bar) and (
                    self.kind != "num" or len(factors) == 1 and factors[0][0] == "unit" and factors[0][1] in CURRENCIES):
                factors.append(self.powers())
            else:
                break
        if len(factors) == 1:
            return factors[0]
        matrices = [f for f in factors if f[0] == "mat"]
        value = mul(*(scalar(f) for f in factors if f[0] != "mat"))
        if len(matrices) > 1:
            raise Unreadable("type")
        return scale(value, matrices[0]) if matrices else value

    def powers(self):
        base = self.primary()
        for _ in range(4):
            if self.kind == "!":
                self.take()
                base = func("!", scalar(base))
            elif self.kind == "^":
                self.take()
                base = power(scalar(base), self.exponent())
        return base

    def exponent(self):
        self.enter()
        sign = self.sign()
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
            v = self.mixed(text)
        elif kind in ("sym", "const"):
            v = (kind, text)
            if kind == "sym" and re.fullmatch("[fghFG]'*", text) and self.kind == "(":
                self.take()
                args = self.inside(self.items, ")")[0][0]
                v = ("sym", f"{text}({', '.join(map(show, args))})")
        elif kind == "unit":
            v = self.unit(text)
        elif kind in ("inf", "base", "reals"):
            v = {"inf": INFINITE, "base": ("base", text), "reals": ALL}[kind]
        elif kind == "fn":
            v = self.function(text)
        elif kind in CLOSERS:
            v = self.bracket(kind)
        elif kind == "{":
            v = self.group()
        elif kind == "\\{":
            v = self.braces()
        elif kind in AROUND:
            name, closer = AROUND[kind]
            v = func(name, scalar(self.inside(self.sum, closer, bar=kind == "|")[0]))
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

    def unit(self, text):
        """A unit stands after a value, a currency or one of the spelt units also before; alone it would be worth 1."""
        alone = self.i < 2 or self.toks[self.i - 2][0] not in BEFORE_UNIT
        if alone and not (self.kind in STARTS and text in CURRENCIES) and (self.i < 2 or text in ("%", "deg")):
            raise Unreadable("syntax")
        return ("unit", text)

    def mixed(self, text):
        """`2\\frac{1}{2}`, `2 1/2`: digits only and a proper fraction is a mixed number; other fractions are factors."""
        whole, start = number(text), self.i
        if not isinstance(text, str) or not text.isdigit():
            return whole
        if self.kind == "frac":
            v = self.primary()
            body = [t for k, t in self.toks[start + 1:self.i] if k not in ("{", "}")]
            if not all(isinstance(t, str) and t.isdigit() for t in body) or v[0] != "num":
                return mul(whole, v)
        elif [t[0] for t in self.toks[start:start + 3]] == ["num", "/", "num"]:
            v = mul(number(self.take()[1]), inverse(number((self.take(), self.take())[1][1])))
        else:
            return whole
        if not 0 < v[1] < 1:
            raise Unreadable("syntax")
        return add(whole, v)

    def argument(self):
        """The argument of a TeX command: a group, or one digit of a number, or one symbol."""
        kind, text = self.toks[self.i]
        if kind == "num" and len(text) > 1:
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
            index = scalar(self.inside(self.sum, "]")[0])
        if self.kind == "num" and len(self.toks[self.i][1]) > 1:
            raise Unreadable("syntax")                         # \sqrt12: root of 1 or of 12?
        return power(scalar(self.primary()), inverse(index))

    def group(self):
        def content():
            v = collect(*self.items())
            if self.kind in ("choose", "over"):
                op = self.take()[0]
                below = scalar(self.sum())
                v = func("binom", scalar(v), below) if op == "choose" else mul(scalar(v), inverse(below))
            return v
        return self.inside(content, "}")[0]

    def braces(self):
        """A set. `\\{x \\mid x > 3\\}` is its condition."""
        def content():
            if self.kind == "\\}":
                return ("set",)
            found, _ = self.items(True)
            if self.kind != ":" or len(found) > 1 or found[0][0] not in ("sym", "in", "union"):
                return ("set", *found)
            self.take()
            v = collect(*self.items(True))
            if v[0] not in ("rel", "or", "union"):
                raise Unreadable("syntax")
            return v
        return self.inside(content, "\\}")[0]

    def bracket(self, opening):
        (found, seps), closer = self.inside(self.items, *CLOSERS[opening])
        if {"and", "or"} & seps:
            raise Unreadable("syntax")
        if opening == "<(":
            return ("tuple", *found)
        if len(found) == 1:
            if opening + closer in ("(]", "[)"):
                raise Unreadable("syntax")
            return found[0]
        if opening + closer == "()":
            return ("tuple", *found)
        if len(found) == 2 and all(v[0] in EXPRESSION for v in found) and not less(found[1], found[0]):
            return ("union", ("int", *found, opening == "[", closer == "]"))
        if opening + closer != "[]":
            raise Unreadable("syntax")
        rows = [("row", *(v[1][1:3] if v[0] == "union" else v[1:])) for v in found if v[0] in ("vec", "union")]
        return ("mat", *rows) if len(rows) == len(found) and len(set(map(len, rows))) == 1 else ("vec", *found)

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
            args = [scalar(v) for v in self.inside(self.items, closer)[0][0]]
        else:
            args = [self.operand(name)]
        if e == MINUS and name in ("sin", "cos", "tan"):
            name, e = "arc" + name, None
        if name == "log" and len(args) == 2:
            args, base = args[:1], args[1]
        if base is not None and name != "log":
            raise Unreadable("arguments")
        v = func("ln" if name == "log" and (base or not self.mode) else name, *args)
        v = mul(v, inverse(func("ln", base))) if base else v
        return v if e is None else power(v, e)

    def operand(self, name):
        """What a function without brackets takes: `\\sin 2x`, `\\ln\\sin x`, up to the next operator or function."""
        sign, factors = self.sign(), []
        while not factors or self.kind in STARTS - {"fn", "num", "(", "["} and not (self.kind == "|" and self.bar):
            factors.append(scalar(self.powers()))
            if name in ("surd", "sqrt", "cbrt"):
                break
        return mul(sign, *factors)

    def matrix(self, env):
        if env not in ("matrix", "pmatrix", "bmatrix", "array", "smallmatrix", "Bmatrix"):
            raise Unreadable("environment")
        rows = [[]]
        while self.toks[self.i] != ("end", env):
            if self.kind == "\\\\":
                self.take()
                rows.append([])
            else:
                if rows[-1]:
                    self.take("&")
                rows[-1].append(scalar(self.sum()))
        self.take()
        rows = [("row", *r) for r in rows if r]
        if len(set(map(len, rows))) != 1:
            raise Unreadable("syntax")
        return ("mat", *rows)


def scale(k, matrix):
    spend(sum(1 for _ in leaves(k)) * sum(map(len, matrix[1:])))
    return ("mat", *(("row", *(mul(k, x) for x in row[1:])) for row in matrix[1:]))


def signs(v):
    """The values a `\\pm` stands for. Several \\pm are independent; with a \\mp they go together."""
    which = sorted({x[1] for x in leaves(v) if x[0] == "pm"})
    if not which:
        return [v]
    if len(which) > 3 or v[0] == "rel":
        raise Unreadable("limit" if len(which) > 3 else "type")
    choices = [dict(zip(which, c, strict=True)) for c in product((ONE, MINUS), repeat=len(which))]
    return [walk(v, lambda t, c=c: c[t[1]] if t[0] == "pm" else t) for c in choices]


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
        if "or" in seps or any(v[0] == "or" for v in found) or "and" not in seps and as_region(joined) == ("union",):
            return ("or", *found)      # x < 1, x > 3: nothing is both
        return joined
    return ("set", *found)


# ---------------------------------------------------------------------------------------------------------------------
# Regions of the real line: unions of intervals, in canonical order where all ends are rational or infinite.

def less(a, b):
    """a < b, where both are rational or infinite (else False: no order is claimed)."""
    if a[0] == b[0] == "num":
        return a[1] < b[1]
    return a != b and (a == LOWEST and b[0] in ("num", "inf") or b == INFINITE and a[0] == "num")


def merge(intervals):
    """The union of intervals; touching ones are joined where the ends are rational."""
    parts = [i for i in dict.fromkeys(intervals) if (i[1] != i[2] or i[3] and i[4]) and not less(i[2], i[1])]
    if len(parts) > MAX_ITEMS:
        raise Unreadable("limit")
    if not all(x[0] in ("num", "inf") for i in parts for x in i[1:3]):
        return ("union", *parts)
    parts.sort(key=lambda i: (i[1][1] if i[1][0] == "num" else i[1][1] * math.inf, not i[3]))
    out = []
    for i in parts:
        last = out[-1] if out else None
        if last and (less(i[1], last[2]) or i[1] == last[2] and (i[3] or last[4])):
            closed = i[4] or last[4] if i[2] == last[2] else i[4] if less(last[2], i[2]) else last[4]
            out[-1] = ("int", last[1], last[2] if less(i[2], last[2]) else i[2], last[3], closed)
        else:
            out.append(i)
    return ("union", *out)


def intersect(a, b):
    def tighter(p, q, p_closed, q_closed, p_wins, q_wins):
        if p == q:
            return p, p_closed and q_closed
        if not (p_wins or q_wins):
            raise Unreadable("order")  # of irrational ends
        return (p, p_closed) if p_wins else (q, q_closed)
    out = []
    for (_, p, q, pc, qc), (_, r, s, rc, sc) in product(a[1:], b[1:]):
        if not (less(q, r) or less(s, p)):
            low, high = tighter(p, r, pc, rc, before(r, p), before(p, r)), tighter(q, s, qc, sc, before(q, s), before(s, q))
            out.append(("int", low[0], high[0], low[1], high[1]))
    return merge(out)


def before(a, b):
    return a != b and (a == LOWEST or b == INFINITE or less(a, b))


def outside(i):
    """The complement of an interval."""
    return merge([("int", LOWEST, i[1], False, not i[3]), ("int", i[2], INFINITE, not i[4], False)])


def as_region(v):
    """Intervals, inequalities in one symbol and sets of points as a union of intervals; None for anything else."""
    tag, parts = v[0], v[1:]
    if tag == "union":
        return merge(parts)
    if tag == "tuple" and len(parts) == 2 and all(x[0] in EXPRESSION for x in parts):
        order = less(*parts) or not all(x[0] in ("num", "inf") for x in parts)
        return merge([("int", *parts, False, False)]) if order else None
    if tag == "set" and all(x[0] == "union" for x in parts):
        return merge([i for x in parts for i in x[1:]])
    if tag == "set" and all(x[0] in EXPRESSION for x in parts):
        return merge([("int", x, x, True, True) for x in parts])
    names = symbols(v)
    if tag not in ("rel", "or") or len(names) != 1 or len(v) > 12:
        return None
    regions = [as_region(x) for x in parts] if tag == "or" else [solved(*pair, ("sym", names[0])) for pair in parts]
    if not all(regions):
        return None
    return reduce(intersect, regions) if tag == "rel" else merge([i for r in regions for i in r[1:]])


def solved(op, a, b, x):
    """The region of x where a < b (or <=, !=), linear in x or in the |...| that is one side; None for others."""
    for inner, bound in ((a, b), (b, a)):
        if inner[:2] == ("fn", "abs") and op != "!=" and not symbols(bound):
            u = inner[2]               # |u| < bound: -bound < u and u < bound;   bound < |u|: bound < u or u < -bound
            two = [solved(op, u, b, x), solved(op, neg(b), u, x)] if inner is a else \
                [solved(op, a, u, x), solved(op, u, neg(a), x)]
            return None if None in two else intersect(*two) if inner is a else merge(two[0][1:] + two[1][1:])
    if x == b and not symbols(a) and op != "!=":
        low, high = a, INFINITE
    elif x in (a, b) and not symbols(b if x == a else a):
        low, high = LOWEST, b if x == a else a
    else:
        d = add(a, neg(b))
        at = [walk(d, lambda t, k=k: num(k) if t == x else t) for k in (0, 1)]
        slope = add(at[1], neg(at[0]))
        try:
            if slope[0] != "num" or slope == ZERO or not zero(d, add(at[0], mul(slope, x)), False):
                return None
        except Hard:
            return None
        end = mul(neg(at[0]), inverse(slope))
        low, high = (LOWEST, end) if slope[1] > 0 or op == "!=" else (end, INFINITE)
    closed = op == "<="
    return outside(("int", high, high, True, True)) if op == "!=" else \
        merge([("int", low, high, closed and low != LOWEST, closed and high != INFINITE)])


# ---------------------------------------------------------------------------------------------------------------------
# Equality by type. Different types are different; only relations and intervals, and one-element sets, are bridged.

def kind_of(v):
    return "expression" if v[0] in EXPRESSION else v[0]


def same(g, a, deep):
    """Do gold value g and answer value a agree? Hard: only the numeric stage knows."""
    g, a = (v[1] if v[0] == "set" and len(v) == 2 and v[1][0] != "set" else v for v in (g, a))
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
        if not all(x[0] in EXPRESSION for x in g[1:3] + a[1:3]):
            return False
        return ratio(add(g[1], neg(g[2])), add(a[1], neg(a[2])), deep) is not None
    g, a, named = (g[2], a, g[3]) if g[0] == "eq" else (g, a[2], a[3])
    return named is not None and same(g, a, deep)


def same_inequality(g, a, deep):
    """Relations (op, left, right), flips done: the differences must be in a constant ratio, positive where it matters."""
    if g[0] != a[0] or g == a:
        return g == a
    r = ratio(add(g[1], neg(g[2])), add(a[1], neg(a[2])), deep)
    return r is not None and (g[0] == "!=" or r[0] == "num" and r[1] > 0)


def ratio(g, a, deep):
    """The non-zero constant g / a as a tree, or None. It is read off at one point, then shown to hold everywhere."""
    names = symbols(g)
    if "inf" in (g[0], a[0]) or names != symbols(a) or not names:
        return None
    for k in (2, 3, 5):                # a point where neither is 0
        try:
            ga, aa = (walk(v, lambda t, k=k: num(k + 3 * names.index(t[1])) if t[0] == "sym" else t) for v in (g, a))
        except Unreadable:             # undefined at this point
            continue
        if not zero(aa, ZERO, deep) and not zero(ga, ZERO, deep):
            r = mul(ga, inverse(aa))
            return r if zero(g, mul(r, a), deep) else None
    return None


def units(v):
    """(the expression without units, the units as text)"""
    found = sorted({x[1] for x in leaves(v) if x[0] == "unit"})
    bare = walk(v, lambda t: ONE if t[0] == "unit" else t) if found else v
    if not found or found == ["unit"]:
        return bare, ""
    if v[0] == "add":                  # 30 degrees + 45 degrees, but not 3 + 2 cm
        names = {units(t)[1] for t in v[1:]}
        if len(names) != 1:
            raise Unreadable("units")
        return bare, names.pop()
    parts = v[1:] if v[0] == "mul" else (v,)
    shape = show(mul(*(p for p in parts if any(x[0] == "unit" for x in leaves(p)))))
    shape = shape if all(x[0] in ("unit", "num") for p in parts for x in leaves(p)) else " ".join(found)
    return bare, re.sub(r"^\(?-?[0-9/]+\*", "", shape)


def same_expression(g, a, deep):
    """Equal values; units on one side only are ignored, on both sides they must be the same."""
    if symbols(g) or symbols(a):       # beside symbols a letter is one too: pi r^2 h, 2 m
        g, a = (walk(v, lambda t: ("sym", t[1]) if t[0] == "unit" and len(t[1]) == 1 and t[1].isalpha() else t)
                for v in (g, a))
    (g, ug), (a, ua) = units(g), units(a)
    return not (ug and ua and ug != ua) and zero(g, a, deep)


def zero(g, a, deep):
    """Is g - a the zero function? Exact where it can be, by residue where that decides, else numeric."""
    if g == a or g[0] == a[0] == "num":
        return g == a
    if "inf" in (g[0], a[0]):
        return False
    if show(g) == show(a):
        return True
    if any(x[0] in ("unit", "inf", "pm") for v in (g, a) for x in leaves(v)):
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
# Residues. The prime is 1 modulo 8 and modulo all odd primes up to 113, so -1 and those primes are squares.

PRIME = 0x85e8a53685fa40551f1769f7217b4bc67ba1dbff3072bc9ed86360dcbb8cc96324124f0d609
EIGHTH = next(z for z in (pow(k, (PRIME - 1) // 8, PRIME) for k in range(2, 300)) if pow(z, 4, PRIME) == PRIME - 1)


def image(name):
    """A fixed pseudo-random residue for a symbol, pi, e, or (by its text) an expression this stage can't look into."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=48).digest(), "big") % PRIME


@lru_cache(maxsize=4096)
def square_root(n):
    """Residue of the square root of n > 0, a product over its primes so that sqrt(ab) = sqrt(a) sqrt(b); or 0."""
    r, q = 1, 2
    while n > 1:
        if q == 1000:                  # what is left is a square, a prime, or too big to tell
            s = math.isqrt(n)
            return r * s % PRIME if s * s == n else r * prime_root(n) % PRIME if n < 1_000_000 else 0
        while n % q == 0:
            n //= q
            r = r * prime_root(q) % PRIME
        q += 1
    return r


@lru_cache(maxsize=4096)
def prime_root(q):
    x = pow(q, (PRIME + 7) // 16, PRIME)                       # off by an eighth root of unity at most
    return next((y for k in range(8) if (y := x * pow(EIGHTH, k, PRIME) % PRIME) * y % PRIME == q), 0)


def residue(v, exact):
    """Image of an expression in the field; exact[0] becomes False if parts were taken as unknowns."""
    spend(20 if v[0] == "pow" else 2)
    tag = v[0]
    if tag == "num" and bits(v[1]) <= 250:                     # longer ones could be made to hit the prime
        return v[1].numerator * pow(v[1].denominator, -1, PRIME) % PRIME
    if v == I:
        return EIGHTH * EIGHTH % PRIME
    if tag in ("sym", "const"):
        return image(tag + " " + v[1])
    if tag == "add":
        return sum(residue(x, exact) for x in v[1:]) % PRIME
    if tag == "mul":
        return reduce(lambda r, x: r * residue(x, exact) % PRIME, v[1:], 1)
    if tag == "pow" and v[2][0] == "num" and bits(v[2][1]) < 64:
        e, r = v[2][1], None
        if e.denominator == 1:
            r = residue(v[1], exact)
        elif e.denominator == 2 and v[1][0] == "num" and v[1][1] > 0 and bits(v[1][1]) <= 250:
            spend(300)
            top, bottom = square_root(v[1][1].numerator), square_root(v[1][1].denominator)
            r = top * pow(bottom, -1, PRIME) % PRIME if top and bottom else None
        if r is not None:
            if e < 0 and r == 0:
                raise ZeroDivisionError
            return pow(r, e.numerator, PRIME)
    exact[0] = False
    return image(show(v))


# ---------------------------------------------------------------------------------------------------------------------
# Numeric, in a worker: intervals that hold the value, from mpmath.iv. Functions are real unless i occurs.

class Undefined(Exception):
    """An expression has no real value at a point, or no useful bound."""


class Interval:
    """Calling it with an expression gives an interval that holds its value where the symbols have the values of `point`."""

    def __init__(self, iv, point, real):
        self.iv, self.point, self.real = iv, point, real

    def __call__(self, v):
        iv, tag = self.iv, v[0]
        if tag in ("num", "sym"):
            q = v[1] if tag == "num" else self.point[v[1]]
            return iv.mpf(q.numerator) / q.denominator
        if tag == "const":
            return iv.mpc(0, 1) if v == I else +getattr(iv, v[1])
        if tag == "fn":
            return self.function(v[1], self(v[2]))
        if v[:2] == ("pow", E):
            return self.exp(self(v[2]))
        parts = [self(x) for x in v[1:]]
        if tag != "pow":
            return sum(parts) if tag == "add" else math.prod(parts)
        base, e = parts
        q = v[2][1] if v[2][0] == "num" else None
        if q is None and self.whole(e):
            q = Fraction(int(float(e.a)))                      # a whole point makes a whole exponent
        return self.power(base, e, q)

    def is_real(self, x):
        return isinstance(x, self.iv.mpf)

    def whole(self, x):
        return self.is_real(x) and x.delta == 0 and abs(x) < 10**6 and float(x.a).is_integer()

    def exp(self, x):
        if not abs(x) < 10**7:
            raise Undefined
        return self.iv.exp(x)

    def log(self, x):
        if self.is_real(x) and x > 0:
            return self.iv.log(x)
        x = self.iv.mpc(x)
        if self.real or 0 in x.imag and (x.imag.delta != 0 or not x.real < 0):
            raise Undefined            # 0, or too near the cut to know the side
        return self.iv.log(x)

    def power(self, base, e, q):
        """base^e, where q is the exponent if it is rational. Odd roots of negative numbers are the real ones."""
        hollow = 0 not in (base if self.is_real(base) else abs(base))
        if q is not None and q.denominator == 1 and abs(q) < 10**7 and (hollow or q > 0):
            return base ** int(q)
        if q is not None and q.denominator % 2 and self.real and base < 0:
            return self.power(-base, e, q) * (-1) ** (q.numerator % 2)
        if not hollow and self.is_real(base) and self.is_real(e) and e > 0:
            return self.iv.mpf([0, self.exp(e * self.log(abs(base).b)).b]) if base.b > 0 else self.iv.mpf(0)
        return self.exp(e * self.log(base))

    def function(self, name, x):
        iv = self.iv
        if name == "ln":
            return self.log(x)
        if name in ("sin", "cos") and abs(x) < 10**12:
            return getattr(iv, name)(x)
        if name == "abs":
            return abs(x)
        if name == "arctan" and self.is_real(x):
            return iv.atan2(x, iv.mpf(1))
        if name in ("arcsin", "arccos") and self.is_real(x):
            angle = iv.atan2(x, self.power(1 - x * x, iv.mpf(1) / 2, HALF[1]))
            return angle if name == "arcsin" else iv.pi / 2 - angle
        if name == "!" and self.whole(x) and 0 <= x < 1000:
            return iv.mpf(math.factorial(int(float(x.a))))
        if name in ("floor", "ceil") and self.is_real(x) and abs(x) < 10**15:
            whole = math.floor(float(x.a))
            if x > whole and x < whole + 1:
                return iv.mpf(whole + (name == "ceil"))
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
        span = (1, 3, 2 * wide, HALF[1], 10)[k % 5]
        yield {n: span * Fraction(rng.randint(1, 10**6), 10**6 + 3) * (1 if k % 3 == 0 else rng.choice((1, -1))) for n in names}
    for k in range(1, 9):              # n!, (-1)^n: whole numbers
        yield {n: Fraction(k + 2 * j) for j, n in enumerate(names)}


def numeric_zero(g, a):
    from mpmath import iv
    (n1, s1), (n2, s2) = measure(g), measure(a)
    size = int(s1 + s2)
    if n1 + n2 > MAX_NODES or size > MAX_SIZE:
        raise Unreadable("undecided")
    names = sorted(set(symbols(g)) | set(symbols(a)))
    real = not any(x == I for v in (g, a) for x in leaves(v))

    def differ(point, digits):
        spend((n1 + n2) * (4 + digits ** 2 // 1000))
        iv.prec = int(digits * 3.33) + 33
        at = Interval(iv, point, real)
        try:
            x, y = at(g), at(a)
            apart, large = abs(x - y), abs(x).b + abs(y).b
        except (ArithmeticError, ValueError, TypeError) as problem:
            raise Undefined from problem
        if not large < iv.inf:
            raise Undefined
        if apart > large * iv.mpf(10) ** -digits:
            return True
        if digits > 60 and not apart < iv.mpf(10) ** -100 * (large + iv.mpf(10) ** -size):
            raise Undefined
        return False

    good = sure = 0
    for point in points(g, a, names) if names else [{}]:
        try:
            if differ(point, 60):
                return False
            good += 1
            if sure < 5:
                if differ(point, 200 + 2 * size):
                    return False
                sure += 1
        except Undefined:
            continue
        if good >= 12 and sure >= 3:
            return True
    if sure < (3 if names else 1):
        raise Unreadable("undecided")
    return True
