"""What the workers of test_memory.py and tests/system/test_resources.py do: each function runs in its own process.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import torch

import gcclient
from gcclient import api
from gcclient.call_domains import calls_domain
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec
from tests.integration.cluster import mark, wait_for


def too_much() -> None:
    """Declare a tensor of 256 GiB (declared only: nobody has it)."""
    gcclient.init()
    session = api.current()
    session.declare(calls_domain(session), (TensorSpec("huge", (1 << 36,), int(DType.F32)),))


def little() -> float:
    gcclient.init()
    return float(gcclient.push_pull(torch.full((10,), 2.0), "x")[0])


def large(elements: int, go: str = "", compression: str = "none", end: str = "") -> float:
    """Average one parameter of ``elements``; with ``go`` only once that file is there, after marking "declared".

    With ``end`` the job lives on until that file is there, after marking "averaged".
    """
    gcclient.init(deadline=60)
    weight = torch.nn.Parameter(torch.zeros(elements))
    sgd = torch.optim.SGD([weight], 1.0)
    optimizer = gcclient.DistributedOptimizer(sgd, [("weight", weight)], compression=compression)
    if go:
        mark("declared")
        wait_for(go)
    weight.grad = torch.full((elements,), 2.0)
    optimizer.synchronize()
    if end:
        mark("averaged")
        wait_for(end)
    return float(weight.grad[-1])
