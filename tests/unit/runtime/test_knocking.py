"""Who knocks while no descriptors are left: waits a moment, and is then told.

What may live here: tests of `gcserver/runtime/knocking.py`. What may not: what is said after that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gcproto import messages, packed
from gcproto.channel import Channel
from gcproto.messages import Fault
from gcserver.runtime import knocking
from gcserver.runtime.knocking import FULL_FOR, Door
from gcserver.runtime.setup import listen_unix

_from_worker = packed.Decoder[messages.FromWorker](messages.FromWorker)
_to_worker = packed.Decoder[messages.ToWorker](messages.ToWorker)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing more can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.open(os.devnull, os.O_RDONLY)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_knocks_at_a_full_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(knocking.time, "monotonic", lambda: clock[0])
    path = str(tmp_path / "s.sock")
    listener = listen_unix(path)
    let_in: list[Channel[Any]] = []
    turned_away: list[Fault] = []
    door = Door(listener, _from_worker, let_in.append, turned_away.append)
    knocks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for knock in knocks[:2]:
        knock.connect(path)
    with no_descriptors():
        assert "Too many open files" in str(door.admit())
        clock[0] += FULL_FOR / 2
        assert door.admit() is not None
        assert not turned_away, "there may be descriptors in a moment"
        clock[0] += FULL_FOR / 2
        assert door.admit() is not None
    assert [why.kind for why in turned_away] == ["OutOfDescriptors"] * 2 and not let_in
    for knock in knocks[:2]:
        ((fault, _),) = Channel(knock, _to_worker).receive()
        assert isinstance(fault, Fault) and "Too many open files" in fault.message and "open files" in fault.advice
    knocks[2].connect(path)
    assert door.admit() is None and len(let_in) == 1
    door.close()
    for knock in knocks:
        knock.close()
    let_in[0].close()
    listener.close()


def test_a_moment_without_descriptors_turns_nobody_away(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    listener = listen_unix(path)
    let_in: list[Channel[Any]] = []
    door = Door(listener, _from_worker, let_in.append, lambda why: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.connect(path)
        with no_descriptors():
            assert door.admit() is not None
        assert door.admit() is None and len(let_in) == 1
    let_in[0].close()
    door.close()
    listener.close()
