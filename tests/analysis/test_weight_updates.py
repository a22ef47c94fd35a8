"""Whether FP32 masters are needed: by how far weights go, not by how many updates are rounded away."""

import math
from functools import partial

import made_runs as hand
import numpy as np
import pytest
import torch
from recorded_steps import loss_of_network, record_steps
from row_buffer import UpdateCounts, table_of
from support import network
from torch import nn

import mpdiag
from mpdiag.analysis.format_advice import choose_reduction
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.run_statistics import RunStatistics, keeping_modules, read_statistics
from mpdiag.analysis.weight_updates import NEEDED, analyze_weight_updates
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack
from mpdiag.runs.records import Records

STEPS = 20


def masters_of(updates, size=1000):
    """From (step, name) to an update of all weights by ±Δ, and how many of them FP16 swallows."""
    rows = []
    for step, name, change, swallowed in updates:
        update = UpdateCounts(size, swallowed, swallowed, 0, 0, 10, (size,))
        values = np.asarray(change) * np.ones(size)
        rows.append((step, "update", name, values, {"update": update}))
    statistics = RunStatistics.of(Records.from_table(table_of(rows)))
    return analyze_weight_updates(statistics, FP16)


def following(rates, stands):
    """Updates by these rates; those below ``stands`` are swallowed whole."""
    return [(step, "w", rate, 1000 if rate < stands else 0) for step, rate in enumerate(rates)]


STILL = [(step, "w", 1e-5, 1000) for step in range(STEPS)]
TINY = np.where(np.arange(1000) < 600, 1e-7, 1e-3)
# name: updates, whether masters are needed, and a figure with its bounds
UPDATES = {
    "weights stand still": (STILL, True, "path_stalled", 1 - 1e-6, 1 + 1e-6),
    "many tiny updates beside few that count": (
        [(step, "w", TINY, 600) for step in range(STEPS)], False, "swallowed_share", 0.6, 0.6,
    ),
    "a schedule ends in nothing": (
        following([1e-3 * (1 - step / STEPS) ** 2 for step in range(STEPS)], 5e-5),
        False, "swallowed_share", 0.1001, 1.0,
    ),
    "weights stop halfway": (
        following([1e-3] * 8 + [4e-4] * (STEPS - 8), 5e-4), True, "swallowed_share", 0.6, 0.6,
    ),
    "one small parameter stands still": (
        [(step, name, rate, lost) for name, rate, lost in (("norm.weight", 1e-5, 1000), ("w", 1e-3, 0))
         for step in range(STEPS)], False, "path_stalled", 0.0, math.nextafter(NEEDED, 0.0),
    ),
    "recorded steps stand for those up to the next": (
        [*((step, "w", 1e-3, 0) for step in range(5)),
         *((step, "w", 2e-4, 1000) for step in range(5, 200, 20))],
        True, "path_swallowed", 0.9 * 0.04 / 0.045, 1.1 * 0.04 / 0.045,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UPDATES)
def test_masters_are_needed_where_weights_stand_still_and_would_have_gone_on(case):
    updates, needed, figure, low, high = UPDATES[case]
    masters = masters_of(updates)
    assert masters.needed == needed
    figures = {**masters.evidence, "swallowed_share": masters.swallowed_fraction}
    assert low <= figures[figure] <= high


@pytest.mark.parametrize(("size", "needed"), [(1e-9, True), (1e-3, False)])
def test_weights_that_vanish_need_masters(size, needed, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(size)
    first = {"params": model[0].parameters(), "lr": 0.01 * size**2}

    def optimizer(_parameters, rate):
        return torch.optim.SGD([first, {"params": model[1].parameters()}], rate)

    def loss(model, _step):
        return model(torch.ones(4, 8) / size).square().mean()

    run = record_steps(tmp_path / "run", model, loss, 3, optimizer, 0.05)
    masters = mpdiag.analyze(run).plan.master_weights
    assert (masters.evidence["weights_vanished"] > 0.9) == needed
    if needed:
        assert masters.needed
        assert masters.worst_parameter == "0.weight"
        assert masters.reason.startswith("FP16 rounds 100 % of 0.weight's sum to 0; ")


def test_a_bias_that_is_nothing_beside_what_it_is_added_to_needs_no_masters(tmp_path):
    """A key bias of an attention: softmax takes out what it adds, and only rounding moves it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    bias = model[0].bias
    with torch.no_grad():
        bias.fill_(1e-9)
    others = [p for p in model.parameters() if p is not bias]

    def optimizer(_parameters, rate):
        return torch.optim.SGD([{"params": [bias], "lr": 1e-12}, {"params": others}], rate)

    def loss(model, _step):
        return model(torch.ones(4, 8)).square().mean()

    run = record_steps(tmp_path / "run", model, loss, 3, optimizer, 0.05)
    analysis = mpdiag.analyze(run)
    weights = analysis.layers.of_kind("weight")
    held = weights.select(weights.names == "0.bias").histograms
    assert held.absmax.max() < 2.0**-25  # FP16 makes it 0
    masters = analysis.plan.master_weights
    assert masters.evidence["weights_vanished"] == 0
    assert not masters.needed


def record(folder, make=torch.optim.Adam, rate=1e-3):
    return record_steps(folder, network(), loss_of_network, 3, make, rate, every=1)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_estimate_is_about_what_autograd_keeps(tmp_path, in_place):
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(in_place)]
    model = nn.Sequential(*layers, nn.Identity(), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 3, 8, 8)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            held, kept = kept, {}
    for parameter in model.parameters():
        held.pop(parameter.data_ptr(), None)
    run = mpdiag.open_run(tmp_path / "run")
    estimated = 4 * read_statistics(run).activations_per_step()
    assert sum(held.values()) == pytest.approx(estimated, rel=0.1)


def test_activations_are_those_of_one_device(tmp_path):
    """Each of two ranks keeps its own part of the batch, and no other's."""
    alone, both = (
        mpdiag.open_run(hand.write_run(tmp_path / str(ranks), world_size=ranks)) for ranks in (1, 2)
    )
    held = read_statistics(both).activations_per_step()
    assert held == read_statistics(alone).activations_per_step() > 0
    assert held == RunStatistics(both.pieces, 0, keeping_modules(both)).activations_per_step()


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (partial(torch.optim.SGD, momentum=0.9), 1)],
)
def test_the_baseline_counts_weights_gradients_states_and_activations(tmp_path, optimizer, states):
    run = record(tmp_path / "run", optimizer, 0.1)
    plan = mpdiag.analyze(run).plan
    levels = {a.level: a for a in plan.levels}
    assert (list(levels), plan.level) == (["O0", "O1", "O2", "O3"], "O1")  # as they are to be tried
    assert all(a.reason for a in plan.levels)
    weights = sum(p.numel() for p in network().parameters())
    # Convolution and batch norm, whose output the ReLU's replaces and flattening shares; linear.
    activations, output = 8 * (2 * 4 * 36 + 10), 8 * 10
    assert read_statistics(run).activations_per_step() == activations
    # The loss has three FP32 arrays of the output, one of which is among the activations.
    whole = 4 * (weights * (2 + states) + activations + 2 * output)
    assert levels["O0"].memory_bytes == whole
    assert levels["O0"].batch_factor == 1.0
    # Activations take half, and a copy of the weights in FP16 is to be paid from that.
    more = 2 * activations + 10 * output
    assert levels["O1"].memory_bytes == weights * (10 + 4 * states) + more
    assert (
        levels["O1"].batch_factor
        == int(100 * (whole + more - levels["O1"].memory_bytes) / more) / 100
    )


def test_optimizers_share_the_weights_out(tmp_path):
    """The states of two are those of one that holds all weights."""
    model = network()
    first, *others = model.parameters()

    optimizers = [torch.optim.Adam(part, 1e-3) for part in ([first], others)]
    with mpdiag.record(model, optimizers, tmp_path / "both", every=1):
        for step in range(3):
            loss_of_network(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    both, one = (
        mpdiag.analyze(r).plan.levels for r in (tmp_path / "both", record(tmp_path / "one"))
    )
    assert [a.memory_bytes for a in both] == [a.memory_bytes for a in one]


@pytest.mark.parametrize(("momentum", "possible"), [(0.0, True), (0.9, False)])
def test_an_optimizers_own_state_in_fp16_is_not_judged(tmp_path, momentum, possible):
    optimizer = partial(torch.optim.SGD, momentum=momentum)
    plan = mpdiag.analyze(record(tmp_path / "run", optimizer, 0.1)).plan
    assert not plan.master_weights.needed
    assert plan.levels[3].possible == possible


def exact(values, scale, ranks, divide):
    """What FP16 really gives for equal ranks: infinite, or the share of Σ|g| that is lost."""
    parts = torch.tensor(values) * scale / (ranks if divide else 1)
    total = parts.half() * ranks
    lost = (parts.half() == 0).float() @ parts.abs() / parts.abs().sum()
    return bool(torch.isinf(total).any()), float(lost)


@pytest.mark.parametrize(
    ("values", "scale", "ranks", "dtype", "divided"),
    [
        ((1.0, 0.5), 1.0, 8, "fp16", False),
        ((1000.0, 1.0), 8.0, 64, "fp16", True),
        ((60000.0, 1.0), 1.0, 2, "fp32", False),
        ((1000.0, *[2.0**-20] * 2000000), 8.0, 2**14, "fp32", False),
    ],
)
def test_the_reduction_fits_the_recorded_maximum_times_the_ranks(
    values, scale, ranks, dtype, divided
):
    one = stack([ExponentHistogram.of(np.array(values, np.float32))])
    names = (np.array([name], object) for name in ("weight_grad", "w"))
    gradients = Layers(*names, one, np.array([1]))
    assert choose_reduction(gradients, scale, 1) is None
    plan = choose_reduction(gradients, scale, ranks)
    assert (plan.dtype, plan.pre_divide) == (dtype, divided)
    if dtype == "fp16":
        overflow, lost = exact(values, scale, ranks, divided)
        assert not overflow
        assert lost < 0.001
