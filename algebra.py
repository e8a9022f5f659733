"""Values of answers, and whether two of them are equal: the exact and the numeric stage of verify.py.

    same(gold, answer, deep) -> bool            show(value) -> str

  values     nested tuples, the tag first. Expressions: ("num", Fraction) ("sym", name) ("const", pi|e|i) ("inf", sign)
             ("unit", name) ("pm", which) ("add", ...) ("mul", ...) ("pow", base, exponent) ("fn", name, ...).
             Beyond: ("set", ...) ("tuple", ...) ("vec", ...) ("mat", row, ...) ("ratio", ...) ("in", element, set)
             ("union", ("int", low, high, low closed, high closed), ...) ("rel", (op, left, right), ...) ("or", ...)
             ("eq", left, right, name) ("base", digits) ("text", words).
  exact      the constructors fold rationals, the size of a result bounded before it is computed.
  residue    rational expressions in symbols, i, pi, e and square roots map to a 300-bit prime field. A ring
             homomorphism keeps equalities, so residues that differ prove "different"; equal by chance has probability
             below 2^-200 (pi and e taken as algebraically independent; literals over 250 bits go to the next stage).
  numeric    the rest: mpmath's interval arithmetic. "Different" where the intervals are apart; "equal" where they
             aren't at 12 points with 60 digits, nor at 3 to 5 of them with 200 + 2 * (digits in the literals) and a
             width below 10^-100 (relative, or 10^-(100 + digits) absolute). Without deep=True it raises Hard instead.

Work is bounded by construction and counted in steps, not in seconds, so that a verdict depends on nothing but the two
texts. What can't be decided raises Unreadable, its message the kind to count.
"""
import math
import random
import re
import threading
from fractions import Fraction
from functools import lru_cache, reduce
from hashlib import blake2b
from itertools import product

# Limits: each is checked before the work it bounds is begun.
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


# -------------------------------------------------------------------------------------------------------------------
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


# -------------------------------------------------------------------------------------------------------------------
# Regions of the real line: unions of intervals, in canonical order where all ends are rational or infinite.

def less(a, b):
    """a < b, where both are rational or one is infinite (else False: no order is claimed)."""
    return a[1] < b[1] if a[0] == b[0] == "num" else a != b and (a == LOWEST or b == INFINITE)


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
    def inner(p, q, p_closed, q_closed, p_inside, q_inside):
        if p != q and not (p_inside or q_inside):
            raise Unreadable("order")  # of irrational ends
        return (p, p_closed and q_closed) if p == q else (p, p_closed) if p_inside else (q, q_closed)
    out = []
    for (_, p, q, pc, qc), (_, r, s, rc, sc) in product(a[1:], b[1:]):
        if not (less(q, r) or less(s, p)):
            low, lc = inner(p, r, pc, rc, less(r, p), less(p, r))
            high, hc = inner(q, s, qc, sc, less(q, s), less(s, q))
            out.append(("int", low, high, lc, hc))
    return merge(out)


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


# -------------------------------------------------------------------------------------------------------------------
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
    """Relations (op, left, right), flips done: the differences are in a constant ratio, positive where it matters."""
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


# -------------------------------------------------------------------------------------------------------------------
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


# -------------------------------------------------------------------------------------------------------------------
# Numeric, in a worker: intervals that hold the value, from mpmath.iv. Functions are real unless i occurs.

class Undefined(Exception):
    """An expression has no real value at a point, or no useful bound."""


class Interval:
    """Called with an expression: an interval that holds its value where the symbols have the values of `point`."""

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
        x = self.iv.mpc(x) if self.is_real(x) else x
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
        span, signs = (1, 3, 2 * wide, HALF[1], 10)[k % 5], (1,) if k % 3 == 0 else (1, -1)
        yield {n: span * Fraction(rng.randint(1, 10**6), 10**6 + 3) * rng.choice(signs) for n in names}
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
