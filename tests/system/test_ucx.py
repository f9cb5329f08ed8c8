"""UCX keeps what transports promise over TCP, also where shared memory is named beside it; and what is UCX's own.

What may live here: transports in this process and in others that are killed, on loopback. What may not: daemons
(`test_ucx_daemons.py`), how they end under load (`test_ucx_endings.py`). Needs the system's libucp (Debian's libucx0).
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from benchmarks.lab.ports import free_address
from gcserver.runtime import ucp, ucxends
from gcserver.runtime.transport import ZmqTransport
from gcserver.runtime.ucxtransport import UcxTransport
from tests.system.ucx import needs_ucx
from tests.system.ucx import tls as tls  # a fixture
from tests.unit.runtime.transport_promises import (
    Make,
    Node,
    Promises,
    descriptors,
    header,
    payload,
    send,
    until,
)

pytestmark = [pytest.mark.system, needs_ucx]

#: What a process does that is killed: it sends large frames, or takes them, as fast as it can.
CHILD = """
import sys, time
from gcproto.wire import HEADER_BYTES
from gcserver.parent import ends_with_parent
from gcserver.runtime.ucxtransport import UcxTransport
ends_with_parent(9)
mine, other = sys.argv[1:]
transport = UcxTransport(mine)
transport.open(1, other)
body = memoryview(bytearray(16 << 20))
sent = 0
print("ready", flush=True)
while True:
    transport.tick(time.monotonic())
    for header, payload in transport.receive():
        print("got", flush=True)
    if not transport.readable and sent < 6:
        sent += transport.send(1, bytes(HEADER_BYTES), body)
"""


@pytest.fixture
def make(tls: str) -> Iterator[Make]:
    made: list[Node] = []

    def node(begins: bool = True) -> Node:
        made.append(Node(UcxTransport, free_address(), begins))
        return made[-1]

    yield node
    for each in made:
        each.transport.close()


class TestUCX(Promises):
    pass


class Child:
    """A process with a transport at ``address``, connected to ``other``."""

    def __init__(self, address: str, other: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, address, other], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        os.set_blocking(self.process.stdout.fileno(), False)
        self.got = 0

    def run(self) -> None:
        assert self.process.stdout is not None
        self.got += len(self.process.stdout.readlines())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def taken(memory: bytearray) -> bool:
    """Whether anything still uses it."""
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def test_a_peer_that_is_killed_with_frames_under_way_leaves_nothing_behind(make: Make) -> None:
    """Either direction, in the middle of large payloads: noticed, memory and descriptors free, and the loop sleeps."""
    a, other = make(), free_address()
    memory = bytearray(16 << 20)
    a.transport.open(1, other)
    end = time.monotonic() + 0.2
    until([a], lambda: time.monotonic() > end)
    before = descriptors()
    for life in range(3):
        child = Child(other, a.address)
        for number in range(3):
            assert send(a, 1, number, memoryview(memory))
        until([a], lambda child=child: child.run() or (child.got >= 2 and len(a.got) >= 2))
        child.kill()
        until([a], lambda: not taken(memory) and descriptors() <= before)
        assert a.again == ([1] if life else []), "of what was lost with the life before"
        a.again.clear()
        a.got.clear()
        a.views.clear()
        assert a.transport.readable is False


def test_a_payload_that_is_too_large_is_refused_before_there_is_memory_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucxends, "MAX_PAYLOAD_BYTES", 1 << 20)
    a, b = make(), make()
    a.transport.open(1, b.address)
    assert send(a, 1, 1, bytes(1 << 20)) and send(a, 1, 2, bytes((1 << 20) + 1)) and send(a, 1, 3, b"x")
    until([a, b], lambda: len(b.got) == 2)
    assert [number for number, _ in b.got] == [1, 3] and b.odd == 1


def test_what_waits_for_a_peer_is_bounded_and_the_peer_hears_of_the_rest(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcserver.runtime.ucxtransport.HELD_FRAMES", 3)
    monkeypatch.setattr("gcserver.runtime.ucxtransport.HELD_BYTES", 1000)
    a, b = make(), make()
    a.transport.open(1, b.address)
    size = len(header(0))
    assert [send(a, 1, number, bytes(10)) for number in range(4)] == [True] * 3 + [False]
    a.transport.reset(1)
    assert send(a, 1, 0, bytes(2000)), "one of any size"
    assert not send(a, 1, 1, bytes(1001 - size))
    until([a, b], lambda: b.got and a.again)
    assert [number for number, _ in b.got] == [0] and a.again == [1]


def test_zeromq_at_the_other_end_is_said_and_harms_nobody(make: Make) -> None:
    context: zmq.Context[Any] = zmq.Context()
    a, b = make(), make()
    plain = Node(lambda address: ZmqTransport(context, address), free_address())
    try:
        a.transport.open(1, plain.address)
        plain.transport.open(1, a.address)
        assert send(plain, 1, 1)
        until([a, plain], lambda: a.transport.troubles)
        assert "another node.transport" in a.transport.troubles[1] and not plain.got
        b.transport.open(1, a.address)
        assert send(b, 1, 6)
        until([a, b, plain], lambda: a.got)
        assert a.got == [(6, payload(6))]
    finally:
        plain.transport.close()
        context.destroy(0)


def test_who_listens_on_loopback_listens_nowhere_else(make: Make) -> None:
    """Not UCX either, which would open a port on every network device."""
    a, b = make(), make()
    a.transport.open(1, b.address)
    send(a, 1, 1)
    until([a, b], lambda: b.got)
    # The second column is the address bound, the fourth the state (0A: listening), the tenth the inode.
    mine = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _open(name)}
    bound = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in mine:
                bound.append(columns[1].split(":")[0])
    assert len(bound) >= 2 and set(bound) == {"0100007F"}


def _open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_who_is_accepted_and_says_nothing_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while there are as many as are served at once, others wait."""
    monkeypatch.setattr("gcserver.runtime.ucxtransport.PATIENCE", 0.3)
    monkeypatch.setattr("gcserver.runtime.ucxtransport.MOST", 2)
    a, b = make(), make()
    host, port = b.address.removeprefix("tcp://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(2)]
    until([b], lambda: not b.transport.readable and _said(silent) == [])
    a.transport.open(1, b.address)
    assert send(a, 1, 6)
    until([a, b], lambda: b.got)
    assert b.got == [(6, payload(6))] and _said(silent) == [b"", b""]
    for each in silent:
        each.close()


def _said(connections: list[socket.socket]) -> list[bytes]:
    """What came on those that have something; nothing at all stands for their end."""
    return [each.recv(1) for each in select.select(connections, [], [], 0)[0]]


def test_host_names_are_looked_up(make: Make) -> None:
    a, b = make(), make()
    a.transport.open(1, re.sub("127.0.0.1", "localhost", b.address))
    assert send(a, 1, 4)
    until([a, b], lambda: b.got)
    a.transport.open(2, "tcp://no-such-host.invalid:1")
    until([a], lambda: 2 in a.transport.troubles)
    a.transport.open(3, "tcp://[::1]:1")
    until([a], lambda: 3 in a.transport.troubles)
    with pytest.raises(ValueError, match="tcp://host:port"):
        a.transport.open(4, "nonsense")


def test_the_library_says_which_it_is() -> None:
    assert tuple(map(int, ucp.version().split("."))) >= ucp.OLDEST
