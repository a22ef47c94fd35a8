"""Every code block of the documentation runs, and every command in it exists."""

import re

import doc_pages as pages
import pytest
import typer
from calls import COMMANDS
from doc_pages import PAGES, ROOT, blocks, inline_commands, shell_lines, words
from typer.testing import CliRunner

from mpdiag.cli import app

UsageError = typer.BadParameter.__mro__[1]
OUTSIDE = {"pip", "torchrun", "cat", ".ci/run"}
"""Programs that the documentation calls and that belong to others."""


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")])
def test_python_blocks_run(page):
    assert pages.ran(page).names


def test_no_block_is_left_out():
    languages = {
        language
        for page in PAGES
        for language in re.findall(r"^```(\w*)\n", pages.text(page), flags=re.MULTILINE)
        if language
    }
    assert languages <= {"python", "shell", "sql", "text", "yaml"}


@pytest.mark.parametrize("page", [p for p in PAGES if shell_lines(p)])
def test_shell_lines_are_commands_that_exist(page):
    for line in shell_lines(page):
        check_line(words(line))


@pytest.mark.parametrize("page", [p for p in PAGES if inline_commands(p)])
def test_commands_in_sentences_exist(page):
    for line in inline_commands(page):
        check_mentioned(line.split())


def check_line(line):
    """A whole command line: it is parsed as the program would parse it."""
    program, *rest = line
    if program == "mpdiag":
        name, *arguments = rest
        COMMANDS[name].make_context(name, arguments)
    elif program in ("make", "python"):
        check_mentioned(line)
    else:
        assert program in OUTSIDE, line


def check_mentioned(line):
    """Part of a command line: its program, targets, files and options exist."""
    program, *rest = line
    options = [word for word in rest if word.startswith("--") and word != "--"]
    if "--" in rest:
        options = [o for o in options if rest.index(o) < rest.index("--")]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", pages.text("Makefile"), flags=re.MULTILINE))
        assert {word for word in rest if "=" not in word} <= targets, line
    elif program == "python":
        folders = ("benchmarks/", "studies/", "docs/", "examples/")
        scripts = [word for word in rest if word.startswith(folders)]
        for script in scripts:
            assert (ROOT / script).is_file(), line
            source = (ROOT / script).read_text(encoding="utf-8")
            assert all(f'"{option}"' in source for option in options), line
    elif rest[0].startswith("--"):  # of mpdiag itself
        assert rest[0] in CliRunner().invoke(app, ["--help"]).output, line
    else:
        known = {o for p in COMMANDS[rest[0]].params for o in (*p.opts, *p.secondary_opts)}
        assert set(options) <= known | {"--help"}, line


@pytest.mark.parametrize(
    "line",
    [
        ["mpdiag", "no-such-command"],
        ["python", "benchmarks/no_such_file.py"],
        ["python", "benchmarks/recording.py", "--no-such-option"],
        ["mpdiag", "analyze", "--no-such-option"],
        ["make", "no-such-target"],
    ],
)
def test_a_mention_of_what_does_not_exist_fails(line):
    with pytest.raises((AssertionError, KeyError)):
        check_mentioned(line)


@pytest.mark.parametrize("line", ["mpdiag analyze", "mpdiag analyze run --no-such", "rm -r runs"])
def test_a_line_that_makes_no_sense_fails(line):
    with pytest.raises((AssertionError, UsageError)):
        check_line(words(line))


def test_a_wrong_python_block_fails(tmp_path):
    page = tmp_path / "wrong.md"
    page.write_text("```python\nassert mpdiag.__version__ == 'wrong'\n```\n")
    document = pages.SYBIL.parse(page)
    document.namespace["mpdiag"] = pages.mpdiag
    with pytest.raises(AssertionError):
        for example in document.examples():
            example.evaluate()
