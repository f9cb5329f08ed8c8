"""The simulated exchange that L-GreCo's weights are compared on."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import lgreco, lgreco_times


def test_buckets_are_cut_from_the_last_layer_on() -> None:
    assert lgreco_times.cut(np.array([4.0, 1.0, 1.0, 2.0, 4.0, 4.0])) == [3, 2, 2, 2, 1, 0]
    assert lgreco_times.cut(np.array([9.0, 1.0]), 2) == [1, 0]


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0.75),  # the backward pass after the first bucket
        ([0.25, 0.25, 0.25, 0.25], 1.0),  # each is gone when the next is ready, the last one shows
        ([1.0, 0.0, 0.0, 0.0], 1.0),
        ([0.0, 0.0, 0.0, 1.0], 1.75),  # nothing hides it
    ],
)
def test_what_is_sent_while_others_are_awaited_costs_nothing(nbytes: list[float], seconds: float) -> None:
    assert lgreco_times.exchange_seconds(np.array(nbytes), 1.0) == pytest.approx(seconds)


def test_levels_by_fitted_times_are_those_by_bytes_and_priorities_take_longer() -> None:
    """On a link that is busy all the time a byte costs the same in every bucket; priorities say otherwise."""
    table = lgreco.drawn(19, 57)
    found = lgreco_times.weighted(table, table.sizes[:, 0])
    assert found == lgreco_times.weighted(table, table.sizes[:, 0]), "the same seed, the same samples"
    assert min(found["uniform"]) > 2.0
    assert found["times"] == pytest.approx((1.0, 1.0), rel=0.01)
    assert min(found["priorities"]) > 1.05
