"""Answer verification (first, simple version: extraction and exact rationals; the interface is final).

extract_answer(response) -> str | None     content of the last box, else of the last answer line
is_equiv(answer, gold) -> bool             exact equality of two bare answers
is_correct(response, gold) -> bool
canonical(answer) -> str                   a key for majority voting
Verifier(workers, time_limit).verify_batch(responses, golds) -> list[bool | None], .counts, .close()
verify_batch(responses, golds, workers=2, time_limit=1.0) -> list[bool | None]   None: the gold is unreadable
"""
import re
from collections import Counter
from fractions import Fraction

MAX_ANSWER = 4096


def extract_answer(response):
    start = max(response.rfind("\\boxed{"), response.rfind("\\fbox{"))
    if start >= 0:
        depth, begin = 0, response.index("{", start)
        for m in re.compile(r"\\.|[{}]", re.S).finditer(response, begin, begin + MAX_ANSWER):
            depth += {"{": 1, "}": -1}.get(m[0], 0)
            if depth == 0:
                return response[begin + 1:m.start()].strip() or None
        return None
    for line in reversed(response[-200_000:].splitlines()):
        m = re.match(r"[\s#*>_-]{0,20}(?:final )?answer[*_ ]{0,9}[::](.*)", line[:MAX_ANSWER], re.I)
        if m:
            return m[1].strip(" *$`._\"") or None
    return None


def canonical(answer):
    text = re.sub(r"\\[,!; ]|[\s${}]", "", (answer or "")[:MAX_ANSWER].replace("{,}", ","))
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"[+-]?[0-9]{1,4000}(\.[0-9]{0,4000}|/0*[1-9][0-9]{0,4000})?", text):
        return hex(Fraction(text.rstrip(".")).numerator) + "/" + hex(Fraction(text.rstrip(".")).denominator)
    return text


def is_equiv(answer, gold):
    return bool(canonical(gold)) and canonical(answer) == canonical(gold)


def is_correct(response, gold):
    answer = extract_answer(response)
    return answer is not None and is_equiv(answer, gold)


class Verifier:
    def __init__(self, workers=2, time_limit=1.0):
        self.counts = Counter()

    def verify_batch(self, responses, golds):
        return [is_correct(r, g) if canonical(g) else None for r, g in zip(responses, golds, strict=True)]

    def close(self):
        pass


def verify_batch(responses, golds, workers=2, time_limit=1.0):
    return Verifier(workers, time_limit).verify_batch(responses, golds)
