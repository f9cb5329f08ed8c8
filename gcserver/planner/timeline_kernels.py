"""The compiled inner loops of Espresso: the timeline, Algorithms 1 and 2, exhaustive search.

What may live here: functions on plain arrays. All are in this one file, because numba's cache notices a change of a
kernel's own file only. The Python beside them (``timeline``, ``espresso``, ``offload``, ``espresso_exhaustive``) says
what they mean; the tests have a plain-Python timeline that must agree.

Resources are 0 GPU (computation too), 1 CPU, 2 intra link, 3 inter link. What the kernels pass around:

- ``trace``: (gaps [N] seconds, size_of [N]: each tensor's row in the prices)
- ``priced``: (count [S, O], resource [S, O, JOBS], seconds [S, O, JOBS], work [S, O, 5]), see ``options_kernels``
- ``chains``: (count [N], resource [N, JOBS], seconds [N, JOBS]), the jobs of each tensor under a plan
- ``space``: (log [4, L], ints [13], floats [8], ints_at [N, 13], floats_at [N, 8], bubble [N], starts [N, JOBS + 1])

A job's code is ``16 * tensor + position``; position 15 is the computation of that tensor's gradient. ``log`` holds each
resource's queue since the beginning, and a state (``ints``: running[4], head[4], tail[4], unfinished tensors;
``floats``: until[4], work left[4]) says where in it one is. So the state at the moment gradient i is ready is enough
to continue from there with other chains for i and later: that is how changing one tensor costs only what follows.
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
def _space(n, keep, starts):  # type: ignore[no-untyped-def]
    """Room for a timeline of n tensors; ``keep``: also for the states at every gradient; ``starts``: of every job."""
    kept, started = n if keep else 0, n if starts else 0
    log, ints, floats = np.empty((4, n * (JOBS + 1) + 1), np.int64), np.empty(13, np.int64), np.empty(8)
    ints_at, floats_at = np.empty((kept, 13), np.int64), np.empty((kept, 8))
    return log, ints, floats, ints_at, floats_at, np.zeros(kept, np.bool_), np.zeros((started, JOBS + 1))


@_kernel
def _chains(plan, trace, priced):  # type: ignore[no-untyped-def]
    n = len(plan)
    count, res, dur = np.empty(n, np.int64), np.zeros((n, JOBS), np.int64), np.zeros((n, JOBS))
    for i in range(n):
        s = trace[1][i]
        count[i] = priced[0][s, plan[i]]
        res[i] = priced[1][s, plan[i]]
        dur[i] = priced[2][s, plan[i]]
    return count, res, dur


@_kernel
def _put(i, option, plan, trace, priced, chains, added):  # type: ignore[no-untyped-def]
    """Tensor i takes ``option``; ``added`` [4] grows by the work that this adds."""
    s = trace[1][i]
    for q in range(4):
        added[q] += priced[3][s, option, q] - priced[3][s, plan[i], q]
    plan[i] = option
    k = priced[0][s, option]
    chains[0][i] = k
    chains[1][i, :k] = priced[1][s, option, :k]
    chains[2][i, :k] = priced[2][s, option, :k]


@_kernel
def _begin(trace, chains, space):  # type: ignore[no-untyped-def]
    """The state at the start of the backward pass: the first gradient is being computed, nothing else is queued."""
    gaps = trace[0]
    log, ints, floats = space[:3]
    ints[:] = 0
    ints[:4] = -1
    floats[:] = 0.0
    for i in range(len(gaps)):
        floats[4] += gaps[i]
        for k in range(chains[0][i]):
            floats[4 + chains[1][i, k]] += chains[2][i, k]
    if len(gaps) > 0:
        log[0, 0] = GRADIENT
        ints[4] = 1
        ints[8] = 1
        ints[0] = GRADIENT
        floats[0] = gaps[0]
        floats[4] -= gaps[0]


@_kernel
def _simulate(stop, record, limit, trace, chains, space):  # type: ignore[no-untyped-def]
    """Continue the timeline from the state in ``space`` until nothing is left, or gradient ``stop`` is ready.

    Returns the time of the last end; infinity as soon as the work left on some resource shows that it cannot end
    before ``limit``. Events are taken in order of (time, resource). With ``record``, the state at every gradient is
    kept, and ``bubble`` says whether all that came before was complete by then; ``starts`` takes the start of every
    job (the last column: computation) if there is room.
    """
    gaps = trace[0]
    count, res, dur = chains
    log, ints, floats, ints_at, floats_at, bubble, starts = space
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
                for k in range(13):
                    ints_at[i, k] = ints[k]
                for k in range(8):
                    floats_at[i, k] = floats[k]
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
def _restore(j, space):  # type: ignore[no-untyped-def]
    for k in range(13):
        space[1][k] = space[3][j, k]
    for k in range(8):
        space[2][k] = space[4][j, k]


@_kernel
def _resume(j, added, limit, trace, chains, kept, space):  # type: ignore[no-untyped-def]
    """End of the timeline in ``space`` from gradient ``j`` of the one in ``kept`` on, with other chains.

    ``added`` [4]: the work that they add on each resource.
    """
    ints, floats = space[1], space[2]
    for k in range(13):
        ints[k] = kept[3][j, k]
    for k in range(8):
        floats[k] = kept[4][j, k]
    for q in range(4):
        for k in range(ints[4 + q], ints[8 + q]):
            space[0][q, k] = kept[0][q, k]
        floats[4 + q] += added[q]
    return _simulate(-1, False, limit, trace, chains, space)


@_kernel
def _bound(j, added, chain, kept):  # type: ignore[no-untyped-def]
    """No timeline with ``added`` work from gradient ``j`` on ends before this; ``chain``: seconds of its own jobs."""
    ints_at, floats_at = kept[3], kept[4]
    now = floats_at[j, 0]
    least = now + chain
    for q in range(4):
        left = floats_at[j, 4 + q] + added[q]
        if left > 0:
            free = floats_at[j, q] if ints_at[j, q] >= 0 else now
            least = max(least, free + left)
    return least


@_kernel
def evaluate(trace, chains):  # type: ignore[no-untyped-def]
    """(end of the timeline, bubble [N], starts [N, JOBS + 1])."""
    space = _space(len(trace[0]), True, True)
    _begin(trace, chains, space)
    end = _simulate(-1, True, INF, trace, chains, space)
    return end, space[5], space[6]


@_kernel
def finish(plan, trace, priced):  # type: ignore[no-untyped-def]
    """End of the timeline of a plan."""
    chains = _chains(plan, trace, priced)
    space = _space(len(plan), False, False)
    _begin(trace, chains, space)
    return _simulate(-1, False, INF, trace, chains, space)


@_kernel
def _remove(removed, plan, compresses, kept):  # type: ignore[no-untyped-def]
    """The paper's Remove: uncompressed tensors before the last bubble leave the search."""
    last = 0
    for i in range(len(plan)):
        if kept[5][i]:
            last = i
    for i in range(last):
        if not compresses[plan[i]]:
            removed[i] = True


@_kernel
def _best_option(j, best, columns, trace, priced, plan, chains, kept, space):  # type: ignore[no-untyped-def]
    """GetBestOption: (the column of ``columns`` with the shortest timeline, its end, timelines); ties keep the plan."""
    s, old = trace[1][j], plan[j]
    bounds, order = np.empty(len(columns)), np.empty(len(columns), np.int64)
    added = np.zeros(4)
    found = 0
    for o in columns:
        for q in range(4):
            added[q] = priced[3][s, o, q] - priced[3][s, old, q]
        least = _bound(j, added, priced[3][s, o, 4], kept)
        if o != old and least < best * (1 - GAIN):
            bounds[found], order[found] = least, o
            found += 1
    chosen, tried = old, 0
    added[:] = 0.0
    for c in np.argsort(bounds[:found]):
        limit = best * (1 - GAIN)
        if bounds[c] >= limit:
            break
        _put(j, order[c], plan, trace, priced, chains, added)
        end = _resume(j, added, limit, trace, chains, kept, space)
        tried += 1
        if end < limit:
            best, chosen = end, order[c]
    _put(j, old, plan, trace, priced, chains, added)
    return chosen, best, tried


@_kernel
def greedy(order, sticky, passes, budget, length, columns, compresses, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Algorithm 1 from ``plan`` [N] (columns of the priced options), which is changed in place.

    Tensors are taken in ``order``, ``passes`` times, or until a whole pass changes nothing or ``budget`` timelines
    have been computed. With ``sticky``, Remove is applied after every decision. The candidates of a tensor of size s
    are ``columns[s, :length[s]]``; one wins by a shorter timeline only. Returns (end, timelines).
    """
    n = len(plan)
    chains = _chains(plan, trace, priced)
    kept, space = _space(n, True, False), _space(n, False, False)
    removed, added = np.zeros(n, np.bool_), np.zeros(4)
    _begin(trace, chains, kept)
    best = _simulate(-1, True, INF, trace, chains, kept)
    tried = 1
    if sticky:
        _remove(removed, plan, compresses, kept)
    for _ in range(passes):
        changed = False
        for j in order:
            if removed[j] or tried >= budget:
                continue
            s = trace[1][j]
            chosen, end, more = _best_option(
                j, best, columns[s, : length[s]], trace, priced, plan, chains, kept, space
            )
            tried += more
            if chosen == plan[j]:
                continue
            added[:] = 0.0
            _put(j, chosen, plan, trace, priced, chains, added)
            for i in range(j + 1):
                for q in range(4):
                    kept[4][i, 4 + q] += added[q]
            _restore(j, kept)
            best = _simulate(-1, True, INF, trace, chains, kept)
            changed = True
            if sticky:
                _remove(removed, plan, compresses, kept)
        if not changed:
            break
    return best, tried


@_kernel
def pairs(order, budget, length, columns, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Give two tensors other options at once, every pair in ``order``; ``plan`` changes with every gain.

    Ends when all pairs have been tried or ``budget`` timelines computed. Returns (end, timelines).
    """
    n = len(plan)
    now = plan.copy()
    chains = _chains(plan, trace, priced)
    kept, space = _space(n, True, False), _space(n, False, False)
    _begin(trace, chains, kept)
    best = _simulate(-1, True, INF, trace, chains, kept)
    tried = 1
    added = np.zeros(4)
    for x in range(n):
        for y in range(x + 1, n):
            a, b = order[x], order[y]
            first, found, best_a, best_b = min(a, b), False, 0, 0
            for i in columns[trace[1][a], : length[trace[1][a]]]:
                if tried >= budget:
                    return best, tried
                _put(a, i, now, trace, priced, chains, added)
                for j in columns[trace[1][b], : length[trace[1][b]]]:
                    _put(b, j, now, trace, priced, chains, added)
                    limit = best * (1 - GAIN)
                    chain = priced[3][trace[1][first], now[first], 4]
                    if i == plan[a] or j == plan[b] or _bound(first, added, chain, kept) >= limit:
                        continue
                    end = _resume(first, added, limit, trace, chains, kept, space)
                    tried += 1
                    if end < limit:
                        best, found = end, True
                        best_a, best_b = i, j
            if found:
                plan[a], plan[b] = best_a, best_b
            _put(a, plan[a], now, trace, priced, chains, added)
            _put(b, plan[b], now, trace, priced, chains, added)
            if found:
                _begin(trace, chains, kept)
                best = _simulate(-1, True, INF, trace, chains, kept)
            added[:] = 0.0
    return best, tried


@_kernel
def uniform(columns, limit, trace, priced, plan):  # type: ignore[no-untyped-def]
    """The best of the plans that give one of ``columns`` to all tensors from some size on and leave the rest alone.

    ``plan`` [N] becomes it if it ends before ``limit``. Returns (end, timelines); the end is ``limit`` if none does.
    """
    n, sizes = len(plan), priced[0].shape[0]
    tried, best, best_option, best_size = 0, limit, -1, -1
    space = _space(n, False, False)
    by_size = np.argsort(-trace[1], kind="mergesort")
    least = np.empty(4)
    for o in columns:
        now = plan.copy()
        chains = _chains(now, trace, priced)
        _begin(trace, chains, space)
        least[:] = space[2][4:]
        least[0] += trace[0][0] if n else 0.0
        k = 0
        for s in range(sizes - 1, -1, -1):
            while k < n and trace[1][by_size[k]] == s:
                _put(by_size[k], o, now, trace, priced, chains, least)
                k += 1
            if least.max() >= best * (1 - GAIN):
                continue
            _begin(trace, chains, space)
            end = _simulate(-1, False, best * (1 - GAIN), trace, chains, space)
            tried += 1
            if end < best * (1 - GAIN):
                best, best_option, best_size = end, o, s
    if best_option >= 0:
        for i in range(n):
            if trace[1][i] >= best_size:
                plan[i] = best_option
    return best, tried


@_kernel
def offload(first, member, other, free, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Algorithm 2: of every group the earliest u tensors take another option; all combinations of the u.

    Group g has the tensors ``member[first[g]:first[g + 1]]``, earliest first, which may get the column ``other[g]``;
    only groups with ``free`` are varied. ``plan`` [N] becomes the best combination. Returns (end, timelines).
    """
    n, groups = len(plan), len(first) - 1
    now = plan.copy()
    chains = _chains(now, trace, priced)
    kept, space = _space(n, True, False), _space(n, False, False)
    _begin(trace, chains, kept)
    best = _simulate(-1, True, INF, trace, chains, kept)
    tried = 1
    u, old, added = np.zeros(groups, np.int64), plan.copy(), np.zeros(4)
    while True:
        g = groups - 1
        while g >= 0 and (not free[g] or u[g] == first[g + 1] - first[g]):
            for k in range(first[g], first[g] + u[g]):
                _put(member[k], old[member[k]], now, trace, priced, chains, added)
            u[g] = 0
            g -= 1
        if g < 0:
            return best, tried
        _put(member[first[g] + u[g]], other[g], now, trace, priced, chains, added)
        u[g] += 1
        earliest = n
        for h in range(groups):
            if u[h] > 0:
                earliest = min(earliest, member[first[h]])
        limit = best * (1 - GAIN)
        if _bound(earliest, added, 0.0, kept) < limit:
            end = _resume(earliest, added, limit, trace, chains, kept, space)
            tried += 1
            if end < limit:
                best = end
                plan[:] = now


@_kernel
def exhaust(length, columns, limit, trace, priced, plan):  # type: ignore[no-untyped-def]
    """The shortest timeline of all plans whose options are ``columns[size, :length[size]]``; ``plan`` becomes it.

    ``columns`` have to be sorted by the length of their chains. Depth first over the tensors; a branch ends when the work in it and the least work of the tensors to come cannot
    end before the best one so far, at first ``limit``. Returns (end, or ``limit`` if there is no shorter; timelines).
    """
    n = len(plan)
    now = plan.copy()
    chains = _chains(now, trace, priced)
    space = _space(n, True, False)
    future, at, least = np.zeros((n, 4)), np.zeros(n, np.int64), np.full((n, 4), INF)
    for i in range(n):
        s = trace[1][i]
        for o in columns[s, : length[s]]:
            for q in range(4):
                least[i, q] = min(least[i, q], priced[3][s, o, q])
    chains[0][:] = 0
    _begin(trace, chains, space)
    for q in range(4):
        space[2][4 + q] += least[:, q].sum()
    best, tried, d = limit, 0, 0
    _simulate(0, False, INF, trace, chains, space)
    while d >= 0:
        s = trace[1][d]
        if at[d] == length[s]:
            at[d] = 0
            d -= 1
            continue
        o = columns[s, at[d]]
        if space[4][d, 0] + priced[3][s, o, 4] >= best * (1 - GAIN):
            at[d] = length[s]  # the chains of all further ones are longer
            continue
        at[d] += 1
        _put(d, o, now, trace, priced, chains, future[d])
        bound = best * (1 - GAIN)
        for q in range(4):
            future[d, q] = priced[3][s, o, q] - least[d, q]
        if _bound(d, future[d], priced[3][s, o, 4], space) >= bound:
            continue
        _restore(d, space)
        for q in range(4):
            space[2][4 + q] += future[d, q]
        tried += 1
        end = _simulate(d + 1 if d + 1 < n else -1, False, bound, trace, chains, space)
        if end < bound:
            if d + 1 < n:
                d += 1
            else:
                best = end
                plan[:] = now
    return best, tried
