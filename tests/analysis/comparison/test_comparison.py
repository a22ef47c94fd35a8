"""What a comparison says: divergence, several metrics, margins, models."""

import math
import random
import statistics
from pathlib import Path

import pytest
from calls import printed
from goldens import assert_as_kept
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


CONVOLUTIONS = ModelFingerprint({f"conv{i}.weight": (8, 3, 3, 3) for i in range(4)})
EDITED = ModelFingerprint({**CONVOLUTIONS.parameters, "head.weight": (10, 8)})
ATTENTION = ModelFingerprint({f"block{i}.qkv.weight": (96, 32) for i in range(4)})


def known(fingerprint=None, kind="", parameters=0):
    return KnownModel(fingerprint, kind, parameters)


NAN, SMALL = math.nan, 0.006
GOOD = [0.9, 0.9001, 0.9002, 0.9003]
MOST = accuracies(*GOOD, *GOOD), accuracies(*GOOD, *GOOD[:3], NAN)
NEAR, FAR, WIDE = ([0.9, 0.9001, 0.8999], [0.8, 0.8001, 0.7999], [0.9, 0.8, 0.7])
HIGH = [0.990, 0.9901, 0.9899, 0.9902]
LESS = [value - 0.015 for value in HIGH]
REWARDS = {by: [{"reward": 200.0 + by + i / 10} for i in range(5)] for by in (0.0, 0.1, -180.0)}
LOSSES = [{"accuracy": 0.9, "final loss": 0.01}], [{"accuracy": 0.9, "final loss": 0.02}]
THREE = accuracies(0.9, 0.91, 0.9)
SIDES = {
    "b diverges more often": MOST,
    "a diverges more often": MOST[::-1],
    "all seeds of b diverge": (THREE, accuracies(NAN, NAN, NAN)),
    "one of three diverges": (THREE, accuracies(0.9, 0.9, NAN)),
    "0.990 and 0.975": (accuracies(*HIGH), accuracies(*LESS)),
    "0.990 and 0.975, which hardly matters": (
        *(accuracies(*HIGH), accuracies(*LESS)),
        {"margin": {"accuracy": 0.02}},
    ),
    "a metric of no known kind": (REWARDS[0.0], REWARDS[0.1]),
    "how much of it matters": (REWARDS[0.0], REWARDS[0.1], {"margin": {"reward": 2.0}}),
    "far less of it": (REWARDS[0.0], REWARDS[-180.0]),
    **{
        f"one seed, {value} beside 0.845": (
            *(accuracies(0.845), accuracies(value)),
            {"margin": SMALL},
        )
        for value in (0.845, 0.840, 0.834, 0.825, 0.175, 0.975, NAN)
    },
    "the final loss beside an accuracy": LOSSES,
    "the final loss alone": (*LOSSES, {"metric": "final loss"}),
    "seeds that agree": (accuracies(*NEAR), accuracies(*NEAR)),
    "seeds that differ": (accuracies(*NEAR), accuracies(*FAR)),
    "seeds far apart": (accuracies(*NEAR), accuracies(*WIDE)),
}
"""Both sides, each a dict of metrics for each seed, and the options of the comparison."""


def told(found):
    """All that a comparison says."""
    lines = [printed(comparison_text(found), width=100).rstrip(), repr(found)]
    lines += [f"{f.severity} {f.code}: {f.message} → {f.fix}" for f in found.findings]
    for m in found.metrics:
        margin = f"{m.margin.kind} {m.margin.width:.4g}"
        lines.append(f"{m.metric}: {m.result.verdict}, {m.answer}; {margin}; {m.result.alpha:.4g}")
    document = found.to_json()
    kept = ("answer", "verdict", "different_models", "undecided")
    kinds = [m["margin_kind"] for m in document["metrics"]]
    return [*lines, f"{ {k: document[k] for k in kept if k in document} | {'margins': kinds} }"]


def codes(comparison):
    return [f.code for f in comparison.findings]


def test_what_is_said_of_two_sides():
    found = {
        name: compare_groups(group("a", a), group("b", b), **dict(*options))
        for name, (a, b, *options) in SIDES.items()
    }
    late = group("b", accuracies(0.9, 0.91, 0.1), diverged=1)  # the largest of NaNs is the first
    found["diverged, although its accuracy is a number"] = compare_groups(group("a", THREE), late)
    net = group("a", accuracies(0.9, 0.9), model=known(CONVOLUTIONS, "Net", 100))
    other = accuracies(0.9, 0.9001, NAN)
    for name, a, b in (
        ("a model", net, net),
        ("an edited model", net, group("b", accuracies(0.9, 0.9), model=known(EDITED))),
        (
            "another model",
            *(group(n, other, model=known(m)) for n, m in (("a", CONVOLUTIONS), ("b", ATTENTION))),
        ),
    ):
        found[name] = compare_groups(a, b)
    texts = ["\n".join([f"# {name}", *told(one)]) for name, one in found.items()]
    assert_as_kept(Path(__file__).with_name("sides.txt"), "\n\n".join(texts))
    divergence = found["one of three diverges"].to_json()["divergence"]
    assert (divergence["verdict"], divergence["seeds_to_decide"]) == ("inconclusive", 19)
    figures = divergence["b"]["rate"], divergence["b"]["low"], divergence["a"]["high"]
    bounds = (pytest.approx(bound, abs=1e-4) for bound in (0.0084, 0.7076))
    assert figures == (pytest.approx(1 / 3), *bounds)
    with pytest.raises(UsageError, match="two different models"):
        reward = group("c", [{"reward": 1.0}], model=known(ATTENTION))
        compare_groups(group("a", other, model=known(CONVOLUTIONS)), reward)


def test_what_is_said_of_runs_of_unequal_length_and_of_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("a"), losses=[3.0, 2.0, 1.0], metric=0.9)
    make_run(Path("short"), losses=[3.0])
    make_run(Path("diverged early"), losses=[3.0, NAN])
    Path("link").symlink_to("a")
    found = {b: mpdiag.compare("a", b) for b in ("short", "diverged early", "a", "link")}
    texts = ["\n".join([f"# {name}", *told(one)]) for name, one in found.items()]
    assert_as_kept(Path(__file__).with_name("runs.txt"), "\n\n".join(texts))


def test_a_baseline_knows_its_model(tmp_path):
    net = group("a", accuracies(0.9, 0.9), model=known(CONVOLUTIONS, "Net", 100))
    save_baseline(net, tmp_path / "baseline.json")
    assert read_group(tmp_path / "baseline.json").model == net.model


@pytest.mark.parametrize(
    ("taken", "seen", "differ"),
    [((3, 3), 6, False), ((2, 3), 6, False), ((6,), 6, True), ((6, 6), 6, True), ((), 6, True)],
)
def test_a_round_is_one_step_beside_an_early_recording(tmp_path, taken, seen, differ):
    make_run(tmp_path / "a", losses=[3.0, 2.0, 1.0])
    about = {"optimizers": [{"type": "Adam", "steps_taken": n} for n in taken], "training": {}}
    make_run(tmp_path / "b", losses=[2.0] * 6, steps_seen=seen, **about)
    save_baseline(read_group(tmp_path / "b"), tmp_path / "stored.json")
    for b in ("b", "stored.json"):
        found = mpdiag.compare(tmp_path / "a", tmp_path / b)
        assert ("lengths-differ" in codes(found)) == differ


@pytest.mark.parametrize(("trained", "differ"), [(6, False), (3, True)])
@pytest.mark.parametrize("recorded", [False, True], ids=["trained", "trained and recorded"])
def test_optimizers_that_take_turns_log_a_loss_each_on_both_sides(
    tmp_path, trained, differ, recorded
):
    optimizers = [{"type": "Adam", "steps_taken": 3}] * 2
    make_run(tmp_path / "a", losses=[2.0] * 6, steps_seen=6, optimizers=optimizers)
    halves = [{"type": "Adam", "steps_taken": trained // 2}] * 2
    about = {"steps_seen": trained, "optimizers": halves} if recorded else {}
    make_run(tmp_path / "b", losses=[2.0] * trained, training={"level": "O1"}, **about)
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    assert ("lengths-differ" in codes(found)) == differ
    assert found.answer == ("undecided (one seed)" if differ else "as FP32 (one seed)")


@pytest.mark.parametrize(
    ("shares", "answer"),
    [
        ({180: 1.0, 140: -0.3}, "undecided (one seed)"),  # the curves cross, as a GAN's do
        ({180: 1.0, 140: -0.2}, "worse (one seed)"),
        ({180: 1.0, 40: -0.9}, "worse (one seed)"),  # long ago
        ({180: 1.0}, "worse (one seed)"),
        (
            {180: 1e4, 100: -0.1},
            "worse (one seed)",
        ),  # a tenth of a loss that then was 60 times larger
        ({180: -0.5, 140: 0.3}, "better (one seed)"),
    ],
)
def test_a_worse_final_loss_decides_nothing_where_the_curves_cross(tmp_path, shares, answer):
    reference = [0.95**step for step in range(200)]
    losses = list(reference)
    for first, share in shares.items():
        losses[first : first + 20] = [(1 + share) * loss for loss in losses[first : first + 20]]
    make_run(tmp_path / "a", losses=reference)
    make_run(tmp_path / "b", losses=losses)
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    assert found.answer == answer
    crossing = "but the loss curves cross in the later half of the training (one seed)"
    said = any(crossing in f.message for f in found.findings)
    assert said == (answer == "undecided (one seed)")


@pytest.mark.parametrize(
    ("first", "ends", "answer"),
    [
        (2.3, (1e-7, 2e-7), "as FP32 (one seed)"),  # both fell by all of 2.3
        (2.3, (2e-7, 1e-7), "as FP32 (one seed)"),
        (1e-6, (1e-7, 2e-7), "worse (one seed)"),  # here it is a tenth of the way
        (2.3, (0.1, 0.2), "worse (one seed)"),
    ],
)
def test_a_loss_near_0_is_judged_by_how_far_it_fell(tmp_path, first, ends, answer):
    for side, last in zip("ab", ends, strict=True):
        make_run(tmp_path / side, losses=[first, *[last] * 99])
    assert mpdiag.compare(tmp_path / "a", tmp_path / "b").answer == answer


def test_which_trainings_count_as_diverged(tmp_path):
    made = [
        ({"losses": [2.0, 1.0], "metric": 0.9}, False),
        ({"losses": [2.0, math.nan], "metric": 0.1}, True),
        ({"losses": [2.0, None], "state": "failed"}, True),  # ended on skipped steps
        ({"losses": [2.0, 1.0], "state": "failed"}, False),  # a crash of another kind
        ({"losses": [2.0, 1.0], "notes": [{"stopped": "8 steps were skipped"}]}, True),
        ({"losses": [2.0, None, 1.0], "metric": 0.9}, False),
        ({"losses": [], "metric": 0.9}, False),
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
        ("print({'loss': loss, 'eval_accuracy': right / n, 'epoch': 0.5})", "eval_accuracy"),
        ("print(json.dumps({'step': step, 'acc': acc}))", "acc"),
        ("print('done:', dict(loss=loss, f1=f1))", "f1"),
        ("print({'loss': 0.12, 'grad_norm': 1.3, 'epoch': 0.5, **more})", ""),
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


@pytest.mark.parametrize("file", ["net/fit.py", "net/fit/__main__.py"])
def test_a_metric_that_a_module_prints_is_named(tmp_path, monkeypatch, file):
    """Of ``python -m net.fit``, started in this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text('print("acc", right)')
    made_by = {"script": "-m net.fit", "argv": [file], "world_size": 1}
    for name in "ab":
        make_run(tmp_path / name, seed=0, **made_by)
    findings = mpdiag.compare(tmp_path / "a", tmp_path / "b").findings
    assert [f.evidence["metric"] for f in findings if f.code == "metric-not-logged"] == ["acc"]


def test_without_names_class_and_size_must_both_differ():
    """A wrapper changes the class, an edit the size."""
    net = known(kind="Net", parameters=100)
    assert relate_models(net, known(kind="DistributedDataParallel", parameters=100)) is None
    assert relate_models(net, known(kind="Net", parameters=120)) is None
    assert relate_models(net, known()) is None
    found = relate_models(net, known(ATTENTION, "Vit", 500))
    assert found.different
    assert found.words == "Net with 100 parameters and Vit with 500 parameters"
