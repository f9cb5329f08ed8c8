"""What the workers of test_planning.py do: DDP training that goes on until the parent has seen enough.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.workers import Slow, digest, start, steps_until


def train(stop: str, pause: float, width: int, late: float = 0.0, **options: Any) -> dict[str, Any]:
    """Train until the file ``stop`` is there; ``pause`` seconds before each step, ``late`` more on all ranks but the
    first. ``options`` are the model's."""
    rank = start()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    model.register_comm_hook(gcclient.state(model, **options), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in steps_until(stop):
        optimizer.zero_grad()
        time.sleep(pause + (late if rank else 0.0))
        made = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 64, generator=made)).pow(2).sum().backward()
        optimizer.step()
    gcclient.shutdown()
    return {"hash": digest(*net.parameters()), "steps": step + 1, "pid": os.getpid()}


def train_wrapped(stop: str, pause: float, width: int, groups: Any) -> dict[str, Any]:
    """Train with the optimizer wrapper until the file ``stop`` is there.

    The gradients of a layer come ``pause`` seconds after those of the next.
    """
    rank = start()
    torch.manual_seed(7)
    layers = [nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)]
    net = nn.Sequential(*layers)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    optimizer = gcclient.DistributedOptimizer(sgd, net.named_parameters(), groups=groups)
    for step in steps_until(stop):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        for layer in layers:
            x = Slow.apply(layer(x), pause)
        x.pow(2).sum().backward()
        optimizer.step()
    gcclient.shutdown()
    return {"hash": digest(*net.parameters()), "steps": step + 1}
