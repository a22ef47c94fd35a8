"""The training of a script's models in one process, by a plan.

Discovery reports models and optimizers as the script makes them; each group of models gets a
``ScriptTrainer``. Calls of modules run under its casts, and each optimizer's ``step`` is replaced by
the trainer's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from mpdiag.display.wording import counted, scale_text
from mpdiag.errors import MpdiagError
from mpdiag.files.paths import AnyPath
from mpdiag.launching import processes
from mpdiag.launching.gradient_calls import GradientCalls
from mpdiag.launching.plan_age import PlanAge
from mpdiag.launching.termination import Termination
from mpdiag.numerics.block_recipes import EMULATED, format_label
from mpdiag.recording.lifecycle import carry_through
from mpdiag.runs.provenance import announced_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from mpdiag.launching.discovery import Discovered, Discovery
    from mpdiag.launching.parameter_operations import ParameterOperations
    from mpdiag.plan import PrecisionPlan
    from mpdiag.tracing.precision_share import PrecisionShare
    from mpdiag.training.options import Backend
    from mpdiag.training.script_trainer import ScriptTrainer


@dataclass(frozen=True)
class TrainScriptSettings:
    """How to train.

    Attributes:
        plan: By what.
        folder: The run folder.
        backend: What computes in half precision.
        launch: As in ``recorded_script.RecordingSettings``.
    """

    plan: PrecisionPlan
    folder: AnyPath
    backend: Backend
    launch: str | None = None


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
        self._owners: dict[int, nn.Module] = {}  # by id of a parameter
        self._products: ParameterOperations | None = None
        self._share: PrecisionShare | None = None
        self._calls: GradientCalls | None = None
        self._stepped_by: WeakKeyDictionary[Optimizer, ScriptTrainer] = WeakKeyDictionary()
        self._replaced: WeakSet[Optimizer] = WeakSet()  # whose step was replaced
        self._without_model: list[Optimizer] = []  # found before any model
        self._late: list[tuple[Any, bool]] = []  # hooks too late for the call being made
        self._discovery: Discovery | None = None
        self._attached = ExitStack()  # what undoes ``attach``
        self._over = False
        self._termination = Termination(self)
        first = announced_ranks()[0] == 0
        self._age = PlanAge(settings.plan.conditions if first else None, processes.tell)

    # -- life --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Patch torch and begin to look for models; torch is imported."""
        from mpdiag.launching.discovery import Discovery
        from mpdiag.launching.parameter_operations import ParameterOperations
        from mpdiag.launching.patches import Patches
        from mpdiag.tracing.autograd_graph import BackwardPasses
        from mpdiag.tracing.precision_share import PrecisionShare

        self._share = PrecisionShare(everywhere=True)
        self._products = ParameterOperations(self)
        passes = BackwardPasses(self._products.backward_pass)
        self._calls = GradientCalls(self.trainers, self.refuse)
        patches = Patches(self._calls, self.compiled)
        self._discovery = Discovery(self, patient=True)
        parts: list[Any] = [self._products, passes, patches, self._discovery]
        for part in parts:
            part.attach()
            self._attached.callback(part.detach)
        self._attached.callback(self._share.stop)
        processes.abandon_in_children(self.abandon)

    def abandon(self) -> None:
        """In a forked child: take no part any more, and write nothing."""
        self._detach()
        self.trainers.clear()

    def finish(self, state: str) -> None:
        """Restore torch and give the models back; a second call does nothing."""
        self._detach()
        with self._termination.after_this():
            carry_through(lambda _again: self._close(state))

    def _close(self, state: str) -> None:
        for trainer in self.trainers:
            trainer.close(state)

    def rescue(self) -> None:
        """Finish the logs from another thread, while the main thread waits in torch."""
        for trainer in self.trainers:
            if trainer.context.monitor.log is not None:
                trainer.context.monitor.log.close("interrupted")

    def let_go(self) -> None:
        """Keep nothing of the script's alive, once it is known how it was trained."""
        self.trainers.clear()
        self._trainer_of.clear()
        self._owners.clear()
        self._stepped_by.clear()  # torch may keep a function of ours that it has imported meanwhile
        self._without_model.clear()
        self._calls = self._discovery = None

    def _detach(self) -> None:
        self._over = True
        self._products = None
        self._attached.close()

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
        last = max(self.trainers, key=lambda trainer: trainer.steps)  # all share one count of steps
        skipped = sum(trainer.skipped for trainer in self.trainers)
        several = sum(len(trainer.context.wrapped.optimizers) for trainer in self.trainers)
        of = f" of {several} optimizers" if several > 1 else ""
        rest = f"{skipped} skipped, loss scale {scale_text(last.loss_scale)} at the end"
        name = " and ".join(dict.fromkeys((last.precision.name, last.precision.format)))
        if self._share is None or last.precision.level == "O0":
            done = f"{counted(last.steps, 'step')}{of}"
            return f"{done} in {name} ({last.backend}), {rest}"
        return describe_share(self._share, last.steps, of, name, last.backend, rest)

    @property
    def missed(self) -> int | None:
        """Steps trained, if something of them is missing in the run folder."""
        logs = [trainer.context.monitor.log for trainer in self.trainers]
        lost = any(log is not None and log.failed for log in logs)
        return max(trainer.steps for trainer in self.trainers) if lost else None

    @property
    def in_vain(self) -> bool:
        """Whether the plan asks for half precision, and nothing that was counted ran in it."""
        low = any(trainer.precision.level != "O0" for trainer in self.trainers)
        return low and self._share is not None and self._share.share == 0

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
        from mpdiag.tracing.uncompiled import compiler_looks_on, hide, unseen
        from mpdiag.training.casting import widened

        trainer = self._trainer_of.get(id(module))
        if trainer is None:
            return None
        # Checkpointing calls a part of a model again, and has restored its casts.
        again = in_backward() and torch.is_autocast_enabled(trainer.context.ranks.device.type)
        if again and self._products is None:
            return None
        trained = [m for t in self.trainers for m in t.context.wrapped.models]
        # A recording knows the input of a module that is all that trains.
        if self._age.wants_input and torch.is_grad_enabled() and trained == [module]:
            self._age.called(args)
        late, self._late = self._late, []
        stack = ExitStack()

        def left(output: Any) -> Any:
            handle.remove()
            stack.close()
            if again:
                return None
            torch.clear_autocast_cache()  # an autocast(enabled=False) around us would keep it
            return widened(output)

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            return unseen(left, output) if compiler_looks_on() else left(output)

        hide(leave)
        # On the module and not global: hooks that the plan placed on it must end before.
        handle = module.register_forward_hook(leave, always_call=True)
        casts = self._products.off() if again and self._products else self._casts(trainer, module)
        stack.enter_context(casts)  # from here on, hooks are the script's
        for hook, with_kwargs in late:
            changed = hook(module, args, {}) if with_kwargs else hook(module, args)
            if changed is not None:
                args = changed[0] if with_kwargs else changed
        return args if late else None

    def compiled(self, eager: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Call a compiled function; casts inside begin where it calls a model."""
        from mpdiag.tracing.uncompiled import Eagerly

        if self._discovery is not None:
            self._discovery.computing()
        if all(trainer.backend == "native" for trainer in self.trainers):
            with self._share.unswitched() if self._share is not None else nullcontext():
                return call()
        with Eagerly():
            return eager()

    @contextmanager
    def _casts(self, trainer: ScriptTrainer, module: nn.Module) -> Iterator[None]:
        """Operations of this module are cast, and its parameters' products are not looked for."""
        from mpdiag.tracing.dispatch import in_backward

        context = trainer.context
        rules = context.wrapped.fp32_inside.get(id(module), frozenset())
        with ExitStack() as stack:
            if self._products is not None:
                stack.enter_context(self._products.off())
            if not in_backward():
                trainer.forward_began(module)
                if rules is not None:  # no module around it is FP32 as a whole
                    stack.enter_context(context.casting.forward())
            elif rules is not None:
                stack.enter_context(context.casting.recomputation())
            if rules:
                context.wrapped.policy.enter(rules)
                stack.callback(context.wrapped.policy.leave)
            yield

    # -- products outside a call of a model --------------------------------------------------------

    def owner(self, parameter: Tensor) -> nn.Module | None:
        """The module that holds a parameter of a known model."""
        return self._owners.get(id(parameter))

    def met(self, parameter: Tensor) -> None:
        """The script computes with a parameter of no known model: optimizers may have been made."""
        if self._discovery is not None and parameter.requires_grad:
            self._discovery.computing()

    def is_known(self, module: nn.Module) -> bool:
        """Whether a module belongs to a known model."""
        return id(module) in self._trainer_of

    def compute(
        self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Compute a product of this module, cast by the plan; its result is FP32."""
        import torch

        from mpdiag.launching.discovery import in_transform
        from mpdiag.tracing.dispatch import in_backward
        from mpdiag.training.casting import widened

        trainer = self._trainer_of[id(module)]
        calls = self._calls
        if calls is None or calls.casts_off or in_transform():
            return function(*args, **kwargs)
        if in_backward() and (
            # Checkpointing has restored it.
            torch.is_autocast_enabled(trainer.context.ranks.device.type)
            or not torch.is_grad_enabled()  # a hook computes with true gradients
            or calls.in_script_code  # as it does where the pass itself is differentiated
        ):
            return function(*args, **kwargs)
        with self._casts(trainer, module):
            result = function(*args, **kwargs)
        return widened(result)

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
        from mpdiag.launching.discovery import script_names
        from mpdiag.recording.counting.tensors import is_tensor_parallel
        from mpdiag.tracing.precision_share import PrecisionShare
        from mpdiag.training.script_trainer import ADVICE, ScriptTrainer
        from mpdiag.training.setup import Surroundings

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
        if settings.launch is not None and not self.trainers:
            folder = processes.claim_childs_run(settings.folder, settings.launch)
            self.settings = settings = replace(settings, folder=folder, launch=None)
        steps = self.trainers[-1].steps if self.trainers else 0
        trainer = ScriptTrainer(
            dict(zip(names, modules, strict=True)),
            list(found.optimizers),
            settings.plan,
            backend=settings.backend,
            run=settings.folder,
            around=Surroundings(ADVICE, processes.tell, steps, self._share or PrecisionShare()),
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
        if not self.trainers:
            self._termination.install()
            emulated = trainer.backend == "emulated" and trainer.precision.level != "O0"
            if emulated and announced_ranks()[0] == 0:
                how = "is emulated here, in FP32: a step takes 1.2 to 2.7 times as long as in FP32"
                how = EMULATED if trainer.precision.blocks else how
                processes.tell(f"{format_label(trainer.precision.name)} {how}")
        self.trainers.append(trainer)
        for module, known in zip(modules, before, strict=True):
            if module is found.called:
                keyed = module._forward_pre_hooks_with_kwargs
                self._late = [
                    (hook, key in keyed)
                    for key, hook in module._forward_pre_hooks.items()
                    if key not in known
                ]
            self._know(module, trainer)
        return trainer

    def _know(self, model: nn.Module, trainer: ScriptTrainer) -> None:
        for part in model.modules():
            self._trainer_of[id(part)] = trainer
            for parameter in part.parameters(recurse=False):
                self._owners.setdefault(id(parameter), part)
        if self._products is not None:
            self._products.attach()  # to this thread, if it is another one

    def made(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's ``step``, under the wrappers that schedulers add later."""
        import functools

        from torch._compile import _disable_dynamo

        plain = optimizer.step
        self._replaced.add(optimizer)

        @_disable_dynamo
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            closure = kwargs.pop("closure", None)
            if args and callable(args[0]):
                closure, args = args[0], args[1:]
            call = functools.partial(plain, *args, **kwargs)
            return self._step(optimizer, call, closure)

        @functools.wraps(getattr(plain, "__func__", plain))
        def step(_self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return uncompiled(*args, **kwargs)

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
        self._age.stepping(optimizer)
        # Where trainers of one script take turns, they write one log.
        trainer.context.monitor.steps = max(other.steps for other in self.trainers)
        off = self._products.off() if self._products and closure is None else nullcontext()
        try:
            with off:
                return trainer.step(optimizer, plain, closure)
        except MpdiagError as error:
            error.of_launching = True  # type: ignore[attr-defined]
            raise


def describe_share(
    share: PrecisionShare, steps: int, of: str, precision: str, backend: str, rest: str
) -> str:
    """What was trained, in a sentence that says what was counted."""
    done = f"{counted(steps, 'step')}{of}"
    if share.share is None:
        return f"{done} by the plan for {precision} ({backend}), {rest}; {share.message}"
    where = f"counted in {len(share.steps):,} of {counted(steps, 'step')}"
    if share.share == 0:
        return (
            f"{done} by the plan, none of them in {precision}: 0 of {share.products} "
            f"products ran in it ({where}); {rest}"
        )
    return (
        f"{done} in {precision} ({backend}), {rest}; {share.percent} of FLOPs in {precision} "
        f"({share.low_products} of {share.products} products, {where})"
    )


def _why_untrainable(model: nn.Module) -> str | None:
    """Why nothing can be cast in a model from outside, if that is so."""
    import torch

    if any(p.dtype == torch.float64 for p in model.parameters()):
        return "its model is in float64, which the plan does not cast; use FP32"
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        return (
            "its model is a ScriptModule, and nothing inside one can be cast; train the eager "
            "model, and script it afterwards"
        )
    return None
