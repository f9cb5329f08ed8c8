"""What the workers of ``tests.soak.kills`` do: train one small model with one codec, telling of every step.

What may live here: functions that return plain data (see ``tests.integration.cluster``). What may not: killing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark

#: Inputs, hidden units, classes: some 200,000 parameters, two matrices and two vectors.
SIZES = (64, 2048, 32)


def train(spec: str, rate: float, steps: int) -> dict[str, Any]:
    """``steps`` steps of SGD at learning rate ``rate`` with codec ``spec``; hash of the weights, losses, reconnects."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # with a seed, codecs that draw random numbers draw the same in every run
    gcclient.init(deadline=60, seed=5)
    rank = dist.get_rank()
    teacher = torch.randn(SIZES[2], SIZES[0], generator=torch.Generator().manual_seed(3))
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.ReLU(), nn.Linear(SIZES[1], SIZES[2]))
    model = DistributedDataParallel(net)
    model.register_comm_hook(gcclient.state(model, compression=spec), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for step in range(steps):
        made = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, SIZES[0], generator=made)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ teacher.t()).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        mark(f"{step}")
    stats = gcclient.stats()
    gcclient.shutdown()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    digest = hashlib.sha256(weights.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return {
        "hash": digest,
        "finite": bool(weights.isfinite().all()),
        "void": stats["nonfinite_steps"],
        "first": losses[0],
        "last": losses[-1],
        "reconnects": stats["reconnects"],
    }
