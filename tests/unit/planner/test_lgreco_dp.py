"""The recurrence: compiled against Python, and against every combination there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gcserver.planner.lgreco_dp import FORWARD, TRACE, forward, trace


def drawn(seed, layers, choices, width):
    rng = np.random.default_rng(seed)
    units = rng.integers(0, width // 2, (layers, choices))
    costs = np.floor(rng.uniform(0, 20, (layers, choices)))
    return units, costs, rng.integers(1, choices + 1, layers)


@pytest.mark.parametrize("seed", range(20))
def test_every_entry_is_the_least_of_all_combinations(seed):
    width = 40
    units, costs, counts = drawn(seed, 4, 3, width)
    best, picks = forward(units, costs, counts, width)
    expected = np.full(width, np.inf)
    for way in itertools.product(*(range(c) for c in counts)):
        end = sum(units[i, c] for i, c in enumerate(way))
        if end < width:
            expected[end] = min(expected[end], sum(costs[i, c] for i, c in enumerate(way)))
    assert np.array_equal(best, expected)
    for end in range(width):
        way = trace(units, picks, end)
        if np.isinf(best[end]):
            assert way.tolist() == [-1] * 4
        else:
            assert sum(units[i, c] for i, c in enumerate(way)) == end
            assert sum(costs[i, c] for i, c in enumerate(way)) == best[end]


@pytest.mark.parametrize("seed", range(5))
def test_compiled_and_python_agree_in_everything(seed):
    units, costs, counts = drawn(seed, 6, 4, 60)
    plain, compiled = forward(units, costs, counts, 60), FORWARD(units, costs, counts, 60)
    assert all(np.array_equal(a, b) for a, b in zip(plain, compiled, strict=True))
    for end in range(60):
        assert np.array_equal(trace(units, plain[1], end), TRACE(units, plain[1], end))


def test_choices_that_share_a_bucket_leave_the_cheaper_one():
    # the paper's pseudo-code, line 10, keeps the last
    units, costs = np.array([[3, 3]]), np.array([[1.0, 9.0]])
    best, picks = FORWARD(units, costs, np.array([2]), 5)
    assert best[3] == 1 and picks[0, 3] == 0


def test_of_equal_costs_the_first_choice():
    best, picks = FORWARD(np.array([[1, 1], [2, 2]]), np.array([[4.0, 4.0], [1.0, 1.0]]), np.array([2, 2]), 5)
    assert best[3] == 5 and TRACE(np.array([[1, 1], [2, 2]]), picks, 3).tolist() == [0, 0]


def test_no_layers_and_choices_beyond_the_row():
    none = np.zeros((0, 1), np.int64)
    best, _ = FORWARD(none, none.astype(np.float64), np.zeros(0, np.int64), 3)
    assert best.tolist() == [0, np.inf, np.inf]
    best, _ = FORWARD(np.array([[3, 900]]), np.array([[1.0, 0.0]]), np.array([2]), 3)
    assert np.isinf(best).all()
