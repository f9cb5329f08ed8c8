"""The dynamic programme of L-GreCo (algorithm 1) over discretised errors, compiled.

What may live here: the recurrence and the way back through it. What may not: tables, budgets, fallbacks (`lgreco`).

Both functions are plain Python; `FORWARD` and `TRACE` are the same, compiled. Tests compare the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


def forward(buckets: Any, costs: Any, counts: Any, width: int) -> Any:
    """(best, picks): the least cost of all layers for every sum of discretised errors, and how it came about.

    buckets, costs: int64[L, C] and float64[L, C], of layer l its first counts[l] choices, of different costs; buckets
    not negative. best: float64[width], infinite where no choices have that sum of buckets. picks: int16[L, width], the
    choice of each layer at the sum up to it; of equal costs the first; -1 where there is none.
    """
    layers = counts.size
    best = np.full(width, np.inf)
    best[0] = 0.0
    after = np.empty(width)
    picks = np.full((layers, width), -1, np.int16)
    for i in range(layers):
        row = picks[i]
        after[:] = np.inf
        for c in range(counts[i]):
            shift, cost, mark = buckets[i, c], costs[i, c], np.int16(c)
            before = best[: max(width - shift, 0)]
            target, chosen = after[shift:], row[shift:]
            for e in range(before.size):
                total = before[e] + cost
                better = total < target[e]
                # Written in any case, so that the compiler can do several at once.
                target[e] = total if better else target[e]
                chosen[e] = mark if better else chosen[e]
        best, after = after, best
    return best, picks


def trace(buckets: Any, picks: Any, end: int) -> Any:
    """The choices that lead to the sum of buckets ``end``, int64[L]; -1 throughout if none do."""
    layers = picks.shape[0]
    chosen = np.full(layers, -1, np.int64)
    for i in range(layers - 1, -1, -1):
        c = picks[i, end]
        if c < 0:
            return np.full(layers, -1, np.int64)
        chosen[i] = c
        end -= buckets[i, c]
    return chosen


FORWARD: Any = njit(cache=True, nogil=True)(forward)
TRACE: Any = njit(cache=True, nogil=True)(trace)
