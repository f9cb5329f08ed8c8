"""What supervisor and lane say to each other arrives as it was said.

What may live here: tests of `gcserver/runtime/lanelink.py`. What may not: what messages mean.
"""

from __future__ import annotations

import socket

import msgspec
import pytest

from gcproto.packed import MessageError
from gcserver.core import events as ev
from gcserver.runtime.lanelink import AddPeer, Envelope, LaneLink

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
