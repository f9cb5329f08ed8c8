"""What the worker of test_admin.py does (see cluster.py): it trains nothing, but knows what every step must give.

What may live here: the loop and what it notes. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark

ELEMENTS = 40_000


def loop(stop: str) -> dict[str, Any]:
    """Averages "model.weight" until rank 0 sees the file ``stop``, which the others learn from the tensor itself.

    Returns the number of steps, the steps (from 1 on) whose result was not the exact mean, and a hash over all results.
    """
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    base = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(7))
    inexact: list[int] = []
    digest = hashlib.sha256()
    step, ended = 0, False
    while not ended:
        step += 1
        mine = base * (rank + 1)
        mine[0] = float(rank == 0 and Path(stop).exists())
        result = gcclient.push_pull(mine, "model.weight")
        digest.update(result.cpu().numpy().tobytes())
        ended = bool(result[0] > 0)
        mean = torch.stack([base * (r + 1) for r in range(size)]).sum(0) / size
        if not torch.equal(result[1:], mean[1:]):
            inexact.append(step)
        if step == 20:
            mark("running")
    gcclient.shutdown()
    return {"steps": step, "inexact": inexact, "hash": digest.hexdigest()}


def schemes(stop: str) -> dict[str, Any]:
    """As :func:`loop`, and says by the bits of each result how it was made.

    Returns runs (what, first step, last step) of "none" (the exact mean), "all" (the mean of halves, in fp32) and
    "owner" (that mean as a half); of anything else "wrong".
    """
    gcclient.init()
    rank, size = gcclient.rank(), gcclient.size()
    base = 1 + torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(7))
    every = [base * (r + 1) + r for r in range(size)]
    mean, halves = (torch.stack(x).sum(0) / size for x in (every, [x.half().float() for x in every]))
    made = {"none": mean[1:], "all": halves[1:], "owner": halves.half().float()[1:]}
    runs: list[list[Any]] = []
    step, ended = 0, False
    while not ended:
        step += 1
        mine = every[rank].clone()
        mine[0] = float(rank == 0 and Path(stop).exists())
        result = gcclient.push_pull(mine, "model.weight")
        ended = bool(result[0] > 0)
        what = next((name for name, expected in made.items() if torch.equal(result[1:], expected)), "wrong")
        if not runs or runs[-1][0] != what:
            runs.append([what, step, step])
        runs[-1][2] = step
        if step == 20:
            mark("running")
    gcclient.shutdown()
    return {"steps": step, "runs": runs}


def training(stop: str) -> int:
    """Trains a DDP model, compressed, until rank 0 sees the file ``stop``; returns the number of steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gcclient.init(deadline=60)
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(400, 500), nn.ReLU(), nn.Linear(500, 400)))
    model.register_comm_hook(gcclient.state(model, compression="fp16"), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps, ended = 0, False
    while not ended:
        steps += 1
        optimizer.zero_grad()
        model(torch.ones(8, 400)).pow(2).mean().backward()
        optimizer.step()
        mine = torch.tensor([float(gcclient.rank() == 0 and Path(stop).exists())])
        ended = bool(gcclient.push_pull(mine, "stop")[0] > 0)
        if steps == 10:
            mark("running")
    gcclient.shutdown()
    return steps
