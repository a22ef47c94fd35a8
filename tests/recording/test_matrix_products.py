"""Operands of matrix products as recorded, against the tensors of one layer laid out by hand."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from recorded import Wrapped
from recorded_steps import record_steps
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.recording import matrix_products
from mpdiag.recording.counting.block_depths import count_depths, depths_of
from mpdiag.runs.block_operands import merged

# On a CPU there is a grouped product since it has a name of its own.
WAYS = ("batched", "loop", *(("grouped",) if hasattr(F, "grouped_mm") else ()))


class Grouped(nn.Module):
    """Three experts with tokens of their own, in one of the ways in which models write it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.w = way, nn.Parameter(torch.randn(3, 40, 24))

    def forward(self, x):
        if self.way == "batched":
            return torch.bmm(x.unflatten(0, (3, 6)), self.w).flatten(0, 1)
        if self.way == "grouped":
            return torch._grouped_mm(x, self.w, offs=torch.tensor([5, 5, 18], dtype=torch.int32))
        return torch.cat([part @ self.w[i] for i, part in enumerate(x.split([5, 0, 13]))])


def dense(product, x, w, g, expert=None, call=0):
    """The six operands of y = x · wᵀ."""
    rows = {
        "fprop": (("input", x), ("weight", w)),
        "dgrad": (("grad_output", g), ("weight", w.T)),
        "wgrad": (("grad_output", g.T), ("input", x.T)),
    }
    key = product, call, expert
    return {(*key, gemm, role): m for gemm, pair in rows.items() for role, m in pair}


def linear(model, x, g):
    return dense("linear", x.flatten(0, -2), next(model.parameters()), g.flatten(0, -2))


def halves(model, x, g):
    body = nn.ParameterList([next(model.parameters()).bfloat16()])
    return linear(body, x.bfloat16(), g.bfloat16())


def matmul(model, x, g):
    return dense("matmul", x[0], x[1].T, g)


def experts(model, x, g, dtype=torch.float32):
    ends = [0, 6, 12, 18] if model.way == "batched" else [0, 5, 5, 18]
    found = {}
    for e in range(3):
        some = slice(ends[e], ends[e + 1])
        if some.stop > some.start:
            kind = "grouped" if model.way == "grouped" else "experts"
            found |= dense(kind, x[some], model.w[e].T.to(dtype), g[some], e)
    return found


def unfolded(x, conv):
    """(groups, tokens, features): one matrix for each group."""
    options = conv.dilation, conv.padding, conv.stride
    found = F.unfold(x, conv.kernel_size, *options)  # images, channels · window, places
    return torch.stack([part.mT.flatten(0, 1) for part in found.chunk(conv.groups, 1)])


def tokens(x, groups):
    return torch.stack([p.movedim(1, -1).flatten(0, -2) for p in x.chunk(groups, 1)])


def convolution(model, x, g):
    weight = model.weight.unflatten(0, (model.groups, -1)).flatten(2)
    upward = isinstance(model, nn.ConvTranspose2d)
    few, many = (x, g) if upward else (g, x)
    narrow, wide = tokens(few, model.groups), unfolded(many, model)
    first, second = ("dgrad", "fprop") if upward else ("fprop", "dgrad")
    of_narrow, of_wide = ("input", "grad_output") if upward else ("grad_output", "input")
    rows = {
        (first, of_wide): wide,
        (first, "weight"): weight,
        (second, of_narrow): narrow,
        (second, "weight"): weight.mT,
        ("wgrad", of_narrow): narrow.mT,
        ("wgrad", of_wide): wide.mT,
    }
    return {("convolution", 0, None, *key): m for key, m in rows.items()}


def attention(model, x, g):
    q, k, v = x.unbind(0)
    rows = {
        (0, "fprop", "input"): q,
        (0, "fprop", "weight"): k,
        (0, "dgrad", "weight"): k.mT,
        (0, "wgrad", "input"): q.mT,
        (1, "fprop", "weight"): v.mT,
        (1, "dgrad", "grad_output"): g,
        (1, "dgrad", "weight"): v,
        (1, "wgrad", "grad_output"): g.mT,
    }
    return {("attention", call, None, *rest): m for (call, *rest), m in rows.items()}


CASES = {
    "linear": (lambda: nn.Linear(40, 24), (3, 5, 40), linear),
    "on the left": (
        lambda: Wrapped(nn.Linear(40, 24, bias=False), lambda b, x: (b.weight @ x.T).T),
        (7, 40),
        linear,
    ),
    "autocast": (
        lambda: Wrapped(nn.Linear(40, 24, bias=False), autocast),
        (7, 40),
        halves,
    ),
    "autocast experts": (
        lambda: Wrapped(Grouped("loop"), autocast),
        (18, 40),
        lambda m, x, g: experts(m.body, x.bfloat16(), g.bfloat16(), torch.bfloat16),
    ),
    "matmul": (lambda: Wrapped(nn.Linear(1, 1), lambda _, x: x[0] @ x[1]), (2, 24, 24), matmul),
    "convolution": (
        lambda: nn.Conv2d(4, 6, 3, (2, 1), (1, 2), (1, 2), groups=2),
        (3, 4, 9, 11),
        convolution,
    ),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1), (3, 4, 5, 5), convolution),
    "attention": (
        lambda: Wrapped(nn.Linear(1, 1), lambda _, x: F.scaled_dot_product_attention(*x)),
        (3, 2, 4, 12, 8),
        attention,
    ),
    **{way: (lambda way=way: Grouped(way), (18, 40), experts) for way in WAYS},
    "checkpoint": (
        lambda: Wrapped(nn.Linear(40, 24), lambda b, x: checkpoint(b, x, use_reentrant=False)),
        (7, 40),
        linear,
    ),
    "reentrant": (
        lambda: Wrapped(nn.Linear(40, 24), lambda b, x: checkpoint(b, x, use_reentrant=True)),
        (7, 40),
        linear,
    ),
}


def autocast(body, x):
    with torch.autocast("cpu", torch.bfloat16):
        return body(x)


def operands_of(model, x, folder, count=1, **options):
    """Operands of some steps, and the gradient of the output in the last one."""
    x.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.record(model, optimizer, folder, blocks=True, **options) as recorder:
        for _ in range(count):
            y = model(x)
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
            ((y * g).sum() + sum(0.0 * p.sum() for p in model.parameters())).backward()
            optimizer.step()
    assert recorder.failures == []
    return mpdiag.open_run(folder), g


@pytest.mark.parametrize("name", CASES)
def test_each_operand_is_the_tensor_that_the_product_reads(name, tmp_path):
    torch.manual_seed(0)
    make, shape, laid_out = CASES[name]
    model, x = make(), torch.randn(shape)
    run, g = operands_of(model, x, tmp_path)
    with torch.no_grad():
        expected = laid_out(model, x, g)
    found = {(o.product, o.call, o.expert, o.gemm, o.operand): o for o in run.block_operands()}
    assert set(found) == set(expected)
    for key, matrix in expected.items():
        one = found[key]
        counted, first, maxima = depths_of(count_depths(matrix).numpy())
        assert (one.depths.counts == counted.counts).all(), key
        assert (one.maxima_first, one.maxima) == (first, maxima), key
        assert (one.lines, one.length) == (matrix.shape[:-1].numel(), matrix.shape[-1]), key
        assert one.dtype == str(matrix.dtype).removeprefix("torch.")
        assert (one.elements, one.depths.values, one.sampled) == (
            matrix.numel(),
            matrix.numel(),
            False,
        )
        assert one.steps == (0,)
    for gemm in ("fprop", "dgrad", "wgrad"):  # all three multiply as often
        assert len({o.flops for k, o in found.items() if k[3] == gemm and k[2] is None}) <= 1


def test_flops_and_names(tmp_path):
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Conv2d(1, 4, 3))
    wrapped = Wrapped(model, lambda b, x: b[2](b[:2](x)[None, None]))
    run, _ = operands_of(wrapped, torch.randn(10, 40), tmp_path, count=11, operations=2)
    operands = run.block_operands()
    whole = {o.key: o for o in merged(operands)}
    assert len(whole) == 12 == len(operands) / 2
    for one in whole.values():
        assert one.parameter.endswith(".weight")
        assert one.parameter.startswith(one.module)
        per_step = 2 * 10 * 40 * 24 if one.product == "linear" else 2 * 4 * 9 * (8 * 22)
        assert (one.flops, one.steps) == (2 * per_step, (0, 10))
        tall = 16 if one.operand == "weight" else 1
        pieces = min(8, -(-one.lines // 2 // tall))
        assert one.product != "linear" or len(one.errors[0].tiles) == 2 * pieces
    assert run.meta["blocks"] == {"steps": [0, 10], "reason": "", "not_recorded": []}


def test_a_parameter_that_is_put_in_the_place_of_a_named_one_has_its_name(tmp_path):
    """FSDP2 gathers a parameter into another object before a block or a layer runs."""
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    gathered = {i: nn.Parameter(block[i].weight.detach().clone()) for i in (0, 2)}

    def gather(*_, where):
        for i in where:
            block[i]._parameters["weight"] = gathered[i]

    block.register_forward_pre_hook(partial(gather, where=[0]))
    block[2].register_forward_pre_hook(partial(gather, where=[2]))
    run, _ = operands_of(Wrapped(block, lambda b, x: b(x)), torch.randn(4, 8), tmp_path)
    names = {(o.module, o.parameter) for o in run.block_operands()}
    assert names == {(f"body.{i}", f"body.{i}.weight") for i in (0, 2)}


def test_one_call_of_a_module_is_recorded_and_products_within_it_are_told_apart(tmp_path):
    body = nn.ModuleDict({"a": nn.Linear(8, 8)})
    model = Wrapped(body, lambda b, x: b["a"](b["a"](x)) @ x.mT @ x)
    run, _ = operands_of(model, torch.randn(2, 5, 8), tmp_path)
    calls = {(o.module, o.product, o.call) for o in run.block_operands()}
    assert {(p, c) for _, p, c in calls} == {("linear", 0), ("matmul", 0), ("matmul", 1)}


def test_what_shows_no_operands_is_named(tmp_path):
    model = Wrapped(nn.LSTM(8, 8), lambda b, x: b(x)[0])
    run, _ = operands_of(model, torch.randn(3, 2, 8), tmp_path)
    assert run.block_operands() == []
    (unseen,) = run.meta["blocks"]["not_recorded"]
    assert (unseen["product"], unseen["reason"]) == (
        "mkldnn_rnn_layer",
        "mpdiag does not see into this operation",
    )


def test_of_too_many_operands_some_are_recorded_in_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_products, "MOST", 8)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    run, _ = operands_of(model, torch.randn(2, 4), tmp_path, count=11, operations=2)
    operands = run.block_operands()
    found = {step: {o.key for o in operands if o.steps == (step,)} for step in (0, 10)}
    assert [key[4:] for key in found[0]].count(("fprop", "input")) == 4
    assert all(len(keys) <= 8 for keys in found.values())
    assert found[10] - found[0]
    assert {len(keys) % 2 for keys in found.values()} == {0}  # both operands of a product
    (unseen,) = run.meta["blocks"]["not_recorded"]
    assert "some were recorded in each step" in unseen["reason"]


def test_a_failure_ends_the_measuring_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_products, "measure", Mock(side_effect=RuntimeError("no")))
    loss = lambda model, _: model(torch.randn(2, 8)).sum()  # noqa: E731
    with pytest.warns(RuntimeWarning, match="recording operands of matrix products"):
        run = record_steps(tmp_path, nn.Linear(8, 4), loss, blocks=True)
    assert len(run.meta["failures"]) == 1
    assert run.block_operands() == []
    assert run.operations()
