"""Compiling what planning a running job needs, before the first plan waits for it.

What may live here: one use of each such kernel. What may not: kernels, and those that benchmarks alone use (the papers'
own searches), which are compiled by whoever uses them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gcserver.planner import lgreco_dp, live_kernels, mergecomp_kernels
from gcserver.planner.errors import LevelTable
from gcserver.planner.errors_quantised import COMPILED, qsgd_errors
from gcserver.planner.fit import AffineCost
from gcserver.planner.lgreco import solve
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.mergecomp import MergeModel, merge
from gcserver.planner.profile import LinkCost, Profile, ProfiledTensor

#: what the planning process calls, in the order of a plan; kernels that these call are compiled into them
KERNELS: Final[tuple[Any, ...]] = (
    COMPILED,
    lgreco_dp.FORWARD,
    lgreco_dp.TRACE,
    live_kernels.simulate,
    mergecomp_kernels.best_ends,
    mergecomp_kernels.next_pairs,
)


def warmup() -> bool:
    """Compile every kernel, or load it from the cache (a fraction of a second when it is there, some ten when not).

    Kernels take what the first call gives them, so each is called as a plan calls it. Returns whether any had to be
    compiled.
    """
    before = _compiled()
    levels = np.array([2, 8], np.int64)
    errors = qsgd_errors(np.arange(2, dtype=np.float32), levels)
    solve(LevelTable(("w",), levels, np.array([[1.0, 4.0]]), errors[None, :], np.array([1], np.int64)))
    tensor = ProfiledTensor("w", (8,), 8, "float32", 0.0)
    live = Live(Profile("warmup", "warmup", 2, 1, 1, 0.0, (tensor,), LinkCost(0.0, 1.0), 8 << 20, 0))
    live.seconds([BlockOption()] * len(live.blocks))
    merge(MergeModel((8, 8), (0.0, 1.0), AffineCost(0.0, 0.0), AffineCost(0.0, 1.0), own_cores=True))
    return _compiled() > before


def _compiled() -> int:
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)
