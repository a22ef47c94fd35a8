"""``mpdiag record -- script.py``: record an unmodified script."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.errors import ExitCode, InputError, UsageError
from mpdiag.files.paths import AnyPath, place
from mpdiag.launching import processes
from mpdiag.launching.script import AfterTorch, Script, parse, run
from mpdiag.launching.termination import Termination
from mpdiag.recording.cadence import Cadence
from mpdiag.recording.lifecycle import carry_through
from mpdiag.runs.provenance import announced_ranks
from mpdiag.runs.run import META
from mpdiag.runs.trace import STEPS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from mpdiag.launching.discovery import Discovered, Discovery
    from mpdiag.launching.live_view import LiveView
    from mpdiag.recording.recorder import Adopted, Recorder
    from mpdiag.tracing.dtype_setters import DtypeSetters
    from mpdiag.tracing.fp32_only import Fp32Only
    from mpdiag.tracing.precision import PrecisionWatch


@dataclass(frozen=True)
class Options:
    """The options of ``mpdiag record``; see ``mpdiag.record``. None leaves one at its default there.

    Raises:
        UsageError: If one makes no sense.
    """

    every: int | None = None
    max_steps: int | None = None
    include: str | None = None
    exclude: str | None = None
    operations: int | None = None
    fp32: bool | None = None
    live: bool | None = None
    blocks: bool | None = None
    trace: bool | None = None
    trace_steps: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense before the script runs."""
        _ = self.cadence
        _check_pattern("--include", self.include)
        _check_pattern("--exclude", self.exclude)
        if self.operations is not None and self.operations < 0:
            message = f"--operations must be a number of steps, 0 or more, not {self.operations}"
            raise UsageError(message)
        if self.operations == 0 and self.blocks:
            raise UsageError(
                "--blocks records in the steps of operations: leave --operations 0 out"
            )
        _ = self.traced

    @property
    def cadence(self) -> Cadence:
        """Which steps to record."""
        return Cadence(self.every, self.max_steps)

    @property
    def traced(self) -> tuple[int, ...]:
        """Which steps to trace."""
        if self.trace_steps is None:
            return STEPS if self.trace else ()
        numbers = [word.strip() for word in self.trace_steps.split(",")]
        if not all(word.isascii() and word.isdigit() for word in numbers):
            raise UsageError(
                f"--trace-steps must be numbers of steps like 0,1,100, not {self.trace_steps!r}"
            )
        return tuple(map(int, numbers))

    def words(self) -> list[str]:
        """The command line that gives the same options."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value is not False:
                words.append(f"--{field.name.replace('_', '-')}")
                words += [] if value is True else [str(value)]
        return words


@dataclass(frozen=True)
class RecordingSettings:
    """How to record one process.

    Attributes:
        folder: The run folder.
        options: What was asked for.
        script: What is recorded: a path, or ``-m`` and a module's name.
        launch: Of a process that the script has started and that may have a run of its own, in
            ``folder-2`` …: what ``processes.claim_childs_run`` tells commands apart by. Else None.
    """

    folder: AnyPath
    options: Options
    script: str
    launch: str | None = None


@dataclass(frozen=True)
class RecordedScript:
    """A script that was recorded.

    Attributes:
        code: Its exit code; that of a missing input if it ended well and its recording did not.
        folder: The run; None where another rank names it.
        missed: Steps seen, if something of them is missing in the run; its meta file may not say.
    """

    code: int
    folder: AnyPath | None
    missed: int | None = None


def record_command(words: Sequence[str], out: Path | None, options: Options) -> RecordedScript:
    """Record the script that the words after ``--`` name, in this process or in torchrun's.

    Raises:
        MpdiagError: As ``record_script``.
    """
    launcher = processes.launcher_of(words)
    if launcher is not None:
        name, command = processes.launched_name(launcher), ["record", *options.words()]
        return RecordedScript(processes.launch(launcher, out, name, command), None)
    recorded = record_script(parse(words), out, options)
    processes.free_cycles()
    if recorded.folder is not None:
        processes.release_claims(recorded.folder)
    return recorded


def record_script(
    script: Script, out: Path | None = None, options: Options | None = None
) -> RecordedScript:
    """Run a script and record what trains in it.

    Args:
        script: What to run.
        out: The run folder; default: ``runs/NAME``, with a number if that exists.
        options: How to record.

    Raises:
        RunExists: If ``out`` holds a run.
        InputError: If the script ended well and nothing in it trained.
    """
    rank, world = announced_ranks()
    folder = place(out or processes.claim_run(Path("runs"), script.name)).absolute()
    processes.refuse_existing(folder, rank)
    settings = RecordingSettings(
        folder, options or Options(), f"-m {script.target}" if script.module else script.target
    )
    watch = ScriptRecording(settings)
    AfterTorch(watch.attach).install()
    # A child would write into the same terminal.
    alone = replace(settings.options, live=None)
    launch = processes.new_launch()
    child = replace(settings, launch=launch if world == 1 else None, options=alone)
    processes.follow_children(watch_child, child)
    state = "failed"  # if run() raises, it has returned no ending
    try:
        ending = run(script)
        state = ending.state
    except KeyboardInterrupt:  # a second one, while run() handled the first
        state = "interrupted"
        raise
    finally:
        watch.finish(state)
        processes.release_childrens(folder, launch)
        if out is None:
            processes.drop_unused(folder)
    if not watch.recorded and not (folder / META).exists() and ending.code == 0:
        raise InputError(
            "nothing was recorded: the script ended without calling a torch module that trains"
            if rank == 0
            else f"rank {rank} recorded nothing"
        )
    told = rank == 0 and (watch.recorded or (folder / META).exists())
    missed = watch.missed if ending.code == 0 else None
    # A rank that fails would end the others.
    code = ExitCode.INPUT if missed is not None and world == 1 else ending.code
    return RecordedScript(code, folder if told else None, missed)


def _check_pattern(option: str, pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is no regular expression: {error}") from error


class ScriptRecording:
    """Records what trains in this process."""

    def __init__(self, settings: RecordingSettings) -> None:
        self.settings = settings
        self._recorder: Recorder | None = None
        self._discovery: Discovery | None = None
        self._precision: PrecisionWatch | None = None
        self._fp32: Fp32Only | None = None
        self._setters: DtypeSetters | None = None
        self._let_go: Callable[[], None] = _do_nothing
        self._roots: set[int] = set()
        self._without_model: list[Optimizer] = []  # found before any model
        self._state: str | None = None
        self._termination = Termination(self)
        self._troubled = False
        self._live: LiveView | None = None
        self._compiles = CompileWatch(self._forgo_operations)

    @property
    def recorded(self) -> bool:
        """Whether recording has begun."""
        return self._recorder is not None

    @property
    def missed(self) -> int | None:
        """Steps seen, if something of them is missing in the run folder."""
        recorder = self._recorder
        return recorder.step if recorder is not None and recorder.state == "failed" else None

    def attach(self) -> None:
        """Look for what trains from now on; torch has been imported."""
        from mpdiag.launching.discovery import Discovery
        from mpdiag.recording import module_calls
        from mpdiag.tracing.dtype_setters import DtypeSetters
        from mpdiag.tracing.precision import PrecisionWatch

        self._setters = DtypeSetters()
        self._setters.attach()
        if self.settings.options.fp32:
            from mpdiag.tracing.fp32_only import Fp32Only

            self._fp32 = Fp32Only(_tell_precision, self._setters.of)
            self._fp32.attach()
        self._precision = PrecisionWatch(
            off=self._fp32 is not None,
            say=_warn_of_autocast,
            tell=_tell_precision,
            only=dict if self._fp32 is None else self._fp32.to_json,
        )
        if self._precision.off:  # a region may be entered before the model in it is found
            self._precision.attach()
        self._discovery = Discovery(self, early=bool(self.settings.options.traced))
        self._discovery.attach()
        # After the discovery's: a compiler that traces a call finds its model before it is recorded.
        self._let_go = module_calls.hold()
        self._compiles.attach()
        processes.abandon_in_children(self.abandon)

    def abandon(self) -> None:
        """Do nothing any more in a forked child, and write nothing."""
        self._state = "abandoned"
        self._stop_looking()
        self._recorder = self._live = None

    def finish(self, state: str) -> None:
        """Stop and finish the run folder; of several calls the first one counts.

        One before the script's end leaves what ``--fp32`` switched off as it is: a training
        that went on in half precision from there would be neither.
        """
        if self._state is not None:
            self._precision_as_it_was()
            return
        with self._termination.after_this():
            carry_through(lambda _again: self._finish(state))

    def _finish(self, state: str) -> None:
        self._state = state
        self._stop_looking()
        if self._recorder is not None:
            self._recorder.close(state)
            _tell_steps(self._recorder)

    def rescue(self) -> None:
        """Write what was counted, from another thread, while the main thread waits in torch."""
        if self._state is None and self._recorder is not None:
            self._recorder.rescue()

    def _stop_looking(self) -> None:
        if self._discovery is not None:
            self._discovery.detach()
        self._let_go()
        self._compiles.detach()
        self._precision_as_it_was()
        if self._setters is not None:
            self._setters.detach()

    def _precision_as_it_was(self) -> None:
        if self._precision is not None:
            self._precision.detach()
        if self._fp32 is not None:
            self._fp32.detach()

    # -- what discovery finds ----------------------------------------------------------------------

    def found(self, found: Discovered) -> None:
        """Begin recording, or take more into it."""
        from mpdiag.launching.discovery import script_names

        if self._recorder is None and not found.roots:
            self._without_model.extend(found.optimizers)  # recorded once a model trains
            return
        early, self._without_model = self._without_model, []
        found = replace(found, optimizers=(*early, *found.optimizers))
        adopted: list[Adopted] = [(root.model, root.wrapper) for root in found.roots]
        names = script_names(adopted)
        alone = self._recorder is None and len(adopted) == 1  # which keeps PyTorch's names
        models = dict(zip([""] if alone else names, adopted, strict=True))
        self._roots.update(id(one) for r in found.roots for one in (r.model, r.wrapper))
        if self._recorder is None:
            self._begin(models, found)
        else:
            self._recorder.adopt(models, found.optimizers)
        if self._recorder is not None:
            self._recorder.name_models(
                {id(r.model): name for r, name in zip(found.roots, names, strict=True)}
            )

    def made(self, optimizer: Optimizer) -> None:
        """With ``--fp32``, make its models FP32 before it steps; it counts from its first step on."""
        if self._fp32 is not None:
            from mpdiag.launching.discovery import top_modules

            try:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                tops = [m for m in top_modules() if any(id(p) in held for p in m.parameters())]
                self._fp32.settle(tops, [optimizer], lasting=True)
            except Exception as error:  # noqa: BLE001 - the script goes on
                self.trouble(error)

    def called(self, module: nn.Module, _args: Any) -> None:
        """Let the recorder see the call in which it was made, and parts that are called alone."""
        from mpdiag.tracing.dispatch import in_backward

        recorder = self._recorder
        if recorder is None or self._discovery is None or in_backward():
            return
        if self._live is not None:
            self._live.draw()
        if id(module) not in self._roots:
            self._roots.add(id(module))
            recorder.enter(module)
        limit = self.settings.options.max_steps
        if limit is not None and self._state is None and recorder.steps_recorded >= limit:
            self.finish("complete")
            if self._precision is not None and self._fp32 is not None:
                self._precision.attach()  # until the script ends
                self._fp32.attach()

    def _forgo_operations(self) -> None:
        """Record no operations any more: the script compiles something from now on."""
        if self._recorder is None or self.settings.options.operations == 0:
            return
        reason, fix = self._compiles.reason, "record it without torch.compile"
        self._recorder.forgo_operations(reason, fix)
        if announced_ranks()[0] == 0:
            processes.tell(f"no operations from here on: {reason}: {fix}")

    def trouble(self, error: Exception) -> None:
        """Print the first error; the script goes on."""
        if not self._troubled:
            self._troubled = True
            processes.tell(
                f"cannot record all that trains ({type(error).__name__}: {error}); "
                "the script goes on"
            )

    def _begin(self, models: dict[str, Adopted], found: Discovered) -> None:
        from mpdiag.recording.recorder import Recorder
        from mpdiag.recording.run_folder import RecordingOptions
        from mpdiag.tracing.names import NameFilter, Subjects

        settings, options = self.settings, self.settings.options
        subjects = Subjects((), {}, {}, NameFilter(options.include, options.exclude))
        for prefix, (model, wrapper) in models.items():
            subjects.adopt(prefix, model, wrapper)
        folder = settings.folder
        if settings.launch is not None:
            folder = processes.claim_childs_run(folder, settings.launch)
        self._recorder = Recorder(
            subjects,
            list(found.optimizers),
            folder,
            RecordingOptions(
                options.cadence,
                options.include,
                options.exclude,
                operations=options.operations,
                trace=options.traced,
                script=settings.script,
                blocks=bool(options.blocks),
            ),
            precision=self._precision,
            setters=self._setters,
        )
        if self._compiles.seen:
            self._forgo_operations()
        if options.live and announced_ranks()[0] == 0:
            from mpdiag.launching.live_view import LiveView

            self._live = LiveView(folder.name)
            self._recorder.show_to(self._live)
        self._recorder.start(found.missed)
        self._termination.install()


def _tell_steps(recorder: Recorder) -> None:
    """Say what was counted, where a script's own count may be another."""
    taken = recorder.optimizer_steps
    if len(taken) > 1 and announced_ranks()[0] == 0:
        words = ", ".join(f"{kind} {count}" for kind, count in taken)
        processes.tell(f"{recorder.step} steps, each an update of weights; by optimizer: {words}")


def _tell_precision(line: str) -> None:
    if announced_ranks()[0] == 0:
        processes.tell(line)


def _warn_of_autocast(dtype: str) -> None:
    if announced_ranks()[0] == 0:
        processes.tell(
            f"the script's own autocast is on ({dtype}), so this does not record FP32 "
            "training; record with --fp32 to switch it off"
        )


def watch_child(settings: RecordingSettings) -> Any:
    """Record a process that the script has started; returns what to call at its end."""
    watch = ScriptRecording(settings)
    AfterTorch(watch.attach).install()
    return watch.finish


def _do_nothing() -> None:
    pass


class CompileWatch:
    """Sees calls of ``torch.compile`` that torch does not make itself.

    What is compiled shows a dispatch mode no operations. One in an optimizer's step hides no model's.

    Attributes:
        place: Where the first call stands, ``file:line``; empty before it.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._plain: Any = None
        self.place = ""

    @property
    def seen(self) -> bool:
        """Whether the script has compiled something."""
        return bool(self.place)

    @property
    def reason(self) -> str:
        """Why no operations are recorded."""
        return f"the script compiles ({self.place}), and compiled code shows no operations"

    def attach(self) -> None:
        """Wrap ``torch.compile``; torch has been imported."""
        import torch

        plain = self._plain = torch.compile

        @functools.wraps(plain)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            self._called(sys._getframe(1))
            return plain(*args, **kwargs)

        torch.compile = compile_

    def detach(self) -> None:
        """Put the original ``torch.compile`` back; a second call does nothing.

        Torch may keep ours where it was imported meanwhile, so that must hold nothing of the script's.
        """
        self._on_first = _do_nothing
        if self._plain is not None:
            import torch

            torch.compile, self._plain = self._plain, None

    def _called(self, frame: Any) -> None:
        if frame.f_globals.get("__name__") == "torch.nn.modules.module":  # model.compile()
            frame = frame.f_back
        elif str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            return
        stepping = isinstance(frame.f_locals.get("self"), sys.modules["torch"].optim.Optimizer)
        if not self.place and not stepping:
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._on_first()
