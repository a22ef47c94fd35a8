"""Put models and optimizers into the precision of a level, and undo it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.emulation import policy
from mpdiag.emulation.block_products import INTERCEPTED, BlockProducts, QuantisedLayer
from mpdiag.emulation.mode import unwatched
from mpdiag.errors import UsageError
from mpdiag.numerics.autocast_lists import CALLED_AS, LISTS, Rule
from mpdiag.plan import BlockPlan, Fp32Choice, PrecisionPlan
from mpdiag.tracing.capture import is_captured, refuse_capture, refuse_captured
from mpdiag.tracing.compiled_products import watch_graphs
from mpdiag.tracing.dispatch import in_backward
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.uncompiled import hide, hold_compiler, keeps_casts_apart, prepare, uncompiled
from mpdiag.training import arguments
from mpdiag.training.judgement import rank
from mpdiag.training.levels import Precision
from mpdiag.training.scaling import parameters_of
from mpdiag.training.skips.step_start import BufferGuard, StepStart
from mpdiag.training.weights import fp32_regions, lookout, masters
from mpdiag.training.weights.held import drop_own_gradient
from mpdiag.training.weights.masters import Masters

WITHOUT_WEIGHT = ("matmul", "attention")
"""Kinds of layers that multiply two tensors, neither of which is a parameter."""
NORMALISATIONS = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")
"""Modules whose statistics are FP32 whatever their input: the operation itself computes them so."""


class Wrapped:
    """Models and optimizers in the precision of a level.

    Attributes:
        models, optimizers: What was wrapped.
        precision: The level's properties.
        policy: The operation policy in force inside ``autocast``.
        masters: FP32 masters, or none.
        buffers: Guards the models' buffers.
        switch: Off: models behave as if they were not wrapped.
        half_outputs: Whether a model that holds half-precision weights returns half precision.
        fp32_inside: By id of a module: the operations that are FP32 because of a module around it, or of
            itself; None: all are.
        start: Knows when a step begins, and saves then what it may have to undo.
        compiles: Whether what is compiled may stay so.
        note_eager: Told the name of a compiled module that runs eagerly.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        device_type: str,
        names: Sequence[str] = (),
        *,
        half_outputs: bool = False,
    ) -> None:
        self._prefixes = list(names) or [""] * len(models)
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.precision = precision
        self.device_type = device_type
        self.policy = policy.Policy(precision.dtype)
        self.masters = Masters(self.optimizers if precision.master_weights else ())
        self.buffers = BufferGuard(self.models)
        self.switch = fp32_regions.Switch()
        self.half_outputs = half_outputs
        self.compiles = True
        self.note_eager: Callable[[str], None] = lambda _name: None
        self.fp32_inside: dict[int, frozenset[str] | None] = {}
        self.start = StepStart(self.buffers)
        self._additions: lookout.Additions | None = None
        self._looked = False
        self._undo: list[Callable[[], Any]] = []

    def apply(
        self, plan: PrecisionPlan, fp32_modules: Sequence[str], overrides: dict[str, Rule]
    ) -> None:
        """Place every hook and cast; ``release`` undoes it.

        Raises:
            UsageError: If a module or an operation is named that does not exist.
        """
        self.policy.overrides = overrides
        names = names_in(self._prefixes, self.models)
        whole = {name: _find(names, name) for name in fp32_modules}
        inner: dict[str, set[str]] = {}
        for choice in plan.fp32_modules:
            whole[choice.module] = _find(names, choice.module)
        for choice in plan.fp32_operations:
            if choice.module not in whole:
                self._choose(choice, names, whole, inner)
        prepare()
        self._add(watch_graphs())
        for model in self.models:
            low = model if self.precision.low_precision_model else None
            hook = _BeforeForward(low, weakref.ref(self))
            self._add(model.register_forward_pre_hook(hook, prepend=True).remove)
        if self.precision.level == "O0":
            return
        self._add(hold_compiler(regions=bool(whole or inner)))
        self.compiles = keeps_casts_apart() or not (whole or inner)
        if self.precision.low_precision_model:
            self._cast(frozenset(whole.values()))
        if self.precision.operation_casts:
            named = self._uncommon(inner, overrides) | self._quantise(plan.blocks, names)
            kernels = policy.install(self.device_type, named)
            self._add(kernels.clear)  # torch's own are in force again
            self._keep_outside(names, frozenset(inner.pop("", ())))
            hooks = {
                operations: fp32_regions.Fp32Operations(operations, self.policy, self.switch)
                for operations in map(frozenset, inner.values())
            }  # one for all alike, and blocks alike have one graph
            tell = self._telling({id(_find(names, name)): name for name in inner})
            for name, operations in inner.items():
                hooks[frozenset(operations)].tell = tell
                self._keep_inside(_find(names, name), hooks[frozenset(operations)])
        back = self.precision.dtype if self.precision.low_precision_model else None
        in_fp32 = fp32_regions.Fp32Module(self.device_type, back, self.switch)
        for module in whole.values():
            self.fp32_inside.update((id(inside), None) for inside in module.modules())
            self._hooks(in_fp32.place(module))

    def before_forward(self, called: nn.Module) -> None:
        """A forward pass of a model begins, which may belong to a step."""
        if self.precision.low_precision_model:
            self.look()
        if not (called.training or torch.is_grad_enabled()):
            return
        if self.policy.products is not None:
            self.policy.products.look()
        if torch.is_grad_enabled():
            refuse_capture()
            ddp = nn.parallel.DistributedDataParallel._active_ddp_module
            self.masters.keeps_gradients = ddp is not None and not ddp.require_backward_grad_sync
        if not is_captured():  # else random state cannot be read
            self.start.forward_began(grad=torch.is_grad_enabled())

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """Names of parameters as the optimizers hold them; of several models, by their number."""
        names: dict[int, str] = {}
        for i, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"model{i}."
            for name, parameter in model.named_parameters():
                names.setdefault(id(self.masters.master(parameter)), prefix + name)
        return [names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]

    def fp32_state(self, model: nn.Module) -> dict[str, Tensor]:
        """A model's state dict with its full FP32 weights, whatever the level holds."""
        state = dict(model.state_dict())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            value = self.masters.value(parameter)
            if name in state and state[name].shape == value.shape:  # FSDP1 holds a part of it
                state[name] = value.float().clone()
        return state

    def look(self) -> None:
        """Before a forward pass, let half-precision models have what others have changed since.

        That is what was written into the masters, dtypes of weights, and new layers.
        """
        looked, self._looked = self._looked, False
        if self._additions is None or not self.switch.on or looked:
            return
        modes = torch._C._len_torch_dispatch_stack() > 0  # the emulation, and what counts FLOPs
        with unwatched() if modes else nullcontext():
            self.masters.refresh()
            self._additions.look()

    @contextmanager
    def looked(self) -> Iterator[None]:
        """Look now, for parts of models may be called inside that no hook sees."""
        self.look()
        self._looked = True
        try:
            yield
        finally:
            self._looked = False

    def _choose(
        self,
        choice: Fp32Choice,
        names: dict[str, nn.Module],
        whole: dict[str, nn.Module],
        inner: dict[str, set[str]],
    ) -> None:
        """File one of the plan's FP32 choices: a whole module, or an operation inside one."""
        if choice.op.startswith(NORMALISATIONS):
            return
        module = _find(names, choice.module)
        operation = policy.MODULE_OPERATIONS.get(choice.op)
        if (operation is None and choice.op == type(module).__name__) or not choice.op:
            whole[choice.module] = module
        elif self.precision.operation_casts:
            name = operation or policy.operation_named(choice.op)
            inner.setdefault(choice.module, set()).update(CALLED_AS.get(name, (name,)))
        elif choice.module:  # nothing casts by operation at this level
            whole[choice.module] = module

    def _quantise(self, blocks: BlockPlan | None, names: dict[str, nn.Module]) -> frozenset[str]:
        """Compute products in block formats where the plan says so; compiled code runs eagerly.

        Returns:
            The operations that the policy must register for it.

        Raises:
            UsageError: If the plan names a module that does not exist, or a format.
        """
        if blocks is None:
            return frozenset()
        operands = blocks.operands()
        found: dict[nn.Module, list[QuantisedLayer]] = {}
        for layer in (one for one in blocks.layers if one.quantised):
            formats = {gemm: operands[gemm] for gemm in layer.quantised}
            weight = "" if layer.kind in WITHOUT_WEIGHT else layer.parameter or "weight"
            one = QuantisedLayer(layer.name, weight, layer.kind == "grouped", formats)
            found.setdefault(_find(names, layer.module), []).append(one)
            around, _, own = layer.module.rpartition(".")
            if (
                weight and own and around in names
            ):  # it may use the weight itself, as attention does
                inner = replace(one, parameter=f"{own}.{weight}")
                found.setdefault(names[around], []).append(inner)
        self.compiles = False
        known = (layer.name for layers in found.values() for layer in layers)
        products = self.policy.products = BlockProducts(known, blocks.recipe.multiple, rank())
        inside = {inner: () for module in found for inner in module.modules()}
        for module, layers in {**inside, **found}.items():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                enter = partial(products.enter, layers)
                self._add(module.register_forward_pre_hook(enter, prepend=True).remove)
                self._add(module.register_forward_hook(products.leave, always_call=True).remove)
        return INTERCEPTED

    def _keep_outside(self, names: dict[str, nn.Module], operations: frozenset[str]) -> None:
        """FP32 for operations in a model's own code and around it, but not in its submodules."""
        if not operations:
            return
        self.policy.outside = operations
        roots = {id(_find(names, ""))}
        hook = fp32_regions.Fp32Operations(frozenset(), self.policy, self.switch)
        for module in {id(m): m for m in names.values() if id(m) not in roots}.values():
            self._hooks(hook.place(module))

    def _keep_inside(self, module: nn.Module, hook: fp32_regions.Fp32Operations) -> None:
        """FP32 for operations in a module and its submodules."""
        for inside in module.modules():
            known = self.fp32_inside.get(id(inside)) or frozenset()
            self.fp32_inside[id(inside)] = known | hook.operations
        self._hooks(hook.place(module))

    def _telling(self, places: dict[int, str]) -> Callable[[nn.Module], None]:
        """Notes once of each of these modules that it runs eagerly; no hook refers to a trainer."""
        this = weakref.ref(self)

        def tell(module: nn.Module) -> None:
            wrapped, name = this(), places.pop(id(module), None)
            if wrapped is not None and name is not None:
                wrapped.note_eager(name)

        return tell

    def _uncommon(self, inner: dict[str, set[str]], overrides: dict[str, Rule]) -> frozenset[str]:
        """Operations that the policy must register on any device: those the lists treat otherwise."""
        wanted: dict[str, Rule] = dict(overrides)
        for operations in inner.values():
            wanted.update(dict.fromkeys(operations, "fp32"))
        return frozenset(op for op, rule in wanted.items() if LISTS.get(op) != rule)

    def _cast(self, fp32: frozenset[nn.Module]) -> None:
        precision = self.precision
        masters.refuse_distributed(self.models)
        refuse_captured(pair for model in self.models for pair in model.named_modules())
        parameters = {p for o in self.optimizers for p in parameters_of(o)}
        parameters.update(p for m in self.models for p in m.parameters())
        buffers = [
            (module, name, buffer)
            for model in self.models
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._watch(fp32, parameters, buffers)
        for model in self.models:
            boundary = fp32_regions.Boundary(precision.dtype, self.half_outputs, self.switch)
            self._hooks(boundary.place(model))
        if not precision.master_weights:
            self._add(lambda: follow_weights(self.optimizers))
        self._add(lambda: _widen(self.models, parameters, buffers))
        if precision.master_weights:
            self.masters.adopt()
            self._add(self.masters.release)
            for optimizer in self.optimizers:
                self._clear_both(optimizer)
                self._step_both(optimizer)
        else:
            masters.refuse_vanishing_eps(self.optimizers, precision.dtype)
            follow_weights(self.optimizers)
        self._add(lookout.read_masters(self.models, self.masters))

    def _watch(
        self,
        fp32: frozenset[nn.Module],
        parameters: set[Tensor],
        buffers: list[tuple[nn.Module, str, Tensor | None]],
    ) -> None:
        """Cast the models, what a script adds to them later, and notice values given in FP32."""

        def castable() -> Iterator[nn.Module]:
            return (c for m in self.models for c in masters.castable(m, self.precision, fp32))

        def note(parameter: Tensor, value: Tensor) -> None:
            parameters.add(parameter)
            self.masters.note_original(parameter, value)

        self._additions = lookout.Additions(
            castable, self.precision.dtype, note, lambda *found: buffers.append(found)
        )
        before_load = lookout.BeforeLoad(self.masters.note_wide)
        self._hooks([m.register_load_state_dict_pre_hook(before_load) for m in self.models])

    def _clear_both(self, optimizer: Optimizer) -> None:
        """Let ``zero_grad`` of an optimizer that holds masters clear the model's gradients too."""
        plain = optimizer.zero_grad
        held = self.masters

        def zero_grad(set_to_none: bool = True) -> None:
            plain(set_to_none)
            for master in parameters_of(optimizer):
                drop_own_gradient(held.model_parameter(master))
            if set_to_none:
                held.hide_gradients()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._add(lambda: optimizer.__dict__.pop("zero_grad", None))

    def _step_both(self, optimizer: Optimizer) -> None:
        """Let the model have the weights of a step before others' hooks after it are called."""
        for one in arguments.inside(optimizer):
            handle = one.register_step_post_hook(self.masters.stepped)
            hooks: Any = one._optimizer_step_post_hooks
            hooks.move_to_end(handle.id, last=False)
            self._add(handle.remove)

    def _hooks(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._add(handle.remove)

    def hold(self, *parts: object) -> None:
        """Keep something alive until the models are released."""
        held = list(parts)
        self._add(held.clear)

    def _add(self, undo: Callable[[], Any]) -> None:
        self._undo.append(undo)

    def release(self) -> None:
        """Models and optimizers as they were, in FP32 and with their full weights."""
        while self._undo:
            self._undo.pop()()


@uncompiled("_notice")
class _BeforeForward:
    """Tells before forward passes of a model; copies of the model tell nobody, and are FP32.

    Args:
        model: The model, if it holds half-precision weights.
        wrapped: Who is told.
    """

    def __init__(
        self, model: nn.Module | None = None, wrapped: weakref.ref[Wrapped] | None = None
    ) -> None:
        self._model, self._wrapped = model, wrapped

    def __call__(self, called: nn.Module, _args: Any) -> None:
        if self._wrapped is not None:
            self._notice(called)

    def _notice(self, called: nn.Module) -> None:
        wrapped = None if self._wrapped is None else self._wrapped()
        if wrapped is not None and not in_backward():
            wrapped.before_forward(called)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeForward:
        if self._model is not None:
            lookout.copy_in_full(self._model, memo)
        return _BeforeForward()

    def __reduce__(self) -> Any:
        return _BeforeForward, ()


hide(_BeforeForward.__call__)


def _widen(
    models: Sequence[nn.Module],
    parameters: set[Tensor],
    buffers: Sequence[tuple[nn.Module, str, Tensor | None]],
) -> None:
    """Everything in FP32 that was, and what has come since; half-precision buffers of before stay."""
    for parameter in parameters.union(*(m.parameters() for m in models)):
        if parameter.dtype in HALF:
            parameter.data = parameter.data.float()
            parameter.grad = None
    dtypes = {(m, n): torch.float32 if b is None else b.dtype for m, n, b in buffers}
    for module in {m: None for model in models for m in model.modules()}:
        for name, now in module._buffers.items():
            if now is not None and now.dtype in HALF:
                module._buffers[name] = now.to(dtypes.get((module, name), torch.float32))


def names_in(prefixes: Sequence[str], models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Every module of some models by the name a plan gives it."""
    return {
        f"{prefix}.{name}" if prefix and name else prefix or name: module
        for prefix, model in zip(prefixes, models, strict=True)
        for name, module in _named_modules(model)
    }


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules by the names a recording gives them, without the prefixes of wrappers."""
    inner: nn.Module = model
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    # The module inside a compiled one comes after it, and under the same name.
    return [(uncompiled_name(name), module) for name, module in inner.named_modules()]


def uncompiled_name(name: str) -> str:
    """A module's name without what ``torch.compile`` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _find(names: dict[str, nn.Module], name: str) -> nn.Module:
    name = uncompiled_name(name)
    if name not in names:
        raise UsageError(
            f"the plan names module {name!r}, and the model has no module of that name: was it "
            "recorded from another model?"
        )
    return names[name]


def follow_weights(optimizers: Sequence[Optimizer]) -> None:
    """Cast the state of each parameter to its dtype, as ``Optimizer.load_state_dict`` does.

    State from before the weights were cast would stay FP32 beside half-precision weights, which fused
    kernels refuse. Counters of steps stay as they are.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter.dtype in (*HALF, torch.float32):
                for key in state:
                    if key != "step":
                        state[key] = fp32_regions.cast_floats(state[key], parameter.dtype)
