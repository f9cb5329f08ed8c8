"""Bounds of what a channel takes from the other side, and what it does when descriptors run out.

What may live here: tests of `proto/channel.py` on socket pairs. What may not: messages.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from gcproto import channel as channels
from gcproto import lane_messages, messages, packed
from gcproto.channel import MAX_DESCRIPTORS, Channel, ChannelClosed
from gcproto.lane_messages import Mapped
from gcproto.messages import WhoAreYou
from gcproto.packed import MAX_MESSAGE_BYTES, MessageError

_decode = packed.Decoder[messages.FromWorker](messages.FromWorker)
_to_worker = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)


def pair(decode: Callable[[bytes], Any] = bytes) -> tuple[Channel[Any], socket.socket]:
    here, there = socket.socketpair()
    return Channel(here, decode), there


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_that_come_without_a_message_are_bounded_and_closed() -> None:
    ours, theirs = pair()
    before = open_descriptors()
    one = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()] * MAX_DESCRIPTORS))]
    # A length without its message.
    theirs.sendmsg([b"\x08\0\0\0"], one)
    assert ours.receive() == []
    theirs.sendmsg([b"x"], one)
    with pytest.raises(MessageError, match="at most 64 descriptors, got 128"):
        ours.receive()
    ours.close()
    theirs.close()
    assert open_descriptors() == before - 2


def test_a_connection_ends_though_its_own_end_was_sent_over_it() -> None:
    here, theirs = socket.socketpair()
    ours: Channel[Any] = Channel(here, bytes, 0)
    theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))])
    theirs.close()
    assert ours.receive() == []
    with pytest.raises(ChannelClosed):
        ours.receive()
    ours.close()


def test_whoever_never_stops_writing_fills_no_more_than_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 100_000)

    class Endless:
        """A socket that always has more."""

        def setblocking(self, flag: bool) -> None: ...

        def recvmsg(self, size: int, ancillary: int) -> tuple[bytes, list[Any], int, None]:
            return b"\0" * size, [], 0, None

    ours: Channel[Any] = Channel(Endless(), bytes)  # type: ignore[arg-type]
    messages = ours.receive()
    # Empty messages of four bytes each, of what was read until there was room for one of the largest.
    assert 100_000 <= 4 * len(messages) < 100_004 + 2 * (1 << 16)


def test_a_message_of_the_largest_size_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 70_000)
    ours, theirs = pair()
    theirs.sendall(len(b := bytes(70_000)).to_bytes(4, "little") + b + b"\1\0\0\0x")
    found: list[Any] = []
    for _ in range(4):
        found += [message for message, _ in ours.receive()]
    assert found == [b, b"x"]
    ours.close()
    theirs.close()


def test_more_descriptors_at_once_than_a_message_brings_are_not_taken() -> None:
    channel, worker = pair(_decode)
    data = packed.encode(WhoAreYou())
    before = open_descriptors()
    with open("/dev/null") as null:
        socket.send_fds(worker, [struct.pack("<I", len(data)) + data], [null.fileno()] * 250)
    ((message, descriptors),) = channel.receive()
    assert message == WhoAreYou() and len(descriptors) == MAX_DESCRIPTORS == open_descriptors() - before
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_length_is_looked_at_before_anything_is_kept_for_it() -> None:
    channel, worker = pair(_decode)
    worker.send(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MessageError, match=f"at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 1}"):
        channel.receive()


def test_unsent_descriptors_are_counted_and_closed() -> None:
    here, there = socket.socketpair()
    channel: Channel[Any] = Channel(here, _decode)
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


def test_what_cannot_be_copied_is_not_sent_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (Channel(s, _to_worker) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    copies: list[int] = []
    dup = os.dup

    def scarce(descriptor: int) -> int:
        if copies:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        copies.append(dup(descriptor))
        return copies[-1]

    monkeypatch.setattr(os, "dup", scarce)
    with pytest.raises(OSError, match="Too many open files"):
        here.send(Mapped(0, 0, 0, (1, 1)), files)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copies[0])
    assert not here.backlog and there.receive() == []
    for descriptor in files:
        os.close(descriptor)
    here.close()
    there.close()
