"""Greetings beside UCX, byte by byte.

What may live here: tests of `gcserver/runtime/ucxgreeting.py`. What may not: sockets, UCX.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver.runtime import ucxgreeting as greeting
from gcserver.runtime.ucxgreeting import NETWORK, SHARED_MEMORY, Answer, GreetingError


@pytest.mark.parametrize("way", [NETWORK, SHARED_MEMORY])
def test_greetings_are_read_as_they_come_in_pieces(way: int) -> None:
    hello, answer = greeting.hello(way), greeting.answer(way, b"where")
    assert len(hello) == greeting.HELLO_BYTES
    for end in range(len(hello)):
        assert greeting.read_hello(hello[:end]) is None
    assert greeting.read_hello(hello) == way
    for end in range(len(answer)):
        assert greeting.read_answer(answer[:end], way) is None
    assert greeting.read_answer(answer, way) == Answer(way, b"where")


def test_the_bytes_are_these() -> None:
    assert greeting.hello(1) == b"GCU1\x01\0\0\0"
    assert greeting.answer(0, greeting.port(0x1234)) == b"GCU1\0\0\0\0\x02\0\0\0\x34\x12"
    assert greeting.read_port(b"\x34\x12") == 0x1234


@pytest.mark.parametrize("said", [b"\xff", b"GET / HTTP/1.1", b"GCU2\0\0\0\0", b"GCX"])
def test_another_protocol_is_seen_from_its_first_bytes(said: bytes) -> None:
    with pytest.raises(GreetingError, match=r"another node\.transport"):
        greeting.read_hello(said)
    with pytest.raises(GreetingError, match=r"another node\.transport"):
        greeting.read_answer(said, NETWORK)


def test_more_than_a_greeting_is_refused() -> None:
    with pytest.raises(GreetingError, match="more"):
        greeting.read_hello(greeting.hello(0) + b"x")
    with pytest.raises(GreetingError, match="more"):
        greeting.read_answer(greeting.answer(0, b"where") + b"x", 0)


@pytest.mark.parametrize("size", [0, greeting.MAX_ADDRESS_BYTES + 1, (1 << 32) - 1])
def test_an_address_is_bounded_before_it_is_waited_for(size: int) -> None:
    with pytest.raises(GreetingError, match=f"got one of {size}"):
        greeting.read_answer(b"GCU1\0\0\0\0" + size.to_bytes(4, "little"), 0)


def test_ways_that_differ_are_named() -> None:
    with pytest.raises(GreetingError, match="it uses shared memory only, this node a network: set UCX_TLS alike"):
        greeting.read_answer(greeting.answer(SHARED_MEMORY, b""), NETWORK)
    with pytest.raises(GreetingError, match="something unknown"):
        greeting.read_answer(greeting.answer(7, b"x"), NETWORK)
    with pytest.raises(GreetingError, match="a port of 2 bytes, got 3"):
        greeting.read_port(b"123")


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda rest: b"GCU1" + rest))
def test_whatever_is_said_is_read_or_refused(said: bytes) -> None:
    for read in (greeting.read_hello, lambda raw: greeting.read_answer(raw, 0)):
        with contextlib.suppress(GreetingError):
            found = read(said)  # type: ignore[operator]
            assert found is None or said.startswith(b"GCU1")


@pytest.mark.parametrize(
    ("tls", "way"),
    [
        (None, NETWORK), ("all", NETWORK), ("tcp", NETWORK), ("tcp,sm,self", NETWORK), ("^ib", NETWORK), ("", NETWORK),
        ("rc,sm", NETWORK), ("sm", SHARED_MEMORY), ("sm,self", SHARED_MEMORY), ("posix, cma", SHARED_MEMORY),
    ],
)  # fmt: skip
def test_shared_memory_is_used_where_nothing_else_is_named(tls: str | None, way: int) -> None:
    assert greeting.way({} if tls is None else {"UCX_TLS": tls}) == way


def test_loopback_confines_ucx_unless_somebody_says_otherwise() -> None:
    assert greeting.devices(True, {}) == "lo"
    assert greeting.devices(False, {}) == ""
    assert greeting.devices(True, {"UCX_NET_DEVICES": "mlx5_0:1"}) == ""
