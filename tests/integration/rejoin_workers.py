"""What workers do while a node is lost and comes back: training whose weights all ranks end with alike.

What may live here: functions for `cluster.py` to run as workers. What may not: assertions about them.

Rank r brings 2**r times the step's number to a sum, so that it tells who took part in it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import gcclient
from tests.integration.cluster import mark
from tests.integration.workers import digest

FOREVER = 1 << 40


def _sum(mine: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Over all ranks; zeros where the step is skipped."""
    try:
        return gcclient.push_pull(mine, name=name, average=False)
    except gcclient.StepSkipped:
        return torch.zeros_like(mine)


def _mask(step: int) -> int:
    """Which ranks are in a named sum of this step, 0 if it is skipped; -1 if it is not the sum of any."""
    total = _sum(torch.full((1000,), float(2 ** gcclient.api.current().me.rank * step)), "sum")
    mask = round(float(total[0]) / step)
    return mask if bool((total == mask * step).all()) else -1


def training(more: int, elements: int = 300_000, pause: float = 0.02, **terms: Any) -> dict[str, Any]:
    """Trains until ``more`` steps after somebody came back, with momentum, a named and an unnamed sum in every step.

    Ranks begin with different weights: what they end with can only be the same by broadcasts and averages.
    """
    gcclient.init(**terms)
    changes: list[tuple[int, tuple[int, ...]]] = []

    def on_change(epoch: int, ranks: tuple[int, ...]) -> None:
        changes.append((epoch, ranks))

    gcclient.on_change(on_change)
    torch.manual_seed(gcclient.rank())
    weight = torch.nn.Parameter(torch.randn(elements))
    inner = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
    optimizer = gcclient.DistributedOptimizer(inner, [("weight", weight)])
    progress = torch.tensor([0, FOREVER])

    def synchronise() -> None:
        root = gcclient.root_rank()
        gcclient.broadcast_parameters([("weight", weight), ("progress", progress)], root)
        gcclient.broadcast_optimizer_state(optimizer, root)

    synchronise()
    began, came, masks, ones = int(progress[0]), [], [], []
    while progress[0] < progress[1]:
        progress[0] += 1
        step = int(progress[0])
        mark(f"step {step}")
        masks.append(_mask(step))
        mark(f"sum of {masks[-1].bit_count()}")
        ones.append(int(_sum(torch.ones(7))[6]))
        data = torch.Generator().manual_seed(1000 * step + gcclient.rank())
        optimizer.zero_grad()
        (weight * torch.randn(elements, generator=data)).sum().backward()
        optimizer.step()
        if arrived := gcclient.admit():
            came.append([int(progress[0]), list(arrived)])
            progress[1] = progress[0] + more
            synchronise()
        time.sleep(pause)
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    facts = {
        "began": began, "came": came, "masks": masks, "ones": ones, "weights": digest(weight, momentum),
        "steps": int(progress[0]), "size": gcclient.size(), "rank": gcclient.rank(), "root": gcclient.root_rank(),
        "epoch": gcclient.stats()["epoch"], "changes": changes,
    }  # fmt: skip
    gcclient.shutdown()
    return facts
