"""Scripts in the shape of public ones, recorded, analyzed, trained by their plan and compared.

    python studies/real_scripts.py [NAME …] [--seeds N] [--renew] [--markdown] [--list]

The scripts in ``studies/scripts/`` are ordinary PyTorch trainings: none imports mpdiag. For each one

1. the script runs alone, with the first seed;
2. ``mpdiag record -- SCRIPT`` runs it with every seed: the FP32 side. With the first seed, each tensor
   of the file that it saves must have the bytes that it has alone, and its metric the same digits.
   With the others, which no plan is made from, one step is recorded, beside losses and metric;
3. ``mpdiag analyze`` makes the plan from the first seed's recording;
4. ``mpdiag train --plan`` runs it with every seed: the other side;
5. ``mpdiag compare`` compares the two by the metric that the script prints.

Each command runs in a process of its own, forked from this one after torch was imported, which saves
an import each. Runs are kept in ``runs/real-scripts``, and results are written after each script;
what is there is not run again while the script stays the same (``--renew`` runs it nevertheless).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rich.console
import rich.progress
import torch
from real.one_script import Judged, Study, carry_out
from real.table import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "studies" / "scripts"
RESULTS = ROOT / "studies" / "results" / "real-scripts.json"
KEPT = ROOT / "runs" / "real-scripts"

CATALOG = {
    "contrastive/clip": Judged(True, 0.03),
    "contrastive/simclr": Judged(True, 0.03),
    "contrastive/triplet": Judged(True, 0.02),
    "detection/detr": Judged(True, 0.05),
    "detection/ssd": Judged(True, 0.04),
    "diffusion/ddpm": Judged(False, 0.01),
    "diffusion/flow_matching": Judged(False, 0.2),
    "gan/dcgan": Judged(False, 2.0),
    "gan/wgan_gp": Judged(False, 0.5),
    "generative/vae": Judged(False, 0.2),
    "generative/vqvae": Judged(True, 0.3),
    "graphs/gat": Judged(True, 0.03),
    "graphs/gcn": Judged(True, 0.01),
    "language/nanogpt": Judged(False, 0.03),
    "language/seq2seq": Judged(True, 0.02),
    "lora/lora": Judged(False, 0.03),
    "lora/minlora": Judged(True, 0.02),
    "meta/maml": Judged(True, 0.03),
    "physics/burgers": Judged(False, 0.01),
    "physics/siren": Judged(True, 0.5),
    "recommender/deepfm": Judged(True, 0.005),
    "reinforcement/dqn": Judged(True, 20.0),
    "reinforcement/ppo": Judged(True, 40.0),
    "reinforcement/sac": Judged(True, 100.0),
    "series/sine_lstm": Judged(False, 0.005),
    "speech/deepspeech": Judged(False, 0.02),
    "speech/wavenet": Judged(False, 0.03),
    "vision/super_resolution": Judged(True, 0.1),
}


def load() -> dict[str, dict[str, Any]]:
    """The results so far, by script."""
    if not RESULTS.exists():
        return {}
    return {row["script"]: row for row in json.loads(RESULTS.read_text())["scripts"]}


def store(rows: dict[str, dict[str, Any]]) -> None:
    """Write the results."""
    document = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scripts": [rows[name] for name in sorted(rows)],
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def complete(row: dict[str, Any] | None, script: Path, seeds: int) -> bool:
    """Whether a result is of this script, and of as many seeds."""
    if row is None or row["sha256"] != hashlib.sha256(script.read_bytes()).hexdigest():
        return False
    return len(row["fp32"]) >= seeds or bool(row["failures"])


def main() -> None:
    """Run what is asked for and not known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="all that begin so, in this order; default: all"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="the same")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--renew", action="store_true", help="run what is known, too")
    parser.add_argument("--markdown", action="store_true", help="print the table of what is known")
    parser.add_argument("--list", action="store_true", help="name the scripts")
    options = parser.parse_args()
    wanted = options.names + options.only or [""]
    chosen = list(dict.fromkeys(n for begin in wanted for n in CATALOG if n.startswith(begin)))
    rows = load()
    if options.list:
        print("\n".join(chosen))
    elif options.markdown:
        print(markdown([rows[name] for name in chosen if name in rows]))
    else:
        torch.set_num_threads(1)
        run(chosen, rows, options.seeds, renew=options.renew)


def run(chosen: Sequence[str], rows: dict[str, Any], seeds: int, *, renew: bool) -> None:
    """Carry out the chosen scripts, and store each one's result at once."""
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(chosen))
        for name in chosen:
            script = SCRIPTS / f"{name}.py"
            if renew:
                shutil.rmtree(KEPT / name, ignore_errors=True)
            if renew or not complete(rows.get(name), script, seeds):
                study = Study(name, script, CATALOG[name], KEPT)

                def tick(what: str, name: str = name) -> None:
                    progress.update(bar, description=f"{name}: {what}", refresh=True)

                rows[name] = carry_out(study, seeds, tick)
                store(rows)
                told = " ".join(rows[name]["failures"]) or rows[name]["compare"]
                progress.console.print(f"{name}: {told}", markup=False)
            progress.advance(bar)


if __name__ == "__main__":
    main()
