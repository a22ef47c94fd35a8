"""What a comparison says: divergence, several metrics, margins, models."""

import math
import random
import statistics

import pytest
from calls import printed
from seed_runs import make_run

import mpdiag
from mpdiag.analysis.comparison.compare import compare_groups
from mpdiag.analysis.comparison.groups import SeedGroup, SeedTraining, read_group, save_baseline
from mpdiag.analysis.comparison.models import KnownModel, relate_models
from mpdiag.errors import UsageError
from mpdiag.reports.text.comparison import comparison_text
from mpdiag.runs.results import add_to_meta
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


def test_trainings_of_unequal_length_are_said_first_and_answer_nothing(tmp_path):
    make_run(tmp_path / "a", losses=[3.0, 2.0, 1.0])
    make_run(tmp_path / "b", losses=[3.0])
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    assert (codes(found)[0], found.answer) == ("lengths-differ", "undecided (one seed)")
    assert [m.answer for m in found.metrics] == ["undecided (one seed)"]
    assert "error" not in {f.severity for f in found.findings}
    assert text_of(found).startswith(found.findings[0].message)


@pytest.mark.parametrize(
    ("taken", "seen", "differ"),
    [((3, 3), 6, False), ((2, 3), 6, False), ((6,), 6, True), ((6, 6), 6, True), ((), 6, True)],
)
def test_a_round_of_optimizers_that_take_turns_is_one_step(tmp_path, taken, seen, differ):
    make_run(tmp_path / "a", losses=[3.0, 2.0, 1.0])
    optimizers = [{"type": "Adam", "steps_taken": n} for n in taken]
    make_run(tmp_path / "b", losses=[2.0] * 6, steps_seen=seen, optimizers=optimizers)
    save_baseline(read_group(tmp_path / "b"), tmp_path / "stored.json")
    for b in ("b", "stored.json"):
        found = mpdiag.compare(tmp_path / "a", tmp_path / b)
        assert ("lengths-differ" in codes(found)) == differ


def test_a_training_that_diverged_early_is_worse_not_short(tmp_path):
    make_run(tmp_path / "a", losses=[3.0, 2.0, 1.0])
    make_run(tmp_path / "b", losses=[3.0, math.nan])
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    assert (found.answer, "lengths-differ" in codes(found)) == ("worse (one seed)", False)


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
    bounds = (pytest.approx(bound, abs=1e-4) for bound in (0.0084, 0.7076))
    assert figures == (pytest.approx(1 / 3), *bounds)
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


# -- one seed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "answer", "code"),
    [
        (0.845, "as FP32 (one seed)", "one-seed"),
        (0.840, "as FP32 (one seed)", "one-seed"),
        (0.834, "undecided (one seed)", "metric-inconclusive"),
        (0.825, "worse (one seed)", "metric-different"),
        (0.175, "worse (one seed)", "metric-different"),
        (0.975, "better (one seed)", "one-seed"),
        (math.nan, "worse (one seed)", "diverges-more"),
    ],
)
def test_one_seed_answers_in_margins(candidate, answer, code):
    a, b = (group(n, accuracies(v)) for n, v in (("a", 0.845), ("b", candidate)))
    found = compare_groups(a, b, margin=0.006)
    assert (found.answer, codes(found)[0]) == (answer, code)
    assert (found.to_json()["answer"], found.undecided) == (answer, "undecided" in answer)
    assert text_of(found).startswith(f"b against a: {answer} ")
    assert repr(found).endswith(f"{answer}>")
    assert found.to_json()["verdict"] in ("inconclusive", "different")  # as before
    told = [f for f in found.findings if f.code.startswith(("metric", "one-seed"))]
    assert all("(one seed)" in f.message and "e+" not in f.message for f in told)


def test_the_final_loss_decides_only_alone():
    a = group("a", [{"accuracy": 0.9, "final loss": 0.01}])
    b = group("b", [{"accuracy": 0.9, "final loss": 0.02}])
    assert compare_groups(a, b).answer == "as FP32 (one seed)"
    assert {f.severity for f in compare_groups(a, b).findings} == {"info"}
    (worse,) = (f for f in compare_groups(a, b).findings if f.code == "metric-different")
    assert worse.message == "final loss is worse by 0.01, 50 margins; accuracy decides (one seed)"
    assert compare_groups(a, b, metric="final loss").answer == "worse (one seed)"


def test_several_seeds_answer_as_the_test_does():
    near, far = ([0.9, 0.9001, 0.8999], [0.8, 0.8001, 0.7999])
    reference = group("a", accuracies(*near))
    for values in (near, far, [0.9, 0.8, 0.7]):
        found = compare_groups(reference, group("b", accuracies(*values)))
        assert found.answer == found.verdict


def test_the_margin_is_given_or_the_runs_or_of_seeds_beside_it_or_of_the_kind(tmp_path):
    """In this order; the candidate is no seed beside, and neither is another workload."""
    same = {"script": "train.py", "steps_seen": 3, "model": {"type": "Net", "parameters": 9}}

    def kind_of(b, **options):
        found = mpdiag.compare(tmp_path / "a", tmp_path / b, metric="accuracy", **options)
        return found.to_json()["metrics"][0]["margin_kind"], found.metrics[0].margin.width

    make_run(tmp_path / "a", metric=0.9, seed=0, **same)
    make_run(tmp_path / "b", metric=0.89, seed=1, **same)
    others = [
        {"seed": 0},
        {"seed": 2, "script": "other.py"},
        {"seed": 2, "steps_seen": 4},
        {"seed": 2, "state": "failed"},
        {"seed": 2, "training": {"level": "O1", "dtype": "float16"}},
        {"seed": 2, "optimizers": [{"type": "SGD", "lr": 1.0}]},
        {"seed": 2, "losses": (1.0, 1.0, math.nan)},
        {},
    ]
    for i, other in enumerate(others):
        make_run(tmp_path / f"other{i}", metric=0.5, **{**same, **other})
    assert kind_of("b") == ("score", pytest.approx(0.005))
    make_run(tmp_path / "c", metric=0.88, seed=2, training={"level": "O0"}, **same)
    make_run(tmp_path / "d", metric=0.5, seed=2, **same)  # the same seed counts once
    assert kind_of("b") == ("seeds", pytest.approx(0.02 / math.sqrt(2)))
    assert kind_of("c") == ("seeds", pytest.approx(0.01 / math.sqrt(2)))
    add_to_meta(tmp_path / "a", margins={"accuracy": 0.03, "F1": 1})
    assert kind_of("b") == ("run", 0.03)
    assert kind_of("b", margin=0.04) == ("given", 0.04)
    save_baseline(read_group(tmp_path / "a"), tmp_path / "stored.json")
    stored = mpdiag.compare(tmp_path / "stored.json", tmp_path / "b", metric="accuracy")
    assert stored.metrics[0].margin.width == 0.03
    for broken in (math.inf, -1, 0, "much", None):
        add_to_meta(
            tmp_path / "a", margins={"accuracy": str(broken) if broken == math.inf else broken}
        )
        assert kind_of("b")[0] == "seeds"


def test_one_seed_and_several_are_judged_by_one_margin(tmp_path):
    """The spread of the FP32 seeds, whether one of them is named, their folder or its baseline."""
    seeds = {0: 0.90, 1: 0.91, 2: 0.93}
    for seed, accuracy in seeds.items():
        make_run(tmp_path / "fp32" / f"seed{seed}", seed=seed, metric=accuracy)
        plan = {"level": "O1", "dtype": "float16"}
        for side in ("fp16", "again"):
            make_run(tmp_path / side / f"seed{seed}", seed=seed, metric=accuracy, training=plan)
    make_run(tmp_path / "again" / "seed3", seed=3, metric=0.2)  # not all of one side is FP32
    spread = pytest.approx(statistics.stdev(seeds.values()))
    for name in ("fp32", "fp32/seed1"):
        save_baseline(read_group(tmp_path / name), tmp_path / "stored.json")
        for a in (name, "stored.json"):
            for b in ("fp16", "fp16/seed0"):  # seed0 is a name of FP32 as well
                found = mpdiag.compare(tmp_path / a, tmp_path / b, metric="accuracy")
                margin = found.metrics[0].margin
                assert (margin.kind, margin.width) == ("seeds", spread), (a, b)
    several = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16", metric="accuracy")
    assert several.verdict == "equivalent"
    for a in ("fp16", "again"):
        found = mpdiag.compare(tmp_path / a, tmp_path / "fp32", metric="accuracy")
        assert found.metrics[0].margin.kind == "score"


@pytest.mark.parametrize(
    ("a", "b", "severity"),
    [
        ((1.0, 0), (1.01, 0), None),
        ((1.0, 0), (0.02, 0), "warning"),
        ((1.0, None), (0.02, None), "warning"),
        ((1.0, 0), (0.02, 1), "info"),
        ((1.0, 0), (None, 0), None),  # its first step was skipped
        ((-1.0, 0), (1.0, 0), "warning"),
        ((0.0, 0), (0.0, 0), None),
    ],
)
def test_sides_that_did_not_begin_alike(tmp_path, a, b, severity):
    for name, (loss, seed) in (("a", a), ("b", b)):
        make_run(tmp_path / name, losses=(loss, 0.5, 0.4), seed=seed)
    findings = mpdiag.compare(tmp_path / "a", tmp_path / "b").findings
    assert [f.severity for f in findings if f.code == "beginnings-differ"] == (
        [severity] if severity else []
    )
    assert (findings[0].code == "beginnings-differ") == (severity == "warning")  # said first


@pytest.mark.parametrize(
    ("seed", "last", "answer"),
    [
        (0, 0.2, "undecided (one seed)"),  # a model that was trained on
        (0, 0.4, "undecided (one seed)"),
        (0, 2.0, "worse (one seed)"),
        (0, math.nan, "worse (one seed)"),
        (1, 0.2, "better (one seed)"),  # another seed, and known to be
    ],
)
def test_a_side_that_began_otherwise_is_not_called_as_good(tmp_path, seed, last, answer):
    make_run(tmp_path / "a", losses=(1.0, 0.5, 0.4), seed=0)
    make_run(tmp_path / "b", losses=(0.45, 0.4, last), seed=seed)
    assert mpdiag.compare(tmp_path / "a", tmp_path / "b").answer == answer


def test_of_several_seeds_pairs_began_alike_or_not(tmp_path):
    for seed in range(3):
        make_run(tmp_path / "a" / str(seed), losses=(1.0 + seed, 0.5), seed=seed)
        make_run(tmp_path / "b" / str(seed), losses=(1.0 + seed, 0.5), seed=seed)
        make_run(tmp_path / "c" / str(seed), losses=(0.1, 0.5), seed=seed)
    told = [codes(mpdiag.compare(tmp_path / "a", tmp_path / b)) for b in "bc"]
    assert [found.count("beginnings-differ") for found in told] == [0, 1]


@pytest.mark.parametrize(
    ("source", "metric"),
    [
        ('print(f"epoch {e} acc {right / n:.4f}")', "acc"),
        ("print('val accuracy:', right / n)", "accuracy"),
        ('print("mAP@0.5 = %.3f" % value)', "mAP@0.5"),
        ('print("top1 {:.2f}".format(value))', "top1"),
        ('print("PSNR", value)', "PSNR"),
        ('print(f"loss {loss:.4f} after {step} steps")', ""),
        ('print("accuracy is what counts")', ""),
        ("acc = right / n", ""),
        ("print f'acc {x}'", ""),
        (f"table{'.drop()' * 400}", ""),
        (f"print('acc %f'{' % 1' * 2000})", ""),
        (f"x = {'-' * 20_000}1", ""),
    ],
)
def test_a_metric_that_the_script_only_prints_is_named(tmp_path, source, metric):
    script = tmp_path / "train.py"
    script.write_text(source)
    for name in "ab":
        made_by = {"script": str(script), "argv": [str(script)], "world_size": 1}
        make_run(tmp_path / "runs" / name, seed=0, **made_by)
        make_run(tmp_path / "logged" / name, seed=0, metric=0.9, **made_by)
    for folder, said in (("runs", metric), ("logged", "")):
        findings = mpdiag.compare(*(tmp_path / folder / name for name in "ab")).findings
        told = [f.evidence["metric"] for f in findings if f.code == "metric-not-logged"]
        assert told == ([said] if said else [])


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
        assert len(codes(found)) == 1  # more seeds of it would show nothing
        assert {found.answer, *(m.answer for m in found.metrics)} == {"undecided (one seed)"}
    assert text_of(found).startswith("both sides are ")
