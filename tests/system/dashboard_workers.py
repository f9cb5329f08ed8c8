"""What the workers of test_dashboard.py do: a DDP model, and a tensor beside it whose name means no good.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark

#: what a page that took names for markup would run
HOSTILE = "<img src=x onerror=alert(1)>"


def train(stop: str) -> int:
    """Train until the file ``stop`` is there, which rank 0 looks for. Returns the number of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=5)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.25)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    gcclient.push_pull(torch.ones(1000), HOSTILE)
    rank, step, over = dist.get_rank(), 0, torch.zeros(1)
    while not over.item():
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 256, generator=made)).pow(2).sum().backward()
        optimizer.step()
        step += 1
        mark(f"step {step}")
        over.fill_(float(rank == 0 and Path(stop).exists()))
        dist.all_reduce(over)
    gcclient.shutdown()
    return step
