"""Real traces say what their folder's page says; skipped where the folder is absent."""

import pytest
from tensorcores.traces import real

from mpdiag.tensorcores.trace_analysis import profile_trace

# Percent of kernel time: Tensor Core, CUDA-core matrix, layout; None where the page says nothing.
EXPECTED = {
    "h100_fp32_ffma.sqlite": (0.0, 86.5, None),
    "h100_bert_small.json.gz": (76.5, None, None),
    "a100_alexnet_tf32.json.gz": (17.0, 49.9, 2.6),
    "a100_ddp_rank0.json.gz": (29.6, None, None),
    "v100_resnet50_fp32.json.gz": (0.0, 62.5, None),
    "rtx2080ti_linear_fp32.json.gz": (0.0, None, None),
    "mi210_kernels_only.json.gz": (32.0, None, None),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_shares(name):
    profile = profile_trace(real(name))
    shares = [profile.fraction(verdict) for verdict in ("tensor_core", "cuda_core", "layout")]
    for share, expected in zip(shares, EXPECTED[name], strict=True):
        assert expected is None or round(100 * share, 1) == expected
    assert profile.fraction("unknown") <= 0.05


def test_operations_are_linked_by_correlation_not_by_external_id():
    profile = profile_trace(real("rtx2080ti_linear_fp32.json.gz"))
    assert profile.linked_fraction == pytest.approx(1.0)
    matrix = {k.op for k in profile.kernels if k.facts.verdict == "cuda_core"}
    assert matrix == {"aten::mm", "aten::addmm"}  # by External id a third would be aten::t


def test_a_trace_without_host_events_links_nothing_and_says_so():
    profile = profile_trace(real("mi210_kernels_only.json.gz"))
    assert profile.linked_fraction == 0
    assert "not-linked" in {f["code"] for f in profile.findings}


def test_a_graph_replay_is_known_by_name_and_hardly_linked():
    profile = profile_trace(real("vllm_decode_cuda_graph.json.gz"))
    assert profile.fraction("tensor_core") > 0.8  # Triton's products, whose names hold their types
    assert max(profile.linked_fraction, profile.fraction("unknown")) < 0.05
    assert profile.graph_fraction > 0.9
    assert "cuda-graphs" in {f["code"] for f in profile.findings}


def test_counters_prove_what_the_name_says():
    profile = profile_trace(real("sm100_cublaslt_fp8_ncu.csv"))
    (kernel,) = profile.kernels
    assert (kernel.measured_verdict, kernel.facts.alignment) == ("tensor_core", 4)
    assert kernel.measured.kind == "rate"  # work, time and clock were measured with it
    assert kernel.facts.instruction == "UTCQMMA"


def test_modules_and_the_odd_vocabulary_of_bert():
    profile = profile_trace(real("h100_bert_small.json.gz"))
    first = profile.operations[0]
    assert (first.operation.op, first.operation.module) == ("aten::addmm", "Linear_25")
    assert (first.operation.work.n, first.cause) == (30522, "alignment")
    assert profile.native_generation_fraction == pytest.approx(0.1077, abs=1e-4)
