"""Times of cuts that fall and then rise: the nearest such sequence, the cut that is best by it, the one to measure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver.planner.mergecomp_valley import best_cut, falling_then_rising, next_cut

seconds = st.floats(0.01, 10.0)
weighted = st.lists(st.tuples(seconds, st.integers(1, 9)), min_size=1, max_size=12)


def valley(falls: list[float], rises: list[float]) -> list[float]:
    return sorted(falls, reverse=True) + sorted(rises)


def off(fitted: list[float], times: list[float], weights: list[float]) -> float:
    return float(np.dot(weights, (np.array(fitted) - times) ** 2))


@given(weighted, st.data())
def test_no_sequence_that_falls_and_then_rises_is_nearer(told: list[tuple[float, int]], data: st.DataObject) -> None:
    times, weights = [t for t, _ in told], [float(w) for _, w in told]
    fitted = falling_then_rising(times, weights)
    signs = [np.sign(b - a) for a, b in pairwise(fitted) if b != a]
    assert signs == sorted(signs)
    assert np.dot(weights, fitted) == pytest.approx(np.dot(weights, times))
    other = data.draw(st.lists(seconds, min_size=len(times), max_size=len(times)))
    turn = data.draw(st.integers(0, len(times)))
    assert off(fitted, times, weights) <= off(valley(other[:turn], other[turn:]), times, weights) + 1e-9


@given(st.lists(seconds, max_size=8), st.lists(seconds, min_size=1, max_size=8))
def test_what_falls_and_then_rises_stays(falls: list[float], rises: list[float]) -> None:
    times = valley(falls, rises)
    assert falling_then_rising(times, [1.0] * len(times)) == pytest.approx(times)


def test_a_lucky_time_does_not_win_over_better_neighbours() -> None:
    told = {10: [1.00], 20: [0.95, 0.95], 30: [0.90, 0.91], 40: [0.96, 0.97], 50: [1.05, 1.05], 60: [0.89], 70: [1.2]}
    assert best_cut(told, 0.02) == (30, pytest.approx(0.905))


def test_of_equal_cuts_that_counts_which_was_measured_most() -> None:
    assert best_cut({4: [1.0], 5: [1.0, 1.0, 1.0], 6: [1.0, 1.0], 9: [2.0]}, 0.01)[0] == 5
    assert best_cut({4: [1.0], 5: [1.0]}, 0.0)[0] == 4


def test_what_may_be_better_is_measured_next() -> None:
    sure = {10: [1.0] * 9, 11: [0.9] * 9, 12: [1.0] * 9}
    assert next_cut(sure, 0.01) is None
    assert next_cut({10: [1.0]}, 0.5) is None, "there is no other"
    assert next_cut(sure | {12: [0.905]}, 0.01) == 12, "measured less, it may be lower"
    assert next_cut(sure | {12: [0.905] * 20}, 0.01) == 11, "both are in question, and this one was measured less"
    gap = {10: [1.0] * 9, 11: [0.9] * 9, 31: [0.92] * 9}
    assert next_cut(gap, 0.01) == 21, "nobody knows what lies between"
    assert next_cut(sure | {31: [1.1] * 9}, 0.01) is None, "nothing between these two is as low"


@given(st.dictionaries(st.integers(1, 40), st.lists(seconds, min_size=1, max_size=4), min_size=1, max_size=9))
def test_cuts_lie_among_those_that_were_measured(told: dict[int, list[float]]) -> None:
    assert best_cut(told, 0.05)[0] in told
    cut = next_cut(told, 0.05)
    assert cut is None or min(told) <= cut <= max(told)
