"""The collection of real kernel names under ``kernel_names/``: its files are well formed.

Each file is one family (a library and a kind of kernel). ``open`` families may be read while
the naming rules are written; ``held_out`` families only scored them before they were opened, and so
did the ``fresh`` ones, collected later from profiles that people published, and then the ``final``
ones. This file checks the form alone and runs no rule.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE / "kernel_names"
FLAT = HERE / "kernel_names.txt"

VERDICTS = {"tensor_core", "cuda_core", "helper", "layout", "other", "unknown"}
MATRIX = {"tensor_core", "cuda_core"}
DTYPES = {
    "fp16",
    "bf16",
    "tf32",
    "fp32",
    "fp64",
    "int8",
    "int4",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp4",
    "complex64",
    "complex128",
    "",
}
GENERATION = re.compile(r"(sm\d{2,3}|gfx[0-9a-f]{3,4}|)")
ALIGNMENT = re.compile(r"\d*")
FAMILY = re.compile(r"# family: \S.*")
SOURCE = re.compile(r"# source: \S.+ — \S.+")


@dataclass(frozen=True)
class Name:
    """One labelled kernel name and where its line stands."""

    path: Path
    line: int
    verdict: str
    dtype: str
    generation: str
    alignment: str
    name: str
    source: str


def files(part: str) -> list[Path]:
    """The family files of ``open``, ``held_out``, ``fresh`` or ``final``, by name."""
    return sorted((FOLDER / part).glob("*.txt"))


def read(path: Path) -> Iterator[Name]:
    """The names of one file.

    Raises:
        ValueError: where a line does not have six fields or stands before any source.
    """
    source = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if number == 1 or not line:
            continue
        if line.startswith("#"):
            if not SOURCE.fullmatch(line):
                raise ValueError(f"{path.name}:{number}: not a source: {line}")
            source = line.removeprefix("# source: ")
            continue
        fields = line.split("|", 5)
        if len(fields) != 6 or not source:
            raise ValueError(f"{path.name}:{number}: {line}")
        verdict, _, dtype, generation, alignment, name = fields
        yield Name(path, number, verdict, dtype, generation, alignment, name, source)


PARTS = ("open", "held_out", "fresh", "final")
EVERY = [path for part in PARTS for path in files(part)]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_names_its_family_and_each_block_its_source(path: Path) -> None:
    """The first line is the family, and no source stands without names."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert FAMILY.fullmatch(lines[0]), lines[0]
    for above, below in zip(lines, [*lines[1:], "#"], strict=True):
        if above.startswith("# source:"):
            assert not below.startswith("#"), above
            assert below.count("|") >= 5, above
    assert any(read(path))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_field_is_from_its_set(path: Path) -> None:
    """Verdict, dtype, generation and alignment are known words; only a product has a dtype."""
    for name in read(path):
        where = f"{path.name}:{name.line}"
        assert name.verdict in VERDICTS, where
        assert name.dtype in DTYPES, where
        assert not name.dtype or name.verdict in MATRIX, where
        assert GENERATION.fullmatch(name.generation), where
        assert ALIGNMENT.fullmatch(name.alignment), where
        assert name.name == name.name.strip(), where
        assert len(name.name) > 2, where


def test_no_name_stands_twice() -> None:
    """A name is in one family only, and not in the older flat list."""
    flat = [
        line.split("|", 5)[-1]
        for line in FLAT.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    found = Counter([*(name.name for path in EVERY for name in read(path)), *set(flat)])
    assert [name for name, times in found.items() if times > 1] == []


def test_a_family_stands_in_one_part_only() -> None:
    """No file name is in two parts."""
    assert [name for name, times in Counter(p.name for p in EVERY).items() if times > 1] == []


def test_a_third_is_held_out() -> None:
    """By family and by name, at least a third is held out, or was until it had scored the rules."""
    if not EVERY:
        pytest.skip("no family yet")
    held = [path for part in PARTS[1:] for path in files(part)]
    names = sum(1 for path in EVERY for _ in read(path))
    kept = sum(1 for path in held for _ in read(path))
    assert len(held) * 3 >= len(EVERY)
    assert kept * 3 >= names
