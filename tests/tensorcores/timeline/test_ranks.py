"""Ranks of one run side by side, and what is refused as no run's."""

import pytest
from tensorcores.traces import ADD, TENSOR, kernel, launch, op, write
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode, UsageError
from mpdiag.tensorcores.trace_analysis import profile_ranks, traces_in

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def trace(path, rank, compute, *, size=2, first=5, start=0.0, name=TENSOR):
    """Two steps of 100 µs: computing, an addition, then a collective until the step's end."""
    events = []
    for i in (0, 1):
        at, c = start + 100.0 * i, 10 * i
        events += [
            op(f"ProfilerStep#{first + i}", at, at + 100) | {"cat": "user_annotation"},
            launch(c + 1, at + 1), kernel(name, c + 1, compute) | {"ts": at + 5},
            launch(c + 2, at + 2), kernel(ADD, c + 2, 5) | {"ts": at + 5 + compute},
            launch(c + 3, at + 3),
            kernel(NCCL, c + 3, 90 - compute, stream=9) | {"ts": at + 10 + compute},
        ]  # fmt: skip
    return write(
        path, events, distributedInfo={"rank": rank, "world_size": size, "backend": "nccl"}
    )


def test_two_clocks_of_one_run_need_not_agree(tmp_path):
    paths = [trace(tmp_path / "a.json", 0, 40), trace(tmp_path / "b.json", 1, 70, start=9_000.0)]
    assert profile_ranks(paths).slowest.rank == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"rank": 0}, "are both of rank 0"),
        ({"size": 4}, "one has 2 ranks, the other 4"),
        ({"first": 80}, "share no step"),
        ({"start": 3.6e9}, "60 minutes apart"),
    ],
)
def test_a_mix_is_refused_with_a_sentence(tmp_path, other, why):
    given = {"rank": 1, "compute": 50} | other
    rank, compute = given.pop("rank"), given.pop("compute")
    paths = [trace(tmp_path / "a.json", 0, 40), trace(tmp_path / "b.json", rank, compute, **given)]
    with pytest.raises(UsageError, match=why):
        profile_ranks(paths)
    result = CliRunner().invoke(app, ["profile", *map(str, paths)])
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert len(result.stderr.splitlines()) == 1


def test_other_kernels_are_another_run(tmp_path):
    a = trace(tmp_path / "rank0.json", 0, 40)
    b = write(tmp_path / "rank1.json", [kernel("ampere_sgemm_128x64_nn", i, 9) for i in (1, 20)])
    with pytest.raises(UsageError, match="only one of them marks its steps"):
        profile_ranks([a, b])
    c = write(tmp_path / "rank2.json", [kernel("volta_sgemm_32x32_nn", i, 9) for i in (1, 20)])
    with pytest.raises(UsageError, match="0 of 2 kernels in common"):
        profile_ranks([b, c])


def test_a_rank_that_no_one_names(tmp_path):
    kernels = [kernel(TENSOR, i, 9) for i in (1, 20)]
    paths = [write(tmp_path / f"{name}.json", kernels) for name in ("rank_0", "other")]
    with pytest.raises(UsageError, match="does not say which rank recorded it"):
        profile_ranks(paths)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds 0 traces"):
        traces_in(empty)
