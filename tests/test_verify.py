"""Tests of verify.py: a table of pairs, extraction, hostile text, properties, threads and processes, the command line.

    python -m pytest -q tests/test_verify.py          about a minute on two cores
"""
import json
import os
import random
import string
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import algebra  # noqa: E402
import verify  # noqa: E402
from verify import Verifier, canonical, extract_answer, is_correct, is_equiv, verify_batch  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
LIMIT = 1.0 * max(1.0, os.getloadavg()[0] / os.cpu_count())  # seconds for one verification; more on a busy machine
COLUMNS = ("gold", "answer", "verdict", "kind")
CASES = [dict(zip(COLUMNS, line.split("\t"), strict=True))
         for line in (ROOT / "tests" / "verify_cases.tsv").read_text(encoding="utf-8").split("\n")
         if line and not line.startswith("# ")]
KINDS = sorted({c["kind"] for c in CASES})


def rows(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def timed(function, *args):
    start = time.monotonic()
    result = function(*args)
    spent = time.monotonic() - start
    assert spent < LIMIT, f"{spent:.2f} s for {str(args)[:200]}"
    return result


# --- the table ---------------------------------------------------------------------------------------------------------

def test_table_is_broad():
    assert len(CASES) >= 400 and len(KINDS) >= 20 and len({(c["gold"], c["answer"]) for c in CASES}) == len(CASES)


@pytest.mark.parametrize("kind", KINDS)
def test_table(kind):
    wrong = []
    for c in (c for c in CASES if c["kind"] == kind):
        expected = c["verdict"].startswith("T")
        ways = [(c["gold"], c["answer"])] + [(c["answer"], c["gold"])] * (c["verdict"] in ("T", "F"))
        wrong += [(g, a, expected) for g, a in ways if is_equiv(a, g) is not expected]
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_table_through_responses(kind):
    """The same verdicts for whole responses in one batch, in a box and on an answer line; the gold itself is right."""
    cases = [c for c in CASES if c["kind"] == kind]
    box, line = "We get $\\boxed{%s}$.", "So it follows.\n\n**Answer:** %s"
    for form in (box, line):
        fits = [c for c in cases if c["answer"].count("{") == c["answer"].count("}") and "\\boxed" not in c["answer"]]
        got = verify_batch([form % c["answer"] for c in fits], [c["gold"] for c in fits])
        bad = [(c["gold"], c["answer"], g) for c, g in zip(fits, got, strict=True) if bool(g) is not c["verdict"].startswith("T")]
        assert not bad
        golds = [c["gold"] for c in cases if "\\boxed" not in c["gold"] and is_equiv(c["gold"], c["gold"])]
        assert all(verify_batch([form % g for g in golds], golds))


def test_every_gold_equals_itself():
    assert [c["gold"] for c in CASES if not is_equiv(c["gold"], c["gold"])] == []


# --- extraction --------------------------------------------------------------------------------------------------------

EXTRACTED = [
    (r"so \boxed{5}", "5"), (r"\boxed{1} no, \boxed{2}", "2"), (r"\fbox{42}", "42"), (r"\boxed {7}", "7"),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"$\boxed{x^{2^{3}}}$", "x^{2^{3}}"),
    (r"\boxed 2$ then \boxed{3}", "3"), (r"\boxed{1} and so \boxed{1}", "1"), (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\fbox{5}}", "5"), (r"Answer: \boxed{5}", "5"), (r"\boxed{5}" + "\nAnswer: 6", "5"),
    (r"\boxed{\text{Final Answer: 5}}", r"\text{Final Answer: 5}"), (r"\boxed{3} or \boxed{4}", "3, 4"),
    (r"\boxed{3}, \boxed{4}", "3, 4"), (r"first \boxed{3}. Then \boxed{4}", "4"), (r"\boxed{5", None),
    (r"\boxed{1} then \boxed{2", None), (r"\boxed{4} so \boxed", None), (r"\boxed{}", None), (r"\boxed{ }", None),
    (r"\boxed{?}", None), (r"\boxed{\ldots}", r"\ldots"), (r"\boxed{…}", None), (r"\boxed{...}", None), ("", None),
    ("42", None), (r"\boxed{4" + "\nAnswer: 4", None), ("The result is 42.", None), ("#### 42", None),
    ("the answer is 42", None), ("Answer: 5", "5"), ("ANSWER: 5", "5"), ("answer : 5", "5"), ("Final Answer: 5", "5"),
    ("### Answer: 5", "5"), ("**Answer:** 5", "5"), ("**Answer: 5**", "5"), ("**Answer**: 5", "5"),
    ("Final Answer: **73**", "73"), ("> Answer: 5", "5"), ("**Final Answer:** $5$", "5"),
    ("### Final Answer\n\nAnswer: 5", "5"), ("Answer：5", "5"), ("Answer:5", "5"), ("Answer: $5$.", "5"),
    ("Answer: \\(5\\)", "5"), ("Answer: \\[5\\]", "5"), ("Answer: `5`", "5"), ('Answer: "5"', "5"),
    ("*Answer:* 5", "5"), ("\u200bAnswer: 5", "5"), ("Answer: ***5***", "5"), ("\\framebox{5}", None),
    ("Answer: 1\nAnswer: 2", "2"), ("Answer: $Answer (without quotes)\nwork\nAnswer: 7", "7"),
    ("So it is. Answer: 5", "5"), ("The final answer: 5", "5"), ("Answer: 5\nThanks for reading", "5"),
    ("Answer:\n\n$$5$$\n", "5"), ("Answer:", None), ("Answer: ?", None), ("Answer: …", None), ("Answer: ", None),
    ("An unanswered question: 5", None), ("Answer 5", None),
    ("Answer: \\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}"),
    ("\u0130\u0130\u0130\nAnswer: 5", "5"), ("x" * 100_000 + "\n\\boxed{5}" + "y" * 100_000, "5"),
    ("Answer: 5\n" + "z " * 100_000, "5"), (r"\boxed{5\}", None), (r"the box \boxed is used: \boxed{5}", "5"),
    (r"\boxed{5} is in the \boxed command above", "5"),
]


@pytest.mark.parametrize("response,answer", EXTRACTED)
def test_extraction(response, answer):
    assert timed(extract_answer, response) == answer


def test_responses():
    right = [("5", "Answer: \\boxed{5}"), ("[2,5)", "\\boxed{[2,5)}"), ("73", "Final Answer: **73**"), ("3", "\\boxed{1}\\boxed{3}"),
             ("\\text{(A)}", "\\boxed{\\textbf{(A)}}"), ("2,3", "\\boxed{2}, \\boxed{3}"), ("x=5", "Answer: $x = 5$"),
             ("42", "a" * 500_000 + "Answer: 41\nAnswer: 42"), ("42", "Answer: 42." + " " * 5000)]
    wrong = [("42", "maybe 42, not sure"), ("42", "The answer is 42"), ("42", "\\boxed{41} 42"), ("4", "\\boxed{3} or \\boxed{4}"),
             ("42", "\\boxed{42"), ("42", ""), ("42", "Answer: $Answer"), ("A", "Answer: anything"), ("13", "Answer: 1\n13"),
             ("4", "Answer: 3 or 4"), ("5", "Answer: 5 or 6"), ("0.28", "Answer: 28%"), ("", "Answer: "), ("?", "Answer: ?")]
    assert [(g, r[:80]) for g, r in right if not timed(is_correct, r, g)] == []
    assert [(g, r[:80]) for g, r in wrong if timed(is_correct, r, g)] == []


# --- golds -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("gold", ["", " ", "?", "…", "$$", "\\boxed{}", "\\frac{1}{", "{", "\\frac{1}", "\\sqrt", "\\frac{1}{0}", "3+",
                                  "x" * 5000, "5\x00", "\ud800", None, ["5"]])
def test_unreadable_gold_is_left_out_and_never_rewarded(gold, capfd):
    v = Verifier(1)
    texts = ["\\boxed{5}", f"\\boxed{{{gold}}}", "Answer: 0", "", f"Answer: {gold}"]
    assert v.verify_batch(texts, [gold] * 5, ids=["q7"] * 5) == [None] * 5
    assert not any(is_correct(t, gold) for t in texts)
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "question q7" in error      # reported once
    assert sum(n for kind, n in v.counts.items() if kind.startswith("unreadable gold")) == 5


def test_number_golds():
    assert verify_batch(["\\boxed{42}", "\\boxed{0.5}"], [42, 0.5]) == [True, True]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one gold per response"):
        verify_batch(["a"], ["1", "2"])


# --- hostile text ------------------------------------------------------------------------------------------------------

N = 100_000
HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9^9}}}", "((9**9)**9999)**9999", "(((9^9)^9)^9)^9", "10**9!", "(10^9)!", "((100!)!)!",
    "9!!!!!!!", "1" + "!" * 3000, r"\frac{5^{5^{5^{5^{5^5}}-4}-5}}{16}", r"10^{5^{5^{5^{5^5}}\log_{10}5 - 4}}",
    r"\log_{2^5}(\log_{2^4}(\log_{2^3}(2^{2^{2^{2^2}}})))", "2^{10^{10}}", "2^{-10^{10}}", "10^{10^{10^{10}}}",
    "1e999999999", "1e-999999999", "1e999999999999999999", "0.1^{999999999}", r"e^{e^{e^{e^{e^e}}}}",
    r"\sin(10^{10^{10}})", r"\sin(9^{9^9})", r"\tan(10^{1000})", r"\ln(\ln(\ln(\ln 2)))", r"\binom{10^9}{10^8}",
    r"\binom{1000000}{500000}", r"\sqrt[10^9]{2}", r"\sqrt[3]{" + "7" * 3000 + "}", r"\sqrt{" + "7" * 4000 + "}",
    "7" * 4096, "7" * 5000, "0." + "3" * 4000, "9" * N, "\\gcd(" + "9" * 2000 + "," + "8" * 2000 + ")",
    "+".join(f"1/{p}" for p in range(1, 700)), "*".join(f"{p}/{p + 1}" for p in range(1, 400)),
    "+".join(["\\sqrt{2}"] * 400), "*".join(["(1+x)"] * 500), "(x+1)^{10000}", "(x+1)^{10^{10}}",
    "(1+\\sqrt2)^{100000}", "x^{x^{x^{x^x}}}", "(" * 2000 + "1" + ")" * 2000, "{" * 2000 + "1" + "}" * 2000, "[" * N,
    "(" * N, "{" * N, "}" * N, "\\{" * N, "|" * 4000, "||" * 1000 + "x", "\\frac" * 1000,
    "\\frac{1}{" * 300 + "1" + "}" * 300, "\\sqrt" * 1000, "\\sqrt{" * 500 + "2" + "}" * 500, "-" * 4000 + "1",
    "+" * 4000, "\\sin" * 500 + " x", "\\left(" * 500, "^" * 1000, "x^" * 1000 + "x", "x_" * 1000, "1," * 2000 + "1",
    ",".join(map(str, range(900))), ",".join(f"\\sqrt{{{p}}}" for p in range(2, 250)), "\\pm" * 1000 + "1",
    "\\pm1" * 40, "\\pm x" * 10, "\\{" + "1,2," * 500 + "3\\}", "1=" * 1000 + "1", "x<" * 1000 + "x",
    "(0,1)\\cup" * 300 + "(2,3)", "\\begin{pmatrix}" * 100, "\\begin{pmatrix}" + "1&" * 1000 + "1\\end{pmatrix}",
    "\\begin{pmatrix}" + "1\\\\" * 1000 + "\\end{pmatrix}", "\\text{" * 700 + "1" + "}" * 700, "\\text{" * N,
    "\\boxed{" * 5000 + "1" + "}" * 5000, "\\boxed{" * N, "\\boxed " * N, "\\boxed{1} or " * 20_000, "Answer: " * N,
    "answer " * N, "Answer:\n" * N, "Answer:" + " " * N, "a" * N, " " * N, "\n" * N, "$" * N, "\\" * N, "\\\\" * N,
    "*" * N, "**" * N, "." * N, "'" * N, '"' * N, "`" * N, "_" * N, "{,}" * N, "1{,}" * N, "1,000" * N, "1 000 " * N,
    "1 " * N + "/2", "1" + " " * 4000 + "1/2", "0.\\overline{" + "1" * 4000 + "}", "0." + "1\\overline{1}" * 300,
    "1_" * 2000, "A1" * 2000 + "_16", "F" * 4000 + "_{16}", "base " * 800, " base" * 800 + " 8", "5" + " cm" * 1300,
    "5 " + "per " * 1000 + "m", "5 \\text{" + "a " * 2000 + "}", "\\$" * 2000 + "5", "%" * 4000, "5" + "\\%" * 2000,
    "5" + "^\\circ" * 700, "°" * 4000, "__import__('os').system('touch HACKED')", "open('HACKED','w').write('x')",
    "exec(\"open('HACKED','w')\")", "eval('1')", "().__class__.__bases__[0]", "lambda: 1",
    "0*\\pi+len([open('HACKED','w')])", "[x for x in (1,)]", "\\input{/etc/passwd}", "\\write18{touch HACKED}",
    "{{7*7}}", "${7*7}", "%s%s%n", "'; DROP TABLE x; --", "<script>alert(1)</script>", "\x00", "1\x00", "1\x00\x00",
    "\x1b[2J1", "\x7f", "\ud800", "1\udfff", "\udc80\ud800", "\u202e1", "1\u202e", "\u2066 1", "\ufdfa" * 4000,
    "\ufdfa" * 500, "１" * 4000, "²" * 4000, "½" * 2000, "\u0305" * 4000, "3\u0305" * 1500, "√" * 3000 + "2", "\u0661",
    "\u0967", "𝟏" * 3000, "Ⅻ", "①", "\u1d7cf", "é" * 4000, "e\u0301" * 4000, "1\u200b2\u200b3" * 500, "\ufeff" * 4000,
    "nan", "NaN", "inf/inf", "\\infty-\\infty", "0\\cdot\\infty", "\\infty/\\infty", "1/0", "0/0", "0^0", "0^{-1}",
    "\\ln 0", "\\log_1 2", "\\log_0 0", "\\tan 90^\\circ", "\\frac{1}{\\sin 0}", "(-1)^{1/2}", "(-8)^{1/3}",
    "\\arcsin 2", "\\sqrt{-1}^{\\sqrt{-1}}", "i^{i^{i^i}}", "1/(\\sqrt2^2-2)", "\\frac{x-x}{x-x}", "(x-x)^0",
    "\\int_0^\\infty e^{-x^2}dx", "\\sum_{n=1}^\\infty 1/n^2", "\\lim_{x\\to 0} x", "\\prod",
    "\\begin{cases}1\\\\2\\end{cases}", "\\end{pmatrix}", "\\begin{", "\\end", "\\\\1", "&", "#", "@",
    "\\frac{\\frac{\\frac{1}{2}}{3}}{4}" * 50, "\\sqrt[\\sqrt[\\sqrt2]2]2", "\\sqrt[0]{2}", "\\sqrt[x]{x}", "\\mathbb{",
    "\\overline{", "\\operatorname{", "\\begin{array}{" + "c" * 3000, "x" + "'" * 3000, "(1+10^{-50})^{10^{50}}",
    "\\lfloor 10^{10^{10}} \\rfloor", "\\lceil \\pi^{10^6} \\rceil", "|" + "(-1)^" * 50 + "x|",
    "\\max(" + "1," * 1000 + "2)", "3,-5 or anything", "any integer", "1 or 2 or 3 or 4 or 5 or 7",
    "2^{2^{2^{2^{2^2}}}}", "((((2^{99})^{99})^{99})^{99})^{99}", "(2^{10000})!", "((3!)!)!", "(((3!)!)!)!",
    "\\binom{(10!)!}{3}", "\\binom{2000}{-1}", "\\gcd(2^{19999},3^{12000})", "\\log_{\\log_{\\log_2 3} 5} 7",
    "\\log_{0.999999999999999999} 2", "\\ln\\ln\\ln\\ln\\ln 10^{10^{10}}", "\\ln(" * 30 + "2" + ")" * 30,
    "e^{" * 24 + "1" + "}" * 24, "\\sqrt{2+" * 24 + "2" + "}" * 24, "|" * 23 + "x" + "|" * 23, "\\frac1" * 30 + "2",
    "{" * 24 + "1" + "}" * 24, "{" * 26 + "1" + "}" * 26, "1+(" * 24 + "1" + ")" * 24, "\\sin\\cos" * 12 + "1",
    "\\sin(\\cos(" * 12 + "x" + "))" * 12, "\\arctan(" * 20 + "7" + ")" * 20, "\\cosh(" * 8 + "x" + ")" * 8,
    "\\tanh(" * 8 + "x" + ")" * 8, "\\tanh(" * 20 + "x" + ")" * 20, "\\tan(" * 20 + "x" + ")" * 20,
    "\\tan\\tan\\tan\\tan\\tan\\tan x^{10}", "\\cis" * 20 + "1", "\\cis(" * 20 + "1" + ")" * 20,
    "\\binom{\\binom{\\binom{x}{30}}{30}}{30}", "\\binom{x}{30}^{1000}", "(x^{1000000})^{1000000}",
    "(((x^{9999999})^{9999999})^{9999999})^{9999999}", "(x+1)^{9999999}", "(1.0000001)^{9999999}",
    "(\\pi)^{9999999}+x", "\\pi^{\\pi^{\\pi^{\\pi}}}", "0.5^{0.5^{0.5^x}}", "\\sqrt[99999999]{x}", "x^{1/3}" * 150,
    "(-1)^{1/3}+(-1)^{1/2}+(-1)^{1/4}+x", "|x|" * 200, "|" + "|x|-1" * 8 + "|", "\\lfloor x\\rfloor" * 80,
    "\\lfloor 10^{14}\\pi\\rfloor", "\\max(x," * 20 + "1" + ")" * 20, "n!" * 100, "\\sqrt{n!}" * 50, "(n!)!",
    "((n!)!)!", "(x!+1)^{1/2}", "(1/2)!", "(\\sqrt2)!", "(10^{-9})!", "999!+\\sin x", "x\\cdot 2000!",
    "x+" + "+".join(f"{k}!" for k in range(1, 60)), "1." + "0" * 3900 + "1+\\sin x", "\\sin " + "1" * 390,
    "\\arctan " + "1" * 390 + "x", "\\arcsin(0." + "9" * 390 + ")", "\\ln(1." + "0" * 390 + "1)",
    "\\sqrt[3]{" + "3" * 390 + "}+\\sin x", "(1,2)" * 800, "[1,2]" * 800, "[[1,2],[3,4]]" * 300,
    "[" * 24 + "1,2" + "]" * 24, "\\{" * 24 + "1,2" + "\\}" * 24, "(0,\\pi)\\cup" * 200 + "(0,e)",
    "\\mathbb{R}\\setminus\\{" + ",".join(map(str, range(300))) + "\\}",
    "\\mathbb{R}\\setminus\\{" + ",".join(f"\\sqrt{{{k}}}" for k in range(2,30)) + "\\}", "|x|<" * 300 + "2",
    " or ".join(f"|x-{k}|<{k+1}" for k in range(200)), ", ".join(f"|x-{k}|>{k}" for k in range(9)),
    "|".join("x" * 9) + "<2", "|"+"|x|-1"*1+"|<2", " and ".join(f"x\\ne{k}" for k in range(200)), "x<" + "1" * 3000,
    "\\pm\\pm\\pm1", "\\pm" + "\\sqrt{\\pm" * 10 + "1" + "}" * 10, "1\\pm2\\pm3\\pm4\\pm5",
    "\\begin{pmatrix}" + "\\begin{pmatrix}1\\end{pmatrix}" * 100 + "\\end{pmatrix}",
    "\\begin{pmatrix}" + ("1&" * 20 + "1\\\\") * 30 + "\\end{pmatrix}", "x=" * 700 + "x", "=" * 4000,
    "f(" * 24 + "x" + ")" * 24, "f(" * 500, "a_{" * 500, "a_{b_{c_{d}}}" * 100, "\\text{5 " + "cm " * 600 + "}",
    "5 " + "square " * 500 + "feet", "5 " + "old " * 900, "5 years" + " old" * 900, "5 " + "years old " * 300,
    "\\text{" + "years old" * 300 + "}", "\x00" * N, "\x1b]0;x\x07" * 1000, "\r" * N, "\x0b\x0c\x1c\x85" * 1000,
    "\u2028\u2029" * 1000, "\ud800\udc00" * 500, "\udfff" * N, "\U0010ffff" * 1000, "\ufffe\uffff" * 1000,
    "\u0300" * 4000, "\u1160" * 4000, "\u202d\u202e" * 1000, "\ufe0f" * 4000, "9" * 1_000_000, "(" * 1_000_000,
    "\\boxed{" + "1+" * 500_000 + "1}", "\\boxed{" * 150_000, "box" * 300_000, "\\boxed" * 150_000,
    "Answer: " + "x" * 1_000_000, "answer:" * 140_000, "Answer" + " " * 900_000 + ":7", "Answer" + "*" * 900_000,
    "\\boxed{\\boxed{" * 500 + "}}" * 500, "\\boxed{1}," * 100_000, "\\boxed{" + "{}" * 4000 + "}",
    "{" * 500_000 + "\\boxed{1}" + "}" * 500_000, "$\\" * 400_000, "\\text" * 800, "\\begin{array}{" * 300,
    "\\frac" + "{" * 900, "__import__('subprocess').run(['touch','HACKED'])", "\\def\\x{\\x\\x}\\x",
    "\\loop\\iftrue\\repeat", "globals().clear()", "(lambda f: f(f))(lambda f: f(f))", "[1]*10**9", "range(10**9)",
    "'a'*10**9", "f'{1:>1000000000}'", "import os; os._exit(0)", "raise SystemExit", "while True: pass",
    "judge = lambda *a: (True,'',''); 8", "True", "None", "NotImplemented", "x if x else 7", "7 == 7", "7; import os",
    "7 # comment", "7\\n8", "\\\\7", "$(touch HACKED)", "`touch HACKED`", "&&7", "7|7", "7||7", "{7:7}", "@7", "0b111",
    "0o7", "0x7", "7L", "7j", "7_0", "1_000", "--8", "++7+1", "7<<0", "7//1+0.5", "7%8", "7**1**0+1", "VII",
    "seven", "٧", "７.1", "七", "7⃣", "7️⃣", "⁷", "₇", "7̲", "7̅", "7\u0307", "⅞", "7·", "·7", "7∙0", "7⁰", "√49̅",
]


def test_hostile_answers_are_wrong_and_quick():
    """As box, answer line, and bare answer, against golds of several types: wrong, in time, no exception, nothing run."""
    assert len(HOSTILE) >= 200
    golds = ["7", r"\frac{1}{3}", "x^2+1", r"\sin x", "(1,2)"]
    for h in HOSTILE:
        for form in ("%s", "\\boxed{%s}", "so\nAnswer: %s"):
            assert not timed(is_correct, form.replace("%s", h), golds[0]), (form, h[:80])
        for gold in golds:
            assert not timed(is_equiv, h, gold), (gold, h[:80])
        timed(canonical, h)
        timed(is_equiv, "7", h)        # a hostile gold does no harm either
    assert not list(Path.cwd().glob("HACKED")) and not list(ROOT.glob("HACKED"))


def test_hostile_answers_against_each_other_are_quick():
    rng = random.Random(0)
    for _ in range(150):
        a, b = rng.choice(HOSTILE), rng.choice(HOSTILE)
        timed(is_equiv, a[:4000], b[:4000])
        timed(is_equiv, f"\\sin({a[:1000]})", f"\\sqrt{{{b[:1000]}}}+x")


def many(form, n=60, by=","):
    return by.join(form.replace("K", str(k)) for k in range(1, n))


HEAVY = [
    (many("x+Ky+2z=3"), many("2x+2*Ky+4z=6")), (many("(K,x^K)"), many("(K,x^K+1)")),
    (many("\\sqrt{90K1}+1"), many("\\sqrt{90K1}+2")),
    (many("(K\\pi,K\\pi+1)", by="\\cup"), many("(K\\pi,K\\pi+2)", by="\\cup")),
    (many("x+y>Kz", by=" or "), many("x+2y>Kz", by=" or ")),
    (many("\\sin Kx"), many("2\\sin(\\frac{Kx}2)\\cos(\\frac{Kx}2)")),
    (many("(x+K)^3(y+K)(z+1)"), many("(z+1)(x+K)^3(y+K)")),
    (many("\\arctan(1/K)", 40, "+"), many("\\arctan(1/K)", 40, "+") + "+\\sin^2 1+\\cos^2 1-1"),
    ("\\binom{x}{30}" * 150, "x" + "\\binom{x}{30}" * 150), ("\\binom{2000}{1000}" * 200, "7"),
    (many("1K00!", 20, "+"), "7"), (many("\\sqrt[7]{K}", 50, "+"), many("\\sqrt[7]{K}", 50, "+") + "+\\ln 1"),
]


@pytest.mark.parametrize("gold,answer", HEAVY)
def test_heavy_pairs_are_bounded(gold, answer):
    timed(is_equiv, answer, gold)
    timed(is_equiv, gold, answer)
    timed(canonical, gold)


def test_verdict_does_not_depend_on_caches():
    pairs = [(g, a) for g, a in HEAVY if "sin K" not in g] + [(c["gold"], c["answer"]) for c in CASES[::9]]
    first = [is_equiv(a, g) for g, a in pairs]
    for cached in (verify.read, verify.judge, algebra.square_root):
        cached.cache_clear()
    assert [is_equiv(a, g) for g, a in reversed(pairs)][::-1] == first


def test_memory_stays_small():
    code = ("import sys; sys.path[:0] = ['.', 'tests']; import test_verify as t, verify\n"
            "for h in t.HOSTILE: verify.is_correct('Answer: ' + h, '7'); verify.is_equiv(h, 'x^2+\\\\sin x')\n"
            "peak = lambda pid: int(open(f'/proc/{pid}/status').read().split('VmHWM:')[1].split()[0])\n"
            "print(max([peak('self')] + [peak(w.process.pid) for w in verify.SHARED[1, 0.6].workers]) // 1024)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 300


# --- properties --------------------------------------------------------------------------------------------------------

RELAXED = dict(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", ["aime2024", "aime2025", "amc2023", "gsm8k_test", "gsm8k_train"])
def test_golds_of_data_sets_are_right_in_both_forms(name):
    golds = [r["answer"] for r in rows(name)]
    assert all(verify_batch([f"so $\\boxed{{{g}}}$" for g in golds], golds))
    assert all(verify_batch([f"**Answer:** {g}" for g in golds], golds))
    assert not any(verify_batch([f"\\boxed{{{g}1}}" for g in golds], golds))


def test_real_answers():
    """All labels of 800 real answers agree, but for the one that is known to be wrong."""
    agree = total = 0
    for r in rows("math_responses"):
        got = verify_batch(r["responses"], [r["answer"]] * len(r["responses"]))
        for text, verdict, label in zip(r["responses"], got, r["correct"], strict=True):
            total += 1
            mislabelled = r["answer"] == "10{,}000" and extract_answer(text) == "10000"
            agree += verdict is (True if mislabelled else label)
    assert (agree, total) == (800, 800)


@settings(max_examples=400, **RELAXED)
@given(st.text(max_size=200))
def test_any_text_is_safe(s):
    timed(extract_answer, s)
    timed(is_correct, s, "7")
    timed(is_equiv, s, r"\frac{x}{2}")
    assert isinstance(timed(canonical, s), str)
    timed(verify_batch, [s, f"\\boxed{{{s}}}"], [s, s])


@settings(max_examples=600, **RELAXED)
@given(st.lists(st.sampled_from(
    r"1 2 10 x y n \pi e i + - * / ^ ( ) { } [ ] | , ; = < > \le \frac \sqrt \sin \ln \log_ ! _ \{ \} \pm \cup \infty \text{ or and \begin{pmatrix} \end{pmatrix} & \\ % ^\circ cm \$ . \boxed{ 9^9 ' \in"
    .split()), max_size=25))
def test_any_sequence_of_tokens_is_safe(tokens):
    for s in ("".join(tokens), " ".join(tokens)):
        timed(is_equiv, s, "x^2+7")
        same = timed(is_equiv, s, s)
        if same:
            assert canonical(s)


TERMS = st.recursive(
    st.integers(1, 9).map(lambda n: (str(n), str(n))) | st.sampled_from([("x", "x"), ("y", "y"), (r"\pi", "pi"), (r"\sqrt{2}", "sqrt(2)")]),
    lambda t: st.tuples(st.sampled_from("+-*/"), t, t).map(lambda p: {
        "+": (f"({p[1][0]}+{p[2][0]})", f"({p[2][1]}+{p[1][1]})"), "-": (f"({p[1][0]}-{p[2][0]})", f"(-{p[2][1]}+{p[1][1]})"),
        "*": (f"{p[1][0]}\\cdot {p[2][0]}", f"{p[2][1]}*{p[1][1]}"), "/": (f"\\frac{{{p[1][0]}}}{{{p[2][0]}}}", f"({p[1][1]})/({p[2][1]})")}[p[0]]),
    max_leaves=8)


@settings(max_examples=300, **RELAXED)
@given(TERMS, st.integers(1, 10**6))
def test_rewritten_expressions_are_equal_and_perturbed_ones_are_not(pair, n):
    latex, plain = pair
    if verify.read(latex)[1]:          # a division by zero
        return
    assert is_equiv(plain, latex) and is_equiv(latex, plain)
    assert not is_equiv(f"{plain}+1/{n}", latex) and not is_equiv(latex, f"2*x*({plain})+1/{n}+y^9")
    if verify.kind_of(verify.read(latex)[0]) == "expression":
        assert canonical(plain) == canonical(latex)


@settings(max_examples=300, **RELAXED)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_against_exact_arithmetic(p, q):
    a, b = f"\\frac{{{p.numerator}}}{{{p.denominator}}}", f"{q.numerator}/{q.denominator}"
    assert is_equiv(b, a) is (p == q)
    assert is_equiv(f"{p.numerator * 3}/{p.denominator * 3}", a)
    whole, part = divmod(abs(p), 1)
    if part and whole:
        sign = "-" if p < 0 else ""
        assert is_equiv(f"{sign}{whole}\\frac{{{part.numerator}}}{{{part.denominator}}}", a)
        assert is_equiv(f"{sign}{whole} {part.numerator}/{part.denominator}", a)


@settings(max_examples=200, **RELAXED)
@given(st.integers(-10**15, 10**15), st.integers(0, 6))
def test_decimals_against_exact_arithmetic(n, places):
    exact = Fraction(n, 10**places)
    text = f"{'-' if n < 0 else ''}{abs(n) // 10**places}.{abs(n) % 10**places:0{places}d}" if places else str(n)
    assert is_equiv(text, f"{exact.numerator}/{exact.denominator}")
    assert is_equiv(f"{n}e-{places}" if places else text, text)
    assert not is_equiv(text + "1" if places else text + ".1", text)
    grouped = f"{n:,}"
    assert is_equiv(grouped, str(n)) and is_equiv(grouped.replace(",", "{,}"), str(n)) and is_equiv(grouped.replace(",", "\u202f"), str(n))


@settings(max_examples=150, **RELAXED)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6, unique=True), st.randoms())
def test_lists_have_no_order_and_tuples_have(values, rng):
    other = values[:]
    rng.shuffle(other)
    assert is_equiv(", ".join(map(str, other)), "\\{" + ",".join(map(str, values)) + "\\}")
    assert is_equiv(f"({', '.join(map(str, other))})", f"({', '.join(map(str, values))})") is (other == values)
    assert not is_equiv(", ".join(map(str, other)), str(values[0]))
    assert not is_equiv(", ".join(map(str, other[:-1] + [99])), ", ".join(map(str, values)))


# --- threads, processes, limits ------------------------------------------------------------------------------------------

HARD = [(r"\sin 2x", r"2\sin x\cos x", True), (r"\sin 2x", r"\sin x", False), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2", True)]


def test_same_verdict_from_threads():
    got = []

    def run():
        got.extend(is_equiv(a, g) is want for g, a, want in HARD * 5)
        got.append(verify_batch(["\\boxed{%s}" % a for _, a, _ in HARD], [g for g, _, _ in HARD]) == [True, False, True])
    threads = [threading.Thread(target=run) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(got) == 6 * 16 and all(got)


def test_same_verdict_in_a_forked_child():
    verify.SHARED.clear()
    assert is_equiv(HARD[0][1], HARD[0][0])
    child = os.fork()
    if child == 0:
        ok = all(is_equiv(a + "+0", g) is want for g, a, want in HARD)
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_equiv(HARD[2][1], HARD[2][0])


def test_workers_end_with_their_parent():
    code = ("import sys; sys.path[:0] = ['.']; import verify, os\n"
            "verify.is_equiv('\\\\sin x', '\\\\cos x'); print(verify.SHARED[1, 0.6].workers[0].process.pid, flush=True); os.kill(os.getpid(), 9)")
    pid = int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout)
    for _ in range(80):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":               # ended, waiting for its new parent
            return
        time.sleep(0.1)
    raise AssertionError("the worker outlived its parent")


def test_a_worker_over_time_is_replaced():
    v = Verifier(workers=1, time_limit=0.0)
    assert v.verify_batch([f"\\boxed{{{HARD[0][1]}}}"], [HARD[0][0]]) == [False]
    assert v.counts["undecided: time"] == 1
    v.time_limit = 5.0
    assert v.verify_batch([f"\\boxed{{{HARD[2][1]}}}"], [HARD[2][0]]) == [True]
    v.workers[0].process.kill()        # one that died is replaced, and its pair is not lost
    v.workers[0].process.wait()
    assert v.verify_batch([f"\\boxed{{{HARD[0][1]}+0x}}"], [HARD[0][0]]) == [True]
    v.close()


def test_workers_that_were_slow_to_start_do_not_mix_up_results():
    """Many short batches: a worker that came up too late for one batch answers in the next, in step."""
    for _ in range(3):
        v = Verifier(workers=3)
        for k in range(1, 6):
            golds = [f"\\sin {k}x", f"\\cos {k}x", f"\\sin {k}x"]
            texts = [f"\\boxed{{2\\sin\\frac{{{k}x}}{{2}}\\cos\\frac{{{k}x}}{{2}}}}", f"\\boxed{{\\sin {k}x+0.1}}", f"\\boxed{{\\cos(\\frac{{\\pi}}{{2}}-{k}x)}}"]
            assert v.verify_batch(texts, golds) == [True, False, True]
        assert not [kind for kind in v.counts if kind.startswith("undecided")]
        v.close()


def test_deep_callers_and_undecided_pairs_are_counted():
    def dive(n):
        return dive(n - 1) if n else is_equiv("((((x+1))))(x-1)", "x^2-1")
    assert dive(sys.getrecursionlimit() - 120) in (True, False)
    v = Verifier(1)
    assert v.verify_batch(["\\boxed{e^{e^{e^{e^{e}}}}}", "\\boxed{\\frac}", "nothing", "\\boxed{1}"], ["7"] * 4) == [False] * 4
    assert v.counts["undecided: undecided"] == 1 and v.counts["no answer"] == 1 and v.counts["wrong"] == 2
    v.close()


def test_no_heavy_import():
    code = "import sys; sys.path[:0] = ['.']; import verify; verify.is_correct('Answer: 2\\\\sqrt3', '\\\\sqrt{12}'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert not {"torch", "sympy", "mpmath", "numpy", "rlep", "model", "replay"} & set(loaded)


def test_batch_of_a_training_step_is_quick():
    """512 questions of 18 responses of realistic length in under 3 s on two cores (measured: tests/bench/verify.py)."""
    rng = random.Random(1)
    words = "".join(rng.choice(string.ascii_lowercase + "  .\n") for _ in range(4000))
    golds = [str(rng.randint(0, 999)) for _ in range(512) for _ in range(18)]
    texts = [words + f"\n\\boxed{{{g if rng.random() < .5 else rng.randint(0, 999)}}}" for g in golds]
    start = time.monotonic()
    got = verify_batch(texts, golds)
    assert time.monotonic() - start < 3 and 0.45 < sum(got) / len(got) < 0.55


def test_canonical_groups_votes():
    groups = [["1/2", "0.5", r"\frac12", "$\\frac{2}{4}$"], [r"2\sqrt3", r"\sqrt{12}"], ["1,2", "2,1", r"\{1,2\}"], ["x=5", "5", "5 cm"], ["(1,2)"]]
    keys = [{canonical(a) for a in g} for g in groups]
    assert all(len(k) == 1 for k in keys) and len(set.union(*keys)) == len(groups)
    assert canonical(None) == canonical("") == ""


# --- the command line ----------------------------------------------------------------------------------------------------

def run(*args):
    return subprocess.run([sys.executable, str(ROOT / "verify.py"), *args], capture_output=True, text=True, timeout=60)


def test_explain():
    done = run(r"\frac{1}{2}", r"so \boxed{0.5}")
    assert done.returncode == 0 and "0.5" in done.stdout and "1/2" in done.stdout and "correct" in done.stdout and "stage" in done.stdout
    assert "no answer line" in run("5", "it is 5").stdout and "unreadable" in run("", r"\boxed{5}").stdout
    assert "set for expression" in run("5", "Answer: 5 or 6").stdout


def test_file(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"answer": "5", "response": "\\\\boxed{5}"}\n{"answer": "6", "responses": ["x", "Answer: 7"], "correct": [false, true]}\n')
    done = run(str(good))
    assert done.returncode == 0 and "1 of 3 correct; 1 of 2 labels agree" in done.stdout and "no answer" in done.stdout


@pytest.mark.parametrize("text,place", [('{"answer": 1\n', ":1:"), ('{"answer": "5", "response": "a"}\n{"response": "a"}\n', ":2:"),
                                        ('[1]\n', ":1:"), ('{"answer": "5", "responses": [1]}\n', ":1:"), (None, "can't be read"), (b"\xff\xfe", "can't be read")])
def test_bad_input_is_one_clear_line(tmp_path, text, place):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = run(str(path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and place in done.stderr and "rows.jsonl" in done.stderr and "Traceback" not in done.stderr


def test_help():
    done = run("--help")
    assert done.returncode == 0 and "examples" in done.stdout
