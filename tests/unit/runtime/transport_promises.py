"""What every transport promises to the loop that it belongs to, as tests that a transport is put into.

What may live here: tests of the calls in `gcserver/runtime/transports.py`, over real sockets, whichever transport it
is. What may not: making one (`test_transport_promises.py`; `tests/system/test_ucx.py`), what only one of them has.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gcproto.wire import HEADER_BYTES
from gcserver.runtime.transport import ZERO_COPY_BYTES, BindError
from gcserver.runtime.transports import Transport

#: Below and above what is copied, and what one piece of any network carries.
SIZES = (0, 1, 100, 9000, ZERO_COPY_BYTES - 1, ZERO_COPY_BYTES, 1 << 20, 5 << 20)


class Node:
    """A transport and what came over it. ``made``: makes one that listens at an address; ``begins``: at once, else with
    :meth:`begin`."""

    transport: Transport

    def __init__(self, made: Callable[[str], Transport], address: str, begins: bool = True) -> None:
        self.made, self.address = made, address
        if begins:
            self.transport = made(address)
        self.got: list[tuple[int, bytes]] = []
        self.views: list[memoryview] = []
        self.odd = 0
        self.again: list[int] = []

    def run(self) -> None:
        """One turn of its loop."""
        for header, payload in self.transport.receive():
            if len(header) != HEADER_BYTES:
                self.odd += 1
                continue
            self.got.append((int.from_bytes(header[:8], "little"), bytes(payload or b"")))
            if payload is not None:
                self.views.append(payload)
        self.again += self.transport.tick(time.monotonic())

    def restart(self) -> None:
        self.transport.close()
        self.begin()

    def begin(self) -> None:
        """Another life; some let an address go in their own time."""
        end = time.monotonic() + 60
        while True:
            try:
                self.transport = self.made(self.address)
                break
            except BindError:
                assert time.monotonic() < end
                time.sleep(0.002)
        self.got, self.again = [], []


def header(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(HEADER_BYTES - 8)


def payload(number: int) -> bytes:
    size = SIZES[number % len(SIZES)]
    return (number.to_bytes(4, "little") * (size // 4 + 1))[:size]


def until(nodes: Sequence[Node], done: Callable[[], Any]) -> None:
    """Let the nodes run until ``done``."""
    end = time.monotonic() + 60
    while not done():
        for node in nodes:
            node.run()
        assert time.monotonic() < end, [(node.got[-3:], node.again, node.transport.troubles) for node in nodes]


def send(node: Node, peer: int, number: int, body: bytes | memoryview | None = None) -> bool:
    return node.transport.send(peer, header(number), payload(number) if body is None else body)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


Make = Callable[..., Node]


class Promises:
    """To be inherited by a class of tests beside which there is a fixture ``make``."""

    def test_frames_of_all_sizes_arrive_in_order(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        assert all(send(a, 1, number) for number in range(64))
        until([a, b], lambda: len(b.got) == 64)
        assert all(send(a, 1, number) for number in range(64, 96)), "and over a connection that is there"
        until([a, b], lambda: len(b.got) == 96)
        assert b.got == [(number, payload(number)) for number in range(96)]
        sent = sum(HEADER_BYTES + len(payload(number)) for number in range(96))
        assert a.transport.bytes_out == b.transport.bytes_in == sent and not a.again

    def test_both_ways_and_from_several_at_once(self, make: Make) -> None:
        nodes = [make() for _ in range(3)]
        for i, node in enumerate(nodes):
            for j, other in enumerate(nodes):
                if i != j:
                    node.transport.open(j, other.address)
        for number in range(40):
            for i, node in enumerate(nodes):
                for j in range(3):
                    assert send(node, j, i * 1000 + number, payload(number)) is (i != j)
        until(nodes, lambda: all(len(node.got) == 80 for node in nodes))
        for j, node in enumerate(nodes):
            for i in {0, 1, 2} - {j}:
                mine = [frame for frame in node.got if frame[0] // 1000 == i]
                assert mine == [(i * 1000 + number, payload(number)) for number in range(40)]

    def test_what_is_sent_before_the_peer_listens_waits_for_it(self, make: Make) -> None:
        a, b = make(), make(begins=False)
        a.transport.open(1, b.address)
        assert all(send(a, 1, number) for number in range(20))
        end = time.monotonic() + 0.5
        until([a], lambda: time.monotonic() > end)
        b.begin()
        until([a, b], lambda: len(b.got) == 20)
        assert b.got == [(number, payload(number)) for number in range(20)] and not a.again

    def test_a_peer_that_comes_back_is_told_of_and_gets_frames(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        for life in range(3):
            assert send(a, 1, life)
            until([a, b], lambda: b.got)
            b.restart()
            until([a, b], lambda: a.again == [1])
            a.again.clear()
            b.got.clear()
            assert send(a, 1, 100 + life)
            until([a, b], lambda life=life: (100 + life, payload(100 + life)) in b.got)
            b.got.clear()

    def test_reset_connects_again(self, make: Make) -> None:
        a, b = make(), make(begins=False)
        a.transport.open(1, b.address)
        send(a, 1, 1)
        a.transport.reset(1)
        b.begin()
        assert send(a, 1, 2)
        # ZeroMQ drops it in its own time.
        until([a, b], lambda: (2, payload(2)) in b.got)
        a.transport.reset(1)
        a.transport.reset(99)
        assert send(a, 1, 3)
        until([a, b], lambda: (3, payload(3)) in b.got)

    def test_reset_gives_the_memory_of_what_was_under_way_free(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        send(a, 1, 1)
        until([a, b], lambda: b.got)
        memory = bytearray(8 << 20)
        for number in range(8):
            assert send(a, 1, number, memoryview(memory))
        a.transport.reset(1)

        def free() -> bool:
            try:
                memory.append(0)
            except BufferError:
                return False
            return True

        until([a, b], free)

    def test_memory_is_kept_until_the_frame_is_out(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        for number in range(6):
            assert send(a, 1, number, memoryview(bytearray(payload(7))))
        until([a, b], lambda: len(b.got) == 6)
        assert all(body == payload(7) for _, body in b.got)

    def test_a_copy_lets_the_memory_change_at_once(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        memory = bytearray(b"x" * (1 << 20))
        assert a.transport.send(1, header(0), memoryview(memory), copy=True)
        memory[:] = b"y" * len(memory)
        small = bytearray(b"x" * 1000)
        assert a.transport.send(1, header(1), memoryview(small))
        small[:] = b"y" * len(small)
        until([a, b], lambda: len(b.got) == 2)
        assert [set(body) for _, body in b.got] == [set(b"x")] * 2

    def test_a_payload_outlives_its_transport(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        assert send(a, 1, 6) and send(a, 1, 2)
        until([a, b], lambda: len(b.got) == 2)
        b.restart()
        assert [bytes(view) for view in b.views] == [payload(6), payload(2)]

    def test_what_is_no_frame_is_told_apart(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        assert a.transport.send(1, b"short", b"payload") and send(a, 1, 5)
        until([a, b], lambda: b.got)
        assert b.odd == 1 and b.got == [(5, payload(5))]

    def test_a_loop_that_sleeps_is_woken(self, make: Make) -> None:
        """As a lane waits: for the descriptor, and only where `readable` says that there is nothing to do."""
        a, b = make(), make()
        a.transport.open(1, b.address)
        poller = select.epoll()
        for node in (a, b):
            poller.register(node.transport.fileno(), select.EPOLLIN)
        for number in range(24):
            assert send(a, 1, number)
            end = time.monotonic() + 60
            while len(b.got) <= number:
                assert time.monotonic() < end
                if not any([a.transport.readable, b.transport.readable]):
                    assert poller.poll(30), "nobody said that there was something to do"
                a.run()
                b.run()
        poller.close()
        assert [number for number, _ in b.got] == list(range(24))

    def test_nothing_to_do_is_nothing_to_do(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        assert all(send(a, 1, number) for number in range(16))
        until([a, b], lambda: len(b.got) == 16)
        quiet = 0
        end = time.monotonic() + 60
        while quiet < 20:
            assert time.monotonic() < end
            with select.epoll() as poller:
                for node in (a, b):
                    poller.register(node.transport.fileno(), select.EPOLLIN)
                busy = any([a.transport.readable, b.transport.readable]) or poller.poll(0.01)
            quiet = 0 if busy else quiet + 1
            a.run()
            b.run()

    def test_lost_connections_leave_no_descriptors(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        send(a, 1, 1)
        until([a, b], lambda: b.got)
        counts = []
        for turn in range(6):
            a.transport.reset(1)
            b.got.clear()
            assert send(a, 1, turn)
            until([a, b], lambda: b.got)
            end = time.monotonic() + 0.2
            until([a, b], lambda end=end: time.monotonic() > end)
            counts.append(descriptors())
        assert max(counts[2:]) <= max(counts[:2]), counts

    def test_an_address_that_is_taken_is_refused(self, make: Make) -> None:
        a = make()
        with pytest.raises(BindError, match=a.address):
            a.made(a.address)

    def test_strangers_harm_nobody(self, make: Make) -> None:
        a, b = make(), make()
        host, port = b.address.removeprefix("tcp://").split(":")
        silent = socket.create_connection((host, int(port)))
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), os.urandom(4096), b"\xff" * 64):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(noise)
                end = time.monotonic() + 0.05
                until([b], lambda end=end: time.monotonic() > end)
        a.transport.open(1, b.address)
        assert send(a, 1, 6)
        # Without keys noise may by chance be a frame of the oldest protocol of ZeroMQ; its digest will be wrong.
        until([a, b], lambda: (6, payload(6)) in b.got)
        assert b.got.count((6, payload(6))) == 1
        silent.close()

    def test_closing_does_not_wait_for_what_is_under_way(self, make: Make) -> None:
        a, b = make(), make()
        a.transport.open(1, b.address)
        send(a, 1, 1)
        until([a, b], lambda: b.got)
        for number in range(30):
            send(a, 1, number, payload(7))
        a.restart()
        assert len(b.got) == 1, "who receives has not looked since"
