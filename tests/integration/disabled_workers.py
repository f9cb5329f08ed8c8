"""What the workers of test_disabled.py do that has a meaning without daemons only.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gcclient
from tests.integration.workers import digest


def beyond_cpu() -> dict[str, Any]:
    """Calls, broadcasts and a wrapped optimizer where torch's default group takes tensors on CUDA only, as NCCL's."""
    dist.init_process_group("cuda:gloo")
    refused = ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        refused = str(error)
    gcclient.init()
    rank = gcclient.rank()
    gcclient.barrier()
    total = gcclient.push_pull(torch.full((3,), float(rank)), average=False).tolist()
    told = gcclient.broadcast_object({"epoch": 7 + rank})
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    gcclient.broadcast_parameters(model.state_dict())
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.full((1, 4), float(rank))).sum().backward()
    optimizer.step()
    found = {"refused": refused, "total": total, "told": told, "hash": digest(*model.parameters())}
    gcclient.shutdown()
    return found


def looked_at() -> dict[str, Any]:
    """Four steps with ``overlap_forward=True``; after the second rank 0 alone waits for the weights, to save them."""
    gcclient.init()
    rank = gcclient.rank()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = gcclient.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), overlap_forward=True
    )
    optimizer.synchronize()  # nothing is awaited yet, on any rank
    weights, refused = [], []
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * (step + 1) * (1 + 2 * rank)).sum().backward()
        for refuse in (optimizer.synchronize, lambda: optimizer.step(lambda: 0.0), _skip(optimizer)):
            try:
                refuse()
            except RuntimeError as error:
                refused.append(str(error).split(":")[0])
        optimizer.step()
        if rank == 0 and step == 1:
            optimizer.synchronize()
            optimizer.zero_grad()
            get_optimizer_state_dict(model, optimizer)  # no step of training either
        weights.append(model.weight.item())
    steps = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {"weights": weights, "refused": refused, "steps": steps}


def _skip(optimizer: Any) -> Callable[[], None]:
    def skip() -> None:
        with optimizer.skip_synchronize():
            pass

    return skip
