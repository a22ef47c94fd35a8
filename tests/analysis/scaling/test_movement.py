"""What a layer loses counts as far as its gradients move weights."""

import math

import numpy as np
import pytest
from row_buffer import UpdateCounts, write_rows

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layers import merge_layers
from mpdiag.analysis.scaling.movement import AT_STAKE, MOVES, Movement, felt
from mpdiag.runs.run import open_run

STEPS = 30


def run_of(folder, layers, **meta):
    """A run in which each layer has a weight of 0.1 per element.

    Args:
        folder: Where.
        layers: Of each the largest gradient of its output, its weight's gradient, and Σ|Δw| over Σ|w|
            in all steps; None if no update was recorded.
        meta: Of the run.
    """
    rows = []
    for step in range(STEPS):
        for name, (output, gradient, moved) in layers.items():
            weight = np.full(64, 0.1)
            rows += [
                (step, "activation_grad", name, np.full(64, output)),
                (step, "weight_grad", f"{name}.weight", np.full(64, gradient)),
                (step, "weight", f"{name}.weight", weight),
            ]
            if moved is not None:
                update = weight * moved / STEPS
                n = int((update != 0).sum())
                counts = UpdateCounts(n, 0, 0, 0, 0, 0, (n,))
                rows.append((step, "update", f"{name}.weight", update, {"update": counts}))
    return write_rows(folder, rows, **meta)


LIVE = (2.0**-12, 2.0**-8, 1.0)
ADAMW = {"type": "AdamW", "weight_decay": 0.01, "eps": 1e-8}


@pytest.mark.parametrize(
    ("layer", "optimizer", "need", "unmoved"),
    [
        ((2.0**-70, 2.0**-66, 0.0), None, "not needed", True),  # behind a saturated softmax
        ((2.0**-70, 2.0**-66, MOVES), None, "not needed", True),  # half of it in the later half
        ((2.0**-30, 2.0**-26, 0.5), None, "needed", False),  # Adam moves it as far as any other
        ((2.0**-30, 2.0**-26, AT_STAKE), None, "advisable", False),
        ((2.0**-30, 2.0**-26, None), None, "needed", False),  # not known
        ((2.0**-70, 2.0**-66, 0.1), ADAMW, "not needed", True),  # only weight decay moves it
        ((2.0**-30, 2.0**-26, 0.1), ADAMW, "needed", False),
        ((2.0**-70, 2.0**-66, 0.1), ADAMW | {"weight_decay": 0}, "not needed", False),
    ],
)
def test_what_is_lost_counts_as_far_as_it_moves_weights(tmp_path, layer, optimizer, need, unmoved):
    meta = {} if optimizer is None else {"optimizers": [optimizer]}
    analysis = analyze(run_of(tmp_path / "run", {"live": LIVE, "other": layer}, **meta))
    plan = analysis.plan.loss_scale
    assert (analysis.verdict.level, plan.need) == ("expected", need)
    assert plan.evidence["unmoved_layers"] == (["other"] if unmoved else [])
    assert ("other loses more, but moves no weights" in plan.reason) == unmoved
    assert ("not shown to be needed" in plan.reason) == (need == "advisable")
    assert (plan.lower > 1) == (need != "not needed")
    assert (
        any("no layer that moves weights" in told for told in analysis.verdict.evidence) == unmoved
    )
    beyond = analysis.loss_scale.out_of_reach
    assert beyond == (frozenset({"other"}) if need == "not needed" and not unmoved else frozenset())
    assert ("loses the gradient of other at every loss scale" in analysis.verdict.text) == bool(
        beyond
    )


def test_a_layer_that_hands_a_gradient_on_counts_without_weights(tmp_path):
    """An activation function has none of its own; what it loses, the layers before it miss."""
    for output, counts in ((2.0**-12, True), (2.0**-27, True), (2.0**-29, False)):
        layers = run_of(tmp_path / str(output), {"live": LIVE, "relu": (output, 1.0, None)})
        rows = open_run(layers).records
        kept = rows.select(~(rows.of_kind("weight_grad") & rows.with_names(["relu.weight"])))
        gradients = merge_layers(kept).of_kind("activation_grad")
        movement = Movement({"live.weight": 6.4}, {"live.weight": 6.4}, frozenset({"live.weight"}))
        assert felt(gradients, movement).tolist() == [True, counts]
        nothing = Movement({"live.weight": 0.0}, {"live.weight": 6.4}, frozenset({"live.weight"}))
        assert felt(gradients, nothing).all()


def test_movement_is_of_a_layer_and_of_those_inside_it():
    names = frozenset({"a.0.weight", "a.1.weight", "ab.weight"})
    moved = Movement(
        {"a.0.weight": 1.0, "a.1.weight": 0.0, "ab.weight": 3.0},
        {"a.0.weight": 2.0, "a.1.weight": 6.0, "ab.weight": 3.0},
        names,
    )
    assert [moved.relative(layer) for layer in ("a", "a.0", "a.1", "ab", "")] == [
        *(1 / 8, 1 / 2, 0.0, 1.0),
        4 / 11,
    ]
    assert [moved.moves(layer) for layer in ("a", "a.0", "a.1", "ab", "", "c")] == [
        *(True, True, False),
        *(True, True, False),
    ]
    assert moved.relative("c") == 4 / 11  # without parameters: as the model
    assert moved.relative("a.2") == 1 / 8  # as the module around it, which the model's rest outruns
    unknown = Movement({}, {}, names)
    assert unknown.moves("a.1")
    assert unknown.relative("a.1") == math.inf
