"""A small model and its wrapped optimizer, for tests of the wrapper and of its exchanges; what the fake daemon heard.

What may live here: what both need. What may not: tests.
"""

from __future__ import annotations

import torch
from torch import nn

import gcclient
from gcproto.lane_messages import Push
from gcproto.messages import DeclareSection
from tests.unit.client.fake import FakeDaemon


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7))


def wrap(model: nn.Module, rate: float = 0.1, **more: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    return gcclient.DistributedOptimizer(optimizer, model.named_parameters(), **more)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def sections(daemon: FakeDaemon) -> list[DeclareSection]:
    return [m for m in daemon.heard[-1] if isinstance(m, DeclareSection)]


def pushes(daemon: FakeDaemon, step: int) -> list[Push]:
    return [p for lane in (0, 1) for p in daemon.pushes(lane) if p.step == step]
