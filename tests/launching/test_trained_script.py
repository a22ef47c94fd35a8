"""``mpdiag train`` on what scripts do between a forward pass and a step, and what it refuses."""

import json
import shlex
import textwrap
from dataclasses import replace
from functools import partial

import pytest
from script_processes import TRAIN, scripts
from support import backoff, constant, planned

from mpdiag.numerics.block_recipes import EMULATED
from mpdiag.numerics.loss_scalers import LogNormal
from mpdiag.plan import Fp32Choice, LossScalePlan, PrecisionPlan
from mpdiag.runs.training_log import read_log
from mpdiag.tracing.conditions import OptimizerSettings, TrainingConditions
from mpdiag.tracing.fingerprint import fingerprint

SCRIPTS = scripts(__file__)


@pytest.fixture
def train(fork_server, tmp_path):
    def call(body, plan: PrecisionPlan | None = None, *options):
        (tmp_path / "script.py").write_text(SCRIPTS["head"] + textwrap.dedent(body))
        (plan or constant(256.0)).save(tmp_path / "plan.json")
        words = ("train", "--plan", "plan.json", "--out", "run", *options, "--", "script.py")
        return fork_server("mpdiag", *words, cwd=tmp_path)

    return call


def test_steps_skipped_in_a_row_name_the_operation_at_fault_and_what_to_do(train):
    done = train(SCRIPTS["overflows in every step"])
    assert done.code == 1
    assert "Inf first in mul, the model at script.py:" in done.err
    assert "(return self.inner(x) * 1e6)" in done.err
    assert "mpdiag record" in done.err.splitlines()[-1]
    assert "in a row were skipped" in done.err
    assert "Warning" not in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("scale", [2.0**18, 1000.0])
def test_every_kind_of_hook_sees_and_changes_true_gradients(train, fork_server, tmp_path, scale):
    """As in FP32: each figure that the hooks have seen, and the loss where they clipped."""
    trained = train(SCRIPTS["hooks"], constant(scale))
    assert trained.code == 0, trained.err
    plain = fork_server("python", tmp_path / "script.py", cwd=tmp_path)
    assert plain.code == 0, plain.err

    def figures(done):
        return [line.rsplit(":", 1) for line in done.out.splitlines()]

    assert len({kind for kind, _ in figures(plain)}) == 19
    for (kind, seen), (other, true) in zip(figures(trained), figures(plain), strict=True):
        assert kind == other
        assert float(seen) == pytest.approx(float(true), rel=0.02, abs=1e-7), kind


def test_a_hook_that_clips_does_not_hide_an_overflow(train, tmp_path):
    done = train(SCRIPTS["hooks that hide an overflow"], constant(2.0**30))
    assert done.out.split() == ["1"] * 3, done.err
    assert all(step.skipped for step in read_log(tmp_path / "run").steps)


PRINTS = {
    "outputs of all structures": "torch.float16\n" * 4,
    "a gradient penalty and checkpointing": "end\n",
    # As where a loop catches an out-of-memory error and goes on with the next batch.
    "a backward pass fails": "caught\n",
}


@pytest.mark.parametrize("name", PRINTS)
def test_a_script_that_checks_itself_comes_to_its_end(train, name):
    done = train(SCRIPTS[name])
    assert done.code == 0, done.err
    assert done.out == PRINTS[name]


BACKWARD = "optimizer.zero_grad(); F.mse_loss(model(x), y).backward()"
CLIP = "nn.utils.clip_grad_value_(model.parameters(), 1.0)"
CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
"""


@pytest.mark.parametrize(
    ("begin", "step"),
    [
        ("", f"{BACKWARD}; optimizer.step()"),
        ("", f"{BACKWARD}; {CLIP}; optimizer.step()"),
        (CLOSURE, "assert optimizer.step(closure) is not None"),
    ],
)
def test_an_overflow_is_skipped_even_if_clipping_hides_it(train, tmp_path, begin, step):
    """The steps that the log calls skipped are those in which the script saw no change."""
    body = f"""{begin}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for step in range(6):
    before = [p.detach().clone() for p in model.parameters()]
    {step}
    scheduler.step()
    print(int(all(torch.equal(p, q) for p, q in zip(before, model.parameters()))))
"""
    done = train(body, backoff(2.0**20))
    assert done.code == 0, done.err  # warnings are errors in these scripts
    steps = read_log(tmp_path / "run").steps
    assert [str(int(s.skipped)) for s in steps] == done.out.split()
    assert steps[0].skipped
    assert not steps[-1].skipped
    assert steps[0].reason.startswith(("Inf", "NaN"))
    assert "skipped, loss scale" in done.err


def test_a_script_that_drops_bad_gradients_itself_lowers_the_scale(train):
    done = train(SCRIPTS["bad gradients are dropped"], backoff(2.0**18))
    assert done.code == 0, done.err
    assert "stepped" in done.out


LOOP = SCRIPTS["loop"]
REFUSED = {
    "scripted": "is a ScriptModule",
    "half": "bfloat16 already",
    "double": "float64",
    "functional": "do not come from backward",
    "in backward": "inside the backward pass",
    "in place": "changes a gradient in place",
    "twice": "another MixedPrecision",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_safely_is_refused(train, name):
    indented = textwrap.indent(SCRIPTS[f"refused: {name}"], "    ")
    guard = "except Exception:\n    print('went on')\nfinally:\n    print('left')\n"
    done = train(f"\ntry:\n    pass\n{indented}\n{guard}")
    assert done.code == 3, done.err
    assert REFUSED[name] in done.err
    *before, last = done.err.splitlines()
    assert last.startswith("error: this script cannot be trained by a plan: ")
    assert all("is emulated here" in line for line in before)  # said where the training began
    assert done.out == "left\n"


def test_a_plan_of_another_model_is_refused(train):
    choice = Fp32Choice(op="Linear", module="encoder.7", reason="", evidence={"overflow": 1})
    plan = PrecisionPlan(fp32_modules=(choice,))
    done = train(LOOP, plan)
    assert done.code == 3
    assert "'encoder.7'" in done.err


def test_a_script_that_trains_nothing(train):
    done = train("print('hello')")
    assert done.code == 3
    assert "nothing was trained" in done.err
    done = train("sys.exit(4)")
    assert done.code == 4


def test_level_o2_is_trained_at_o1(train):
    plan = PrecisionPlan(level="O2")
    done = train(LOOP, plan)
    assert done.code == 0
    assert "O1" in done.err


def test_a_script_may_save_and_copy_its_whole_model(train):
    body = SCRIPTS["the whole model is saved"]
    done = train(body, PrecisionPlan(fp32_modules=(Fp32Choice("", "inner.1"),)))
    assert done.code == 0, done.err
    assert done.out == "saved False\n"
    assert "4 steps in fp16" in done.err


OWN = [("0.weight", (8, 4)), ("0.bias", (8,)), ("2.weight", (1, 8)), ("2.bias", (1,))]
CNN = [("stem.weight", (8, 3, 3, 3)), ("norm.weight", (8,)), ("head.weight", (10, 8))]
OTHER = "error: this script cannot be trained by a plan: the plan is for another model"


@pytest.mark.parametrize(
    ("model", "code", "sentence"),
    [
        (OWN, 0, None),
        (CNN, 3, OTHER),
        (OWN[:2], 0, "the plan was made without these layers of the model"),
        (
            [*OWN[:2], ("2.weight", (1, 16)), OWN[3]],
            0,
            "other sizes than in the plan's recording (2): the loss scale",
        ),
    ],
)
def test_whose_plan_it_is(fork_server, tmp_path, model, code, sentence):
    (tmp_path / "train.py").write_text(TRAIN)
    replace(constant(8.0), model=fingerprint(model)).save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "run", "--", "train.py")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert done.code == code, done.err
    assert (sentence or "") in done.err
    assert ("model" in done.err) == (sentence is not None)


RECORDED = TrainingConditions((OptimizerSettings("SGD", 0.1, {"weight_decay": 0.0}),), (32, 8))
DECAYING = SCRIPTS["decaying"]


@pytest.mark.parametrize(
    ("rate", "batch", "evaluates", "said"),
    [(0.1, 32, True, []), (0.2, 32, False, ["the learning rate is 0.2, but was 0.1"]),
     (0.1, 16, True, ["the model's input is 16×8, but was 32×8"])],
)  # fmt: skip
def test_what_has_changed_since_the_recording_is_said_once(train, rate, batch, evaluates, said):
    plan = replace(constant(8.0), conditions=RECORDED)
    done = train(DECAYING.format(rate=rate, batch=batch, evaluates=evaluates), plan)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if "in the plan's recording" in line]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert line.startswith(f"mpdiag: {words} in the plan's recording: the loss scale")
        assert line.endswith("may no longer fit")


@pytest.mark.parametrize("recorded", [["script.py", "--epochs", "3"], ["script.py"]])
def test_emulation_and_other_arguments_are_said_before_the_training(train, tmp_path, recorded):
    plan = replace(constant(8.0), run="fp32")
    (tmp_path / "fp32").mkdir()
    meta = {"schema_version": 2, "script": "script.py", "argv": recorded, "world_size": 1}
    (tmp_path / "fp32" / "meta.json").write_text(json.dumps(meta))
    done = train(DECAYING.format(rate=0.1, batch=32, evaluates=False), plan)
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith("mpdiag: ")]
    other = (
        "mpdiag: the plan's recording ran script.py --epochs 3, and this training runs script.py"
    )
    assert said[:-1] == [other] * (len(recorded) > 1)
    assert said[-1].startswith("mpdiag: FP16 is emulated here, in FP32: a step takes")


def test_a_plan_with_block_formats_trains_emulated_and_says_how_much_slower(train, tmp_path):
    plan = planned("mxfp8", *((name, "weight", "linear") for name in ("0", "gone")))
    done = train(DECAYING.format(rate=0.1, batch=32, evaluates=False), plan)
    assert done.code == 0, done.err
    assert f"mpdiag: MXFP8 {EMULATED}" in done.err.splitlines()
    assert "4 steps in mxfp8 and bf16 (emulated), 0 skipped" in done.err
    about = json.loads((tmp_path / "run" / "meta.json").read_text())["training"]
    assert (about["dtype"], about["backend"]) == ("mxfp8", "emulated")


def test_lognormal_learns_under_closures(train, tmp_path):
    plan = LossScalePlan(method="lognormal", init_scale=8.0)
    done = train(SCRIPTS["lognormal under closures"], PrecisionPlan(loss_scale=plan))
    assert done.code == 0, done.err
    scaler = LogNormal(init_scale=8.0, min_scale=plan.min_scale, max_scale=plan.max_scale)
    steps = read_log(tmp_path / "run").steps
    assert len(steps) == 3
    for step, largest in zip(steps, map(float, done.out.split()), strict=True):
        assert step.scale == scaler.scale
        scaler = scaler.adjust(largest)
    assert scaler.samples == 3


def test_an_optimizer_that_moves_nothing_is_said_once_and_one_that_adds_up_itself_is_not(train):
    done = train(SCRIPTS["an optimizer that moves nothing, and one that adds up"])
    assert done.code == 0, done.err
    assert done.err.count("[optimizer-moved-nothing]") == 1
    assert "Still has moved no weight in 4 steps" in done.err


SEEN_IN_TRAINING = {"in place", "twice"}
"""No FP32 recording shows that a training by a plan would refuse these."""


@pytest.mark.parametrize("options", [(), ("--fp32",)])
@pytest.mark.parametrize("name", [*sorted(REFUSED.keys() - SEEN_IN_TRAINING), "none"])
def test_the_next_command_of_a_recording_is_never_one_that_refuses(
    fork_server, tmp_path, name, options
):
    body = SCRIPTS[f"refused: {name}"] if name in REFUSED else LOOP
    (tmp_path / "script.py").write_text(SCRIPTS["head"] + body.replace("range(4)", "range(24)"))
    call = partial(fork_server, "mpdiag", cwd=tmp_path)
    call("record", "--out", "run", *options, "--", "script.py")
    analyzed = call("analyze", "run", "-o", "plan.json")
    following = [line for line in analyzed.err.splitlines() if line.startswith("next: mpdiag ")]
    for line in following:
        words = shlex.split(line)[2:]
        done = call(*words)
        assert done.code == 0, (words, done.err)
    assert name != "none" or words[0] == "train"
