"""One script through every command, and what is known of it afterwards."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import LogWriter, Metric, read_log
from real.processes import Outcome, in_a_child, run_alone, run_mpdiag, tensors_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Judged:
    """What a script's metric is worth.

    Attributes:
        higher_is_better: Whether a larger metric is a better one.
        margin: The loss of the metric that somebody who trains this would not mind.
    """

    higher_is_better: bool
    margin: float


def source_of(script: Path) -> str:
    """The public repository and files whose shape a script follows, as its docstring says."""
    told = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    found = re.search(
        r"``([^`]+)``((?:(?:,| and| in| or) ``[^`]+``)*)[^`.]*? of ([\w.-]+/[\w.-]+\w)", told
    )
    if found is None:
        message = f"the docstring of {script} names no repository"
        raise ValueError(message)
    return f"{found[3]}: {found[1]}"


class Study:
    """One script's commands, each of which is run once.

    Args:
        name: The script's, as in the catalog.
        script: Its file.
        judged: What its metric is worth.
        kept: The folder that its runs are kept in.
    """

    def __init__(self, name: str, script: Path, judged: Judged, kept: Path) -> None:
        self.name, self.script, self.judged = name, script, judged
        self.sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
        self.place = kept / name
        self.failures: list[str] = []
        known = self.place / "sha256"
        if self.place.exists() and (not known.exists() or known.read_text() != self.sha256):
            shutil.rmtree(self.place)
        self.place.mkdir(parents=True, exist_ok=True)
        known.write_text(self.sha256)

    def alone(self, seed: int) -> Outcome:
        """The script alone, in FP32."""
        arguments = self._arguments("alone", seed)
        return self._once("alone", seed, lambda: run_alone(self.script, arguments))

    def record(self, seed: int) -> Outcome:
        """The script, recorded; with further seeds in its first step alone, beside losses and metric."""
        few = ["--every", "1000000", "--operations", "0"] if seed else []
        words = ["record", *few, "--out", f"fp32/seed{seed}", "--", str(self.script)]
        return self._once(
            "record", seed, lambda: run_mpdiag(words + self._arguments("record", seed))
        )

    def train(self, seed: int) -> Outcome:
        """The script, trained by the plan."""
        words = [
            "train",
            "--plan",
            "plan.json",
            "--out",
            f"plan/seed{seed}",
            "--",
            str(self.script),
        ]
        return self._once("train", seed, lambda: run_mpdiag(words + self._arguments("train", seed)))

    def analyze(self) -> dict[str, Any]:
        """The analysis of the first recording, with its plan in a file; {} if it failed.

        Made once, before anything was trained by the plan: later ones would know of the comparison.
        """
        words = ["analyze", "fp32/seed0", "--json", "-o", "plan.json"]
        kept = self.place / "analyze.json"
        if kept.exists():
            done = Outcome(**json.loads(kept.read_text()))
        else:
            done = in_a_child(lambda: run_mpdiag(words), self.place, "analyze")
            kept.write_text(json.dumps(vars(done)))
        return self._document("analyze", done)

    def compare(self) -> dict[str, Any]:
        """The comparison of both sides; {} if it failed."""
        metric = self._metric_name()
        words = ["compare", "fp32", "plan", "--json", "--metric", metric]
        words += ["--margin", f"{metric}={self.judged.margin}"]
        done = in_a_child(lambda: run_mpdiag(words), self.place, "compare")
        return self._document("compare", done)

    def _metric_name(self) -> str:
        found = self.alone(0).metric
        return found[0] if found else "metric"

    def _document(self, command: str, done: Outcome) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(done.out)
        except ValueError:
            document = {}
        if done.code or not document:
            self._note(command, done)
        return {} if done.code else document

    def _arguments(self, command: str, seed: int) -> list[str]:
        return ["--seed", str(seed), "--save", f"{command}-{seed}.pt"]

    def _once(self, command: str, seed: int, task: Callable[[], None]) -> Outcome:
        """A run of the script, unless it is kept; its metric goes into its run."""
        kept = self.place / f"{command}-{seed}.json"
        if kept.exists():
            done = Outcome(**json.loads(kept.read_text()))
        else:
            side = {"record": "fp32", "train": "plan"}.get(command)
            run = self.place / side / f"seed{seed}" if side else None
            if run is not None and run.exists():  # left by a kill
                shutil.rmtree(run)
            done = in_a_child(task, self.place, f"{command}-{seed}")
            if run is not None and done.code == 0 and done.metric is not None:
                name, value = done.metric
                entry = Metric(name, value, self.judged.higher_is_better)
                log = LogWriter(run)
                log.append(entry)
                log.close()
            kept.write_text(json.dumps(vars(done)))
        if done.code or done.metric is None:
            self._note(f"{command} with seed {seed}", done)
        return done

    def _note(self, command: str, done: Outcome) -> None:
        lines = [line for line in (done.err or done.out).splitlines() if line.strip()]
        self.failures.append(f"{command}: exit code {done.code}: {lines[-1] if lines else ''}")


def carry_out(study: Study, seeds: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Everything that is known of a script after its commands.

    Args:
        study: The script's commands.
        seeds: How many seeds each side trains.
        tick: Called with what comes next.
    """
    tick("alone")
    alone = study.alone(0)
    fp32, plan, analysis = [], [], {}
    for seed in range(seeds if alone.code == 0 else 0):
        tick(f"record, seed {seed}")
        fp32.append(study.record(seed))
        if fp32[-1].code:
            break
        if seed == 0:
            tick("analyze")
            analysis = study.analyze()
        if not analysis:
            break
        tick(f"train by the plan, seed {seed}")
        plan.append(study.train(seed))
        if plan[-1].code:
            break
    tick("compare")
    comparison = study.compare() if plan and not any(done.code for done in plan) else {}
    return {
        "script": study.name,
        "source": source_of(study.script),
        "sha256": study.sha256,
        "metric": alone.metric[0] if alone.metric else None,
        "higher_is_better": study.judged.higher_is_better,
        "margin": study.judged.margin,
        "seconds_alone": round(alone.seconds, 1),
        "seconds_recorded": round(fp32[0].seconds, 1) if fp32 else None,
        "seconds_by_plan": round(plan[0].seconds, 1) if plan else None,
        "identical": _identical(study.place, alone, fp32[0]) if fp32 else None,
        "fp32": [done.metric[1] if done.metric else None for done in fp32],
        "by_plan": [done.metric[1] if done.metric else None for done in plan],
        **_steps(study.place, len(plan)),
        **_advice(analysis),
        "compare": comparison.get("verdict"),
        "different_models": comparison.get("different_models"),
        "said": _said(fp32[:1] + plan[:1]),
        "failures": study.failures,
        "measured": date.today().isoformat(),
    }


def _identical(place: Path, alone: Outcome, recorded: Outcome) -> bool:
    digests = [tensors_digest(place / f"{command}-0.pt") for command in ("alone", "record")]
    return None not in digests and digests[0] == digests[1] and alone.metric == recorded.metric


def _advice(analysis: dict[str, Any]) -> dict[str, Any]:
    if not analysis:
        return {"verdict": None, "scale": None, "masters": None, "stays_fp32": [], "findings": []}
    scale = analysis["loss_scale"]
    kept = ("needed", "recommended", "lower", "upper", "method", "limiting_layer")
    return {
        "verdict": {key: analysis["verdict"][key] for key in ("level", "text")},
        "scale": {key: scale[key] for key in kept},
        "masters": analysis["master_weights"]["needed"],
        "stays_fp32": sorted(
            {f"{o['op']} in {o['module'] or 'the script'}" for o in analysis["fp32_operations"]}
        ),
        "findings": sorted({f"{f['severity']}: {f['code']}" for f in analysis["findings"]}),
    }


def _steps(place: Path, seeds: int) -> dict[str, Any]:
    recording = place / "fp32" / "seed0"
    trained = [place / "plan" / f"seed{seed}" for seed in range(seeds)]
    logs = [read_log(run) for run in trained if run.exists()]
    shares = [open_run(run).meta.get("half_precision_flops") for run in trained if run.exists()]
    return {
        "steps": len(read_log(recording).steps) if recording.exists() else None,
        "half_precision_flops": shares[0] if shares else None,
        "skipped": [len(log.skipped) for log in logs],
        "steps_by_plan": [len(log.steps) for log in logs],
    }


def _said(outcomes: Sequence[Outcome]) -> list[str]:
    """What mpdiag says on stderr beside the command that it names next."""
    lines = [line for done in outcomes for line in done.err.splitlines()]
    return [line for line in lines if line.startswith(("mpdiag:", "note:", "warning:"))]
