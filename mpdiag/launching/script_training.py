"""The training of a script's models in one process, by a plan.

Discovery reports models and optimizers as the script makes them; each group of models gets a
``ScriptTrainer``. Calls of modules run under its casts, and each optimizer's ``step`` is replaced by
the trainer's.
"""

from __future__ import annotations

import types
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from mpdiag.errors import MpdiagError
from mpdiag.launching import processes
from mpdiag.launching.gradient_calls import GradientCalls, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from mpdiag.files.paths import AnyPath
    from mpdiag.launching.discovery import Discovered, Discovery
    from mpdiag.launching.patches import Patches
    from mpdiag.plan import PrecisionPlan
    from mpdiag.training.options import Backend
    from mpdiag.training.script_trainer import ScriptTrainer


@dataclass(frozen=True)
class TrainScriptSettings:
    """How to train: plan, run folder and backend."""

    plan: PrecisionPlan
    folder: AnyPath
    backend: Backend


class ScriptTraining:
    """Trains one process by a plan.

    Attributes:
        settings: How to train.
        trainers: One for each group of models, in the order in which they were found.
        refused: Why the script cannot be trained; None while it can.
    """

    def __init__(self, settings: TrainScriptSettings) -> None:
        self.settings = settings
        self.trainers: list[ScriptTrainer] = []
        self.refused: str | None = None
        self._trainer_of: dict[int, ScriptTrainer] = {}  # by id of a module
        self._stepped_by: WeakKeyDictionary[Optimizer, ScriptTrainer] = WeakKeyDictionary()
        self._replaced: WeakSet[Optimizer] = WeakSet()  # whose step was replaced
        self._without_model: list[Optimizer] = []  # found before any model
        self._late: list[tuple[Any, bool]] = []  # hooks too late for the call being made
        self._discovery: Discovery | None = None
        self._patches: Patches | None = None
        self._over = False

    # -- life --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Patch torch and begin to look for models; torch is imported."""
        from mpdiag.launching.discovery import Discovery
        from mpdiag.launching.patches import Patches

        self._patches = Patches(GradientCalls(self.trainers))
        self._patches.install()
        self._discovery = Discovery(self, patient=True)
        self._discovery.attach()
        processes.abandon_in_children(self.abandon)

    def abandon(self) -> None:
        """In a forked child: take no part any more, and write nothing."""
        self._detach()
        self.trainers.clear()

    def finish(self, state: str) -> None:
        """Restore torch and give the models back; a second call does nothing."""
        self._detach()
        for trainer in self.trainers:
            trainer.close("complete" if state == "complete" else "failed")

    def _detach(self) -> None:
        self._over = True
        if self._discovery is not None:
            self._discovery.detach()
        if self._patches is not None:
            self._patches.release()

    def refuse(self, reason: str) -> None:
        """End the script.

        Raises:
            processes.Refusal: Always.
        """
        self.refused = f"this script cannot be trained by a plan: {reason}"
        raise processes.Refusal(self.refused)

    def summary(self) -> str:
        """What was done, in a sentence."""
        if not self.trainers:
            return ""
        last = self.trainers[-1]
        skipped = sum(trainer.skipped for trainer in self.trainers)
        several = len(last.context.wrapped.optimizers)
        of = f" of {several} optimizers" if several > 1 else ""
        return (
            f"{last.steps} steps{of} in {last.precision.format} ({last.backend}), {skipped} skipped, "
            f"loss scale {last.loss_scale:g} at the end"
        )

    # -- what discovery reports --------------------------------------------------------------------

    def found(self, found: Discovered) -> None:
        """Put new models and optimizers under the plan."""
        if not found.optimizers:
            self.refuse(
                "it changes weights without an optimizer, so a step that overflows could not be "
                "skipped; use mpdiag.MixedPrecision in it"
            )
        trainer = self._holder(found)
        if trainer is None and not found.roots:
            self._without_model.extend(found.optimizers)  # nothing that they step is cast as yet
            return
        if trainer is None:
            trainer = self._begin(found)
        else:
            for optimizer in found.optimizers:
                trainer.adopt(optimizer)
        early, self._without_model = self._without_model, []
        for optimizer in early:
            trainer.adopt(optimizer)
        for optimizer in (*early, *found.optimizers):
            self._stepped_by[optimizer] = trainer
            if optimizer not in self._replaced:
                self.made(optimizer)

    def called(self, module: nn.Module, args: Any) -> Any:
        """Cast inside this call, and return floating-point outputs in FP32."""
        import torch

        from mpdiag.tracing.dispatch import in_backward
        from mpdiag.training.casting import widened

        trainer = self._trainer_of.get(id(module))
        if trainer is None:
            return None
        casting, device_type = trainer.context.casting, trainer.context.device.type
        late, self._late = self._late, []
        stack = ExitStack()
        if not in_backward():
            trainer.forward_began(module)
            stack.enter_context(casting.forward())
        elif torch.is_autocast_enabled(device_type):
            return None  # checkpointing calls a part of a model again, and has restored its casts
        else:
            stack.enter_context(casting.recomputation())

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            handle.remove()
            stack.close()
            torch.clear_autocast_cache()  # an autocast(enabled=False) around us would keep it
            return widened(output)

        # On the module and not global: hooks that the plan placed on it must end before.
        handle = module.register_forward_hook(leave, always_call=True)
        for hook, with_kwargs in late:
            changed = hook(module, args, {}) if with_kwargs else hook(module, args)
            if changed is not None:
                args = changed[0] if with_kwargs else changed
        return args if late else None

    def trouble(self, error: Exception) -> None:
        """End the script: what cannot be understood cannot be done safely."""
        self.refuse(
            str(error) if isinstance(error, MpdiagError) else f"{type(error).__name__}: {error}"
        )

    def _holder(self, found: Discovered) -> ScriptTrainer | None:
        """The trainer that holds these optimizers' models already; for tensors of none, the last."""
        if found.roots:
            return None
        held = [id(p) for o in found.optimizers for g in o.param_groups for p in g["params"]]
        last = self.trainers[-1] if self.trainers else None
        return next((t for t in reversed(self.trainers) if t.gradients.owns(held)), last)

    def _begin(self, found: Discovered) -> ScriptTrainer:
        from mpdiag.launching.script_names import script_names
        from mpdiag.recording.counting.tensors import is_tensor_parallel
        from mpdiag.training.script_trainer import ScriptTrainer

        roots = found.roots
        names = script_names([(root.model, root.wrapper) for root in roots])
        if len(roots) == 1 and not self.trainers:
            names = [""]
        modules = [root.wrapper for root in roots]
        reason = next(filter(None, map(_why_untrainable, modules)), None)
        if reason is not None:
            self.refuse(reason)
        before = [set(m._forward_pre_hooks) for m in modules]
        settings = self.settings
        trainer = ScriptTrainer(
            dict(zip(names, modules, strict=True)),
            list(found.optimizers),
            settings.plan,
            backend=settings.backend,
            run=settings.folder,
            say=tell,
            first_step=self.trainers[-1].steps if self.trainers else 0,
        )
        wanted = {c.module for c in settings.plan.fp32_modules}
        if not self.trainers and wanted and wanted <= set(trainer.left_out):
            trainer.close()
            self.refuse(
                f"the plan keeps module {min(wanted)!r} in FP32, and the script's model has none of "
                "that name: was it recorded from another script?"
            )
        if trainer.backend == "emulated" and any(is_tensor_parallel(r.model) for r in roots):
            trainer.close()
            self.refuse(
                "its model is tensor-parallel, where emulation cannot round what each rank stores; "
                "use a device with the plan's format and --backend native, or a plan for bf16"
            )
        self.trainers.append(trainer)
        for module, known in zip(modules, before, strict=True):
            if module is found.called:
                keyed = module._forward_pre_hooks_with_kwargs
                self._late = [
                    (hook, key in keyed)
                    for key, hook in module._forward_pre_hooks.items()
                    if key not in known
                ]
            self._trainer_of.update((id(m), trainer) for m in module.modules())
        return trainer

    # -- optimizers --------------------------------------------------------------------------------

    def made(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's ``step``, under the wrappers that schedulers add later."""
        import functools

        plain = optimizer.step
        self._replaced.add(optimizer)

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

        trainer = self._stepped_by.get(optimizer)
        if trainer is None and closure is not None and self._discovery is not None:
            self._discovery.stepping(optimizer)  # the first forward pass may lie in the closure
            trainer = self._stepped_by.get(optimizer)
        if trainer is None or self._over:
            return plain() if closure is None else plain(closure)
        if in_backward():
            self.refuse(
                "its optimizer steps inside the backward pass, before it is known whether the whole "
                "step is finite; step after backward()"
            )
        if closure is None and not trainer.gradients.came_through(optimizer):
            self.refuse(
                "its gradients do not come from backward(), so the loss was never scaled; use "
                "mpdiag.MixedPrecision in it"
            )
        try:
            return trainer.step(optimizer, plain, closure)
        except MpdiagError as error:
            error.of_launching = True  # type: ignore[attr-defined]
            raise


def _why_untrainable(model: nn.Module) -> str | None:
    """Why nothing can be cast in a model from outside, if that is so."""
    import torch

    if any(p.dtype == torch.float64 for p in model.parameters()):
        return "its model is in float64, which no operation would leave; use FP32"
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        return (
            "its model is a ScriptModule, where nothing can be cast from outside; train the "
            "eager one, and script it afterwards"
        )
    if any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        return (
            "its model is compiled in place, where nothing can be cast from outside; use "
            "torch.compile(model) with --backend native, or train it eagerly"
        )
    return None
