"""The timeline of one iteration: computation, compression and communication on their resources (Espresso, 4.3).

What may live here: a training job as arrays, what a plan comes to, and its jobs one by one. What may not: decisions.

Four resources work off one job at a time, in the order in which jobs arrive: the GPU (or whatever computes), which
compresses in turn with computing the next gradients; the CPU's compression cores, as one pool; the intra link; the
inter link. A gradient's first job arrives when the gradient is ready, just before the computation of the next one
does, so that GPU compression delays what is computed later; each further job arrives when the one before it ends.
Ends at the same moment are taken in the order of the resources. The iteration ends with the last job.

A bubble is a moment at which a gradient gets ready and everything before it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gcserver.planner import options_kernels
from gcserver.planner import timeline_kernels as kernels
from gcserver.planner.options_cost import RESOURCES, Floats, Ints, OptionTable, Prices
from gcserver.planner.trace import Trace


@dataclass(frozen=True)
class Job:
    """``tensor``: its index in the trace; ``what``: ``compute`` or the resource; seconds since the iteration began."""

    tensor: int
    what: str
    start: float
    end: float


class Training:
    """A trace with a table of options priced for its sizes: what plans are made for.

    A plan is a column of ``table`` for every tensor, [N] int64.
    """

    def __init__(self, trace: Trace, table: OptionTable) -> None:
        self.trace = trace
        self.table = table
        ready = np.array([0.0, *(t.ready for t in trace.tensors)])
        self.gaps: Floats = np.diff(ready)
        elements = np.array([t.elements for t in trace.tensors], np.int64)
        sizes, inverse = np.unique(elements, return_inverse=True)
        self.elements: Ints = elements
        self.size_of: Ints = inverse.astype(np.int64)
        self.prices: Prices = table.price(sizes.astype(np.float64))

    @cached_property
    def by_chain(self) -> Ints:
        """[S, O]: for each size of the trace all options, shortest chains first."""
        order: Ints = options_kernels.by_chain(self.prices.work)
        return order

    @property
    def arrays(self) -> tuple[Floats, Ints]:
        """``trace`` of the kernels."""
        return self.gaps, self.size_of

    @property
    def priced(self) -> tuple[Ints, Ints, Floats, Floats]:
        """``priced`` of the kernels."""
        return self.prices.count, self.prices.resource, self.prices.seconds, self.prices.work

    def chains(self, plan: Ints) -> tuple[Ints, Ints, Floats]:
        """(count [N], resource [N, 12], seconds [N, 12]) of every tensor's jobs."""
        p = self.prices
        return p.count[self.size_of, plan], p.resource[self.size_of, plan], p.seconds[self.size_of, plan]

    def time(self, plan: Ints) -> float:
        """Seconds of an iteration with ``plan``, the forward pass of the trace included."""
        return self.trace.forward + float(kernels.finish(plan, self.arrays, self.priced))

    def bubbles(self, plan: Ints) -> list[int]:
        """Tensors that get ready when everything before them is complete; never the first."""
        _, bubble, _ = kernels.evaluate(self.arrays, self.chains(plan))
        return [int(i) for i in np.flatnonzero(bubble) if i]

    def jobs(self, plan: Ints) -> list[Job]:
        """Everything that happens in an iteration, by start."""
        count, resource, seconds = self.chains(plan)
        _, _, starts = kernels.evaluate(self.arrays, (count, resource, seconds))
        starts += self.trace.forward
        found = []
        for i, gap in enumerate(self.gaps):
            start = float(starts[i, kernels.JOBS])
            found.append(Job(i, "compute", start, start + float(gap)))
            for k in range(count[i]):
                start = float(starts[i, k])
                found.append(Job(i, RESOURCES[resource[i, k]], start, start + float(seconds[i, k])))
        return sorted(found, key=lambda j: (j.start, j.end))
