"""``mpdiag train --plan PLAN -- script.py``: train an unmodified script by a plan.

::

    the script calls a model        operations cast by the policy, outputs handed back in FP32
    loss.backward()                 loss scaled; gradients unscaled before anyone sees them
    the script clips, logs          true gradients
    optimizer.step()                ranks agree: step, or skip; the scale is adjusted
"""

from __future__ import annotations

import sys
import types
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from mpdiag.errors import InputError, MpdiagError, RunExists
from mpdiag.files.paths import place
from mpdiag.launching import processes
from mpdiag.launching.script import AfterTorch, Ending, Script, run
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import META

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from mpdiag.launching.discovery import Discovery, Found
    from mpdiag.launching.patches import Patches
    from mpdiag.training.script_trainer import Driven

Backend = Literal["auto", "native", "emulated"]
TRAINABLE = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Settings:
    """How to train: plan, run folder and backend."""

    plan: PrecisionPlan
    folder: Path
    backend: Backend


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        ending: How the script ended.
        folder: The run; None where another rank tells of it.
        summary: A sentence.
    """

    ending: Ending
    folder: Path | None
    summary: str


def train_script(
    script: Script, plan: Path, out: Path | None = None, *, backend: Backend = "auto"
) -> Trained:
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
    if read.target not in TRAINABLE:
        message = (
            f"the plan's target is {read.target}, which no trainer here computes in: analyze again "
            "with --target fp16 or --target bf16"
        )
        raise InputError(message)
    name = f"{script.name}-{read.target}"
    folder = place(out or processes.claim_run(Path("runs"), name)).absolute()
    rank, _ = processes.announced_ranks()
    if rank == 0 and (folder / META).exists():
        message = f"{folder} already holds a run: choose another folder with --out, or remove it"
        raise RunExists(message)
    if read.level not in ("O0", "O1") and rank == 0:
        _say(f"the plan's level is {read.level}; an unmodified script is trained at O1")
    drive = Drive(Settings(read, folder, backend))
    AfterTorch(drive.attach).install()
    processes.follow_children(drive_child, drive.settings)
    ending = Ending(1, "failed")
    try:
        ending = run(script)
    except processes.Refusal:
        pass
    finally:
        drive.finish(ending.state)
    if drive.refused is not None:
        raise InputError(drive.refused)
    there = (folder / META).exists()
    stepped = any(session.steps for session in drive.sessions)
    if ending.code == 0 and rank == 0 and not stepped and (drive.sessions or not there):
        message = (
            "nothing was trained by the plan: no optimizer of the script stepped a torch module"
        )
        raise InputError(message)
    return Trained(ending, folder if there and rank == 0 else None, drive.summary())


class Drive:
    """Trains one process by a plan."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sessions: list[Driven] = []
        self.refused: str | None = None
        self._owner: dict[int, Driven] = {}  # of modules, by id
        self._discovery: Discovery | None = None
        self._patches: Patches | None = None
        self._late: list[tuple[Any, bool]] = []  # hooks too late for the call being made
        self._met: set[str] = set()
        self._stepped_by: WeakKeyDictionary[Optimizer, Driven] = WeakKeyDictionary()
        self._taken_over: WeakSet[Optimizer] = WeakSet()
        self._over = False
        self._current: Driven | None = None

    # -- life --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take over; torch is there."""
        from mpdiag.launching.discovery import Discovery
        from mpdiag.launching.patches import Patches

        self._patches = Patches(self)
        self._patches.install()
        self._discovery = Discovery(self)
        self._discovery.attach()
        processes.abandon_in_children(self.abandon)

    def abandon(self) -> None:
        """In a forked child: take no part any more, and write nothing."""
        self._over = True
        if self._discovery is not None:
            self._discovery.detach()
        if self._patches is not None:
            self._patches.release()
        self.sessions = []

    def finish(self, state: str) -> None:
        """Give everything back; twice does no harm."""
        self._over = True
        if self._discovery is not None:
            self._discovery.detach()
        if self._patches is not None:
            self._patches.release()
        for session in self.sessions:
            if session.journal is not None:
                session.journal.close("complete" if state == "complete" else "failed")
            session.close()

    def refuse(self, reason: str) -> None:
        """End the script.

        Raises:
            processes.Refusal: Always.
        """
        self.refused = f"this script cannot be trained by a plan: {reason}"
        raise processes.Refusal(self.refused)

    def summary(self) -> str:
        """What was done, in a sentence."""
        if not self.sessions:
            return ""
        last = self.sessions[-1]
        skipped = sum(s.skipped for s in self.sessions)
        return (
            f"{last.steps} steps in {last.precision.format} ({last.backend}), {skipped} skipped, "
            f"loss scale {last.loss_scale:g} at the end"
        )

    # -- what discovery tells ----------------------------------------------------------------------

    def found(self, found: Found) -> None:
        """Put what is new under the plan."""
        if not found.optimizers:
            self.refuse(
                "it changes weights without an optimizer, so a step that overflows could not be "
                "skipped; use mpdiag.MixedPrecision in it"
            )
        session = self._matching(found)
        if session is None:
            session = self._begin(found)
        else:
            for optimizer in found.optimizers:
                session.adopt(optimizer)
        for optimizer in found.optimizers:
            self._stepped_by[optimizer] = session
            if optimizer not in self._taken_over:
                self.made(optimizer)

    def called(self, module: nn.Module, args: Any) -> Any:
        """Cast inside this call, and hand floating-point outputs back in FP32."""
        import torch

        from mpdiag.tracing.dispatch import in_backward

        session = self._owner.get(id(module))
        if session is None:
            return None
        late, self._late = self._late, []
        stack = ExitStack()
        if not in_backward():
            session.forward_began(module)
            stack.enter_context(session.autocast())
        elif torch.is_autocast_enabled(session.device_type):
            return None  # checkpointing calls a part of a model again, and has restored its casts
        else:
            stack.enter_context(session.recomputing())

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            handle.remove()
            stack.close()
            torch.clear_autocast_cache()  # an autocast(enabled=False) around us would keep it
            return wide(output)

        # On the module and not global: what the plan placed on it must come to its end before.
        handle = module.register_forward_hook(leave, always_call=True)
        for hook, with_kwargs in late:
            changed = hook(module, args, {}) if with_kwargs else hook(module, args)
            if changed is not None:
                args = changed[0] if with_kwargs else changed
        return args if late else None

    def trouble(self, error: Exception) -> None:
        """What cannot be understood cannot be done safely."""
        self.refuse(
            str(error) if isinstance(error, MpdiagError) else f"{type(error).__name__}: {error}"
        )

    def _matching(self, found: Found) -> Driven | None:
        """Who trains these models already."""
        if found.roots:
            return None
        held = [id(p) for o in found.optimizers for g in o.param_groups for p in g["params"]]
        return next((s for s in reversed(self.sessions) if s.owns(held)), None)

    def _begin(self, found: Found) -> Driven:
        from mpdiag.launching.script_names import script_names
        from mpdiag.recording.counting.tensors import is_tensor_parallel
        from mpdiag.training.script_trainer import Driven

        roots = found.roots
        if not roots:
            self.refuse("an optimizer steps tensors that belong to no module")
        names = script_names([(root.model, root.wrapper) for root in roots])
        if len(roots) == 1 and not self.sessions:
            names = [""]
        modules = [root.wrapper for root in roots]
        self._check(modules)
        before = [set(m._forward_pre_hooks) for m in modules]
        settings = self.settings
        session = Driven(
            dict(zip(names, modules, strict=True)),
            list(found.optimizers),
            settings.plan,
            backend=settings.backend,
            run=settings.folder,
            say=_say,
        )
        wanted = {c.module for c in settings.plan.fp32_modules}
        if not self.sessions and wanted and wanted <= set(session.left_out):
            session.close()
            self.refuse(
                f"the plan keeps module {min(wanted)!r} in FP32, and the script's model has none of "
                "that name: was it recorded from another script?"
            )
        if session.backend == "emulated" and any(is_tensor_parallel(r.model) for r in roots):
            session.close()
            self.refuse(
                "its model is tensor-parallel, where emulation cannot round what each rank stores; "
                "use a device with the plan's format and --backend native, or a plan for bf16"
            )
        if self.sessions:
            session.steps = self.sessions[-1].steps
        self.sessions.append(session)
        for module, known in zip(modules, before, strict=True):
            if module is found.called:
                keyed = module._forward_pre_hooks_with_kwargs
                self._late = [
                    (hook, key in keyed)
                    for key, hook in module._forward_pre_hooks.items()
                    if key not in known
                ]
            self._owner.update((id(m), session) for m in module.modules())
        return session

    def _check(self, modules: Sequence[nn.Module]) -> None:
        import torch

        for model in modules:
            if any(p.dtype == torch.float64 for p in model.parameters()):
                self.refuse("its model is in float64, which no operation would leave; use FP32")
            if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
                self.refuse(
                    "its model is a ScriptModule, where nothing can be cast from outside; train the "
                    "eager one, and script it afterwards"
                )
            if any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
                self.refuse(
                    "its model is compiled in place, where nothing can be cast from outside; use "
                    "torch.compile(model) with --backend native, or train it eagerly"
                )

    def made(self, optimizer: Optimizer) -> None:
        """Put ourselves before an optimizer's ``step``, under the wrappers of schedulers to come."""
        import functools

        plain = optimizer.step
        self._taken_over.add(optimizer)

        @functools.wraps(getattr(plain, "__func__", plain))
        def step(_self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            closure = kwargs.pop("closure", None)
            if args and callable(args[0]):
                closure, args = args[0], args[1:]
            call = functools.partial(plain, *args, **kwargs)
            return self._step(optimizer, call, closure)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer, plain: Callable[..., Any], closure: Any) -> Any:
        from mpdiag.tracing.dispatch import in_backward

        session = self._stepped_by.get(optimizer)
        if session is None and closure is not None and self._discovery is not None:
            self._discovery.stepping(optimizer)  # the first forward pass may lie in the closure
            session = self._stepped_by.get(optimizer)
        if session is None or self._over:
            return plain() if closure is None else plain(closure)
        if in_backward():
            self.refuse(
                "its optimizer steps inside the backward pass, before it is known whether the whole "
                "step is finite; step after backward()"
            )
        if closure is None and not session.fed(optimizer):
            self.refuse(
                "its gradients do not come from backward(), so the loss was never scaled; use "
                "mpdiag.MixedPrecision in it"
            )
        try:
            return session.take_step(optimizer, plain, closure)
        except MpdiagError as error:
            error.of_launching = True  # type: ignore[attr-defined]
            raise

    # -- what patches tell -------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The scale in force; 1 before training."""
        session = self._current or (self.sessions[-1] if self.sessions else None)
        return 1.0 if session is None else session.loss_scale

    @property
    def driving(self) -> bool:
        """Whether gradients carry the scale right now."""
        return self._current is not None and self._current.driving

    def backward(self, plain: Callable[..., None], tensors: Sequence[Tensor], options: Any) -> None:
        """A backward pass; one of strangers, or inside another, is left alone."""
        session, reached = self._reach(tensors)
        if session is None:
            plain(tensors, **options)
            return
        inputs = options.pop("inputs", None)
        if inputs is not None:
            inputs = (inputs,) if not isinstance(inputs, (list, tuple)) else tuple(inputs)
        before, self._current = self._current, session
        try:
            session.drive_backward(plain, tensors, reached, inputs or None, options)
        finally:
            self._current = before

    def grad(self, plain: Callable[..., Any], tensors: Sequence[Tensor], options: Any) -> Any:
        """``torch.autograd.grad``, likewise."""
        session, reached = self._reach(tensors)
        if session is None:
            return plain(tensors, **options)
        before, self._current = self._current, session
        try:
            return session.drive_grad(plain, tensors, reached, options)
        finally:
            self._current = before

    def retained(self, tensor: Tensor) -> None:
        """A tensor keeps its gradient."""
        for session in self.sessions:
            session.retain(tensor)

    def meets(self, what: str) -> None:
        """Tell once that the script's own mixed precision gives way."""
        if what not in self._met and processes.announced_ranks()[0] == 0:
            does = {
                "a GradScaler": "its loss scale is replaced by the plan's",
                "an autocast": "its casts are replaced by the plan's (autocast(enabled=False) stays)",
            }[what]
            _say(f"the script has {what} of its own: {does}")
        self._met.add(what)

    def _reach(self, tensors: Sequence[Any]) -> tuple[Driven | None, Any]:
        """Who trains what a backward pass from here would reach."""
        import torch

        from mpdiag.launching.discovery import in_transform
        from mpdiag.tracing.autograd_graph import leaves_of
        from mpdiag.tracing.dispatch import in_backward

        plain = all(isinstance(t, torch.Tensor) for t in tensors)
        if not self.sessions or in_backward() or in_transform() or not plain:
            return None, None
        leaves, opaque = leaves_of(tensors)
        for session in reversed(self.sessions):
            if session.owns(leaves):
                return session, (leaves, opaque)
        return (self.sessions[-1] if opaque else None), (leaves, opaque)


def wide(output: Any) -> Any:
    """What a module returns, its half-precision tensors in FP32; containers keep their kind."""
    import torch
    from torch.utils._pytree import tree_map

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16):
            return x.float()
        return _widened(x) if hasattr(x, "__dataclass_fields__") else x

    return tree_map(cast, output)


def _widened(output: Any) -> Any:
    """A dataclass with its fields widened."""
    import copy

    if isinstance(output, type):
        return output
    result = copy.copy(output)
    for name in output.__dataclass_fields__:
        if hasattr(output, name):
            object.__setattr__(result, name, wide(getattr(output, name)))
    return result


def drive_child(settings: Settings) -> Callable[[str], None]:
    """Train a process that the script has started; returns what to call at its end."""
    drive = Drive(settings)
    AfterTorch(drive.attach).install()
    return drive.finish


def _say(sentence: str) -> None:
    print(f"mpdiag: {sentence}", file=sys.stderr, flush=True)
