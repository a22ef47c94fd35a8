"""Tensors of every kind: counted as they are, or left out with a reason."""

from types import SimpleNamespace

import pytest
import torch
from recorded import Wrapped, around_linear, not_recorded, recorded_steps, rows
from recorded_steps import record_steps
from torch import nn

import mpdiag
from mpdiag.recording.counting import tensors
from mpdiag.recording.counting.host import HostRows
from mpdiag.recording.counting.tensors import Countable, countable

FLOATING = sorted(
    {
        str(dtype)
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    }
)


class Odd(nn.Module):
    """Returns a tensor of an unusual kind; has a weight, which is 0-dimensional."""

    def __init__(self, returns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.returns = returns

    def forward(self, x):
        return self.returns(x, self.weight)


def fake(x, _w):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x.detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning")
def test_tensors_of_unusual_kinds_are_counted_or_skipped_with_a_reason(tmp_path):
    skipped = {
        "meta": (lambda x, w: x.to("meta"), "meta tensor"),
        "fake": (fake, "fake tensor"),
        "strided": (lambda x, w: torch.nested.nested_tensor([x[0], x[1]]), "nested"),
        "jagged": (
            lambda x, w: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
            "nested",
        ),
        "integers": (lambda x, w: x.long(), "not floating point"),
        "text": (lambda x, w: "text", "returned no tensor"),
    }
    counted = {
        "empty": (lambda x, w: x[:0] * w, 0),
        "scalar": (lambda x, w: x.sum() * w, 1),
        "complex": (lambda x, w: torch.complex(x, x) * w, 80),
        "conjugate": (lambda x, w: (torch.complex(x, x) * w).conj().imag, 40),
        "expanded": (lambda x, w: w.expand(3, 4), 12),
        "transposed": (lambda x, w: (x * w).T, 40),
        "gappy": (lambda x, w: (x * w)[:, ::2], 20),
        "halved": (lambda x, w: (x * w).half(), 40),
        "doubled": (lambda x, w: (x * w).double(), 40),
    }

    def forward(parts, x):
        outputs = {name: part(x) for name, part in parts.items()}
        return sum(outputs[name].abs().sum() for name in counted)

    parts = nn.ModuleDict({n: Odd(f) for n, (f, _) in {**skipped, **counted}.items()})
    recorded_steps(tmp_path / "run", Wrapped(parts, forward), 2)
    reasons = not_recorded(tmp_path / "run")
    for name, (_, reason) in skipped.items():
        assert reason in reasons[f"body.{name}"], name
    for kind in ("activation", "activation_grad"):
        for name, (_, numel) in counted.items():
            found = rows(tmp_path / "run", kind=kind, name=f"body.{name}")
            assert found["numel"].tolist() == [numel] * 2, (kind, name)
    for kind in ("weight", "weight_grad", "update"):
        found = rows(tmp_path / "run", kind=kind, name="body.scalar.weight")
        assert found["numel"].tolist() == [1, 1], kind


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_each_type_that_torch_has_is_counted_or_refused_in_words(name):
    dtype = getattr(torch, name.removeprefix("torch."))
    if name == "torch.float4_e2m1fn_x2":
        assert countable(torch.empty(6, dtype=dtype)) == "two values in a byte"
        return
    ready = countable(torch.ones(12).to(dtype))
    assert isinstance(ready, Countable)
    rows = HostRows()
    rows.count(*ready[:3])
    assert rows.read().counts[0].sum() == (24 if dtype.is_complex else 12)


def test_views_that_turn_signs_are_read_where_they_lie():
    """Magnitudes are counted, so no conjugate and no negative is made."""
    whole = torch.randn(40, dtype=torch.complex64)
    views = whole.conj(), whole.conj().view(4, 10).t(), torch._neg_view(whole.real.contiguous())
    for view in views:
        ready = countable(view)
        assert isinstance(ready, Countable)
        assert ready.shared
        plain = view.resolve_neg().resolve_conj()
        values = torch.view_as_real(plain) if plain.is_complex() else plain
        rows = HostRows()
        rows.count(*ready[:3])
        rows.count(values.reshape(-1).contiguous())
        assert (rows.read().counts[0] == rows.read().counts[1]).all()


def test_types_that_kernels_do_not_read_are_copied_in_portions(monkeypatch):
    """Not all at once, at four times their size."""
    values = torch.randn(3 << 19).to(torch.float8_e4m3fn)
    copied = []
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda t: copied.append(t.numel()) or to_float(t))
    rows = HostRows()
    rows.count(values, 2, 3)
    monkeypatch.undo()
    rows.count(values.float(), 2, 3)
    assert max(copied) <= 1 << 19
    assert (rows.read().counts[0] == rows.read().counts[1]).all()


def test_an_empty_parameter(tmp_path):
    model = around_linear(lambda b, x: b(x).sum() + b.none.sum())
    model.body.none = nn.Parameter(torch.zeros(0, 3))
    recorded_steps(tmp_path / "run", model)
    for kind in ("weight", "weight_grad", "update"):
        assert rows(tmp_path / "run", kind=kind, name="body.none")["numel"].tolist() == [0]


def test_memory_that_was_given_back_is_not_read(tmp_path):
    """An optimizer made after FSDP2's first forward pass holds gathered parameters, freed since."""
    model = nn.Linear(8, 4)
    freed = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    model.gathered = freed
    freed.untyped_storage().resize_(0)
    recorded_steps(tmp_path / "run", model, 2)
    assert "given back" in not_recorded(tmp_path / "run")["gathered"]
    (finding,) = mpdiag.audit(tmp_path / "run").findings
    assert finding.message.startswith("SGD holds 1 parameter without memory")


def test_sparse_gradients_count_their_zeros(tmp_path):
    def loss(model, _step):
        return model(torch.tensor([1, 1, 7])).square().mean()

    model = nn.Embedding(50, 4, sparse=True)
    record_steps(tmp_path / "run", model, loss, make=torch.optim.SparseAdam, rate=1e-3)
    gradient = rows(tmp_path / "run", kind="weight_grad")
    assert (gradient["numel"].item(), gradient["zeros"].item()) == (200, 192)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build has no DTensor")
def test_where_a_distributed_tensor_lies_follows_its_placements(monkeypatch):
    """By the rank's place in the mesh: of copies only the first one counts, sums are each rank's own."""
    import torch.distributed.tensor as distributed
    from torch.distributed.tensor.placement_types import _StridedShard

    class Held:
        def __init__(self, placements, place):
            self.placements = placements
            self.device_mesh = SimpleNamespace(get_coordinate=lambda: place)

        def to_local(self):
            return torch.ones(2)

    monkeypatch.setattr(distributed, "DTensor", Held)
    shard, copy, part = distributed.Shard(0), distributed.Replicate(), distributed.Partial()
    strided = _StridedShard(0, split_factor=2)
    for placements, first, later in [
        ((shard,), "sharded", "sharded"),
        ((strided, shard), "sharded", "sharded"),
        ((copy,), "replicated", "replicated"),
        ((copy, copy), "replicated", "replicated"),
        ((part,), "local", "local"),
        ((part, shard), "local", "local"),
        ((copy, shard), "sharded", "replicated"),
        ((copy, strided), "sharded", "replicated"),
        ((copy, part), "local", "local"),
    ]:
        size = len(placements)
        for place, expected in (([0] * size, first), ([1] + [0] * (size - 1), later)):
            assert tensors.local_part(Held(placements, place))[1] == expected, (placements, place)
