"""What the workers of test_incarnations.py do: each function runs in its own process (see cluster.py).

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import gcclient
from tests.integration.cluster import mark

ELEMENTS = 100_000


def life(number: int, first: int, steps: int) -> dict[str, Any]:
    """``steps`` steps of life ``number`` of a job, as from a checkpoint before step ``first``.

    Of each step a lossless sum, whose values are those of no other life, step or rank, and a lossy average whose
    residuals carry over from step to step: how many sums were wrong, and a hash of all averages.
    """
    gcclient.init(deadline=30)
    rank, size = gcclient.rank(), gcclient.size()
    ramp = torch.arange(ELEMENTS, dtype=torch.float32) % 500
    factor = sum(r + 1 for r in range(size))
    wrong, digest = 0, hashlib.sha256()
    for step in range(first, first + steps):
        total = gcclient.push_pull(ramp * (rank + 1) * number + step * (rank + 1), average=False)
        wrong += int(not torch.equal(total, (ramp * number + step) * factor))
        average = gcclient.push_pull(torch.sin(ramp * (rank + 1) + step), name="lossy")
        digest.update(average.cpu().numpy().tobytes())
        mark(f"step {step}")
    node = gcclient.stats()["node"]
    gcclient.shutdown()
    return {"wrong": wrong, "digest": digest.hexdigest(), "node": node}
