"""Applies the advice on shapes to thirty models with awkward ones, and trains a step of each.

The second half of them was written when the advice worked on the first half. Each is recorded for a
step; every size that can be a multiple becomes one, or only what is expected to pay; the modules are
made again with the advised sizes; one step of the result is trained and recorded, and asked again.

    python studies/awkward_shapes.py [-o results.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies.shapes.first_half import FIRST_HALF
from studies.shapes.second_half import SECOND_HALF
from studies.shapes.trial import try_model


def main() -> None:
    """Try all models and write what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=None)
    output: Path | None = parser.parse_args().output
    found = []
    for kind in FIRST_HALF + SECOND_HALF:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = try_model(kind, Path(folder))
        problems = [p for o in outcomes for p in o.problems]
        print(kind.__name__, "; ".join(problems) or "trains")
        found += [asdict(o) for o in outcomes]
    good = len({f["model"] for f in found} - {f["model"] for f in found if f["problems"]})
    print(f"{good} of {len(FIRST_HALF + SECOND_HALF)} models train with the advised sizes")
    if output is not None:
        output.write_text(json.dumps({"outcomes": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
