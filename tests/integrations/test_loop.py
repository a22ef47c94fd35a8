"""A loop of one's own: said and sent what happens, and trained the same bit for bit."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from audited_trainings import model as half_network
from support import Container
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.integrations.loop import Reporter, record_loop
from mpdiag.integrations.series import Destination
from mpdiag.recording.run_folder import Progress

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some blocks of a model, by their numbers in the whole of it."""

    def __init__(self, *blocks, head=False):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in blocks})
        self.head = nn.Linear(8, 1) if head else nn.Identity()

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return self.head(x)


def train(compiled, folder=None):
    """A pipeline of two stages whose blocks are compiled one by one; returns the weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    stages = [Stage(0, 1), Stage(2, 3, head=True)]
    for stage in stages:
        for block in stage.layers.values():
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
    adamw = lambda parameters, _: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    optimizers, recording = Container(nn.ModuleList(stages), adamw), nullcontext()
    if folder is not None:
        series = folder.parent / "series.jsonl"
        recording = record_loop(stages, optimizers, folder, every=1, report_to=series)
    with recording as recorder:
        for _ in range(6):
            x = torch.randn(12, 8)
            (stages[1](stages[0](x)) - x[:, :1]).square().mean().backward()
            optimizers.step()
            optimizers.zero_grad()
    assert recorder is None or not recorder.failures
    return [p.detach() for stage in stages for p in stage.parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, as it compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_stages_of_a_pipeline_train_the_same_and_keep_their_names(tmp_path, capsys, compiled):
    plain, recorded = train(compiled), train(compiled, tmp_path / "run")
    assert all(map(torch.equal, plain, recorded))
    run = mpdiag.open_run(tmp_path / "run")
    assert [o["steps_taken"] for o in run.meta["optimizers"]] == [6, 6]
    frame = run.frame()
    updated = set(frame[frame["kind"] == "update"]["name"])
    assert {f"layers.{i}.up.weight" for i in range(4)} | {"head.weight"} <= updated
    called = set(frame[frame["kind"] == "activation_grad"]["name"])
    assert "layers.2.up" in called
    assert capsys.readouterr().err == "mpdiag: FP32 weights and AdamW states\n"
    lines = (tmp_path / "series.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 5


def test_models_with_equal_names_are_numbered(tmp_path):
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with record_loop(models, None, tmp_path / "run", every=1, report_to=[]):
        sum(m(torch.ones(1, 2)).sum() for m in models).backward()
    assert {"0.weight", "1.weight"} <= set(mpdiag.open_run(tmp_path / "run").frame()["name"])


def halves(folder=None, steps=120, **options):
    """A training whose weights and states are in BF16; returns the weights."""
    net = half_network(BF16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    with record_loop(net, optimizer, folder, **options) if folder else nullcontext():
        for _ in range(steps):
            x = torch.randn(12, 8, generator=generator).to(BF16)
            net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(net.parameters())


def test_each_finding_is_said_once_after_the_first_line(tmp_path, capsys, monkeypatch):
    taken = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=lambda row, **_: taken.append(row)
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    recorded = halves(tmp_path / "run", every=1)
    assert all(map(torch.equal, halves(), recorded))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "mpdiag: BF16 weights and AdamW states, no FP32 masters"
    of_run = {f.message.split()[0] for f in mpdiag.audit(tmp_path / "run").findings}
    assert len(lines) == len(set(lines)) >= 2
    assert all(line.startswith("mpdiag: warning: ") and " → " in line for line in lines)
    assert {line.split()[2] for line in lines} <= of_run
    assert sum("did not move in a step" in line for line in lines) == 1
    assert [row["mpdiag/step"] for row in taken] == list(range(120))


def test_other_ranks_say_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    halves(tmp_path / "run", steps=4, every=1, report_to=tmp_path / "series.jsonl")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "series.jsonl").exists()
    assert (tmp_path / "series.rank00001.jsonl").exists()


def test_a_board_that_fails_is_left_alone_and_the_others_go_on(tmp_path):
    halves(tmp_path / "run", steps=4, every=1, report_to=[])
    table = mpdiag.open_run(tmp_path / "run").table()
    said, taken, now = [], [], [0.0]

    def broken(step, row):
        raise ConnectionError("no network")

    boards = [Destination("W&B", broken), Destination("it", lambda step, row: taken.append(step))]
    reporter = Reporter(lambda: boards, said.append, lambda: now[0])
    for _ in range(2):
        reporter.show(Progress(4, 4, [table], ()))
    assert said == ["W&B takes no more series (ConnectionError: no network); recording goes on"]
    assert taken == [0, 1, 2, 3] * 2


def test_looking_takes_a_hundredth_of_the_time():
    now = [0.0]

    def tick():
        now[0] += 1.0
        return now[0]

    reporter = Reporter(list, print, tick)
    reporter.show(Progress(0, 0, (), ()))  # a look of one second
    begin = now[0]
    while not reporter.due():
        pass
    assert now[0] - begin >= 100.0


def test_a_board_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UsageError, match="report_to cannot take 'wandb'"):
        record_loop(nn.Linear(1, 1), None, tmp_path / "run", report_to="wandb")
