"""What a script does to gradients before its optimizer's step: what is said, and what must not be."""

import pytest
import torch
from audited_trainings import model
from script_processes import scripts
from support import NEEDS_GLOO
from torch import nn

import mpdiag
from mpdiag.numerics.sums import sum_bound
from mpdiag.precision.between import between
from mpdiag.runs.operations import Operation, TensorRecord

CLIPPED, ADDED = "precision-clipped-scaled", "precision-narrow-collective"
SCALE = 256.0


def norm(net, limit=0.01, **how):
    nn.utils.clip_grad_norm_(net.parameters(), limit, **how)


def value(net):
    nn.utils.clip_grad_value_(net.parameters(), 0.5)


def by_hand(net):
    total = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    for p in net.parameters():
        p.grad.mul_((0.01 / total).clamp(max=1.0))


def mean(net):
    for p in net.parameters():
        p.grad.div_(4)


def weighted(net):
    """A mean over tokens, whose number is a tensor; and a norm that is logged alone."""
    nn.utils.get_total_norm([p.grad for p in net.parameters()])
    for p in net.parameters():
        p.grad.mul_(1 / torch.tensor(12.0))


def trained(folder, changes, *, unscales=False, enabled=True, steps=1):
    """Record a training with a scaler that changes its gradients before the step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=enabled)
    norms = []
    with mpdiag.record(net, optimizer, folder, every=1, operations=steps):
        for _ in range(steps):
            with torch.autocast("cpu", torch.float16):
                loss = net(torch.randn(12, 8)).float().square().mean()
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))
            changes(net)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norms, [f for f in mpdiag.audit(folder).findings if f.code == CLIPPED]


@pytest.mark.parametrize("clips", [
    norm, lambda net: norm(net, foreach=False), by_hand,
], ids=["foreach", "one by one", "by hand"])  # fmt: skip
def test_clipping_scaled_gradients_is_measured(tmp_path, clips):
    norms, (finding,) = trained(tmp_path / "run", clips)
    assert finding.evidence["scale"] == SCALE
    assert finding.evidence["norm"] == pytest.approx(norms[0] / SCALE, rel=1e-5)
    assert finding.evidence["left"] == pytest.approx(0.01 / SCALE, rel=1e-3)
    assert finding.evidence["where"].startswith("tests/precision/test_between.py:")


def test_clipping_scaled_values_is_said(tmp_path):
    _, (finding,) = trained(tmp_path / "run", value)
    assert finding.evidence["left"] == 0.5 / SCALE


@pytest.mark.parametrize(("changes", "how"), [
    (norm, {"unscales": True}),
    (value, {"unscales": True}),
    (norm, {"enabled": False}),
    (lambda net: norm(net, 1e9), {}),
    (mean, {}),
    (weighted, {}),
    (lambda net: None, {}),
], ids=["norm", "value", "no scaler", "large limit", "mean", "weighted", "nothing"])  # fmt: skip
def test_look_alikes_are_not(tmp_path, changes, how):
    assert trained(tmp_path / "run", changes, **how)[1] == []


def collective(dtype="bfloat16", phase="update", ranks=4):
    """A recorded sum over ranks of one element, the norm of something."""
    make = {"step": 3, "rank": 0, "overload": "default", "module": None, "node": "", "forward": -1}
    place = {"file": "train.py", "line": 7, "code": "", "function": ""}
    of = TensorRecord("self", 1, -1, "", (8,), dtype)
    total = TensorRecord("out", 2, 0, "", (), dtype)
    norm = Operation(index=0, op="linalg_vector_norm", phase="update", inputs=(of,),
                     outputs=(total,), **make, **place)  # fmt: skip
    adds = Operation(index=1, op="allreduce_", phase=phase, inputs=(total,),
                     facts={"ranks": ranks}, **make, **place)  # fmt: skip
    return [norm, adds]


def test_a_norm_that_is_added_in_half_precision_is_said_once():
    (finding,) = between([*collective(), *collective()])
    assert (finding.code, finding.severity) == (ADDED, "warning")
    assert finding.evidence["bound"] == sum_bound("bfloat16", 4)
    assert finding.message.startswith("train.py:7 adds a gradient norm over 4 ranks in BF16")


@pytest.mark.parametrize("how", [
    {"dtype": "float32"}, {"phase": "forward"}, {"ranks": 1},
])  # fmt: skip
def test_what_is_no_sum_of_gradients_in_half_precision_is_not(how):
    assert list(between(collective(**how))) == []


@NEEDS_GLOO
def test_sums_over_ranks_are_seen_where_they_are_called(fork_server, tmp_path):
    (tmp_path / "script.py").write_text(scripts(__file__)["on ranks"])
    words = ("record", "--out", "run", "--operations", "2", "--", "script.py")
    ranks = fork_server.ranks("mpdiag", *words, cwd=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    found = [f for f in mpdiag.audit(tmp_path / "run").findings if f.code == ADDED]
    assert {f.evidence["where"]: f.severity for f in found} == {
        "script.py:14": "warning",
        "script.py:15": "info",
    }
    assert {f.evidence["ranks"] for f in found} == {2}
    assert "adds 64 elements over 2 ranks in BF16" in found[1].message
