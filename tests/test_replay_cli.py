"""The pool's command line: import, export, check, repair, stats, show, as a user runs them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT)), sys.path.insert(0, str(ROOT / "tests"))
import replay  # noqa: E402
from data import load_questions  # noqa: E402
from replay import Pool  # noqa: E402
from test_replay import make_tokenizer, record  # noqa: E402

MATH = ROOT.parent / "shared" / "data" / "math_responses.jsonl"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of two tokenizers that differ."""
    folders = []
    for words in (("4", "way", "boxed"), ("way", "4", "boxed", "more")):
        folders.append(str(tmp_path_factory.mktemp("tokenizer")))
        make_tokenizer(words).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments, code=0):
    capsys.readouterr()
    assert replay.main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code != 2 else captured.err


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


RESPONSES = [{"problem": "What is 2 + 2?", "answer": "4", "source": "sums",
              "responses": ["way one: \\boxed{4}", "way two: \\boxed{5}", "way three\nAnswer: 4", "way one: \\boxed{4}", "", "no idea"]},
             {"problem": "What is 3 + 3?", "answer": "6", "responses": ["\\boxed{6}"]},
             {"problem": "What is 4 + 4?", "answer": "8", "responses": []}]


def test_import_of_answers_as_jsonl(at, tokenizers, capsys):
    write_jsonl("r.jsonl", RESPONSES)
    assert "give --tokenizer=FOLDER" in run(capsys, "import", "r.jsonl", "--pool=p.jsonl", code=2)
    out = run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    found = {line.strip().split("  ")[1]: int(line.split()[0]) for line in out.splitlines() if line.startswith("  ")}
    assert found == {"kept": 3, "refused: wrong answer": 2, "refused: empty": 1, "left out: the pool has this text": 1}
    assert out.startswith("r.jsonl: 7 answers") and out.endswith("p.jsonl: 3 trajectories of 2 questions\n")
    questions = load_questions("r.jsonl")
    with Pool("p.jsonl", readonly=True) as pool:
        assert pool.questions == [q["id"] for q in questions[:2]], "ids as the training will meet them"
        drawn = {r["response"]: r for r in pool.draw(questions[0]["id"], 9, 0, 0)}
        assert set(drawn) == {"way one: \\boxed{4}", "way three\nAnswer: 4"}
        one = drawn["way one: \\boxed{4}"]
        assert one["response_ids"] == [4, 0, 0, 0, 5, 0, 3, 0, 1] or one["response_ids"][-1] == 1 and 5 in one["response_ids"]
        assert (one["answer"], one["source"], one["reward"], one["finish_reason"]) == ("4", "sums", 1.0, "stop")
        assert one["tokenizer"] == replay.fingerprint(make_tokenizer())
    again = run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    assert "kept" not in again and "4  left out" in again, "a second import adds nothing"
    out = run(capsys, "import", "r.jsonl", "--pool=f.jsonl", f"--tokenizer={tokenizers[0]}", "--failures", "--workers=1")
    assert Pool("f.jsonl").failures == 2 and len(Pool("f.jsonl")) == 3
    out = run(capsys, "import", "r.jsonl", "--pool=s.jsonl", f"--tokenizer={tokenizers[0]}", "--max_tokens=4", "--workers=1")
    assert "refused: too long" in out and "  2  refused: wrong" in out
    run(capsys, "import", "r.jsonl", "--pool=n.jsonl", f"--tokenizer={tokenizers[0]}", "--no_verify", "--workers=1")
    assert len(Pool("n.jsonl")) == 5


def test_stop_id(at, tokenizers, capsys):
    write_jsonl("r.jsonl", RESPONSES)
    with open(tokenizers[1] + "/generation_config.json", "w") as file:
        json.dump({"eos_token_id": [2, 1]}, file)
    run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[1]}", "--stop_id=2", "--workers=1")
    pool = Pool("p.jsonl")
    assert {r["response_ids"][-1] for q in pool.questions for r in pool.draw(q, 9, 0, 0)} == {2}
    err = run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[1]}", "--stop_id=4", code=2)
    assert "--stop_id=4" in err and "[1, 2]" in err


def parquet_rows(candidates):
    """Rows in the published layout; a problem without candidates has null, or no such field at all."""
    prompt = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
              "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {} + {}?\n\nRemember to put your "
              "answer on its own line after \"Answer:\".")
    return [{"data_source": "math_dapo", "prompt": [{"role": "user", "content": prompt.format(n, n)}], "ability": "MATH",
             "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"} | ({} if texts == "missing" else
                                                                                                {"candidates": texts}),
             "extra_info": {"index": f"uuid-{n}"}} for n, texts in enumerate(candidates)]


@pytest.mark.parametrize("pieces", [0, 3])
def test_import_of_the_published_layout(at, tokenizers, capsys, pieces):
    import pyarrow
    import pyarrow.parquet as parquet
    rows = parquet_rows([["way 0\nAnswer: 0"], None, ["way 1\nAnswer: 4", "way 2\nAnswer: 5", "way 3\nAnswer: 4"], []]) * 3
    parquet.write_table(pyarrow.Table.from_pylist(rows), "d.parquet")
    source = "d.parquet"
    if pieces:
        data = Path(source).read_bytes()
        os.unlink(source)
        size = len(data) // pieces + 1
        for i in range(pieces):
            Path(f"d.parquet.part-{i}").write_bytes(data[i * size:(i + 1) * size])
    out = run(capsys, "import", source, "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    assert "3  kept" in out and "3  refused: wrong answer" in out and "3 trajectories of 2 questions" in out
    questions = load_questions(source)
    assert Pool("p.jsonl").questions == [questions[0]["id"], questions[2]["id"]]


def test_layout_without_any_candidates(at, tokenizers, capsys):
    import pyarrow
    import pyarrow.parquet as parquet
    parquet.write_table(pyarrow.Table.from_pylist(parquet_rows(["missing", "missing"])), "d.parquet")
    assert "holds no answers" in run(capsys, "import", "d.parquet", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", code=2)


def test_export_and_back(at, tokenizers, capsys):
    import pyarrow.parquet as parquet
    write_jsonl("r.jsonl", [{"id": "my-id"} | RESPONSES[0], *RESPONSES[1:]])
    run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    assert "2 questions, 3 candidates" in run(capsys, "export", "p.jsonl", "e.parquet")
    rows = parquet.read_table("e.parquet").to_pylist()
    assert [set(row) - {"id"} for row in rows] == [{"data_source", "prompt", "ability", "reward_model", "extra_info"}] * 2
    assert rows[0]["reward_model"]["ground_truth"] == "4" and len(rows[0]["reward_model"]["candidates"]) == 2
    message, = rows[0]["prompt"]
    assert message["role"] == "user" and message["content"].startswith("Solve the") and "2 + 2?\n\nRemember" in message["content"]
    run(capsys, "import", "e.parquet", "--pool=back.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    first, second = Pool("p.jsonl"), Pool("back.jsonl")
    assert first.questions == second.questions and first.questions[0] == "my-id"
    for question in first.questions:
        ids = [{tuple(r["response_ids"]) for r in pool.draw(question, 9, 0, 0)} for pool in (first, second)]
        assert ids[0] == ids[1]
    assert "3 questions, 3 candidates" in run(capsys, "export", "p.jsonl", "e.parquet", "--data=r.jsonl")
    assert parquet.read_table("e.parquet").to_pylist()[2]["reward_model"]["candidates"] == []
    Pool("bare.jsonl").append([{k: record()[k] for k in replay.ESSENTIAL}])
    assert "give --data" in run(capsys, "export", "bare.jsonl", "e.parquet", code=2)


def test_pool_of_another_tokenizer_is_converted(at, tokenizers, capsys):
    write_jsonl("r.jsonl", RESPONSES)
    run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    err = run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[1]}", code=2)
    assert "ids of another tokenizer" in err and "import p.jsonl --pool=NEW.jsonl" in err
    assert "3  kept" in run(capsys, "import", "p.jsonl", "--pool=new.jsonl", f"--tokenizer={tokenizers[1]}", "--workers=1")
    mark = replay.fingerprint(make_tokenizer(("way", "4", "boxed", "more")))
    old, new = Pool("p.jsonl"), Pool("new.jsonl", tokenizer=mark)
    for question in old.questions:
        before, after = ({r["response"]: r for r in pool.draw(question, 9, 0, 0)} for pool in (old, new))
        assert before.keys() == after.keys()
        assert all(before[t]["response_ids"] != after[t]["response_ids"] for t in before if "way" in t)
    # with the tokenizer that it has, a pool is taken as it is: ids are those that were sampled
    odd = record("odd", 1, tokenizer=mark, response_ids=[3, 3, 1], sampler_logprob=-2.0)
    Pool("odd.jsonl").append([odd])
    run(capsys, "import", "odd.jsonl", "--pool=new.jsonl", f"--tokenizer={tokenizers[1]}", "--workers=1")
    drawn, = Pool("new.jsonl").draw("odd", 1, 0, 0)
    assert drawn["response_ids"] == [3, 3, 1] and drawn["sampler_logprob"] == -2.0


def test_check_and_repair(at, capsys):
    with Pool("p.jsonl") as pool:
        pool.append([record(number=n) for n in range(6)])
    assert "6 lines, 0 faults" in run(capsys, "check", "p.jsonl")
    lines = Path("p.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:50] + b"\n"
    lines[2] = lines[2][:90] + lines[3]
    lines[4] = lines[4].replace(b"way 4", b"WAY 4")
    damaged = b"".join(lines[:3] + lines[4:]) + json.dumps(record(number=7, reward=-0.5, finish_reason="length")).encode() + b"\n{"
    Path("p.jsonl").write_bytes(damaged)
    out = run(capsys, "check", "p.jsonl", code=1)
    assert [line.split(": ")[0] for line in out.splitlines()] == [f"p.jsonl:{n}" for n in (2, 3, 4, 6, 7)] + ["p.jsonl"]
    assert "p.jsonl:4: digest is" in out and "p.jsonl:6: may not be in a pool" in out and "7 lines, 5 faults" in out
    assert "the first 1 are listed" in run(capsys, "check", "p.jsonl", "--number=1", code=1)
    assert Path("p.jsonl").read_bytes() == damaged, "looking changes nothing"
    out = run(capsys, "check", "p.jsonl", "--repair", code=1)
    assert "clean copy with 4 records; 4 lines left out; the old file is kept as p.jsonl.damaged-1" in out
    assert Path("p.jsonl.damaged-1").read_bytes() == damaged
    assert "4 lines, 0 faults" in run(capsys, "check", "p.jsonl")
    assert {r["response"][4] for r in Pool("p.jsonl").draw("q1", 9, 0, 0)} == set("0345"), "the glued one is saved"
    run(capsys, "check", "p.jsonl", "--repair")
    assert Path("p.jsonl.damaged-2").exists()


def test_check_verify_lists_disagreements(at, capsys):
    Pool("p.jsonl").append([record(number=0), record(number=1, response="\\boxed{5}"), record(number=2, answer=None),
                            record(number=3, reward=-1.0), record(number=4, reward=-1.0, response="no")], allow_failed=True)
    out = run(capsys, "check", "p.jsonl", "--verify", "--workers=1", code=1)
    assert "p.jsonl:2: question q1: stored as reward 1, today's verifier says wrong answer (gold '4'" in out
    assert "p.jsonl:4: question q1: stored as reward -1, today's verifier says right" in out
    assert "5 lines, 2 faults; 1 records have no gold answer" in out


def test_stats_and_show(at, capsys):
    Pool("p.jsonl").append([record(q, n % 3, source="sums", tokenizer="abc", problem="What is 2 + 2?")
                            for q, count in (("q1", 1), ("q2", 4), ("q3", 6)) for n in range(count)])
    write_jsonl("d.jsonl", [{"id": f"q{n}", "problem": f"What is {n}?", "answer": "4"} for n in (1, 2, 5, 6)])
    out = run(capsys, "stats", "p.jsonl", "--data=d.jsonl", "--plot=p.png")
    assert "3 questions, 11 trajectories, 0 failures" in out and "distinct trajectories: 7" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1] == " "}
    assert rows["1"] == ["1", "1"] and rows["3-4"] == ["1", "2"] and rows["5-8"] == ["1", "0"]
    assert "source sums: 11" in out and "tokenizer abc: 11" in out and "run (not given): 11" in out
    assert "coverage of d.jsonl: 2 of 4 questions (50.0%); 1 questions of the pool are not in it" in out
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    out = run(capsys, "show", "p.jsonl", "q3", "--number=2")
    assert "3 distinct" in out and "What is 2 + 2?" in out and out.count("---") == 2 and "\\boxed{4}" in out
    assert "did you mean" in run(capsys, "show", "p.jsonl", "q33", code=2)
    Pool("f.jsonl").append([record(reward=-1.0)], allow_failed=True)
    assert "0 questions, 0 trajectories, 1 failures" in run(capsys, "stats", "f.jsonl")
    assert "No such file" in run(capsys, "stats", "p.jsonl", "--plot=no/folder.png", code=2)


@pytest.mark.skipif(not MATH.exists(), reason="no such data here")
def test_import_of_real_answers(at, tokenizers, capsys):
    out = run(capsys, "import", MATH, "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=2")
    rows = [json.loads(line) for line in MATH.read_text().splitlines()]
    total = sum(len(row["responses"]) for row in rows)
    counted = sum(int(line.split()[0]) for line in out.splitlines() if line.startswith("  "))
    assert f"{total} answers" in out and counted == total and "refused: wrong answer" in out
    assert 0.2 * total < len(Pool("p.jsonl")) < total
    assert "coverage" in run(capsys, "stats", "p.jsonl", f"--data={MATH}")
    run(capsys, "check", "p.jsonl", "--verify", "--workers=2")


def test_hostile_answers(at, tokenizers, capsys):
    write_jsonl("r.jsonl", [{"id": "q", "problem": "2?", "answer": "4", "responses": ["\ud800 \\boxed{4}", "\x1b[31m\r \\boxed{4}"]}])
    out = run(capsys, "import", "r.jsonl", "--pool=p.jsonl", f"--tokenizer={tokenizers[0]}", "--workers=1")
    assert "1  kept" in out and "1  refused: no Unicode text" in out
    assert r"\x1b[31m\r \boxed{4}" in run(capsys, "show", "p.jsonl", "q"), "no control character reaches the terminal"
    Pool("s.jsonl").append([record("\ud800", source="\udfff", response="\ud801 \\boxed{4}")])
    assert r"source \udfff: 1" in run(capsys, "stats", "s.jsonl")
    assert r"\ud801 \boxed" in run(capsys, "show", "s.jsonl", "\ud800") and run(capsys, "check", "s.jsonl", "--verify", "--workers=1")
    assert "is no Unicode" in run(capsys, "export", "s.jsonl", "e.parquet", code=2)
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<end>": 1})), eos_token="<end>").save_pretrained("few")
    assert "cannot encode answers of r.jsonl" in run(capsys, "import", "r.jsonl", "--pool=f.jsonl", "--tokenizer=few", "--workers=1", code=2)


def test_errors_are_one_line(at, capsys):
    Pool("p.jsonl").append([record()])
    assert run(capsys, "stats", "p.jsonl", "--plot=p.txt", code=2).count("\n") == 1
    for arguments in (["check", "."], ["import", "", "--pool=p.jsonl"], ["import", "nowhere.jsonl", "--pool=p.jsonl", "--no_verify"], ["stats", "."],
                      ["import", "r.jsonl", "--pool=p.jsonl", "--tokenizer=/no/where"], ["export", "no.jsonl", "e.parquet"]):
        err = run(capsys, *arguments, code=2)
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_as_a_program(at):
    def call(*arguments):
        return subprocess.run([sys.executable, ROOT / "replay.py", *arguments], capture_output=True, text=True)
    for arguments in (["stats", "nowhere.jsonl"], ["stats", "p.jsonl", "--plott=x"]):
        done = call(*arguments)
        assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    Pool("p.jsonl").append([record(str(n)) for n in range(3)])
    read, write = os.pipe()
    os.close(read)  # as `| head` does
    done = subprocess.run([sys.executable, ROOT / "replay.py", "stats", "p.jsonl"], stdout=write, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    done = call("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in ("stats", "show", "check", "import", "export"))
    assert "--stop_id" in call("import", "--help").stdout
