"""L-GreCo's weights on a simulated exchange: levels by bytes, by fitted times and by priorities of buckets.

Buckets leave in the order in which their gradients get ready, one after the other over one link; what is under way
while others are still awaited costs a step nothing. Levels that save bytes of the last buckets therefore save more time
(L-GreCo, section 4, "time optimization"; priorities: appendix A).

What may live here: that exchange, and what it takes with each kind of weights. What may not: the weights themselves
(``gcserver.planner.lgreco_weights``), tables of errors.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gcserver.planner.errors import F64, I64, LevelTable
from gcserver.planner.lgreco import solve
from gcserver.planner.lgreco_weights import fit_sync_times, priorities, time_weights

BUCKETS: Final = 4
#: exchanges that times are fitted to, each with levels drawn for it that send half to twice as much, and how far off a
#: measured one is, as a share
SAMPLES, NOISE = 200, 0.02


def cut(elements: F64, buckets: int = BUCKETS) -> list[int]:
    """The bucket of each layer, of about equally many elements: the last layer's gradient comes first."""
    behind = np.cumsum(elements[::-1])[::-1] - elements / 2
    return np.minimum(behind / elements.sum() * buckets, buckets - 1).astype(np.int64).tolist()


def exchange_seconds(nbytes: F64, rate: float) -> float:
    """From the first bucket's start to the last one's end, in backward passes; ``rate``: bytes in one of these.

    nbytes: float64[B], in the order in which they leave; bucket b is ready at (b + 1) / B.
    """
    free = 0.0
    for bucket, size in enumerate(nbytes):
        free = max(free, (bucket + 1) / nbytes.size) + size / rate
    return free - 1 / nbytes.size


def weighted(table: LevelTable, elements: F64, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Of each kind of weights (bytes, seconds) over those of levels by bytes, at no more error than the defaults'.

    elements: float64[L]. The link carries what levels by bytes send in one backward pass, and times are those of a job
    that has them.
    """
    layers, buckets = np.arange(elements.size), cut(elements)

    def sent(columns: I64) -> F64:
        """float64[B], bytes of each bucket with a level of each layer, by index."""
        return np.bincount(buckets, table.sizes[layers, columns], BUCKETS)

    def decided(weights: F64 | None) -> I64:
        return table.with_default(solve(table, weights=weights).full.levels).default

    by_bytes = decided(None)
    usual = table.sizes[layers, by_bytes][:, None]
    near = [np.flatnonzero(row) for row in (table.sizes >= usual / 2) & (table.sizes <= usual * 2)]
    rng = np.random.default_rng(seed)
    drawn = np.stack([sent(np.array([rng.choice(columns) for columns in near])) for _ in range(SAMPLES)])
    rate = float(sent(by_bytes).sum())
    took = np.array([exchange_seconds(nbytes, rate) for nbytes in drawn]) * rng.normal(1.0, NOISE, SAMPLES)
    weights = {"times": time_weights(fit_sync_times(drawn, took), buckets), "priorities": priorities(buckets)}
    found = {}
    for name, columns in {"uniform": table.default, **{n: decided(w) for n, w in weights.items()}}.items():
        seconds = exchange_seconds(sent(columns), rate) / exchange_seconds(sent(by_bytes), rate)
        found[name] = (float(sent(columns).sum()) / rate, seconds)
    return found
