"""What no plan can beat: a lower bound of the iteration over all plans, by Lagrangian relaxation.

What may live here: that bound. What may not: searches, the paper's upper bound (`baselines.py`), which leaves out the
time of compression and may therefore be out of reach.

Of every plan these end no later than the iteration, for any gradient f:

    the GPU        all computation and all work on it
    CPU, links     f is ready, which is after what the GPU compresses of the gradients before f, and then they do their
                   work for f and all after it (three ends)
    f itself       f is ready, and goes through its chain of jobs

So is any weighted mean of these five, which is a sum over tensors: its least is that of each tensor alone, over its
options. The weights are raised where the end is late, for the bound to rise; the best over some f counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gcserver.planner.options_cost import Floats, Ints
from gcserver.planner.timeline import Training

#: Steps of the weights for each f, and how many f are looked at beside the largest tensor.
STEPS: Final = 300
FIRSTS: Final = 12
#: How far a weight moves in the first step.
RATE: Final = 2.0


def least_seconds(training: Training) -> float:
    """Seconds of an iteration, the forward pass included, that no plan over ``training.table`` can be below."""
    n = len(training.gaps)
    if not n:
        return training.trace.forward
    firsts = {int(f) for f in np.linspace(0, n - 1, FIRSTS)} | {int(training.elements.argmax())}
    return training.trace.forward + max(_relaxed(training, f) for f in sorted(firsts))


def _relaxed(training: Training, f: int) -> float:
    """The best bound of `STEPS` weights for gradient ``f``."""
    prices, sizes = training.prices, len(training.prices.work)
    work, chain = prices.work[:, :, :4], prices.work[:, :, 4]
    # Of a chain that begins on the GPU the first job is done before the next gradient is computed.
    lead = np.where((prices.count > 0) & (prices.resource[:, :, 0] == 0), prices.seconds[:, :, 0], 0.0)
    own = int(training.size_of[f])
    before, after = (
        np.bincount(of, minlength=sizes).astype(np.float64) for of in (training.size_of[:f], training.size_of[f + 1 :])
    )
    rows = np.arange(sizes)
    start = np.full(5, float(training.gaps[: f + 1].sum()))
    start[0] = float(training.gaps.sum())
    weights, best = np.full(5, 0.2), 0.0
    for step in range(STEPS):
        early: Ints = (weights[0] * work[:, :, 0] + (1 - weights[0]) * lead).argmin(axis=1)
        late: Ints = (work @ weights[:4]).argmin(axis=1)
        itself = int((work[own] @ weights[:4] + weights[4] * chain[own]).argmin())
        ends: Floats = start.copy()
        ends[0] += before @ work[rows, early, 0]
        ends[1:] += before @ lead[rows, early]
        ends[:4] += after @ work[rows, late] + work[own, itself]
        ends[4] += chain[own, itself]
        best = max(best, float(weights @ ends))
        weights = weights * np.exp(RATE / (1 + step) ** 0.5 * ends / ends.max())
        weights /= weights.sum()
    return best
