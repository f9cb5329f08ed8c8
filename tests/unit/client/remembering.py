"""What a daemon would remember of blocks, and models and jobs that are saved and go on, for tests of checkpoints.

What may live here: answers to questions about states, training a step, joining a later job. What may not: assertions
about checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import gcclient
from gcclient import checkpoint
from gcproto.agreed import DeclareDomain, Resumed, Rule
from gcproto.packed import Message
from gcproto.states import AskStanding, AskStates, BlockStates, GiveStates, Standing, StatesKept
from tests.unit.client.fake import FakeDaemon

RESUMED = Resumed(b"o" * 16, 1, (9,), (Rule("*", "onebit"),), planned=True)


class Memory:
    """What a daemon would have of states: of a contribution the numbers from 0 on, two more than elements; of an
    owner's sums those from 7 on. ``settled``: the newest step that is; ``held``: whether there are any states."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon, self.settled, self.held = daemon, 1 << 30, True
        self.given: dict[tuple[int, bool], list[GiveStates]] = {}
        daemon.answer = self.answer

    def answer(self, m: Any) -> Message | None:
        if isinstance(m, AskStanding):
            return Standing(m.domain, self.settled, RESUMED)
        if isinstance(m, AskStates):
            values = self.values(m.domain, m.key, m.owner)
            data = values[m.first : m.first + checkpoint.PIECE].tobytes()
            return BlockStates(m.domain, m.key, m.owner, m.first, values.size, 5, True, data) if self.held else (
                BlockStates(m.domain, m.key, m.owner, m.first)
            )  # fmt: skip
        if isinstance(m, GiveStates):
            self.given.setdefault((m.key, m.owner), []).append(m)
            return StatesKept(m.domain, m.key, m.owner, m.first)
        return None

    def values(self, domain: int, key: int, owner: bool) -> np.ndarray:
        n = self.daemon.domains[domain].blocks[key].elements + (0 if owner else 2)
        return np.arange(n, dtype=np.float32) + (7 if owner else 0)

    def brought(self, key: int, owner: bool) -> np.ndarray:
        return np.frombuffer(b"".join(m.data for m in self.given[key, owner]), np.float32)


def model_of(width: int = 300) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 250), nn.Linear(250, 2))


def trained(model: nn.Module, **options: Any) -> Any:
    """One step of it."""
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), **options)
    model(torch.ones(1, model[0].in_features)).sum().backward()  # type: ignore[index]
    optimizer.step()
    return optimizer


def rejoin(daemon: FakeDaemon) -> None:
    """A new job at the same daemon, which forgets the old one."""
    gcclient.shutdown()
    daemon.wait(lambda: not daemon.connected(-1))
    daemon.domains.clear()
    for heard in daemon.heard:
        heard.clear()
    gcclient.init(0, 1, socket=daemon.socket, job="unit")


def declared(daemon: FakeDaemon) -> list[DeclareDomain]:
    return [m for m in daemon.heard[-1] if isinstance(m, DeclareDomain)]
