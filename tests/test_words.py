"""experiments/words.py: its stories worked out here on their own from the text, its responses, its files, what it refuses."""
import json
import os
import random
import re
import sys

import pytest
from conftest import ROOT, refused, run

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import tiny  # noqa: E402
import words  # noqa: E402
from verify import is_correct  # noqa: E402

SMALL = ("--train=12", "--test=8", "--arithmetic_steps=3", "--strategy_steps=2")


def solve(text):
    """What each one has, and the answer, from the text alone: a sentence whose other person is not known yet waits."""
    *sentences, question = re.findall(r"[^.?]+[.?]", text)
    have = {}
    while sentences:
        sentence = sentences.pop(0).strip()
        if m := re.fullmatch(r"(\w+) has (\d+) [a-z]+\.", sentence):
            have[m[1]] = int(m[2])
        elif (m := re.fullmatch(r"(\w+) has (\d+) (more|fewer) than (\w+)\.", sentence)) and m[4] in have:
            have[m[1]] = have[m[4]] + int(m[2]) * (1 if m[3] == "more" else -1)
        elif (m := re.fullmatch(r"(\w+) has twice as many as (\w+)\.", sentence)) and m[2] in have:
            have[m[1]] = 2 * have[m[2]]
        else:
            assert re.search(r"than|twice", sentence), sentence
            sentences.append(sentence)
    asked = [have[name] for name in re.findall(r"[A-Z]\w+", question.replace("How", ""))]
    if "together" in question:
        return have, sum(asked)
    return have, asked[0] - asked[1] if "more" in question else asked[0]


def examples(count=400, seed=0):
    rng = random.Random(seed)
    return [(rng, *words.make_question(rng)) for _ in range(count)]


def test_answers_are_right_by_the_text():
    kinds = set()
    for _, text, story in examples():
        have, answer = solve(text)
        assert words.answer(story) == answer > 0 and {k: v for k, v in words.amounts(story[0]).items() if k} == have, text
        assert all(0 < number <= words.LARGEST for number in have.values()) and 2 <= len(have) <= 4
        kinds.add(story[1])
    assert kinds == set(words.QUESTIONS)


def test_responses_are_right_and_many():
    """Every step written is true arithmetic on true numbers, the last line is the answer; one question has several responses."""
    several = 0
    for rng, text, story in examples():
        have, answer = solve(text)
        for keep in (0.0, 0.5, 1.0):
            steps, _, last = words.make_response(rng, story, keep).rpartition(words.ANSWER)
            assert is_correct(words.ANSWER + last, str(answer)) and not is_correct(words.ANSWER + last + "1", str(answer))
            assert bool(steps) or keep < 1
            assert not steps or keep
            for step in steps.split(", ") if steps else ():
                if m := re.fullmatch(r"so (\w+) (\d+) ([+-]) (\w+) (\d+) = (\d+)", step):
                    assert (have[m[1]], have[m[4]], answer) == (int(m[2]), int(m[5]), int(m[6]))
                    assert answer == int(m[2]) + int(m[3] + m[5])
                else:  # a sentence of the story, with the numbers of both
                    sentence, other, x, name, y = re.fullmatch(r"(.+ (\w+)) (\d+) = (\w+) (\d+)", step).groups()
                    assert f"{sentence}." in text and sentence.startswith(name) and (have[other], have[name]) == (int(x), int(y))
        several += len({words.make_response(rng, story, 0.5) for _ in range(20)}) > 3
    assert several > 200


def test_full_responses_work_in_an_order_that_the_relations_allow():
    facts = {"Ann": ("", "+", 7), "Bob": ("Ann", "+", 4), "Cid": ("Bob", "*", 2), "Dan": ("Ann", "-", 5), "Eve": ("Dan", "+", 1)}
    story = facts, "+", ["Cid", "Dan"]
    assert words.answer(story) == 24
    rng, found = random.Random(0), set()
    for _ in range(200):
        found.add(words.make_response(rng, story, 1.0))
    bob, cid, dan = "Bob has 4 more than Ann 7 = Bob 11", "Cid has twice as many as Bob 11 = Cid 22", "Dan has 5 fewer than Ann 7 = Dan 2"
    orders = (bob, cid, dan), (bob, dan, cid), (dan, bob, cid)
    last = "so Cid 22 + Dan 2 = 24", "so Dan 2 + Cid 22 = 24"  # Eve is not asked for
    assert found == {", ".join([*order, end]) + "\nAnswer: 24" for order in orders for end in last}


def test_key_is_blind_to_names_and_order_alone():
    one = {"Ann": ("", "+", 7), "Bob": ("Ann", "+", 4), "Cid": ("Ann", "*", 2)}, "-", ["Cid", "Bob"]
    same = {"Eve": ("", "+", 7), "Ann": ("Eve", "*", 2), "Fay": ("Eve", "+", 4)}, "-", ["Ann", "Fay"]
    assert words.key(one) == words.key(same)
    others = [({**one[0], "Bob": ("Ann", "+", 5)}, "-", ["Cid", "Bob"]), ({**one[0], "Cid": ("Bob", "*", 2)}, "-", ["Cid", "Bob"]),
              (one[0], "-", ["Bob", "Cid"]), (one[0], "+", ["Cid", "Bob"]), (one[0], "one", ["Bob"])]
    assert len({words.key(story) for story in (one, *others)}) == 6
    assert words.key((one[0], "+", ["Cid", "Bob"])) == words.key((one[0], "+", ["Bob", "Cid"]))


def test_tokenizer_gives_texts_back():
    tokenizer, unknown = words.make_tokenizer(), set()
    assert len(tokenizer) == len(set(words.SYMBOLS))
    for rng, text, story in examples(200):
        for text in (text, words.make_response(rng, story, 0.0), words.make_response(rng, story, 1.0)):
            ids = tokenizer(text)["input_ids"]
            unknown |= {None} & set(ids)
            assert tokenizer.decode(ids) == text
    assert not unknown


def test_same_seed_same_files_and_held_out_stories_are_never_trained_on(tmp_path, monkeypatch):
    seen = []

    def note(model, optimizer, tokenizer, pairs, lr):
        seen.extend(question for question, _ in pairs)
        return step(model, optimizer, tokenizer, pairs, lr)

    step = tiny.supervised_step
    monkeypatch.setattr(tiny, "supervised_step", note)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        monkeypatch.setattr(sys, "argv", ["words.py", f"--out={tmp_path}/{name}", f"--seed={seed}", *SMALL])
        tiny.main(words)
        if name == "a":
            trained = set(seen)
    files = lambda name: {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}  # noqa: E731
    assert files("a") == files("b") and {str(path) for path in files("a")} >= {"train.jsonl", "test.jsonl", "base/model.safetensors"}
    assert all(files("a")[path] != data for path, data in files("c").items() if path.suffix in (".jsonl", ".safetensors"))

    rows = {part: [json.loads(line) for line in (tmp_path / "a" / f"{part}.jsonl").read_text().splitlines()] for part in ("train", "test")}
    assert [len(rows[part]) for part in ("train", "test")] == [12, 8]
    assert all(row["prompt"] == row["problem"] and row["answer"] == str(solve(row["problem"])[1]) for part in rows for row in rows[part])
    test = {likeness(row["problem"]) for row in rows["test"]}
    assert len(test) == 8 and not test & {likeness(row["problem"]) for row in rows["train"]} and not test & {likeness(text) for text in trained}
    assert len(trained) > 60


def likeness(text):
    """The same for texts that differ in the order of sentences, in names and things alone: names by the number that they stand for,
    where that is no one else's; the others by what is told of them. Made from the text, so that words.key() has a check."""
    *sentences, question = re.findall(r"[^.?]+[.?]", text)
    parents = {m[1]: (m[3], m[2]) for s in sentences if (m := re.fullmatch(r"(\w+) has (.+) (\w+)\.", s.strip()))}
    way = lambda name: "" if not name[0].isupper() else parents[name][1] + " < " + way(parents[name][0])  # noqa: E731
    question = re.sub(r"many (more )?[a-z]+", r"many \1", question)
    names = re.findall(r"[A-Z]\w+", question.replace("How", ""))
    asked = [way(name) for name in names]
    return tuple(sorted(map(way, parents))), re.sub(r"\b(?!How)[A-Z]\w+", "X", question), tuple(sorted(asked) if "together" in question else asked)


def test_refuses_and_leaves_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "holds other files" in refused("experiments/words.py", f"--out={tmp_path}")
    assert "--train" in refused("experiments/words.py", f"--out={tmp_path}/a", "--train=0")
    out = f"--out={tmp_path}/made"
    run("experiments/words.py", out, *SMALL)
    before = {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert "already made" in run("experiments/words.py", out, *SMALL).stdout
    assert "other settings" in refused("experiments/words.py", out, "--seed=1", *SMALL)
    assert "other settings" in refused("tiny.py", out, *SMALL)  # of the other task
    assert before == {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}


@pytest.mark.parametrize("option", ["--seed=x", "--trian=3"])
def test_bad_options_end_with_2(option, tmp_path):
    result = run("experiments/words.py", f"--out={tmp_path}/x", option, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stderr.splitlines()[-1].startswith("words.py: error: ")
