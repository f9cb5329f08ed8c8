"""The compiled inner loops of Espresso: prices, the timeline, Algorithms 1 and 2, exhaustive search.

What may live here: functions on plain arrays. All are in this one file, because numba's cache notices a change of a
kernel's own file only. The Python beside them (``options_cost``, ``timeline``, ``espresso``, ``offload``) says what
they mean; the tests have a plain-Python timeline that must agree.

Resources are 0 GPU (computation too), 1 CPU, 2 intra link, 3 inter link. A plan is a chain of jobs a tensor: ``count``
[N], ``res`` [N, JOBS], ``dur`` [N, JOBS] seconds. A job's code is ``16 * tensor + position``; position 15 is the
computation of that tensor's gradient. ``log`` [4, L] holds each resource's queue since the beginning, and a state
(``ints``: running[4], head[4], tail[4], unfinished; ``floats``: until[4], work left[4]) says where in it one is, so
that a state kept at the moment gradient i is ready is enough to continue from there with other options for i and later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

JOBS = 12
GRADIENT = 15
INF = np.inf
#: What a plan has to be better by, as a share, to replace another: more than sums of the same numbers differ by.
GAIN = 1e-9


def _kernel(function: Callable[..., Any]) -> Any:
    compiled: Any = njit(cache=True, nogil=True)(function)
    return compiled


@_kernel
def _curve(knots, row, x):  # type: ignore[no-untyped-def]
    k = knots.shape[1]
    if x <= knots[row, 0, 0]:
        return knots[row, 0, 1]
    i = 1
    while i < k - 1 and x > knots[row, i, 0]:
        i += 1
    x0, y0 = knots[row, i - 1, 0], knots[row, i - 1, 1]
    return y0 + (knots[row, i, 1] - y0) * (x - x0) / (knots[row, i, 0] - x0)


@_kernel
def price(sizes, tasks, resource, terms, wire, knots):  # type: ignore[no-untyped-def]
    """Chains of jobs of all options for all sizes: count [S, O], resource and seconds [S, O, JOBS]."""
    count = np.zeros((len(sizes), len(tasks)), np.int64)
    res = np.zeros((len(sizes), len(tasks), JOBS), np.int64)
    dur = np.zeros((len(sizes), len(tasks), JOBS))
    for s in range(len(sizes)):
        n = sizes[s]
        for o in range(len(tasks)):
            jobs = 0
            for t in range(tasks[o]):
                x = terms[o, t]
                if x[4] < 0:
                    took = x[0] + x[1] * n
                    if x[2] > 0:
                        took += x[2] * (max(wire[1], wire[0] * x[3] * n) + wire[2])
                else:
                    took = _curve(knots, int(x[4]), x[3] * n)
                    if x[5] > 0:
                        took += _curve(knots, int(x[4]) + 1, x[5] * n)
                if took <= 0:
                    continue
                if jobs > 0 and res[s, o, jobs - 1] == resource[o, t]:
                    dur[s, o, jobs - 1] += took
                else:
                    res[s, o, jobs] = resource[o, t]
                    dur[s, o, jobs] = took
                    jobs += 1
            count[s, o] = jobs
    return count, res, dur


@_kernel
def _within(n, res_a, dur_a, m, res_b, dur_b):  # type: ignore[no-untyped-def]
    """Whether each job of chain a has one in chain b, in order, on the same resource and not shorter."""
    if n > m:
        return False
    k = 0
    for j in range(m):
        if k < n and res_a[k] == res_b[j] and dur_a[k] <= dur_b[j] * (1 + 1e-12):
            k += 1
    return k == n


@_kernel
def undominated(count, res, dur):  # type: ignore[no-untyped-def]
    """Which options no other one beats at every size: bool [O]; of equals the first stays."""
    sizes, n = count.shape
    keep = np.ones(n, np.bool_)
    for b in range(n):
        for a in range(n):
            if a == b or not keep[a]:
                continue
            inside, same = True, True
            for s in range(sizes):
                if not _within(count[s, a], res[s, a], dur[s, a], count[s, b], res[s, b], dur[s, b]):
                    inside = False
                    break
                same = same and _within(count[s, b], res[s, b], dur[s, b], count[s, a], res[s, a], dur[s, a])
            if inside and not (same and a > b):
                keep[b] = False
                break
    return keep


@_kernel
def simulate(first, stop, gaps, count, res, dur, log, ints, floats, limit, record, ints_at, floats_at, bubble, starts):  # type: ignore[no-untyped-def]
    """Continue the timeline from the state in ``ints`` and ``floats`` until nothing is left, or gradient ``stop``.

    Returns the time of the last end; infinity as soon as the work left on some resource shows that it cannot end
    before ``limit``. Events are taken in order of (time, resource). With ``record``, the state at every ready
    gradient goes to ``ints_at`` [N, 13], ``floats_at`` [N, 8], and ``bubble`` [N] says whether all that came before
    was complete by then; ``starts`` [N, JOBS + 1] takes the start of every job (the last: computation) if not empty.
    """
    n = len(gaps)
    t = 0.0
    while True:
        r = -1
        t_next = INF
        for q in range(4):
            if ints[q] >= 0 and floats[q] < t_next:
                t_next = floats[q]
                r = q
        if r < 0:
            return t
        t = t_next
        code = ints[r]
        i = code >> 4
        place = code & 15
        if place == GRADIENT:
            if record or i == stop:
                ints_at[i] = ints
                floats_at[i] = floats
                bubble[i] = ints[12] == 0
            if i == stop:
                return t
            ints[r] = -1
            if count[i] > 0:
                ints[12] += 1
                q = res[i, 0]
                log[q, ints[8 + q]] = i << 4
                ints[8 + q] += 1
            if i + 1 < n:
                log[0, ints[8]] = ((i + 1) << 4) | GRADIENT
                ints[8] += 1
        else:
            ints[r] = -1
            place += 1
            if place < count[i]:
                q = res[i, place]
                log[q, ints[8 + q]] = (i << 4) | place
                ints[8 + q] += 1
            else:
                ints[12] -= 1
        for q in range(4):
            if ints[q] < 0 and ints[4 + q] < ints[8 + q]:
                if t + floats[4 + q] >= limit:
                    return INF
                code = log[q, ints[4 + q]]
                ints[4 + q] += 1
                ints[q] = code
                place = code & 15
                took = gaps[code >> 4] if place == GRADIENT else dur[code >> 4, place]
                floats[q] = t + took
                floats[4 + q] -= took
                if len(starts) > 0:
                    starts[code >> 4, JOBS if place == GRADIENT else place] = t


@_kernel
def begin(gaps, count, res, dur, log, ints, floats):  # type: ignore[no-untyped-def]
    """The state before the first gradient: only its computation is queued, and runs."""
    ints[:] = 0
    ints[:4] = -1
    floats[:] = 0.0
    for i in range(len(gaps)):
        floats[4] += gaps[i]
        for k in range(count[i]):
            floats[4 + res[i, k]] += dur[i, k]
    if len(gaps) > 0:
        log[0, 0] = GRADIENT
        ints[4] = 1
        ints[8] = 1
        ints[0] = GRADIENT
        floats[0] = gaps[0]
        floats[4] -= gaps[0]


@_kernel
def evaluate(gaps, count, res, dur, starts):  # type: ignore[no-untyped-def]
    """(end of the timeline, bubble [N]); ``starts`` as in ``simulate``."""
    n = len(gaps)
    log = np.empty((4, n * (JOBS + 1)), np.int64)
    ints, floats = np.empty(13, np.int64), np.empty(8)
    ints_at, floats_at = np.empty((n, 13), np.int64), np.empty((n, 8))
    bubble = np.zeros(n, np.bool_)
    begin(gaps, count, res, dur, log, ints, floats)
    end = simulate(0, -1, gaps, count, res, dur, log, ints, floats, INF, True, ints_at, floats_at, bubble, starts)
    return end, bubble
