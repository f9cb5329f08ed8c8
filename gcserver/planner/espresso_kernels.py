"""The compiled searches of Espresso: Algorithms 1 and 2, what improves a plan, exhaustive search.

What may live here: functions on the arrays that ``timeline_kernels`` describes. The Python beside them (``espresso``,
``offload``, ``espresso_exhaustive``) says what they are for. A plan is changed in place.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner.timeline_jit import kernel
from gcserver.planner.timeline_kernels import (
    INF,
    NOWHERE,
    RECORD,
    begin,
    bound,
    make_chains,
    make_space,
    put,
    restore,
    resume,
    simulate,
)

#: What a plan has to be better by, as a share, to replace another: more than sums of the same numbers differ by.
GAIN = 1e-9


@kernel
def _remove(removed, plan, compresses, kept):  # type: ignore[no-untyped-def]
    """The paper's Remove: uncompressed tensors before the last bubble leave the search."""
    last = 0
    for i in range(len(plan)):
        if kept[5][i]:
            last = i
    for i in range(last):
        if not compresses[plan[i]]:
            removed[i] = True


@kernel
def _best_option(j, best, columns, trace, priced, plan, chains, kept, space):  # type: ignore[no-untyped-def]
    """GetBestOption: (the column of ``columns`` with the shortest timeline, its end, timelines); ties keep the plan."""
    s, old = trace[1][j], plan[j]
    bounds, order = np.empty(len(columns)), np.empty(len(columns), np.int64)
    added = np.zeros(4)
    found = 0
    for o in columns:
        for q in range(4):
            added[q] = priced[3][s, o, q] - priced[3][s, old, q]
        least = bound(j, added, priced[3][s, o, 4], kept)
        if o != old and least < best * (1 - GAIN):
            bounds[found], order[found] = least, o
            found += 1
    chosen, tried = old, 0
    added[:] = 0.0
    for c in np.argsort(bounds[:found]):
        limit = best * (1 - GAIN)
        if bounds[c] >= limit:
            break
        put(j, order[c], plan, trace, priced, chains, added)
        end = resume(j, added, limit, trace, chains, kept, space)
        tried += 1
        if end < limit:
            best, chosen = end, order[c]
    put(j, old, plan, trace, priced, chains, added)
    return chosen, best, tried


@kernel
def greedy(order, sticky, passes, budget, length, columns, compresses, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Algorithm 1 from ``plan`` [N] (columns of the priced options), which is changed in place.

    Tensors are taken in ``order``, ``passes`` times, or until a whole pass changes nothing or ``budget`` timelines
    have been computed. With ``sticky``, Remove is applied after every decision. The candidates of a tensor of size s
    are ``columns[s, :length[s]]``; one wins by a shorter timeline only. Returns (end, timelines).
    """
    n = len(plan)
    chains = make_chains(plan, trace, priced)
    kept, space = make_space(n, True, False), make_space(n, False, False)
    removed, added = np.zeros(n, np.bool_), np.zeros(4)
    begin(trace, chains, kept)
    best = simulate(np.int64(RECORD), INF, trace, chains, kept)
    tried = 1
    if sticky:
        _remove(removed, plan, compresses, kept)
    for _ in range(passes):
        changed = False
        for j in order:
            if removed[j] or tried >= budget:
                continue
            s = trace[1][j]
            chosen, _, more = _best_option(j, best, columns[s, : length[s]], trace, priced, plan, chains, kept, space)
            tried += more
            if chosen == plan[j]:
                continue
            added[:] = 0.0
            put(j, chosen, plan, trace, priced, chains, added)
            for i in range(j + 1):
                for q in range(4):
                    kept[4][i, 4 + q] += added[q]
            restore(j, kept)
            best = simulate(np.int64(RECORD), INF, trace, chains, kept)
            changed = True
            if sticky:
                _remove(removed, plan, compresses, kept)
        if not changed:
            break
    return best, tried


@kernel
def pairs(order, budget, length, columns, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Give two tensors other options at once, every pair in ``order``; ``plan`` changes with every gain.

    Ends when all pairs have been tried or ``budget`` timelines computed. Returns (end, timelines).
    """
    n = len(plan)
    now = plan.copy()
    chains = make_chains(plan, trace, priced)
    kept, space = make_space(n, True, False), make_space(n, False, False)
    begin(trace, chains, kept)
    best = simulate(np.int64(RECORD), INF, trace, chains, kept)
    tried = 1
    added = np.zeros(4)
    for x in range(n):
        for y in range(x + 1, n):
            a, b = order[x], order[y]
            first, found, best_a, best_b = min(a, b), False, 0, 0
            for i in columns[trace[1][a], : length[trace[1][a]]]:
                if tried >= budget:
                    break
                put(a, i, now, trace, priced, chains, added)
                for j in columns[trace[1][b], : length[trace[1][b]]]:
                    put(b, j, now, trace, priced, chains, added)
                    limit = best * (1 - GAIN)
                    chain = priced[3][trace[1][first], now[first], 4]
                    if i == plan[a] or j == plan[b] or bound(first, added, chain, kept) >= limit:
                        continue
                    end = resume(first, added, limit, trace, chains, kept, space)
                    tried += 1
                    if end < limit:
                        best, found = end, True
                        best_a, best_b = i, j
            if found:
                plan[a], plan[b] = best_a, best_b
            put(a, plan[a], now, trace, priced, chains, added)
            put(b, plan[b], now, trace, priced, chains, added)
            if found:
                begin(trace, chains, kept)
                best = simulate(np.int64(RECORD), INF, trace, chains, kept)
            if tried >= budget:
                return best, tried
            added[:] = 0.0
    return best, tried


@kernel
def uniform(columns, limit, trace, priced, plan):  # type: ignore[no-untyped-def]
    """The best of the plans that give one of ``columns`` to all tensors from some size on and leave the rest alone.

    ``plan`` [N] becomes it if it ends before ``limit``. Returns (end, timelines); the end is ``limit`` if none does.
    """
    n, sizes = len(plan), priced[0].shape[0]
    tried, best, best_option, best_size = 0, limit, -1, -1
    space = make_space(n, False, False)
    # Floats, as other kernels sort them: sorting is compiled for every type, and that takes a second.
    by_size = np.argsort(-trace[1].astype(np.float64), kind="mergesort")
    least = np.empty(4)
    for o in columns:
        now = plan.copy()
        chains = make_chains(now, trace, priced)
        begin(trace, chains, space)
        for q in range(4):
            least[q] = space[2][4 + q]
        least[0] += trace[0][0] if n else 0.0
        k = 0
        for s in range(sizes - 1, -1, -1):
            while k < n and trace[1][by_size[k]] == s:
                put(by_size[k], o, now, trace, priced, chains, least)
                k += 1
            if max(least[0], least[1], least[2], least[3]) >= best * (1 - GAIN):
                continue
            begin(trace, chains, space)
            end = simulate(np.int64(NOWHERE), best * (1 - GAIN), trace, chains, space)
            tried += 1
            if end < best * (1 - GAIN):
                best, best_option, best_size = end, o, s
    if best_option >= 0:
        for i in range(n):
            if trace[1][i] >= best_size:
                plan[i] = best_option
    return best, tried


@kernel
def offload(first, member, other, free, trace, priced, plan):  # type: ignore[no-untyped-def]
    """Algorithm 2: of every group the earliest u tensors take another option; all combinations of the u.

    Group g has the tensors ``member[first[g]:first[g + 1]]``, earliest first, which may get the column ``other[g]``;
    only groups with ``free`` are varied. ``plan`` [N] becomes the best combination. Returns (end, timelines).
    """
    n, groups = len(plan), len(first) - 1
    now = plan.copy()
    chains = make_chains(now, trace, priced)
    kept, space = make_space(n, True, False), make_space(n, False, False)
    begin(trace, chains, kept)
    best = simulate(np.int64(RECORD), INF, trace, chains, kept)
    tried = 1
    u, old, added = np.zeros(groups, np.int64), plan.copy(), np.zeros(4)
    while True:
        g = groups - 1
        while g >= 0 and (not free[g] or u[g] == first[g + 1] - first[g]):
            for k in range(first[g], first[g] + u[g]):
                put(member[k], old[member[k]], now, trace, priced, chains, added)
            u[g] = 0
            g -= 1
        if g < 0:
            return best, tried
        put(member[first[g] + u[g]], other[g], now, trace, priced, chains, added)
        u[g] += 1
        earliest = n
        for h in range(groups):
            if u[h] > 0:
                earliest = min(earliest, member[first[h]])
        limit = best * (1 - GAIN)
        if bound(earliest, added, 0.0, kept) < limit:
            end = resume(earliest, added, limit, trace, chains, kept, space)
            tried += 1
            if end < limit:
                best = end
                for i in range(n):
                    plan[i] = now[i]


@kernel
def exhaust(length, columns, limit, trace, priced, plan):  # type: ignore[no-untyped-def]
    """The shortest timeline of all plans whose options are ``columns[size, :length[size]]``; ``plan`` becomes it.

    ``columns`` have to be sorted by the length of their chains. Depth first over the tensors; a branch ends when the
    work in it and the least work of the tensors to come cannot end before the best one so far, at first ``limit``.
    Returns (end, or ``limit`` if there is no shorter; timelines).
    """
    n = len(plan)
    now = plan.copy()
    chains = make_chains(now, trace, priced)
    space = make_space(n, True, False)
    future, at, least = np.zeros((n, 4)), np.zeros(n, np.int64), np.full((n, 4), INF)
    for i in range(n):
        s = trace[1][i]
        for o in columns[s, : length[s]]:
            for q in range(4):
                least[i, q] = min(least[i, q], priced[3][s, o, q])
    chains[0][:] = 0
    begin(trace, chains, space)
    for q in range(4):
        space[2][4 + q] += least[:, q].sum()
    best, tried, d = limit, 0, np.int64(0)
    simulate(np.int64(0), INF, trace, chains, space)
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
        put(d, o, now, trace, priced, chains, future[d])
        below = best * (1 - GAIN)
        for q in range(4):
            future[d, q] = priced[3][s, o, q] - least[d, q]
        if bound(d, future[d], priced[3][s, o, 4], space) >= below:
            continue
        restore(d, space)
        for q in range(4):
            space[2][4 + q] += future[d, q]
        tried += 1
        end = simulate(d + 1 if d + 1 < n else NOWHERE, below, trace, chains, space)
        if end < below:
            if d + 1 < n:
                d += 1
            else:
                best = end
                for i in range(n):
                    plan[i] = now[i]
    return best, tried
