"""The documents against the code: examples, links, options, functions, tests, quoted lines, and the glossary of metrics."""
import ast
import doctest
import functools
import os
import re
import tempfile

import pytest
import torch
from conftest import ROOT

import replay
import rlep
import settings
from data import InputError

DOCUMENTS = ["README.md", "WALKTHROUGH.md"]
SCRIPTS = ["run_small.sh", "run_7b.sh"]


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


@functools.cache
def definitions(name):
    """Source of every function, class and method of a file, by name and by Class.name."""
    source, found = read(name), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.get_source_segment(source, node)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = ast.get_source_segment(source, inner)
    return found


def test_examples_of_the_walkthrough(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    test = doctest.DocTestParser().get_doctest(read("WALKTHROUGH.md"), {}, "WALKTHROUGH.md", "WALKTHROUGH.md", 0)
    assert len(test.examples) > 25
    runner, report = doctest.DocTestRunner(verbose=False), []
    assert not runner.run(test, out=report.append).failed, "".join(report)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_files_exist(document):
    text = read(document)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    names = re.findall(r"`([\w/.-]+\.(?:py|sh|md|txt|png))`", text)
    names += [word for line in commands(text) for word in line.split() if re.fullmatch(r"[\w/]+\.(py|sh)", word)]
    assert len(names) > 5
    missing = [name for name in {*links, *names} - {"curves.png", "pool.png"} if not os.path.exists(os.path.join(ROOT, name.partition("#")[0]))]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_functions_tests_and_quoted_lines_exist(document):
    text = read(document)
    for name, what in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        assert what in definitions(name), f"{document} names {name}:{what}"
    for name, what, line in re.findall(r"^\| [^|]+ \| `([\w/]+\.py):([\w.]+)` \| `([^`]+)` \|$", text, re.M):
        assert line in definitions(name)[what], f"{document} quotes {line!r} of {name}:{what}"


def test_the_walkthrough_has_its_tables():
    text = read("WALKTHROUGH.md")
    assert len(re.findall(r"`(?:rlep|model|verify|replay|settings)\.py:\w+`", text)) > 20 and len(re.findall(r"`tests/\w+\.py:test_", text)) > 10


# ------------------------------------------------------------------------------------------------------------- options


def commands(text):
    """Command lines of a document or script, continued lines joined, without comments and placeholders."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = [m.group(0) for line in lines for m in [re.search(r"(python|torchrun)\b.*?\b\w+\.py\b[^`]*", line)] if m]
    found = [re.sub(r"\s+#.*|\.\.\.|[\[\]](?![@}])", "", line) for line in found]
    return [line for line in found if 'rlep.py "$@"' not in line]  # whatever the script was given


def has_option(program, name):
    """Does the source of the program name the option, as "--name" or as "name"?"""
    return bool(re.search(rf'(--{name}|"{name}")(?!\w)', read(program)))


def option_error(line):
    """What is wrong with the options of a `python file.py command --name=value` line; None if nothing. $variables stand for any value."""
    words = re.sub(r'"?\$\{?\w+\}?"?', "X", re.sub(r'"\$\{\w+\[@\]\}"|"\$@"', "", line)).split()
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    if not os.path.exists(os.path.join(ROOT, words[at])):
        return f"no program {words[at]}"
    program, options = words[at], [word[2:].partition("=") for word in words[at + 1:] if word.startswith("--") and word != "--help"]
    if program != "rlep.py":
        return next((f"--{name} is no option of {program}" for name, _, _ in options if not has_option(program, name)), None)
    command = next((word for word in words[at + 1:] if re.match(r"\w", word)), None)
    if command not in settings.COMMANDS:
        return f"no command {command}"
    fields = settings.fields_of(command)
    for name, _, value in options:
        try:
            if name not in fields:
                return f"--{name} is no option of {command}"
            if not value.isupper():  # not a placeholder
                settings.parse_value(name, fields[name].type, value or "true")
        except InputError as e:
            return str(e)
    return None


@pytest.mark.parametrize("document", DOCUMENTS + SCRIPTS)
def test_command_lines_are_valid(document):
    lines = commands(read(document))
    assert len(lines) > 2 or document == "WALKTHROUGH.md"
    errors = {line: option_error(line) for line in lines if option_error(line)}
    assert not errors


def test_wrong_command_lines_are_seen():
    for line in ("python rlep.py train --lrr=1", "python rlep.py trian --lr=1", "python rlep.py collect --steps=3", "python rlep.py train --steps=many",
                 "python replay.py stats pool.jsonl --plots=x.png", "python nothing.py", "python experiments/run.py --arrms=rlep"):
        assert option_error(line), line
    assert option_error("python rlep.py train --model=BASE --steps=3 --dynamic_sampling") is None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_named_in_the_text_exist(document):
    """Any `--name` or `--name=value` in backticks is an option of one of the programs; values have the right kind."""
    named = [option for code in re.findall(r"`([^`]+)`", read(document)) for option in re.findall(r"--[a-z]\w*(?:=[^\s`]+)?", code)]
    assert len(named) > 5 or document == "WALKTHROUGH.md"
    kinds = {f.name: f.type for command in settings.COMMANDS for f in settings.fields_of(command).values()}
    for option in named:
        name, _, value = option[2:].partition("=")
        assert name in kinds or any(has_option(program, name) for program in ("tiny.py", "plot.py", "replay.py", "verify.py", "experiments/run.py")), option
        for one in value.split("|") if name in kinds and value else ():
            settings.parse_value(name, kinds[name], one.strip(".,;:)"))


# ------------------------------------------------------------------------------------------------------------- metrics


def glossary():
    """Metrics that the README explains; a family as `time/…` stands for all that begin so."""
    section = read("README.md").split("## Metrics")[1].split("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.+?) \|", section, re.M) for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 25
    return names


def produced():
    """Keys of metrics.jsonl: those that step_metrics returns, and those that train adds."""
    row = rlep.Row([5, 1], 1.0, True, "stop", False, [-1.0, -1.0], 0.5, torch.tensor([-1.0, -1.0]), torch.ones(2))
    replayed = rlep.Row([5, 1], 1.0, True, "stop", True, None, 0.5, torch.tensor([-1.0, -1.0]))
    keys = set(rlep.step_metrics(settings.Settings(replay=2, kl_coef=0.1), [rlep.Group({}, [row, replayed])], rlep.defaultdict(float, updates=1)))
    return keys | set(re.findall(r'"([\w/]+)": ', definitions("rlep.py")["train"].split("record =")[1].split("log(step")[0]))


def test_every_metric_is_explained():
    names = glossary()
    families = tuple(name[:-1] for name in names if name.endswith("…"))
    unexplained = {key for key in produced() if key not in names and not key.startswith(families) and key.removeprefix("replay/") not in names}
    assert not unexplained


def test_every_explained_metric_exists():
    keys, source = produced(), read("rlep.py")
    for name in glossary():
        name = name.removeprefix("eval/…/").removesuffix("…")
        assert name in keys or re.search(rf'"(eval/)?{re.escape(name.removesuffix("k"))}', source), name
