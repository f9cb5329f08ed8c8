"""Greetings beside UCX, byte by byte.

What may live here: tests of `gcserver/runtime/ucxgreeting.py`. What may not: sockets, UCX.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver.runtime import ucxgreeting as greeting
from gcserver.runtime.ucxgreeting import GreetingError


def test_greetings_are_read_as_they_come_in_pieces() -> None:
    hello, answer = greeting.hello(), greeting.answer(4711)
    assert len(hello) == greeting.HELLO_BYTES
    assert [greeting.read_hello(hello[:end]) for end in range(len(hello) + 1)] == [False] * len(hello) + [True]
    assert [greeting.read_answer(answer[:end]) for end in range(len(answer) + 1)] == [None] * len(answer) + [4711]


def test_the_bytes_are_these() -> None:
    assert greeting.hello() == b"GCU1\0\0\0\0"
    assert greeting.answer(0x1234) == b"GCU1\0\0\0\0\x02\0\0\0\x34\x12"


@pytest.mark.parametrize("said", [b"\xff", b"GET / HTTP/1.1", b"GCU2\0\0\0\0", b"GCX"])
def test_another_protocol_is_seen_from_its_first_bytes(said: bytes) -> None:
    with pytest.raises(GreetingError, match=r"another node\.transport"):
        greeting.read_hello(said)
    with pytest.raises(GreetingError, match=r"another node\.transport"):
        greeting.read_answer(said)


def test_more_than_a_greeting_is_refused() -> None:
    with pytest.raises(GreetingError, match="more"):
        greeting.read_hello(greeting.hello() + b"x")
    with pytest.raises(GreetingError, match="more"):
        greeting.read_answer(greeting.answer(1) + b"x")


@pytest.mark.parametrize("size", [0, 3, (1 << 32) - 1])
def test_a_port_is_two_bytes(size: int) -> None:
    with pytest.raises(GreetingError, match=f"a port of 2 bytes, got {size}"):
        greeting.read_answer(b"GCU1\0\0\0\0" + size.to_bytes(4, "little") + b"12")


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda rest: b"GCU1" + rest))
def test_whatever_is_said_is_read_or_refused(said: bytes) -> None:
    for read in (greeting.read_hello, greeting.read_answer):
        with contextlib.suppress(GreetingError):
            assert not read(said) or said.startswith(b"GCU1")
