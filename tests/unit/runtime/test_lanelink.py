"""What supervisor and lane say to each other arrives as it was said.

What may live here: tests of `gcserver/runtime/lanelink.py`. What may not: what messages mean.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import pytest

from gcproto.packed import MessageError
from gcserver.core import events as ev
from gcserver.runtime.lanelink import AddPeer, Envelope, LaneKeys, LaneLink

DENSE = ev.CodecChoice("none", 0, 0, False, False, drains=True)
TOPK = ev.CodecChoice("topk", 16, 9, True, True, levels=(1, 1_000_000), own=9, exact=1_000_000, tunable=True)


def test_plans_with_levels_and_tuning_cross_as_they_are() -> None:
    here, there = (LaneLink(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    said = (
        ev.PlanKnown((b"j" * 16, 3), ev.Plan(2, (ev.PlanRule("w*", TOPK, "all", "plan", (20, 9)),), DENSE)),
        ev.Tuned((b"j" * 16, 3), notch=1),
        ev.Tuned((b"j" * 16, 3), level=700),
    )
    here.send(*said)
    assert tuple(there.receive()) == said


def test_a_list_of_keys_that_comes_in_parts_is_waited_for() -> None:
    """The list of a large cluster is longer than what the system passes on at once."""
    keys = LaneKeys("a", b"p" * 40, b"s" * 40, {f"n{i}": b"k" * 40 for i in range(1000)})
    writer, reader = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    LaneLink(writer).send(keys)
    raw = reader.recv(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link, looked, got = LaneLink(theirs), threading.Event(), []
    receive = link.channel.receive

    def look() -> Any:
        found = receive()
        looked.set()
        return found

    link.channel.receive = look  # type: ignore[method-assign]
    lane = threading.Thread(target=lambda: got.extend(link.wait()), daemon=True)
    lane.start()
    ours.sendall(raw[:1000])
    assert looked.wait(60.0)
    ours.sendall(raw[1000:])
    lane.join(60.0)
    assert got == [keys]


def test_what_is_in_no_list_is_refused() -> None:
    here, there = (LaneLink(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    here.send(AddPeer("a", "tcp://a:1"), ev.Tick())
    with pytest.raises(MessageError, match="Tick"):
        there.receive()


def test_what_cannot_be_read_is_refused() -> None:
    here, there = (LaneLink(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    here.channel.send(Envelope("AddPeer", msgspec.Raw(b"\x81\xa4name\xa1\xff")))
    with pytest.raises(MessageError, match="utf-8"):
        there.receive()
