"""The compiled recurrences behind MergeComp's exact cuts (`mergecomp.py`): loops over every pair of ends.

What may live here: the two recurrences. What may not: the timeline they follow, limits, the way back to a grouping.
Sums and maxima are taken in the order in which the timeline takes them, so that a cut's time is the same number.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner.timeline_jit import kernel


@kernel
def best_ends(before, groups, sums, ready, encode, exchange):  # type: ignore[no-untyped-def]
    """(best, parent) of one group more where encoding delays computing; float64[N + 1], int64[N + 1].

    before: float64[N + 1], the least time in which ``groups - 1`` groups of the first tensors are exchanged. sums,
    ready: float64[N + 1], of the first tensors. encode, exchange: (base, seconds an element). parent: where the last
    group begins, of equals the first.
    """
    ends = len(sums)
    best, parent = np.full(ends, np.inf), np.zeros(ends, np.int64)
    for e in range(1, ends):
        encoded = ready[e] + groups * encode[0] + encode[1] * sums[e]
        for d in range(e):
            time = max(encoded, before[d]) + (exchange[0] + exchange[1] * (sums[e] - sums[d]))
            if time < best[e]:
                best[e], parent[e] = time, d
    return best, parent


@kernel
def next_pairs(first, end, encoded, exchanged, sums, ready, elements, encode, exchange, limits):  # type: ignore[no-untyped-def]
    """The pairs (encoded, exchanged) that one group more leaves, as (first, end, encoded, exchanged, parent).

    first: int64[N + 2], of each end the first of its pairs. end, encoded, exchanged: of the pairs of one group less.
    sums: float64[N + 1]; ready, elements: float64[N]. limits[k]: the step time to reach with k groups after this one.
    Kept are pairs that no other one beats or equals in both times (of equals the first) and that can still keep a
    limit; of each end by rising time of encoding.
    """
    n = len(elements)
    new_first = np.zeros(n + 2, np.int64)
    room = 4 * n + 16
    ends, parents = np.empty(room, np.int64), np.empty(room, np.int64)
    a, f = np.empty(room), np.empty(room)
    least = exchange[0] + exchange[1] * elements[n - 1]
    latest_a, latest_f = np.empty(len(limits)), np.empty(len(limits))
    latest = max([limits[k] - k * exchange[0] for k in range(len(limits))])
    #: ends that can still be where a new group begins, and of each the first pair that is encoded only later
    begins, count, later = np.empty(n, np.int64), 0, first[: n + 1].copy()
    for e in range(1, n + 1):
        if first[e - 1] < first[e]:
            begins[count] = e - 1
            count += 1
        held, count = count, 0
        lo = new_first[e]
        hi = lo
        left = sums[n] - sums[e]
        for k in range(1, len(limits)):
            latest_f[k] = limits[k] - k * exchange[0] - exchange[1] * left
            latest_a[k] = limits[k] - k * encode[0] - encode[1] * left - least
        for place in range(held):
            d = begins[place]
            size, alive = sums[e] - sums[d], False
            while later[d] < first[d + 1] and encoded[later[d]] <= ready[e - 1]:
                later[d] += 1
            i = later[d]
            if i > first[d]:
                # All of these can be encoded at once: of those that come to the least, the first one counts.
                at, least_over = ready[e - 1] + encode[0] + encode[1] * size, 0.0
                if e < n:
                    least_over = max(at, ready[e]) + (encode[0] + encode[1] * elements[e])
                least_over = max(max(at, exchanged[i - 1]) + exchange[0] + exchange[1] * size, least_over)
                low, high = first[d], i - 1
                while low < high:
                    middle = (low + high) // 2
                    if max(at, exchanged[middle]) + exchange[0] + exchange[1] * size <= least_over:
                        high = middle
                    else:
                        low = middle + 1
                i = low
            while i < first[d + 1]:
                now, i = i, max(i + 1, later[d])
                at = max(encoded[now], ready[e - 1]) + encode[0] + encode[1] * size
                over = max(at, exchanged[now]) + exchange[0] + exchange[1] * size
                # However the group goes on, it is over no sooner: what keeps no limit here keeps none later.
                alive = alive or over <= latest - exchange[1] * left
                if e < n:
                    # What is over before the next group can be encoded makes no difference: such pairs become equal.
                    at = max(at, ready[e])
                    over = max(over, at + (encode[0] + encode[1] * elements[e]))
                    hope = False
                    for k in range(1, len(limits)):
                        hope = hope or (over <= latest_f[k] and at <= latest_a[k])
                    if not hope:
                        continue
                if hi == room:
                    room *= 2
                    ends, parents = _longer(ends, room), _longer(parents, room)
                    a, f = _longer(a, room), _longer(f, room)
                hi = _insert(a, f, parents, lo, hi, at, over, now)
            if alive:
                begins[count] = d
                count += 1
        ends[lo:hi] = e
        new_first[e + 1] = hi
    total = new_first[n + 1]
    return new_first, ends[:total], a[:total], f[:total], parents[:total]


@kernel
def _insert(a, f, parents, lo, hi, at, over, parent):  # type: ignore[no-untyped-def]
    """A pair among those from ``lo`` to ``hi``, a rising and f falling, if none of them beats or equals it.

    Those that it beats go. Returns the new end; there is room for one more.
    """
    low, high = lo, hi
    while low < high:
        middle = (low + high) // 2
        if a[middle] <= at:
            low = middle + 1
        else:
            high = middle
    if low > lo and f[low - 1] <= over:
        return hi
    start = low - 1 if low > lo and a[low - 1] == at else low
    stop = start
    while stop < hi and f[stop] >= over:
        stop += 1
    shift = start + 1 - stop
    if shift > 0:
        for j in range(hi - 1, stop - 1, -1):
            a[j + 1], f[j + 1], parents[j + 1] = a[j], f[j], parents[j]
    elif shift < 0:
        for j in range(stop, hi):
            a[j + shift], f[j + shift], parents[j + shift] = a[j], f[j], parents[j]
    a[start], f[start], parents[start] = at, over, parent
    return hi + shift


@kernel
def _longer(old, room):  # type: ignore[no-untyped-def]
    new = np.empty(room, old.dtype)
    for i in range(len(old)):
        new[i] = old[i]
    return new
