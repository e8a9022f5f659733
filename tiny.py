"""tiny.py: the embedded default: a tiny base model, its tokenizer and its arithmetic task, so that all of RLEP runs on a laptop.

    python tiny.py --out=runs/tiny --seed=0        # writes base/ (a Hugging Face folder), train.jsonl, test.jsonl; about a minute

The task: chains of 3 to 6 numbers, worked from left to right (no precedence): `7*4+9-3=` has the partial results
28, 37, 34. A response may write down any of the partial results, or none, before its answer line:

    28,37⏎Answer: 34

so a question has several right ways to reason, and the shared verifier reads the answer. The base model knows the
arithmetic but mixes good and poor strategies, answering at once much of the time: what a pretrained model is to RL, and
where a success is rare at first, as the paper's hard questions are.
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
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from data import InputError
from model import derive_seed

ANSWER = "\nAnswer: "  # one token
SYMBOLS = ["<pad>", "<eos>", *"0123456789+-*=,", ANSWER]


def make_question(rng: random.Random) -> tuple[str, list[int]]:
    """A chain of 3 to 6 numbers and its partial results, each in 0..99."""
    while True:
        value = rng.randint(1, 9)
        text, partials = str(value), []
        for _ in range(rng.randint(2, 5)):
            op = rng.choice("+-*")
            operand = rng.randint(2 if op == "*" else 1, 9)
            value = {"+": value + operand, "-": value - operand, "*": value * operand}[op]
            text += f"{op}{operand}"
            partials.append(value)
        if all(0 <= p <= 99 for p in partials):
            return text + "=", partials


def make_response(rng: random.Random, partials: list[int], keep: float) -> str:
    """A right response that writes each partial result with probability `keep`."""
    return ",".join(str(p) for p in partials[:-1] if rng.random() < keep) + ANSWER + str(partials[-1])


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{ANSWER}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)


def write_questions(path: str, rng: random.Random, count: int, source: str, taken: set[str]) -> None:
    """`count` questions that are not in `taken`, which grows by them."""
    with open(path, "w") as f:
        while count:
            text, partials = make_question(rng)
            if text not in taken:
                taken.add(text)
                count -= 1
                f.write(json.dumps({"id": f"{source}-{text}", "problem": text, "answer": str(partials[-1]), "source": source, "prompt": text}) + "\n")


def supervised_step(model, optimizer, tokenizer, pairs: list[tuple[str, str]], lr: float) -> None:
    """One step of next-token prediction on the responses of (question, response) pairs."""
    questions = [tokenizer(q)["input_ids"] for q, _ in pairs]
    rows = [torch.tensor(q + tokenizer(r)["input_ids"] + [tokenizer.eos_token_id]) for q, (_, r) in zip(questions, pairs)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, T)
    position, starts = torch.arange(ids.shape[1]), torch.tensor([len(q) for q in questions])
    in_response = (position >= starts[:, None]) & (position < torch.tensor([len(r) for r in rows])[:, None])
    labels = ids.masked_fill(~in_response, -100)
    for group in optimizer.param_groups:
        group["lr"] = lr
    model(input_ids=ids, labels=labels).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def make_base(folder: str, seed: int, held_out: set[str], arithmetic_steps: int, strategy_steps: int) -> None:
    """Train the base model in two parts and save it.

    First full chains, so that it learns arithmetic; then, at a low rate, half bare answers and half chains with some
    partials left out, so that it seldom reasons in full. Held-out questions are never trained on.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(derive_seed("tiny base", seed) % 2**32)
    rng = random.Random(derive_seed("tiny warm-up", seed))
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=168, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in tqdm(range(arithmetic_steps + strategy_steps), desc="base model", unit="step", disable=None):
        pairs = []
        while len(pairs) < 64:
            question, partials = make_question(rng)
            if question in held_out:
                continue
            keep = 1.0 if step < arithmetic_steps else 0.0 if rng.random() < 0.5 else rng.random()
            pairs.append((question, make_response(rng, partials, keep)))
        lr = 3e-3 * (1 - step / arithmetic_steps) if step < arithmetic_steps else 3e-4
        supervised_step(model, optimizer, tokenizer, pairs, lr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to make; an existing complete one is left as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the base model and of the questions")
    parser.add_argument("--train", type=int, default=256, help="training questions")
    parser.add_argument("--test", type=int, default=200, help="held-out questions")
    parser.add_argument("--arithmetic_steps", type=int, default=800, help="warm-up steps on full chains")
    parser.add_argument("--strategy_steps", type=int, default=80, help="warm-up steps on mixed strategies")
    args = parser.parse_args()
    if min(args.train, args.test) < 1 or max(args.train, args.test) > 10**6 or min(args.arithmetic_steps, args.strategy_steps) < 0:
        raise InputError("--train and --test must be in 1..1000000, the warm-up steps at least 0")
    settings, marker = vars(args) | {"out": None}, os.path.join(args.out, "tiny.json")
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
    write_questions(os.path.join(tmp, "test.jsonl"), rng, args.test, "tiny-test", taken)
    held_out = set(taken)
    write_questions(os.path.join(tmp, "train.jsonl"), rng, args.train, "tiny-train", taken)
    make_base(os.path.join(tmp, "base"), args.seed, held_out, args.arithmetic_steps, args.strategy_steps)
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
