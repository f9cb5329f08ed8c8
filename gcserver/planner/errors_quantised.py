"""Errors and bytes of qsgd at every number of bits, from one walk over each gradient.

What may live here: that. What may not: other families; the arithmetic of the codec itself.

qsgd rounds at random to one of the two levels around a value, so that nothing has to be drawn: of a value a share f of
the way from one level to the next, the expected square of the error is step^2 * f * (1 - f). The root of its sum is
given: the root mean square of the error's norm, which the norm itself hardly leaves for a thousand elements or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

from gcserver.planner.errors import BITS, F32, F64, I64, LevelTable, TableError, default_indices, unusable

KINDS = ("maxmin", "l2", "max")
#: buckets are multiples of this many elements (docs/codecs.md)
GRAIN = 64


def qsgd_bytes(n: int, levels: I64, bucket: int = 1024, kind: str = "maxmin") -> F64:
    """Bytes of a segment of n elements, float64[C]: codes, what each bucket needs, 8 for the segment."""
    buckets = 0 if not n else -(-n // bucket) if bucket else 1
    return np.asarray(8.0 + (8 if kind == "maxmin" else 4) * buckets + -(-n * levels // 8), np.float64)


def squares(x: Any, steps: Any, bucket: int, kind: int) -> Any:
    """Expected squared error for each number of steps (of a range, or on either side of zero): float64[C].

    x: float32[n], finite. kind: index into KINDS. In Python as in the compiled form below.
    """
    total = np.zeros(steps.size, np.float64)
    n = x.size
    width = bucket if bucket > 0 else n
    for first in range(0, n, max(width, 1)):
        part = x[first : first + width]
        low: Any = 0.0
        norm: Any = 0.0
        if kind == 0:
            low = np.float64(part.min())
            span = np.float64(part.max()) - low
        else:
            for v in part:
                norm = norm + np.float64(v) * np.float64(v) if kind == 1 else max(norm, abs(np.float64(v)))
            span = math.sqrt(norm) if kind == 1 else norm
        if span < 2.0**-117:
            # the codec gives up here: everything decodes to the lowest level (maxmin), or to zero
            for v in part:
                total += (np.float64(v) - low) ** 2
            continue
        for c in range(steps.size):
            inverse = steps[c] / span
            part_sum = 0.0
            for v in part:
                y = (np.float64(v) - low) * inverse
                share = y - math.floor(y)
                part_sum += share * (1.0 - share)
            total[c] += part_sum / (inverse * inverse)
    return total


COMPILED: Any = njit(cache=True, nogil=True, error_model="numpy")(squares)


def qsgd_errors(gradient: F32, levels: I64, bucket: int = 1024, kind: str = "maxmin") -> F64:
    """Root mean squares of the error's L2 norm at so many bits, float64[C]; NaN if the gradient is not finite.

    levels: int64[C], bits 2..8. bucket: elements that share a scale, a multiple of 64; 0: all of the segment. kind:
    maxmin, l2 or max. Raises TableError.
    """
    _check(levels, bucket, kind)
    x = np.ascontiguousarray(gradient, np.float32).reshape(-1)
    if unusable(x):
        return np.full(levels.size, np.nan)
    steps = 2.0**levels - 1 if kind == "maxmin" else 2.0 ** (levels - 1) - 1
    return np.asarray(np.sqrt(COMPILED(x, steps, bucket, KINDS.index(kind))), np.float64)


def qsgd_table(
    gradients: Mapping[str, F32],
    levels: I64,
    default: int | Sequence[int],
    *,
    bucket: int = 1024,
    kind: str = "maxmin",
) -> LevelTable:
    """The table of these layers (accumulated gradients, any shapes) at so many bits. Raises TableError."""
    sizes = [qsgd_bytes(g.size, levels, bucket, kind) for g in gradients.values()]
    errors = [qsgd_errors(g, levels, bucket, kind) for g in gradients.values()]
    shape = (len(gradients), levels.size)
    chosen = default_indices(levels, default, len(gradients))
    return LevelTable(tuple(gradients), levels, np.reshape(sizes, shape), np.reshape(errors, shape), chosen)


def _check(levels: I64, bucket: int, kind: str) -> None:
    if not levels.size or not BITS[0] <= int(levels.min()) <= int(levels.max()) <= BITS[1]:
        raise TableError("levels", f"bits from {BITS[0]} to {BITS[1]}", levels.tolist())
    if bucket < 0 or bucket % GRAIN:
        raise TableError("bucket", f"0 or a multiple of {GRAIN}", bucket)
    if kind not in KINDS:
        raise TableError("kind", " or ".join(KINDS), kind)
