"""Reads an answer, in LaTeX or plain notation, to a value of algebra.py; nothing here evaluates text.

    latex(text): Unicode mathematics to ASCII           Tokens(text): numbers, operators, names, functions, units, words
    Parser(text, mode).whole() -> value                 Unreadable: its message is the kind that is counted

mode 1 is the second reading of an ambiguous text: 2e-1 is 2*e - 1, and `log` is to base 10.
"""
import re
import unicodedata
from fractions import Fraction
from functools import reduce
from itertools import product

from algebra import (ALL, DEFINED, EXPRESSION, INFINITE, LOWEST, MINUS, ONE, RATIONAL, TWO, Unreadable, add, as_region,
                     func, intersect, inverse, leaves, less, merge, mul, num, outside, power, show, spend, symbols,
                     walk)

MAX_CHARS = 4096                # of an answer
MAX_TOKENS = 1500               # of an answer, once split
MAX_DEPTH = 25                  # nesting in the parser (some 10 Python frames a level: far from the recursion limit)


# -------------------------------------------------------------------------------------------------------------------
# Spelling: Unicode to LaTeX, then tokens.

SPELL = dict(zip("−–—‐‑×✕·⋅∙•∗÷∕⁄√∛∞≤⩽≦≥⩾≧≠±∓∪∩∈∅∖°º′≈∧∨⌊⌋⌈⌉⟨⟩∠∣",
                 r"- - - - - \times \times \cdot \cdot \cdot \cdot * \div / / \surd \cbrt \infty \le \le \le "
                 r"\ge \ge \ge \ne \pm \mp \cup \cap \in \emptyset \setminus \degree \degree ' \approx \land "
                 r"\lor \lfloor \rfloor \lceil \rceil \langle \rangle \angle |".split(), strict=True))
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
fish|sheep|mice|geese|celsius|fahrenheit|Pa pascal pascals|cup cups|acre acres
unit units""".replace("\n", "|").split("|"):
    UNITS |= {_spelling: _names.split(" ")[0] for _spelling in _names.split()}
MONEY = {"\\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rs", "¢": "cent"}
CURRENCIES = set(MONEY.values())
NOT_UNITS = set("""or and more less than least most about not half squared cubed factorial to through between even odd
    except if when mod modulo plus minus times is are was as by tens dozen dozens perhaps pairs halves thirds quarters
    ish maybe possibly at approximately roughly nearly almost over under up unless but nor versus vs otherwise depends
    no yes any others twos this does has always sometimes pi radians""".split())
MULTIPLES = re.compile("(?:.*(?:hundred|thousand|illion)|lakh|crore|gross|.*(?:four|fif|six|seven|eigh|nin|ten|eleven|"
                       "twelf|teen|tie|dred|sand|llion)th)(?:s|es)?")
FUNCTIONS = {"sin", "cos", "ln", "arcsin", "arccos", "arctan", "gcd", "lcm", *DEFINED, *RATIONAL}
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
WORDY = set("""text textbf textit textrm textsf textnormal mathrm mathbf mathit mathsf mbox hbox operatorname
    emph""".split())
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
    (r"per cent\b", "percent"), (r"\\pounds(?![a-z])", "£"),
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
    last = phrase[-1]                  # another plural noun, unless a word may change the value (5 million, 5 or more)
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
        elif w in ("U", "union", "cup") and self and self[-1][0] in (")", "]", "\\}") \
                and re.match(r"[ \\]*[(\[{l]", s[m.end():]):
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


# -------------------------------------------------------------------------------------------------------------------
# The parser, recursive descent over the tokens.

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
        while self.kind in SIGNS:
            k = self.take()[0]
            sign = mul(sign, num(SIGNS[k]))
            if k in ("pm", "mp"):
                sign = mul(sign, ("pm", 0 if self.tied else self.pms))
                self.pms += 1
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
            sign, t = self.sign(), self.product()
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
                    self.kind != "num" or factors[0][0] == "unit" and factors[0][1] in CURRENCIES and not factors[1:]):
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
        """`2\\frac{1}{2}`, `2 1/2`: digits and a proper fraction are a mixed number; other fractions are factors."""
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
