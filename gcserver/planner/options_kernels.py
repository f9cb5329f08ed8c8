"""The compiled inner loops behind option tables: prices of options, and which options others beat.

What may live here: functions on plain arrays, called by ``options_cost`` and ``espresso``.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner.timeline_jit import kernel

#: Most jobs a tensor's chain can have: the longest option has 12 tasks.
JOBS = 12


@kernel
def _curve(knots, row, x):  # type: ignore[no-untyped-def]
    k = knots.shape[1]
    if x <= knots[row, 0, 0]:
        return knots[row, 0, 1]
    i = 1
    while i < k - 1 and x > knots[row, i, 0]:
        i += 1
    x0, y0 = knots[row, i - 1, 0], knots[row, i - 1, 1]
    return y0 + (knots[row, i, 1] - y0) * (x - x0) / (knots[row, i, 0] - x0)


@kernel
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


@kernel
def _within(n, res_a, dur_a, m, res_b, dur_b):  # type: ignore[no-untyped-def]
    """Whether each job of chain a has one in chain b, in order, on the same resource and not shorter."""
    if n > m:
        return False
    k = 0
    for j in range(m):
        if k < n and res_a[k] == res_b[j] and dur_a[k] <= dur_b[j] * (1 + 1e-12):
            k += 1
    return k == n


@kernel
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


@kernel
def work(count, res, dur):  # type: ignore[no-untyped-def]
    """[S, O, 7]: each option's seconds on every resource, of its chain, and of what is before and after the inter link.

    The last two tell options apart that do the same work in another order.
    """
    total = np.zeros((count.shape[0], count.shape[1], 7))
    for s in range(count.shape[0]):
        for o in range(count.shape[1]):
            for k in range(count[s, o]):
                total[s, o, res[s, o, k]] += dur[s, o, k]
                total[s, o, 4] += dur[s, o, k]
                total[s, o, 6] = 0.0 if res[s, o, k] == 3 else total[s, o, 6] + dur[s, o, k]
                if total[s, o, 3] == 0.0:
                    total[s, o, 5] += dur[s, o, k]
    return total


@kernel
def by_chain(total):  # type: ignore[no-untyped-def]
    """[S, O]: for each size all options, shortest chains first."""
    order = np.empty(total.shape[:2], np.int64)
    for s in range(len(total)):
        order[s] = np.argsort(total[s, :, 4].copy())
    return order


@kernel
def shortlist(total, order, allowed, slack):  # type: ignore[no-untyped-def]
    """(length [S], columns [S, O]): for each size the ``allowed`` [O] options that no other beats in all of ``total``.

    Not more work on any resource and no longer chain, within the share ``slack``; shortest chains first, as ``order``
    (``by_chain``) has them: sorting takes longer than the rest, and one table is asked for several lists.
    """
    sizes, n, parts = total.shape
    length = np.zeros(sizes, np.int64)
    columns = np.zeros((sizes, n), np.int64)
    for s in range(sizes):
        for b in order[s]:
            if not allowed[b]:
                continue
            beaten = False
            for k in range(length[s]):
                a = columns[s, k]
                beaten = True
                for q in range(parts):
                    if total[s, a, q] > total[s, b, q] * (1 + slack):
                        beaten = False
                        break
                if beaten:
                    break
            if not beaten:
                columns[s, length[s]] = b
                length[s] += 1
    return length, columns


@kernel
def distinct(count, res, dur, total):  # type: ignore[no-untyped-def]
    """(length [S], columns [S, O]): for each size one option of every chain of jobs, shortest chains first."""
    sizes, n = count.shape
    length = np.zeros(sizes, np.int64)
    columns = np.zeros((sizes, n), np.int64)
    for s in range(sizes):
        for b in np.argsort(total[s, :, 4].copy(), kind="mergesort"):
            known = False
            k = length[s] - 1
            while k >= 0 and not known:
                a = columns[s, k]
                if total[s, a, 4] < total[s, b, 4] * (1 - 1e-12):
                    break
                known = count[s, a] == count[s, b] and _within(
                    count[s, a], res[s, a], dur[s, a], count[s, b], res[s, b], dur[s, b]
                )
                k -= 1
            if not known:
                columns[s, length[s]] = b
                length[s] += 1
    return length, columns
