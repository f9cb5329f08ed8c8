"""The compiled timeline: states, continuing from one, bounds.

What may live here: functions on plain arrays that follow a timeline. What may not: searches (``espresso_kernels``).
``timeline`` says what the rules are; the tests have a timeline in plain Python that must agree.

Resources are 0 GPU (computation too), 1 CPU, 2 intra link, 3 inter link. What the kernels pass around:

- ``trace``: (gaps [N] seconds, size_of [N]: each tensor's row in the prices)
- ``priced``: (count [S, O], resource [S, O, JOBS], seconds [S, O, JOBS], work [S, O, 7]), see ``options_kernels``
- ``chains``: (count [N], resource [N, JOBS], seconds [N, JOBS]), the jobs of each tensor under a plan
- ``space``: (log [4, L], ints [13], floats [8], ints_at [N, 13], floats_at [N, 8], bubble [N], starts [N, JOBS + 1])

A job's code is ``16 * tensor + position``; position 15 is the computation of that tensor's gradient. ``log`` holds each
resource's queue since the beginning, and a state (``ints``: running[4], head[4], tail[4], unfinished tensors;
``floats``: until[4], work left[4]) says where in it one is. So the state at the moment gradient i is ready is enough
to continue from there with other chains for i and later: that is how changing one tensor costs only what follows.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner.timeline_jit import kernel

JOBS = 12
GRADIENT = 15
INF = np.inf
#: Where ``simulate`` stops when it does not: with no state kept, and with that at every gradient. Kernels compile anew
#: for every number that is written in a call, so that calls make a variable of it: ``np.int64(NOWHERE)``. An array that
#: is assigned as a whole is compiled for every layout of both sides, so that hot kernels copy by loops, too.
NOWHERE, RECORD = -1, -2


@kernel
def make_space(n, keep, starts):  # type: ignore[no-untyped-def]
    """Room for a timeline of n tensors; ``keep``: also for the states at every gradient; ``starts``: of every job."""
    kept, started = n if keep else 0, n if starts else 0
    log, ints, floats = np.empty((4, n * (JOBS + 1) + 1), np.int64), np.empty(13, np.int64), np.empty(8)
    ints_at, floats_at = np.empty((kept, 13), np.int64), np.empty((kept, 8))
    return log, ints, floats, ints_at, floats_at, np.zeros(kept, np.bool_), np.zeros((started, JOBS + 1))


@kernel
def make_chains(plan, trace, priced):  # type: ignore[no-untyped-def]
    n = len(plan)
    count, res, dur = np.empty(n, np.int64), np.zeros((n, JOBS), np.int64), np.zeros((n, JOBS))
    for i in range(n):
        s = trace[1][i]
        count[i] = priced[0][s, plan[i]]
        for k in range(JOBS):
            res[i, k] = priced[1][s, plan[i], k]
            dur[i, k] = priced[2][s, plan[i], k]
    return count, res, dur


@kernel
def put(i, option, plan, trace, priced, chains, added):  # type: ignore[no-untyped-def]
    """Tensor i takes ``option``; ``added`` [4] grows by the work that this adds."""
    s = trace[1][i]
    for q in range(4):
        added[q] += priced[3][s, option, q] - priced[3][s, plan[i], q]
    plan[i] = option
    chains[0][i] = priced[0][s, option]
    for k in range(priced[0][s, option]):
        chains[1][i, k] = priced[1][s, option, k]
        chains[2][i, k] = priced[2][s, option, k]


@kernel
def begin(trace, chains, space):  # type: ignore[no-untyped-def]
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


@kernel
def simulate(stop, limit, trace, chains, space):  # type: ignore[no-untyped-def]
    """Continue the timeline from the state in ``space`` until nothing is left, or gradient ``stop`` is ready.

    Returns the time of the last end; infinity as soon as the work left on some resource shows that it cannot end
    before ``limit``. Events are taken in order of (time, resource). With ``RECORD`` for ``stop``, the state at every
    gradient is kept, and ``bubble`` says whether all that came before was complete by then; ``starts`` takes the start
    of every job (the last column: computation) if there is room.
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
            if stop == RECORD or i == stop:
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


@kernel
def restore(j, space):  # type: ignore[no-untyped-def]
    for k in range(13):
        space[1][k] = space[3][j, k]
    for k in range(8):
        space[2][k] = space[4][j, k]


@kernel
def resume(j, added, limit, trace, chains, kept, space):  # type: ignore[no-untyped-def]
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
    return simulate(np.int64(NOWHERE), limit, trace, chains, space)


@kernel
def bound(j, added, chain, kept):  # type: ignore[no-untyped-def]
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


@kernel
def evaluate(trace, chains):  # type: ignore[no-untyped-def]
    """(end of the timeline, bubble [N], starts [N, JOBS + 1])."""
    space = make_space(len(trace[0]), True, True)
    begin(trace, chains, space)
    end = simulate(np.int64(RECORD), INF, trace, chains, space)
    return end, space[5], space[6]


@kernel
def finish(plan, trace, priced):  # type: ignore[no-untyped-def]
    """End of the timeline of a plan."""
    chains = make_chains(plan, trace, priced)
    space = make_space(len(plan), False, False)
    begin(trace, chains, space)
    return simulate(np.int64(NOWHERE), INF, trace, chains, space)
