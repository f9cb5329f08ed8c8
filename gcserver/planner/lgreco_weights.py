"""What a byte of each layer costs: times of synchronising fitted to bytes, or priorities of buckets.

What may live here: that fit, and weights for `lgreco.solve`. What may not: measuring times.

L-GreCo, section 4, "time optimization": sizes are weighted by T, the coefficients of a linear regression of the time
all gradients took on the bytes of each bucket. Measured times have outliers (another program, a lost packet), which
least squares would follow; so samples count the less the further off they are (Huber's weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcserver.planner.errors import F64, TableError

#: Huber's constant, in standard deviations of a normal distribution: 95 % as efficient as least squares there
HUBER = 1.345
#: the least a byte may cost, as a share of the mean: what costs nothing would be sent at its most precise
FLOOR = 0.01
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """seconds = base + sum of per_byte * bytes over the buckets.

    per_byte: seconds, one a bucket, never negative. r2: share of the times' variance explained, samples weighted as the
    fit weighted them. outliers: samples further off than 1.345 standard deviations.
    """

    base: float
    per_byte: tuple[float, ...]
    r2: float
    outliers: int


def fit_sync_times(nbytes: F64, seconds: F64) -> SyncTimes:
    """Robust linear regression of times on bytes.

    nbytes: float64[S, B], what each bucket sent in each of S samples; their levels must have differed. seconds:
    float64[S], from the start of the first bucket to the end of the last. A bucket whose coefficient comes out negative
    (hidden behind others, or hardly varied) is given none and the rest fitted again. Raises TableError with fewer than
    B + 2 samples or values that are not finite.
    """
    if nbytes.ndim != 2 or seconds.shape != nbytes.shape[:1] or nbytes.shape[0] < nbytes.shape[1] + 2:
        raise TableError(
            "nbytes", "S samples x B buckets, S of seconds, S at least B + 2", (nbytes.shape, seconds.shape)
        )
    if not bool(np.isfinite(nbytes).all() and np.isfinite(seconds).all()):
        raise TableError("samples", "finite bytes and seconds", "NaN or infinity")
    scale = np.maximum(np.abs(nbytes).max(axis=0), 1.0)
    columns = np.concatenate((np.ones((seconds.size, 1)), nbytes / scale), axis=1)
    used = np.ones(columns.shape[1], np.bool_)
    while True:
        found, weights = _huber(columns[:, used], seconds)
        negative = found < 0
        negative[0] = False  # the base may be: a line fitted far from zero
        if not negative.any():
            break
        used[np.flatnonzero(used)[int(np.argmin(np.where(negative, found, np.inf)))]] = False
    every = np.zeros(used.size)
    every[used] = found
    off = seconds - columns @ every
    mean = np.average(seconds, weights=weights)
    spread = float(weights @ (seconds - mean) ** 2)
    r2 = 1.0 - float(weights @ off**2) / spread if spread > 0 else 1.0
    return SyncTimes(float(every[0]), tuple((every[1:] / scale).tolist()), r2, int((weights < 1.0).sum()))


def time_weights(times: SyncTimes, buckets: Sequence[int]) -> F64:
    """float64[L], each layer's seconds a byte; buckets: which each layer travels in. TableError if none costs time."""
    costs = np.array(times.per_byte)
    if not costs.size or costs.max() <= 0:
        raise TableError("times", "a bucket whose bytes cost time", times.per_byte)
    _check(buckets, costs.size)
    return np.asarray(np.maximum(costs, FLOOR * costs.mean())[list(buckets)], np.float64)


def priorities(buckets: Sequence[int]) -> F64:
    """float64[L]: a byte of bucket b, counted from 0 in the order they leave, costs b + 1 (appendix A).

    The paper found these worse than equal weights. They are for comparison.
    """
    _check(buckets, max(buckets, default=0) + 1)
    return np.array(buckets, np.float64) + 1.0


def _check(buckets: Sequence[int], count: int) -> None:
    if not all(0 <= b < count for b in buckets):
        raise TableError("buckets", f"for each layer a bucket from 0 to {count - 1}", list(buckets))


def _huber(columns: F64, seconds: F64) -> tuple[F64, F64]:
    """(coefficients, the samples' weights), by least squares weighted again and again."""
    weights: F64 = np.ones(seconds.size)
    found: F64 = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        before = found
        found = np.asarray(np.linalg.lstsq(columns * root[:, None], seconds * root, rcond=None)[0], np.float64)
        off = np.abs(seconds - columns @ found)
        # The median of absolute deviations as a standard deviation; 0 if more than half the samples fit exactly.
        limit = HUBER * max(1.4826 * float(np.median(off)), 1e-12 * float(np.abs(seconds).max()))
        weights = limit / np.maximum(off, limit) if limit else weights
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
    return found, weights
