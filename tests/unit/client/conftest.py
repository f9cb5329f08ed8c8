"""A fake daemon, a session joined to it, torch's world of one, and what groups of a node's ranks were asked to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gcclient
from gcclient import checkpoint
from gcclient.node_group import NodeGroup
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.remembering import Memory


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def joined(daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    yield daemon
    gcclient.shutdown()


@pytest.fixture
def torch_world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone(joined: FakeDaemon, torch_world: None) -> FakeDaemon:
    """The only rank of a job, and of torch's world."""
    return joined


@pytest.fixture
def memory(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """In small pieces: the fake daemon writes no more than a socket takes at once."""
    monkeypatch.setattr(checkpoint, "PIECE", 20_000)
    return Memory(joined)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of groups of a node's ranks, of those where averages must not go beside sums, as with NCCL."""
    monkeypatch.setattr(NodeGroup, "overlap", False)
    done: list[str] = []

    def note(name: str) -> None:
        method = getattr(NodeGroup, name)

        def noted(self: NodeGroup, *given: Any) -> Any:
            done.append(name)
            return method(self, *given)

        monkeypatch.setattr(NodeGroup, name, noted)

    for name in ("sum", "greatest", "give_out"):
        note(name)
    return done
