"""Which phases of periods a set of recorded steps never met."""

import math

import pytest

from mpdiag.numerics.periods import covers_periods, sparse_part, unseen_periods


@pytest.mark.parametrize("every", range(2, 25))
def test_multiples_of_n_miss_phases_of_the_periods_that_share_a_factor_with_n(every):
    unseen = unseen_periods(range(0, 10_000, every), 10_000)
    assert set(unseen) == {p for p in range(2, 17) if math.gcd(p, every) > 1}
    for period, phases in unseen.items():
        shared = math.gcd(period, every)
        assert phases == tuple(r for r in range(period) if r % shared)


def test_a_recording_of_all_steps_misses_nothing():
    assert unseen_periods(range(1_000), 1_000) == {}
    assert unseen_periods(range(50), 10_000) == {}  # it stopped: what came later is another matter
    assert unseen_periods([], 100) == {}


def test_the_dense_beginning_does_not_speak_for_later_steps():
    recorded = [*range(20), *range(20, 1_000, 20)]
    assert sparse_part(recorded)[0] == 40  # 20 follows 19: nothing tells it from the beginning
    assert unseen_periods(recorded, 1_000)[2] == (1,)


def test_a_short_run_misses_more():
    recorded = [*range(20), 27, 43, 71, 92, 110]
    unseen = unseen_periods(recorded, 120)
    assert set(unseen) == {p for p in range(2, 17) if len({n % p for n in recorded[20:]}) < p}
    assert 2 not in unseen


def test_a_period_that_the_training_did_not_run_through_twice_is_no_period():
    assert set(unseen_periods([0, 2, 4, 6], 8)) == {2, 4}


def test_covering_means_every_phase():
    assert covers_periods(range(16))
    assert not covers_periods(range(15))
    assert covers_periods(range(15), largest=15)
    assert not covers_periods(range(0, 2_000, 2))
