"""The fingerprint of a model: what wrappers leave of names, and how two models differ."""

import pytest

from mpdiag.runs.run import open_run
from mpdiag.tracing.fingerprint import (
    ModelFingerprint,
    compare_models,
    fingerprint,
    other_model,
    share_a_layer,
)

CNN = [("0.weight", (8, 3, 3, 3)), ("0.bias", (8,)), ("2.weight", (10, 288)), ("2.bias", (10,))]
MLP = [("0.weight", (16, 8)), ("0.bias", (16,)), ("2.weight", (4, 16)), ("2.bias", (4,))]


def blocks(count, width=32, head=True):
    names = [f"blocks.{i}.{layer}" for i in range(count) for layer in ("norm", "linear")]
    shapes = {"norm": (width,), "linear": (width, width)}
    found = [(f"{name}.weight", shapes[name.rpartition(".")[2]]) for name in names]
    return found + ([("head.weight", (10, width))] if head else [])


def differ(a, b, **partial):
    return compare_models(fingerprint(a, **partial), fingerprint(b))


WRAPPED = (
    "module.{} _orig_mod.{} module._orig_mod.{} _orig_mod.module.{} _checkpoint_wrapped_module.{}"
)


@pytest.mark.parametrize("wrapped", WRAPPED.split())
def test_names_are_those_of_the_model_inside_its_wrappers(wrapped):
    assert fingerprint((wrapped.format(name), shape) for name, shape in CNN) == fingerprint(CNN)


def test_a_part_inside_ddp_and_a_module_of_that_name_beside_others():
    inside = [("encoder.module.weight", (2, 2)), ("head.weight", (2, 2))]
    assert list(fingerprint(inside).parameters) == ["encoder.weight", "head.weight"]
    own = [("encoder.module.weight", (2, 2)), ("encoder.scale", (2,))]
    assert list(fingerprint(own).parameters) == ["encoder.module.weight", "encoder.scale"]


def test_what_a_rank_holds_a_piece_of_has_no_shape_and_fits_any():
    sharded = [(f"_fsdp_wrapped_module.{name}", (7,)) for name, _ in CNN]
    assert set(fingerprint(sharded).parameters.values()) == {None}
    assert differ(CNN, sharded).changes == ""
    assert fingerprint([("_fsdp_wrapped_module._flat_param", (99,))]) is None


def test_json_and_back():
    whole = fingerprint([*CNN, ("scale", ()), ("sharded", None)], complete=False)
    assert whole.to_json()["parameters"]["0.weight"] == "8x3x3x3"
    assert ModelFingerprint.from_json(whole.to_json()) == whole
    for wrong in ([], {"parameters": []}, {"parameters": {"a": "2xb"}}, {"parameters": {"a": 3}}):
        with pytest.raises(ValueError, match=r"shape|object"):
            ModelFingerprint.from_json(wrong)


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        (blocks(4), ""),
        (blocks(4, width=64), "changed: blocks.0.norm, blocks.0.linear, blocks.1.norm and 6 more"),
        (blocks(8), "new: blocks.4.norm, blocks.4.linear, blocks.5.norm and 5 more"),
        (blocks(3), "gone: blocks.3.norm, blocks.3.linear"),
        ([*blocks(4), ("extra.weight", (3,))], "new: extra"),
        ([*blocks(4), ("head.bias", (10,))], "changed: head"),
    ],
)
def test_an_edited_model_is_the_same_model_with_its_changes_named(edited, changes):
    found = differ(blocks(4), edited)
    assert (found.disjoint, found.changes) == (False, changes)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (CNN, MLP),  # the same names, other dimensions
        (blocks(6), CNN),
        (blocks(6), [(f"layers.{i}.weight", (32, 32)) for i in range(12)]),
    ],
)
def test_another_model_is_told_from_an_edited_one(a, b):
    assert differ(a, b).disjoint
    assert differ(b, a).disjoint
    said = other_model(differ(a, b), fingerprint(a), fingerprint(b), "run")
    assert said.startswith("the plan is for another model: no layer of the plan's (")


def test_a_model_inside_another_is_found_under_its_prefix():
    wrapped = [(f"model.{name}", shape) for name, shape in CNN]
    assert differ(CNN, wrapped).second_prefix == "model"
    assert differ(wrapped, CNN).first_prefix == "model"
    pair = [(f"generator.{n}", s) for n, s in CNN] + [(f"critic.{n}", s) for n, s in MLP]
    part = differ(pair, MLP)
    assert (part.disjoint, part.first_prefix, part.changes) == (False, "critic", "")
    wider = [(name, tuple(2 * size for size in shape)) for name, shape in MLP]
    assert differ(pair, wider).disjoint
    assert not share_a_layer(fingerprint(pair), fingerprint(wider))
    assert share_a_layer(fingerprint(pair), fingerprint([("a.weight", None), ("a.bias", (16,))]))


def test_a_recording_of_some_layers_says_nothing_of_the_others():
    some = blocks(4)[:3]
    assert differ(some, blocks(4), complete=False).changes == ""
    elsewhere = fingerprint([("other.weight", (5, 5))], complete=False)
    both = compare_models(fingerprint(some, complete=False), elsewhere)
    assert not both.disjoint  # parts that do not meet may be of one model


def test_the_sample_runs_are_told_apart(root):
    names = ("digits", "gpt", "speech", "ssd", "ssd-2", "two_stage", "vgg", "vit")
    models = {n: open_run(root / "sample_runs" / n).model_fingerprint() for n in names}
    alike = {
        (a, b) for a in names for b in names if not compare_models(models[a], models[b]).disjoint
    }
    assert alike == {(n, n) for n in names} | {("ssd", "ssd-2"), ("ssd-2", "ssd")}
