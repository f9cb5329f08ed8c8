"""What the workers of test_planning.py do: DDP training that goes on until the parent has seen enough.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark


def train(stop: str, pause: float, width: int, **options: Any) -> dict[str, Any]:
    """Train until the file ``stop`` is there; ``pause`` seconds before each step. Marks every step. ``options`` are the
    model's.

    Rank 0 looks for it, and tells the others by way of gloo: all stop after the same step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=5)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    model.register_comm_hook(gcclient.state(model, **options), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rank, step = dist.get_rank(), 0
    over = torch.zeros(1)
    while not over.item():
        optimizer.zero_grad()
        time.sleep(pause)
        made = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 64, generator=made)).pow(2).sum().backward()
        optimizer.step()
        step += 1
        mark(f"step {step}")
        over.fill_(float(rank == 0 and Path(stop).exists()))
        dist.all_reduce(over)
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    gcclient.shutdown()
    return {"hash": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "steps": step, "pid": os.getpid()}
