"""Workers' connections to a lane: what becomes of those that say what nobody can read."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace
from typing import Any

from gcproto import lane_messages, packed
from gcproto.channel import Channel
from gcproto.lane_messages import Attach
from gcproto.messages import Fault
from gcserver.runtime.laneworkers import LaneWorkers, Worker

_decode_lane = packed.Decoder[lane_messages.FromLaneWorker](lane_messages.FromLaneWorker)
_decode_worker = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)


def test_what_cannot_be_read_is_answered_before_the_connection_is_closed() -> None:
    said: list[str] = []
    process: Any = SimpleNamespace(poller=select.epoll(), trouble_once=said.append)
    lane = LaneWorkers(process, socket.socket())
    here, there = socket.socketpair()
    theirs, worker = Channel(there, _decode_worker), Worker(Channel(here, _decode_lane))
    lane.connections[here.fileno()] = worker
    process.poller.register(here.fileno(), select.EPOLLIN)
    theirs.send(Attach(b"j" * 16, "first"))  # type: ignore[arg-type]
    lane.serve(worker, select.EPOLLIN)
    ((fault, _),) = theirs.receive()
    assert isinstance(fault, Fault) and fault.kind == "NotRegistered" and "$.rank" in fault.message
    assert len(said) == 1 and "$.rank" in said[0]
    assert lane.connections == {}
    theirs.close()
    lane.listener.close()
    process.poller.close()
