"""Real processes on gloo: ranks agree on what is skipped, and reduce as the plan says."""

import pytest
from script_processes import scripts

SCRIPTS = scripts(__file__)
WAYS = ["fsdp2", "flat", "original", "whole"]
"""FSDP2, and FSDP1 with flat, with original and with unsharded parameters."""


@pytest.fixture
def run(fork_server, tmp_path):
    """Runs scripts, one after another, in two processes; returns their standard outputs."""

    def run(*names: str, words: tuple[str, ...]) -> list[str]:
        code = "".join(SCRIPTS[name] for name in ("head", *names, "tail"))
        ended = fork_server.ranks("python", "-c", code, *words, cwd=tmp_path)
        for done in ended:
            assert done.code == 0, done.err[-2000:]
        return [done.out for done in ended]

    return run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("accumulation and an overflow on one rank as torch does it", ("O1",)),
        ("micro-batches under no_sync add up in FP32 and are reduced", ("O2", "False")),
        ("micro-batches under no_sync add up in FP32 and are reduced", ("O2", "True")),
        ("a model distributed already is refused where its weights must be cast", ("O2",)),
        ("ZeRO's optimizer is named at O2 and trains at O1", ("both",)),
        ("block formats", ("O1",)),
    ],
)
def test_what_a_script_asserts(run, name, words):
    run(name, words=words)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_infinity_on_one_rank_skips_on_all_with_ddp(run, level):
    outputs = run("infinity on one rank under DDP", words=(level,))
    assert [line.split()[0] for line in outputs[0].splitlines()] == ["64.0", "32.0", "32.0"]
    assert outputs[0].splitlines()[1].split()[0] == outputs[1].splitlines()[1].split()[0]


def test_infinity_on_one_rank_of_a_model_without_ddp_skips_on_all_and_names_the_rank(run):
    outputs = run("infinity on one rank without DDP", words=("O1",))
    assert "rank 1" in outputs[0]
    assert "NaN in the forward pass: the loss" in outputs[1]


def test_ranks_that_scale_differently_are_told(run):
    outputs = run("ranks scale differently", words=("O1",))
    assert all("rank 0 scales its loss by 64, rank 1 by 128" in o for o in outputs)


def test_gradients_are_reduced_in_the_plans_dtype_divided_before_the_sum(run):
    """FP16 sums of two ranks' 40000 overflow, unless each is halved first (pytorch#106395)."""
    outputs = run("gradients are reduced in the plan's dtype", words=("O0",))
    plain, fp32, divided, summed, later = (float(line) for line in outputs[0].split())
    assert plain == fp32 == 40005.0
    assert abs(divided - 40005.0) <= 16
    assert summed == later == float("inf")


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize(
    ("level", "way"), [("O0", "fsdp2"), ("O0", "flat"), *(("O1", way) for way in WAYS)]
)
def test_sharded_models_clip_by_the_norm_of_whole_gradients(run, level, way):
    outputs = run("shard", "the norm of whole gradients", words=(level, way))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "flat"])
def test_a_capsule_has_whole_weights_and_the_batch_of_each_rank(run, way):
    outputs = run("shard", "capsules of ranks", words=("O1", way))
    assert [lines.split() for lines in outputs] == [
        ["True", "False", "1", "_to_copy", "True"],
        ["False", "True"],
    ]


@pytest.mark.parametrize("way", ["flat", "original"])
def test_a_scale_by_the_largest_gradient_is_one_on_all_shards_some_of_them_empty(run, way):
    """Of one weight, FSDP1's second rank holds nothing; with original parameters, no gradient either."""
    outputs = run("shard", "a scale by the largest gradient", words=("O1", way))
    assert outputs[0] == outputs[1]
    first, *_, refused = outputs[0].splitlines()
    assert first.split()[1] == "3.5"
    assert refused == "True"


@pytest.mark.parametrize("clip", ["clip_norm", "clip_value"])
def test_partial_gradients_of_sequence_parallelism_are_summed_before_they_are_judged(run, clip):
    outputs = run("partial gradients of sequence parallelism", words=("O0", clip))
    assert outputs[0] == outputs[1]


def test_an_expert_without_a_token_on_one_rank_keeps_no_other_waiting(run):
    outputs = run("an expert without a token on one rank", words=("O0",))
    # Six values of 2 in one rank's experts, seen by both; three of 1 beside them.
    assert outputs[0] == outputs[1]
    assert [float(norm) for norm in outputs[0].split()] == pytest.approx([27**0.5] * 2)


def test_a_rank_without_gradients_keeps_no_other_waiting(run):
    """Without DDP only the trainers exchange anything; every rank learns what is wrong, and goes on."""
    for out in run("a rank without gradients", words=("O1",)):
        lines = out.splitlines()
        assert lines[0].startswith("1 rank 1 has no gradient, others have: no rank steps")
        assert lines[1].startswith("step() found no gradient")
        assert lines[2] == "2"


def test_a_forward_pass_that_is_not_finite_ends_every_rank_and_a_script_may_abstain(run):
    outputs = run("a forward pass that is not finite", words=("O1",))
    for out in outputs:
        lines = out.splitlines()
        assert lines[0].startswith(
            "3 8192.0 training stopped at step 2: 3 steps in a row had a loss"
        )
        assert lines[1] == "None"
    assert "finite=True" in outputs[0].splitlines()[2]
    assert outputs[1].splitlines()[2] == "False"
