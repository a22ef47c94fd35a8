"""``mpdiag.MixedPrecision`` at each of its levels, on a CPU."""

from typing import Any

from conformance.outcomes import Chapter
from conformance.subjects.protocol import Scale, Subject, Training
from torch import Tensor, nn
from torch.optim import Optimizer

import mpdiag
from mpdiag import PrecisionOverrides
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale
from mpdiag.plan import PrecisionPlan


def scaler(scale: Scale) -> Backoff | ConstantScale:
    if scale.constant:
        return ConstantScale(scale.init)
    bounds = {"min_scale": scale.least, "max_scale": scale.most}
    return Backoff(
        scale.init,
        growth_factor=scale.growth,
        backoff_factor=scale.backoff,
        growth_interval=scale.interval,
        hysteresis=scale.hysteresis,
        consecutive_hysteresis=scale.consecutive,
        **{name: value for name, value in bounds.items() if value is not None},
    )


class OurTraining(Training):
    """A loop as this project's documentation writes it."""

    def __init__(self, models: list, optimizers: list, mp: mpdiag.MixedPrecision) -> None:
        self.models, self.optimizers, self.mp = models, optimizers, mp

    @property
    def scale(self) -> float:
        return self.mp.loss_scale

    def autocast(self):
        return self.mp.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.mp.backward(loss, **options)

    def unscale(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers or self.optimizers:
            self.mp.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> bool:
        results = [self.mp.step(optimizer=o) for o in optimizers] or [self.mp.step()]
        self.last = results[-1]
        return not any(result.skipped for result in results)

    def step_with(self, closure: Any) -> bool:
        def evaluate() -> Tensor:
            with self.mp.autocast():
                return closure()

        return not self.mp.step(optimizer=self.optimizer, closure=evaluate).skipped

    def state(self) -> dict[str, Any]:
        return self.mp.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.mp.load_state_dict(state)

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        chosen = self.model if model is None else model
        state = self.mp.fp32_state_dict(chosen)
        return {n: state[n].detach().float().clone() for n, _ in chosen.named_parameters()}

    def close(self) -> None:
        self.mp.close()


class DropInTraining(OurTraining):
    """A loop written for ``torch.amp.GradScaler``, by ``mp.scaler()``."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.mp.scaler().scale(loss).backward(**options)

    def unscale(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers or self.optimizers:
            self.mp.scaler().unscale_(optimizer)

    def step(self, *optimizers: Optimizer) -> bool:
        chosen = optimizers or self.optimizers
        scaler = self.mp.scaler()
        results = [scaler.step(optimizer) for optimizer in chosen]
        scaler.update()
        for optimizer in chosen:
            optimizer.zero_grad()
        self.last = results[-1]
        return not any(result.skipped for result in results)


class Ours(Subject):
    """``mpdiag.MixedPrecision`` at one level."""

    name = "mpdiag"
    ours = True

    def __init__(self, level: str, *, drop_in: bool = False) -> None:
        self.level, self.drop_in = level, drop_in
        self.label = f"{level} by mp.scaler()" if drop_in else level
        self.casts_operations = level == "O1"
        self.low_model = level in ("O2", "O3")

    def begin(
        self, models: list[nn.Module], optimizers: list[Optimizer], scale: Scale, target: str
    ) -> OurTraining:
        plan = PrecisionPlan(target=target)
        overrides = PrecisionOverrides(loss_scale=scaler(scale))
        mp = mpdiag.MixedPrecision(models, optimizers, plan, level=self.level, overrides=overrides)
        return (DropInTraining if self.drop_in else OurTraining)(models, optimizers, mp)


LEVELS = tuple(Ours(level) for level in ("O0", "O1", "O2", "O3"))
DROP_IN = Ours("O1", drop_in=True), Ours("O2", drop_in=True)


def ours(chapter: Chapter) -> tuple[Ours, ...]:
    """Ours, as far as a chapter is asked of them."""
    return (*LEVELS, *DROP_IN) if chapter.about_loops else LEVELS
