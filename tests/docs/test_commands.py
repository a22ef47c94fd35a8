"""One page a command, with every option; and what the pages show is what the command prints."""

from __future__ import annotations

import importlib.util
import re

import pytest
from calls import COMMANDS
from doc_pages import ROOT, text


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_command_has_a_page_and_each_page_a_command():
    pages = {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")} - {"index"}
    assert pages == set(COMMANDS)
    assert set(re.findall(r"commands/(\w+)\.md", text("mkdocs.yml"))) == {"index", *COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_lists_every_option(name, hooks):
    page = hooks.on_page_markdown(re.sub("<!-- output -->", "", text(f"docs/commands/{name}.md")))
    assert page.startswith(f"# mpdiag {name}\n")
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                assert re.search(rf"^\| `.*{option}\b", page, flags=re.MULTILINE), option
        assert parameter.name == "help" or parameter.help.split(":")[0] in page


def test_the_overview_lists_every_command_and_no_other():
    overview = text("docs/commands/index.md")
    rows = re.findall(r"^\| (?:\[)?`mpdiag (\w+)", overview, flags=re.MULTILINE)
    assert set(rows) == set(COMMANDS)


def test_the_overview_says_which_commands_speak_json():
    speakers = {n for n, c in COMMANDS.items() if any("--json" in p.opts for p in c.params)}
    (sentence,) = re.findall(r"With `--json` \((.*?)\)", text("docs/commands/index.md"))
    assert set(re.findall(r"`(\w+)`", sentence)) == speakers


def test_shown_output_is_what_the_command_prints(hooks):
    page = hooks.on_page_markdown(
        "```shell\nmpdiag why sample_runs/ssd trunk.1\n```\n<!-- output -->"
    )
    assert "trunk.1" in page.partition("```{.text .output}")[2]


def test_a_command_that_fails_stops_the_build(hooks):
    with pytest.raises(RuntimeError, match="fails"):
        hooks.output("mpdiag analyze no/such/run")


def test_powers_are_raised_in_sentences_alone(hooks):
    html = "<p>2^-25.3 of 2^(e+1). <code>2^8</code></p>"
    raised = "<p>2<sup>-25.3</sup> of 2<sup>e+1</sup>. <code>2^8</code></p>"
    assert hooks.on_page_content(html) == raised
