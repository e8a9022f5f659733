"""tiny.py: the embedded default: a tiny base model, its tokenizer and its arithmetic task, so that all of RLEP runs on a laptop.

    python tiny.py --out=runs/tiny --seed=0        # writes base/ (a Hugging Face folder), train.jsonl, test.jsonl; half a minute

The task: sums of 3 to 5 different numbers, some of them subtracted: `6-9+2+4=`. A response may take the terms in any order
that keeps the subtotals from falling below 0, and write down each subtotal or leave it out, before its answer line:

    6+4=10-9+2=3⏎Answer: 3
    2+6=8+4=12-9=3⏎Answer: 3

so a question has many right ways to reason, and the shared verifier reads the answer. The base model has learnt to work in
full but seldom does: most of the time it answers at once, and then it is nearly always wrong. That is what a pretrained
model is to RL: a success is rare at first, and what makes it likely is already there, to be found and made frequent.
"""
import argparse
import json
import os
import random
import shutil
import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data import InputError
from model import derive_seed

THIS = sys.modules[__name__]  # the task that functions with `task` take unless told otherwise; experiments/words.py is another one
ANSWER = "\nAnswer: "  # one token
NAME, SOURCE = "sums", "tiny"
SHAPE = dict(hidden_size=64, intermediate_size=168, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
             initializer_range=0.1)  # at the usual 0.02 so narrow a model takes several times as long to learn
STEPS, LR, BATCH = (1000, 80), (3e-3, 3e-4), 64  # of the two parts of the warm-up: most steps, learning rates; rows of a step
BARE = 0.8  # share of bare answers in the second part; with 0.85 a base may never find out that it should work in full
ENOUGH = 0.3  # nats per token; 0.25 is a better base, which leaves RL less to gain
SYMBOLS = ["<pad>", "<eos>", *map(str, range(40)), *"+-=", ANSWER]  # a number is one token; the largest total is 35


def make_question(rng: random.Random) -> tuple[str, list[int]]:
    """A sum of 3 to 5 different numbers from 1 to 9 and its signed terms, the first one positive. The total is at least 0."""
    while True:
        numbers = rng.sample(range(1, 10), rng.randint(3, 5))
        terms = numbers[:1] + [n * rng.choice((1, -1)) for n in numbers[1:]]
        if sum(terms) >= 0:
            return "".join(f"{t:+d}" for t in terms)[1:] + "=", terms


def key(terms: list[int]) -> tuple:
    """The same for questions that are the same but for the order of the terms."""
    return tuple(sorted(terms))


def answer(terms: list[int]) -> int:
    return sum(terms)


def make_response(rng: random.Random, terms: list[int], keep: float) -> str:
    """A right response: the terms in random order, each subtotal written with probability `keep`; with 0 the bare answer."""
    left, total, text = list(terms), 0, ""
    while left and keep:
        term = rng.choice([t for t in left if total + t >= 0])  # there is one: what is left adds up to a total of at least 0
        left.remove(term)
        total += term
        text += f"{term:+d}" + (f"={total}" if text and rng.random() < keep else "")
    return text[1:] + ANSWER + str(sum(terms))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole numbers, so that one step of arithmetic is one prediction. Every string of its characters can be encoded."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{ANSWER}|[1-3]?[0-9]|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)


def write_questions(path: str, rng: random.Random, count: int, source: str, taken: set[tuple], task=THIS) -> None:
    """`count` questions of the task whose key is not in `taken`, which grows by them."""
    with open(path, "w") as f:
        while count:
            text, terms = task.make_question(rng)
            if task.key(terms) not in taken:
                taken.add(task.key(terms))
                count -= 1
                f.write(json.dumps({"id": f"{source}-{text}", "problem": text, "answer": str(task.answer(terms)), "source": source, "prompt": text}) + "\n")


def supervised_step(model, optimizer, tokenizer, pairs: list[tuple[str, str]], lr: float) -> float:
    """One step of next-token prediction on the responses of (question, response) pairs. Returns the loss, nats per token."""
    questions, responses = (tokenizer(list(texts))["input_ids"] for texts in zip(*pairs))
    rows = [torch.tensor(q + r + [tokenizer.eos_token_id]) for q, r in zip(questions, responses)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, T)
    position, starts = torch.arange(ids.shape[1]), torch.tensor([len(q) for q in questions])
    in_response = (position >= starts[:, None]) & (position < torch.tensor([len(r) for r in rows])[:, None])
    labels = ids.masked_fill(~in_response, -100)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def make_base(folder: str, seed: int, held_out: set[tuple], arithmetic_steps: int, strategy_steps: int, task=THIS) -> None:
    """Train the base model in two parts and save it. Questions with a key in `held_out` are never trained on.

    First responses with every subtotal, so that it learns to copy terms and to add. This stops at a given loss, at which
    about 4 in 10 of them come out right, and not after a given number of steps: seeds differ in when it clicks, a base that
    is already good leaves RL nothing to gain, and one that cannot add never has a success to learn from. Then, at a low
    rate, mostly bare answers, the rest with subtotals left out at random, so that it seldom works in full.
    """
    tokenizer = task.make_tokenizer()
    torch.manual_seed(derive_seed("tiny base", seed) % 2**32)
    rng = random.Random(derive_seed("tiny warm-up", seed))
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **task.SHAPE))

    def pairs(bare: float, full: float) -> list[tuple[str, str]]:
        out = []
        while len(out) < task.BATCH:
            question, terms = task.make_question(rng)
            if task.key(terms) not in held_out:
                u = rng.random()
                out.append((question, task.make_response(rng, terms, 0.0 if u < bare else 1.0 if u < bare + full else rng.random())))
        return out

    optimizer, average = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True), 3.0
    for step in tqdm(range(arithmetic_steps), desc="base model: arithmetic", unit="step", disable=None):
        loss = supervised_step(model, optimizer, tokenizer, pairs(0.0, 1.0), task.LR[0] * min(1, (step + 1) / 20))
        average = 0.95 * average + 0.05 * loss
        if average < task.ENOUGH:
            break
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    for step in tqdm(range(strategy_steps), desc="base model: strategy", unit="step", disable=None):
        supervised_step(model, optimizer, tokenizer, pairs(task.BARE, 0.0), task.LR[1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(task=THIS) -> None:
    parser = argparse.ArgumentParser(description=task.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to make; an existing complete one is left as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the base model and of the questions")
    parser.add_argument("--train", type=int, default=256, help="training questions")
    parser.add_argument("--test", type=int, default=200, help="held-out questions")
    parser.add_argument("--arithmetic_steps", type=int, default=task.STEPS[0], help="most warm-up steps on responses in full; a loss ends them")
    parser.add_argument("--strategy_steps", type=int, default=task.STEPS[1], help="warm-up steps on mostly bare answers")
    args = parser.parse_args()
    if min(args.train, args.test) < 1 or args.train + args.test > 3000 or min(args.arithmetic_steps, args.strategy_steps) < 0:
        raise InputError("--train and --test must be at least 1 and 3000 at most together, the warm-up steps at least 0")
    settings, marker = vars(args) | {"out": None, "task": task.NAME}, os.path.join(args.out, "tiny.json")
    if os.path.exists(marker):
        with open(marker) as f:
            if json.load(f) != settings:
                raise InputError(f"--out={args.out}: was made with other settings; choose another folder")
        print(f"{args.out}: already made")
        return
    if os.path.isdir(args.out) and os.listdir(args.out):
        raise InputError(f"--out={args.out}: holds other files; choose another folder")
    tmp = args.out.rstrip("/") + ".tmp"  # written beside, renamed whole
    shutil.rmtree(tmp, ignore_errors=True)
    os.makedirs(tmp)
    rng, taken = random.Random(derive_seed("tiny questions", args.seed)), set()
    write_questions(os.path.join(tmp, "test.jsonl"), rng, args.test, f"{task.SOURCE}-test", taken, task)
    held_out = set(taken)
    write_questions(os.path.join(tmp, "train.jsonl"), rng, args.train, f"{task.SOURCE}-train", taken, task)
    make_base(os.path.join(tmp, "base"), args.seed, held_out, args.arithmetic_steps, args.strategy_steps, task)
    with open(os.path.join(tmp, "tiny.json"), "w") as f:
        json.dump(settings, f)
    shutil.rmtree(args.out, ignore_errors=True)
    os.rename(tmp, args.out)
    print(f"{args.out}: base model, {args.train} training and {args.test} held-out questions")


if __name__ == "__main__":
    try:
        main()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
