"""Lane processes that cannot be started again at once.

What may live here: tests of `gcserver/runtime/lanes.py`. What may not: real lanes (`tests/integration`).
"""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.messages import Hello
from gcserver.runtime import lanes
from gcserver.runtime.lanes import LONGEST_PAUSE, Lanes
from gcserver.runtime.setup import LaneSetup


def test_a_lane_that_there_is_no_process_for_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[tuple[Any, ...]] = []
    warned: list[str] = []
    supervisor: Any = SimpleNamespace(
        config=SimpleNamespace(node=SimpleNamespace(lanes=1)), stopped=SimpleNamespace(is_set=lambda: False),
        loop=SimpleNamespace(call_later=lambda *call: later.append(call)), warn_once=warned.append,
    )  # fmt: skip
    made = Lanes(supervisor)

    def refuse(index: int, restarts: int = 0) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(made, "_start", refuse)
    made._restart(0, 3)
    assert later == [(LONGEST_PAUSE, made._restart, 0, 3)]
    assert "lane 0 cannot be started again yet" in warned[0] and "Too many open files" in warned[0]


def test_a_process_that_cannot_be_made_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[socket.socket] = []
    pair = socket.socketpair

    def seen(*how: Any) -> tuple[socket.socket, socket.socket]:
        pairs.extend(pair(*how))
        return pairs[0], pairs[1]

    def refuse(*how: Any, **more: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(lanes.socket, "socketpair", seen)
    monkeypatch.setattr(lanes.subprocess, "Popen", refuse)
    hello = Hello("a", "tcp://a:1", 1, 0, 1, "test")
    setup = LaneSetup(hello, "tcp://127.0.0.1:1", "lane.sock", "state", -1, (), 1)
    with pytest.raises(OSError, match="Cannot allocate"):
        lanes._spawn(setup, 0)
    assert [s.fileno() for s in pairs] == [-1, -1]
