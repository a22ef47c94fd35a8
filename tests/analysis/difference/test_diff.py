"""Where two runs part: named for planted faults, and nothing where rounding explains it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import run
from schemas import assert_described
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.difference.alignment import renamed
from mpdiag.analysis.difference.compared import _missing
from mpdiag.analysis.difference.diff import difference
from mpdiag.analysis.difference.fingerprint import read_fingerprint
from mpdiag.analysis.difference.sides import steps_of
from mpdiag.analysis.difference.tolerance import apart
from mpdiag.reports.text.difference import difference_lines
from mpdiag.runs.trace import TraceRow, positions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.factor = 1.0

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.factor


def recorded(
    folder,
    change=None,
    dtype=None,
    factor=1.0,
    optimizer=torch.optim.SGD,
    rate=0.01,
    rows=(16,),
    share=1.0,
    clip=False,
    trace=True,
    scale=0.0,
    **options,
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))
    x, y = torch.randn(16, 8)[: sum(rows)], torch.randint(0, 4, (16,))[: sum(rows)]
    if change is not None:
        change(model)
    held = [p for p in model.parameters() if not getattr(p, "stale", False)]
    step = optimizer(held, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 0)
    with mpdiag.record(model, step, folder, trace=trace, **options) as recorder:
        for _ in range(2):
            step.zero_grad()
            for part, labels in zip(x.split(rows), y.split(rows), strict=True):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = F.cross_entropy(model(part), labels) * factor
                scaler.scale(loss * (len(part) / 16 * share)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(step)
            scaler.update()
    assert recorder.failures == []
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("sound") / "run", max_steps=2)


def halved(gradient):
    return gradient / 2


def rewritten(model):
    """Another activation, written out: no operation of the block is in both runs."""
    block = model[1]

    def forward(x):
        u = block.up(block.norm(x))
        return x + block.down(0.6 * u * (1 + torch.erf(u / 2**0.5)))

    block.forward = forward


def stale(model):
    model[3].weight.stale = True


FAULTS = {
    "scaled": (lambda m: setattr(m[1], "factor", 1.1), "1", "forward", "mul"),
    "epsilon": (
        lambda m: setattr(m[2].norm, "eps", 1e-2),
        "2.norm",
        "forward",
        "native_layer_norm",
    ),
    "weight": (lambda m: m[1].up.weight.data.t_().t_().mul_(-1), "1.up", "forward", "weight"),
    "cut": (
        lambda m: m[2].down.register_forward_pre_hook(lambda _, x: (x[0].detach(),)),
        *("2.down", "backward", "mm"),
    ),
    "halved": (
        lambda m: m[1].up.weight.register_hook(halved),
        *("1.up", "backward", "gradient of a parameter"),
    ),
    "rewritten": (rewritten, "1", "forward", "gelu"),
    "stale": (stale, "3", "update", "optimizer step"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name, sound, tmp_path):
    change, module, phase, op = FAULTS[name]
    found = mpdiag.diff(sound, recorded(tmp_path / "run", change, operations=1))
    first = found.first
    assert (first.module, first.phase, first.op) == (module, phase, op)
    assert first.step == 0
    assert found.agree is False
    assert all(j.apart.ratio <= 1 for j in found.judged[: found.before] if j.pair.certain)


@pytest.mark.parametrize("name", ["none", "cut", "halved"])
def test_a_grad_scaler_on_one_side_is_no_fault_and_hides_none(name, sound, tmp_path):
    change, *place = FAULTS.get(name, (None,))
    options = {"dtype": torch.float16, "scale": 1024.0, "operations": 1}
    first = mpdiag.diff(sound, recorded(tmp_path / "run", change, **options)).first
    assert first is None if name == "none" else [first.module, first.phase, first.op] == place


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_loss_scale_is_no_fault_where_the_backward_pass_is_not_seen(factor, tmp_path):
    """``cumprod`` has another backward pass under a mode: it is left alone."""

    def cumulated(model):
        model[2].register_forward_hook(lambda *call: call[-1].sigmoid().cumprod(-1))

    def off(model):
        cumulated(model)
        model[2].register_full_backward_hook(lambda _, g, __: (g[0] * factor,))

    a = recorded(tmp_path / "a", cumulated)
    b = recorded(tmp_path / "b", off, dtype=torch.float16, scale=1024.0)
    found = mpdiag.diff(a, b)
    assert not any("backward" in j.pair.a.name for j in found.judged)
    first = found.first
    assert (first and (first.module, first.op)) == (None if factor == 1.0 else ("1", "gradient"))


def test_of_gradients_that_clipping_makes_off_by_one_factor_the_other_one_is_named(tmp_path):
    sides = (("a", None), ("b", FAULTS["halved"][0]))
    options = {"clip": True, "operations": 0}
    first = mpdiag.diff(*(recorded(tmp_path / n, c, **options) for n, c in sides)).first
    assert (first.module, first.op) == ("1.up", "gradient of a parameter")


def test_running_statistics_are_compared(tmp_path):
    """Nothing else shows their momentum before an evaluation."""
    sides = []
    for momentum in (0.1, 0.3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum))
        step = torch.optim.SGD(model.parameters(), 0.1)
        with mpdiag.record(model, step, tmp_path / str(momentum), trace=True):
            model(torch.randn(16, 4)).square().sum().backward()
            step.step()
        sides.append(tmp_path / str(momentum))
    first = mpdiag.diff(*sides).first
    assert (first.module, first.op, first.phase) == ("1", "native_batch_norm", "forward")


def test_a_loss_counted_twice_lies_outside_the_model(sound, tmp_path):
    first = mpdiag.diff(sound, recorded(tmp_path / "run", factor=2.0)).first
    assert (first.module, first.phase, first.line > 0) == (None, "forward", True)


def test_a_fault_of_the_backward_pass_is_named_before_the_clipping_that_reads_it(tmp_path):
    def change(model):
        model[2].up.register_forward_hook(lambda _, __, out: out.register_hook(halved) and out)

    a, b = (recorded(tmp_path / n, c, clip=True) for n, c in (("a", None), ("b", change)))
    first = mpdiag.diff(a, b).first
    assert (first.module, first.phase) == ("2.up", "backward")
    clipped = [e.phase for e in mpdiag.diff(a, recorded(tmp_path / "c")).edits]
    assert set(clipped) == {"backward"}


@pytest.mark.parametrize("rows", [(8, 8), (12, 4)])
def test_parts_of_a_batch_are_put_together(rows, sound, tmp_path):
    found = mpdiag.diff(sound, recorded(tmp_path / "run", rows=rows))
    compared = {j.pair.a.kind for j in found.judged}
    assert (found.agree, {"input", "output", "operation", "gradient"} <= compared) == (True, True)
    first = mpdiag.diff(sound, recorded(tmp_path / "more", rows=rows, share=1.5)).first
    assert (first.module, first.op, "len(part) / 16 * share" in first.code) == (None, "mul", True)
    assert mpdiag.diff(tmp_path / "run", recorded(tmp_path / "three", rows=(6, 5, 5))).agree


def test_a_batch_without_its_second_half_is_another_one(sound, tmp_path):
    first = mpdiag.diff(sound, recorded(tmp_path / "run", rows=(8,))).first
    assert (first.kind, first.difference) == ("input", np.inf)


def test_weights_that_rounding_moved_before_the_first_traced_step_are_no_fault(tmp_path):
    options = {"trace": (1,), "max_steps": 2}
    a = recorded(tmp_path / "a", **options)
    assert mpdiag.diff(a, recorded(tmp_path / "b", dtype=torch.bfloat16, **options)).agree
    far = mpdiag.diff(a, recorded(tmp_path / "c", rate=1.0, **options))
    assert (far.agree, far.cut_off) == (None, 1)


def test_models_without_a_tensor_in_common_do_not_agree():
    """Operations outside of all modules may meet by chance."""
    a, b = (
        [
            row(np.ones(4), kind="operation", name=name, order=i, module=None)
            for i, name in enumerate(names)
        ]
        for names in (("relu", "mul", "sum"), ("mul", "exp"))
    )
    assert difference(steps_of(a), steps_of(b)).agree is None


def test_rounding_to_bf16_is_explained_and_the_tolerance_could_fail(sound, tmp_path):
    found = mpdiag.diff(sound, recorded(tmp_path / "run", dtype=torch.bfloat16))
    assert found.agree
    compared = found.to_json()["compared"]
    assert 0.01 < compared["median_ratio"] < compared["largest_ratio"] < 1
    assert compared["different"] > 50


def test_the_tolerance_of_a_later_step_could_fail(tmp_path):
    """Adam may turn the sign of what rounding leaves of a gradient; most weights stay where they are."""

    def rewritten(model):
        up = model[1].up
        up.forward = lambda x: (
            (x[:, :8] @ up.weight[:, :8].t() + up.bias) + (x[:, 8:] @ up.weight[:, 8:].t())
        )

    sides = (("a", None), ("b", rewritten))
    options = {"optimizer": torch.optim.Adam, "max_steps": 2}
    found = mpdiag.diff(*(recorded(tmp_path / n, change, **options) for n, change in sides))
    later = [j.apart.ratio for j in found.judged if j.step == 1 and j.apart.difference]
    assert (found.agree, found.last_step) == (True, 1)
    assert 0.01 < np.median(later) < max(later) < 1


class Attention(nn.Module):
    """Its key's bias has no gradient but rounding, of which Adam makes whole steps."""

    def __init__(self, halves):
        super().__init__()
        self.qkv, self.halves = nn.Linear(16, 48), halves
        nn.init.zeros_(self.qkv.bias)

    def forward(self, x):
        w = self.qkv.weight.t()
        parts = torch.split(x, 8, -1), torch.split(w, 8)
        made = sum(map(torch.matmul, *parts)) if self.halves else x @ w
        q, k, v = (made + self.qkv.bias).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def centred(folder, halves=False, share=0.1):
    """What an average that is updated after the optimizer's step centres."""
    torch.manual_seed(0)
    model, centre = nn.Sequential(Attention(halves), nn.Linear(16, 16)), torch.zeros(16)
    step = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(8, 12, 16)
    with mpdiag.record(model, step, folder, trace=True):
        for _ in range(2):
            step.zero_grad()
            out = model(x)
            torch.softmax((out - centre) / 0.1, -1).square().sum().backward()
            step.step()
            centre.lerp_(out.detach().mean((0, 1)), share)
    return folder


def test_a_fault_that_only_a_later_step_shows_moves_more_than_weights_apart_may(tmp_path):
    a, sound = centred(tmp_path / "a"), centred(tmp_path / "sound", halves=True)
    assert mpdiag.diff(a, sound).agree
    first = mpdiag.diff(a, centred(tmp_path / "b", halves=True, share=0.9)).first
    assert (first.op, first.step, "out - centre" in first.code) == ("sub", 1, True)


def test_adam_in_another_precision_cannot_be_followed_beyond_its_first_step(tmp_path):
    a = recorded(tmp_path / "a", optimizer=torch.optim.Adam, rate=0.3)
    b = recorded(tmp_path / "b", optimizer=torch.optim.Adam, rate=0.3, dtype=torch.bfloat16)
    found = mpdiag.diff(a, b)
    assert (found.agree, found.last_step, found.cut_off) == (True, 0, 1)
    same = mpdiag.diff(a, a)
    assert (same.agree, same.last_step, same.cut_off) == (True, 1, None)


def test_the_command_its_document_and_a_fingerprint(sound, tmp_path):
    kept = tmp_path / "sound.fingerprint"
    assert run("fingerprint", sound, "-o", kept).exit_code == 0
    assert kept.stat().st_size < 1_000_000
    assert read_fingerprint(kept)[1]["versions"]["torch"] == torch.__version__
    faulty = recorded(tmp_path / "faulty", FAULTS["scaled"][0])
    for a in (sound, kept):
        same, other = (
            run("diff", a, sound, "--strict"),
            run("diff", a, faulty, "--strict", "--json"),
        )
        assert (same.exit_code, other.exit_code) == (0, 1)
        assert "agree: rounding explains every difference" in " ".join(same.stdout.split())
        document = json.loads(other.stdout)
        assert_described("diff", document)
        assert document["first"]["module"] == "1"
    there = [shutil.copytree(side, tmp_path / "there" / side.name) for side in (sound, faulty)]
    moved = run("diff", *there, "--json")  # as on another machine: only files travel
    assert json.loads(moved.stdout) == json.loads(run("diff", sound, faulty, "--json").stdout)
    page = tmp_path / "page.html"
    shown = run("diff", sound, faulty, "-o", page).stdout
    assert "First: mul in " in shown
    assert "Compared before it: " in shown
    assert "differ beyond rounding at step 0" in page.read_text()
    assert len(shown.splitlines()) <= 10
    assert run("diff", sound, faulty, "-o", tmp_path / "page.png").exit_code == 2
    untraced = tmp_path / "untraced"
    with mpdiag.record(nn.Linear(2, 2), None, untraced):
        pass
    never = recorded(tmp_path / "never", trace=(7,))
    assert "recorded none of its steps [7]" in run("diff", sound, never).stderr
    for words in (("diff", sound, untraced), ("fingerprint", untraced)):
        assert "record it with mpdiag record --trace" in run(*words).stderr


def test_what_rounding_alone_may_lose_is_said():
    cos = row(np.ones(4), kind="operation", name="cos")
    a, b = (steps_of([replace(cos, spread=spread)]) for spread in (1e-6, 0.4))
    found = difference(a, b)
    assert (found.agree, found.to_json()["coarse"]) == (True, {"module": "layer", "op": "cos"})
    said = "Rounding alone may change cos in layer by 120 % of its size (float32)."
    assert said in difference_lines(found, Path("a"), Path("b"))[1]
    assert difference(a, a).coarse is None


@pytest.mark.parametrize(
    ("values", "times", "agree"),
    [(8, 0.9, True), (8, 1.5, True), (8, 2.5, False), (640, 1.5, False)],
)
def test_few_values_may_be_twice_their_tolerance_apart_by_chance_and_that_is_said(
    values, times, agree
):
    x, tolerance = np.linspace(1.0, 2.0, values), 3.0 * np.hypot(1e-6, 1e-6)
    a, b = (steps_of([row(y)]) for y in (x, x + times * tolerance))
    found = difference(a, b)
    assert found.agree == agree
    said = "Tensors of few values may be up to twice their tolerance apart by chance."
    assert (said in difference_lines(found, Path("a"), Path("b"))[1]) == (agree and times > 1)


BRANCHES = {  # operations of the second side, and where the runs part
    "one is not there": ("a+", "layer.b", "mm"),
    "a compiled graph": ("", "layer", "operation"),
    "the sum itself": ("ab+", "layer", "add"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_of_two_branches_that_are_added_up_the_wrong_one_is_named(name):
    """The sum is the first tensor to differ."""
    there, *named = BRANCHES[name]

    def side(made, total):
        back, places = {"phase": "backward"}, {"a": "layer.a", "b": "layer.b", "+": "layer"}
        rows = [row(np.ones(4), kind="gradient", module="out", **back)]
        for order, (what, module) in enumerate(places.items(), 1):
            of = {"reads": (1, 2), "name": "add"} if what == "+" else {"reads": (0,), "name": "mm"}
            value = np.full(4, total if what == "+" else 1.0)
            rows.append(row(value, kind="operation", order=order, module=module, **of, **back))
        kept = [rows[0], *(r for r, what in zip(rows[1:], places, strict=True) if what in made)]
        grad = row(np.full(4, total), kind="gradient", order=4, reads=(3,), **back)
        return steps_of([*kept, grad])

    first = difference(side("ab+", 2.0), side(there, 1.0)).first
    assert [first.module, first.op, first.phase] == [*named, "backward"]


@pytest.mark.parametrize("last", [3.0, 2.0])
def test_gradients_are_added_up_in_any_order(last):
    """Three of them: only the sum of all has to be the same."""

    def side(order, total):
        back = {"phase": "backward", "kind": "operation"}
        rows = [
            row(np.full(4, v), order=i, name="mm", module=f"m{i}", **back)
            for i, v in enumerate((1.0, 5.0, -3.0))
        ]
        part = rows[order[0]].values + rows[order[1]].values
        rows.append(row(part, order=3, name="add", module="part", reads=order[:2], **back))
        rows.append(row(np.full(4, total), order=4, name="add", reads=(3, order[2]), **back))
        return steps_of(rows)

    assert difference(side((0, 1, 2), 3.0), side((0, 2, 1), last)).agree is (last == 3.0)


def normalised(x, weight, epsilon=1e-6):
    """A root mean square norm; torch's own multiplies the other way round."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def rewritten_loss(logits, labels, factor=1.0):
    """Cross entropy and a small multiple of the squared logarithm of the partition function."""
    log_z = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, labels) + 0.1 * factor * log_z.square().mean()


def loss_by_hand(logits, labels):
    log_z = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, labels[:, None])[:, 0]
    return (log_z - picked).mean() + 0.1 * log_z.square().mean()


REWRITTEN = {
    "the norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), loss_by_hand, None),
    "the norm, wrong": (
        lambda x, w: F.rms_norm(x, w.shape, w, 0.1),
        loss_by_hand,
        ("norm", "forward"),
    ),
    "the loss": (normalised, rewritten_loss, None),
    "the loss, wrong": (normalised, lambda *x: rewritten_loss(*x, 2.0), (None, "forward")),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_written_otherwise_and_computes_the_same_is_no_fault(name, tmp_path):
    """Gradients of two factors come in either order; a line of the loss may be a part of its sum."""

    class Norm(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.linspace(0.5, 2, 16)), norm

        def forward(self, x):
            return self.norm(x, self.weight)

    sides = [("a", normalised, loss_by_hand), ("b", *REWRITTEN[name][:2])]
    for folder, norm, loss in sides:
        torch.manual_seed(0)
        parts = {"first": nn.Linear(8, 16), "norm": Norm(norm), "last": nn.Linear(16, 4)}
        model = nn.Sequential()
        for own, module in parts.items():
            model.add_module(own, module)
        step = torch.optim.SGD(model.parameters(), 0.01)
        with mpdiag.record(model, step, tmp_path / folder, trace=True, max_steps=1):
            loss(model(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
            step.step()
    first = mpdiag.diff(tmp_path / "a", tmp_path / "b").first
    assert (first and (first.module, first.phase)) == REWRITTEN[name][2]


class Mixed(nn.Module):
    """A module of two outputs, each of which may be cut from its graph."""

    cut = ""

    def forward(self, x):
        mixed, cost = 1.0 * x, x.square().mean()
        return mixed.detach() if self.cut == "mixed" else mixed, (
            cost.detach() if self.cut == "cost" else cost
        )


class Conditioned(nn.Module):
    """Two outputs of one shape: the first is read inside, and its gradient is complete last."""

    logarithms = False

    def __init__(self):
        super().__init__()
        self.first, self.condition, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.mixed = Mixed()

    def forward(self, x):
        seen = self.first(x).log_softmax(-1)
        mixed, cost = self.mixed(self.condition(seen if self.logarithms else seen.exp()))
        return seen, self.last(mixed), cost


def conditioned(folder, backend=None, factor=1.0, **mistake):
    torch.manual_seed(0)
    model = Conditioned()
    model.logarithms, model.mixed.cut = mistake.get("logarithms", False), mistake.get("cut", "")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    called = torch.compile(model, backend=backend) if backend else model
    with mpdiag.record(model, optimizer, folder, trace=True):
        seen, last, cost = called(torch.randn(16, 8))
        loss = factor * last.square().mean() + 3 * seen.square().sum(-1).log().mean() + cost
        loss.backward()
        optimizer.step()
    return folder


def test_a_compiled_graph_is_compared_inside(tmp_path):
    """Its outputs' gradients come in another order, and lack what arrives inside the graph."""
    eager = conditioned(tmp_path / "eager")
    mistakes = {
        "sound": ({}, None),
        "logarithms": ({"logarithms": True}, ("", "forward", "operation")),
        "mixed": ({"cut": "mixed"}, ("mixed", "backward", "gradient")),
        "cost": ({"cut": "cost"}, ("mixed", "backward", "gradient of output 1")),
        "loss": ({"factor": 1.1}, (None, "backward", "")),
    }
    for name, (mistake, named) in mistakes.items():
        torch._dynamo.reset()
        compiled = conditioned(tmp_path / name, "aot_eager", **mistake)
        for sides in ((eager, compiled), (compiled, eager)):
            first = mpdiag.diff(*sides).first
            if named is None:
                assert first is None
                continue
            assert (first.module, first.phase) == named[:2], name
            assert first.op == (named[2] or first.op)
            # The first output agrees, so what it was made of does.
            assert name != "logarithms" or "seen.exp()" in first.code


# -- ranks, put together without processes ----------------------------------------------------------


def row(values, rank=0, shape=None, at=None, kind="output", order=0, **more):
    values = np.asarray(values, np.float64)
    return TraceRow(
        step=0,
        rank=rank,
        order=order,
        kind=kind,
        **{"module": "layer", "name": "", "phase": "forward", **more},
        call=0,
        shape=shape or values.shape,
        dtype="float32",
        values=values.reshape(-1),
        norm=float(np.linalg.norm(values)),
        at=at,
        spread=1e-6,
    )


@pytest.mark.parametrize("mean", [0.0, 100.0])  # values of one size are near in any order
@pytest.mark.parametrize("words_first", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_rows_of_a_batch_are_found_again_on_their_ranks(turns, words_first, mean):
    """In blocks and in turn; a rank whose values differ is named."""
    batch = np.random.default_rng(0).normal(mean, size=(8, 4))
    dealt = [batch[i::2] if turns else batch[4 * i : 4 * i + 4] for i in range(2)]

    def side(parts, last=1.0):
        for i, part in enumerate(parts):
            words = part.reshape(-1, 2, 2)  # a row of the batch is two of its own
            words = words.swapaxes(0, 1) if words_first else words
            yield row(part, i, kind="input")
            yield row(2 * part, i, order=1)
            yield row((last if i else 1.0) * words.reshape(-1, 2), i, module="flat", order=2)

    assert difference(steps_of([*side([batch])]), steps_of([*side(dealt)])).agree
    found = difference(steps_of([*side([batch])]), steps_of([*side(dealt, last=1.05)]))
    assert found.first.module == "flat"
    assert mean or found.first.rank == 1


@pytest.mark.parametrize("kept", [[0, 2, 4, 5], [0, 2, 4, 6]])
def test_a_list_of_some_rows_is_not_dealt_out_as_the_rows_are(kept):
    """Of rows dealt out in turn, one rank may keep more than another one."""
    batch = np.random.default_rng(0).normal(size=(8, 4))

    def side(ranks):
        for i in range(ranks):
            own = [n for n in kept if n % ranks == i]
            yield row(batch[i::ranks], i, kind="input")
            yield row(np.repeat(batch[own], 2, 0), i, module="listed", order=1)

    assert difference(steps_of([*side(1)]), steps_of([*side(2)])).agree


@pytest.mark.parametrize(("before", "named"), [([1.0, 1.0], "forward"), ([1.0, 2.0], "backward")])
def test_a_doubtful_operation_is_named_though_gradients_before_any_factor_agree(before, named):
    """The gradient of a mean is one number: it does not show that the forward pass agrees."""

    def side(off):
        outside = {"kind": "operation", "module": None}
        yield row([1.0, 2.0], kind="input")
        if off != 1.0:
            yield row([3.0], order=1, name="sum", **outside)  # an edit: what is outside is in doubt
        yield row([off, 2.0], order=2, name="sub", **outside)
        backward = {**outside, "phase": "backward"}
        yield row([1.0], order=3, name="ones_like", **backward)
        yield row(before, order=4, name="div", reads=(3,), **backward)
        yield row([off, 3.0], order=5, name="mul", reads=(4,), **backward)

    first = difference(steps_of([*side(1.0)]), steps_of([*side(1.5)])).first
    assert first.phase == named


@pytest.mark.parametrize("off", [1, 1.1])
def test_of_calls_in_one_backward_pass_the_last_one_s_gradients_come_first(off):
    """A discriminator judges real and fake pictures at once, or one after another."""
    real, fake = np.random.default_rng(1).normal(size=(2, 4, 3))
    whole = np.concatenate([real, fake])
    grad = {"kind": "gradient", "phase": "backward"}
    once = [row(whole, kind="input"), row(whole, order=1), row(whole, order=2, **grad)]
    twice = [row(x, kind="input", order=i) for i, x in enumerate((real, fake))]
    twice += [row(off * fake, order=2, **grad), row(real, order=3, **grad)]
    first = difference(steps_of(once), steps_of(twice)).first
    assert (first and first.kind) == (None if off == 1 else "gradient")


@pytest.mark.parametrize(
    ("module", "made", "off", "reads", "agree"),
    [
        ("critic", True, 1e-6, (), True),
        ("critic", True, 1e-3, (), False),
        ("critic", True, 1e-6, (0,), False),  # as far as the twin shows
        ("critic", False, 1e-6, (), False),
        ("", True, 1e-6, (), False),
    ],
)
def test_what_another_model_makes_may_be_rounded_and_data_may_not(module, made, off, reads, agree):
    """A training of several models names each; one model's input is data. What follows moves along."""
    values = np.random.default_rng(2).normal(size=(8, 8))
    sides = [
        steps_of(
            [
                row(values, module="generator", order=0 if made else 3),
                replace(
                    row(values * given, kind="input", module=module, order=1, reads=reads),
                    spread=1e-7 if reads else None,
                ),
                row(values * given, order=2),
            ]
        )
        for given in (1.0, 1.0 + off)
    ]
    assert difference(*sides).agree is agree


@pytest.mark.parametrize(("module", "first"), [("critic", "generator"), ("", "input")])
def test_a_model_that_made_another_s_input_is_named_before_it(module, first):
    values = np.random.default_rng(3).normal(size=(8, 8))
    sides = [
        steps_of(
            [
                row(values * off, module="generator", order=0),
                row(values * off, kind="input", module=module, order=1, reads=(0,)),
                row(values * off, order=2),
            ]
        )
        for off in (1.0, 1.1)
    ]
    found = difference(*sides).first
    assert first in (found.module, found.kind)


@pytest.mark.parametrize(("last", "agree"), [(1.0, True), (1.1, False)])
def test_what_parts_of_a_batch_add_up_in_place_is_compared_at_the_end(last, agree):
    """As the sums of a codebook; the parts themselves are put together."""
    rows = np.random.default_rng(4).normal(size=(8, 4))
    about = {"kind": "operation", "name": "add_", "phase": "forward"}

    def side(*parts):
        found, total = [], np.zeros(4)
        for i, part in enumerate(parts):
            total = total + part.sum(0)
            found.append(row(part, kind="input", module="", order=2 * i))
            reads = (2 * i, 2 * i - 1) if i else (0,)
            found.append(row(total * (last if i else 1.0), order=2 * i + 1, reads=reads, **about))
        return steps_of(found)

    found = difference(side(rows), side(rows[:4], rows[4:]))
    assert {j.pair.a.kind for j in found.judged} == {"input", "operation"}
    assert found.agree is agree


def test_an_argument_that_rounding_hides_is_in_the_first_line(sound, tmp_path):
    other = recorded(tmp_path / "run", lambda m: setattr(m[2].norm, "eps", 1.1e-5), torch.bfloat16)
    said = " ".join(run("diff", sound, other).stdout.split())
    assert "rounding explains every difference, but arguments of operations differ" in said
    assert "Edited in 2.norm, forward pass: native_layer_norm(eps 1e-05 -> 1.1e-05)" in said


def test_other_settings_of_an_optimizer_are_said_whether_they_show_or_not(sound, tmp_path):
    def coupled(held, rate):
        return torch.optim.SGD(held, rate, weight_decay=1e-9, foreach=False)

    other = recorded(tmp_path / "run", optimizer=coupled)
    document = json.loads(run("diff", sound, other, "--json").stdout)
    assert_described("diff", document)
    assert (document["agree"], document["settings"]) == (
        True,
        ["weight_decay is 0 in A and 1e-09 in B, for 16 parameters"],
    )
    kept = tmp_path / "kept.fingerprint"
    assert run("fingerprint", sound, "-o", kept).exit_code == 0
    for a in (sound, kept):
        title, *lines = run("diff", a, other).stdout.split("Optimizer: ")
        assert " ".join(title.split()).endswith("but settings of optimizers differ")
        assert lines[0].startswith("weight_decay is 0 in A and 1e-09 in B, for 16 parameters.")
    assert mpdiag.diff(sound, sound).settings == []


@pytest.mark.parametrize(
    ("off", "spread", "kind"), [(0, 1e-6, None), (1, 1e-6, "input"), (1, 10.0, "input")]
)
def test_a_later_step_follows_the_weights_but_its_data_do_not(off, spread, kind):
    """Weights 2,000 ulps apart move what no BF16 touches as far as the FP32 twin says for each."""

    def side(moved, given, dtype):
        about = {"kind": "operation", "name": "mul"}
        weight = row(np.ones(4) + moved, kind="weight", name="w", order=0)
        low = replace(row(np.ones(4), order=2, **about), dtype=dtype, spread=0.01)
        fine = row(np.ones(4) + moved, order=3, **{**about, "module": "next"})
        rows = [weight, row(np.ones(4) + given, kind="input", order=1), low, fine]
        return steps_of([replace(r, step=1, spread=max(r.spread, spread)) for r in rows])

    found = difference(side(0.0, 0, "float32"), side(2e-4, off, "bfloat16"))
    assert (found.first and found.first.kind) == kind


@pytest.mark.parametrize(("moved", "agree"), [(2e-3, True), (0.2, False)])
def test_weights_in_bf16_move_an_fp32_twin_by_their_own_ulps(moved, agree):
    """Half an ulp of BF16 are 16,777 ulps of FP32, of each of which the FP32 twin moves by one."""

    def side(moved, dtype):
        weight = row(np.ones(64) + min(moved, 2e-3), kind="weight", name="w")
        made = row(np.ones(64) + moved, order=1, reads=(0,))
        return steps_of([replace(r, step=1, dtype=dtype) for r in (weight, made)])

    for sides in (("float32", "bfloat16"), ("bfloat16", "float32")):
        assert difference(side(0.0, sides[0]), side(moved, sides[1])).agree is agree


@pytest.mark.parametrize(("before", "agree"), [(100, True), (0, False)])
def test_operations_that_a_compiled_side_hides_widen_what_has_no_twin(before, agree):
    ops = [row(np.ones(8), kind="operation", name="sin", order=i) for i in range(before)]
    a, b = (replace(row(x * np.ones(8), order=100), spread=None) for x in (1.0, 1.0 + 6e-6))
    for sides in (([*ops, a], [b]), ([b], [*ops, a])):
        assert difference(*map(steps_of, sides)).agree is agree


@pytest.mark.parametrize(
    ("drawn", "moved", "made", "kind"),
    [
        (0.0, 2e-6, 0.0, None),  # as a factorization of another machine
        (0.0, 2e-6, 1e-5, None),  # which what follows from it follows
        (0.0, 2e-6, 1e-3, "output"),
        (0.0, 5e-5, 0.0, None),  # by as much as a pass may round, and by more
        (0.0, 7e-5, 0.0, "weight"),
        (0.0, 1e-3, 0.0, "weight"),
        (0.0, 1e-3, 1e-3, "weight"),
        (1e-3, 1e-3, 0.0, "weight"),
    ],
)
@pytest.mark.parametrize("early", [0.0, 1e-2])
def test_initial_weights_may_be_rounded_and_what_parts_before_they_are_read_is_named(
    drawn, moved, made, kind, early
):
    """Of vectors that a first pass computed; not where a matrix is another, as a seed draws them."""
    x = np.ones((2, 4))

    def side(drawn, moved, made, early):
        names = [("first.w", drawn), ("second.w", drawn), ("norm.w", moved)]
        found = [
            row((x if i < 2 else x[0]) + off, order=i, kind="weight", name=name, module=name[:-2])
            for i, (name, off) in enumerate(names)
        ]
        found.append(row(x, order=3, kind="input", module=""))
        about = {"kind": "operation", "name": "mul"}
        found.append(row(x + early, order=4, module="first", reads=(0, 3), **about))
        found.append(row(x + made, order=5, module="norm", reads=(2, 4)))
        return steps_of(found)

    first = difference(side(0.0, 0.0, 0.0, 0.0), side(drawn, moved, made, early)).first
    if early and not drawn:
        kind = "operation"
    assert (first and first.kind) == kind


INITIAL = {
    "another deviation": ("embed.w", lambda w: 0.95 * w),
    "transposed": ("linear.w", np.transpose),
    "another seed": ("embed.w", lambda w: np.random.default_rng(1).normal(size=w.shape)),
    "a step behind": ("linear.w", lambda w: w + 5e-4 * np.sign(w)),
    "rounded to FP16": ("embed.w", lambda w: w.astype(np.float16)),
    "another constant": ("linear.b", lambda w: w + 0.1),
    "of the model itself": ("offset", lambda w: 0.95 * w),
}


def initial(held, kind):
    for i, (own, w) in enumerate(held.items()):
        about = {"kind": "weight", "order": i, "name": own, "module": own.rpartition(".")[0]}
        if kind == "BF16":
            yield replace(row(torch.tensor(w).bfloat16().double(), **about), dtype="bfloat16")
        elif kind == "shards":
            at = np.arange(w.size).reshape(2, -1)
            for rank in range(2):
                yield row(w.reshape(2, -1)[rank], rank, w.shape, at[rank], **about)
        else:
            yield from (row(w, rank, **about) for rank in range(1 + (kind == "replicas")))


def forward(held, kind, x, length):
    halves = (x[:4], x[4:]) if kind in ("parts", "replicas", "shards") else (x,)
    for i, part in enumerate(halves):
        start, rank = (4 + i * 10000, 0) if kind == "parts" else (4, i)
        h = part @ held["embed.w"]
        hidden = h + held["offset"]
        out = hidden @ held["linear.w"] + held["linear.b"]
        steps = [("operation", "embed", "mm", h, (0, start)), ("output", "embed", "", h, ())]
        steps += [("operation", "", "add", hidden, (3, start + 2))]
        steps += [("operation", "", "neg", hidden, (start + 3,))] * length
        steps += [("operation", "linear", "addmm", out, (1, 2, start + 3))]
        steps += [("output", "linear", "", out, ()), ("output", "", "", out, ())]
        yield row(part, rank, kind="input", order=start, module="")
        for order, (made, module, op, value, reads) in enumerate(steps, start + 1):
            if made == "output" or kind != "compiled":
                about = {"kind": made, "module": module, "name": op, "reads": reads}
                yield row(value, rank, order=order, **about)


KINDS = ("eager", "BF16", "compiled", "replicas", "shards", "parts")
HIDDEN = {("BF16", "a step behind"), ("BF16", "rounded to FP16")}  # BF16 rounds weights by more


@pytest.mark.parametrize(
    ("kinds", "fault"),
    [
        (kinds, fault)
        for kinds in [*(("eager", kind) for kind in KINDS), ("compiled", "eager")]
        for fault in (None, *INITIAL)
        if (kinds[1], fault) not in HIDDEN
    ],
)
def test_other_initial_weights_are_named_in_every_kind_of_pair(kinds, fault):
    """However long the step: a trace has some 10,000 operations."""
    draw, length = np.random.default_rng(0), 9000 if kinds == ("eager", "eager") else 300
    x, sound = draw.normal(size=(8, 8)), {"embed.w": draw.normal(size=(8, 8))}
    sound |= {"linear.w": draw.normal(size=(8, 8)), "linear.b": np.ones(8)}
    sound["offset"] = draw.normal(size=8)
    name, change = INITIAL.get(fault, ("", None))
    held = sound, {**sound, name: change(sound[name])} if change else sound
    a, b = (
        steps_of([*initial(w, kind), *forward(w, kind, x, length)])
        for w, kind in zip(held, kinds, strict=True)
    )
    first = difference(a, b).first
    assert (first and (first.kind, first.name)) == (("weight", name) if fault else None)


def test_what_a_first_pass_computed_wrong_weights_of_is_named(tmp_path):
    def initialized(model, factor=1.0):
        model[1].factor = factor
        with torch.no_grad():
            model[3].bias.copy_(model[1](torch.linspace(-1, 1, 16)[None])[0, :4])

    a = recorded(tmp_path / "a", initialized)
    b = recorded(tmp_path / "b", lambda model: initialized(model, 1.5))
    found = mpdiag.diff(a, b)
    assert (found.first.module, found.first.op, found.first.phase) == ("1", "mul", "forward")
    assert found.environment == ["different initial values of 1 parameter"]
    assert found.before == sum(
        j.pair.certain and j.apart.ratio <= 1 for j in found.judged[: found.before + 1]
    )
    assert mpdiag.diff(a, a).environment == []


@pytest.mark.parametrize(
    ("step", "rate", "kind"), [(0, 10, "updated_weight"), (0, 2, None), (1, 10, None)]
)
def test_a_first_update_has_the_size_of_its_gradient_where_that_is_not_clear(step, rate, kind):
    def side(rate):
        gradient = np.linspace(-1.0, 1.0, 64)
        about = {"name": "layer.w", "phase": "forward"}
        rows = [
            row(np.ones(64), kind="weight", **about),
            row(gradient, kind="weight_grad", order=1, **{**about, "phase": "backward"}),
            row(
                1 - rate * gradient, kind="updated_weight", order=2, **{**about, "phase": "update"}
            ),
        ]
        return steps_of([replace(r, step=step, spread=0.2) for r in rows])

    found = difference(side(0.01), side(0.01 * rate))
    assert (found.first and found.first.kind) == kind


@pytest.mark.parametrize("scale", [1, 2])
def test_a_gradient_that_every_rank_halves_is_found_whatever_the_scale_of_the_others(scale):
    """Ranks differentiate their own mean, or the sum of all."""
    batch = np.random.default_rng(0).normal(size=(8, 4))

    def side(parts, scales):
        found = [row(part, rank, kind="input") for rank, part in enumerate(parts)]
        for order, (name, times) in enumerate(scales.items(), 1):
            about = {"kind": "gradient", "phase": "backward", "module": name, "order": order}
            found += [row(times * part, rank, **about) for rank, part in enumerate(parts)]
        return steps_of(found)

    whole, ranks = side([batch], dict.fromkeys("abc", 1)), [batch[:4], batch[4:]]
    assert difference(whole, side(ranks, dict.fromkeys("abc", scale))).agree
    halved = difference(whole, side(ranks, {"a": scale, "b": scale / 2, "c": scale / 2}))
    assert (halved.first.module, halved.before) == ("b", 5)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_gradient_of_few_values_does_not_show_the_scale_of_ranks(scale, noise):
    """As of words that a mask leaves out: the largest values are left out of a comparison."""
    draw = np.random.default_rng(0)
    batch = draw.normal(size=(8, 4))
    few = batch * (np.arange(32).reshape(8, 4) % 16 == 0)

    def side(scale, *rows):
        found, rounded = [], few + noise * draw.normal(size=(8, 4))
        for rank, held in enumerate(rows):
            values = (batch[held], scale * rounded[held], scale * batch[held])
            for order, some in enumerate(values):
                about = {"kind": "gradient", "phase": "backward"} if order else {"kind": "input"}
                found.append(row(some, rank, order=order, module="ab"[order // 2], **about))
        return steps_of(found)

    ranks = slice(4), slice(4, 8)
    assert difference(side(1, slice(8)), side(scale, *ranks)).agree


def test_a_later_stage_of_a_pipeline_is_given_something_else():
    words, hidden = np.arange(8), np.ones((8, 4))
    whole = [row(words, kind="input"), row(hidden, order=1, module="a")]
    whole.append(row(2 * hidden, order=2, module="b"))
    stages = [*whole[:2], row(hidden, 1, kind="input"), row(2 * hidden, 1, order=1, module="b")]
    assert difference(steps_of(whole), steps_of(stages)).agree


@pytest.mark.parametrize(("further", "explained"), [(6e-5, True), (0.02, False)])
def test_a_norm_may_come_from_where_nobody_looked(further, explained):
    """Twins say how far the positions move; elsewhere values may be larger, and move as much further."""
    small = np.full(64, 1e-3)
    found = apart((small, 13.8), (small, 13.8 * (1 + further)), 4e-6, 3072)
    assert (found.ratio < 1) is explained


def test_shards_and_summands_make_the_whole():
    whole = np.random.default_rng(1).normal(size=(8, 8))
    values = whole.reshape(-1)[positions((8, 8))]
    halves = [
        np.arange(values.size)[: values.size // 2],
        np.arange(values.size)[values.size // 2 :],
    ]
    shards = [
        row(values[at], i, shape=(8, 8), at=at.astype(np.int32)) for i, at in enumerate(halves)
    ]
    for shard, part in zip(shards, (whole[:4], whole[4:]), strict=True):
        object.__setattr__(shard, "norm", float(np.linalg.norm(part)))
    summands = [row(whole * share, i, partial=True) for i, share in enumerate((0.25, 0.75))]
    reference = steps_of([row(whole)])
    for ranks in (shards, summands):
        assert difference(reference, steps_of(ranks)).agree
    assert not difference(
        reference,
        steps_of(
            [shards[0], row(values[halves[1]] * 2, 1, shape=(8, 8), at=halves[1].astype(np.int32))]
        ),
    ).agree


def test_a_rank_whose_call_of_a_number_is_another_one_is_left_out():
    """As of two stages of a pipeline, each sharded, whose gradients are scaled outside of any module."""
    one = row(np.ones((2, 2)), shape=(4, 2), at=np.arange(4, dtype=np.int32))
    other = row(np.ones((6, 8)), 1, shape=(12, 8), at=np.arange(16, 64, dtype=np.int32))
    whole = steps_of([row(np.ones((4, 2)))])
    assert difference(whole, steps_of([one, other])).agree
    wrong = row(2 * np.ones((2, 2)), shape=(4, 2), at=np.arange(4, dtype=np.int32))
    assert not difference(whole, steps_of([wrong, other])).agree


FULL = np.random.default_rng(2).normal(size=(3, 8, 8))
HEADS = FULL[1][:, ::2], FULL[1][:, 1::2]
ON_RANKS = {  # what two ranks have of a tensor, and the rank where it parts
    "summands": ("output", (FULL[1] - FULL[2], FULL[2]), "agree"),
    "equal summands": ("output", (FULL[1] / 2, FULL[1] / 2), "agree"),
    "one rank differs": ("output", (FULL[1], 1.1 * FULL[1]), 1),
    "heads": ("output", HEADS, "agree"),
    "a larger head": ("output", (1.1 * HEADS[0], HEADS[1]), None),
    "not reduced": ("weight_grad", (FULL[1] - FULL[2], FULL[2]), 0),
    "rows of a weight": ("weight_grad", (FULL[1][:4], FULL[1][4:]), "agree"),
    "doubled rows": ("weight_grad", (2 * FULL[1][:4], 2 * FULL[1][4:]), 0),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_parts_that_ranks_of_plain_tensors_have(name):
    """As Megatron's tensor, sequence and expert parallelism leaves them: no placements say so."""
    kind, parts, place = ON_RANKS[name]
    of = {"kind": kind, "order": 1, "name": "weight" if kind == "weight_grad" else ""}
    one = steps_of([row(FULL[0], kind="input"), row(FULL[1], **of)])
    ranks = [(row(FULL[0], i, kind="input"), row(part, i, **of)) for i, part in enumerate(parts)]
    first = difference(one, steps_of([r for of_rank in ranks for r in of_rank])).first
    assert ("agree" if first is None else first.rank) == place


def loss_divided_last(ranks, factor=1.0):
    """A loss that multiplies its rows' gradients, and divides them by the number of rows last."""
    draw = np.random.default_rng(5)
    x, per_row = draw.normal(size=(8, 4)), draw.normal(size=(8, 1))
    rows = []
    for rank in range(ranks):
        held, own = x[rank::ranks], per_row[rank::ranks]
        mean = own * factor * ranks / 8
        made = {"kind": "operation", "module": None}
        back = {**made, "phase": "backward"}
        rows += [
            row(held, rank, kind="input"),
            row(np.ones(()), rank, order=1, name="ones_like", **made),
            row(own * factor, rank, order=2, name="mul", reads=(1,), **back),
            row(mean, rank, order=3, name="div_", reads=(2,), **back),
            row(mean @ np.ones((1, 4)), rank, order=4, kind="gradient", phase="backward"),
        ]
    return steps_of(rows)


def test_a_loss_that_divides_last_has_no_scale_of_ranks_before():
    assert difference(loss_divided_last(1), loss_divided_last(2)).agree
    first = difference(loss_divided_last(1), loss_divided_last(2, 1.5)).first
    assert (first.module, first.op) == (None, "mul")


@pytest.mark.parametrize(
    ("dtype", "off", "reads", "agree"),
    [
        ("bfloat16", 0.03, (), True),
        ("bfloat16", 0.3, (), False),
        ("bfloat16", 0.03, (1,), False),
        ("float32", 0.03, (), False),
    ],
)
def test_what_comes_from_untraced_operations_may_be_rounded_as_the_rest(dtype, off, reads, agree):
    """A reference that runs first under ``no_grad`` is not traced, nor is its rounding."""
    values = np.random.default_rng(6).normal(size=(8, 8))
    sides = [
        steps_of(
            [
                row(values, kind="input"),
                replace(row(values, kind="operation", order=1, name="mm"), dtype=kind),
                row(far, kind="operation", order=2, name="sub", module=None, reads=reads),
            ]
        )
        for kind, far in (("float32", values), (dtype, values * (1 + off)))
    ]
    assert difference(*sides).agree is agree


def chooser(turned, off=0.0, reads=(1,)):
    """A mixture of experts of 64 rows: scores, choices, results, gradients of rows and weights."""
    draw = np.random.default_rng(3)
    scores, out, back, weight = (draw.normal(size=(64, 8)) for _ in range(4))
    chosen = np.arange(64.0)[:, None] % 4 * np.ones((1, 8))
    at = np.arange(64).reshape(8, 8).T.reshape(-1)[:turned]  # first the rows that are looked at
    chosen[at], out[at], back[at] = 9.0, -out[at], -back[at]
    weight = weight + (0.12 * draw.normal(size=(64, 8)) if turned else 0.0)
    made = {"kind": "operation", "module": "moe"}
    after = {"phase": "backward", "kind": "gradient"}
    choices = row(chosen, order=2, name="topk", reads=reads, **made)
    return steps_of(
        [
            row(np.ones((64, 8)), kind="input"),
            row(scores, order=1, name="mm", **made),
            replace(choices, dtype="int64"),
            row(out, order=3, module="moe"),
            row(back * (1 + off), order=4, module="norm", **after),
            row(weight * (1 + off), order=5, name="weight", **{**after, "kind": "weight_grad"}),
        ]
    )


def test_choices_that_rounding_turned_are_left_out_and_a_fault_behind_them_is_not():
    found = difference(chooser(0), chooser(1))
    assert found.agree
    assert max(j.apart.difference for j in found.judged if j.pair.certain) > 0.01
    first = difference(chooser(0), chooser(1, off=0.3)).first
    assert (first.module, first.kind) == ("norm", "gradient")


@pytest.mark.parametrize(("turned", "reads"), [(40, (1,)), (1, ())])
def test_choices_that_rounding_does_not_turn_excuse_nothing(turned, reads):
    """Too many of them are another way to choose; a mask is made of no values."""
    assert difference(chooser(0, reads=reads), chooser(turned, reads=reads)).agree is False


def pooled(turned, off=0.0, loss=0.0):
    """A pool over 512 windows: what it chose, and the gradients of weights before and after it."""
    draw = np.random.default_rng(4)
    scores, chosen, before, after = (draw.normal(size=(64, 8)) for _ in range(4))
    chosen = chosen.round(1)
    chosen[63, 7] += turned  # at no position that is looked at: the norm shows it
    made = {"kind": "operation"}
    grad = {"kind": "weight_grad", "phase": "backward", "name": "weight"}
    choices = row(
        chosen, order=2, name="max_pool2d_with_indices", reads=(1,), module="pool", **made
    )
    error = draw.normal(size=(64, 8)) / 32 if turned else 0.0
    return steps_of(
        [
            row(np.ones((64, 8)), kind="input"),
            row(scores, order=1, name="mm", module="first", **made),
            replace(choices, dtype="int64"),
            row(scores, order=3, module="last"),
            row(after * (1 + loss), order=4, module=None, phase="backward", name="div", **made),
            row(after * (1 + off), order=5, module="last", **{**grad, "name": "last.weight"}),
            row(before + error, order=4, module="first", **{**grad, "name": "first.weight"}),
        ]
    )


def test_a_pool_that_rounding_turns_widens_the_gradients_of_weights_before_it_alone():
    assert 63 * 8 + 7 not in positions((64, 8))
    assert difference(pooled(0), pooled(1)).agree
    assert difference(pooled(0), pooled(1, off=0.02)).first.name == "last.weight"
    assert difference(pooled(0), pooled(1, loss=0.02)).first.op == "div"


def half(model):
    up = model[1].up
    up.forward = lambda x: F.linear(x.half(), up.weight.half(), up.bias.half()).float()


def test_a_layer_in_a_lower_format_than_the_rest_is_named(sound, tmp_path):
    """Its own rounding explains what it returns. The rest in that format, too, is no fault."""
    first = mpdiag.diff(sound, recorded(tmp_path / "run", half, operations=1)).first
    assert (first.module, first.phase) == ("1.up", "forward")


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_clipping_hides_no_factor_of_parts_that_are_accumulated(share, tmp_path):
    sides = []
    for rows in ((16,), (8, 8)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        step, x = torch.optim.SGD(model.parameters(), 0.01), 30 * torch.randn(16, 8)
        with mpdiag.record(model, step, tmp_path / str(len(rows)), trace=True, max_steps=1):
            for part in x.split(rows):
                (model(part).square().mean() / (1 if share == 2.0 else len(rows))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            step.step()
        sides.append(tmp_path / str(len(rows)))
    first = mpdiag.diff(*sides).first
    assert (first is None) is (share == 1.0)
    assert first is None or (first.module, first.phase) == (None, "backward")


def frozen(model):
    model[1].up.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [FAULTS["halved"][0], frozen])
def test_the_gradient_is_named_and_not_the_clipping_that_reads_it(change, tmp_path):
    """With operations the norms of gradients are seen before the gradients."""
    sides = (("a", None), ("b", change))
    first = mpdiag.diff(
        *(recorded(tmp_path / n, c, clip=True, operations=1) for n, c in sides)
    ).first
    assert (first.kind, first.name) == ("weight_grad", "1.up.weight")


def wider(model):
    model[1].wide = model[1].up
    del model[1].up
    model[1].forward = lambda x: x + model[1].down(F.gelu(model[1].wide(model[1].norm(x))))


def test_renamed_modules_are_the_same_ones(sound, tmp_path):
    found = mpdiag.diff(sound, recorded(tmp_path / "run", wider))
    assert found.agree
    assert "1.wide" in {j.pair.a.module for j in found.judged}

    def change(model):
        wider(model)
        model[1].wide.bias.data.add_(0.5)

    first = mpdiag.diff(sound, recorded(tmp_path / "other", change)).first
    assert (first.kind, first.name) == ("weight", "1.wide.bias")


@pytest.mark.parametrize(
    ("old", "new", "value", "first"),
    [
        ("bias.edges", "attention.edges", 2.0, "attention.edges"),
        ("bias.edges", "attention.edges", 3.0, None),  # another parameter of that shape
        ("bias.edges", "attention", 2.0, "attention"),  # it does not lie as deep
        ("kept.edges", "attention.edges", 2.0, "attention.edges"),  # ``kept`` is on both sides
    ],
)
def test_beside_other_parameters_a_renamed_module_has_the_same_values(old, new, value, first):
    def side(module, made, own, begins):
        weights = {"kept.weight": np.ones(8), f"{module}.weight": np.full(8, begins), **own}
        rows = [
            row(some, order=i, kind="weight", name=name, module=None)
            for i, (name, some) in enumerate(weights.items())
        ]
        return steps_of([*rows, row(np.ones(8) * made, order=9, module=module, name="")])

    ours = side(old, 1.0, {"q.weight": np.ones(16), "k.weight": np.ones(16)}, 2.0)
    found = difference(ours, side(new, 2.0, {"qk.weight": np.ones(32)}, value))
    assert (found.first and found.first.module) == first


def test_a_parameter_of_one_side_is_named_before_those_drawn_after_it():
    def side(names, factor):
        about = {"kind": "weight", "name": ""}
        return steps_of(
            [
                row(np.ones(8) * factor, order=i, **{**about, "name": name})
                for i, name in enumerate(names)
            ]
        )

    first = difference(side(["a.weight", "b.weight", "c.weight"], 1.0), side(["a.weight"], 1.0))
    assert first.agree
    first = difference(side(["b.weight", "c.weight"], 1.0), side(["c.weight"], 2.0)).first
    assert (first.module, first.name, first.difference) == ("b", "b.weight", np.inf)


@pytest.mark.parametrize("passed", [True, False])
def test_a_module_that_returns_what_it_was_given_has_no_gradient_of_its_own(passed):
    """Its hook then sees the gradient of all that read it, but not in a compiled graph."""

    def side(factor):
        reads = (0,) if passed else ()
        out = {"module": "net.drop", "reads": reads}
        back = {"phase": "backward", "kind": "gradient"}
        return steps_of(
            [
                row(np.ones(8), kind="operation", module="net", name="mm"),
                row(np.ones(8), order=1, **out),
                row(factor * np.ones(8), order=2, module="net.drop", **back),
                row(np.ones(8), order=3, module="net.first", **back),
            ]
        )

    assert difference(side(1.0), side(2.0)).agree is passed


@pytest.mark.parametrize(
    ("reset", "off", "kind"), [(False, 0.0, None), (False, 0.1, "output"), (True, 0.0, "input")]
)
def test_a_state_that_the_step_before_has_returned_is_no_data(reset, off, kind):
    """As that of a recurrent layer: rounding has moved it, and it moves what follows."""
    state = np.random.default_rng(0).normal(size=(4, 8))

    def side(error, wrong=0.0, forgotten=False):
        about = {"module": "", "name": "output 1"}
        rows = [row(np.zeros((4, 8)), kind="input", module="", order=1)]
        rows.append(replace(row(state + error, order=2, **about), spread=1e-3))
        given = np.zeros((4, 8)) if forgotten else state + error
        later = [replace(row(given, kind="input", module="", order=1), spread=None)]
        later.append(row(state + error + wrong, module="last", order=2))
        return steps_of([*rows, *(replace(r, step=1) for r in later)])

    first = difference(side(0.0), side(1e-4, off, reset)).first
    assert (first and (first.step, first.kind)) == (kind and (1, kind))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_gradient_of_zeros_is_none(value):
    """A compiled graph makes zeros where autograd makes no gradient: of what the loss does not read."""
    made = [row(np.ones(8), module="unread"), row(np.ones(8), module="read", order=1)]
    back = {"kind": "gradient", "phase": "backward"}
    made.append(row(np.ones(8), order=2, module="read", **back))
    lone = row(np.full(8, value), order=3, module="unread", **back)
    for sides in (([], [lone]), ([lone], [])):
        first = difference(*(steps_of([*made, *more]) for more in sides)).first
        assert (first and (first.module, first.op)) == (("unread", "gradient") if value else None)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize(
    ("between", "read", "place"),
    [
        ("", (2, 5), ("", "gradient of encoded")),  # detached in the model, or not any more
        ("encoded", (2, 5), ("encoded", "gradient")),
        ("", (1, 5), ("encoded", "gradient")),  # which has a parameter
    ],
)
def test_a_gradient_that_one_side_has_alone_is_cut_off_behind_what_only_passes_it_on(
    between, read, place, faulty
):
    """As of samples that a coarse network places, where one side is compiled and shows no edit."""
    x = np.arange(1.0, 9.0)
    made = [row(x, kind="weight", order=i, name=f"{m}.w", module=m) for i, m in enumerate("ce")]
    made += [row(x, kind="input", order=2, module="")]
    outputs = [("c", 4, (3,)), ("encoded", 7, (6,)), ("", 8, (7,))]
    made += [row(x, order=order, module=m, reads=reads) for m, order, reads in outputs]
    back = {"kind": "gradient", "phase": "backward"}
    made += [row(x, order=9, module="", **back), row(x, order=11, module="c", **back)]
    about = {"kind": "operation"}
    operations = [row(x, order=3, module="c", name="mul", reads=(0, 2), **about)]
    operations += [row(x, order=5, module=between, name="exp", reads=(4,), **about)]
    operations += [row(x, order=6, module="encoded", name="sin", reads=read, **about)]
    lone = [row(x, order=10, module="encoded", **back)]
    eager = steps_of([*made, *operations, *([] if faulty else lone)])
    hidden = [replace(r, reads=()) for r in made]
    compiled = steps_of([*hidden, *(lone if faulty else [])])
    for sides in ((eager, compiled), (compiled, eager)):
        first = difference(*sides).first
        assert (first.module, first.op) == place


def test_calls_are_counted_within_their_pass():
    """Clipping runs after the backward pass, and belongs to it: its calls begin from 0 again."""
    about = {"kind": "operation", "phase": "backward", "name": "mul", "module": None}
    rows = [row(np.ones(4), order=0, **about), row(np.ones(()), order=1, **about)]
    assert [len(t.pieces) for t in steps_of(rows)[0]] == [1, 1]


def test_a_norm_says_nothing_where_most_positions_are_zero():
    sparse = np.zeros(64)
    sparse[:4] = 1e-5
    assert apart((sparse, 1.0), (sparse, 1.001), 0.0, 3072).ratio == 0.0
    dense = np.full(64, 1e-5)
    assert apart((dense, 1.0), (dense, 1.001), 0.0, 3072).ratio > 1.0
    assert apart((dense, 1.0), (dense, 1.0 + 5e-6), 0.0, 3072).ratio < 1.0  # FP32 adds it up


def test_a_value_that_is_not_a_number_is_seen_where_nobody_looked():
    dense = np.full(64, 1e-5)
    assert apart((dense, math.nan), (dense, 1.0), 0.0, 3072).difference == math.inf
    assert apart((dense, math.nan), (dense, math.nan), 0.0, 3072).ratio == 0.0
    assert apart((dense, math.inf), (dense, 1.0), 0.0, 3072).ratio == 0.0  # what fills masks


@pytest.mark.parametrize("sort", [True, False])
def test_what_each_rank_sorts_for_itself_is_judged_by_what_comes_of_it(sort):
    """As lengths of sentences, for recurrences over packed ones."""
    batch = np.random.default_rng(0).normal(size=(8, 4))

    def side(parts):
        found = []
        for i, part in enumerate(parts):
            found += [row(part, i, kind="input"), row(part, i, order=3, module="enc")]
            about = {"kind": "operation", "module": "enc", "name": "sort" if sort else "neg"}
            numbers = row(part[:, 0].argsort(), i, order=1, **about)
            found += [replace(numbers, dtype="int64")]
            found += [row(part[part[:, 0].argsort()], i, order=2, module="enc.lstm")]
        return steps_of(found)

    found = difference(side([batch]), side([batch[:4], batch[4:]]))
    assert found.agree is sort


def test_why_a_side_has_no_operations_is_said_without_advice():
    reason = {"reason": "the model is compiled", "fix": "record the eager one"}
    assert _missing("a", [], {"operations": reason}) == ["operations of a: the model is compiled"]
    assert _missing("a", [], {}) == ["operations of a: none were recorded"]


TF32 = {  # whether the backend may round, how far the product is apart: whether they agree
    ("tf32", 3e-4): True,
    ("tf32", 0.1): False,
    ("", 3e-4): False,
}


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize(("allowed", "off"), TF32)
def test_rounding_operands_to_tf32_is_explained_where_the_backend_may(allowed, off, twin):
    """By the twin that moves them so, or by the other side's, widened. What is made of it follows."""
    draw = np.random.default_rng(8)
    values, error = draw.normal(size=(2, 8, 8))
    made = {"kind": "operation", "name": "addmm"}

    def side(form, off):
        own = 1e-7 if not form else 7e-4 if twin else None
        some = values * (1 + off * error)
        rows = [replace(row(some, order=1, **made), operand_format=form), row(some, order=2)]
        return steps_of([row(values, kind="input"), *(replace(r, spread=own) for r in rows)])

    found = difference(side("", 0.0), side(allowed, off))
    assert found.agree is TF32[allowed, off]
    assert found.agree or (found.first.op, found.first.module) == ("addmm", "layer")


def test_where_tf32_is_allowed_is_said(sound, tmp_path, monkeypatch):
    says = lambda func, _: "tf32" if func.overloadpacket.__name__ == "mm" else ""  # noqa: E731
    monkeypatch.setattr("mpdiag.recording.operations.operand_format", says)
    allowed = recorded(tmp_path / "run")
    found = mpdiag.diff(sound, allowed)
    assert found.environment == ["FP32 products of B may use TF32"]
    said = difference_lines(found, sound, allowed)[1]
    assert "Environment: FP32 products of B may use TF32." in said
    assert mpdiag.diff(allowed, sound).environment == ["FP32 products of A may use TF32"]
    assert mpdiag.diff(sound, sound).environment == []


def rectified(off=0.0, behind=0.0, dtype="float32", reads=(2, 3), channels=512):
    """A ReLU, of 16,384 values or fewer, its gradient, and a sum of this that no BF16 twin shows."""
    draw = np.random.default_rng(9)
    values, back, summed = draw.normal(size=(3, 8, 8))
    error = draw.normal(size=(8, 8))
    made, after = {"kind": "operation"}, {"kind": "operation", "phase": "backward"}
    shape = (8, channels, 2, 2)
    rows = [
        row(np.ones((8, 8)), kind="input"),
        row(values + off * error, order=1, shape=shape, name="convolution", **made),
        row(values, order=2, shape=shape, name="relu", reads=(1,), **made),
        row(back, order=3, module="loss", name="mm", **after),
        row(back, order=4, shape=shape, name="threshold_backward", reads=reads, **after),
        row(summed + behind * error, order=5, module="norm", name="sum", reads=(4,), **after),
    ]
    low = dtype == "bfloat16"
    return steps_of([replace(r, dtype=dtype, spread=None if low else 1e-7) for r in rows])


@pytest.mark.parametrize(
    ("behind", "reads", "agree"), [(0.12, (2, 3), True), (0.4, (2, 3), False), (0.12, (3,), False)]
)
def test_signs_that_rounding_turned_widen_what_is_behind_a_relu(behind, reads, agree):
    """Values 2 % apart have another sign in 0.6 % of all places: that moves a sum by 11 %."""
    low = rectified(0.02, behind, "bfloat16", reads)
    found = difference(rectified(reads=reads), low)
    assert found.agree is agree
    assert agree or (found.first.module, found.first.op) == ("norm", "sum")


@pytest.mark.parametrize(
    ("channels", "off", "agree"),
    [(512, 0.02, False), (64, 0.02, True), (4, 0.02, True), (4, 0.002, False)],
)
def test_signs_that_a_twin_shows_or_no_rounding_turns_widen_nothing(channels, off, agree):
    """FP32 turns none of 16,384 signs. BF16 turns 104, which its twin shows, 13, 0.8 or 0.08.

    Of 128 signs a single one that turns moves a sum by 12.5 %.
    """
    assert difference(rectified(), rectified(1e-7, 1e-3)).first.op == "sum"
    low = rectified(off, 0.12, "bfloat16", channels=channels)
    twin = {0: [replace(t, spread=0.01) for t in low[0]]}
    assert difference(rectified(channels=channels), twin).agree is agree


def in_a_format(bits, size=64, cancels=False, factor=1.375):
    """An output in BF16, rounded to some bits of mantissa under a scale; without a twin."""
    made = np.random.default_rng(4).normal(size=(8, size // 8))
    mantissa, exponent = np.frexp(made)
    fine = np.ldexp(np.rint(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    made = factor * (np.rint(made * 8) / 8 if cancels else fine)
    rows = [row(np.ones((8, 8)), kind="input"), row(made, order=1, module="up")]
    return steps_of([replace(r, dtype="bfloat16", spread=None) for r in rows])


@pytest.mark.parametrize(
    ("low", "bits", "side"),
    [
        ({"bits": 3}, 6, "B"),
        ({"bits": 2}, 6, "B"),
        ({"bits": 3}, 3, ""),  # both
        ({"bits": 4}, 6, ""),  # finer than FP8
        ({"bits": 3, "size": 16}, 6, ""),  # too few values
        ({"bits": 3, "cancels": True}, 6, ""),  # multiples of an eighth
        ({"bits": 3, "factor": 1.5}, 6, ""),  # further apart than FP8 rounds
    ],
)
def test_values_of_fp8_inside_the_tolerance_of_bf16_are_seen(low, bits, side):
    size = low.get("size", 64)
    a, b = in_a_format(bits, size), in_a_format(**low)
    found = difference(a, b)
    assert ("" if found.first is None else found.first.fp8) == side
    assert found.agree is not bool(side)
    assert all(j.apart.difference < 0.1 for j in found.judged)
    said = "B's values there have 8 mantissas at most, as FP8's; the other's have more."
    assert (said in difference_lines(found, Path("a"), Path("b"))[1]) is bool(side)
    turned = difference(b, a).first
    assert ("" if turned is None else turned.fp8) == side.replace("B", "A")


@pytest.mark.parametrize(
    ("shape", "factor", "differs"),
    [
        ((16, 24, 1, 1), 1.0, False),  # a convolution of one pixel
        ((1, 16, 24), 1.0, False),
        ((24, 16), 1.0, False),
        ((16, 4, 6), 1.0, False),
        ((16, 24, 1, 1), 1.1, True),
        ((24, 16), 1.1, True),
        ((16, 12), 1.0, True),  # half of it
    ],
)
@pytest.mark.parametrize("kind", ["weight", "input"])
def test_weights_and_inputs_of_another_shape_are_compared(kind, shape, factor, differs):
    """By their values if only sizes of 1 differ, else by their norms."""
    values = np.random.default_rng(0).normal(size=(16, 24))

    def side(x, shape):
        x = x.T if shape == (24, 16) else x[:, :12] if shape == (16, 12) else x
        x = x.reshape(shape)
        taken = row(x.reshape(-1)[positions(shape)], shape=shape, kind=kind, name="layer.w")
        made = row(np.ones(64), module="last", order=1)
        return steps_of([replace(taken, norm=float(np.linalg.norm(x)), spread=None), made])

    first = difference(side(values, (16, 24)), side(factor * values, shape)).first
    assert (first and first.kind) == (kind if differs else None)


def edited(*rows, code="", step=0):
    """A side whose code reads so; the last row is the loss."""
    begun = row(np.ones(()), kind="operation", name="ones_like", phase="backward", module=None)
    last = max(r.order for r in rows)
    begun = replace(begun, order=last + 1, reads=(last,))
    before = row(np.ones((8, 8)), module="before", code=code, order=-1)
    return steps_of([replace(r, step=step) for r in (before, *rows, begun)])


def exchanged(kind="output", made=1.0, off=0.0, code="y = f(x.mT)"):
    """Both sides of a tensor that one holds with exchanged axes, and what is made of it."""
    values = np.random.default_rng(0).normal(size=(8, 8))

    def side(x, made, code):
        name = "turned.w" if kind == "weight" else ""
        x = row(x, module="turned", kind=kind, name=name, order=1)
        made = row(made * np.ones((8, 8)), module="last", order=2, reads=(1,))
        return edited(x, made, code=code)

    return difference(side(values, 1.0, "y = f(x)"), side((1 + off) * values.T, made, code))


EXCHANGED = {
    "as the channels of a picture": ({}, True),
    "in the model's input": ({"kind": "input"}, True),
    "in the model's input, with other values": ({"kind": "input", "off": 0.01}, False),
    "of a square weight": ({"kind": "weight"}, False),
    "of the same code": ({"code": "y = f(x)"}, False),
    "and what reads it is off": ({"made": 1.1}, False),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_exchanged_axes_of_one_length_are_a_fault_where_what_reads_them_shows_it(name):
    options, agree = EXCHANGED[name]
    found = exchanged(**options)
    assert (found.first and found.first.module) == (None if agree else "turned")


@pytest.mark.parametrize(("apart", "agree"), [(2e-5, False), (1e-3, True)])
def test_what_edited_code_hands_on_is_a_fault_if_it_may_be_hidden_behind(apart, agree):
    """At 3 times its tolerance, not at 100 times: that would show."""

    def side(x, code):
        read = row(np.ones(64), module="last", order=2, reads=(1,))
        return edited(row(x * np.ones(64), module="block", order=1), read, code=code)

    found = difference(side(1.0, "block(x)"), side(1.0 + apart, "block(x, y)"))
    assert found.agree is agree
    assert sum(j.passed for j in found.judged) == agree


@pytest.mark.parametrize(("steeper", "first"), [(1.0, None), (1.1, "block")])
def test_a_gradient_inside_edited_code_counts_if_all_gradients_are_not_as_large(steeper, first):
    """Parameters are merged: none of their gradients can be compared."""
    values = np.random.default_rng(0).normal(size=64)

    def side(x, names, size, code):
        grads = [
            row(size * some, kind="weight_grad", phase="backward", name=f"{n}.weight", order=9 + i)
            for i, (n, some) in enumerate(zip(names, np.split(values, len(names)), strict=True))
        ]
        known = row(np.ones(8), kind="weight_grad", phase="backward", name="head.weight", order=8)
        inside = row(x, kind="operation", name="mul", phase="backward", module="block", order=5)
        read = row(np.ones(64), phase="backward", module="first", order=6, reads=(5,))
        steps = edited(row(np.ones(64), module="last", order=2), code=code)
        more = steps_of([inside, read, known, *grads])
        return {0: [*steps[0], *more[0]]}

    ours = side(values, ("block.q", "block.k"), 1.0, "q(x), k(x)")
    found = difference(ours, side(-values, ("block.qk",), steeper, "qk(x)")).first
    assert (found and found.module) == first


def test_what_is_apart_at_few_positions_is_a_fault_if_what_reads_it_shows_it():
    """A concatenation of one rounded column in eight: a twin leaves that out, or not."""
    x = np.ones((16, 16))
    other = x.copy()
    other[:, :2] += np.tile([0.01, 0.0], (16, 1)) + np.tile([0.0, 0.005], (16, 1))

    def side(x, made):
        read = row(np.full(64, made), module="last", order=1, reads=(0,))
        return steps_of([row(x, module="joined"), read])

    for made, first in ((1.0, None), (1.1, "joined")):
        found = difference(side(x, 1.0), side(other, made)).first
        assert (found and found.module) == first


@pytest.mark.parametrize(("more", "kind"), [(True, None), (False, "output")])
def test_of_a_module_that_returns_more_on_one_side_the_second_tensor_may_be_another(more, kind):
    """As of packed sequences, which have the sizes of their batches between values and state."""
    x, state = np.ones((4, 8)), np.arange(32.0).reshape(4, 8)

    def side(outputs):
        rows = [
            row(values, module="rnn", name=f"output {i}" if i else "", order=i)
            for i, values in enumerate(outputs)
        ]
        shown = row(x, kind="operation", name="exp", module="last", order=9)  # not compiled
        return steps_of([*rows, shown])

    first = difference(side([x, state]), side([x, state + 1, state][: 2 + more])).first
    assert (first and first.kind) == kind


class Pixels(nn.Module):
    """Two layers on the channels of small pictures, which are last or first inside."""

    def __init__(self, first, turned=False):
        super().__init__()
        layer = (lambda: nn.Conv2d(8, 8, 1)) if first else lambda: nn.Linear(8, 8)
        self.up, self.down, self.last = layer(), layer(), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.first, self.turned = first, turned

    def forward(self, x):
        scale = self.scale[:, None, None] if self.first else self.scale
        y = x if self.first else x.permute(0, 2, 3, 1)
        y = self.down(scale * F.gelu(self.up(y)))
        x = x + (y if self.first else y.permute(0, 3, 1, 2))
        return self.last(x.transpose(1, 2).mean((2, 3)) if self.turned else x.mean((2, 3)))


@pytest.mark.parametrize("turned", [False, True])
def test_channels_first_and_last_agree_and_a_wrong_transposition_does_not(turned, tmp_path):
    """Pictures of 8 channels, rows and columns, so that shapes show nothing."""
    for first in (False, True):
        torch.manual_seed(0)
        model = Pixels(first, turned and first)
        step = torch.optim.AdamW(model.parameters(), 0.01)
        with mpdiag.record(model, step, tmp_path / str(first), trace=True, max_steps=2):
            for _ in range(2):
                F.cross_entropy(model(torch.randn(8, 8, 8, 8)), torch.arange(8) % 4).backward()
                step.step()
                step.zero_grad()
    found = mpdiag.diff(tmp_path / "False", tmp_path / "True")
    assert (found.agree, found.last_step) == ((False, 0) if turned else (True, 1))
    said = [m for m in found.missing if m.endswith("without effect on what is made of them")]
    assert len(said) == (not turned)
    again = mpdiag.diff(tmp_path / "True", tmp_path / "True")
    assert not again.missing


@pytest.mark.parametrize(("off", "named"), [(1e-4, None), (0.1, "turned")])
def test_weights_that_rounding_moved_are_no_fault_of_exchanged_axes_before(off, named):
    """A later step: what is made of the tensor is off by as much as the weights may move it, or more."""
    values = np.random.default_rng(0).normal(size=(8, 8))

    def side(x, weight, made, code):
        rows = [row(np.full(64, weight), kind="weight", name="w", module="")]
        rows.append(row(x, module="turned", order=1))
        rows += [row(np.ones(8), module=f"m{i}", order=2 + i) for i in range(3)]
        made = row(made * np.ones((8, 8)), module="last", order=5, reads=(0, 1))
        return edited(*rows, made, code=code, step=1)

    ours = side(values, 1.0, 1.0, "f(x)")
    first = difference(ours, side(values.T, 1.0 + 1e-4, 1.0 + off, "f(x.mT)")).first
    assert (first and first.module) == named


DRAWN = {n: np.random.default_rng(n).normal(size=(8, 8)) for n in range(6)}


def parameters(**drawn):
    """The weights of a side: matrices by a number, and a norm's ones by 0; the names have dots."""
    rows = [
        row(np.ones(8) if n < 0 else DRAWN[n], kind="weight", name=name.replace("_", "."), order=i)
        for i, (name, n) in enumerate(drawn.items())
    ]
    return steps_of(rows)


@pytest.mark.parametrize(
    ("ours", "theirs", "pairs"),
    [
        # In another order, and not as deep.
        (
            {"a_q_weight": 0, "a_k_weight": 1, "a_own_weight": 2},
            {"k_weight": 1, "b_x_q_weight": 0},
            {"k.weight": "k.weight", "b.x.q.weight": "b.x.q.weight"},
        ),
        # Ones lie beside the same matrices.
        (
            {"a_0_norm_weight": -1, "a_0_up_weight": 0, "a_1_norm_weight": -1, "a_1_up_weight": 1},
            {"b_0_up_weight": 0, "b_0_norm_weight": -1, "b_1_up_weight": 1, "b_own_weight": 2},
            {f"b.{n}.weight": f"b.{n}.weight" for n in ("0.norm", "0.up", "1.up")},
        ),
        # Two norms beside it are no longer the same ones if there is one.
        (
            {"a_0_norm_weight": -1, "a_0_last_weight": -1, "a_0_up_weight": 0},
            {"b_0_up_weight": 0, "b_0_norm1_weight": -1},
            {"b.0.up.weight": "b.0.up.weight"},
        ),
        # Nothing lies beside them.
        (
            {"a_norm_weight": -1, "a_last_weight": -1, "a_up_weight": 0, "a_own_weight": 2},
            {"b_scale_weight": -1, "b_end_weight": -1, "b_down_weight": 1},
            {},
        ),
        # A new name is another module's, with other values.
        (
            {"convs_0_weight": 0, "convs_1_weight": 1, "norms_0_weight": -1},
            {"mlp_0_weight": 0, "mlp_1_weight": -1, "mlp_2_weight": 1, "mlp_own_weight": 2},
            {f"mlp.{n}.weight": f"mlp.{n}.weight" for n in (0, 1, 2)},
        ),
    ],
)
def test_renamed_parameters_are_told_by_drawn_values_and_by_what_lies_beside_them(
    ours, theirs, pairs
):
    a, b = parameters(**ours), parameters(**theirs)
    named = {t.name: t.name for t in renamed(a, b)[0]}
    found = {name: name for name in named if name in {t.name for t in b[0]}}
    assert found == pairs


def test_a_parameter_of_another_size_under_the_same_name_is_a_difference():
    sides = (parameters(up_weight=0), steps_of([row(np.ones(9), kind="weight", name="up.weight")]))
    first = difference(*sides).first
    assert (first.kind, first.name) == ("weight", "up.weight")


@pytest.mark.parametrize(("off", "agree"), [(1e-7, True), (1e-6, False)])
def test_data_may_differ_by_two_ulps(off, agree):
    def side(x):
        return steps_of([row(x * np.ones((8, 8)), kind="input", module=""), row(np.ones(64))])

    assert difference(side(1.0), side(1.0 + off)).agree is agree


@pytest.mark.parametrize(("step", "agree"), [(0, False), (1, True)])
def test_equal_values_round_alike_until_a_step_has_moved_them(step, agree):
    """The first step's twin shows nothing of a kernel of one ninth each."""

    def side(x):
        rows = [row(np.ones(9), module="before"), row(x * np.ones(9), module="norm", order=1)]
        rows.append(row(np.ones(64), module="last", order=2))
        return steps_of([replace(r, spread=0.0, step=step) for r in rows])

    assert difference(side(1.0), side(1.0 + 1e-7)).agree is agree


@pytest.mark.parametrize(("read", "first"), [(1e-4, None), (0.1, "chosen")])
def test_at_a_later_step_an_uncertain_difference_counts_as_much_as_what_confirms_it(read, first):
    """What confirms it may be off by what the weights have moved."""

    def side(x, own, weight, made):
        rows = [row(np.full(64, weight), kind="weight", name="w", module="")]
        some = {"kind": "operation", "module": "chosen"}
        rows.append(row(x * np.ones(64), name="mul", order=1, **some))
        rows.append(row(np.ones(64), name=own, order=2, **some))
        rows.append(row(made * np.ones(64), module="last", order=3, reads=(0, 1)))
        rows += [row(np.ones(8), module=f"m{i}", order=4 + i) for i in range(3)]
        return steps_of([replace(r, step=1) for r in rows])

    found = difference(side(1, "exp", 1.0, 1.0), side(2, "log", 1.0 + 1e-4, 1.0 + read)).first
    assert (found and found.module) == first


@pytest.mark.parametrize("divided", [True, False])
def test_a_loss_that_divides_by_its_rows_last_may_be_one_of_parts(divided, tmp_path):
    """Its backward pass multiplies rows by the part's share, and divides by their number afterwards."""
    for parts in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        step = torch.optim.SGD(model.parameters(), 0.01)
        x, y = torch.randn(32, 8), torch.rand(32)
        with mpdiag.record(model, step, tmp_path / str(parts), trace=True, max_steps=1):
            for some, of in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.binary_cross_entropy_with_logits(model(some)[:, 0], of)
                (loss / (parts if divided else 1)).backward()
            step.step()
    assert mpdiag.diff(tmp_path / "1", tmp_path / "2").agree is divided


@pytest.mark.parametrize(("apart", "step", "agree"), [(9e-6, 0, False), (9e-6, 1, True)])
def test_a_later_step_may_come_further_apart_than_the_first_ones_twin(apart, step, agree):
    def side(x):
        values = x * np.random.default_rng(0).normal(size=256)
        rows = [row(values, module="m"), row(values, module="last", order=1)]
        return steps_of([replace(r, step=step) for r in rows])

    assert difference(side(1.0), side(1.0 + apart)).agree is agree


class Stored(nn.Module):
    """A product with a weight that is stored as it is or transposed."""

    def __init__(self, turned, factor=1.0):
        super().__init__()
        w = factor * torch.randn(16, 24)
        self.w, self.turned = nn.Parameter(w.T.contiguous() if turned else w), turned

    def forward(self, x):
        return x @ (self.w.T if self.turned else self.w)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_what_has_another_layout_is_said_to_agree_by_its_norm_if_it_does(factor, tmp_path):
    for turned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Stored(turned, factor if turned else 1.0), nn.Linear(24, 4))
        step = torch.optim.SGD(model.parameters(), 0.01)
        with mpdiag.record(model, step, tmp_path / str(turned), trace=True, max_steps=1):
            F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4).backward()
            step.step()
    found = mpdiag.diff(tmp_path / "False", tmp_path / "True")
    assert found.agree is (factor == 1.0)
    said = [m for m in found.missing if m.endswith("in another layout: their norms agree")]
    assert said == (["values of 2 tensors in another layout: their norms agree"] * found.agree)
