"""Every finding that the package can make has a page, and the page says what the code does."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from calls import printed as shown
from calls import run

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.comparison.compare import compare
from mpdiag.analysis.findings import Finding
from mpdiag.analysis.operations.rules import Code
from mpdiag.display.explanations import (
    GROUPS,
    SECTIONS,
    codes,
    command_for,
    explanation,
    listing,
    meaning_of,
)
from mpdiag.reports.text.lists import WIDTH, explanation_text, listing_text

ROOT = Path(__file__).resolve().parents[2]
ANY = ".*?"
_MAKERS = {"Finding": None, "_note": ("severity", "code", "message", "fix"), "note": None}
_MAKERS["note"] = _MAKERS["_note"]
_SEVERITIES = ("info", "warning", "error")
_MAKERS |= dict.fromkeys(_SEVERITIES)
_CONSTANT = re.compile(r"^- `(mpdiag\.[\w.]+)` is (\S+)$", re.MULTILINE)
_SAMPLE = re.compile(r"`mpdiag (\w+) ([^`]*sample_runs[^`]*)` finds:")


def patterns(node, constants):
    """The texts that an expression can be, each as a regular expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {re.escape(node.value)}
    if isinstance(node, ast.IfExp):
        return patterns(node.body, constants) | patterns(node.orelse, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return {re.escape(constants[node.id])}
    if isinstance(node, ast.JoinedStr):
        return {
            "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ANY for p in node.values)
        }
    if isinstance(node, ast.BinOp):
        left, right = (patterns(side, constants) for side in (node.left, node.right))
        return {a + b for a in left for b in right}
    return {ANY}


@cache
def made():
    """Each place that makes a finding: what its severity, code, message and fix can be."""
    found = []
    for path in sorted((ROOT / "mpdiag").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            n.targets[0].id: n.value.value
            for n in tree.body
            if isinstance(n, ast.Assign)
            and isinstance(n.targets[0], ast.Name)
            and isinstance(n.value, ast.Constant)
            and isinstance(n.value.value, str)
        }
        for node in ast.walk(tree):
            name = getattr(getattr(node, "func", None), "id", "")
            if not isinstance(node, ast.Call) or name not in _MAKERS:
                continue
            given = {k.arg: k.value for k in node.keywords}
            if name in _SEVERITIES:
                given["severity"] = ast.Constant(name)
            if _MAKERS[name] is not None:
                given |= dict(zip(_MAKERS[name], node.args, strict=False))
            place = {
                key: patterns(given[key], constants) if key in given else {ANY}
                for key in ("severity", "code", "message", "fix")
            }
            if name == "Finding" or place["severity"] <= {"info", "warning", "error"}:
                found.append(place)  # else it is another function of that name
    return found


def places(code):
    """The places that can make a finding of a code."""
    return [p for p in made() if any(re.fullmatch(c, code) for c in p["code"])]


def test_each_finding_of_the_source_has_a_page_and_each_page_a_finding():
    emitted = {c for place in made() for c in place["code"]}
    assert ANY not in emitted  # a code that cannot be read here would need no page
    whole = {re.sub(r"\\(.)", r"\1", c) for c in emitted if ANY not in c}
    assert whole - set(codes()) == set()
    assert [code for code in codes() if not places(code)] == []
    families = {c.removesuffix(ANY) for c in emitted if ANY in c}
    assert families == {re.escape("operation-"), re.escape("layer-towards-")}


def test_each_rule_about_operations_has_a_page():
    rules = {f"operation-{rule}" for rule in get_args(Code)}
    assert rules == {code for code in codes() if code.startswith("operation-")}


@pytest.mark.parametrize("code", codes())
def test_a_page_says_what_the_code_does(code):
    page = explanation(code)
    assert page.code == code
    assert page.about in GROUPS
    assert tuple(page.sections) == SECTIONS
    assert all(page.sections.values())
    assert page.summary.endswith(".")
    emitted = set().union(*(p["severity"] for p in places(code)))
    said = set(page.severity.split(" or "))
    assert said <= emitted or ANY in emitted
    if all(len(p["code"]) == 1 and ANY not in min(p["code"]) for p in places(code)):
        assert said == emitted  # a place of several codes may give each a severity of its own
    for name, value in _CONSTANT.findall(page.sections["How it was computed"]):
        module, _, constant = name.rpartition(".")
        assert getattr(import_module(module), constant) == float(value), name
    for other in re.findall(r"`([\w-]+)`", page.sections["See also"]):
        assert other in codes()
        assert other != code
    example = page.sections["An example"].partition("```text\n")[2].removesuffix("```")
    assert any(re.fullmatch(words, " ".join(example.split())) for words in printed(code)), example
    assert max(map(len, shown(explanation_text(page), width=120).splitlines())) <= WIDTH


def printed(code):
    """Everything that a place in the source can print under a code."""
    for place in places(code):
        for message in place["message"]:
            for fix in place["fix"]:
                words = f"(info|warning|error): {message} ({fix} )?{re.escape(f'[{code}]')}"
                yield re.sub(r"(\\ )+", " ", words).replace(r"\ ", " ")


@pytest.mark.parametrize("code", [c for c in codes() if "sample_runs" in str(explanation(c))])
def test_an_example_of_a_sample_run_is_what_it_gives(code):
    section = explanation(code).sections["An example"]
    ((command, words),) = _SAMPLE.findall(section)
    folders = [ROOT / word for word in words.split() if word.startswith("sample_runs/")]
    assert words == " ".join(word for word in words.split() if not word.startswith("-"))
    found = analysis_of(folders[0]) if command == "analyze" else compare(*folders).findings
    said = " ".join(section.partition("```text\n")[2].split())
    told = [f"{f.severity}: {f.message} {f.fix}" for f in found if f.code == code]
    assert any(" ".join(t.replace(f"{ROOT}/", "").split()) in said for t in told), told


@cache
def analysis_of(folder):
    return analyze(folder).findings


def test_the_list_has_every_code_once():
    lines = shown(listing_text(), width=200).splitlines()
    assert [code for code in codes() if sum(f"  {code} " in line for line in lines) != 1] == []
    assert [p.code for group in listing().values() for p in group].sort() == list(codes()).sort()


def test_what_a_finding_means_is_plain_text():
    assert "`" not in meaning_of("probe-diverges")
    assert meaning_of("no-such-finding") == ""
    assert explanation("../version") is None


def test_the_command_that_json_names_is_one_that_runs():
    for code in ("loss-scale-needed", "misaligned"):
        told = Finding(severity="info", code=code, message="").to_json()["explained"]
        assert told == command_for(code)
        words = command_for(code).split()
        assert words[0] == "mpdiag"
        assert run(*words[1:]).exit_code == 0
