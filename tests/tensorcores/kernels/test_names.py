"""Real kernel names and their verdicts: ``names.txt``, and the collection in ``names/``.

Each file of the collection is one family (a library and a kind of kernel). ``open`` families may be
read while the naming rules are written; ``held_out`` families only scored them before they were opened,
and so did the ``fresh`` ones, collected later from profiles that people published, then the ``final``
ones, and the ``recent`` ones, labelled from the libraries' sources of August 2026.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

from mpdiag.tensorcores.kernels import classification
from mpdiag.tensorcores.kernels.classification import VERDICTS, classify
from studies.kernel_names import COLLECTION, PARTS, score

FAMILIES = {part: sorted((COLLECTION / part).glob("*.txt")) for part in PARTS}
FILES = [path for part in PARTS for path in FAMILIES[part]]
DTYPES = "fp16 bf16 tf32 fp32 fp64 int8 int4 fp8_e4m3 fp8_e5m2 fp4 complex64 complex128".split()
LINE = re.compile(
    rf"(?:(?:tensor_core|cuda_core)\|[^|]*\|(?:{'|'.join(DTYPES)}|)"
    rf"|(?:{'|'.join(VERDICTS)})\|[^|]*\|)"
    r"\|(?:sm\d{2,3}|gfx[0-9a-f]{3,4}|)\|\d*\|\S.+\S"
)
SOURCE = re.compile(r"# source: \S.+ — \S.+")
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


def labels(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("|", 5) for line in lines if line and not line.startswith("#")]


LISTED = labels(Path(__file__).with_name("names.txt"))


def test_every_listed_name():
    assert len(LISTED) >= 250
    assert {row[0] for row in LISTED} == set(VERDICTS)
    wrong = {}
    for *expected, name in LISTED:
        facts = classify(name)
        alignment = "" if facts.alignment is None else str(facts.alignment)
        fields = [facts.verdict, facts.instruction, facts.dtype, facts.generation, alignment]
        if fields != expected:
            wrong[name] = (fields, expected, facts.rule)
    assert wrong == {}


def test_the_collection_is_well_formed():
    """Each file names its family, each block its source, each line has fields from their sets."""
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert re.fullmatch(r"# family: \S.*", lines[0]), path
        above = ""
        for line in filter(None, lines[1:]):
            assert (SOURCE if line.startswith("#") else LINE).fullmatch(line), f"{path}: {line}"
            assert above or line.startswith("#"), f"{path} has a name before any source"
            assert not (above.startswith("#") and line.startswith("#")), f"{path}: {above}"
            above = line
        assert above, path
        assert not above.startswith("#"), path


def test_no_name_and_no_family_stands_twice():
    names = Counter(row[-1] for path in FILES for row in labels(path))
    names.update(row[-1] for row in LISTED)
    assert [name for name, times in names.items() if times > 1] == []
    assert len({path.name for path in FILES}) == len(FILES)


@pytest.fixture
def forgetful():
    """No verdict is remembered, before and after."""
    classify.cache_clear()
    yield
    classify.cache_clear()


def scored(part):
    mistakes: list[str] = []
    return sum((score(path, mistakes) for path in FAMILIES[part]), Counter()), mistakes


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("part", ["open", "fresh"])
def test_every_name_of_families_that_the_rules_were_written_with(part):
    pytest.importorskip("demangle")
    assert len(FAMILIES[part]) > 20
    assert scored(part)[1] == []


@pytest.mark.usefixtures("forgetful")
def test_verdicts_are_the_same_where_nothing_demangles(monkeypatch):
    """Only which template an argument belongs to is lost: the dtype of one name."""
    monkeypatch.setattr(classification, "_by_library", lambda _: "")
    counts, mistakes = scored("open")
    assert counts["verdict"] == counts["names"], mistakes
    assert counts["dtype"] >= counts["dtypes"] - 1, mistakes


@pytest.mark.usefixtures("forgetful")
def test_every_name_that_was_held_out_first():
    """They scored the first rules, and the second ones were written with them; none is reversed."""
    pytest.importorskip("demangle")
    counts, mistakes = scored("held_out")
    assert counts["opposite"] == 0
    assert [line for line in mistakes if not line.rpartition(": ")[2].startswith(NOT_SAID)] == []
    assert len(mistakes) <= 8


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("part", "names", "verdicts", "named", "dtypes"),
    [("final", 893, 830, 259, 241), ("recent", 315, 303, 0, 0)],
)
def test_every_name_that_scored_later_rules(part, names, verdicts, named, dtypes):
    """The third rules and the fourth: none is reversed, and no rule since judges fewer of them."""
    pytest.importorskip("demangle")
    counts, _ = scored(part)
    assert (counts["names"], counts["dtypes"], counts["opposite"]) == (names, named, 0)
    assert counts["verdict"] >= verdicts
    assert counts["dtype"] >= dtypes
