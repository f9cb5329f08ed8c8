"""The best plan there is, by looking at all of them: what Espresso is measured against on small cases.

What may live here: exhaustive search. It is exponential in the tensors: three with all 4341 options take seconds.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner import espresso_kernels as kernels
from gcserver.planner import options_kernels
from gcserver.planner.options_cost import Ints, OptionTable
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace


def exhaustive(trace: Trace, table: OptionTable, above: float = np.inf) -> tuple[float, Ints | None, int]:
    """(seconds of the shortest iteration, its plan in columns of ``table``, timelines looked at).

    ``above``: the length of an iteration already known; if no plan is shorter, that and None. Every plan is covered:
    branches are left only when the work they contain shows that none in them is shorter. Of options with equal chains
    of jobs one is tried.
    """
    training = Training(trace, table)
    prices = training.prices
    length, columns = options_kernels.distinct(prices.count, prices.resource, prices.seconds, prices.work)
    start = np.zeros(len(training.gaps), np.int64)
    limit = above - trace.forward
    end, tried = kernels.exhaust(length, columns, limit, training.arrays, training.priced, start)
    return float(end) + trace.forward, start if end < limit else None, int(tried)
