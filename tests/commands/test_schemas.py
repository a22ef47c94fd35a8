"""Every ``--json`` has a schema in ``docs/schemas``: outputs validate, and mutated ones do not."""

import copy
import json
import math
import typing

import pytest
from calls import COMMANDS, run
from jsonschema import Draft202012Validator
from schemas import SCHEMAS, SHARED, assert_described, faults

import mpdiag
from mpdiag.analysis.comparison import comparison_findings, equivalence, margins
from mpdiag.analysis.figures import Counted, Key
from mpdiag.analysis.findings import Severity
from mpdiag.analysis.verdict.probe import Probe
from mpdiag.exports.registry import BLOCK_ENGINES, EXPORTERS, TextLanguage
from mpdiag.hardware.capabilities import How
from mpdiag.plan import LossScaleNeed, PrecisionPlan, VerdictLevel
from mpdiag.runs.answers import Certainty
from mpdiag.runs.schema import Kind
from mpdiag.sensitivity.fp32_search import Answer
from mpdiag.tensorcores.causes import CauseCode
from mpdiag.tensorcores.kernels.rules import KernelVerdict

WHOLE = [
    ("analyze", "analyze ssd --against ssd-fp16-plan"),
    ("audit", "audit audited/bf16"),
    ("why", "why ssd"),
    ("replay", "replay digits"),
    ("compare", "compare ssd ssd-fp16-plan"),
    ("runs", "runs ."),
    ("doctor", "doctor"),
    ("explain", "explain"),
    ("explain", "explain loss-scale-needed"),
    ("profile", "profile sample.json.gz"),
    ("profile", "profile step.json --against before.json"),
    ("profile", "profile rank0.json rank1.json"),
    ("export", "export ssd/plan.json --to torch"),
    ("error", "explain zzz"),
]
"""Schema, command. ``search``, skip capsules and scripts on a CPU: where their tests train."""
MORE = [
    ("analyze", "analyze ssd"),
    ("analyze", "analyze ssd --target bf16"),
    ("analyze", "analyze audited/bf16"),
    ("why", "why ssd trunk.0.weight"),
    ("profile", "profile causes.json"),
    *(
        ("export", f"export ssd/plan.json --to {framework}")
        for framework in EXPORTERS
        if framework not in BLOCK_ENGINES
    ),
    ("error", "runs nowhere"),
    ("error", "analyze ssd --target fp17"),
]

FREE = {
    *("before", "cuda_tflops", "evidence", "kernel_us", "meta", "now", "packages", "parameters"),
    *("sections", "settings", "states", "tensor_tflops", "unknown"),
}
"""Objects whose fields are named by what was found: no schema can miss one."""
MAPS = {"formats", "kinds", "idle_causes"}
"""The same, with objects in them that a schema describes."""
SOMETIMES = {"against", "settings"}
"""Fields that not every document has."""


@pytest.fixture
def documents(printed, monkeypatch):
    """From a command to its document."""
    monkeypatch.chdir(printed)
    return lambda words: json.loads(run(*words.split(), "--json").stdout)


def test_every_command_with_json_has_a_schema_and_every_schema_is_one():
    with_json = {n for n, c in COMMANDS.items() if any("--json" in p.opts for p in c.params)}
    assert set(SCHEMAS) == with_json | SHARED
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("name", "words"), WHOLE + MORE)
def test_documents_are_described(documents, name, words):
    assert_described(name, documents(words))


def test_a_probe_is_described(root):
    probe = Probe((1.0, 0.5), (1.0, math.inf), 0, 2, "it failed")
    probed = mpdiag.analyze(root / "sample_runs" / "digits").with_probe(probe)
    assert_described("analyze", json.loads(json.dumps(probed.to_json(), allow_nan=False)))


def test_plans_are_described(root):
    assert_described("plan", PrecisionPlan().to_json())
    for path in root.glob("sample_runs/*/plan.json"):
        assert_described("plan", PrecisionPlan.load(path).to_json())


def short(part):
    """A document with the first entry of each list: all of its fields, and fast to validate."""
    if isinstance(part, dict):
        return {key: short(value) for key, value in part.items()}
    return [short(value) for value in part[:1]] if isinstance(part, list) else part


def fields(part, path=()):
    """The path to each field that a schema names."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if (
            isinstance(part, dict)
            and key not in SOMETIMES
            and path[-1:] not in {(m,) for m in MAPS}
        ):
            yield *path, key
        if isinstance(value, (dict, list)) and (key not in FREE or isinstance(value, list)):
            yield from fields(value, (*path, key))


def mutated(document, path):
    """The document without a field, with the field under another name, and with another type."""
    for kind in ("missing", "renamed", "retyped"):
        changed = copy.deepcopy(document)
        inside = changed
        for key in path[:-1]:
            inside = inside[key]
        value = inside.pop(path[-1])
        if kind == "renamed":
            inside[f"{path[-1]}_"] = value
        elif kind == "retyped":
            inside[path[-1]] = [[["?"]]]
        yield kind, changed


@pytest.mark.parametrize(("name", "words"), WHOLE)
def test_mutated_documents_are_refused(documents, name, words):
    document = short(documents(words))
    assert not faults(name, document)
    missed = [
        (path, kind)
        for path in fields(document)
        for kind, changed in mutated(document, path)
        if not faults(name, changed)
    ]
    # The shapes of a kernel's operands are lists of any depth.
    assert not [m for m in missed if (m[0][0], m[0][-1]) != ("kernels", "shapes")]


def test_an_open_object_takes_a_field_of_a_later_version_and_others_do_not(documents):
    analysis = documents("analyze ssd")
    assert not faults("analyze", analysis | {"later": 1})
    assert faults("analyze", analysis | {"later": 1}, closed=True)
    assert faults("analyze", analysis | {"plan": analysis["plan"] | {"later": 1}})
    assert faults("replay", documents("replay digits") | {"later": 1})


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("finding/properties/severity", Severity),
        ("plan/$defs/verdict/properties/level", VerdictLevel),
        ("plan/properties/loss_scale/properties/need", LossScaleNeed),
        ("analyze/$defs/figure/properties/key", Key),
        ("analyze/$defs/figure/properties/counted", Counted),
        ("analyze/$defs/layer/properties/kind", Kind),
        ("audit/$defs/answer/properties/answer", Certainty),
        ("compare/properties/verdict", equivalence.EquivalenceVerdict),
        ("compare/properties/answer", comparison_findings.Answer),
        ("compare/properties/metrics/items/properties/margin_kind", margins.MarginKind),
        ("doctor/properties/abilities/items/properties/how", How),
        ("export/properties/language", TextLanguage),
        ("profile/$defs/kernel/properties/verdict", KernelVerdict),
        ("profile/$defs/operation/properties/cause", CauseCode),
        ("search/properties/answer", Answer),
    ],
)
def test_choices_are_those_of_the_code(place, kind):
    part = SCHEMAS
    for key in place.split("/"):
        part = part[key]
    words = {
        word
        for choice in (kind, *typing.get_args(kind))
        for word in typing.get_args(choice)
        if isinstance(word, str)
    }
    assert set(part["enum"]) - {"given"} == words
