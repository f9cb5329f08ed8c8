"""Espresso on a running job: which blocks stay dense, which are compressed, over which scheme.

What may live here: Algorithm 1 over the live timeline. What may not: prices and the timeline (`live.py`), families,
levels, rules as text.

The unit of a decision is what one rule can tell apart: the blocks that one tensor leads. Columns of a table are the
options of the live search: first the dense ones, over the owner and to all (which the paper's tree has as well, and
which saves a trip where nodes are few), then the compressed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from gcserver.planner.errors import F64, I64
from gcserver.planner.live import Live

#: More units than this are decided together with their neighbours in order of readiness.
UNITS: Final = 48
#: How long one plan may be improved, in timelines times blocks times nodes, which is what a timeline takes.
WORK: Final = 50_000
#: What an option has to gain, as a share, to replace another: more than sums of the same numbers differ by.
GAIN: Final = 1e-9
#: A unit goes dense if all that do make the step no more than this share longer: what is gained by less is not sure.
SLACK: Final = 1e-4
#: One option for all stays if the best plan is no more than this share faster: it is one rule, and easier to believe.
PLAIN: Final = 0.005

#: columns that are dense: over the owner, to all
DENSE_COLUMNS: Final = 2

#: blocks, by index, that one decision is for
Units = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """A decision: columns int64[B] in block order, seconds of a step, timelines looked at."""

    columns: I64
    seconds: float
    timelines: int


def units(live: Live, most: int = UNITS) -> Units:
    """The blocks of each leading tensor, in the order in which they become available; at most so many."""
    found: dict[int, list[int]] = {}
    for block in live.order:
        found.setdefault(live.blocks[block].lead, []).append(block)
    led = list(found.values())
    if len(led) <= most:
        return tuple(map(tuple, led))
    bounds = [len(led) * i // most for i in range(most + 1)]
    return tuple(tuple(b for blocks in led[lo:hi] for b in blocks) for lo, hi in pairwise(bounds))


def select(live: Live, table: F64, decided: Units) -> Selected:
    """The shortest step that was found: Algorithm 1 from no compression, uniform plans, and both improved.

    table: float64[B, K, 10] of `Live.table`. decided: units of which each gets one column; other blocks have the first.
    Longer than with one column for all units by `SLACK` at most. Where that is as good as compressing a unit stays
    dense. The same arguments give the same answer.
    """
    search = _Search(live, table, decided)
    plans = [search.uniform(column) for column in range(table.shape[1])]
    uniform = min(((search.seconds(plan), plan) for plan in plans), key=lambda found: found[0])
    starts = (uniform, search.greedy())
    best, plan = min((search.improved(*start) for start in starts), key=lambda found: found[0])
    if best >= uniform[0] * (1 - PLAIN):
        best, plan = uniform
    plan = search.relaxed(best, plan)
    return Selected(plan, search.seconds(plan), search.timelines)


class _Search:
    def __init__(self, live: Live, table: F64, decided: Units) -> None:
        self.live, self.table, self.decided, self.timelines = live, table, decided, 0
        rank = {block: i for i, block in enumerate(live.order)}
        self.last = [max(rank[b] for b in unit) for unit in decided]
        sizes = [sum(live.blocks[b].nbytes for b in unit) for unit in decided]
        #: larger first, of equals the one that is ready last
        self.priority = sorted(range(len(decided)), key=lambda u: (-sizes[u], -self.last[u]))

    def run(self, plan: I64) -> tuple[float, F64]:
        self.timelines += 1
        return self.live.run(self.table, plan)

    def seconds(self, plan: I64) -> float:
        return self.run(plan)[0]

    def uniform(self, column: int) -> I64:
        plan = np.zeros(len(self.live.blocks), np.int64)
        for unit in self.decided:
            plan[list(unit)] = column
        return plan

    def greedy(self) -> tuple[float, I64]:
        """Algorithm 1 with Remove after every decision."""
        plan = self.uniform(0)
        best = self.seconds(plan)
        left = self._removed(plan, self.priority)
        while left:
            best, plan = self._best(left[0], best, plan)
            left = self._removed(plan, left[1:])
        return best, plan

    def improved(self, best: float, plan: I64) -> tuple[float, I64]:
        """Every unit taken up again, until none changes or the effort is spent."""
        limit = self.timelines + WORK // max(len(self.live.blocks) * self.live.nodes, 1)
        changed = True
        while changed and self.timelines < limit:
            before = best
            for unit in self.priority:
                if self.timelines < limit:
                    best, plan = self._best(unit, best, plan)
            changed = best < before
        return best, plan

    def relaxed(self, best: float, plan: I64) -> I64:
        """Dense wherever the step gets hardly longer by it."""
        limit = best * (1 + SLACK)
        for unit in self.priority:
            blocks = list(self.decided[unit])
            for column in range(DENSE_COLUMNS):
                if plan[blocks[0]] >= DENSE_COLUMNS:
                    trial = plan.copy()
                    trial[blocks] = column
                    if self.seconds(trial) <= limit:
                        plan = trial
        return plan

    def _best(self, unit: int, best: float, plan: I64) -> tuple[float, I64]:
        """The plan with the column of a unit that ends first."""
        blocks = list(self.decided[unit])
        for column in range(self.table.shape[1]):
            if column != plan[blocks[0]]:
                trial = plan.copy()
                trial[blocks] = column
                seconds = self.seconds(trial)
                if seconds < best * (1 - GAIN):
                    best, plan = seconds, trial
        return best, plan

    def _removed(self, plan: I64, left: Sequence[int]) -> list[int]:
        """The paper's Remove: units still dense whose exchange is over before a bubble leave the search.

        A bubble: a block becomes available when all that was available before it is back.
        """
        if not left:
            return []
        _, spans = self.run(plan)
        ordered = spans[self.live.order]
        over = np.maximum.accumulate(ordered[:, 1])
        bubbles = np.flatnonzero(ordered[1:, 0] >= over[:-1]) + 1
        last = int(bubbles[-1]) if len(bubbles) else 0
        return [u for u in left if plan[self.decided[u][0]] >= DENSE_COLUMNS or self.last[u] >= last]
