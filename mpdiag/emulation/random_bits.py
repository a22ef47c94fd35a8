"""Random numbers that depend on a count alone: the same after a resume, and in any order of tensors.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3* (SC 2011),
in integer arithmetic of tensors: the numbers are the same on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class CounterGenerator:
    """A source of random bits for stochastic rounding.

    Each element of a tensor has bits of its own, from four numbers: seed, step, tensor and the
    element's index in row-major order. Torch's random state is neither read nor changed.

    Attributes:
        seed: Of the training; any integer.
        step: Of the training, from 0 to 2^64 - 1.
        tensor: What tells tensors of a step apart, such as ``"blocks.0.fc1.weight"``.
    """

    seed: int
    step: int = 0
    tensor: str = ""

    def bits(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Uniform integers in [0, 2^32), as int64.

        Args:
            shape: Of the result.
            device: Where they are made.
        """
        numel = math.prod(shape)
        digest = blake2b(repr((self.seed, self.tensor)).encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        index = torch.arange((numel + 3) // 4, dtype=torch.int64, device=device)  # four at a time
        step = torch.zeros_like(index)
        words = index & _WORD, index >> 32, step + (self.step & _WORD), step + (self.step >> 32)
        found = torch.stack(philox(words, (key & _WORD, key >> 32)), dim=-1)
        return found.reshape(-1)[:numel].reshape(tuple(shape))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 with 10 rounds.

    Args:
        counter: Four words of 32 bits, each an int64 tensor of one shape.
        key: Two words of 32 bits.

    Returns:
        Four random words of 32 bits, as int64 tensors of that shape.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        # int64 keeps the lower 64 bits of a product; its upper word is read without the sign.
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a = (right >> 32).bitwise_and_(_WORD).bitwise_xor_(b).bitwise_xor_(low)
        c = (left >> 32).bitwise_and_(_WORD).bitwise_xor_(d).bitwise_xor_(high)
        b, d = right.bitwise_and_(_WORD), left.bitwise_and_(_WORD)
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return a, b, c, d
