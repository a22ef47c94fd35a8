"""Recordings of compiled trainings: what passes inside, unchanged, from one graph."""

import copy
import io
import shutil
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.recording.compiled import Point

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:The .grad attribute of a Tensor",
    ),
]
WIDTH = 8
COMPILER = shutil.which("g++") or shutil.which("c++")


class Layer(nn.Module):
    """A layer written as in ResNets, with an activation in place; it returns more than a tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, *, scale=1.0):
        return {
            "out": self.down(self.act(self.up(self.norm(x)))) * scale,
            "aux": [x.argmax(-1), None],
        }


class Net(nn.Module):
    """Layers of one class, of which the last is used twice."""

    def __init__(self, layers=2, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.first(x)
        for layer in [*self.layers, self.layers[-1]]:
            if self.checkpointed:
                out = checkpoint(layer, x, scale=0.5, use_reentrant=False)
            else:
                out = layer(x, scale=0.5)
            x = x + self.drop(out["out"])
        return self.head(x)


class Halves(nn.Linear):
    """Two outputs of one operation: autograd hands None to the hook of one that is not used."""

    def forward(self, x):
        return super().forward(x).chunk(2, -1)


class Attention(nn.Module):
    """A module whose last part is never called as one: its weight is read."""

    def __init__(self):
        super().__init__()
        self.part, self.halves = nn.MultiheadAttention(WIDTH, 2), Halves(WIDTH, WIDTH)

    def forward(self, x):
        used, _ = self.halves(self.part(x, x, x)[0])
        return used


class Branched(nn.Module):
    """A module in a branch of the graph, which may hold no operators of ours."""

    def __init__(self):
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.yes, self.no, (self.first(x),))


class Mapped(Branched):
    """A module under a transformation of functions."""

    def forward(self, x):
        return self.yes(torch.vmap(self.no)(self.first(x)))


class Trained:
    """A training of three steps, and what it left; eager without a backend, recorded into a folder."""

    def __init__(self, make, compile_, backend, folder=None, loss=None, fullgraph=True, **options):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        called = compile_(model, backend=backend, fullgraph=fullgraph) if backend else model
        recording = nullcontext()
        if folder is not None:
            options = {"every": 1, "operations": 0} | options
            recording = mpdiag.record(model, optimizer, folder, **options)
        self.losses = []
        with recording:
            for step in range(3):
                x = torch.randn(4 + step * ("sizes" in make.__name__), WIDTH)
                value = loss(called, x) if loss else called(x).square().mean()
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(value.item())
                with torch.no_grad():
                    called(x)
        self.weights = [p.detach().clone() for p in model.parameters()]
        stats = torch._dynamo.utils.counters
        self.graphs = stats["stats"]["unique_graphs"], sum(stats["graph_break"].values())
        self.run = None if folder is None else mpdiag.open_run(folder)

    def rows(self):
        """Each row of the recording by what it is about."""
        frame = self.run.frame()
        return {
            (row["step"], row["micro"], row["kind"], row["name"]): str(row)
            for row in frame.to_dict("records")
        }

    def shapes(self):
        """Input and output shapes of each module."""
        rows = [row for row in self.run.modules() if row["what"] == "module"]
        return {row["name"]: (row["input_shapes"], row["output_shapes"]) for row in rows}


def whole(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def layer_by_layer(model, **options):
    for layer in model.layers:
        layer.compile(**options)
    return model


def function(model, **options):
    return torch.compile(lambda x: model(x), **options)


def checkpointed():
    return Net(checkpointed=True)


def small():
    return Net(layers=1, checkpointed=True)


def sizes():
    return Net()


def twice(called, x):
    """A loss of two calls, whose graphs both live until the backward pass."""
    return (called(x) - called(-x)).square().mean()


def check_same(plain, recorded):
    assert plain.losses == recorded.losses
    assert all(map(torch.equal, plain.weights, recorded.weights))
    assert plain.graphs == recorded.graphs
    assert recorded.run.meta["failures"] == []


@pytest.mark.parametrize(
    ("backend", "make", "compile_", "loss"),
    [
        ("eager", Net, whole, twice),
        ("eager", checkpointed, in_place, None),
        ("eager", Attention, whole, None),
        ("aot_eager", Net, whole, twice),
        ("aot_eager", Net, in_place, None),
        ("aot_eager", Net, layer_by_layer, twice),
        ("aot_eager", checkpointed, function, None),
        ("aot_eager", sizes, whole, None),
    ],
)
def test_a_compiled_recording_is_the_eager_one_bit_for_bit(tmp_path, make, compile_, loss, backend):
    """One graph, no break, nothing compiled again; all rows as without the compiler, if all bits are."""
    plain = Trained(make, compile_, backend, loss=loss)
    recorded = Trained(make, compile_, backend, tmp_path / "run", loss)
    eager = Trained(make, compile_, None, tmp_path / "eager", loss)
    check_same(plain, recorded)
    assert eager.run.meta["failures"] == []
    assert recorded.rows().keys() == eager.rows().keys()
    assert recorded.shapes() == eager.shapes()
    if loss is None or backend == "eager":  # two passes in a step are summed in another order
        assert all(map(torch.equal, eager.weights, recorded.weights))
        assert recorded.rows() == eager.rows()
    seen = recorded.run.meta["coverage"]["compiled"]
    assert 0 < seen["gradients"] <= seen["gradients_due"]
    assert eager.run.meta["coverage"]["compiled"]["modules"] == 0


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for inductor")
def test_inductor_computes_the_same_with_a_recorder(tmp_path):
    plain = Trained(small, layer_by_layer, "inductor")
    recorded = Trained(small, layer_by_layer, "inductor", tmp_path / "run")
    check_same(plain, recorded)
    eager = Trained(small, layer_by_layer, None, tmp_path / "eager")
    assert recorded.rows().keys() == eager.rows().keys()
    bits = "whether inductor computes the same bits without a recorder (--probe compares losses)"
    for trained, says in ((recorded, True), (eager, False)):
        assert (bits in mpdiag.analyze(trained.run).verdict.not_examined) == says


@pytest.mark.parametrize("make", [Branched, Mapped])
def test_where_no_operator_may_stand_none_does(tmp_path, make):
    """An effectful operator in a branch would be torch's error, and would end the training."""
    plain = Trained(make, whole, "aot_eager")
    recorded = Trained(make, whole, "aot_eager", tmp_path / "run")
    check_same(plain, recorded)
    missing = {row["name"]: row["reason"] for row in recorded.run.modules() if row["reason"]}
    assert missing["no"].startswith("no call was seen")
    compiled = recorded.run.meta["coverage"]["compiled"]
    hidden = {"Branched": ("yes", "no"), "Mapped": ("no",)}[make.__name__]
    assert compiled["parameters_hidden"] == len(hidden) * (WIDTH + 1) * WIDTH
    share = f"{100 * len(hidden) / 3:.2f} %"
    said = f"({share} of the parameters, {share} of the forward FLOPs)"
    said = f"modules that compiled graphs may hide {said}"
    assert said in mpdiag.analyze(recorded.run).verdict.not_examined
    assert not any(row["name"] == "first" and row["reason"] for row in recorded.run.modules())


def test_cadence_compiles_nothing_again(tmp_path):
    plain = Trained(Net, whole, "aot_eager")
    recorded = Trained(Net, whole, "aot_eager", tmp_path / "run", every=2)
    check_same(plain, recorded)
    assert {step for step, *_ in recorded.rows()} == {0, 2}


def test_a_recording_that_begins_late_sees_what_was_compiled(tmp_path):
    """Torch does not look for hooks again after its first call; a second recording finds them, too."""
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(model, backend="aot_eager")

    def step():
        compiled(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for name in ("first", "second"):
        with mpdiag.record(model, optimizer, tmp_path / name, every=1):
            step()
        names = set(
            mpdiag.open_run(tmp_path / name).frame().query("kind == 'activation_grad'")["name"]
        )
        assert {"layers.0.down", "layers.1.norm", "head"} <= names
        step()


def test_copies_and_files_of_a_model_hold_no_point(tmp_path):
    model = Net()
    with torch.device("meta"), mpdiag.record(model, None, tmp_path / "run"):
        (point,) = (v for v in vars(model.head).values() if isinstance(v, Point))
    assert point.number.device.type == "cpu"
    with mpdiag.record(model, None, tmp_path / "again"):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert not any(isinstance(v, Point) for m in other.modules() for v in vars(m).values())
            assert other.state_dict().keys() == model.state_dict().keys()


def test_an_error_of_the_recorder_does_not_reach_the_training(tmp_path, monkeypatch):
    broken = Mock(side_effect=ValueError("out of order"))
    monkeypatch.setattr("mpdiag.recording.observer._unpacked", broken)
    with pytest.warns(RuntimeWarning, match="out of order"):
        recorded = Trained(Net, whole, "aot_eager", tmp_path / "run")
    assert recorded.losses == Trained(Net, whole, "aot_eager").losses
    assert recorded.run.meta["failures"]


class Plain(torch.optim.SGD):
    """An optimizer that its authors compile into one graph; torch's own cut it."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_optimizer_step_is_recorded_unless_it_must_be_one_graph(tmp_path, whole):
    def trained(run):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        optimizer = (Plain if whole else torch.optim.SGD)(model.parameters(), 0.1)

        def update(x):
            if not whole:
                model(x).square().mean().backward()
            optimizer.step()

        update = torch.compile(update, backend="aot_eager", fullgraph=whole)
        context = mpdiag.record(model, optimizer, run, every=1) if run else nullcontext()
        with context as recorder:
            for _ in range(3):
                x = torch.randn(4, WIDTH)
                if whole:
                    model(x).square().mean().backward()
                update(x)
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], recorder

    plain, _ = trained(None)
    recorded, recorder = trained(tmp_path / "run")
    assert all(map(torch.equal, plain, recorded))
    assert recorder.failures == []
    assert recorder.steps_recorded == (1 if whole else 3)  # a step that nothing ends, or three
