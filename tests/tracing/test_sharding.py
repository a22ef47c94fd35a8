"""What wrappers do with parameters, on two ranks: their sizes, and who adds their gradients."""

import json

import pytest
from script_processes import scripts
from support import NEEDS_GLOO

pytestmark = NEEDS_GLOO

SCRIPT = scripts(__file__)["script"]
ALONE = "its group has one rank: nothing is reduced"


@pytest.fixture(scope="module")
def found(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "wrapped.py").write_text(SCRIPT)
    first, other = fork_server.ranks("python", folder / "wrapped.py", cwd=folder)
    assert (first.code, other.code) == (0, 0), first.err
    return json.loads(first.out)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2_alone", "ddp_alone", "tensor_parallel"])
def test_sizes_are_those_over_all_ranks(found, kind):
    assert [numel for numel, *_ in found[kind]] == [24, 6, 12, 2]


@pytest.mark.parametrize("kind", ["fsdp2_alone", "ddp_alone"])
def test_a_group_of_one_rank_reduces_nothing(found, kind):
    assert {(reduced, unknown["reduced"]) for _, reduced, unknown in found[kind]} == {(None, ALONE)}


def test_what_lies_on_another_rank_is_said_to(found):
    """FSDP1 gives a rank the first half of all elements."""
    assert {reduced for _, reduced, _ in found["fsdp1"]} == {"float32"}
    for field in ("accumulated", "states"):
        reasons = [unknown.get(field) for *_, unknown in found["fsdp1"]]
        assert reasons == [None, *["this rank holds no element of it"] * 3]


def test_tensor_parallelism_reduces_no_gradient(found):
    split, beside = (found["tensor_parallel"][i][2]["reduced"] for i in (0, 2))
    assert split == "tensor parallelism: each rank keeps the gradient of its part"
    assert beside == "no DDP or FSDP holds it: the script reduces it, or nothing does"
