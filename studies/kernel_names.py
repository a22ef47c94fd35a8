"""Scores the table of kernel names on the collection of real names, family by family.

    python studies/kernel_names.py [--part open|held_out|fresh|final|recent] [--mistakes] [--json FILE]
        [--as before|first|after|opened]

``open`` families were read while the first rules were written, and ``held_out`` ones scored those
rules once. Then they were opened, too, and ``fresh`` ones, collected afterwards, scored the second
rules once, before they were opened in turn; so did ``final`` ones for the third rules, and ``recent``
ones, labelled from the libraries' sources, for the fourth. A verdict of
``unknown`` is wrong where the truth is known, and anything else is wrong where it is not. ``opposite``
counts Tensor Cores called CUDA cores and the reverse. Dtypes are scored on the lines that give one; a
wrong verdict does not excuse a wrong dtype.
``--json`` adds a part's score to a file; with an older checkout in ``PYTHONPATH``, ``--as before`` is
its score on the same names; ``first`` is that of the rules that the first held-out families scored,
and ``opened`` that of rules written with a part that was held out before.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.tensorcores.kernels.classification import classify
from mpdiag.tensorcores.kernels.rules import TABLE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

COLLECTION = Path(__file__).resolve().parents[1] / "tests" / "tensorcores" / "kernels" / "names"
MATRIX = {"tensor_core", "cuda_core"}
PARTS = ("open", "held_out", "fresh", "final", "recent")
SCORES = ("before", "first", "after", "opened")


def lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Verdict, dtype and name of each line of a family."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            verdict, _, dtype, _, _, name = line.split("|", 5)
            yield verdict, dtype, name


def score(path: Path, mistakes: list[str]) -> Counter[str]:
    """The counts of one family; what is wrong is added to ``mistakes``."""
    counts = Counter(names=0, verdict=0, opposite=0, dtypes=0, dtype=0)
    for verdict, dtype, name in lines(path):
        found = classify(name)
        counts["names"] += 1
        counts["verdict"] += found.verdict == verdict
        counts["opposite"] += found.verdict != verdict and {found.verdict, verdict} == MATRIX
        counts["dtypes"] += bool(dtype)
        counts["dtype"] += bool(dtype) and found.dtype == dtype
        if found.verdict != verdict or (dtype and found.dtype != dtype):
            said = f"{found.verdict} {found.dtype}".strip()
            mistakes.append(f"{path.stem}: {verdict} {dtype} -> {said}: {name}")
    return counts


def summary(families: dict[str, Counter[str]]) -> dict[str, object]:
    """The counts of a part and of each of its families."""
    total = sum(families.values(), Counter[str]())
    return {
        "date": date.today().isoformat(),
        "table_version": TABLE_VERSION,
        "families": {name: dict(counts) for name, counts in families.items()},
        "names": total["names"],
        "verdict_accuracy": round(total["verdict"] / total["names"], 4) if total["names"] else None,
        "said_the_opposite": total["opposite"],
        "dtype_accuracy": round(total["dtype"] / total["dtypes"], 4) if total["dtypes"] else None,
        "dtypes": total["dtypes"],
    }


def keep(file: Path, part: str, which: str, result: dict[str, object]) -> None:
    """Add a part's score to a file of results."""
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    document.setdefault(part, {})[which] = result
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Score one part, print it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="open")
    parser.add_argument("--mistakes", action="store_true", help="print them")
    parser.add_argument("--json", type=Path, help="add the score to this file")
    parser.add_argument("--as", dest="which", choices=SCORES, default="after")
    options = parser.parse_args()
    mistakes: list[str] = []
    files = sorted((COLLECTION / options.part).glob("*.txt"))
    families = {path.stem: score(path, mistakes) for path in files}
    for name, counts in families.items():
        print(
            f"{name:34} {counts['verdict']:4} of {counts['names']:4} verdicts, "
            f"{counts['dtype']:4} of {counts['dtypes']:4} dtypes, {counts['opposite']} opposite"
        )
    result = summary(families)
    print({key: value for key, value in result.items() if key != "families"})
    if options.mistakes:
        print(*mistakes, sep="\n")
    if options.json:
        keep(options.json, options.part, options.which, result)


if __name__ == "__main__":
    main()
