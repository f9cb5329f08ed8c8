"""A connection between worker and daemon: what the other side may make it hold."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from gcproto import messages, packed
from gcproto.channel import MAX_DESCRIPTORS, Channel
from gcproto.messages import WhoAreYou
from gcproto.packed import MAX_MESSAGE_BYTES, MessageError

_decode = packed.Decoder[messages.FromWorker](messages.FromWorker)


@pytest.fixture
def pair() -> Iterator[tuple[Channel[messages.FromWorker], socket.socket]]:
    """(the daemon's channel, a worker's bare socket)"""
    here, there = socket.socketpair()
    channel = Channel(here, _decode)
    yield channel, there
    channel.close()
    there.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_without_a_message_are_bounded(pair: tuple[Channel[messages.FromWorker], socket.socket]) -> None:
    """One byte at a time brings some more, and no message is ever complete."""
    channel, worker = pair
    before = open_descriptors()
    worker.send(struct.pack("<I", 1000))
    with open("/dev/null") as null:
        for _ in range(2):
            socket.send_fds(worker, [b"x"], [null.fileno()] * (MAX_DESCRIPTORS // 2))
            assert channel.receive() == []
        assert open_descriptors() == before + 1 + MAX_DESCRIPTORS
        socket.send_fds(worker, [b"x"], [null.fileno()])
        with pytest.raises(MessageError, match=f"at most {MAX_DESCRIPTORS} descriptors"):
            channel.receive()
    channel.close()
    assert open_descriptors() == before - 1


def test_more_descriptors_at_once_than_a_message_brings_are_not_taken(
    pair: tuple[Channel[messages.FromWorker], socket.socket],
) -> None:
    channel, worker = pair
    data = packed.encode(WhoAreYou())
    before = open_descriptors()
    with open("/dev/null") as null:
        socket.send_fds(worker, [struct.pack("<I", len(data)) + data], [null.fileno()] * 250)
    ((message, descriptors),) = channel.receive()
    assert message == WhoAreYou() and len(descriptors) == MAX_DESCRIPTORS == open_descriptors() - before
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_length_is_looked_at_before_anything_is_kept_for_it(
    pair: tuple[Channel[messages.FromWorker], socket.socket],
) -> None:
    channel, worker = pair
    worker.send(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MessageError, match=f"at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 1}"):
        channel.receive()


def test_unsent_descriptors_are_counted_and_closed() -> None:
    here, there = socket.socketpair()
    channel = Channel(here, _decode)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    before = open_descriptors()
    with open("/dev/null") as null:
        while not channel.backlog:
            channel.send(WhoAreYou())
        for _ in range(3):
            channel.send(WhoAreYou(), [null.fileno()] * 2)
    assert channel.unsent_descriptors == 6 == open_descriptors() - before
    channel.close()
    assert channel.unsent_descriptors == 0 and open_descriptors() == before - 1
    there.close()
