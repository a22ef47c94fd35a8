"""Models that hold low-precision weights, and the FP32 masters that their optimizers hold.

A weight update is often thousands of times smaller than its weight; FP16 keeps 11 bits. So the
optimizer works on an FP32 copy, the master, and the model receives the rounded value after each
step (*Mixed Precision Training*, section 3.1; GTC 2019, O2). Weight decay and regularisers act on
the master, too: 1e-4 · 1e-4 is zero in FP16.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from mpdiag.errors import UsageError
from mpdiag.tracing.precision import HALF
from mpdiag.training.judgement import norms
from mpdiag.training.levels import Precision
from mpdiag.training.scaling import parameters_of
from mpdiag.training.weights import held
from mpdiag.training.weights.given import CAST_FIRST, Weight, answers_late

_NOTHING = nullcontext()
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def castable(
    module: nn.Module, precision: Precision, fp32: frozenset[nn.Module]
) -> Iterator[nn.Module]:
    """The modules in a model whose weights are of half precision.

    Args:
        module: The model.
        precision: Whether batch normalisation stays in FP32.
        fp32: Modules that stay in FP32, with all in them.
    """
    if module in fp32:
        return
    scripted = str(getattr(module, "original_name", ""))  # the class's name in TorchScript
    is_norm = isinstance(module, BATCH_NORMS) or scripted.startswith(("BatchNorm", "SyncBatchNorm"))
    if not (is_norm and precision.keep_batch_norm_fp32):
        yield module
    for child in module.children():
        yield from castable(child, precision, fp32)


class Masters:
    """FP32 masters of the low-precision parameters that some optimizers update.

    The optimizers' groups and states hold the masters from here on. A parameter that is FP32 already is
    its own master. User writes survive: a write to a model weight is copied into its master before the
    next update, element by element; a write to a master reaches the model before the next forward pass.

    Of no optimizers there are no masters: nothing is done then, whatever is called.

    Attributes:
        note_written: Told which parameters of the model others have written, once that was adopted.
        before_giving: Called before masters are rounded into the model.
        keeps_gradients: Whether the last forward pass was under ``no_sync()``: no rank shares its
            gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._weights: dict[Tensor, Weight] = {}  # by parameter of the model
        self._of_master: dict[Tensor, Weight] = {}
        self._originals: dict[Tensor, Tensor] = {}
        self._shown: list[Tensor] = []  # parameters that show their masters' gradients
        self._compared: tuple[list[Weight], Tensor] | None = None  # and whether each was written
        self._given: list[tuple[int, list[Weight], Tensor]] = []  # by step, and which did not fit
        self.keeps_gradients = False
        self._unreduced = False  # whether gradients that wait are of such passes
        self.note_written: Callable[[Sequence[Tensor]], None] = lambda _parameters: None
        self.before_giving: Callable[[], None] = lambda: None

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter of the model has a master."""
        return parameter in self._weights

    def __len__(self) -> int:
        """How many parameters have a master of their own."""
        return len(self._weights)

    def model_parameter(self, master: Tensor) -> Tensor:
        """The model's parameter that a master stands for."""
        weight = self._of_master.get(master)
        return master if weight is None else weight.parameter

    def ids(self) -> set[int]:
        """The model's parameters that have a master of their own, by ``id``."""
        return {id(weight.parameter) for weight in self._weights.values()}

    def replaced(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """The model's parameters that some masters stand for; what is its own master is left out."""
        return [self._of_master[m].parameter for m in masters if m in self._of_master]

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates for a parameter of the model."""
        weight = self._weights.get(parameter)
        return parameter if weight is None else weight.master

    @torch.no_grad()
    def value(self, parameter: Tensor) -> Tensor:
        """The FP32 value of a parameter: its master, with what others have written adopted.

        Neither is changed. It is the master itself where nothing was written.
        """
        self._straighten()
        weight = self._weights.get(parameter)
        return parameter.detach() if weight is None else weight.value(weight.changed())

    def adopt(self) -> None:
        """Give every low-precision parameter in the optimizers a master.

        Run again before each step, it finds parameters of groups that were added later.
        """
        for optimizer in self._optimizers:
            # bitsandbytes compares parameters by identity.
            if hasattr(optimizer, "check_overrides"):
                optimizer.check_overrides()
            for group in optimizer.param_groups:
                group["params"] = [self._adopted(optimizer, p) for p in group["params"]]
            _refresh(optimizer)
        self._originals.clear()

    def _adopted(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALF:
            return parameter
        weight = self._weights.get(parameter)
        if weight is None:
            weight = Weight(parameter, self._originals.get(parameter, parameter))
            self._weights[parameter] = self._of_master[weight.master] = weight
        if parameter in optimizer.state:
            optimizer.state[weight.master] = optimizer.state.pop(parameter)
        return weight.master

    def _held_by(self, optimizers: Sequence[Optimizer]) -> list[Weight]:
        """The weights that some optimizers update, each once."""
        if not self._weights:
            return []
        masters = (master for optimizer in optimizers for master in parameters_of(optimizer))
        return [self._of_master[m] for m in dict.fromkeys(masters) if m in self._of_master]

    # -- gradients ---------------------------------------------------------------------------------

    def gradients_of(self, master: Tensor) -> list[Tensor]:
        """The gradients that wait for what an optimizer holds: the master's, and the model's."""
        weight = self._of_master.get(master)
        gradients = [master.grad, None if weight is None else held.own_gradient(weight.parameter)]
        return [gradient for gradient in gradients if gradient is not None]

    def collect_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Move the model's gradients to the masters, as FP32, still scaled; there they add up."""
        self.adopt()
        for weight in self._held_by(optimizers):
            gradient = held.own_gradient(weight.parameter)
            if gradient is not None:
                held.gather_gradient(weight.parameter, gradient, weight.master)

    def begin_pass(self, *, adds: bool) -> None:
        """A backward pass begins; one that adds to gradients adds in FP32.

        DDP reduces what lies on the model: a sum of passes under its ``no_sync()``, which is this
        rank's alone, goes back there before the pass that is reduced, rounded once.

        Args:
            adds: Whether gradients of earlier passes may wait.
        """
        if not self._optimizers:
            return
        alone, self._unreduced = adds and self._unreduced, self.keeps_gradients
        if alone and not self._unreduced:
            with torch.no_grad():
                for weight in self._weights.values():
                    held.put_back_gradient(weight.parameter, weight.master)
            self.hide_gradients()
        elif adds:
            self.collect_gradients(self._optimizers)
            for optimizer in self._optimizers:
                self.show_gradients(parameters_of(optimizer))

    def show_gradients(self, masters: Sequence[Tensor]) -> None:
        """Let the model's parameters show gradients that have moved to these masters."""
        for master in masters:
            parameter = self.model_parameter(master)
            if parameter is not master and master.grad is not None and held.hold(parameter, master):
                self._shown.append(parameter)

    def hide_gradients(self) -> None:
        """The step is over: parameters have none but their own."""
        while self._shown:
            held.let_go(self._shown.pop())

    # -- what others write -------------------------------------------------------------------------

    def note_wide(self, parameter: Tensor, value: Tensor) -> None:
        """A parameter receives a value that is known in FP32: its master may have all bits."""
        if parameter in self._weights:
            self._weights[parameter].note_wide(value)

    def note_original(self, parameter: Tensor, value: Tensor) -> None:
        """A parameter was cast; ``value`` is what it was in FP32.

        A master made from the rounded weight would have lost 13 bits.
        """
        if self._optimizers:
            self._originals[parameter] = value

    def refresh(self) -> None:
        """Give the model what others have written into the masters, before a forward pass."""
        self._straighten()
        for weight in self._weights.values():
            weight.refresh()

    def settle(self) -> None:
        """Adopt what others have written into the model, element by element; waits for the device."""
        self._straighten()
        self._settle(self._weights.values())

    def _settle(self, weights: Iterable[Weight]) -> None:
        written = []
        for weight in weights:
            changed = weight.changed()
            if changed is not None or weight.wide is not None:
                weight.master.detach().copy_(weight.value(changed))
                weight.forget_wide()
            if changed is not None:
                weight.remember()
                written.append(weight.parameter)
        if written:
            self.note_written(written)

    def _straighten(self) -> None:
        """Give every parameter its own dtype back, and masters the shapes and places of theirs.

        ``p.data = …`` may put a tensor of any kind into a parameter. Its values stay.
        """
        for weight in self._weights.values():
            weight.straighten()

    @torch.no_grad()
    def restart(self) -> None:
        """Masters and model were loaded together: what the model holds was given to it."""
        self._given.clear()
        for weight in self._weights.values():
            weight.forget_wide()
            weight.remember()

    # -- a step ------------------------------------------------------------------------------------

    def updating(self, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        """A step of some optimizers; one that raises on its way leaves all as the loop expects it.

        What is written after it is noticed, and ``model.zero_grad()`` clears what has moved to masters.
        """
        return self._updating(optimizers) if self._optimizers else _NOTHING

    @contextmanager
    def _updating(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.remember(optimizers)
            for optimizer in optimizers:
                self.show_gradients(parameters_of(optimizer))
            raise

    def begin_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Look for what others have written into the model, and move its gradients to the masters.

        On a CPU what was written is adopted at once, and the copies of what the model was given are
        let go, which leaves room for FP32 gradients. Elsewhere ``device_answered`` adopts it.
        """
        if not self._optimizers:
            return
        self._straighten()
        weights = self._held_by(optimizers)
        late = [w for w in weights if w.given is not None and answers_late(w.parameter.device)]
        if late:
            self._compared = late, _asked([w.differs() for w in late])
        for weight in weights:
            if not answers_late(weight.parameter.device):
                self._settle([weight])
                weight.given = None
        self.collect_gradients(optimizers)

    def device_answered(self, optimizers: Sequence[Optimizer]) -> tuple[int, list[Tensor]]:
        """Adopt what ``begin_update`` has found, once the device was waited for.

        Returns:
            A step before this one, and the masters that did not fit the model's format after it.
        """
        compared, self._compared = self._compared, None
        if compared is not None:
            weights, answer = compared
            self._settle(
                [w for w, differs in zip(weights, answer.tolist(), strict=True) if differs]
            )
        for weight in self._held_by(optimizers):
            weight.given = None
        given, self._given = self._given, []
        for step, weights, answer in given:
            pairs = zip(weights, answer.tolist(), strict=True)
            misfits = [weight.master for weight, beyond in pairs if beyond]
            if misfits:
                return step, misfits
        return 0, []

    def stepped(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """An optimizer has stepped: its other hooks see the new weights, and may write to them."""
        if len(optimizer._optimizer_step_post_hooks) > 1 or _global_optimizer_post_hooks:
            self.give_weights(parameters_of(optimizer))
            for weight in self._held_by([optimizer]):
                weight.remember()

    def _given_next(self, masters: Sequence[Tensor]) -> list[Weight]:
        """The weights of some masters, with what hooks have written into the model since ``stepped``."""
        weights = [self._of_master[m] for m in masters if m in self._of_master]
        for weight in weights:
            if weight.given is not None:
                self._settle([weight])
                weight.given = None
        return weights

    def give_weights(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """Round masters into the model; those that do not fit are left out and returned."""
        self.before_giving()
        weights = self._given_next(masters)
        if not weights:
            return []
        with torch.no_grad():
            misfits = _misfits(weights)
            fitting = [w for w in weights if w not in misfits] if misfits else weights
            if fitting:
                torch._foreach_copy_([w.parameter for w in fitting], [w.master for w in fitting])
        return [w.master for w in misfits]

    def give_weights_later_checked(self, masters: Sequence[Tensor], step: int) -> list[Tensor]:
        """As ``give_weights``, without waiting for an accelerator: ``device_answered`` has its answer.

        Until then the model holds infinities for what does not fit.

        Returns:
            What does not fit, where that is known now.
        """
        if not self._optimizers:
            return []
        weights = self._given_next(masters)
        if not weights or not all(answers_late(w.parameter.device) for w in weights):
            return self.give_weights(masters)
        with torch.no_grad():
            torch._foreach_copy_([w.parameter for w in weights], [w.master for w in weights])
            self._given.append((step, weights, _asked(_beyond(weights))))
        return []

    def remember(self, optimizers: Sequence[Optimizer]) -> None:
        """A step is over: what the model holds is what the trainer has given it."""
        if not self._optimizers:
            return
        self.hide_gradients()
        for weight in self._held_by(optimizers):
            if weight.given is None:
                weight.remember()

    @torch.no_grad()
    def release(self) -> None:
        """Hand the optimizers the model's own parameters again, in FP32 and with full values."""
        self.settle()
        self.hide_gradients()
        for weight in self._weights.values():
            held.drop_own_gradient(weight.parameter)
            weight.parameter.data = weight.master.detach().clone()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self.model_parameter(p) for p in group["params"]]
            _refresh(optimizer)
            for master in [m for m in optimizer.state if m in self._of_master]:
                optimizer.state[self.model_parameter(master)] = optimizer.state.pop(master)
        self._weights.clear()
        self._of_master.clear()


def _misfits(weights: Sequence[Weight]) -> list[Weight]:
    """Those whose masters are beyond the format of their parameters.

    A Euclidean norm bounds every value, and is read for all in one call; a few are looked at closely.
    """
    sizes = _together(norms([w.master for w in weights], 2.0)).tolist()
    few = [w for w, n in zip(weights, sizes, strict=True) if not n <= torch.finfo(w.dtype).max]
    beyond = _together(_beyond(few)).tolist() if few else []
    return [w for w, bad in zip(few, beyond, strict=True) if bad]


def _beyond(weights: Sequence[Weight]) -> list[Tensor]:
    """Whether each master is beyond the format of its parameter, as flags on the device."""
    tops = norms([w.master for w in weights], torch.inf)
    return [~(top <= torch.finfo(w.dtype).max) for top, w in zip(tops, weights, strict=True)]


def _asked(flags: Sequence[Tensor]) -> Tensor:
    """Flags on their way to the host: there after the next synchronisation with the device."""
    together = _together(flags)
    answer = torch.empty(len(flags), dtype=torch.bool, device="cpu", pin_memory=together.is_cuda)
    answer.copy_(together, non_blocking=together.is_cuda)
    return answer


def _together(flags: Sequence[Tensor]) -> Tensor:
    device = flags[0].device
    return torch.stack([flag if flag.device == device else flag.to(device) for flag in flags])


def _refresh(optimizer: Optimizer) -> None:
    """LBFGS keeps a list of its parameters of its own."""
    if hasattr(optimizer, "_params"):
        optimizer._params = optimizer.param_groups[0]["params"]


def refuse_low_precision(models: Sequence[nn.Module]) -> None:
    """Refuse models that are not FP32.

    Raises:
        UsageError: Naming the first parameter that is of another precision.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.dtype in HALF:
                raise UsageError(
                    f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')} already: "
                    "leave the model in FP32, because training by the plan casts what it needs"
                )


def refuse_distributed(models: Sequence[nn.Module]) -> None:
    """Refuse to cast weights that a distributed wrapper has laid out already.

    Raises:
        UsageError: DDP's buckets and FSDP's shards are of the dtype they were made with.
    """
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel")
    for model in models:
        sharded = any(type(p.data).__name__ == "DTensor" for p in model.parameters())
        kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        if sharded or not kinds.isdisjoint(wrappers):
            raise UsageError(CAST_FIRST)


def refuse_vanishing_eps(optimizers: Sequence[Optimizer], dtype: torch.dtype) -> None:
    """Refuse an optimizer whose eps is zero in the dtype of the weights it updates.

    Raises:
        UsageError: Adam's 1e-8 in FP16 divides 0 by 0 at the first step.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if (
                isinstance(eps, float)
                and eps > 0
                and torch.tensor(eps, dtype=dtype, device="cpu").item() == 0
            ):
                smallest = torch.finfo(dtype).smallest_normal
                raise UsageError(
                    f"{type(optimizer).__name__}'s eps of {eps:g} is zero in "
                    f"{str(dtype).removeprefix('torch.')}, where it would divide 0 by 0: set eps to "
                    f"{smallest:.0e} or more, or keep FP32 master weights (level O2)"
                )
