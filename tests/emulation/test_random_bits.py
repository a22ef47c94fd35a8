"""Random bits from counts: the published answers of Philox, and bits of their own for each element."""

import pytest
import torch

from mpdiag.emulation.random_bits import CounterGenerator, philox

# kat_vectors of Random123 1.14: counter, key, answer.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_known_answers_of_philox(counter, key, answer):
    found = philox(tuple(torch.tensor([word]) for word in words(counter)), tuple(words(key)))
    assert [int(word) for word in found] == words(answer)


def test_bits_are_those_of_seed_step_tensor_and_element():
    one = CounterGenerator(7, step=3, tensor="fc1")
    bits = one.bits((3, 5))
    assert torch.equal(bits, CounterGenerator(7, 3, "fc1").bits((3, 5)))
    assert torch.equal(bits.reshape(-1), one.bits((100,))[:15])  # by element, whatever the shape
    others = [(8, 3, "fc1"), (7, 4, "fc1"), (7, 3, "fc2"), (7, 3 + 2**32, "fc1"), (-7, 3, "fc1")]
    for other in others:
        assert not (CounterGenerator(*other).bits((3, 5)) == bits).any()
    assert one.bits((0, 4)).shape == (0, 4)
    assert one.bits(()).shape == ()


def test_bits_are_uniform_and_torchs_state_is_left_alone():
    before = torch.get_rng_state()
    bits = CounterGenerator(0).bits((1 << 16,))
    assert torch.equal(torch.get_rng_state(), before)
    assert (int(bits.min()) >= 0, int(bits.max()) < 2**32) == (True, True)
    share = torch.stack([(bits >> k) & 1 for k in range(32)]).double().mean(1)
    assert ((share - 0.5).abs() < 5 * 0.5 / 256).all()  # five standard deviations
    counts = torch.bincount(bits >> 24, minlength=256).double()
    assert ((counts - 256) ** 2 / 256).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi squared
