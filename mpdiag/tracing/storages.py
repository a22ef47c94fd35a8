"""What is known of tensor storages, without keeping them alive; and some of a tensor's elements."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Known = TypeVar("Known")


class WeakStorages(Generic[Known]):
    """What is known of storages, for as long as they live.

    A dict of torch's ``StorageWeakRef`` would do the same, but that class frees in ``__del__``, where
    Python swallows a Ctrl-C: a script would train on although it was told to stop. Here ``put`` and
    ``clear`` free, as ordinary code. While something is known of a storage, no other one gets its
    address, so the address may be (part of) a key.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, Known]] = {}

    def get(self, key: Any) -> Known | None:
        """What is known of the storage under this key; None if nothing, or if it was freed."""
        known = self._known.get(key)
        if known is None or torch.UntypedStorage._expired(known[0]):
            return None
        return known[1]

    def put(self, key: Any, storage: torch.UntypedStorage, value: Known) -> None:
        """Note something of a storage, in place of what was noted under this key."""
        self.drop(key)
        reference: Any = storage._weak_ref()  # an address, whatever the annotation says
        self._known[key] = reference, value

    def drop(self, key: Any) -> None:
        """Forget what is known under this key, if anything is."""
        known = self._known.pop(key, None)
        if known is not None:
            torch.UntypedStorage._free_weak_ref(known[0])

    def clear(self) -> None:
        """Forget all storages."""
        while self._known:
            _, (reference, _) = self._known.popitem()
            torch.UntypedStorage._free_weak_ref(reference)


def elements_of(tensor: torch.Tensor, numbers: NDArray[np.int64]) -> torch.Tensor:
    """Copies of some elements of a strided tensor, (k,), however it lies in memory.

    Args:
        tensor: Any shape, not empty.
        numbers: Of the elements in row-major order, (k,).
    """
    at = _on(tensor.device, numbers.tobytes())
    if tensor.dtype.itemsize == 1:  # torch takes no elements of FP8
        return tensor.detach().view(torch.uint8).take(at).view(tensor.dtype)
    return tensor.detach().take(at)


def read_back(tensors: Sequence[torch.Tensor]) -> list[NDArray[np.float64]]:
    """The values of some vectors, with one transfer for each device and dtype."""
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    found: dict[int, NDArray[np.float64]] = {}
    for mine in alike.values():
        joined, at = torch.cat([tensors[i] for i in mine]).double().cpu().numpy(), 0
        for i in mine:
            found[i] = joined[at : (at := at + tensors[i].numel())]
    return [found[i] for i in range(len(tensors))]


@lru_cache(maxsize=8192)
def _on(device: torch.device, numbers: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(numbers, np.int64).copy()).to(device)
