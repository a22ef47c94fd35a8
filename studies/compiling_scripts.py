"""Scripts that compile, recorded, analyzed, trained by their plan, and held against an eager recording.

    python studies/compiling_scripts.py [NAME …] [--renew] [--markdown]

The scripts in ``studies/compiled_scripts/`` call ``torch.compile`` as public ones do, and none imports
mpdiag. Each goes through the commands of ``real_scripts.py`` with one seed. Beside what that notes:

- graphs, graph breaks and recompilations of each command, as Dynamo counts them;
- records due and arrived: the script is recorded once more with the compiler off. A step, tensor and
  kind of that recording is due. One that only the compiled recording has is listed as well;
- what the analysis advises otherwise than that of the recording with the compiler off;
- where the recorded script does not save the bits that it saves alone: the largest differences.

Scripts of two ranks run in two processes on gloo. ``runs/compiling-scripts`` keeps the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import real_scripts
import torch
from audited_libraries import on_ranks
from real.compilation import arrived, compilations, differences, plain_name, records
from real.one_script import Judged, Study, carry_out
from real.processes import Outcome, in_a_child, run_mpdiag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "studies" / "compiled_scripts"
RESULTS = ROOT / "studies" / "results" / "compiling-scripts.json"
KEPT = ROOT / "runs" / "compiling-scripts"

CATALOG = {
    "nanogpt": Judged(False, 0.05),
    "torchtitan": Judged(False, 0.1),
    "leanrl_dqn": Judged(False, 0.01),
    "hf_trainer": Judged(False, 0.05),
    "timm_train": Judged(True, 0.03),
    "modded_nanogpt": Judged(False, 0.1),
    "torchtune_finetune": Judged(False, 0.1),
    "pix2pix": Judged(False, 0.03),
    "accelerate_unet": Judged(False, 0.05),
    "lightning_vit": Judged(True, 0.05),
    "packed_classifier": Judged(True, 0.05),
    "moe_compiled_optimizer": Judged(False, 0.1),
}
RANKS = {"torchtitan": 2, "modded_nanogpt": 2}
_COUNTS = "dynamo: "


class CompilingStudy(Study):
    """One compiling script's commands, each of which counts what Dynamo does."""

    def eager(self) -> Outcome:
        """The recording with the compiler off, which says what is due."""
        words = ["record", "--out", "eager/seed0", "--", str(self.script)]
        arguments = self._arguments("eager", 0)
        return self._once("eager", 0, lambda: run_mpdiag(words + arguments), compiled=False)

    def advice(self, recording: str) -> dict[str, Any]:
        """What is advised from one of the two recordings; {} if its analysis failed."""
        words = ["analyze", f"{recording}/seed0", "--json"]
        done = in_a_child(lambda: run_mpdiag(words), self.place, f"analyze-{recording}")
        found = self._document(f"analyze {recording}", done)
        if not found:
            return {}
        choices = (*found["fp32_operations"], *found["plan"]["fp32_modules"])
        return {
            "verdict": found["verdict"]["level"],
            "loss scale": found["loss_scale"]["recommended"],
            "master weights": found["master_weights"]["needed"],
            "FP32": sorted({f"{c['op']} {plain_name(c['module'])}" for c in choices}),
            "findings": sorted({f["code"] for f in found["findings"]}),
        }

    def _once(
        self, command: str, seed: int, task: Callable[[], None], *, compiled: bool = True
    ) -> Outcome:
        counted = _counting(task, compiled=compiled)
        ranks = RANKS.get(self.name, 1)
        if ranks > 1:
            alone = counted
            counted = lambda: print(on_ranks(alone, ranks, Path.cwd()))  # noqa: E731
        return super()._once(command, seed, counted)

    def _note(self, command: str, done: Outcome) -> None:
        lines = (done.err or done.out).splitlines()
        told = [line for line in lines if not line.startswith(_COUNTS)]
        super()._note(command, replace(done, err="\n".join(told)))


def _counting(task: Callable[[], None], *, compiled: bool) -> Callable[[], None]:
    """A task that prints at its end what Dynamo counted."""

    def run() -> None:
        from torch._dynamo.utils import set_compilation_metrics_limit

        os.environ["TORCHDYNAMO_DISABLE"] = "" if compiled else "1"  # torch.compile reads it
        set_compilation_metrics_limit(10_000)
        try:
            task()
        finally:
            print(_COUNTS + json.dumps(compilations()))

    return run


def counted(outcome: Outcome) -> dict[str, int] | None:
    """What Dynamo counted in a command, over all ranks; None if it did not come to its end."""
    lines = [line for line in outcome.out.splitlines() if line.startswith(_COUNTS)]
    found = [Counter(json.loads(line.removeprefix(_COUNTS))) for line in lines]
    return {name: sum(c[name] for c in found) for name in found[0]} if found else None


def carry_out_compiled(study: CompilingStudy, tick: Callable[[str], None]) -> dict[str, Any]:
    """Everything known of a compiling script after its commands."""
    row = carry_out(study, 1, tick)
    tick("record with the compiler off")
    eager = study.eager()
    recordings = [study.place / side / "seed0" for side in ("eager", "fp32")]
    row["dynamo"] = {
        "alone": counted(study.alone(0)),
        "recorded": counted(study.record(0)),
        "by_plan": counted(study.train(0)) if row["by_plan"] else None,
    }
    there = eager.code == 0 and all(path.exists() for path in recordings)
    row["records"] = arrived(*map(records, recordings)) if there else None
    advised = [study.advice(side) for side in ("fp32", "eager")] if there else [{}, {}]
    row["advised_otherwise"] = {
        name: [own[name] for own in advised]
        for name in advised[0].keys() & advised[1].keys()
        if advised[0][name] != advised[1][name]
    }
    saved = [study.place / f"{command}-0.pt" for command in ("alone", "record")]
    row["differences"] = None if row["identical"] else differences(*saved)
    row["failures"] = list(dict.fromkeys(study.failures))  # a kept outcome is read twice
    row["said"] = [
        line.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", "") for line in row["said"]
    ]
    return row


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of what is known."""
    head = (
        "| script | recorded = alone | graphs, breaks, recompilations: alone | recorded "
        "| by the plan | records arrived of due | verdict | in FP16 | skipped |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        counts = [row["dynamo"][side] for side in ("alone", "recorded", "by_plan")]
        told = ["–" if c is None else ", ".join(map(str, c.values())) for c in counts]
        came, share = row["records"], row["half_precision_flops"]
        cells = [
            f"`{row['script']}`",
            _bits(row),
            *told,
            f"{came['arrived']} of {came['due']}" if came else "–",
            row["verdict"]["level"] if row["verdict"] else "–",
            "–" if share is None else f"{share:.0%}",
            str(sum(row["skipped"])) if row["skipped"] else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bits(row: dict[str, Any]) -> str:
    """Whether a script saves the bits that it saves alone, or how far it is from them."""
    if row["identical"]:
        return "yes"
    apart = row["differences"]
    share = apart["elements"] / max(1, apart["of"])
    return f"**no**: {share:.0%} of the values, by up to {apart['largest']:g} ulp"


def main() -> None:
    """Run what is asked for and not known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CATALOG), metavar="NAME")
    parser.add_argument("--renew", action="store_true", help="run what is known, too")
    parser.add_argument("--markdown", action="store_true", help="print what is known as a table")
    options = parser.parse_args()
    real_scripts.RESULTS = RESULTS
    rows = real_scripts.load()
    if options.markdown:
        print(markdown([rows[name] for name in options.names if name in rows]))
        return
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    for name in options.names:
        script = SCRIPTS / f"{name}.py"
        if options.renew:
            shutil.rmtree(KEPT / name, ignore_errors=True)
        elif real_scripts.complete(rows.get(name), script, 1):
            continue
        study = CompilingStudy(name, script, CATALOG[name], KEPT)
        rows[name] = carry_out_compiled(
            study, lambda what, name=name: print(f"{name}: {what}", file=sys.stderr)
        )
        real_scripts.store(rows)
        print(*markdown([rows[name]]).splitlines()[2:], *rows[name]["failures"], sep="\n")


if __name__ == "__main__":
    main()
