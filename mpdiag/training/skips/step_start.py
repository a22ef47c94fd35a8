"""When a step begins, and what is saved then, so that a skip can undo it.

A step begins with the first forward pass whose gradients may be wanted. What a script does to its
buffers before that (``update_bn``, loading, averaging) is its own, and no skip takes it back. Forward
passes without gradients are of either kind: a generator's, whose output a discriminator is trained on,
belongs to the step if one ``mp.autocast()`` spans both.

A forward pass changes buffers long before it is known whether the step will be taken: running
statistics of an overflowing batch stay infinite. Version counters do not show every change: kernels of
batch norm, ``torch._foreach_*`` and writes through ``.data`` go round them, in torch's own modules and
in code that people write. So every buffer is copied when a step begins, and compared by its values.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpdiag.training.judgement import by_kind, norms, values_of
from mpdiag.training.weights.given import same


class _Phase(Enum):
    BETWEEN = "nothing has run since the last step"
    PERHAPS = "what has run may belong to the next step"
    BEGUN = "the step has begun"


class StepStart:
    """Saves buffers and random state when a step begins.

    Attributes:
        random: Torch's random state before the step's first forward pass; empty where no hook saw one.
    """

    def __init__(self, buffers: "BufferGuard") -> None:
        self._buffers = buffers
        self._phase = _Phase.BETWEEN
        self._contexts = 0  # how many there were
        self._context = 0  # the one that is open; 0: none
        self._saved_in = 0
        self._drawn = False  # whether a forward pass has run since the buffers were saved
        self.random: dict[str, Tensor] = {}

    def ended(self) -> None:
        """A step is over; what comes belongs to the next."""
        self._phase = _Phase.BETWEEN

    def hold(self) -> None:
        """Save nothing until the step is over."""
        self._phase = _Phase.BEGUN

    def enter(self, *, grad: bool) -> int:
        """A context for forward passes begins; parts of a model may be called in it that no hook sees.

        Returns:
            What ``leave`` must be given.
        """
        around = self._context
        if around == 0:
            self._contexts += 1
            self._context = self._contexts
            if grad and self._phase is not _Phase.BEGUN:
                self._save()
        return around

    def leave(self, around: int) -> None:
        """The context is over."""
        self._context = around

    def forward_began(self, *, grad: bool) -> None:
        """A forward pass begins, with gradients recorded or not."""
        if self._phase is _Phase.BEGUN:
            return
        saved_here = self._context != 0 and self._saved_in == self._context
        if self._phase is _Phase.BETWEEN or (grad and not saved_here):
            self._save()
        if not self._drawn:
            self.random = capture_random()
            self._drawn = True
        if grad:
            self._phase = _Phase.BEGUN

    def _save(self) -> None:
        # What spoils a buffer is no purpose of a script.
        self._buffers.save(unless_spoiled=self._phase is _Phase.PERHAPS)
        self.random, self._drawn = {}, False
        self._saved_in, self._phase = self._context, _Phase.PERHAPS


@dataclass(frozen=True, eq=False)
class _Saved:
    """A buffer and its copy; both are one tensor where nothing can write to it in place."""

    buffer: Tensor
    copy: Tensor


class BufferGuard:
    """Saves and restores the buffers of some models.

    The copies keep their memory from step to step.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._before: list[tuple[nn.Module, dict[str, Tensor | None]]] = []  # when the step began
        self._saved: dict[int, _Saved] = {}  # by id of the buffer, which it keeps alive
        self._bad_before: set[int] = set()  # buffers that were not finite before a step
        self._only: frozenset[nn.Module] | None = None  # modules whose buffers are judged now

    @contextmanager
    def only(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Within, only the buffers of these models are judged and restored."""
        self._only = frozenset(module for model in models for module in model.modules())
        try:
            yield
        finally:
            self._only = None

    def _judged(self) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
        if self._only is None:
            return self._before
        return [(module, before) for module, before in self._before if module in self._only]

    def save(self, *, unless_spoiled: bool = False) -> None:
        """Copy the buffers as they are now.

        Args:
            unless_spoiled: Keep the copy of a buffer that was finite when it was last saved and is
                not now; nobody waits for the device to learn which.
        """
        self._before = [(module, dict(module._buffers)) for module in _modules_of(self._models)]
        known, self._saved = self._saved, {}
        again: list[_Saved] = []
        for buffer in [b for _, buffers in self._before if buffers for b in buffers.values()]:
            if buffer is None or buffer.is_meta or id(buffer) in self._saved:
                continue
            saved = known.get(id(buffer))
            plain = type(buffer) is Tensor and buffer.layout == torch.strided
            if saved is None or not _alike(saved.copy, buffer) or not plain:
                saved = _Saved(buffer, buffer if _overlaps(buffer) else buffer.detach().clone())
            elif saved.copy is not buffer:
                again.append(saved)
            self._saved[id(buffer)] = saved
        if self._bad_before:
            self._bad_before &= self._saved.keys()
        for indices in by_kind([saved.buffer for saved in again]).values():
            group = [again[i] for i in indices]
            with torch.no_grad():
                values = [_unspoiled(s) if unless_spoiled else s.buffer for s in group]
                torch._foreach_copy_([s.copy for s in group], values)

    def _pairs(self) -> list[tuple[Tensor, _Saved | None]]:
        """Each floating-point buffer there is now, and what was in its place before."""
        pairs: dict[int, tuple[Tensor, _Saved | None]] = {}
        for module, before in self._judged():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and _may_be_infinite(buffer):
                    pairs.setdefault(id(buffer), (buffer, self._saved.get(id(before.get(name)))))
        return list(pairs.values())

    def sizes(self) -> list[Tensor]:
        """Norms of the floating-point buffers, on their devices.

        Of what was not finite before, the norm is 0: a mask of minus infinities is no fault of the step.
        """
        pairs = self._pairs()
        sizes = norms([values_of(buffer) for buffer, _ in pairs], 2.0)
        for i, (_, saved) in enumerate(pairs if self._bad_before else ()):
            if saved is not None and id(saved.buffer) in self._bad_before:
                (before,) = norms([values_of(saved.copy)], 2.0)
                sizes[i] = torch.where(torch.isfinite(before), sizes[i], 0.0)
        return sizes

    def spoiled(self) -> list[Tensor]:
        """Buffers that are not finite now and were before the step; waits for the device."""
        found = []
        for buffer, saved in self._pairs():
            if math.isfinite(_norm(buffer)):
                continue
            if not _finite(buffer) and (saved is None or _finite(saved.copy)):
                found.append(buffer)
            elif saved is not None:  # large, or not finite before: seldom worth another look
                self._bad_before.add(id(saved.buffer))
        return found

    def names_of(self, buffers: Sequence[Tensor]) -> list[str]:
        """Their names as PyTorch gives them."""
        names = {id(b): n for model in self._models for n, b in model.named_buffers()}
        return [names.get(id(b), "a buffer") for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Every buffer as it was saved; those that the step has made are taken away."""
        judged = self._judged()
        for module, before in judged:
            # TorchScript's _buffers cannot be iterated over, and its names never change.
            for name in [name for name in module._buffers.keys() if name not in before]:  # noqa: SIM118
                del module._buffers[name]
            for name, buffer in before.items():
                module._buffers[name] = buffer
        held = {id(buffer) for _, before in judged for buffer in before.values()}
        for saved in (saved for key, saved in self._saved.items() if key in held):
            buffer, copy = saved.buffer, saved.copy
            unchanged = copy is buffer or (_alike(buffer, copy) and bool(same(buffer, copy).all()))
            if not unchanged:
                buffer.copy_(copy)


def _modules_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules in some models, each once; ``Module.modules`` takes ten times as long."""
    found = list(dict.fromkeys(models))
    known = set(found)
    for module in found:  # it grows
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def _may_be_infinite(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory: torch refuses to write to it."""
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _unspoiled(saved: _Saved) -> Tensor:
    """The buffer, or its copy where that was finite and the buffer is not."""
    if not _may_be_infinite(saved.buffer):
        return saved.buffer
    keep = torch.isfinite(saved.buffer).all() | ~torch.isfinite(saved.copy).all()
    return torch.where(keep, saved.buffer, saved.copy)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(values_of(tensor)).all())


def _norm(tensor: Tensor) -> float:
    return float(norms([values_of(tensor)], 2.0)[0])


def capture_random() -> dict[str, Tensor]:
    """Torch's random state, uint8 by generator (``cpu``, ``cuda.0`` …); some kilobytes."""
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


@contextmanager
def random_as_before(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, random numbers are drawn from a saved state; outside, the generators are as before.

    Args:
        states: As ``capture_random`` gave them; generators that are not here are left out.

    Raises:
        RuntimeError: If one is not the state of a generator.
    """
    with torch.random.fork_rng():
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{i}"], i)
        yield


def dump_random() -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's global generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
    }
    # The global generator is what scripts draw from.
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    if numpy["bit_generator"] == "MT19937":
        states["numpy"] = {
            "key": torch.tensor(numpy["state"]["key"].astype(np.int64), device="cpu"),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        }
    return states


def load_random(states: Mapping[str, Any]) -> None:
    """Restore what ``dump_random`` gave; a generator that is not there is left alone."""
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in states["cuda"]])
    if "python" in states:
        saved = states["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "numpy" in states:
        saved = states["numpy"]
        key = np.array(saved["key"].tolist(), dtype=np.uint32)
        state = ("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"])
        np.random.set_state(state)  # noqa: NPY002
