"""Seconds a byte, fitted in spite of outliers, and what L-GreCo makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.errors import TableError
from gcserver.planner.lgreco import solve
from gcserver.planner.lgreco_weights import FLOOR, SyncTimes, fit_sync_times, priorities, time_weights
from tests.unit.planner.lgreco_tables import make_table

TRUE = np.array([1e-9, 3e-9, 8e-9])


def samples(count=200, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    nbytes = rng.uniform(1e5, 1e7, (count, 3))
    seconds = 2e-3 + nbytes @ TRUE
    return nbytes, seconds * (1 + noise * rng.standard_normal(count))


def test_exact_times_give_their_coefficients():
    found = fit_sync_times(*samples(20))
    assert found.base == pytest.approx(2e-3, rel=1e-6) and found.per_byte == pytest.approx(TRUE, rel=1e-6)
    assert found.r2 == pytest.approx(1.0)


def test_outliers_hardly_move_the_fit():
    nbytes, seconds = samples(noise=0.01)
    clean = fit_sync_times(nbytes, seconds)
    seconds[::10] *= np.linspace(3, 30, 20)  # another program ran
    found = fit_sync_times(nbytes, seconds)
    assert found.per_byte == pytest.approx(clean.per_byte, rel=0.05) and found.outliers >= 20
    plain = np.linalg.lstsq(np.c_[np.ones(200), nbytes], seconds, rcond=None)[0][1:]
    assert np.abs(plain / TRUE - 1).max() > 0.5, "least squares alone would have followed them"


def test_a_bucket_hidden_behind_others_costs_nothing_never_less():
    nbytes, seconds = samples(noise=0.01)
    found = fit_sync_times(nbytes, seconds - 2e-9 * nbytes[:, 0])
    assert found.per_byte[0] == 0 and found.per_byte[1:] == pytest.approx(TRUE[1:], rel=0.1)
    weights = time_weights(found, [0, 0, 2])
    assert weights[0] == weights[1] == pytest.approx(FLOOR * np.mean(found.per_byte))
    assert weights[2] == found.per_byte[2]


def test_a_bucket_that_never_varied_and_times_that_never_did():
    nbytes, seconds = samples()
    nbytes[:, 1] = 0
    assert fit_sync_times(nbytes, seconds).per_byte[1] == 0
    still = fit_sync_times(nbytes, np.full(200, 0.5))
    assert still.base == pytest.approx(0.5) and still.per_byte == pytest.approx([0, 0, 0], abs=1e-15)


def test_equal_coefficients_choose_as_bytes_do_and_others_do_not():
    table = make_table([[1, 2]] * 2, [[2, 1]] * 2, [0, 1])
    equal = time_weights(SyncTimes(0.0, (5e-9, 5e-9), 1.0, 0), [0, 1])
    assert solve(table, weights=equal).full.levels == solve(table).full.levels
    # by priority the bucket that leaves last is compressed
    assert solve(table, weights=priorities([0, 1])).full.levels == (2, 1)
    assert solve(table, weights=priorities([1, 0])).full.levels == (1, 2)
    assert priorities([0, 0, 3]).tolist() == [1, 1, 4]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fit_sync_times(np.ones((4, 3)), np.ones(4)), "nbytes: expected S samples x B buckets"),
        (lambda: fit_sync_times(np.ones((9, 3)), np.ones(8)), "nbytes: expected S samples"),
        (lambda: fit_sync_times(np.ones((9, 3)), np.full(9, np.nan)), "samples: expected finite"),
        (lambda: time_weights(SyncTimes(0.0, (0.0,), 1.0, 0), [0]), "times: expected a bucket whose bytes"),
        (lambda: time_weights(SyncTimes(0.0, (1.0,), 1.0, 0), [1]), "buckets: expected for each layer"),
        (lambda: priorities([-1]), "buckets: expected for each layer"),
    ],
)
def test_refusals(call, said):
    with pytest.raises(TableError, match=said):
        call()
