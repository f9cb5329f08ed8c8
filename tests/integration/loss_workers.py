"""What workers do while nodes are lost: integers whose sums tell who took part.

What may live here: functions for `cluster.py` to run as workers. What may not: assertions about them.

Rank r brings 2**r (times the step, times 6): a sum is the step's number times a mask of the ranks in it, and stays a
whole number when it is divided by one, two or three of them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import gcclient
from tests.integration.cluster import mark

#: what averages over up to three ranks stay whole with
WHOLE = 6


def _mask(total: torch.Tensor, step: int) -> int:
    """Which ranks are in a sum; -1 if it is not the sum of any."""
    first = float(total[0])
    mask = round(first / (WHOLE * step))
    return mask if mask * WHOLE * step == first and bool((total == first).all()) else -1


def _brought(step: int, elements: int) -> torch.Tensor:
    return torch.full((elements,), float(2 ** gcclient.api.current().me.rank * WHOLE * step))


def _begin(step: int, stall: int) -> None:
    """Note the step; rank 1 then brings nothing to step ``stall`` for so long that it is killed meanwhile."""
    mark(f"step {step}")
    if step == stall and gcclient.api.current().me.rank == 1:
        time.sleep(120)


def _facts(masks: list[int], **more: Any) -> dict[str, Any]:
    stats = gcclient.stats()
    facts = {"masks": masks, "rank": gcclient.rank(), "size": gcclient.size(), "epoch": stats["epoch"]}
    return facts | {"skipped": stats["skipped_steps"]} | more


def sums(steps: int, elements: int, pause: float = 0.01, stall: int = 0, **terms: Any) -> dict[str, Any]:
    """push_pull of a sum and of an average in every step; a skipped one counts as 0. ``stall``: see :func:`_begin`."""
    gcclient.init(**terms)
    changes: list[tuple[int, tuple[int, ...]]] = []
    gcclient.on_change(lambda epoch, ranks: changes.append((epoch, ranks)))
    masks, wrong = [], 0
    for step in range(1, steps + 1):
        _begin(step, stall)
        handles = [
            gcclient.push_pull_async(_brought(step, elements), name="sum", average=False),
            gcclient.push_pull_async(_brought(step, elements), name="mean", average=True),
        ]
        found = []
        for handle in handles:
            try:
                found.append(gcclient.synchronize(handle).clone())
            except gcclient.StepSkipped:
                found.append(None)
        total, mean = found
        masks.append(0 if total is None else _mask(total, step))
        # The loss may fall between the two: each is a step of its own, with members of its own.
        wrong += mean is not None and not any(
            bool((mean * bin(mask).count("1") == WHOLE * step * mask).all()) for mask in range(1, 8)
        )
        time.sleep(pause)
    facts = _facts(masks, wrong=wrong, changes=changes)
    gcclient.shutdown()
    return facts


def training(steps: int, elements: int, pause: float = 0.01, stall: int = 0, **terms: Any) -> dict[str, Any]:
    """DistributedOptimizer over a parameter whose gradient is what the rank brings, and one that no rank uses.

    ``stall``: see :func:`_begin`.
    """
    gcclient.init(**terms)
    weight, unused = (torch.nn.Parameter(torch.zeros(elements)) for _ in range(2))
    inner = torch.optim.SGD([weight, unused], lr=1.0)
    optimizer = gcclient.DistributedOptimizer(inner, [("weight", weight), ("unused", unused)])
    means: list[float] = []
    for step in range(1, steps + 1):
        _begin(step, stall)
        before = float(weight.detach()[0])
        optimizer.zero_grad()
        (weight * _brought(step, elements)).sum().backward()
        optimizer.step()
        means.append(before - float(weight.detach()[0]))
        time.sleep(pause)
    whole = bool((weight.detach() == weight.detach()[0]).all()) and unused.grad is None
    facts = _facts([], means=means, whole=whole, weight=float(weight.detach()[0]))
    gcclient.shutdown()
    return facts
