"""What the workers of test_profile.py do: DDP training that the daemons profile.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.workers import Slow


class _Model(nn.Module):
    def __init__(self, pause: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList([nn.Linear(64, 300), nn.Linear(300, 300), nn.Linear(300, 10)])
        self.pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Slow.apply(layer(x).relu(), self.pause)
        return x


def train(steps: int, compression: str, pause: float, forward: float) -> dict[str, Any]:
    """``steps`` steps whose backward pass rests ``pause`` seconds before each layer, and ``forward`` before each pass.

    Returns the parameters' names in the order of declaration.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=5)
    model = DistributedDataParallel(_Model(pause), bucket_cap_mb=0.1)
    model.register_comm_hook(gcclient.state(model, compression=compression), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.ones(8, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(forward)
        model(x).pow(2).sum().backward()
        optimizer.step()
    gcclient.shutdown()
    return {"names": [n.removeprefix("module.") for n, p in reversed(list(model.named_parameters()))]}
