"""What a comparison says: divergence, several metrics, margins, models."""

import math
import random

import pytest
from calls import printed
from seed_runs import make_run

import mpdiag
from mpdiag.analysis.comparison.compare import compare_groups
from mpdiag.analysis.comparison.groups import SeedGroup, SeedTraining, read_group, save_baseline
from mpdiag.analysis.comparison.models import KnownModel, relate_models
from mpdiag.errors import UsageError
from mpdiag.reports.text.comparison import comparison_text
from mpdiag.tracing.fingerprint import ModelFingerprint

HIGHER = {"accuracy": True, "F1": True, "reward": True, "final loss": False}


def group(name, seeds, *, diverged=0, model=None, paired=False):
    """A side: a dict of metrics for each seed; the last ``diverged`` ones diverged."""
    model, first = model or KnownModel(), len(seeds) - diverged
    trainings = [
        SeedTraining(
            f"{name}{i}", i if paired else None, m, HIGHER, diverged=i >= first, model=model
        )
        for i, m in enumerate(seeds)
    ]
    return SeedGroup(name, tuple(trainings))


def accuracies(*values):
    return [{"accuracy": value} for value in values]


def codes(comparison):
    return [f.code for f in comparison.findings]


def text_of(comparison):
    return " ".join(printed(comparison_text(comparison)).split())


def test_trainings_of_unequal_length_are_a_finding(tmp_path):
    make_run(tmp_path / "a", losses=[3.0, 2.0, 1.0])
    make_run(tmp_path / "b", losses=[3.0])
    assert "lengths-differ" in codes(mpdiag.compare(tmp_path / "a", tmp_path / "b"))


# -- divergence ------------------------------------------------------------------------------------


def test_b_diverging_more_often_is_never_equivalent_and_fails_a_strict_job():
    good = [0.9, 0.9001, 0.9002, 0.9003]
    a = group("a", accuracies(*good, *good))
    b = group("b", accuracies(*good, *good[:3], math.nan))
    found = compare_groups(a, b)
    assert found.metrics[0].result.verdict == "equivalent"
    assert found.verdict == "inconclusive"
    (finding,) = (f for f in found.findings if f.code == "diverges-more")
    assert finding.severity == "error"
    assert "b diverged in 1 of 8 trainings (95 % interval 0 % to 53 %), a in 0 of 8" in (
        finding.message
    )
    assert "does not show the rates to be different" in finding.message
    assert "seeds on each side would show whether the rates differ" in finding.fix
    # The other way round b trains as well as a, whatever a's rate is.
    assert compare_groups(b, a).verdict == "equivalent"
    assert all(f.severity == "info" for f in compare_groups(b, a).findings)


def test_all_seeds_against_none_are_different():
    a = group("a", accuracies(0.9, 0.91, 0.9))
    found = compare_groups(a, group("b", accuracies(math.nan, math.nan, math.nan)))
    assert (found.verdict, codes(found)) == ("different", ["diverges-more"])
    assert found.divergence.p_value == pytest.approx(1 / 32)
    assert "the rates are different" in found.findings[0].message


def test_rates_and_intervals_stand_in_the_json_and_in_the_text():
    a = group("a", accuracies(0.9, 0.91, 0.9))
    found = compare_groups(a, group("b", accuracies(0.9, 0.9, math.nan)))
    stored = found.to_json()["divergence"]
    assert (stored["verdict"], stored["seeds_to_decide"]) == ("inconclusive", 19)
    figures = stored["b"]["rate"], stored["b"]["low"], stored["a"]["high"]
    assert figures == pytest.approx((1 / 3, 0.0084, 0.7076), abs=1e-4)
    text = text_of(found)
    assert "b diverged in 1 of 3 trainings" in text
    assert "Boschloo's exact test p = 0.6" in text
    assert "nan" not in text


def test_a_training_that_diverged_counts_although_its_accuracy_is_a_number():
    """The largest of ten NaNs is the first: an accuracy of 0.1."""
    a = group("a", accuracies(0.9, 0.91, 0.9))
    b = group("b", accuracies(0.9, 0.91, 0.1), diverged=1)
    found = compare_groups(a, b)
    assert found.divergence.diverged == (0, 1)
    assert found.metrics[0].result.difference == pytest.approx(0.905 - 0.9033, abs=1e-3)


def test_which_trainings_count_as_diverged(tmp_path):
    made = [
        ({"losses": [2.0, 1.0], "metric": 0.9}, False),
        ({"losses": [2.0, math.nan], "metric": 0.1}, True),
        ({"losses": [2.0, None], "state": "failed"}, True),  # ended on skipped steps
        ({"losses": [2.0, 1.0], "state": "failed"}, False),  # a crash of another kind
        ({"losses": [2.0, 1.0], "notes": [{"stopped": "8 steps were skipped"}]}, True),
        ({"losses": [2.0, None, 1.0], "metric": 0.9}, False),
        ({"losses": [None, None], "state": "failed"}, True),  # nothing but skipped steps
    ]
    for i, (of, _) in enumerate(made):
        make_run(tmp_path / str(i), **of)
    found = read_group(tmp_path)
    diverged = {t.name: t.diverged for t in found.trainings}
    assert diverged == {str(i): expected for i, (_, expected) in enumerate(made)}
    save_baseline(found, tmp_path / "baseline.json")
    stored = read_group(tmp_path / "baseline.json")
    assert {t.name: t.diverged for t in stored.trainings} == diverged


def test_a_metric_that_a_diverged_training_lacks_is_compared_still(tmp_path):
    for i in range(3):
        make_run(tmp_path / "a" / str(i), losses=[2.0, 1.0], metric=0.9 + i / 1000)
        ended = {"losses": [2.0, None], "state": "failed"} if i else {"losses": [2.0, 1.0]}
        make_run(tmp_path / "b" / str(i), **ended, metric=None if i else 0.9)
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    assert [m.metric for m in found.metrics] == ["accuracy", "final loss"]
    assert found.divergence.diverged == (0, 2)
    assert math.isnan(found.metrics[0].b[1])


# -- metrics ---------------------------------------------------------------------------------------


def test_accuracies_of_990_and_975_are_not_equal():
    values = (0.990, 0.9901, 0.9899, 0.9902)
    a, b = (group(n, accuracies(*(v - by for v in values))) for n, by in (("a", 0.0), ("b", 0.015)))
    assert compare_groups(a, b).verdict == "different"
    assert [m.margin.kind for m in compare_groups(a, b).metrics] == ["score"]
    assert compare_groups(a, b, margin={"accuracy": 0.02}).verdict == "equivalent"


def test_how_much_of_an_unknown_metric_matters_is_asked():
    a = group("a", [{"reward": 200.0 + i / 10} for i in range(5)])
    b = group("b", [{"reward": 200.1 + i / 10} for i in range(5)])
    found = compare_groups(a, b)
    assert found.verdict == "inconclusive"  # nobody has said that 0.1 is little
    assert "margin-unknown" in codes(found)
    assert all("--margin 'reward=VALUE'" in f.fix for f in found.findings)
    assert compare_groups(a, b, margin={"reward": 2.0}).verdict == "equivalent"
    assert found.to_json()["metrics"][0]["margin_kind"] == "unknown"
    worse = group("worse", [{"reward": 20.0 + i} for i in range(5)])
    assert compare_groups(a, worse).verdict == "different"


def test_several_metrics_are_judged_at_one_level():
    """Two of three are not: the third has to be clear at a third of the level."""
    draw = random.Random(0)
    spreads = {"accuracy": (0.9, 0.003), "F1": (0.8, 0.05), "final loss": (1.0, 0.2)}
    a, b = (
        group(name, [{m: draw.gauss(*of) for m, of in spreads.items()} for _ in range(6)])
        for name in "ab"
    )
    alphas = [m.result.alpha for m in compare_groups(a, b).metrics]
    assert alphas == pytest.approx([0.05 / 3] * 3)
    (alone,) = compare_groups(a, b, metric="accuracy").metrics
    assert alone.result.alpha == 0.05


# -- models ----------------------------------------------------------------------------------------

CONVOLUTIONS = ModelFingerprint({f"conv{i}.weight": (8, 3, 3, 3) for i in range(4)})
EDITED = ModelFingerprint({**CONVOLUTIONS.parameters, "head.weight": (10, 8)})
ATTENTION = ModelFingerprint({f"block{i}.qkv.weight": (96, 32) for i in range(4)})


def known(fingerprint=None, kind="", parameters=0):
    return KnownModel(fingerprint, kind, parameters)


def test_two_different_models_are_said_first():
    a, b = (
        group(name, accuracies(0.9, 0.9001, math.nan), model=known(model))
        for name, model in (("a", CONVOLUTIONS), ("b", ATTENTION))
    )
    found = compare_groups(a, b)
    assert (found.findings[0].code, found.findings[0].severity) == ("different-models", "warning")
    assert found.to_json()["different_models"] is True
    text = text_of(found)
    assert text.startswith("a and b are trainings of two different models: one with conv0")
    assert text.count("two different models") == 1
    with pytest.raises(UsageError, match="two different models"):
        compare_groups(a, group("c", [{"reward": 1.0}], model=known(ATTENTION)))


def test_an_edited_model_is_a_note_and_a_baseline_knows_its_model(tmp_path):
    a = group("a", accuracies(0.9, 0.9), model=known(CONVOLUTIONS, "Net", 100))
    b = group("b", accuracies(0.9, 0.9), model=known(EDITED))
    (finding,) = compare_groups(a, b).findings
    assert (finding.code, finding.severity) == ("models-differ", "info")
    assert "new: head" in finding.message
    assert compare_groups(a, a).findings == ()
    save_baseline(a, tmp_path / "baseline.json")
    assert read_group(tmp_path / "baseline.json").model == a.model


def test_without_names_class_and_size_must_both_differ():
    """A wrapper changes the class, an edit the size."""
    net = known(kind="Net", parameters=100)
    assert relate_models(net, known(kind="DistributedDataParallel", parameters=100)) is None
    assert relate_models(net, known(kind="Net", parameters=120)) is None
    assert relate_models(net, known()) is None
    found = relate_models(net, known(ATTENTION, "Vit", 500))
    assert found.different
    assert found.words == "Net with 100 parameters and Vit with 500 parameters"


def test_a_training_beside_itself_is_said_to_be_one(tmp_path):
    make_run(tmp_path / "run", losses=[1.0, 0.5], metric=0.9)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for other in ("run", "link"):
        found = mpdiag.compare(tmp_path / "run", tmp_path / other)
        assert codes(found)[0] == "same-sides"
        assert "metric-inconclusive" not in codes(found)  # more seeds of it would show nothing
    assert text_of(found).startswith("both sides are ")
