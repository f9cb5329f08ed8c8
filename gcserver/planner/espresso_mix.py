"""A start for Espresso's search: options mixed so that every resource is busy.

What may live here: that plan. What may not: what is made of it (`espresso.py`), the bound that weights of resources
give (`espresso_least.py`).

A plan whose links, GPU and CPU are all nearly full is improved by no change of one tensor, however bad the mix. So
resources get prices: every size takes the option that costs least at these, the prices of what is then full rise, and
so on. Tensors of a size take the options of the later rounds in turn, as often as they came up.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gcserver.planner.options_cost import Ints
from gcserver.planner.timeline import Training

#: Rounds of prices, and how far a price moves in the first.
ROUNDS: Final = 64
RATE: Final = 2.0


def mixed(training: Training, length: Ints, columns: Ints) -> Ints:
    """The plan [N]; candidates of size s are ``columns[s, :length[s]]``, at least one."""
    sizes, rows, most = len(length), np.arange(len(length)), int(length.max())
    work = training.prices.work[rows[:, None], columns[:, :most], :4]
    work[np.arange(most)[None, :] >= length[:, None]] = np.inf
    count = np.bincount(training.size_of, minlength=sizes).astype(np.float64)
    start = np.array([training.gaps.sum(), *3 * [training.gaps[0]]])
    prices, taken = np.full(4, 0.25), []
    for step in range(ROUNDS):
        choice = (work @ prices).argmin(axis=1)
        taken.append(choice)
        ends = start + count @ work[rows, choice]
        prices = prices * np.exp(RATE / (1 + step) ** 0.5 * ends / ends.max())
        prices /= prices.sum()
    later = np.array(taken[ROUNDS // 2 :])
    plan = np.empty(len(training.size_of), np.int64)
    for s in range(sizes):
        options, times = np.unique(later[:, s], return_counts=True)
        had = np.zeros(len(options))
        for place, tensor in enumerate(np.flatnonzero(training.size_of == s), 1):
            # whichever is furthest behind its share
            option = int((times / times.sum() * place - had).argmax())
            had[option] += 1
            plan[tensor] = columns[s, options[option]]
    return plan
