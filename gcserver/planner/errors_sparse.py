"""Errors and bytes of sparsifiers at every ratio, from one sorting of each gradient.

What may live here: that of topk and of the codecs that estimate its threshold. What may not: other families.

What is lost when the k elements of largest magnitude are sent is the norm of the others. With magnitudes in ascending
order the sums of squares from the start give it for every k at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gcserver.planner.errors import F32, F64, I64, LevelTable, TableError, default_indices, unusable

#: Segments below this many elements, counts below MINIMUM and ratios above QUARTER are sent as exact top-k even by
#: codecs that estimate a threshold; what these send otherwise is at least SHARE of k (docs/codecs.md).
EXACT = 65_536
MINIMUM = 32
QUARTER = 250_000
SHARE = 0.9


def sparse_counts(n: int, levels: I64) -> I64:
    """Elements sent of n at ratios in millionths, int64[C]: max(1, floor(ratio*n)), 0 of an empty segment."""
    return np.maximum(levels * n // 1_000_000, 1) if n else np.zeros(levels.size, np.int64)


def sparse_bytes(n: int, levels: I64, element: float | F64 = 8.0) -> F64:
    """Bytes of a segment, float64[C]: 4 for its count and ``element`` each sent (8: float32 and a 4-byte index)."""
    return np.asarray(4.0 + element * sparse_counts(n, levels), np.float64)


def sparse_errors(gradient: F32, levels: I64, *, estimated: bool = False) -> F64:
    """L2 errors, float64[C]; NaN throughout if the gradient (any shape) is not finite.

    estimated: of codecs whose threshold may leave 0.9 k above it (sidco): the most they can lose.
    """
    x = np.abs(gradient).reshape(-1)
    if unusable(x):
        return np.full(levels.size, np.nan)
    if not x.size:
        return np.zeros(levels.size)
    counts = sparse_counts(x.size, levels)
    if estimated and x.size >= EXACT:
        loose = (counts >= MINIMUM) & (levels <= QUARTER)
        counts = np.where(loose, np.ceil(SHARE * counts).astype(np.int64), counts)
    first = x.size - int(counts.max())
    # Only what some level would send needs an order; of the rest, one sum.
    if first:
        x.partition(first)
    rest = x[:first].astype(np.float64)
    top = np.sort(x[first:]).astype(np.float64)
    # sums[i]: squares of all but the top.size - i largest
    sums = np.dot(rest, rest) + np.concatenate((np.zeros(1), np.cumsum(top * top)))
    return np.asarray(np.sqrt(sums[top.size - counts]), np.float64)


def sparse_table(
    gradients: Mapping[str, F32],
    levels: I64,
    default: int | Sequence[int],
    *,
    estimated: bool = False,
    element: float = 8.0,
) -> LevelTable:
    """The table of these layers (accumulated gradients, any shapes) at ratios in millionths.

    element: bytes of an element sent, 8 for topk, less with packed indices or values. Raises TableError.
    """
    if element <= 0:
        raise TableError("element", "a positive number of bytes", element)
    sizes = [sparse_bytes(g.size, levels, element) for g in gradients.values()]
    errors = [sparse_errors(g, levels, estimated=estimated) for g in gradients.values()]
    shape = (len(gradients), levels.size)
    chosen = default_indices(levels, default, len(gradients))
    return LevelTable(tuple(gradients), levels, np.reshape(sizes, shape), np.reshape(errors, shape), chosen)
