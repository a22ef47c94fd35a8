"""Scripts in the shape of public ones, recorded, analyzed, trained by their plan and compared.

    python studies/real_scripts.py [NAME …] [--seeds N] [--renew] [--markdown] [--list]

The scripts in ``studies/scripts/`` are ordinary PyTorch trainings: none imports mpdiag. For each one

1. the script runs alone, with the first seed;
2. ``mpdiag record -- SCRIPT`` runs it with every seed: the FP32 side. With the first seed, each tensor
   of the file that it saves must have the bytes that it has alone, and its metric the same digits;
3. ``mpdiag analyze`` makes the plan from the first seed's recording;
4. ``mpdiag train --plan`` runs it with every seed: the other side;
5. ``mpdiag compare`` compares the two by the metric that the script prints.

Each command runs in a process of its own, forked from this one after torch was imported, which saves
an import each. Runs are kept in ``runs/real-scripts``, and results are written after each script;
what is there is not run again while the script stays the same (``--renew`` runs it nevertheless).
"""

from __future__ import annotations

import argparse
import ast
import atexit
import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import sys
import time
import traceback
import zipfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress
import torch

from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import LogWriter, Metric, read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "studies" / "scripts"
RESULTS = ROOT / "studies" / "results" / "real-scripts.json"
KEPT = ROOT / "runs" / "real-scripts"
_LAST_LINE = re.compile(r"^([a-z][a-z ]*): (-?(?:[\d.]+(?:e[-+]?\d+)?|inf|nan))$", re.MULTILINE)


@dataclass(frozen=True)
class Judged:
    """What a script's metric is worth.

    Attributes:
        higher_is_better: Whether a larger metric is a better one.
        margin: The loss of the metric that somebody who trains this would not mind.
    """

    higher_is_better: bool
    margin: float


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


# -- one command -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: Its exit code; a signal's number, negative, where one ended it.
        seconds: How long it took.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
    """

    code: int
    seconds: float
    out: str
    err: str

    @property
    def metric(self) -> tuple[str, float] | None:
        """The name and value of the last line of the form ``name: value``."""
        found = _LAST_LINE.findall(self.out)
        return (found[-1][0], float(found[-1][1])) if found else None


def run_alone(script: Path, arguments: Sequence[str]) -> None:
    """What ``python SCRIPT ARGUMENTS`` does."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def run_mpdiag(arguments: Sequence[str]) -> None:
    """What ``mpdiag ARGUMENTS`` does."""
    from mpdiag.cli import main

    sys.argv = ["mpdiag", *arguments]
    main()


def in_a_child(task: Callable[[], None], place: Path, name: str) -> Outcome:
    """Run a task in a forked process, in its folder, with its output in files.

    Args:
        task: What to do; ``SystemExit`` gives the exit code.
        place: The folder; the outputs are ``NAME.out`` and ``NAME.err`` in it.
        name: The outputs' name.
    """
    place.mkdir(parents=True, exist_ok=True)
    outputs = [place / f"{name}.out", place / f"{name}.err"]
    sys.stdout.flush()
    sys.stderr.flush()
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(_as_child(task, place, outputs))
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, seconds, *(path.read_text(errors="replace") for path in outputs))


def _as_child(task: Callable[[], None], place: Path, outputs: Sequence[Path]) -> int:
    code = 0
    try:
        os.chdir(place)
        for number, path in enumerate(outputs, 1):
            handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(handle, number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.environ["COLUMNS"] = "1000"  # so that no line is broken
        task()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - it is the child's end, whatever it is
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # what an interpreter runs at its end
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def tensors_digest(saved: Path) -> str | None:
    """A digest of the bytes of all tensors in a file of ``torch.save``; None without a file."""
    if not saved.exists():
        return None
    digest = hashlib.sha256()
    with zipfile.ZipFile(saved) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        for name in sorted(names, key=lambda name: int(name.rsplit("/", 1)[1])):
            digest.update(archive.read(name))
    return digest.hexdigest()


# -- one script ------------------------------------------------------------------------------------


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
        """The script, recorded."""
        words = ["record", "--out", f"fp32/seed{seed}", "--", str(self.script)]
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
                LogWriter(run).append_after_the_end(entry)
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
        if seed == 0:
            tick("analyze")
            analysis = study.analyze()
        if not analysis:
            break
        tick(f"train by the plan, seed {seed}")
        plan.append(study.train(seed))
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


# -- the table -------------------------------------------------------------------------------------


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


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the docs."""
    head = (
        "| script | shape of | steps | recorded = alone | verdict | loss scale "
        "| in FP32 beyond the lists | in FP16 | skipped | metric | FP32 | by the plan | compare |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        repository, _, file = row["source"].partition(": ")
        better = "more" if row["higher_is_better"] else "less"
        cells = [
            f"`{row['script']}`",
            f"{repository}: {file}",
            _or_dash(row["steps"]),
            "yes" if row["identical"] else "**no**",
            row["verdict"]["level"] if row["verdict"] else "–",
            _scale(row["scale"]),
            ", ".join(row["stays_fp32"]) or "–",
            _or_dash(row["half_precision_flops"], "{:.0%}"),
            _or_dash(sum(row["skipped"]) if row["skipped"] else None),
            f"{row['metric']}, {better} is better",
            _figures(row["fp32"]),
            _figures(row["by_plan"]),
            f"{row['compare']} (margin {row['margin']:g})" if row["compare"] else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _or_dash(value: Any, form: str = "{}") -> str:
    return "–" if value is None else form.format(value)


def _scale(scale: dict[str, Any] | None) -> str:
    if scale is None:
        return "–"
    if scale["recommended"] is None:
        return "none fits"
    return f"{scale['recommended']:g}, {'needed' if scale['needed'] else 'not needed'}"


def _figures(values: Sequence[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.4g}" for value in values) or "–"


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
