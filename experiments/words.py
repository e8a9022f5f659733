"""experiments/words.py: a richer task than tiny.py's sums, to see whether what replay does there is an artefact of one toy.

    python experiments/words.py --out=runs/words --seed=0     # base/ (a Hugging Face folder), train.jsonl, test.jsonl; minutes
    python experiments/run.py --task=words                    # all arms on it

The task: a story of 2 to 4 people, each but one told by relation to another one, the sentences in any order, and a question:

    Bob has 4 more than Ann. Cid has twice as many as Bob. Ann has 7 pens. How many pens do Ann and Cid have together?

A response may work out whom it needs in any order that the relations allow, and write down each step or leave it out:

    Bob has 4 more than Ann 7 = Bob 11, Cid has twice as many as Bob 11 = Cid 22, so Ann 7 + Cid 22 = 29⏎Answer: 29

so a question has several right ways to reason. A step begins as the sentence that it takes up: copying is what so small a model
learns first. Base model, questions and files are made by the functions of tiny.py, which take from this file what has the same
name there: the numbers in capitals, make_question, key, answer, make_response and make_tokenizer.
"""
import os
import random
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tiny  # noqa: E402

NAME = SOURCE = "words"  # what these and the others are: tiny.py
SHAPE = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=128,
             initializer_range=0.05)  # 1.8 million parameters
STEPS, LR, BATCH = (1800, 150), (1e-3, 3e-4), 16
BARE, ENOUGH = 0.9, 0.18
ANSWER = "\nAnswer:"
PEOPLE = "Ann Bob Cid Dan Eve Fay Gus Hal".split()
THINGS = "pens cups hats keys".split()
LARGEST = 30  # that a person has; two have 60 together
RELATIONS = {"+": "{} more than", "-": "{} fewer than", "*": "twice as many as"}
QUESTIONS = {"one": "How many {things} does {0} have?", "+": "How many {things} do {0} and {1} have together?",
             "-": "How many more {things} does {0} have than {1}?"}
WORDS = sorted(set(" ".join([*RELATIONS.values(), *QUESTIONS.values()]).replace("?", "").split()) - {"{}", "{0}", "{1}", "{things}"})
SYMBOLS = ["<pad>", "<eos>", *map(str, range(100)), *"+-=,.?", ANSWER, "has", "so", *WORDS, *PEOPLE, *THINGS]

# A story is (facts, kind, asked): facts has name -> (other, sign, number), the first one's ("", "+", number), and a name after
# the other that it is told by; kind is a key of QUESTIONS, asked the one or two names in it.
Story = tuple[dict[str, tuple[str, str, int]], str, list[str]]


def amounts(facts: dict) -> dict[str, int]:
    """What each one has."""
    have = {"": 0}
    for name, (other, sign, number) in facts.items():
        have[name] = compute(have[other], sign, number)
    return have


def compute(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def make_question(rng: random.Random) -> tuple[str, Story]:
    """A text and the story that it tells. Nobody has less than 1 or more than LARGEST; a difference is above 0, and not told as such."""
    while True:
        names = rng.sample(PEOPLE, rng.randint(2, 4))
        facts = {names[0]: ("", "+", rng.randint(2, 9))}
        for name in names[1:]:
            sign = rng.choice("+-*")
            facts[name] = rng.choice(list(facts)), sign, 2 if sign == "*" else rng.randint(1, 9)
        kind = rng.choice(list(QUESTIONS))
        asked = rng.sample(names, 2) if kind != "one" else [rng.choice(names[1:])]
        have = amounts(facts)
        told = any(facts[name][0] in asked for name in asked)  # by how much they differ
        if all(0 < have[name] <= LARGEST for name in names) and (kind != "-" or have[asked[0]] > have[asked[1]] and not told):
            break
    things = rng.choice(THINGS)
    sentences = [f"{name} has {RELATIONS[sign].format(number)} {other}." if other else f"{name} has {number} {things}."
                 for name, (other, sign, number) in facts.items()]
    rng.shuffle(sentences)
    return " ".join([*sentences, QUESTIONS[kind].format(*asked, things=things)]), (facts, kind, asked)


def key(story: Story) -> tuple:
    """The same for stories that are the same but for names, things and the order of the sentences: how each one's number comes about."""
    facts, kind, asked = story
    ways = {"": ()}
    for name, (other, sign, number) in facts.items():
        ways[name] = (*ways[other], sign + str(number))
    return tuple(sorted(ways.values())), kind, tuple(ways[name] for name in (sorted(asked, key=ways.get) if kind == "+" else asked))


def answer(story: Story) -> int:
    facts, kind, asked = story
    have = amounts(facts)
    return have[asked[0]] if kind == "one" else compute(have[asked[0]], kind, have[asked[1]])


def make_response(rng: random.Random, story: Story, keep: float) -> str:
    """A right response: whom it needs in random order, each step written with probability `keep`; with 0 the bare answer."""
    facts, kind, asked = story
    have, left, steps = amounts(facts), set(asked), []
    for name in reversed(facts):  # and those that they are told by
        left |= {facts[name][0]} if name in left else set()
    left -= {"", next(iter(facts))}  # the first one's number is given
    while left:
        name = rng.choice([name for name in facts if name in left and facts[name][0] not in left])
        left.remove(name)
        other, sign, number = facts[name]
        steps.append(f"{name} has {RELATIONS[sign].format(number)} {other} {have[other]} = {name} {have[name]}")
    if kind != "one":
        a, b = rng.sample(asked, 2) if kind == "+" else asked
        steps.append(f"so {a} {have[a]} {kind} {b} {have[b]} = {answer(story)}")
    return ", ".join(step for step in steps if rng.random() < keep) + f"{ANSWER} {answer(story)}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word, number or sign is a token; spaces are none: they come back between words, and before no sign that ends something."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{ANSWER}|[A-Za-z]+|[0-9]{{1,2}}|[^\sA-Za-z0-9]"), "removed", invert=True)
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(cleanup=True), decoders.Replace(f" {ANSWER}", ANSWER)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    try:
        tiny.main(sys.modules[__name__])
    except tiny.InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
