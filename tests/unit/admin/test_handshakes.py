"""Connections that led to no call are counted, those that did are not."""

from __future__ import annotations

from gcserver.admin.handshakes import MAX_BEGUN, MAX_PEERS, SETTLED, Handshakes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.refused = 0
        self.handshakes = Handshakes(self._count, lambda: self.now)

    def _count(self) -> None:
        self.refused += 1

    def after(self, seconds: float) -> int:
        """How many were counted ``seconds`` later."""
        self.now += seconds
        self.handshakes.settle()
        return self.refused


def test_only_what_led_to_no_call_is_counted() -> None:
    c = Clock()
    c.handshakes.began()
    c.handshakes.called("ipv4:10.0.0.1:1")
    c.handshakes.called("ipv4:10.0.0.1:1")
    c.handshakes.began()
    assert c.after(SETTLED - 1) == 0, "it may still call"
    c.handshakes.began()
    assert c.after(1) == 1
    c.handshakes.called("ipv4:10.0.0.1:2")
    assert c.after(SETTLED) == 1


def test_many_calls_of_one_connection_are_one() -> None:
    c = Clock()
    c.handshakes.began()
    c.handshakes.began()
    for _ in range(5):
        c.handshakes.called("ipv4:10.0.0.1:1")
    assert c.after(SETTLED) == 1


def test_what_is_remembered_is_bounded() -> None:
    c = Clock()
    for i in range(MAX_PEERS + 50):
        c.handshakes.began()
        c.handshakes.called(f"ipv4:10.0.0.1:{i}")
    assert len(c.handshakes._met) == MAX_PEERS and c.after(SETTLED) == 0
    c.handshakes.called("a call without a connection that is known")
    assert c.after(SETTLED) == 0
    for _ in range(MAX_BEGUN + 50):
        c.handshakes.began()
    assert c.after(SETTLED) == MAX_BEGUN
