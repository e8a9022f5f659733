"""data.py: questions from the data sets people use, and prompts for the model.

A question is a dict {"id", "problem", "answer", "source"} with "prompt" (messages or text) when the data set brings its
own, and "candidates" (answer texts) when it is a published experience pool. Sources, several joined by commas:

    questions.jsonl            own records; GSM8K {question, answer}; MATH {problem, solution}; each recognised by its keys
    dapo-math-17k.parquet      DAPO / RLEP layout; pieces `….parquet.part-*` are concatenated in order
    openai/gsm8k/main@train    a hub name, with optional /config and @split (default train), through `datasets`

A malformed row stops the program with file, line and reason. Repeated questions are left out and counted.
"""
import glob
import hashlib
import json
import os
import shutil
import tempfile

from verify import extract_answer

# DAPO's instruction, as its data set spells it: a model trained on that set must meet the same words at evaluation.
INSTRUCTION = ("Solve the following math problem step by step. The last line of your response should be of the form "
               "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
               '\n\nRemember to put your answer on its own line after "Answer:".')


class InputError(Exception):
    """Bad input from the user. The message is one line: what is wrong, where, what to do. Programs exit with 2."""


def question_id(problem: str) -> str:
    """An id that depends on the problem text alone, so that a pool fits the same question from any file or layout."""
    return "q" + hashlib.sha256(" ".join(problem.split()).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def strip_instruction(text: str) -> str:
    """The bare problem of a prompt that carries DAPO's instruction; other text unchanged."""
    before, after = INSTRUCTION
    if text.startswith(before):
        text = text[len(before):]
        text = text[:-len(after)] if text.endswith(after) else text
    return text.strip()


def _messages_text(prompt: object, where: str) -> str:
    """The user's words in a list of {role, content} messages; raises InputError if it is not such a list."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not prompt or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt):
        raise InputError(f'{where}: "prompt" must be text or a list of {{"role", "content"}} messages')
    return "\n\n".join(m["content"] for m in prompt if m["role"] == "user") or prompt[-1]["content"]


def to_question(row: object, where: str, source: str) -> dict:
    """One row of any known layout as a question. Raises InputError with `where` (file:line) and the reason."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row must be an object, found {type(row).__name__}")
    row = {str(key).lower(): value for key, value in row.items()}
    question = {}
    if isinstance(row.get("reward_model"), dict):  # DAPO-Math-17k, RLEP_dataset
        answer, source = row["reward_model"].get("ground_truth"), row.get("data_source") or source
        problem = strip_instruction(_messages_text(row.get("prompt"), where))
        question["prompt"] = row["prompt"]
        candidates = row["reward_model"].get("candidates")
        if candidates is not None:
            if not isinstance(candidates, (list, tuple)) or not all(isinstance(c, str) for c in candidates):
                raise InputError(f"{where}: reward_model.candidates must be a list of answer texts")
            question["candidates"] = list(candidates)
    else:
        problem, answer = row.get("problem", row.get("question")), row.get("answer")
        if isinstance(answer, str) and "####" in answer:  # GSM8K
            answer = answer.rsplit("####", 1)[1].strip()
        elif answer is None and isinstance(row.get("solution"), str):  # MATH
            answer = extract_answer(row["solution"])
            if answer is None:
                raise InputError(f"{where}: the solution has no \\boxed{{}} answer and there is no \"answer\"")
        if row.get("prompt") is not None:
            text = _messages_text(row["prompt"], where)
            problem = text if problem is None else problem
            question["prompt"] = row["prompt"]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(int(answer)) if answer == int(answer) else repr(answer)
    for key, value in (("problem", problem), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise InputError(f'{where}: no "{key}" text (found {type(value).__name__}); see the layouts in data.py')
    given = row.get("id")
    return {"id": question_id(problem) if given is None else str(given), "problem": problem.strip(),
            "answer": answer.strip(), "source": str(row.get("source") or source), **question}


def _jsonl_rows(path: str):
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as e:
                raise InputError(f"{path}:{number}: not a JSON object ({e}); mend or delete the line") from None


def _parquet_rows(path: str):
    import pyarrow
    import pyarrow.parquet as parquet

    pieces = sorted(glob.glob(glob.escape(path) + ".part-*"), key=lambda name: (len(name), name))
    with tempfile.TemporaryDirectory() as tmp:
        whole = path
        if not os.path.exists(path):
            whole = os.path.join(tmp, "whole.parquet")
            with open(whole, "wb") as out:
                for piece in pieces:
                    with open(piece, "rb") as f:
                        shutil.copyfileobj(f, out, 1 << 24)
        try:
            # A row of a published pool holds 64 answers, and all rows are one row group: read it in small pieces.
            file = parquet.ParquetFile(whole, buffer_size=1 << 20, pre_buffer=False)
            number = 0
            for batch in file.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
        except (pyarrow.ArrowException, OSError) as e:
            pieces_note = f" ({len(pieces)} pieces: is one missing?)" if whole != path else ""
            raise InputError(f"{path}: not a readable parquet file{pieces_note}: {str(e).splitlines()[0]}") from None


def _hub_rows(spec: str):
    import datasets

    name, _, split = spec.partition("@")
    parts = name.split("/")
    name, config = "/".join(parts[:2]), "/".join(parts[2:]) or None
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise InputError(f"{spec}: neither a file here nor a data set of the hub: {reason}") from None
    for number, row in enumerate(rows, 1):
        yield f"{spec}: row {number}", row


def read_rows(spec: str):
    """Yield (where, row) of one source: jsonl, parquet (whole or in pieces) or a hub name. Raises InputError."""
    path = os.path.expanduser(spec)
    if ".parquet.part-" in path:  # any piece, or a pattern, names the whole
        path = path[:path.index(".parquet.part-")] + ".parquet"
    if path.endswith(".parquet") and (os.path.exists(path) or glob.glob(glob.escape(path) + ".part-*")):
        return _parquet_rows(path)
    if os.path.isfile(path):
        return _jsonl_rows(path)
    if os.path.isdir(path):
        raise InputError(f"{path}: is a folder; name the .jsonl or .parquet file in it")
    if not path or path.endswith((".jsonl", ".json", ".parquet")) or path.startswith(("/", ".", "~")) or path.count("/") > 3:
        raise InputError(f"{path or '(empty name)'}: no such file")
    return _hub_rows(spec)


def load_questions(spec: str, report=None) -> list[dict]:
    """All questions of the comma-separated sources, in file order, each once, without candidates.

    The same prompt met again within a data set is left out (the published sets repeat every question). `report`, if
    given, gets one line per source with the counts. Raises InputError for an unreadable source or row, for one id that
    names two problems, and when there is no question at all.
    """
    questions, by_id, by_prompt = [], {}, set()
    for source in filter(None, (part.strip() for part in spec.split(","))):
        read = repeated = conflicts = 0
        for where, row in read_rows(source):
            read += 1
            question = to_question(row, where, os.path.basename(source).split(".")[0])
            question.pop("candidates", None)  # gigabytes, for the pool's import only
            key = (question["source"], json.dumps(question.get("prompt"), sort_keys=True), question["problem"])
            known = by_id.get(question["id"])
            if key in by_prompt:
                repeated += 1
                conflicts += known is not None and known["answer"] != question["answer"]
                continue
            if known is not None and known["problem"] != question["problem"]:
                raise InputError(f'{where}: the id {question["id"]!r} already names another problem; ids must be unique')
            by_prompt.add(key)
            by_id.setdefault(question["id"], question)
            questions.append(question)
        if report:
            note = f", {repeated} repeated ones left out" if repeated else ""
            note += f" ({conflicts} with another answer: the first one counts)" if conflicts else ""
            report(f"{source}: {read - repeated} questions of {read} rows{note}")
    if not questions:
        raise InputError(f"{spec or '(empty)'}: no questions found")
    return questions


def prompt_text(question: dict, tokenizer) -> str:
    """The text the model continues.

    The data set's own prompt where it has one, else DAPO's instruction around the problem. Messages go through the
    tokenizer's chat template; a base model without one gets the plain format: message contents, separated by a blank
    line, then a newline. A prompt that is plain text is taken as it is.
    """
    before, after = INSTRUCTION
    prompt = question.get("prompt") or [{"role": "user", "content": before + question["problem"] + after}]
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in prompt) + "\n"


def prompt_ids(question: dict, tokenizer) -> list[int]:
    """Token ids of the prompt. A chat template brings its own special tokens, plain text gets the tokenizer's."""
    text = prompt_text(question, tokenizer)
    templated = bool(tokenizer.chat_template) and not isinstance(question.get("prompt"), str)
    return tokenizer(text, add_special_tokens=not templated)["input_ids"]
