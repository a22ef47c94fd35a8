"""The series of a training: figures against arithmetic on the tensors themselves, and where they go."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support import perceptron
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.integrations import series
from mpdiag.integrations.series import figures, state_figures
from mpdiag.runs.precision import PrecisionFacts, Shadow


def train(folder, scale=1.0, dtype=torch.float32):
    """Record three steps; returns the run, and each step's figures from the tensors."""
    model = perceptron().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    seen, expected = [], []

    def note(module, _, output):
        seen.append((output.detach().clone(), None))
        output.register_hook(lambda g: seen.append((None, g.detach().clone())))

    with mpdiag.record(model, optimizer, folder, every=1):
        hooks = [m.register_forward_hook(note) for m in (model, *model.children())]
        for step in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(x).square().mean() * 2.0**-18  # gradients around FP16's smallest values
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            gradients = [p.grad.clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            expected.append(by_hand(seen, before, list(model.parameters()), gradients, scale))
            seen.clear()
        for hook in hooks:
            hook.remove()
    return mpdiag.open_run(folder), expected


def by_hand(seen, before, after, gradients, scale):
    outputs = torch.cat([o.flatten().double() for o, _ in seen if o is not None])
    arrived = torch.cat([g.flatten().float() for _, g in seen if g is not None])
    w, v, g = (
        torch.cat([t.detach().flatten().double() for t in ts]) for ts in (before, after, gradients)
    )
    still = (w == v) & (g != 0)
    return {
        "mpdiag/loss_scale": scale,
        "mpdiag/underflow": float((arrived[arrived != 0].half() == 0).double().mean()),
        "mpdiag/largest": float(torch.cat([outputs, arrived.double()]).abs().max()),
        "mpdiag/update_ratio": float((v - w).abs().mean() / w.abs().mean()),
        "mpdiag/stalled_weights": int(still.sum()) / int((g != 0).sum()),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_figures_are_those_of_the_tensors(tmp_path, scale, dtype):
    run, expected = train(tmp_path / "run", scale, dtype)
    found = dict(figures(run.records))
    assert list(found) == [0, 1, 2]
    for step, row in found.items():
        ratio = row.pop("mpdiag/update_ratio")
        # Sums are those of quarters of powers of two.
        assert ratio == pytest.approx(expected[step].pop("mpdiag/update_ratio"), rel=0.13)
        assert row == pytest.approx(expected[step], rel=1e-12), step
    assert any(row["mpdiag/underflow"] > 0 for row in found.values())
    assert found[0]["mpdiag/stalled_weights"] > (0.5 if dtype == torch.bfloat16 else -1)


def test_states_beside_fp32_are_figures_too():
    shadow = Shadow("AdamW", "exp_avg_sq", 1, 8, 100, 0.9, 1.2, 1.5)
    facts = PrecisionFacts(100, (), shadows=(shadow,))
    assert state_figures(facts) == {"mpdiag/stalled_states/exp_avg_sq": 1.2}


ROWS = [(0, {"mpdiag/underflow": 0.25}), (3, {"mpdiag/underflow": 0.5})]


class History:
    """W&B's rows as its server makes them: one open, and each step at most once."""

    def __init__(self):
        self.rows, self.open, self.step, self.axes = [], {}, 0, {}

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, row, step=None, commit=None):
        if step is not None:
            if step < self.step:
                raise AssertionError(f"W&B drops the loop's own step {step}")
            if step > self.step:
                self.flush(step)
        self.open |= row
        if step is None if commit is None else commit:
            self.flush(self.step + 1)

    def flush(self, step):
        if self.open:
            self.rows.append(self.open)
        self.open, self.step = {}, step


@pytest.fixture
def wandb(monkeypatch):
    run = History()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    return run


@pytest.mark.parametrize("counts", [True, False])
def test_an_active_run_of_wandb_keeps_all_that_its_loop_logs(wandb, counts):
    """A loop may count its rows itself; a step is sent when the next one begins."""
    (board,) = series.active()
    for step in range(4):
        wandb.log({"loss": 1.0}, step=step if counts else None)
        board.send(step, {"mpdiag/underflow": step / 4})
    wandb.flush(4)
    assert wandb.axes == {"mpdiag/*": "mpdiag/step"}
    sent = [row for row in wandb.rows if "mpdiag/step" in row]
    assert [(row["mpdiag/step"], row["mpdiag/underflow"]) for row in sent] == [
        (step, step / 4) for step in range(4)
    ]
    assert sum("loss" in row for row in wandb.rows) == 4


def test_an_active_run_of_mlflow_is_asked_not_to_wait(monkeypatch):
    calls = []
    module = SimpleNamespace(
        active_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="abc")),
        log_metrics=lambda row, **options: calls.append((row, options)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    (board,) = series.active()
    for step, row in ROWS:
        board.send(step, row)
    options = {"run_id": "abc", "synchronous": False}
    assert calls == [(row, {"step": step, **options}) for step, row in ROWS]


@pytest.mark.parametrize("closed", [False, True])
def test_open_writers_of_tensorboard_are_found_and_closed_ones_are_written_to_the_end(
    tmp_path, closed
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    (board,) = series.active()
    board.send(*ROWS[0])
    if closed:  # as Transformers does before a callback's last word
        writer.close()
        assert series.active() == []
    board.send(*ROWS[1])
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    # Files of one second are read in the order of their names, which need not be that of writing.
    sent = sorted(read.Scalars("mpdiag/underflow"), key=lambda event: event.wall_time)
    assert [(e.step, e.value) for e in sent] == [(0, 0.25), (3, 0.5)]


def test_lines_of_json(tmp_path):
    board = series.destination(str(tmp_path / "s.jsonl"))
    board.send(*ROWS[0])
    board.send(1, {"mpdiag/largest": float("inf")})
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "mpdiag/underflow": 0.25}
    assert json.loads(lines[1]) == {"step": 1, "mpdiag/largest": None}


@pytest.mark.parametrize("target", ["wandb", 3, nn.Linear(1, 1)])
def test_what_cannot_take_series_is_refused(target):
    with pytest.raises(UsageError, match="report_to cannot take"):
        series.destination(target)
