"""Lightning: the callback records without a trace, the plugin trains as a loop by hand does."""

from unittest.mock import Mock

import pytest
import torch
from support import backoff, network
from torch import nn
from trained_by_hand import BATCHES, by_hand, momentum, same

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.runs.training_log import read_log

lightning = pytest.importorskip("lightning")
bridge = pytest.importorskip("mpdiag.integrations.lightning")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # Lightning's, about workers and loggers
]


class Module(lightning.LightningModule):
    def __init__(self, optimizers=1, poison=()):
        super().__init__()
        self.net = network()
        self.poison = set(poison)
        self.dtypes = []
        self.automatic_optimization = optimizers == 1
        self.net[4].register_forward_hook(lambda _, __, out: self.dtypes.append(out.dtype))

    def training_step(self, inputs, index):
        x, y = inputs
        if index in self.poison:
            x = x * float("inf")
        loss = nn.functional.cross_entropy(self.net(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, inputs, index):
        self.validated = self.net(inputs[0]).dtype

    def configure_optimizers(self):
        return momentum(self.net)


def trainer(tmp_path, epochs=1, **options):
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


def loader():
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def fit(module, tmp_path, **options):
    trainer(tmp_path, **options).fit(module, loader())


def test_recording_leaves_no_trace_in_the_numbers(tmp_path, capsys):
    plain, watched = Module(), Module()
    fit(plain, tmp_path)
    capsys.readouterr()
    series = tmp_path / "series.jsonl"
    callback = bridge.RecordCallback(tmp_path / "run", every=1, report_to=series)
    fit(watched, tmp_path, callbacks=[callback])
    assert same(plain, watched)
    assert capsys.readouterr().err.splitlines()[-1] == "mpdiag: FP32 weights and SGD states"
    assert len(series.read_text().splitlines()) == len(BATCHES)
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["state"] == "complete"
    assert run.meta["steps_recorded"] == len(BATCHES)
    names = set(run.frame()["name"])
    assert {"net.0", "net.4", "net.4.weight"} <= names
    kinds = set(run.frame()["kind"])
    assert kinds == {"activation", "activation_grad", "weight", "weight_grad", "update"}
    assert mpdiag.analyze(run).plan.target == "fp16"


def test_what_failed_is_said(tmp_path):
    module = Module()
    module.on_train_batch_end = Mock(side_effect=KeyError("data"))
    with pytest.raises(KeyError):
        fit(module, tmp_path, callbacks=[bridge.RecordCallback(tmp_path / "run")])
    assert mpdiag.open_run(tmp_path / "run").meta["state"] == "failed"


# -- training by a plan ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizers", "target", "options", "hand"),
    [
        (1, "fp16", {}, {}),
        (1, "bf16", {}, {}),
        (1, "fp16", {"gradient_clip_val": 0.1}, {"clip": 0.1}),
        (1, "fp16", {"accumulate_grad_batches": 2}, {"every": 2}),
        (2, "fp16", {}, {}),
    ],
    ids=["fp16", "bf16", "clipping", "accumulation", "manual optimization"],
)
def test_however_it_trains_it_is_as_by_hand(tmp_path, optimizers, target, options, hand):
    plan = PrecisionPlan(target=target, loss_scale=backoff().loss_scale)
    module = Module(optimizers)
    fit(module, tmp_path, plugins=bridge.PlanPrecision(plan), **options)
    assert same(module.net, by_hand(plan, **hand))
    assert same(module.net, by_hand(plan)) == (not hand)
    assert set(module.dtypes) == {torch.float16 if target == "fp16" else torch.bfloat16}


def test_a_skip_brings_buffers_back_and_is_logged(tmp_path):
    module = Module(poison=[5])
    plugin = bridge.PlanPrecision(backoff(), run=tmp_path / "run")
    fit(module, tmp_path, plugins=plugin)
    assert same(module.net, by_hand(backoff(), steps=5))
    assert plugin.last.skipped
    assert [s.step for s in read_log(tmp_path / "run").skipped] == [5]


@pytest.mark.parametrize("kept", [False, True])
def test_validation_runs_by_the_plan_while_training(tmp_path, kept):
    """FP32 modules have their recorded names."""
    plan = PrecisionPlan(fp32_modules=(Fp32Choice("", "net.4"),)) if kept else backoff()
    module = Module()
    plugin = bridge.PlanPrecision(plan)
    trainer(tmp_path, num_sanity_val_steps=0, plugins=plugin).fit(module, loader(), loader())
    assert module.validated == (torch.float32 if kept else torch.float16)
    assert set(module.dtypes) == {module.validated}
    assert module.net[4].weight.dtype == torch.float32


def test_checkpoints_keep_the_scale(tmp_path):
    class Save(lightning.pytorch.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    plugin = bridge.PlanPrecision(backoff(64.0, growth_interval=3))
    fit(Module(), tmp_path, plugins=plugin, callbacks=[Save()])
    again = bridge.PlanPrecision(backoff(64.0, growth_interval=3))
    seen = []

    class Look(lightning.pytorch.Callback):
        def on_train_batch_start(self, *_):
            seen.append(again.mp.loss_scale)

    trainer(tmp_path, 2, plugins=again, callbacks=[Look()]).fit(
        Module(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )
    assert seen[0] == 256.0  # grown twice in six steps


def test_levels_that_cast_weights_are_refused():
    with pytest.raises(UsageError, match="level='O1'"):
        bridge.PlanPrecision(PrecisionPlan(level="O2"))


def fabric_loop(plan, poison=None, clip=None, every=1, **options):
    """Fabric's own loop, and what it leaves: the model, the plugin and whether steps were skipped."""
    precision = bridge.PlanPrecision(plan, **options)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    model = network()
    model, optimizer = fabric.setup(model, momentum(model))
    skipped = []
    for i, (x, y) in enumerate(BATCHES):
        output = model(x * float("inf") if i == poison else x)
        assert output.dtype == torch.float32
        with fabric.autocast():
            loss = nn.functional.cross_entropy(output, y) / every
        fabric.backward(loss)
        if (i + 1) % every == 0:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(precision.last.skipped)
    return model, precision, skipped


@pytest.mark.parametrize(
    "options", [{}, {"clip": 0.1}, {"every": 2}], ids=["plain", "clip", "accumulate"]
)
def test_fabric_trains_as_a_loop_by_hand_does(options):
    model, precision, skipped = fabric_loop(backoff(64.0, growth_interval=2), **options)
    expected = by_hand(backoff(64.0, growth_interval=2), **options)
    assert not any(skipped)
    assert precision.mp.steps == len(skipped)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fabric_skips_what_is_not_finite_and_gives_the_model_back():
    model, precision, skipped = fabric_loop(backoff(64.0), poison=2)
    assert skipped == [i == 2 for i in range(6)]
    assert all(torch.isfinite(b).all() for b in model.buffers())
    assert precision.mp.loss_scale == 32.0
    precision.teardown()
    assert precision.mp is None
    with torch.no_grad():
        assert model.module(BATCHES[0][0]).dtype == torch.float32


def test_fabric_is_told_what_it_cannot_do():
    precision = bridge.PlanPrecision(backoff())
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    net = fabric.setup_module(network())
    net(BATCHES[0][0])
    with pytest.raises(UsageError, match="all modules"):
        fabric.setup_module(network())
