"""Frames over ZeroMQ where descriptors run out: a peer is connected to later.

What may live here: tests of what `gcserver/runtime/transport.py` does without descriptors. What may not: keys
(`test_transport.py`), what frames mean.
"""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest
import zmq

from benchmarks.lab.ports import free_address
from gcproto.wire import HEADER_BYTES
from gcserver.runtime.transport import ZmqTransport


class Refusing:
    """A context that has no sockets to give for the first ``times`` asked."""

    def __init__(self, context: Any, times: int, number: int = errno.EMFILE) -> None:
        self.context, self.times, self.number = context, times, number

    def socket(self, kind: int) -> Any:
        if kind == zmq.PUSH and self.times:
            self.times -= 1
            raise zmq.ZMQError(self.number)
        return self.context.socket(kind)


def test_a_peer_without_a_descriptor_is_connected_to_later() -> None:
    context: zmq.Context[Any] = zmq.Context()
    there = ZmqTransport(context, address := free_address())
    refusing: Any = Refusing(context, 2)
    here = ZmqTransport(refusing, free_address())
    here.open(7, address)
    assert not here.send(7, bytes(HEADER_BYTES), None), "it is asked for again when there is a connection"
    assert here.reconnected() == []
    assert here.reconnected() == [7], "the peer is told what was sent meanwhile"
    assert here.send(7, bytes(HEADER_BYTES), None)
    end = time.monotonic() + 20
    while not there.readable and time.monotonic() < end:
        time.sleep(0.01)
    assert [bytes(header) for header, _ in there.receive()] == [bytes(HEADER_BYTES)]
    here.close()
    there.close()
    context.destroy(0)


def test_another_refusal_is_the_callers() -> None:
    context: zmq.Context[Any] = zmq.Context()
    refusing: Any = Refusing(context, 1, errno.EINVAL)
    here = ZmqTransport(refusing, free_address())
    with pytest.raises(zmq.ZMQError):
        here.open(7, "tcp://127.0.0.1:1")
    here.close()
    context.destroy(0)
