"""What the workers of test_large.py do: each function runs in its own process (see tests/integration/cluster.py).

What may live here: functions that return plain data. What may not: assertions that the parent can make.

Gradients are small integers, so that sums of two ranks and their halves are exact in float32.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import gcclient
from tests.integration.cluster import mark

#: elements looked at together, so that checking 4 GiB takes no 4 GiB more
SLICE = 1 << 24
#: gradients repeat after so many elements: a prime, so that no block begins where the pattern does
PERIOD = 8191


def parameters(count: int, elements: int, steps: int, groups: str | None) -> dict[str, Any]:
    """A model of ``count`` parameters, averaged by the optimizer wrapper; how many elements came back wrong."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    held = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
    named = [(f"p{i}", p) for i, p in enumerate(held)]
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD(held, 1.0), named, groups=groups)
    base = torch.arange(count * elements).remainder(PERIOD).float().view(count, elements)
    mean = (size + 1) / 2
    wrong, seconds = 0, []
    for step in range(1, steps + 1):
        for p, row in zip(held, base, strict=True):
            p.grad = row * (rank + 1) + step
        began = time.monotonic()
        optimizer.synchronize()
        seconds.append(time.monotonic() - began)
        got = torch.stack([p.grad for p in held])
        wrong += int((got != base * mean + step).sum())
        mark(f"step {step}")
    gcclient.shutdown()
    return {"wrong": wrong, "seconds": seconds}


def calls(count: int) -> int:
    """``count`` named tensors under way at once; how many came back wrong."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    handles = [gcclient.push_pull_async(torch.full((3,), float(i + rank)), f"t{i}") for i in range(count)]
    extra = (size - 1) / 2
    wrong = sum(not torch.equal(gcclient.synchronize(h), torch.full((3,), i + extra)) for i, h in enumerate(handles))
    gcclient.shutdown()
    return wrong


def huge(elements: int) -> dict[str, Any]:
    """One float32 tensor of ``elements``, in the daemon's memory; how many of its elements came back wrong."""
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    tensor = gcclient.empty("huge", elements)
    pattern = torch.arange(SLICE + PERIOD).remainder(PERIOD).float()

    def expected(start: int, stop: int, factor: float) -> torch.Tensor:
        at = start % PERIOD
        # what tells a place from the same place 2**32 bytes, or one slice, away
        return pattern[at : at + stop - start] * factor + start // SLICE

    for start in range(0, elements, SLICE):
        stop = min(start + SLICE, elements)
        tensor[start:stop] = expected(start, stop, rank + 1)
    mark("filled")
    began = time.monotonic()
    gcclient.push_pull_(tensor, "huge")
    seconds = time.monotonic() - began
    mark("back")
    wrong = 0
    for start in range(0, elements, SLICE):
        stop = min(start + SLICE, elements)
        wrong += int((tensor[start:stop] != expected(start, stop, (size + 1) / 2)).sum())
    gcclient.shutdown()
    return {"wrong": wrong, "seconds": seconds}
