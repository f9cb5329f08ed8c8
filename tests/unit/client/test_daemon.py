"""Links to a daemon that does not read."""

from __future__ import annotations

import logging
import socket

import pytest

from gcclient import daemon
from gcclient.daemon import CONTROL, Link
from gcproto import messages, packed
from gcproto.channel import Channel
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareSection

_decode = packed.Decoder[messages.FromWorker](messages.FromWorker)


def test_who_posts_does_not_wait_for_ever_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "_UNREAD", 0.02)
    here, there = socket.socketpair()
    link, read = Link(CONTROL, ""), Channel(there, _decode)
    link.channel = Channel(here, _decode)
    specs = tuple(TensorSpec(f"tensor.{i}", (i + 1, 7), 0) for i in range(30_000))
    large, small = (DeclareSection(3, Section(i, part), 1) for i, part in enumerate((specs, specs[:1])))
    with caplog.at_level(logging.WARNING, "gcclient"):
        link.post(large)
    assert "the daemon has read nothing for 0.02 s" in caplog.text and link.channel.backlog
    link.post(small)
    got: list[object] = []
    while link.channel.backlog:
        got += [message for message, _ in read.receive()]
        link.go_on()
    got += [message for message, _ in read.receive()]
    assert got == [large, small]
    link.go_on()
    there.close()
    link.post(small)
    link.go_on()
    assert link.why, "the reader restores what has broken"
    link.channel.close()
    link.channel = None
    link.go_on()
