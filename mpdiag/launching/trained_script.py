"""``mpdiag train --plan PLAN -- script.py``: train an unmodified script by a plan.

::

    the script calls a model        operations cast by the policy, outputs returned in FP32
    loss.backward()                 loss scaled; gradients unscaled right after
    the script clips, logs          unscaled gradients
    optimizer.step()                ranks agree: step, or skip; the scale is adjusted
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpdiag.errors import ExitCode, InputError
from mpdiag.files.paths import AnyPath, place
from mpdiag.launching import processes
from mpdiag.launching.script import INTERRUPTED, AfterTorch, Ending, Script, parse, run
from mpdiag.launching.script_training import ScriptTraining, TrainScriptSettings
from mpdiag.numerics.formats import TRAINABLE
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.provenance import announced_ranks
from mpdiag.runs.run import META, open_run
from mpdiag.runs.training_log import FILE
from mpdiag.tracing.fingerprint import compare_models
from mpdiag.training.options import Backend


@dataclass(frozen=True)
class TrainedScript:
    """A script that was trained by a plan.

    Attributes:
        ending: How the script ended.
        folder: The run; None where another rank names it.
        summary: What was trained, in a sentence.
        comparable: Whether the run can be compared with its recording.
        code: The exit code: of a missing input if it ended well and its run could not be written.
        missed: Steps trained, if something of them is missing in the run.
    """

    ending: Ending
    folder: AnyPath | None
    summary: str
    comparable: bool
    code: int
    missed: int | None


def train_command(
    words: Sequence[str], plan: Path, out: Path | None, *, backend: Backend
) -> tuple[int, TrainedScript | None]:
    """Train the script that the words after ``--`` name, in this process or in torchrun's.

    Returns:
        The exit code, and what was trained; None where a launcher's processes say it.

    Raises:
        MpdiagError: As ``train_script``.
    """
    launcher = processes.launcher_of(words)
    if launcher is not None:
        name = f"{processes.launched_name(launcher)}-plan"
        command = ["train", "--plan", str(plan), "--backend", backend]
        return processes.launch(launcher, out, name, command), None
    trained = train_script(parse(words), plan, out, backend=backend)
    processes.free_cycles()
    if trained.folder is not None:
        processes.release_claims(trained.folder)
    return trained.code, trained


def recording_of(plan: Path, run: AnyPath) -> AnyPath | None:
    """The recording that a plan was made from, if it lies beside a run of its model with losses."""
    name = PrecisionPlan.load(plan).run
    recording = run.parent / Path(name).name
    if not name or not (recording / FILE).is_file() or not (recording / META).is_file():
        return None
    sides = open_run(recording), open_run(run)
    a, b = (side.model_fingerprint() for side in sides)
    if a is not None and b is not None and compare_models(a, b).disjoint:
        return None  # a plan of another model: nothing to compare
    return recording if sides[0].parts() else None


def train_script(
    script: Script, plan: Path, out: Path | None = None, *, backend: Backend = "auto"
) -> TrainedScript:
    """Run a script and train what trains in it by a plan.

    Args:
        script: What to run.
        plan: The plan's file.
        out: The run folder; default: ``runs/NAME-FORMAT``, with a number if that exists.
        backend: As for ``mpdiag.MixedPrecision``.

    Raises:
        InputError: If the plan cannot be read or trained by, the script cannot be trained safely, or
            it ended well and nothing in it trained.
        RunExists: If ``out`` holds a run.
        TrainingDiverged: If too many steps in a row were skipped.
    """
    read = PrecisionPlan.load(plan)
    if read.target not in {f.name for f in TRAINABLE}:
        raise InputError(
            f"the plan's target is {read.target}, which no trainer here computes in: analyze again "
            "with --target fp16 or --target bf16"
        )
    name = f"{script.name}-{read.aim}"
    folder = place(out or processes.claim_run(Path("runs"), name)).absolute()
    rank, world = announced_ranks()
    if rank == 0:
        processes.refuse_existing(folder, rank)
    if read.level not in ("O0", "O1") and rank == 0:
        processes.tell(f"the plan's level is {read.level}; an unmodified script is trained at O1")
    if rank == 0 and (
        others := _other_arguments(plan, folder.parent / Path(read.run).name, script)
    ):
        processes.tell(others)
    training = ScriptTraining(TrainScriptSettings(read, folder, backend))
    AfterTorch(training.attach).install()
    launch = processes.new_launch()
    child = replace(training.settings, launch=launch if world == 1 else None)
    processes.follow_children(train_child, child)
    ending = Ending(1, "failed")
    try:
        ending = run(script)
    except processes.Refusal:
        pass
    except KeyboardInterrupt:  # a second one, while run() handled the first
        ending = Ending(INTERRUPTED, "interrupted")
        raise
    finally:
        training.finish(ending.state)
        processes.release_childrens(folder, launch)
        if out is None:
            processes.drop_unused(folder)
    if training.refused is not None:
        raise InputError(training.refused)
    there = (folder / META).exists()
    stepped = any(trainer.steps for trainer in training.trainers)
    if ending.code == 0 and rank == 0 and not stepped and (training.trainers or not there):
        raise InputError(
            "nothing was trained by the plan: no optimizer of the script stepped a torch module"
        )
    missed = training.missed if ending.code == 0 and rank == 0 else None
    trained = TrainedScript(
        ending,
        folder if there and rank == 0 else None,
        training.summary(),
        ending.code == 0 and stepped and not training.in_vain,
        ExitCode.INPUT if missed is not None and world == 1 else ending.code,  # as of a recording
        missed,
    )
    training.let_go()
    return trained


def _other_arguments(plan: Path, recording: AnyPath, script: Script) -> str:
    """That the recorded script had other arguments, in a sentence; "" where it had not, or is gone."""
    near = (plan if plan.is_dir() else plan.parent, recording)
    known = next((open_run(folder) for folder in near if (folder / META).is_file()), None)
    before, now = () if known is None else known.script_words, script.words
    if not before or before[1:] == now[1:]:
        return ""
    return (
        f"the plan's recording ran {shlex.join(before)}, and this training runs {shlex.join(now)}"
    )


def train_child(settings: TrainScriptSettings) -> Callable[[str], None]:
    """Train a process that the script has started; returns what to call at its end."""
    training = ScriptTraining(settings)
    AfterTorch(training.attach).install()
    return training.finish
