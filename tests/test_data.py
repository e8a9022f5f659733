"""data.py: every layout in, every bad row refused with its place, prompts as the model meets them."""
import json
import random

import pyarrow
import pyarrow.parquet as parquet
import pytest
from conftest import refused, run

import tiny
from data import INSTRUCTION, InputError, load_questions, prompt_ids, prompt_text, question_id, read_rows, to_question


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def dapo_row(problem, answer, source="math_dapo", candidates=None, **extra):
    model = {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"} | ({} if candidates is False else {"candidates": candidates})
    return {"data_source": source, "prompt": [{"role": "user", "content": INSTRUCTION[0] + problem + INSTRUCTION[1]}],
            "ability": "MATH", "reward_model": model, "extra_info": {"index": "i"}, **extra}


def test_jsonl_layouts(tmp_path):
    path = write(tmp_path / "mixed.jsonl",
                 {"id": 7, "problem": "1+1?", "answer": "2", "source": "own", "prompt": "1+1="},
                 {"question": "Tom has 1,000 apples", "answer": "He has <<1+1=2>> 1,000.\n#### 1,000"},
                 {"problem": "Half?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
                 {"problem": "with both", "solution": "\\boxed{3}", "answer": "3"},
                 {"Problem": "AIME style", "Answer": 204})
    questions = load_questions(path)
    assert [q["answer"] for q in questions] == ["2", "1,000", "\\frac{1}{2}", "3", "204"]
    assert questions[0] == {"id": "7", "problem": "1+1?", "answer": "2", "source": "own", "prompt": "1+1="}
    assert {q["source"] for q in questions[1:]} == {"mixed"} and questions[1]["id"] == question_id("Tom has 1,000 apples")


def test_parquet_repeats_are_left_out_and_counted(tmp_path):
    path = str(tmp_path / "dapo.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([dapo_row("a", "1"), dapo_row("b", "2")] * 100 + [dapo_row("a", "9")]), path)
    said = []
    questions = load_questions(path, said.append)
    assert [(q["problem"], q["answer"], q["source"]) for q in questions] == [("a", "1", "math_dapo"), ("b", "2", "math_dapo")]
    assert questions[0]["prompt"][0]["content"] == INSTRUCTION[0] + "a" + INSTRUCTION[1]
    assert said == [f"{path}: 2 questions of 201 rows, 199 repeated ones left out (1 with another answer: the first one counts)"]


def test_the_same_question_has_one_id_in_every_layout(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([dapo_row("What is x?", "1")]), tmp_path / "a.parquet")
    jsonl = write(tmp_path / "b.jsonl", {"problem": "What  is x?", "answer": "1"})
    assert load_questions(str(tmp_path / "a.parquet"))[0]["id"] == load_questions(jsonl)[0]["id"]


def test_evaluation_parquet_names_its_sets(tmp_path):
    rows = [dapo_row("p", "1", "aime_2024"), dapo_row("q", "2", "aime_2025"), dapo_row("r", "3", "amc_2023")] * 32
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "eval.parquet")
    assert [q["source"] for q in load_questions(str(tmp_path / "eval.parquet"))] == ["aime_2024", "aime_2025", "amc_2023"]


@pytest.mark.parametrize("ask", ["rlep.parquet", "rlep.parquet.part-00", "rlep.parquet.part-*"])
def test_pieces_and_candidates(tmp_path, ask):
    rows = [dapo_row("a", "1", candidates=["so 1", "also 1"]), dapo_row("b", "2", candidates=None), dapo_row("c", "3", candidates=[])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    third = len(data) // 3
    for i, piece in enumerate((data[:third], data[third:2 * third], data[2 * third:])):
        (tmp_path / f"rlep.parquet.part-0{i}").write_bytes(piece)
    questions = [to_question(row, where, "s") for where, row in read_rows(str(tmp_path / ask))]
    assert [q.get("candidates") for q in questions] == [["so 1", "also 1"], None, []]
    loaded = load_questions(str(tmp_path / ask))
    assert [q["problem"] for q in loaded] == ["a", "b", "c"] and not any("candidates" in q for q in loaded)
    (tmp_path / "rlep.parquet.part-01").unlink()
    with pytest.raises(InputError, match="2 pieces"):
        load_questions(str(tmp_path / "rlep.parquet"))


def test_a_large_row_group_is_read_in_small_pieces(tmp_path):
    letters = "".join(random.Random(0).choices("abcdefgh ", k=200_000))
    rows = [dapo_row(str(i), "1", candidates=[letters[j:j + 2000] for j in range(i, 64_000, 1000)]) for i in range(400)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "d.parquet")  # one row group of 50 MB
    code = ("import sys, data, pyarrow\nprint(sum(len(row['reward_model']['candidates']) for _, row in data.read_rows(sys.argv[1])), "
            "pyarrow.default_memory_pool().max_memory())")
    answers, peak = map(int, run("-c", code, tmp_path / "d.parquet").stdout.split())
    assert answers == 400 * 64 and table.nbytes > 50e6 and peak < 20e6


@pytest.mark.parametrize("row, reason", [
    ("{not json", "not a JSON object"), ("[1, 2]", "must be an object"), ('"text"', "must be an object"),
    ({"problem": "x"}, 'no "answer"'), ({"answer": "1"}, 'no "problem"'), ({"problem": "", "answer": "1"}, 'no "problem"'),
    ({"problem": "x", "answer": None}, 'no "answer"'), ({"problem": ["x"], "answer": "1"}, 'no "problem"'),
    ({"problem": "x", "solution": "no box"}, "no \\\\boxed"), ({"problem": "x", "answer": "1", "prompt": [{"role": "user"}]}, '"prompt" must be'),
    ({"problem": "x", "answer": True}, 'no "answer"'), ("[" * 100000, "not a JSON object"),
    ({"id": "good", "problem": "another", "answer": "1"}, "already names another problem"),
    ({"prompt": "p", "reward_model": {"ground_truth": "1", "candidates": "text"}}, "candidates must be"),
])
def test_malformed_rows_name_file_and_line(tmp_path, row, reason):
    path = write(tmp_path / "bad.jsonl", {"id": "good", "problem": "fine", "answer": "1"}, "", row)
    with pytest.raises(InputError, match=reason) as caught:
        load_questions(path)
    assert f"{path}:3" in str(caught.value) and "\n" not in str(caught.value)


def test_bad_sources(tmp_path):
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 this is no parquet")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for spec, reason in [("missing.jsonl", "no such file"), (str(tmp_path), "is a folder"), (str(tmp_path / "junk.parquet"), "not a readable parquet"),
                         (str(tmp_path / "empty.jsonl"), "no questions"), ("", "no questions"), ("./nothing", "no such file")]:
        with pytest.raises(InputError, match=reason):
            load_questions(spec)


def test_bytes_that_are_no_text_are_refused_with_the_line(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"problem": "a", "answer": "1"}\n{"problem": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(InputError, match="x.jsonl:2"):
        load_questions(str(tmp_path / "x.jsonl"))


def test_prompts():
    tokenizer = tiny.make_tokenizer()
    question = {"id": "1", "problem": "1+1", "answer": "2", "source": "s"}
    assert prompt_text(question, tokenizer) == INSTRUCTION[0] + "1+1" + INSTRUCTION[1] + "\n"  # plain format of a base model
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert prompt_text(question | {"prompt": messages}, tokenizer) == "Be brief.\n\n1+1\n"
    assert prompt_text(question | {"prompt": "1+1="}, tokenizer) == "1+1="
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    assert prompt_text(question | {"prompt": messages}, tokenizer) == "[system] Be brief.[user] 1+1[assistant]"
    ids = prompt_ids(question | {"prompt": "1+1="}, tokenizer)
    assert ids == tokenizer.convert_tokens_to_ids(list("1+1=")) and all(isinstance(i, int) for i in ids)


def test_a_hub_name_out_of_reach_is_one_line(tmp_path):
    line = refused("-c", "import sys, data\ntry: data.load_questions('nobody/nothing@train')\n"
                         "except data.InputError as e: print(f'error: {e}', file=sys.stderr), sys.exit(2)", env={"HF_HUB_OFFLINE": "1"})
    assert "nobody/nothing" in line
