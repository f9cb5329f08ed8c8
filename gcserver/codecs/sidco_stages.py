"""SIDCo's stages: where they cut, the threshold they end in, and its correction.

What may live here: kernel helpers on sums, on a sample and on candidates, which decide a threshold; no pass over a
segment (`sidco_scan`), no formula of a distribution (`sidco_fit`), no state, no codec (`sidco`).

Sections 2.4 and 3 of the SIDCo paper. Thresholds are found in units of 1/unit, a power of two near the mean
magnitude, so that squares neither overflow nor vanish; as float32 they are exact either way.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gcserver.codecs.collect import BLOCK
from gcserver.codecs.jit import place
from gcserver.codecs.sidco_fit import EXPONENTIAL, GAMMA, PARETO, above, estimate, exp, ln, quantile
from gcserver.codecs.sidco_scan import (
    ACCUMULATOR,
    COUNT,
    SQUARES,
    SUM,
    add_above,
    add_all,
    add_logs,
    logs_sum,
    total,
)

E, GP, P = range(3)  #: methods: exponential; gamma, then Pareto; Pareto
FEW = 32  #: survivors that a fit needs, and k from which thresholds are estimated at all
FIRST = 0.25  #: share that the first of several stages keeps
LOW, HIGH = 0.9, 1.1  #: k^/k outside these is corrected
STEPS = 8  #: attempts at that


@njit(nogil=True)
def kind_of(method, stage):
    """The distribution of a stage (0 the first)."""
    if method == E:
        return EXPONENTIAL
    return GAMMA if method == GP and stage == 0 else PARETO


@njit(nogil=True)
def fit(method, stage, n, origin, unit, sums, logs, padding):
    """(usable, shape, scale) of a stage's distribution from its accumulator, in units of 1/unit. origin: its cut."""
    count = float(n) if stage == 0 else total(sums, stage, COUNT)
    mass, squares = total(sums, stage, SUM) * unit, total(sums, stage, SQUARES)
    # Moments about the cut: the location of what exceeds it.
    squares += origin * (origin * count - 2.0 * mass)
    mass -= origin * count
    if not (count >= 2.0 and 0.0 < mass < np.inf):
        return False, 1.0, 1.0
    logarithms = logs_sum(logs, padding, unit) if method == GP and stage == 0 else 0.0
    shape, scale = estimate(kind_of(method, stage), count, mass, squares, logarithms)
    return True, shape, scale


@njit(nogil=True)
def as_f32(value):
    """A float64 rounded to the nearest float32: what passes compare with and fits subtract must be one number."""
    return np.float64(np.float32(value))


@njit(nogil=True)
def place_cuts(method, stages, ratio, sample, size, unit, sums, logs, lanes, cuts):
    """Run stages 1..M-1 on a sample to place the cuts; returns how many there are.

    sums: accumulator 0 holds the magnitudes of the sample already, the others nothing. cuts: float32 as float64.
    """
    step = exp(ln(ratio / FIRST) / max(1, stages - 1))
    origin, share = 0.0, FIRST
    if method == P:
        # Of the first stage, the magnitudes' sum is there already; squares need the unit.
        sums[:ACCUMULATOR] = 0.0
    for stage in range(stages - 1):
        for start in range(0, size, BLOCK):
            source, count = place(sample) + 4 * start, min(BLOCK, size - start)
            if stage > 0:
                add_above(source, count, cuts[stage - 1], method != E, unit, sums, stage)
            elif method == P:
                add_all(source, count, True, unit, sums)
            elif method == GP:
                add_logs(source, count, unit, lanes, logs)
        if stage > 0 and total(sums, stage, COUNT) < FEW:
            return stage
        usable, shape, scale = fit(method, stage, size, origin, unit, sums, logs, np.int64(0))
        if not usable:
            return stage
        cut = as_f32((origin + quantile(kind_of(method, stage), shape, scale, share)) / unit)
        if not origin / unit < cut < np.inf:
            return stage
        cuts[stage] = cut
        origin, share = cut * unit, step
    return max(0, stages - 1)


@njit(nogil=True)
def threshold(method, n, k, used, unit, sums, logs, padding, cuts):
    """SIDCo's threshold, from the sums over all elements and over the exceedances of ``used`` cuts; -1 if none."""
    ratio, share, origin = k / n, 1.0, 0.0
    usable, shape, scale = fit(method, np.int64(0), n, 0.0, unit, sums, logs, padding)
    if not usable:
        return -1.0
    stage = 0
    while stage < used:
        cut = cuts[stage] * unit
        beyond = share * above(kind_of(method, stage), shape, scale, cut - origin)
        # Nothing left for a further stage: too few to fit, or the fit says the cut is beyond the threshold.
        if beyond <= ratio or total(sums, stage + 1, COUNT) < max(FEW, k):
            break
        usable, next_shape, next_scale = fit(method, stage + 1, n, cut, unit, sums, logs, np.int64(0))
        if not usable:
            break
        stage, share, origin, shape, scale = stage + 1, beyond, cut, next_shape, next_scale
    return (origin + quantile(kind_of(method, stage), shape, scale, ratio / share)) / unit


@njit(nogil=True)
def exceeding(values, found, cut, sums):
    """(count, mean excess) of the candidates above a cut, a float32 as float64."""
    sums[:ACCUMULATOR] = 0.0
    for start in range(0, found, BLOCK):
        add_above(values + 4 * start, min(BLOCK, found - start), cut, False, 1.0, sums, 0)
    count = total(sums, 0, COUNT)
    return count, (total(sums, 0, SUM) / count - cut if count > 0.0 else 0.0)


@njit(nogil=True)
def tune(eta, bound, values, found, k, sums):
    """(threshold, ln(k^/k) of eta) such that LOW..HIGH times k candidates exceed the threshold, -1 if none was found.

    bound: a magnitude that all candidates exceed, more than HIGH*k of them or at least k. values: their address.
    """
    low, high = LOW * k, HIGH * k
    _, excess = exceeding(values, found, bound, sums)
    cut, count = bound, float(found)
    lower, lower_count, lower_excess = cut, count, excess
    upper, upper_count = np.inf, 0.0
    if eta > bound:
        cut = eta
        count, excess = exceeding(values, found, cut, sums)
        error = ln(max(count, 0.5) / k)
    else:
        # It selects more than there are candidates: how many, the tail above the bound must tell.
        error = ln(count / k) + min(10.0, (bound - eta) / max(excess, 1e-6 * bound))
    for _ in range(STEPS):
        if low <= count <= high:
            return cut, error
        if count > high:
            lower, lower_count, lower_excess = cut, count, excess
        else:
            upper, upper_count = cut, count
        if 8.0 * upper_count >= k:
            # ln(count) as a straight line between the two.
            cut = lower + (upper - lower) * ln(lower_count / k) / ln(lower_count / upper_count)
        else:
            # Nothing useful above: what exceeds ``lower`` as one more exponential stage.
            cut = min(lower + lower_excess * ln(lower_count / k), 0.5 * (lower + upper))
        cut = as_f32(cut)
        count, excess = exceeding(values, found, cut, sums)
    return -1.0, error
