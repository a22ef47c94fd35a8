"""Models that hold low-precision weights, and the FP32 masters that their optimizers hold.

A weight update is often thousands of times smaller than its weight; FP16 keeps 11 bits. So the
optimizer works on an FP32 copy, the master, and the model receives the rounded value after each
step (*Mixed Precision Training*, section 3.1; GTC 2019, O2). Weight decay and regularisers act on
the master, too: 1e-4 · 1e-4 is zero in FP16.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpdiag.errors import UsageError
from mpdiag.tracing.precision import HALF
from mpdiag.training.weights.given import Bundle, adopted, bundles_of
from mpdiag.training.weights.held import drop_own_gradient, hold, let_go, own_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from mpdiag.training.levels import Precision

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def cast_model(model: nn.Module, precision: Precision, fp32: frozenset[nn.Module]) -> None:
    """Cast parameters and floating-point buffers in place; parameters keep their identity.

    Args:
        model: The model.
        precision: Whether batch normalisation stays in FP32.
        fp32: Modules that stay in FP32, with all in them.
    """
    for module in castable(model, precision, fp32):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(precision.dtype)
                if parameter.grad is not None:
                    parameter.grad = None
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32:
                module._buffers[name] = buffer.to(precision.dtype)


def castable(
    module: nn.Module, precision: Precision, fp32: frozenset[nn.Module]
) -> Iterator[nn.Module]:
    """The modules in a model whose weights are of half precision."""
    if module in fp32:
        return
    if not (isinstance(module, BATCH_NORMS) and precision.keep_batch_norm_fp32):
        yield module
    for child in module.children():
        yield from castable(child, precision, fp32)


class Masters:
    """FP32 masters of the low-precision parameters that some optimizers update.

    The optimizers' groups and states hold the masters from here on. A parameter that is FP32
    already is its own master. What others write is never overwritten: into the model, it is adopted
    before the next update, element by element; into the masters, the model sees it in its next
    forward pass.

    Attributes:
        note_written: Told which parameters of the model others have written, once that was adopted.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._master: dict[Tensor, Tensor] = {}
        self._model: dict[Tensor, Tensor] = {}
        self._dtype: dict[Tensor, torch.dtype] = {}  # of the model's parameters
        self._originals: dict[Tensor, Tensor] = {}
        self._wide: dict[Tensor, tuple[Tensor, int]] = {}
        self._shown: list[Tensor] = []  # parameters that show their masters' gradients
        self._bundles: dict[int, list[Bundle]] = {}  # by id of the optimizer
        self._bundle_of: dict[Tensor, Bundle] = {}
        self._asked: list[
            tuple[int, Tensor, list[Tensor]]
        ] = []  # step, beyond the format?, masters
        self.note_written: Callable[[Sequence[Tensor]], None] = lambda _parameters: None

    def adopt(self, originals: dict[Tensor, Tensor] | None = None) -> None:
        """Give every low-precision parameter in the optimizers a master.

        Run again before each step, it finds parameters of groups that were added later.

        Args:
            originals: FP32 values by parameter, from before the model was cast: a master made from
                the rounded weight would have lost 13 bits.
        """
        known = len(self._master)
        self._originals.update(originals or {})
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._adopted(optimizer, p) for p in group["params"]]
            _refresh(optimizer)
        self._originals.clear()
        if len(self._master) != known:
            self.settle()
            self._bundle()

    def _adopted(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALF:
            return parameter
        master = self._master.get(parameter)
        if master is None:
            value = self._originals.get(parameter, parameter.detach())
            master = value.detach().clone().float().requires_grad_(parameter.requires_grad)
            self._master[parameter], self._model[master] = master, parameter
            self._dtype[parameter] = parameter.dtype
        if parameter in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(parameter)
        return master

    def _bundle(self) -> None:
        """Note what the model holds as what it was given; for each optimizer, its weights."""
        self._bundles, self._bundle_of = {}, {}
        for optimizer in self._optimizers:
            held = [m for g in optimizer.param_groups for m in g["params"] if m in self._model]
            pairs = [(self._model[m], m) for m in held]
            shared = {self._bundle_of[p]: None for p, _ in pairs if p in self._bundle_of}
            own = bundles_of([(p, m) for p, m in pairs if p not in self._bundle_of])
            self._bundle_of.update({p: bundle for bundle in own for p in bundle.parameters})
            self._bundles[id(optimizer)] = [*shared, *own]

    def _bundles_held(self, optimizers: Sequence[Optimizer] | None) -> list[Bundle]:
        chosen = self._optimizers if optimizers is None else optimizers
        return list({b: None for o in chosen for b in self._bundles.get(id(o), ())})

    def model_parameter(self, master: Tensor) -> Tensor:
        """The model's parameter that a master stands for."""
        return self._model.get(master, master)

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates for a parameter of the model."""
        return self._master.get(parameter, parameter)

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter of the model has a master."""
        return parameter in self._master

    def __len__(self) -> int:
        """How many parameters have a master of their own."""
        return len(self._master)

    # -- gradients ---------------------------------------------------------------------------------

    def gradients_of(self, held: Tensor) -> list[Tensor]:
        """The gradients that wait for what an optimizer holds: the master's, and the model's."""
        parameter = self._model.get(held)
        found = [held.grad, None if parameter is None else own_gradient(parameter)]
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def take_gradients(self, masters: Sequence[Tensor]) -> None:
        """Move the model's gradients to the masters, as FP32, still scaled; there they add up."""
        for master in masters:
            parameter = self._model.get(master)
            gradient = None if parameter is None else own_gradient(parameter)
            if parameter is None or gradient is None:
                continue
            wide = gradient.to(torch.float32)
            master.grad = wide if master.grad is None else master.grad + wide
            drop_own_gradient(parameter)

    def show_gradients(self, masters: Sequence[Tensor]) -> None:
        """Let the model's parameters show gradients that have moved to these masters."""
        for master in masters:
            parameter = self._model.get(master)
            if parameter is not None and master.grad is not None and hold(parameter, master):
                self._shown.append(parameter)

    def hide_gradients(self) -> None:
        """The step is over: parameters have none but their own."""
        while self._shown:
            let_go(self._shown.pop())

    # -- what others write -------------------------------------------------------------------------

    def note_wide(self, parameter: Tensor, value: Tensor) -> None:
        """A parameter receives a value that is known in FP32: its master may have all bits."""
        if parameter in self._master:
            self._wide[parameter] = value, parameter.data_ptr()

    def note_original(self, parameter: Tensor, value: Tensor) -> None:
        """A parameter that has come later was cast; ``value`` is what it was in FP32."""
        self._originals[parameter] = value

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the model what others have written into the masters, before a forward pass."""
        self._straighten()
        for bundle in self._bundles_held(None):
            bundle.refresh()

    @torch.no_grad()
    def begin_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Look for what others have written into the model; ``end_comparison`` adopts it.

        On a CPU it is adopted at once, and the copies of what the model was given are let go, which
        leaves room for FP32 gradients.
        """
        self._straighten()
        for bundle in self._bundles_held(optimizers):
            if bundle.on_cpu:
                self._settle(bundle)
                bundle.given = None
            else:
                bundle.begin_comparison()

    def end_comparison(self, optimizers: Sequence[Optimizer]) -> None:
        """Adopt what ``begin_update`` has found, once the device has answered."""
        for bundle in self._bundles_held(optimizers):
            if bundle.given is not None:
                self._settle(bundle)
                bundle.given = None

    @torch.no_grad()
    def remember(self, optimizers: Sequence[Optimizer] | None = None) -> None:
        """A step is over: what the model holds is what the trainer has given it."""
        self.hide_gradients()
        for bundle in self._bundles_held(optimizers):
            if bundle.given is None:
                bundle.remember()

    def restart(self) -> None:
        """Masters and model were loaded together: what the model holds was given to it."""
        self._asked.clear()
        self._wide.clear()
        self._bundle()

    @contextmanager
    def updating(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """A step of some optimizers; one that raises on its way leaves all as the loop expects it.

        What is written after it is noticed, and ``model.zero_grad()`` clears what has moved to masters.
        """
        try:
            yield
        except BaseException:
            self.remember(optimizers)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    self.show_gradients(group["params"])
            raise

    def settle(self) -> None:
        """Adopt what others have written into the model, element by element; waits for the device."""
        self._straighten()
        for bundle in self._bundles_held(None):
            self._settle(bundle)

    @torch.no_grad()
    def _settle(self, bundle: Bundle) -> None:
        changed, wide = bundle.differing(), self._known_wide()
        written = [p for p in bundle.parameters if p in changed or p in wide]
        for parameter in written:
            master = self._master[parameter]
            master.copy_(adopted(parameter, master, changed.get(parameter), wide))
            self._wide.pop(parameter, None)
        if changed:
            bundle.remember()
            self.note_written(list(changed))

    @torch.no_grad()
    def value(self, parameter: Tensor) -> Tensor:
        """The FP32 value of a parameter: its master, with what others have written adopted.

        Neither is changed. It is the master itself where nothing was written.
        """
        self._straighten()
        master = self._master.get(parameter)
        bundle = self._bundle_of.get(parameter)
        if master is None or bundle is None:
            return self.master(parameter).detach()
        changed = bundle.differing().get(parameter)
        return adopted(parameter, master, changed, self._known_wide())

    def _known_wide(self) -> dict[Tensor, Tensor]:
        """FP32 values that the model's parameters were given, unless they stand elsewhere since."""
        return {p: value for p, (value, at) in self._wide.items() if p.data_ptr() == at}

    def _straighten(self) -> None:
        """Give every parameter its own dtype back, and masters the shapes and places of theirs.

        ``p.data = …`` may put a tensor of any kind into a parameter. Its values stay.
        """
        moved = False
        for parameter, master in self._master.items():
            dtype = self._dtype[parameter]
            if parameter.dtype is not dtype:
                value = parameter.data
                parameter.data = value.to(dtype)
                self.note_wide(parameter, value)
            if parameter.shape != master.shape or parameter.device != master.device:
                same_shape = parameter.shape == master.shape
                master.data = (
                    (master if same_shape else parameter).detach().to(parameter.device).float()
                )
                moved = True
        if moved:
            self._bundle()

    @torch.no_grad()
    def give_weights(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """Round masters into the model; those that do not fit are left out and returned."""
        pairs = [(self._model[m], m) for m in masters if m in self._model]
        misfits = []
        if pairs:
            tops = torch.stack([torch.linalg.vector_norm(m, torch.inf) for _, m in pairs]).tolist()
            fitting = []
            for (parameter, master), top in zip(pairs, tops, strict=True):
                fits = top <= torch.finfo(parameter.dtype).max
                (fitting.append((parameter, master)) if fits else misfits.append(master))
            if fitting:
                torch._foreach_copy_([p for p, _ in fitting], [m for _, m in fitting])
        return misfits

    @torch.no_grad()
    def give_weights_later_checked(self, masters: Sequence[Tensor], step: int) -> list[Tensor]:
        """As ``give_weights``, without waiting for an accelerator: ``late_misfits`` has its answer.

        Until then the model holds infinities for what does not fit.

        Args:
            masters: What was updated.
            step: In which step.

        Returns:
            What does not fit, where that is known now.
        """
        pairs = [(self._model[m], m) for m in masters if m in self._model]
        devices = {m.device for _, m in pairs}
        if len(devices) != 1 or not _answers_late(devices.pop()):
            return self.give_weights(masters)
        torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        sizes = [torch.linalg.vector_norm(m, torch.inf) for _, m in pairs]
        limits = {p.dtype: torch.finfo(p.dtype).max for p, _ in pairs}
        beyond = torch.stack(
            [~(size <= limits[p.dtype]) for size, (p, _) in zip(sizes, pairs, strict=True)]
        )
        answer = torch.empty(len(pairs), dtype=torch.bool, pin_memory=beyond.is_cuda)
        answer.copy_(beyond, non_blocking=beyond.is_cuda)
        self._asked.append((step, answer, [m for _, m in pairs]))
        return []

    def late_misfits(self) -> tuple[int, list[Tensor]]:
        """A step before this one and what did not fit after it, once the device was waited for."""
        asked, self._asked = self._asked, []
        for step, answer, masters in asked:
            misfits = [m for m, beyond in zip(masters, answer.tolist(), strict=True) if beyond]
            if misfits:
                return step, misfits
        return 0, []

    @torch.no_grad()
    def release(self) -> None:
        """Hand the optimizers the model's own parameters again, in FP32 and with full values."""
        self.settle()
        self.hide_gradients()
        for master, parameter in self._model.items():
            drop_own_gradient(parameter)
            parameter.data = master.detach().clone()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._model.get(p, p) for p in group["params"]]
            _refresh(optimizer)
            for master in [m for m in optimizer.state if m in self._model]:
                optimizer.state[self._model[master]] = optimizer.state.pop(master)
        for known in (self._master, self._model, self._dtype, self._wide, self._bundle_of):
            known.clear()
        self._bundles.clear()


def _answers_late(device: torch.device) -> bool:
    """Whether Python would have to wait for what a device has computed."""
    return device.type != "cpu"


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
                message = (
                    f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')} already: "
                    "give MixedPrecision the FP32 model, it casts what the level asks for"
                )
                raise UsageError(message)


def refuse_distributed(models: Sequence[nn.Module]) -> None:
    """Refuse to cast weights that a distributed wrapper has laid out already.

    Raises:
        UsageError: DDP's buckets and FSDP's shards are of the dtype they were made with.
    """
    for model in models:
        sharded = any(type(p.data).__name__ == "DTensor" for p in model.parameters())
        if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
            message = (
                "levels O2 and O3 cast weights, which must happen before they are distributed: give "
                "MixedPrecision the plain model, then wrap it in DDP or shard it; or choose O1"
            )
            raise UsageError(message)


def refuse_vanishing_eps(optimizers: Sequence[Optimizer], dtype: torch.dtype) -> None:
    """Refuse an optimizer whose eps is zero in the dtype of the weights it updates.

    Raises:
        UsageError: Adam's 1e-8 in FP16 divides 0 by 0 at the first step.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and eps > 0 and torch.tensor(eps).to(dtype).item() == 0:
                smallest = torch.finfo(dtype).smallest_normal
                message = (
                    f"{type(optimizer).__name__}'s eps of {eps:g} is zero in "
                    f"{str(dtype).removeprefix('torch.')}, where it would divide 0 by 0: set eps to "
                    f"{smallest:.0e} or more, or keep FP32 master weights (level O2)"
                )
                raise UsageError(message)
