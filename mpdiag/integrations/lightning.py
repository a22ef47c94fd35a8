"""Lightning: a callback that records, and a precision plugin that trains by a plan.

::

    lightning.Trainer(callbacks=RecordCallback("runs/mine"))
    lightning.Trainer(plugins=PlanPrecision("plan.json"))
    lightning.Fabric(plugins=PlanPrecision("plan.json"))

Lightning calls ``training_step``, not the module, so what is recorded are the modules inside it,
under the names they have there, and the plan's level must be O1 (or O0).
"""

from contextlib import contextmanager
from typing import Any

from torch.optim import LBFGS, SGD, Optimizer

from mpdiag.errors import UsageError
from mpdiag.installation.extras import EXTRAS
from mpdiag.integrations.shared import Recording, TrainingState
from mpdiag.plan import PrecisionPlan
from mpdiag.training.casting import widened
from mpdiag.training.trainer import MixedPrecision

with EXTRAS["lightning"].imports("mpdiag.integrations.lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins import Precision

import os
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from mpdiag.training.results import StepResult


class RecordCallback(Recording, Callback):
    """Records a training; see ``Recording`` for arguments and attributes."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self.begin(_trained(pl_module), list(trainer.optimizers))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Finish the recording."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Finish what was recorded before the error."""
        self.end("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed")


def _trained(module: nn.Module) -> nn.Module | dict[str, nn.Module]:
    """The modules inside, by name; the module itself where it holds parameters of its own."""
    inside = {n: m for n, m in module.named_children() if any(True for _ in m.parameters())}
    own = any(True for _ in module.parameters(recurse=False))
    return module if own or not inside else inside


def _refuse_lbfgs(optimizers: list[Optimizer]) -> None:
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise UsageError("PlanPrecision cannot step LBFGS: write the loop with MixedPrecision")


class PlanPrecision(Precision):
    """Trains by a plan; gradient clipping, accumulation and manual optimization work as in Lightning.

    Under Fabric, set up all modules before you call the first one. An optimizer trains by the plan
    from its first step on.

    Attributes:
        mp: The ``MixedPrecision``; None before training begins.
        last: The result of the last step.

    Args:
        plan: A plan, or the path of one.
        options: As for ``mpdiag.MixedPrecision``: ``run``, ``backend``, ``overrides`` …

    Raises:
        UsageError: If the level is O2 or O3.
    """

    precision = "32-true"  # of weights; Lightning itself casts nothing

    def __init__(self, plan: PrecisionPlan | str | os.PathLike[str], **options: Any) -> None:
        self.plan = plan if isinstance(plan, PrecisionPlan) else PrecisionPlan.load(plan)
        level = options.get("level") or self.plan.level
        if level in ("O2", "O3"):
            raise UsageError(
                f"level {level} casts the model's inputs, and Lightning calls training_step instead of "
                "the model: pass level='O1'"
            )
        self.options = options
        self.mp: MixedPrecision | None = None
        self.last: StepResult | None = None
        self._waiting: Mapping[str, Any] | None = None
        self._modules: list[nn.Module] = []  # of Fabric, which shows the plugin no optimizers
        self._nobody: Optimizer | None = None  # stands in until the first of them steps

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Note a module that Fabric sets up."""
        if self.mp is not None and self._nobody is not None:
            raise UsageError("set up all modules with Fabric before you call the first one")
        self._modules.append(module)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Wrap the model, once there are optimizers."""
        self.teardown()
        self._modules = []
        if optimizers:
            _refuse_lbfgs(optimizers)
            self.mp = MixedPrecision(model, optimizers, self.plan, **self.options)
            if self._waiting is not None:
                TrainingState(self.mp).load_state_dict(self._waiting)
                self._waiting = None
        return model, optimizers, lr_schedulers

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around training, validation and test steps; under Fabric, around each call of a module."""
        if self.mp is None and self._modules:
            weights = [p for m in self._modules for p in m.parameters() if p.requires_grad]
            if weights:
                self._nobody = SGD(weights, lr=0.0)
                self.mp = MixedPrecision(self._modules, self._nobody, self.plan, **self.options)
        if self.mp is None:
            yield
            return
        with self.mp.autocast():
            yield

    def convert_output(self, data: Any) -> Any:
        """What a module returns under Fabric, in FP32, as Fabric's own mixed precision does."""
        return widened(data)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """A ``Trainer``'s callbacks; Fabric has none."""
        return tensor if self._modules else super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """As ``pre_backward``."""
        return tensor if self._modules else super().post_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale, and run backward.

        Args:
            tensor: The loss.
            model: What Lightning gives.
            args: The optimizer, from a ``Trainer``.
            kwargs: As for ``Tensor.backward``.
        """
        if self.mp is not None:
            self.mp.backward(tensor, **kwargs)
        elif self._modules:
            tensor.backward(*args, **kwargs)
        else:
            super().backward(tensor, model, *(args or (None,)), **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by their scale, before Fabric clips them."""
        if self.mp is not None:
            self._adopt(optimizer)
            self.mp.unscale(optimizer)

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward by the closure, hooks and clipping on unscaled gradients, step."""
        if self.mp is None and self._modules:
            return optimizer.step(closure, **kwargs) if closure else optimizer.step(**kwargs)
        if self.mp is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = None if closure is None else closure()
        if self._nobody is None:
            if result is None and model.automatic_optimization:
                return result  # training_step returned None: there is nothing to apply
            self.mp.unscale(optimizer)
            self._after_closure(model, optimizer)
        else:
            self._adopt(optimizer)
        self.last = self.mp.step(optimizer=optimizer)
        return result

    def _adopt(self, optimizer: Optimizer) -> None:
        """Put an optimizer of Fabric's under the plan."""
        if self.mp is None or self._nobody is None:
            return
        held = self.mp.context.wrapped.optimizers
        if any(optimizer is o for o in held):
            return
        _refuse_lbfgs([optimizer])
        self.mp.add_optimizer(optimizer)
        held[:] = [o for o in held if o is not self._nobody]

    def state_dict(self) -> dict[str, Any]:
        """The loss scaler's, and the counts of steps and skips."""
        return TrainingState(self.mp).state_dict() if self.mp is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's scale."""
        if self.mp is not None:
            TrainingState(self.mp).load_state_dict(state_dict)
        else:
            self._waiting = state_dict

    def teardown(self) -> None:
        """Return the model to FP32."""
        if self.mp is not None:
            self.mp.close()
            self.mp = self._nobody = None
