"""What the workers of test_client_optimizer.py do where forward passes overlap with the exchange.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gcclient
from gcclient.awaited import AwaitedParameter
from tests.integration.cluster import wait_for
from tests.integration.ddp_workers import flatten, make_model
from tests.integration.optimizer_workers import train
from tests.integration.workers import digest, start


class _Gate(torch.autograd.Function):
    """Passes on what it gets; its backward pass waits for a file."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: str) -> torch.Tensor:
        ctx.path = path
        return x.view_as(x)  # torch computes the gradient of what comes first last

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        wait_for(ctx.path)
        return grad, None


class _Net(nn.Module):
    """With a ``path`` the gradient of the last layer's weight is computed last, after that of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, path: str = "") -> torch.Tensor:
        weight = _Gate.apply(self.last.weight, path) if path else self.last.weight
        return nn.functional.linear(torch.tanh(self.first(x)), weight, self.last.bias)


def early(path: str) -> dict[str, Any]:
    """Rank 1 computes the last layer's gradient once rank 0 has begun its next forward pass, and not before."""
    rank = start()
    nets = {}
    awaited: list[str] = []
    for overlap in (False, True):
        net = nets[overlap] = _Net()
        optimizer = gcclient.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
            net.named_parameters(),
            groups="layer-wise",
            overlap_forward=overlap,
        )

        def begun(module: nn.Module, x: Any, y: Any, net: nn.Module = net) -> None:
            if not Path(path).exists():
                awaited.extend(n for n, p in net.named_parameters() if type(p) is AwaitedParameter)
                Path(path).touch()

        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            if overlap and rank == 0 and step == 1:
                net.first.register_forward_hook(begun)
            net(x, path if overlap and rank == 1 and step == 0 else "").pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    hashes = [digest(flatten(net)) for net in nets.values()]
    gcclient.shutdown()
    return {"hashes": hashes, "awaited": awaited}


def identical(steps: int) -> dict[str, Any]:
    """Weights after training with overlap and without: by optimizer, with error feedback, and compiled."""
    rank = start()
    found = {}
    for name, make, options in (
        ("sgd", lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), {}),
        ("adam", lambda p: torch.optim.Adam(p, 1e-3), {"groups": "layer-wise"}),
        ("topk", lambda p: torch.optim.SGD(p, 0.05), {"compression": "topk(ratio=0.05)"}),
        ("compiled", lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), {}),
    ):
        hashes = []
        for overlap in (False, True):
            net = make_model()
            optimizer = gcclient.DistributedOptimizer(
                make(net.parameters()), net.named_parameters(), overlap_forward=overlap, **options
            )
            model: Any = torch.compile(net, backend="aot_eager") if name == "compiled" and overlap else net
            hashes.append(digest(train(net, model, optimizer, steps, rank)))
        found[name] = hashes
    gcclient.shutdown()
    return found
