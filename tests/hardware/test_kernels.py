"""Kernel names against the verdicts that ``kernel_names.txt`` and the collection expect of them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from mpdiag.hardware.kernel_names import demangling
from mpdiag.hardware.kernel_rules import RULES
from mpdiag.hardware.kernels import VERDICTS, KernelFacts, classify
from studies.kernel_names import COLLECTION, score

RESULTS = Path("studies") / "results" / "kernel-names.json"
OPEN = sorted((COLLECTION / "open").glob("*.txt"))
HELD_OUT = sorted((COLLECTION / "held_out").glob("*.txt"))
FRESH = sorted((COLLECTION / "fresh").glob("*.txt"))
# What the source of a label knows and the name does not say: the type of a tile's elements, a name that
# any program may use, an assembly that replaces the kernel of the same name.
NOT_SAID = (
    "kernel_cutlass_kernel_TiledMMA_ThrLayoutVMNK11110000",
    "kernel_cutlass_kernel___main__GroupedGemmKernel_object_at__TiledMMA",
    "kernel_cutlass_kernel___main__MixedInputFusedMultiHeadAttentionPrefill",
    "kernel_cutlass_kernel_flashinfergemmkernelsdense_blockscaled_gemm_sm100",
    "dense_kernel0",
    "Cijk_Alik_Bljk_BBH_MT32x32x32_SE_APM1_AF0EM8",
)


def corpus():
    text = Path(__file__).with_name("kernel_names.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield line.split("|", 5)


NAMES = list(corpus())


def test_the_corpus_is_large_and_names_nothing_twice():
    assert len(NAMES) >= 250
    assert len({row[-1] for row in NAMES}) == len(NAMES)
    assert {row[0] for row in NAMES} == set(VERDICTS)


@pytest.mark.parametrize("row", NAMES, ids=[row[-1][:60] for row in NAMES])
def test_name(row):
    *expected, name = row
    facts = classify(name)
    alignment = "" if facts.alignment is None else str(facts.alignment)
    found = [facts.verdict, facts.instruction, facts.dtype, facts.generation, alignment]
    assert found == expected, facts.rule


@pytest.fixture
def forgetful():
    """Names are judged anew, before and after."""
    classify.cache_clear()
    yield
    classify.cache_clear()


def scored(families):
    mistakes: list[str] = []
    return sum((score(path, mistakes) for path in families), Counter()), mistakes


@pytest.mark.usefixtures("forgetful")
def test_every_open_name_of_the_collection():
    pytest.importorskip("demangle")
    assert len(OPEN) > 20
    assert scored(OPEN)[1] == []


@pytest.mark.usefixtures("forgetful")
def test_verdicts_are_the_same_where_nothing_demangles(monkeypatch):
    """Only which template an argument belongs to is lost: the dtype of one name."""
    monkeypatch.setattr(demangling, "_by_library", lambda _: "")
    counts, mistakes = scored(OPEN)
    assert counts["verdict"] == counts["names"], mistakes
    assert counts["dtype"] >= counts["dtypes"] - 1, mistakes


@pytest.mark.usefixtures("forgetful")
def test_every_name_that_was_held_out_first():
    """They scored the first rules, and the second ones were written with them; none is reversed."""
    pytest.importorskip("demangle")
    counts, mistakes = scored(HELD_OUT)
    assert counts["opposite"] == 0
    assert [line for line in mistakes if not line.rpartition(": ")[2].startswith(NOT_SAID)] == []
    assert len(mistakes) <= 8


@pytest.mark.parametrize("family", FRESH, ids=lambda path: path.stem)
def test_a_fresh_family_is_no_worse_than_when_it_was_scored(root, family):
    """They were scored once, after the second rules were written; their mistakes are not looked at."""
    results = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    recorded = results["fresh"]["after"]["families"][family.stem]
    found = score(family, [])
    assert found["names"] == recorded["names"]
    assert found["verdict"] >= recorded["verdict"]
    assert found["dtype"] >= recorded["dtype"]
    assert found["opposite"] <= recorded["opposite"]


@pytest.mark.parametrize(
    ("verdict", "names"),
    [
        (
            "tensor_core",
            "sm90_fp8_m_grouped_gemm_impl miopenSp3AsmConvFury_v9 turbomind_MMA_16816_x",
        ),
        ("cuda_core", "cudapy::app::my_matmul$7 MatMulHalfInt4Kernel triton_red_fused_mm_view_3"),
        ("helper", "fill_group_gemm_args_kernel merge_states_kernel fmha_bwd_hd128_odo_fp16"),
        ("other", "cupy_arctan2 cudf::gpuDecode SpMMCsr ReLUKernel _FP8rowwise_to_float_kernel"),
        ("unknown", "fused_norm_linear quant_linear_kernel main_dispatch_1_matmul _mlstm_chunk_fw"),
    ],
)
def test_conventions_and_words_of_names_that_no_list_holds(verdict, names):
    assert {name: classify(name).verdict for name in names.split()} == dict.fromkeys(
        names.split(), verdict
    )


def test_a_verdict_says_which_rule_and_token_decided():
    facts = classify("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align1>(x)")
    assert (facts.rule, facts.token) == ("CUTLASS tensorop", "cutlass_80_tensorop")
    assert facts.accumulator == "fp32"
    assert facts.table_version >= 1


@pytest.mark.parametrize(
    ("name", "accumulator"),
    [
        ("volta_h884gemm_128x128_ldg8_nn", "fp16"),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "fp32"),
        ("cutlass_80_tensorop_d884gemm_64x32_16x4_nn_align1", "fp64"),
        ("cutlass_80_tensorop_i16832gemm_s8_256x128_64x3_tn_align16", "int32"),
        ("nvjet_hhh_128x256_64x4_2x1_v_bz_coopA_NNT", "fp16"),
    ],
)
def test_accumulator(name, accumulator):
    assert classify(name).accumulator == accumulator


def test_an_unknown_name_stays_unknown():
    assert classify("mystery") == KernelFacts("unknown")
    assert classify("").verdict == "unknown"


def test_the_order_is_part_of_the_table():
    """A reduction that serves a GEMM is a helper before it is a GEMM."""
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert names.index("split-k reduction") < names.index("CUTLASS tensorop")
    assert names.index("xmma FFMA") < names.index("xmma tensor tile")


@pytest.mark.parametrize("name", ["<" * 50_000, "(" * 50_000, "a" * 1_000_000, "cutlass_" * 9_000])
def test_hostile_names_are_survived(name):
    assert classify(name).verdict in VERDICTS


def test_facts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        classify("mystery").verdict = "other"
