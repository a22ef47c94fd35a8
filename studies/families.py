"""The paper's task families: every workload, every way to train, several seeds, one table.

    python studies/families.py [--only vgg] [--seeds 3] [--steps N] [--folder runs/families]
    python studies/families.py --done --markdown

Finished trainings are kept. A folder holds, for each workload, ``settings.json``, the plans made from
the first seed's recording (``plan.json``, and ``plan-bf16.json``), and a run for each way and seed, such
as ``ssd/fp16-plan/seed0``. A training counts as done once its log holds the metric; one that was cut
off starts again. So the command can be interrupted and repeated, and several processes may share a
folder if each has its own workloads.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpdiag import workloads
from mpdiag.analysis.analyzer import analyze
from mpdiag.demo import workflow
from mpdiag.errors import InputError, MpdiagError, UsageError
from mpdiag.files.atomic import write_json
from mpdiag.plan import PrecisionPlan
from mpdiag.reports import next_commands, terminal
from mpdiag.runs import provenance
from mpdiag.runs.run import now, open_run
from mpdiag.runs.training_log import read_log
from mpdiag.training.options import PrecisionOverrides
from studies import family_table, fp16_sums
from studies.family_table import Family, WayResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.runs.training_log import TrainingLog
    from mpdiag.workloads.protocol import Workload

HERE = Path(__file__).resolve().parent
EVERY = tuple(sorted([*workloads.names(), *(p.stem for p in (HERE / "workloads").glob("*.py"))]))
ABLATIONS = {
    "fp16-o2": "FP16 weights with FP32 masters",
    "fp16-no-masters": "FP16 weights, no FP32 masters",
    "fp16-sums": "FP16 by the plan, sums in FP16",
}
"""Ways to train that only ``studies/ablations.py`` uses."""
OBSERVED = ("fp16-no-scale", "fp16-plan")
"""Ways whose first seed is recorded while it trains, to count what underflows."""
SETTINGS = "settings.json"


@dataclass(frozen=True)
class FamilyTraining:
    """One training of the table."""

    workload: Workload
    folder: Path
    way: str
    seed: int
    steps: int
    device: str = "cpu"

    @property
    def run(self) -> Path:
        """Its run folder."""
        return self.folder / self.way / f"seed{self.seed}"

    def log(self) -> TrainingLog | None:
        """Its log once it has finished, else None.

        If the plan wants no scale, a training without a scale that skipped no step is the same
        training, bit for bit, and its log is used.
        """
        own = self.own_log()
        if own is None and self.way == "fp16-plan" and self._wants_no_scale():
            without = replace(self, way="fp16-no-scale").own_log()
            return without if without is not None and not without.skipped else None
        return own

    def _wants_no_scale(self) -> bool:
        plan = self.folder / "plan.json"
        return plan.exists() and PrecisionPlan.load(plan).loss_scale.method == "none"

    @property
    def setting(self) -> workflow.Setting:
        """What all ways to train share."""
        return workflow.Setting(self.workload, self.seed, self.steps, self.device)

    def own_log(self) -> TrainingLog | None:
        """The log in its own folder once it has finished, else None."""
        try:
            found = read_log(self.run)
        except InputError:
            return None
        return found if found.metric(self.workload.metric) is not None else None


def ways_of(workload: Workload) -> tuple[str, ...]:
    """Ways to train a workload; the paper's own scale only if the paper names one."""
    return tuple(
        w for w in family_table.WAYS if w != "fp16-paper" or workload.paper_scale is not None
    )


def run_table(
    folder: Path,
    *,
    only: Sequence[str] = (),
    seeds: int = 3,
    steps: int | None = None,
    options: Mapping[str, Any] | None = None,
    done_only: bool = False,
    device: str = "cpu",
) -> list[Family]:
    """Train what is missing, then make the table.

    Args:
        folder: Where trainings are kept.
        only: Names of workloads; default: all.
        seeds: Seeds of each way, from 0.
        steps: Steps of each training; default: each workload's own number.
        options: Options of the workloads, such as ``size``.
        done_only: Train nothing. The table leaves out workloads whose first seed has not finished
            both in FP32 and by the plan.
        device: Where to train, as torch names it.

    Returns:
        A row for each workload asked for.

    Raises:
        UsageError: If there is no such workload or device, or the folder holds trainings of other
            settings.
    """
    chosen = [workloads.load(name, **(options or {})) for name in only or EVERY]
    rows = []
    if done_only:
        for workload in chosen:
            place = folder / workload.name
            count = workload.default_steps if steps is None else steps
            first = [
                FamilyTraining(workload, place, way, 0, count) for way in ("fp32", "fp16-plan")
            ]
            if all(training.log() is not None for training in first):
                fix_settings(place, workload, steps, device)
                rows.append(read_family(workload, place, count, seeds))
        return rows
    workflow.require_device(device)
    with workflow.training_progress(Console(stderr=True)) as progress:
        for workload in chosen:
            place = folder / workload.name
            fix_settings(place, workload, steps, device)
            count = workload.default_steps if steps is None else steps
            for seed in range(seeds):
                for way in ways_of(workload):
                    train_if_missing(
                        FamilyTraining(workload, place, way, seed, count, device), progress
                    )
            rows.append(read_family(workload, place, count, seeds))
    return rows


def fix_settings(place: Path, workload: Workload, steps: int | None, device: str = "cpu") -> None:
    """Write down the settings of a folder's trainings, or check that they are the same.

    Raises:
        UsageError: If the folder holds trainings with other settings.
    """
    settings = {
        "workload": repr(workload),
        "steps": steps,
        "device": device,
        "torch": provenance.versions()["torch"],
    }
    path = place / SETTINGS
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known != settings:
            changed = next(k for k in settings if known.get(k) != settings[k])
            message = (
                f"{place} holds trainings with another {changed} ({known.get(changed)}, not "
                f"{settings[changed]}): give another --folder"
            )
            raise UsageError(message)
        return
    place.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def train_if_missing(training: FamilyTraining, progress: Progress) -> None:
    """Run a training unless it has finished; the first seed of an observed way always runs itself."""
    observed = training.way in OBSERVED and training.seed == 0
    if (training.own_log() if observed else training.log()) is not None:
        return
    shutil.rmtree(training.run, ignore_errors=True)
    if training.way == "fp32":
        title = f"{training.workload.name} FP32 seed {training.seed}"
        workflow.record_fp32(training.setting, training.run, progress, title)
        if training.seed == 0:
            for target, name in (("fp16", "plan.json"), ("bf16", "plan-bf16.json")):
                analyze(training.run, target).plan.save(training.folder / name)
        return
    bf16 = training.way == "bf16"
    plan = PrecisionPlan.load(training.folder / ("plan-bf16.json" if bf16 else "plan.json"))
    title = {**family_table.WAYS, **ABLATIONS}[training.way]
    variant = workflow.Variant(
        f"{training.workload.name} {title} seed {training.seed}", training.way, _options(training)
    )
    with fp16_sums.in_trainers() if training.way == "fp16-sums" else nullcontext():
        workflow.train_variant(
            training.setting, training.run, plan, variant, progress, observed=observed
        )


def _options(training: FamilyTraining) -> Mapping[str, Any]:
    """What a way overrides in the plan."""
    ways: dict[str, Mapping[str, Any]] = {
        "fp16-no-scale": {"overrides": PrecisionOverrides(loss_scale=1.0)},
        "fp16-plan": {},
        "bf16": {"overrides": PrecisionOverrides(loss_scale=1.0)},
        "fp16-paper": {"overrides": PrecisionOverrides(loss_scale=training.workload.paper_scale)},
        "fp16-o2": {"level": "O2"},
        "fp16-no-masters": {
            "level": "O2",
            "overrides": PrecisionOverrides(master_weights=False),
        },
        "fp16-sums": {},
    }
    return ways[training.way]


def read_family(workload: Workload, place: Path, steps: int, seeds: int) -> Family:
    """A row of the table, from the runs in the folder."""
    analysis = analyze(place / "fp32" / "seed0")
    scale = analysis.plan.loss_scale
    masters = analysis.plan.master_weights
    logs = {
        way: [FamilyTraining(workload, place, way, seed, steps).log() for seed in range(seeds)]
        for way in ways_of(workload)
    }
    reference = metrics_of(workload, logs["fp32"])
    sides = {"fp32": WayResult(reference, 0, len(reference) * steps)}
    for way, found in logs.items():
        if way != "fp32":
            sides[way] = way_result(workload, reference, found)
    return Family(
        workload=workload.name,
        family=workload.family,
        metric=workload.metric,
        higher_is_better=workload.higher_is_better,
        margin=workload.margin,
        steps=steps,
        seeds=tuple(seed for seed, log in enumerate(logs["fp32"]) if log is not None),
        sides=sides,
        need=scale.need,
        method=scale.method,
        recommended=scale.recommended,
        lower=scale.lower,
        upper=scale.upper,
        paper_scale=workload.paper_scale,
        worst_lost=analysis.loss_scale.worst_before,
        onset=family_table.onset(analysis),
        underflow=_underflow(analysis, place),
        in_fp32=family_table.in_fp32(analysis.plan),
        master_weights=masters.needed,
        swallowed=masters.swallowed_fraction,
    )


def metrics_of(workload: Workload, logs: Sequence[TrainingLog | None]) -> tuple[float, ...]:
    """The workload's metric of each finished training."""
    metrics = [log.metric(workload.metric) for log in logs if log is not None]
    return tuple(m.value for m in metrics if m is not None)


def way_result(
    workload: Workload, reference: tuple[float, ...], logs: Sequence[TrainingLog | None]
) -> WayResult:
    """One way to train, compared with FP32's metrics."""
    values = metrics_of(workload, logs)
    done = [log for log in logs if log is not None]
    stopped = next((str(n["stopped"]) for log in done for n in log.notes if "stopped" in n), "")
    if not values:
        return WayResult((), stopped=stopped)
    return family_table.compare_way(
        reference,
        values,
        workload.margin,
        skipped=sum(len(log.skipped) for log in done),
        steps=sum(len(log.steps) for log in done),
        stopped=stopped,
    )


def _underflow(analysis: Analysis, place: Path) -> dict[str, family_table.Underflow]:
    found = {}
    for way in OBSERVED:
        run = place / way / "seed0"
        recorded = open_run(run) if (run / "stats").is_dir() else None
        scale = 1.0 if way == "fp16-no-scale" else analysis.plan.loss_scale.init_scale
        found[way] = family_table.underflow(analysis.run, recorded, scale)
    return found


def document(rows: Sequence[Family]) -> dict[str, Any]:
    """The table as JSON, with where and how it was made."""
    versions = provenance.versions()
    return {
        "schema_version": 1,
        "command": " ".join(["mpdiag", *provenance.arguments()[1:]]),
        "date": now(),
        "device": provenance.device(None),
        "versions": {k: versions[k] for k in ("python", "torch", "mpdiag") if k in versions},
        "families": [row.to_json() for row in rows],
    }


def next_command(folder: Path, workload: str | None, again: Sequence[object]) -> Sequence[object]:
    """The comparison of a table's first row; where there is no row yet, its trainings.

    Args:
        folder: Where the trainings are kept.
        workload: Of the first row, None without one.
        again: The words that train what is missing.
    """
    if workload is None:
        return again
    place = folder / workload
    ways = [place / way for way in ("fp16-plan", "fp16-no-scale", "bf16")]
    comparisons = (next_commands.compare_them(place / "fp32", way) for way in ways)
    return next(filter(None, comparisons), next_commands.look_at(place / "fp32"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the paper's task families; make a table.")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", choices=workloads.SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--done", action="store_true", help="train nothing, show what is done")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--verbose", "-v", action="store_true", help="every column, and why")
    options = parser.parse_args(words)
    try:
        rows = run_table(
            options.folder,
            only=options.only,
            seeds=options.seeds,
            steps=options.steps,
            options={"size": options.size},
            done_only=options.done,
            device=options.device,
        )
    except MpdiagError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    if options.json:
        terminal.show_json(document(rows))
    elif options.markdown:
        print(family_table.families_markdown(rows))
    else:
        terminal.show(family_table.families_text(rows, verbose=options.verbose))
    given = [w for w in (sys.argv[1:] if words is None else words) if w != "--done"]
    first = rows[0].workload if rows else None
    again = ("python", "studies/families.py", *map(shlex.quote, given))
    terminal.name_next(*next_command(options.folder, first, again))


if __name__ == "__main__":
    main()
