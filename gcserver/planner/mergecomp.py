"""MergeComp: tensors merged into groups that are encoded and exchanged as one, the cut found on a model of the step.

What may live here: the step's timeline, the exact search on it, Algorithm 2. What may not: searches that measure
(`mergecomp_search.py`), groupings as such (`mergecomp_groups.py`).

The timeline. Tensor j is ready at r_j; group i is the tensors before e_i that no earlier group has, x_i elements;
h(x) encodes and decodes a group, g(x) exchanges it. Exchanges go one after the other, each when its group is encoded:

    f_i = max(a_i, f_(i-1)) + g(x_i)          F = f_y

Where encoding happens on the device that computes gradients, as in the paper, it delays what comes after it:

    a_i = r_(e_i) + h(x_1) + ... + h(x_i)

Where it has cores of its own, as in gradcomm's daemon, it waits for the gradients and for itself only:

    a_i = max(r_(e_i), a_(i-1)) + h(x_i)

This is Equation 7, F = A + sum h + sum g - sum p, with A = r of the last tensor and p_i the time in which group i is
being exchanged before a_y, when the last group is encoded; with cores of its own, encoding hides a part q of its time
behind computation as well, and F = A + sum h - q + sum g - sum p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from gcserver.planner import mergecomp_kernels as kernels
from gcserver.planner.fit import AffineCost
from gcserver.planner.mergecomp_groups import Grouping, GroupingError, whole_model
from gcserver.planner.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Groups Algorithm 2 tries unless told otherwise; the paper's Y = 2 is enough only where costs of encoding dominate.
MOST: Final = 8
#: The gain for which one more group is taken; the paper gives no value.
ALPHA: Final = 0.005


@dataclass(frozen=True, slots=True)
class MergeModel:
    """One training step as MergeComp sees it.

    ``elements`` and ``ready`` (seconds since the step began, never falling) are per tensor, in the order of
    back-propagation. ``encode`` covers decoding. ``own_cores``: encoding does not delay computing.
    Raises :class:`GroupingError` for no tensors, a size below one, or times that are negative or fall.
    """

    elements: tuple[int, ...]
    ready: tuple[float, ...]
    encode: AffineCost
    exchange: AffineCost
    own_cores: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.elements)
        if len(self.elements) != len(self.ready):
            raise GroupingError(f"each of {len(self.elements)} tensors needs a time, got {len(self.ready)}")
        if not all(0.0 <= a <= b < float("inf") for a, b in pairwise((0.0, *self.ready))):
            raise GroupingError("the times at which tensors are ready must rise from 0 on, or stay")


def merge_model(trace: Trace, encode: AffineCost, exchange: AffineCost, own_cores: bool = False) -> MergeModel:
    """The model of a traced step. Raises :class:`GroupingError` for a trace without tensors."""
    elements = tuple(t.elements for t in trace.tensors)
    return MergeModel(elements, tuple(trace.forward + t.ready for t in trace.tensors), encode, exchange, own_cores)


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """A group's times, s: ``encoded`` (a_i), ``sent`` (its exchange starts), ``exchanged`` (f_i), ``overlap`` (p_i)."""

    encoded: float
    sent: float
    exchanged: float
    overlap: float


def timeline(model: MergeModel, grouping: Grouping) -> tuple[GroupTimes, ...]:
    """When each group is encoded and exchanged. Raises :class:`GroupingError` for another model's grouping."""
    sizes = grouping.sizes(model.elements)
    spans: list[tuple[float, float, float]] = []
    encoded = exchanged = spent = 0.0
    for end, size in zip(grouping.ends, sizes, strict=True):
        took = model.encode(size)
        spent += took
        encoded = max(model.ready[end - 1], encoded) + took if model.own_cores else model.ready[end - 1] + spent
        sent = max(encoded, exchanged)
        exchanged = sent + model.exchange(size)
        spans.append((encoded, sent, exchanged))
    return tuple(GroupTimes(a, s, f, max(min(f, encoded) - s, 0.0)) for a, s, f in spans)


def step_time(model: MergeModel, grouping: Grouping) -> float:
    """F of Equation 7, s: from the step's begin to the last group's arrival."""
    return timeline(model, grouping)[-1].exchanged


@dataclass(frozen=True, slots=True)
class Merged:
    """A grouping, the step time the model gives it, s, and why it was taken."""

    grouping: Grouping
    seconds: float
    reason: str


def merge(model: MergeModel, most: int = MOST, alpha: float = ALPHA) -> Merged:
    """Algorithm 2: one group more while that pays; each number of groups with its best cut.

    Stops at y groups if y + 1 are no faster (the paper prints "slower"; at a tie the fewer groups stay), or after
    y + 1 if they gain less than ``alpha`` of the time. Raises :class:`GroupingError` unless most is at least 1 and
    alpha in [0, 1).
    """
    check_limits(most, alpha)
    best = _merged(model, whole_model(len(model.elements)), "groups: 1; as many as were asked for")
    for grouping in islice(_best_groupings(model, most), 1, None):
        new = _merged(model, grouping, f"groups: {len(grouping)}; as many as were asked for")
        gain = best.seconds - new.seconds
        if gain <= 0.0:
            return Merged(best.grouping, best.seconds, f"groups: {len(best.grouping)}; one more is no faster")
        if gain < alpha * best.seconds:
            return Merged(new.grouping, new.seconds, f"groups: {len(grouping)}; the last gained under {alpha:.2%}")
        best = new
    return best


def best_by_count(model: MergeModel, most: int) -> tuple[Merged, ...]:
    """The best grouping for every number of groups from 1 to ``most``, or to one for each tensor.

    Exact: in the paper's timeline a_i follows from i and e_i alone (Lemma 2), so the best f_i does too; with cores of
    its own, a group leaves a pair (a_i, f_i), and all pairs are kept that no other one beats in both. O(most * N^2)
    times the pairs kept for an end. Raises :class:`GroupingError` unless ``most`` is at least 1.
    """
    check_limits(most, 0.0)
    return tuple(_merged(model, g, f"the best of {len(g)} groups") for g in _best_groupings(model, most))


def two_group_times(model: MergeModel) -> Floats:
    """Step times of all cuts into two groups, s: element c - 1 is the cut before tensor c. Empty for one tensor."""
    n = len(model.elements)
    return np.array([step_time(model, Grouping((cut, n))) for cut in range(1, n)])


def check_sizes(elements: Sequence[int]) -> None:
    """Raises :class:`GroupingError` unless there is a tensor and each has an element."""
    if not elements or min(elements) < 1:
        raise GroupingError(f"a model has one tensor at least, each of one element at least, got {list(elements[:8])}")


def check_limits(most: int, alpha: float) -> None:
    """Raises :class:`GroupingError` unless most is at least 1 and alpha in [0, 1)."""
    if most < 1:
        raise GroupingError(f"the most groups to try (Y) must be 1 at least, got {most}")
    if not 0.0 <= alpha < 1.0:
        raise GroupingError(f"the gain to ask of one more group (alpha) must be in [0, 1), got {alpha}")


def _merged(model: MergeModel, grouping: Grouping, reason: str) -> Merged:
    return Merged(grouping, step_time(model, grouping), reason)


def _best_groupings(model: MergeModel, most: int) -> Iterator[Grouping]:
    most = min(most, len(model.elements))
    return _with_own_cores(model, most) if model.own_cores else _on_one_device(model, most)


def _on_one_device(model: MergeModel, most: int) -> Iterator[Grouping]:
    """best[e] = the least f_i over all cuts of the first e tensors into i groups, for i = 1, 2, ..."""
    n = len(model.elements)
    sums, ready = _sums(model), np.array([0.0, *model.ready])
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    parents: list[Ints] = []
    for i in range(1, most + 1):
        best, parent = kernels.best_ends(best, i, sums, ready, _pair(model.encode), _pair(model.exchange))
        parents.append(parent)
        ends, end = [n], n
        for parent in reversed(parents[1:]):
            end = int(parent[end])
            ends.append(end)
        yield Grouping(tuple(reversed(ends)))


def _sums(model: MergeModel) -> Floats:
    """Elements of the first tensors, float64[N + 1]."""
    return np.array([0, *accumulate(model.elements)], np.float64)


def _pair(cost: AffineCost) -> tuple[float, float]:
    return float(cost.base), float(cost.per_element)


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
    limits = np.array([step_time(model, g) for g in _on_one_device(model, most)]) * (1.0 + 1e-12)
    start = np.ones(n + 2, np.int64)
    start[0] = 0
    zero = np.zeros(1)
    layers = [_Labels(start, np.zeros(1, np.int64), zero, zero, np.zeros(1, np.int64))]
    for i in range(most):
        layers.append(_next_labels(model, layers[-1], limits[i:]))
        last = layers[-1]
        at = int(last.first[n] + last.exchanged[last.first[n] : last.first[n + 1]].argmin())
        ends = []
        for layer in reversed(layers[1:]):
            ends.append(int(layer.end[at]))
            at = int(layer.parent[at])
        yield Grouping(tuple(reversed(ends)))


def _next_labels(model: MergeModel, old: _Labels, limits: Floats) -> _Labels:
    """One group more behind every pair, for every end; ``limits[k]``: the step time to reach with k groups after it.

    Kept are pairs that no other one beats in both times, and that can still keep one of the limits.
    """
    ready, elements = np.array(model.ready, np.float64), np.array(model.elements, np.float64)
    return _Labels(
        *kernels.next_pairs(
            old.first, old.end, old.encoded, old.exchanged, _sums(model), ready, elements, _pair(model.encode),
            _pair(model.exchange), limits,
        )
    )  # fmt: skip
