"""threshold, redsync and gaussiank: whatever exceeds a threshold, fixed or guessed from sums and counts.

What may live here: the three rules and their codecs; `sparse` collects and writes, `moments` sums and counts. How many
elements reach a threshold is up to the data, so each codec has a cap: of a segment that exceeds it, exactly the
cap largest are sent and the rest stays in the residual.
"""

from __future__ import annotations

from ctypes import c_uint32
from statistics import NormalDist

import numpy as np
from numba import njit

from gcserver.codecs.base import Param, register
from gcserver.codecs.jit import address, element, f64, i64, kernel, place, u32
from gcserver.codecs.moments import BOUNDS, counts_above, sums
from gcserver.codecs.momentum import accumulated
from gcserver.codecs.sparse import above, finish, room, workspace
from gcserver.codecs.sparsifier import COMMON, FORM, MILLION, RATIO, Job, Sparsifier, level_of, wanted
from gcserver.codecs.vector import INFINITE

FIXED, REDSYNC, TRIM, GAUSSIAN = range(4)


@njit(nogil=True)
def bits_at(threshold):
    """The largest magnitude bits that do not exceed a threshold (float64): those above them have |v| > threshold."""
    if threshold != threshold or threshold > 3.4028234663852886e38:
        return INFINITE - 1
    if threshold <= 0.0:
        return 0
    rounded = np.empty(1, np.float32)
    rounded[0] = threshold
    bits = np.int64(u32(place(rounded), 1)[0])
    return max(0, bits - 1 if np.float64(rounded[0]) > threshold else bits)


@njit(nogil=True)
def as_float(bits):
    """The float32 of these bits, as float64."""
    word = np.empty(1, np.uint32)
    word[0] = np.uint32(bits)
    return np.float64(word.view(np.float32)[0])


@njit(nogil=True)
def redsync(x, r, n, k, scale, decay, trim, bounds, counts, work):
    """RedSync's threshold mean + q*(max - mean) of |v|, as bits (Fang et al. 2019, as in public code).

    Bisection: q from [0, 1] halves until k < count < 2k, or the interval is 0.2 or less. Trimming: q = 0.8, 0.6, ...
    until count >= k. All counts that either may ask for are taken in one pass.
    """
    total, _, largest = sums(x, r, n, scale, decay, False, work)
    mean, top = total / n, as_float(largest)
    for j in range(BOUNDS):
        q = (4.0 - j) / 5.0 if trim else (j + 1) / 8.0
        bounds[j] = bits_at(mean + q * (top - mean))
    counts_above(x, r, n, scale, decay, bounds, counts, work)
    if trim:
        for j in range(BOUNDS):
            if counts[j] >= k:
                return bounds[j]
        return 0
    left, right, at = 0, 8, 4
    while right - left > 1:
        at = (left + right) // 2
        count = counts[at - 1]
        if k < count < 2 * k:
            break
        if 2 * count < k:
            right = at
        else:
            left = at
    return bounds[at - 1]


@njit(nogil=True)
def gaussian(x, r, n, k, scale, decay, quantile, bounds, counts, work):
    """GaussianK's threshold mean + quantile*deviation of v, as bits (Shi et al. 2019, as in public code).

    Three rounds: halved if fewer than 2k/3 exceed it, times 1.5 if more than 4k/3. All six thresholds that
    can come of that are counted in one pass.
    """
    total, squares, _ = sums(x, r, n, scale, decay, True, work)
    mean = total / n
    variance = max(0.0, squares - total * mean) / max(1, n - 1)
    first = mean + quantile * np.sqrt(variance)
    # A tree: halved, the first becomes the second; times 1.5, the third; those the fourth, fifth or sixth.
    factors = (1.0, 0.5, 1.5, 0.25, 0.75, 2.25, 2.25, 2.25)
    for j in range(BOUNDS):
        bounds[j] = bits_at(first * factors[j])
    counts_above(x, r, n, scale, decay, bounds, counts, work)
    at = 0
    for _ in range(2):
        if 3 * counts[at] < 2 * k:
            at = 1 if at == 0 else at + 2
        elif 3 * counts[at] > 4 * k:
            at = 2 if at == 0 else at + 3
        else:
            break
    return bounds[at]


@kernel(f"UniTuple(int64, 2)({COMMON}, int64, float64, int64)")
def threshold_encode(
    x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov, rule, cap, quantiles
):
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`, then:

    rule: one of the four; cap: as a share of the length (FIXED) or of k; quantiles: address of float64[m] (GAUSSIAN).
    """
    bounds, counts = i64(table, m + 1), u32(out + 4, m)
    slots, largest = np.int64(0), np.int64(0)
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        most = capped(length, cap, rule, level_of(levels, level, s))
        slots += most
        largest = max(largest, room(length, most))
    work = workspace(slots + largest)
    limits, reached = np.empty(BOUNDS, np.int64), np.empty(BOUNDS, np.int64)
    x, r, kept, scale, decay = accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    total, bad = np.int64(0), np.int64(0)
    for s in range(m):
        first, length = bounds[s], bounds[s + 1] - bounds[s]
        counts[s] = 0
        if length == 0:
            continue
        here = level_of(levels, level, s)
        px, pr, target = element(x, first), element(r, first), element(kept, first)
        k, most = wanted(length, here), capped(length, cap, rule, here)
        if rule == FIXED:
            below = here - 1
        elif here >= MILLION:
            # Everything is wanted: nothing to estimate.
            below = np.int64(0)
        elif rule == GAUSSIAN:
            below = gaussian(px, pr, length, k, scale, decay, f64(quantiles, m)[s], limits, reached, work)
        else:
            below = redsync(px, pr, length, k, scale, decay, rule == TRIM, limits, reached, work)
        count, _, wrong = above(px, pr, target, length, first, scale, decay, below, most, total, work)
        counts[s] = count
        total += count
        bad += wrong
    return finish(out, m, total, form, ro, uo, work), bad


@njit(nogil=True)
def capped(length, cap, rule, level):
    """The most elements a segment may send: at least one of a segment that has any."""
    share = cap * length if rule == FIXED else cap * wanted(length, level)
    return min(length, max(1, np.int64(share)))


_LOWEST, _HIGHEST = 1e-30, 1e30


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@register
class Threshold(Sparsifier):
    """Every element of magnitude at least ``value``; the level is the value's float32 bits."""

    id, name = 19, "threshold"
    params = (
        Param("value", None, _LOWEST, _HIGHEST, "smallest magnitude that is sent"),
        Param("cap", 0.25, 1e-6, 1.0, "share of a segment's elements sent at most; more: its largest"),
        *FORM,
    )
    levels = (_bits(_LOWEST), _bits(_HIGHEST))
    exact = 0
    tunable = False

    def setup(self, value: float = 1.0, cap: float = 0.25) -> None:
        self.level, self._cap = _bits(value), cap
        self._value = float(str(np.float32(value)))

    def own(self) -> dict[str, float]:
        return {"value": self._value, "cap": self._cap}

    def most(self, n: int, segments: int, level: int) -> int:
        return min(n, int(self._cap * n) + segments)

    @classmethod
    def of_level(cls, level: int) -> dict[str, float]:
        return {"value": float(np.uint32(level).view(np.float32))}

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        nbytes, bad = threshold_encode(*job, FIXED, self._cap, 0)
        return nbytes, bad


class _Capped(Sparsifier):
    """A ratio, and a cap in multiples of k."""

    def most(self, n: int, segments: int, level: int) -> int:
        return min(n, int(self._cap * (level * n / MILLION + segments)))

    _cap: float


@register
class RedSync(_Capped):
    """Between k and 2k elements if bisection between mean and maximum finds such a threshold; often far off."""

    id, name = 20, "redsync"
    params = (
        RATIO,
        Param("trim", 0.0, 0.0, 1.0, "1 for steps down from the maximum until k are reached", integer=True),
        Param("cap", 2.0, 1.0, 1e6, "elements sent at most, in multiples of k; more: the largest"),
        *FORM,
    )

    def setup(self, ratio: float = 0.01, trim: float = 0.0, cap: float = 2.0) -> None:
        super().setup(ratio)
        self._trim, self._cap = int(trim), cap

    def own(self) -> dict[str, float]:
        return {**super().own(), "trim": self._trim, "cap": self._cap}

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        nbytes, bad = threshold_encode(*job, TRIM if self._trim else REDSYNC, self._cap, 0)
        return nbytes, bad


@register
class GaussianK(_Capped):
    """k elements if they are normally distributed; two corrections of the threshold by half."""

    id, name = 21, "gaussiank"
    params = (
        RATIO,
        Param("cap", 1.333, 1.0, 1e6, "elements sent at most, in multiples of k; more: the largest"),
        *FORM,
    )

    def setup(self, ratio: float = 0.01, cap: float = 1.333) -> None:
        super().setup(ratio)
        self._cap = cap

    def own(self) -> dict[str, float]:
        return {**super().own(), "cap": self._cap}

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        levels = (c_uint32 * job.m).from_address(job.levels) if job.levels else [self.level] * job.m
        table = {level: NormalDist().inv_cdf(1.0 - level / (2 * MILLION)) for level in set(levels)}
        quantiles = np.array([table[level] for level in levels], np.float64)
        where = address("quantiles", quantiles, np.dtype(np.float64), job.m)
        nbytes, bad = threshold_encode(*job, GAUSSIAN, self._cap, where)
        return nbytes, bad
