"""What the workers of test_dashboard.py do: a DDP model, and a tensor beside it whose name means no good.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.workers import start, steps_until

#: what a page that took names for markup would run
HOSTILE = "<img src=x onerror=alert(1)>"


def train(stop: str) -> int:
    """Train until the file ``stop`` is there. Returns the number of steps."""
    rank = start()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.25)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    gcclient.push_pull(torch.ones(1000), HOSTILE)
    for step in steps_until(stop):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 256, generator=made)).pow(2).sum().backward()
        optimizer.step()
    gcclient.shutdown()
    return step + 1
