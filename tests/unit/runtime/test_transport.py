"""Frames over real sockets: with keys and without, who gets through and who is counted.

What may live here: tests of `gcserver/runtime/transport.py` and `guard.py` on loopback. What may not: daemons.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest
import zmq
from zmq.utils import z85

from benchmarks.lab.ports import free_address
from gcproto import wire
from gcproto.wire import FrameType, Header
from gcserver import keys
from gcserver.keys import KeyPair
from gcserver.runtime import transport
from gcserver.runtime.guard import FRAME_FORGED, HANDSHAKE_FAILED, KEY_REFUSED, SAY_EVERY, Guard
from gcserver.runtime.transport import ZmqTransport
from tests.unit.key_pairs import fixed_pair

A, B, C = (fixed_pair(name) for name in "abc")
ALL = {pair.name: pair.public for pair in (A, B, C)}


def frame(sender: str, step: int = 0, payload: bytes = b"") -> tuple[bytes, bytes]:
    h = Header(
        FrameType.HEARTBEAT, sender=wire.node_id(sender), incarnation=1, step=step, payload_bytes=len(payload),
        payload_digest=wire.digest(payload),
    )  # fmt: skip
    return wire.pack(h), payload


class Node:
    """One process's transport, in this one: a context of its own and, with ``pair``, a guard."""

    def __init__(self, pair: KeyPair | None = None, admitted: dict[str, bytes] | None = None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.counts: Counter[str] = Counter()
        self.said: list[str] = []
        self.guard = None
        if pair is not None:
            self.guard = Guard(self.context, pair, admitted or ALL, lambda k: self.counts.update([k]), self.said.append)
        self.address = free_address()
        self.transport = ZmqTransport(self.context, self.address, self.guard)
        self.got: list[tuple[int, bytes]] = []
        self.reset: list[int] = []

    def run(self) -> None:
        """One turn of its loop."""
        if self.guard is not None:
            self.guard.answer()
        for header, payload in self.transport.receive():
            self.got.append((wire.parse(header).step, bytes(payload or b"")))
        self.reset += self.transport.tick(time.monotonic())

    def open(self, peer: str, other: Node) -> None:
        self.transport.open(wire.node_id(peer), other.address)

    def send(self, peer: str, header: bytes, payload: bytes) -> bool:
        return self.transport.send(wire.node_id(peer), header, payload)

    def trouble(self, peer: str) -> str:
        return self.transport.troubles.get(wire.node_id(peer), "")

    def close(self) -> None:
        self.transport.close()
        self.context.destroy(0)


class Running(Protocol):
    """What takes a turn."""

    def run(self) -> None: ...


def until(nodes: Sequence[Running], done: Callable[[], Any]) -> None:
    """Let the nodes run until ``done``."""
    end = time.monotonic() + 20
    while not done():
        for node in nodes:
            node.run()
        assert time.monotonic() < end, [vars(node) for node in nodes]
        time.sleep(0.002)


Make = Callable[..., Node]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Node] = []

    def node(*args: Any) -> Node:
        made.append(Node(*args))
        return made[-1]

    yield node
    for each in made:
        each.close()


@pytest.mark.parametrize("secured", [False, True])
def test_frames_arrive_in_order(make: Make, secured: bool) -> None:
    a, b = (make(A), make(B)) if secured else (make(), make())
    a.open("b", b)
    for step in range(100):
        assert a.send("b", *frame("a", step, b"x" * step))
    until([a, b], lambda: len(b.got) == 100)
    assert b.got == [(step, b"x" * step) for step in range(100)]
    assert not a.counts and not b.counts and not a.transport.troubles


@pytest.mark.parametrize("secured", [False, True])
def test_what_crosses_the_wire_is_encrypted_with_keys_only(make: Make, secured: bool) -> None:
    a, b = (make(A), make(B)) if secured else (make(), make())
    seen = bytearray()
    with Relay(b.address, seen) as relay:
        a.transport.open(wire.node_id("b"), relay.address)
        a.send("b", *frame("a", 1, b"gradient" * 100))
        until([a, b, relay], lambda: b.got)
    assert (b"gradient" in seen) is not secured


def test_an_unknown_key_is_refused_counted_and_said_now_and_then(make: Make) -> None:
    a, b = make(A, ALL), make(B, {"b": B.public, "c": C.public})
    a.open("b", b)
    a.send("b", *frame("a"))
    until([a, b], lambda: b.counts[KEY_REFUSED] and a.trouble("b"))
    assert a.trouble("b") == transport.UNWANTED
    until([a, b], lambda: b.counts[KEY_REFUSED] > 1)
    assert not b.got and set(b.counts) == {KEY_REFUSED}
    (line,) = b.said
    assert A.public.decode() in line and "security.peers" in line
    assert b.guard is not None
    b.guard.tick(time.monotonic() + SAY_EVERY)
    assert len(b.said) == 2


def test_a_key_that_is_added_gets_in_without_a_restart(make: Make) -> None:
    a, b = make(A, ALL), make(B, {"b": B.public, "c": C.public})
    a.open("b", b)
    until([a, b], lambda: b.counts[KEY_REFUSED] and a.trouble("b"))
    b.transport.admit(ALL)
    until([a, b], lambda: a.send("b", *frame("a", 7)) and b.got and not a.trouble("b"))
    assert b.got[0] == (7, b"")


def test_who_comes_a_moment_before_it_is_admitted_is_counted_and_not_complained_of(make: Make) -> None:
    for admitted, complaints in ((ALL, 0), ({"b": B.public, "c": C.public}, 1)):
        b = make(B, {"b": B.public})
        assert b.guard is not None
        b.guard._decide([b"1.0", b"1", b"", b"10.0.0.1", b"", b"CURVE", z85.decode(A.public)])
        b.guard.admit(admitted)
        b.guard.tick(time.monotonic())
        assert (b.counts[KEY_REFUSED], len(b.said)) == (1, complaints)


def test_a_peer_without_a_key_here_is_not_connected_to_until_it_has_one(make: Make) -> None:
    a, b = make(A, {"a": A.public}), make(B, ALL)
    a.open("b", b)
    assert a.trouble("b") == transport.NO_KEY and not a.send("b", *frame("a"))
    a.transport.admit(ALL)
    assert a.send("b", *frame("a", 3)) and not a.trouble("b")
    until([a, b], lambda: b.got)
    assert b.got == [(3, b"")] and not b.counts


def test_a_removed_key_is_cut_off_and_others_come_back(make: Make) -> None:
    a, b, c = make(A), make(B), make(C)
    a.open("b", b)
    c.open("b", b)
    a.send("b", *frame("a", 1))
    c.send("b", *frame("c", 2))
    until([a, b, c], lambda: len(b.got) == 2)
    b.got.clear()
    b.transport.admit({"b": B.public, "c": C.public})
    until([a, b, c], lambda: a.trouble("b") == transport.UNWANTED and wire.node_id("b") in c.reset)
    assert c.send("b", *frame("c", 4))
    a.send("b", *frame("a", 3))
    until([a, b, c], lambda: b.got)
    assert b.got == [(4, b"")] and b.counts[KEY_REFUSED]


def test_lists_may_follow_one_another_at_once(make: Make) -> None:
    b, c = make(B), make(C)
    c.open("b", b)
    for admitted in ({"c": C.public}, ALL, {"c": C.public}, {"c": C.public, "b": B.public}):
        b.transport.admit(admitted)
    until([b, c], lambda: c.send("b", *frame("c", 1)) and b.got)
    assert b.got[0] == (1, b"")


def test_an_address_that_is_none_harms_nobody_when_its_key_comes(make: Make) -> None:
    b = make(B, {"b": B.public})
    b.transport.open(wire.node_id("a"), "nonsense://127.0.0.1:1")
    assert b.trouble("a") == transport.NO_KEY
    b.transport.admit(ALL)
    assert "nonsense://127.0.0.1:1: " in b.trouble("a") and not b.send("a", *frame("b"))
    b.transport.reset(wire.node_id("a"))
    assert "nonsense://127.0.0.1:1: " in b.trouble("a"), "nor when a peer that never spoke is connected to again"


def test_a_replaced_key_takes_over(make: Make) -> None:
    b = make(B)
    old, new = make(A), keys.generate("a")
    old.open("b", b)
    old.send("b", *frame("a", 1))
    until([old, b], lambda: b.got)
    b.open("a", old)
    b.transport.admit({**ALL, "a": new.public})
    until([old, b], lambda: old.trouble("b") == transport.UNWANTED)
    young = make(new)
    young.open("b", b)
    b.transport.open(wire.node_id("a"), young.address)
    young.send("b", *frame("a", 2))
    b.send("a", *frame("b", 5))
    until([old, young, b], lambda: len(b.got) == 2 and young.got)
    assert b.got[1] == (2, b"") and young.got == [(5, b"")] and not old.got


def test_a_plain_client_is_refused_and_counted(make: Make) -> None:
    plain, b = make(), make(B)
    plain.open("b", b)
    plain.send("b", *frame("a"))
    until([plain, b], lambda: b.said and plain.trouble("b"))
    assert b.counts[HANDSHAKE_FAILED]
    assert not b.got and plain.trouble("b") == transport.MISMATCH and "showed no key" in b.said[0]


def test_a_server_with_another_key_gets_nothing(make: Make) -> None:
    wrong = {**ALL, "b": keys.generate("x").public}
    a, b = make(A, wrong), make(B, ALL)
    a.open("b", b)
    a.send("b", *frame("a", 0, b"secret"))
    until([a, b], lambda: a.trouble("b") and b.counts[HANDSHAKE_FAILED])
    assert a.trouble("b") == transport.MISMATCH and not b.got


def test_a_server_without_keys_gets_nothing(make: Make) -> None:
    a, plain = make(A), make()
    a.open("b", plain)
    a.send("b", *frame("a", 0, b"secret"))
    until([a, plain], lambda: a.trouble("b"))
    assert a.trouble("b") == transport.MISMATCH and not plain.got


def test_a_frame_in_another_nodes_name_is_refused_and_counted(make: Make) -> None:
    b, c = make(B), make(C)
    c.open("b", b)
    c.send("b", *frame("a", 1))
    c.send("b", *frame("c", 2))
    until([b, c], lambda: b.got)
    assert b.got == [(2, b"")] and b.counts == {FRAME_FORGED: 1} and "of c in the name of another" in b.said[0]


def test_messages_are_not_believed_while_nobody_answers_for_keys(make: Make) -> None:
    """ZeroMQ lets everybody in when there is no ZAP handler."""
    b, context = make(B), zmq.Context()
    bare = context.socket(zmq.PULL)
    assert b.guard is not None
    b.guard.serve(bare)
    port = bare.bind_to_random_port("tcp://127.0.0.1")
    out = b.context.socket(zmq.PUSH)
    assert b.guard.secure(out, wire.node_id("b"))
    out.connect(f"tcp://127.0.0.1:{port}")
    out.send(frame("b")[0])
    assert not b.guard.sent_by(bare.recv(copy=False), wire.node_id("b")) and b.counts[FRAME_FORGED] == 1
    context.destroy(0)


def test_a_recorded_connection_played_again_is_refused(make: Make) -> None:
    a, b = make(A), make(B)
    recorded = bytearray()
    with Relay(b.address, recorded) as relay:
        a.transport.open(wire.node_id("b"), relay.address)
        a.send("b", *frame("a", 1, b"gradient"))
        until([a, b, relay], lambda: b.got)
        b.got.clear()
    host, port = b.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as again:
        again.sendall(recorded)
        until([b], lambda: b.counts[HANDSHAKE_FAILED])
    assert not b.got


def test_a_message_that_somebody_changes_is_lost_and_nothing_else_is(make: Make) -> None:
    """ZeroMQ may end the connection or not; links notice what is lost."""
    a, b = make(A), make(B)
    with Relay(b.address, bytearray()) as relay:
        a.transport.open(wire.node_id("b"), relay.address)
        a.send("b", *frame("a", 1))
        until([a, b, relay], lambda: b.got)
        relay.damage = True
        a.send("b", *frame("a", 2, b"x" * 1000))
        until([a, b, relay], lambda: not relay.damage)
        until([a, b, relay], lambda: a.send("b", *frame("a", 3)) and len(b.got) > 1)
    assert set(b.got) == {(1, b""), (3, b"")}


def test_a_connection_that_says_nothing_is_counted(make: Make) -> None:
    b = make(B)
    host, port = b.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))):
        until([b], lambda: b.counts[HANDSHAKE_FAILED])
    assert b.counts == {HANDSHAKE_FAILED: 1}


class Relay:
    """A TCP hop before ``target`` that remembers in ``seen`` what goes towards it. Runs as nodes do.

    ``damage``: one bit of what goes there next is changed.
    """

    def __init__(self, target: str, seen: bytearray) -> None:
        self._target, self._seen = target.removeprefix("tcp://").split(":"), seen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.damage = False
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._listener.close()

    def run(self) -> None:
        try:
            accepted, _ = self._listener.accept()
            onward = socket.create_connection((self._target[0], int(self._target[1])))
            self._pairs.append((accepted, onward))
            for end in self._pairs[-1]:
                end.setblocking(False)
        except BlockingIOError:
            pass
        for near, far in list(self._pairs):
            self._pass(near, far, self._seen)
            if far.fileno() >= 0:
                self._pass(far, near, None)

    def _pass(self, source: socket.socket, sink: socket.socket, seen: bytearray | None) -> None:
        try:
            data = source.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._pairs.remove((source, sink) if seen is not None else (sink, source))
            source.close()
            sink.close()
            return
        if seen is not None:
            seen += data
            if self.damage:
                data, self.damage = data[:-1] + bytes([data[-1] ^ 1]), False
        sink.sendall(data)


def test_where_nobody_answers_is_said(make: Make) -> None:
    a, b = make(), make()
    assert "its address" in a.transport.unanswered(7)
    a.open("b", b)
    assert a.transport.unanswered(wire.node_id("b")) == f"no answer yet from {b.address}"
    b.transport.close()
    until([a], lambda: "nothing listens there" in a.transport.unanswered(wire.node_id("b")))
    assert b.address in a.transport.unanswered(wire.node_id("b"))
    b.transport = ZmqTransport(b.context, b.address)
    until([a, b], lambda: "no answer yet" in a.transport.unanswered(wire.node_id("b")))
