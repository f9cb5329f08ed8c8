"""What the workers of test_slow.py and tests/system/test_late.py do: each function runs in its own process.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import torch

import gcclient
from tests.integration.cluster import mark, wait_for

#: two blocks, so that each of two nodes owns one
ELEMENTS = 300_000


def hesitant(go: str) -> float:
    """Rank 0 pushes its second gradient only when the file ``go`` is there, the others at once."""
    gcclient.init()
    gcclient.push_pull(torch.ones(ELEMENTS), "x")
    if gcclient.rank() == 0:
        mark("hesitates")
        wait_for(go)
    return float(gcclient.push_pull(torch.ones(ELEMENTS), "x")[-1])
