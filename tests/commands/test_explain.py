"""``mpdiag explain``: a page, the list, JSON, and what is said of words that are no findings."""

import json

import pytest
from calls import run

from mpdiag.cli import command
from mpdiag.display.explanations import codes
from mpdiag.errors import ExitCode


@pytest.mark.parametrize("word", ["[loss-scale-needed]", "Loss-Scale-Needed"])
def test_a_code_is_found_as_it_is_printed(word):
    assert run("explain", word).stdout == run("explain", "loss-scale-needed").stdout


def test_without_a_code_all_are_listed():
    result = run("explain")
    assert result.exit_code == ExitCode.OK
    assert [code for code in codes() if code not in result.stdout] == []


def test_json_has_the_page_and_the_list():
    document = json.loads(run("explain", "few-steps", "--json").stdout)
    assert document["code"] == "few-steps"
    assert document["severity"] == "info"
    listed = json.loads(run("explain", "--json").stdout)["findings"]
    assert {page["code"] for page in listed} == set(codes())


def test_the_shell_completes_codes():
    (argument,) = [p for p in command("explain").params if p.name == "finding"]
    found = argument.shell_complete(None, "operation-")
    assert {item.value for item in found} == {c for c in codes() if c.startswith("operation-")}
