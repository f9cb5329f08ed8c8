"""MergeComp's cuts into two groups by noisy step times: the valley they lie in, which cut may be best, which is.

What may live here: fitting times of cuts that fall and then rise, the cut to measure next, the best one. What may not:
which cuts are measured first (`mergecomp_search.py`), costs, step times of a model (`mergecomp.py`).

On one device the step time over the cut is the larger of two (proof of Theorem 3): all of the computation and then the
second group's exchange, which falls with every tensor that goes over to the first, and the first group's last gradient
with both exchanges behind it, which rises. So of all times that fall and then rise those nearest to the measured ones
say more of a cut than its own times do: its neighbours count as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import Final

#: So many standard errors may a cut lie above its fitted time, or below.
_BOUND: Final = 2.0


def falling_then_rising(times: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence nearest to ``times``, by least weighted squares, that falls at first and rises from some place on.

    Either part may be empty; neighbours may be equal. ``weights`` are above 0, as many as times.
    """
    best: list[float] = []
    least = inf
    for turn in range(max(len(times), 1)):
        left = _rising([-time for time in times[:turn]], weights[:turn])
        fitted = [-time for time in left] + _rising(times[turn:], weights[turn:])
        off = sum(w * (f - t) ** 2 for w, f, t in zip(weights, fitted, times, strict=True))
        if off < least:
            best, least = fitted, off
    return best


def _rising(times: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that do are one block with their mean, from the left."""
    blocks: list[tuple[float, float, int]] = []
    for time, weight in zip(times, weights, strict=True):
        mean, total, count = time, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, of, more = blocks.pop()
            mean = (before * of + mean * total) / (of + total)
            total, count = of + total, count + more
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def best_cut(told: Mapping[int, Sequence[float]], noise: float) -> tuple[int, float]:
    """The cut that is best by the fit though it were some standard errors above, and its fitted time, s.

    ``told``: the times of each cut that was measured, s; ``noise``: relative standard deviation of one of them.
    """
    fitted = _fitted(told)
    best = _best(fitted, told, noise)
    return best, fitted[best]


def next_cut(told: Mapping[int, Sequence[float]], noise: float) -> int | None:
    """The best cut or the one that may yet be better, whichever was measured less, at a tie the best; None if no other
    may be.

    Which may be better is what lies lowest if every cut is some standard errors below its fitted time and the best one
    above. One in the middle between two that were measured counts with the shorter time of these, as if measured once.
    """
    fitted = _fitted(told)
    best = _best(fitted, told, noise)
    low = {cut: _bound(fitted[cut], len(told[cut]), noise, -1.0) for cut in fitted if cut != best}
    for left, right in pairwise(fitted):
        if right - left > 1:
            low[(left + right) // 2] = _bound(min(fitted[left], fitted[right]), 1, noise, -1.0)
    other = min(low, key=lambda cut: (low[cut], cut), default=None)
    if other is None or low[other] >= _bound(fitted[best], len(told[best]), noise, 1.0):
        return None
    return min(best, other, key=lambda cut: len(told.get(cut, ())))


def _best(fitted: Mapping[int, float], told: Mapping[int, Sequence[float]], noise: float) -> int:
    return min(fitted, key=lambda cut: (_bound(fitted[cut], len(told[cut]), noise, 1.0), cut))


def _bound(fitted: float, times: int, noise: float, side: float) -> float:
    """Some standard errors of a mean of so many ``times`` above (``side`` 1) or below (-1) the fitted one, s."""
    return fitted * (1.0 + side * _BOUND * noise / sqrt(times))


def _fitted(told: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The fitted time of each cut, s, in the order of cuts."""
    cuts = sorted(told)
    means = [sum(told[cut]) / len(told[cut]) for cut in cuts]
    return dict(zip(cuts, falling_then_rising(means, [len(told[cut]) for cut in cuts]), strict=True))
