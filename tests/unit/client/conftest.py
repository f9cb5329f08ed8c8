"""A fake daemon, and a session joined to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gcclient
from tests.unit.client.fake import FakeDaemon


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
