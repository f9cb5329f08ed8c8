"""Lane processes that cannot be started again at once.

What may live here: tests of `gcserver/runtime/lanes.py`. What may not: real lanes (`tests/integration`).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcproto.messages import Hello
from gcserver import config
from gcserver.logsetup import JSON, Voice
from gcserver.runtime import lanes
from gcserver.runtime.lanelink import Admit, LaneKeys
from gcserver.runtime.lanes import LONGEST_PAUSE, Lanes
from gcserver.runtime.setup import LaneSetup

#: what lanes know of plans
PLAN = SimpleNamespace(probe_every=0.0)


def a_setup(**more: Any) -> LaneSetup:
    hello = Hello("a", "tcp://a:1", 1, 0, 1, "test")
    return LaneSetup(hello, "tcp://127.0.0.1:1", "lane.sock", "state", -1, (), 1, **more)


def test_a_lane_that_there_is_no_process_for_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[tuple[Any, ...]] = []
    warned: list[str] = []
    supervisor: Any = SimpleNamespace(
        config=SimpleNamespace(node=SimpleNamespace(lanes=1), plan=PLAN),
        stopped=SimpleNamespace(is_set=lambda: False),
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
    with pytest.raises(OSError, match="Cannot allocate"):
        lanes._spawn(a_setup(), 0)
    assert [s.fileno() for s in pairs] == [-1, -1]


@pytest.mark.slow
def test_what_ends_a_lane_is_in_the_format_of_the_daemons_log() -> None:
    setup = msgspec.structs.replace(a_setup(), cores=(1 << 19,), voice=Voice("a", form=JSON, lane=3))
    argv = [sys.executable, "-m", "gcserver.runtime.lane", msgspec.json.encode(setup).decode()]
    ended = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    (said,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert (said["node"], said["lane"], said["level"]) == ("a", 3, "critical") and "setaffinity" in said["exception"]


@pytest.mark.parametrize("transport", ["zmq", "ucx"])
def test_keys_go_to_lanes_whose_transport_has_use_for_them(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    started: list[LaneSetup] = []
    link = SimpleNamespace(send=told.append, fileno=lambda: 0, channel=SimpleNamespace(backlog=False))

    def spawn(setup: LaneSetup, restarts: int) -> Any:
        started.append(setup)
        return SimpleNamespace(link=link, ready=True, index=0)

    monkeypatch.setattr(lanes, "_spawn", spawn)
    node = config.load(flags={"node.transport": transport}).node
    pair = SimpleNamespace(name="a", public=b"public", secret=b"secret")
    supervisor: Any = SimpleNamespace(
        config=SimpleNamespace(node=node, plan=PLAN, voice=lambda index: Voice()),
        hello=Hello("a", "tcp://a:1", 1, 0, 1, "test"), state="state",
        keys=SimpleNamespace(pair=pair, admitted={"a": b"public"}), loop=SimpleNamespace(add_reader=lambda *_: None),
    )  # fmt: skip
    made = Lanes(supervisor)
    made.start()
    made.admit({"b": b"other"})
    (setup,) = started
    assert setup.transport == transport and setup.secured is (transport == "zmq")
    expected = [LaneKeys("a", b"public", b"secret", {"a": b"public"}), Admit({"b": b"other"})]
    assert told == (expected if transport == "zmq" else [])
