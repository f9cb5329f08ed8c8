"""MergeComp's exact cuts in numpy, row after row: plainer than the kernels, with the same results bit by bit.

What may live here: the recurrences of `gcserver.planner.mergecomp_kernels` as whole-array expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from gcserver.planner.mergecomp import Floats, Ints, MergeModel, step_time
from gcserver.planner.mergecomp_groups import Grouping


def best_groupings(model: MergeModel, most: int) -> Iterator[Grouping]:
    """The best cut into 1, 2, ... groups."""
    most = min(most, len(model.elements))
    return _with_own_cores(model, most) if model.own_cores else _on_one_device(model, most)


def _on_one_device(model: MergeModel, most: int) -> Iterator[Grouping]:
    """best[e] = the least f_i over all cuts of the first e tensors into i groups, for i = 1, 2, ..."""
    n = len(model.elements)
    sums = np.array([0, *accumulate(model.elements)], np.float64)
    ready = np.array([0.0, *model.ready])
    # exchange[e, d]: of the tensors from d up to e
    exchange = model.exchange.base + model.exchange.per_element * (sums[:, None] - sums[None, :])
    exchange[~np.tri(n + 1, k=-1, dtype=bool)] = np.inf
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    parents: list[Ints] = []
    for i in range(1, most + 1):
        encoded = ready + i * model.encode.base + model.encode.per_element * sums
        options = np.maximum(encoded[:, None], best[None, :]) + exchange
        parents.append(options.argmin(axis=1))
        best = options[np.arange(n + 1), parents[-1]]
        ends, end = [n], n
        for parent in reversed(parents[1:]):
            end = int(parent[end])
            ends.append(end)
        yield Grouping(tuple(reversed(ends)))


@dataclass(frozen=True, slots=True)
class _Labels:
    """What i groups can leave, by end: ``first[e]`` to ``first[e + 1]`` are the pairs of end e, a rising, f falling."""

    first: Ints
    end: Ints
    encoded: Floats
    exchanged: Floats
    parent: Ints


def _with_own_cores(model: MergeModel, most: int) -> Iterator[Grouping]:
    """As above, with pairs for ends. What cannot beat the cuts that are best on one device is dropped early."""
    n = len(model.elements)
    sums = np.array([0, *accumulate(model.elements)], np.float64)
    limits = np.array([step_time(model, g) for g in _on_one_device(model, most)]) * (1.0 + 1e-12)
    start = np.ones(n + 2, np.int64)
    start[0] = 0
    zero = np.zeros(1)
    layers = [_Labels(start, np.zeros(1, np.int64), zero, zero, np.zeros(1, np.int64))]
    for i in range(most):
        layers.append(_next_labels(model, sums, layers[-1], limits[i:]))
        last = layers[-1]
        at = int(last.first[n] + last.exchanged[last.first[n] : last.first[n + 1]].argmin())
        ends = []
        for layer in reversed(layers[1:]):
            ends.append(int(layer.end[at]))
            at = int(layer.parent[at])
        yield Grouping(tuple(reversed(ends)))


def _next_labels(model: MergeModel, sums: Floats, old: _Labels, limits: Floats) -> _Labels:
    """One group more behind every pair, for every end; ``limits[k]``: the step time to reach with k groups after it.

    Kept are pairs that no other one beats in both times, and that can still keep one of the limits.
    """
    n = len(model.elements)
    encode, exchange = model.encode, model.exchange
    more = np.arange(limits.size)
    last = exchange(model.elements[-1])
    first = np.zeros(n + 2, np.int64)
    parts: list[tuple[Ints, Floats, Floats, Ints]] = []
    for end in range(1, n + 1):
        count = int(old.first[end])  # pairs of all ends before this one
        size = sums[end] - sums[old.end[:count]]
        encoded = np.maximum(old.encoded[:count], model.ready[end - 1]) + encode.base + encode.per_element * size
        exchanged = np.maximum(encoded, old.exchanged[:count]) + exchange.base + exchange.per_element * size
        if end < n:
            # What is over before the next group can be encoded makes no difference: such pairs become equal.
            encoded = np.maximum(encoded, model.ready[end])
            exchanged = np.maximum(exchanged, encoded + encode(model.elements[end]))
        kept = _unbeaten(encoded, exchanged)
        if end < n:
            left = sums[n] - sums[end]
            latest_exchanged = (limits - more * exchange.base - exchange.per_element * left)[1:]
            latest_encoded = (limits - more * encode.base - encode.per_element * left - last)[1:]
            hope = (exchanged[kept, None] <= latest_exchanged) & (encoded[kept, None] <= latest_encoded)
            kept = kept[hope.any(axis=1)]
        first[end + 1] = first[end] + kept.size
        parts.append((np.full(kept.size, end, np.int64), encoded[kept], exchanged[kept], kept))
    ends, encodeds, exchangeds, parents = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Labels(first, ends, encodeds, exchangeds, parents)


def _unbeaten(a: Floats, f: Floats) -> Ints:
    """Indices of the pairs (a, f) that no other pair beats or equals in both, a rising."""
    order = np.lexsort((f, a))
    falling = f[order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], falling[:-1])))
    return order[falling < least]
