"""Passing descriptors over a Unix socket when there are no more to be had.

What may live here: tests of `proto/channel.py`. What may not: messages (`test_wire.py`, `core/test_messages.py`).
"""

from __future__ import annotations

import errno
import os
import socket

import pytest

from gcproto import lane_messages, packed
from gcproto.channel import Channel
from gcproto.lane_messages import Mapped

_decode = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)


def test_what_cannot_be_copied_is_not_sent_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (Channel(s, _decode) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
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
