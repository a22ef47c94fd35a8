"""The study of compiled against eager finds a planted fault, and takes rounding for rounding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from studies import compiled as study

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    """Two layers and a GELU."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        """(N, 16) to a loss."""
        return self.down(F.gelu(self.up(x))).square().mean()


@pytest.fixture(scope="module")
def comparison():
    torch.manual_seed(0)
    return study.Comparison(*study.captured(Net(), torch.randn(8, 16)))


def test_a_planted_fault_is_found_at_its_operation(comparison):
    first = study.first_beyond(comparison.of(study.planted, comparison.names))
    assert first.name.startswith("gelu")
    assert "F.gelu(self.up(x))" in first.where
    assert first.ratio > 10


def test_another_order_of_a_sum_is_rounding(comparison):
    """A product whose terms are added the other way round differs, and no more than rounding does."""
    up = next(n for n in comparison.graph.graph.nodes if study.name_of(n) == "linear")

    def reordered(graph, names, arguments):
        values = {}

        class Reordered(torch.fx.Interpreter):
            def run_node(self, n):
                if n.name == up.name:
                    x, w, b = self.fetch_args_kwargs_from_env(n)[0]
                    out = F.linear(x.flip(1), w.flip(1)) + b
                else:
                    out = super().run_node(n)
                values[n.name] = out
                return out

        loss = Reordered(graph).run(*arguments)[0]
        return [values[n].detach() for n in names], study.gradients(loss, arguments)

    found = comparison.of(reordered, comparison.names)
    assert any(d.difference > 0 for d in found)
    assert study.first_beyond(found) is None


def test_the_graph_run_again_is_the_same(comparison):
    found = comparison.of(study.compiled_by("aot_eager"), comparison.names)
    assert [d.difference for d in found] == [0.0] * len(found)
    kinds = [d.kind for d in found]
    assert kinds == ["value"] * len(comparison.names) + ["gradient"] * 4
    assert [d.name for d in found if d.kind == "gradient"][-1].startswith("up")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ulp_is_the_gap_above(dtype):
    x = torch.tensor([1.0, -1.0, 1.5, 2.0, 0.0, math.inf, math.nan], dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert study.ulp(x).tolist() == pytest.approx(
        [eps, eps, eps, 2 * eps, torch.finfo(dtype).smallest_normal * eps, 0.0, 0.0], rel=1e-3
    )


def test_distances_of_what_is_not_finite():
    one = torch.tensor([1.0, math.inf, math.nan])
    assert study.distance(one, one.clone()) == 0.0
    assert study.distance(one, torch.tensor([1.0, math.inf, 0.0])) == math.inf
    assert study.distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])) == 5.0
