"""A plan goes through JSON and back without losing a field, and refuses what it does not know."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdiag.errors import DamagedPlan, NewerSchema
from mpdiag.numerics.loss_scalers import SCALERS
from mpdiag.plan import (
    Fp32Choice,
    LayerFormat,
    LossScalePlan,
    MasterWeightsPlan,
    PrecisionPlan,
    ReductionPlan,
    ShapeAdvice,
    Verdict,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
EVIDENCE = st.dictionaries(st.text(), st.one_of(NUMBERS, st.integers(), st.text(), st.none()))


def some(kind):
    """Any instance of a part of the plan, every field drawn."""
    fields = {"evidence": EVIDENCE}
    if kind is MasterWeightsPlan:
        fields["worst_parameter"] = st.one_of(st.none(), st.text())
    if kind is LossScalePlan:
        fields["upper"] = st.one_of(st.none(), NUMBERS)
        fields["method"] = st.sampled_from(["none", *SCALERS])
    for name, annotation in kind.__annotations__.items():
        plain = {"float": NUMBERS, "int": st.integers(), "str": st.text(), "bool": st.booleans()}
        if name not in fields and annotation in plain:
            fields[name] = plain[annotation]
    return st.builds(kind, **fields)


PLANS = st.builds(
    PrecisionPlan,
    run=st.text(),
    verdict=st.builds(
        Verdict,
        level=st.sampled_from(["shown", "expected", "cannot"]),
        text=st.text(),
        evidence=st.lists(st.text(), max_size=2).map(tuple),
        not_examined=st.lists(st.text(), max_size=2).map(tuple),
    ),
    level=st.sampled_from(["O0", "O1", "O2", "O3"]),
    keep_batch_norm_fp32=st.booleans(),
    loss_scale=some(LossScalePlan),
    master_weights=some(MasterWeightsPlan),
    fp32_operations=st.lists(some(Fp32Choice), max_size=2).map(tuple),
    fp32_modules=st.lists(some(Fp32Choice), max_size=2).map(tuple),
    reduction=st.one_of(st.none(), some(ReductionPlan)),
    shapes=st.lists(some(ShapeAdvice), max_size=2).map(tuple),
    layer_formats=st.lists(some(LayerFormat), max_size=2).map(tuple),
)


@given(PLANS)
def test_every_field_round_trips(plan):
    assert PrecisionPlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("{", DamagedPlan, "no readable plan"),
        ("[]", DamagedPlan, "schema_version"),
        ('{"schema_version": 2}', NewerSchema, "upgrade"),
        ('{"schema_version": 1, "levle": "O1"}', DamagedPlan, "levle"),
        ('{"schema_version": 1, "level": "O4"}', DamagedPlan, "level"),
        ('{"schema_version": 1, "loss_scale": 8}', DamagedPlan, "loss_scale"),
        ('{"schema_version": 1, "loss_scale": {"upper": "8"}}', DamagedPlan, "upper"),
        ('{"schema_version": 1, "shapes": [{"module": "head"}]}', DamagedPlan, "incomplete"),
        (
            (
                '{"schema_version": 1, "target": "bf16", "blocks": {"target": "mxfp8", "formats": {}, '
                '"layers": [{"module": "a", "parameter": "weight", "kind": "linear", "fprop": "mxfp8", '
                '"dgrad": "bf16", "wgrad": "mxfp4"}]}}'
            ),
            DamagedPlan,
            "has 'mxfp4' as wgrad of layer 'a': write 'mxfp8' or 'bf16'",
        ),
    ],
)
def test_what_is_no_plan_is_one_sentence(tmp_path, text, error, sentence):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(error, match=sentence):
        PrecisionPlan.load(tmp_path / "plan.json")
    with pytest.raises(DamagedPlan, match="no plan at"):
        PrecisionPlan.load(tmp_path / "missing.json")


def test_a_plan_is_read_from_the_run_it_lies_in(tmp_path):
    with pytest.raises(DamagedPlan, match=r"is a folder without a plan\.json: write one"):
        PrecisionPlan.load(tmp_path)
    PrecisionPlan(run="mine").save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path).run == "mine"


@pytest.mark.parametrize(
    ("sentence", "level"),
    [
        ("This can train in FP16; it needs no loss scale.", "expected"),
        ("This cannot train in FP16 with any loss scale; use BF16.", "cannot"),
    ],
)
def test_a_plan_whose_verdict_is_a_sentence_is_read(sentence, level):
    plan = PrecisionPlan.from_json({**PrecisionPlan().to_json(), "verdict": sentence})
    assert plan.verdict == Verdict(level, sentence)
    assert PrecisionPlan.from_json(plan.to_json()) == plan
