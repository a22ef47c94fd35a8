"""What a factor below 1 does to stored values, against torch's own multiplication."""

import pytest
import torch

from mpdiag.numerics.decay import NARROW, decay

EVERY = {
    "bfloat16": torch.arange(0x0080, 0x7F80, dtype=torch.int32)
    .to(torch.int16)
    .view(torch.bfloat16),
    "float16": torch.arange(0x0400, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16),
}
FACTORS = (0.9, 0.99, 0.995, 0.996, 0.997, 0.998, 0.999, 0.9999, 1 - 1e-5, 1 - 1e-3 * 0.1)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", NARROW)
def test_the_values_that_stay_are_those_that_torch_gives_back(dtype, factor):
    values = EVERY[dtype]
    found = decay(dtype, factor)
    assert (found.stuck, found.values) == (
        int((values.clone().mul_(factor) == values).sum()),
        values.numel(),
    )
