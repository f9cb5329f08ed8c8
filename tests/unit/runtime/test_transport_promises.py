"""ZeroMQ keeps what transports promise.

What may live here: making its transports for `transport_promises.py`. What may not: keys (`test_transport.py`), other
transports (those that need a system's library: `tests/system`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from benchmarks.lab.ports import free_address
from gcserver.runtime.transport import ZmqTransport
from tests.unit.runtime.transport_promises import Make, Node, Promises


@pytest.fixture
def make() -> Iterator[Make]:
    context: zmq.Context[Any] = zmq.Context()
    made: list[Node] = []

    def node(begins: bool = True) -> Node:
        made.append(Node(lambda address: ZmqTransport(context, address), free_address(), begins))
        return made[-1]

    yield node
    for each in made:
        each.transport.close()
    context.destroy(0)


class TestZeroMQ(Promises):
    pass
