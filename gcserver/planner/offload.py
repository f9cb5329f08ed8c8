"""Espresso's CPU offloading: which compressed tensors leave the GPU (section 4.4.3, Algorithm 2, Lemma 1).

What may live here: groups and the choice among their prefixes. What may not: Algorithm 1.

Tensors of the same size and the same option form a group; in each, the ones that are ready first go to the CPU. All
combinations of these numbers are compared, as long as there are at most ``LIMIT``; beyond, one group is varied at a
time, over and over, until none changes. Lemma 1, that the earliest are the best ones to offload, holds where the CPU
takes what comes first first, its time depends on the size only, and communication hides behind compression. It fails
where a link is the bottleneck: a first tensor that the GPU compresses sooner lets the link start sooner (the tests have
an example). ``espresso.select`` therefore does not end with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gcserver.planner import espresso_kernels as kernels
from gcserver.planner.options_cost import Ints
from gcserver.planner.timeline import Training

#: Combinations that are compared one by one.
LIMIT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Offload:
    """``plan`` with some tensors on the CPU; ``seconds`` without forward; ``combinations``: Theorem 1's product."""

    plan: Ints
    seconds: float
    groups: int
    combinations: int
    timelines: int


def offload_to_cpu(training: Training, to_cpu: Ints, plan: Ints, limit: int = LIMIT) -> Offload:
    """Algorithm 2 on ``plan`` [N]; ``to_cpu`` [O] gives the column of an option on the CPU, or -1 for none."""
    members: dict[tuple[int, int], list[int]] = {}
    for i, column in enumerate(plan.tolist()):
        if to_cpu[column] >= 0 and to_cpu[column] != column:
            members.setdefault((int(training.size_of[i]), column), []).append(i)
    combinations = 1
    for group in members.values():
        combinations *= len(group) + 1
    first = np.cumsum([0, *map(len, members.values())], dtype=np.int64)
    member = np.array([i for group in members.values() for i in group], np.int64)
    other = np.array([to_cpu[column] for _, column in members], np.int64)
    plan = plan.copy()
    free = np.ones(len(members), np.bool_)
    if combinations <= limit:
        end, tried = kernels.offload(first, member, other, free, training.arrays, training.priced, plan)
        return Offload(plan, float(end), len(members), combinations, int(tried))
    return _one_by_one(training, first, member, other, plan, combinations)


def _one_by_one(training: Training, first: Ints, member: Ints, other: Ints, plan: Ints, combinations: int) -> Offload:
    """Vary one group at a time, the others as they are, until a whole round changes nothing."""
    before, tried, end = np.inf, 0, np.inf
    start = plan.copy()
    while True:
        for g in range(len(other)):
            own = member[first[g] : first[g + 1]]
            plan[own] = start[own]
            one = np.array([0, len(own)], np.int64)
            free = np.ones(1, np.bool_)
            end, more = kernels.offload(one, own, other[g : g + 1], free, training.arrays, training.priced, plan)
            tried += int(more)
        if not end < before * (1 - kernels.GAIN):
            return Offload(plan, float(end), len(other), combinations, tried)
        before = end
