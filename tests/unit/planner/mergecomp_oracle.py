"""MergeComp's exact cuts by recurrences in numpy, row after row: plainer than the kernels, with the same results bit by
bit.

What may live here: the recurrences of `gcserver.planner.mergecomp_kernels` as whole-array expressions, and cutting by
them.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from gcserver.planner import mergecomp
from gcserver.planner.mergecomp import Floats, Ints, MergeModel, best_by_count
from gcserver.planner.mergecomp_groups import Grouping

Cost = tuple[float, float]


def best_groupings(model: MergeModel, most: int) -> list[Grouping]:
    """The best cut into 1, 2, ... groups."""
    with patch.object(mergecomp, "kernels", SimpleNamespace(best_ends=best_ends, next_pairs=next_pairs)):
        return [m.grouping for m in best_by_count(model, most)]


def best_ends(
    before: Floats, groups: int, sums: Floats, ready: Floats, encode: Cost, exchange: Cost
) -> tuple[Floats, Ints]:
    """As the kernel: best[e] = the least time over all cuts of the first e tensors into that many groups."""
    ends = np.arange(sums.size)
    # of the tensors from d up to e, by [e, d]
    exchanges = exchange[0] + exchange[1] * (sums[:, None] - sums[None, :])
    exchanges[~np.tri(sums.size, k=-1, dtype=bool)] = np.inf
    encoded = ready + groups * encode[0] + encode[1] * sums
    options = np.maximum(encoded[:, None], before[None, :]) + exchanges
    parent = options.argmin(axis=1)
    return options[ends, parent], parent


def next_pairs(
    old_first: Ints,
    old_end: Ints,
    old_encoded: Floats,
    old_exchanged: Floats,
    sums: Floats,
    ready: Floats,
    elements: Floats,
    encode: Cost,
    exchange: Cost,
    limits: Floats,
) -> tuple[Ints, Ints, Floats, Floats, Ints]:
    """As the kernel: one group more behind every pair, for every end."""
    n = elements.size
    more = np.arange(limits.size)
    last = exchange[0] + exchange[1] * elements[-1]
    first = np.zeros(n + 2, np.int64)
    parts: list[tuple[Ints, Floats, Floats, Ints]] = []
    for end in range(1, n + 1):
        count = int(old_first[end])  # pairs of all ends before this one
        size = sums[end] - sums[old_end[:count]]
        encoded = np.maximum(old_encoded[:count], ready[end - 1]) + encode[0] + encode[1] * size
        exchanged = np.maximum(encoded, old_exchanged[:count]) + exchange[0] + exchange[1] * size
        if end < n:
            # What is over before the next group can be encoded makes no difference: such pairs become equal.
            encoded = np.maximum(encoded, ready[end])
            exchanged = np.maximum(exchanged, encoded + (encode[0] + encode[1] * elements[end]))
        kept = _unbeaten(encoded, exchanged)
        if end < n:
            left = sums[n] - sums[end]
            latest_exchanged = (limits - more * exchange[0] - exchange[1] * left)[1:]
            latest_encoded = (limits - more * encode[0] - encode[1] * left - last)[1:]
            hope = (exchanged[kept, None] <= latest_exchanged) & (encoded[kept, None] <= latest_encoded)
            kept = kept[hope.any(axis=1)]
        first[end + 1] = first[end] + kept.size
        parts.append((np.full(kept.size, end, np.int64), encoded[kept], exchanged[kept], kept))
    ends, encodeds, exchangeds, parents = (np.concatenate(part) for part in zip(*parts, strict=True))
    return first, ends, encodeds, exchangeds, parents


def _unbeaten(a: Floats, f: Floats) -> Ints:
    """Indices of the pairs (a, f) that no other pair beats or equals in both, a rising."""
    order = np.lexsort((f, a))
    falling = f[order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], falling[:-1])))
    return order[falling < least]
