"""A daemon that is not there, and one that takes connections without ever answering."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

import gcclient
from gcclient import reach
from gcclient.api import current
from gcclient.daemon import MAX_UNANSWERED
from gcproto import channel
from gcproto.messages import Fault, Register
from tests.unit.client.fake import FakeDaemon


def test_no_daemon_is_said_with_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reach, "CONNECT_FOR", 0.2)
    missing = str(tmp_path / "none.sock")
    began = time.monotonic()
    with pytest.raises(gcclient.NoDaemon, match=r"none\.sock") as caught:
        gcclient.init(0, 1, socket=missing)
    assert "gcserver run" in caught.value.advice
    assert time.monotonic() - began < 7
    assert not gcclient.is_initialized()


def test_the_socket_of_another_user_is_refused_at_once(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str, decode: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(channel, "connect", denied)
    monkeypatch.setattr(reach, "CONNECT_FOR", 3600.0)
    with pytest.raises(gcclient.NotAuthorised, match=f"not open to uid {os.getuid()}") as caught:
        gcclient.init(0, 1, socket=daemon.socket)
    assert f"belongs to uid {os.getuid()}" in str(caught.value) and "GC_NODE_SOCKET" in caught.value.advice
    with pytest.raises(gcclient.NotAuthorised, match="Permission denied"):
        gcclient.init(0, 1, socket="/nowhere/none.sock")
    assert not gcclient.is_initialized()


def test_joining_a_daemon_that_only_hangs_up_fails_after_a_few_connections(daemon: FakeDaemon) -> None:
    daemon.curt = True
    with pytest.raises(gcclient.JoinRefused, match=f"closed {MAX_UNANSWERED} connections in a row") as caught:
        gcclient.init(0, 1, socket=daemon.socket, job="unit")
    assert daemon.socket in str(caught.value) and "same version" in caught.value.advice
    assert [type(m) for m in daemon.heard[-1]] == [Register] * MAX_UNANSWERED
    assert not gcclient.is_initialized()


@pytest.mark.parametrize(
    ("index", "name", "connections"),
    [(-1, "the daemon at", 1 + MAX_UNANSWERED), (0, "lane 0 of the daemon at", MAX_UNANSWERED)],
)
def test_a_job_ends_when_its_daemon_only_hangs_up(joined: FakeDaemon, index: int, name: str, connections: int) -> None:
    """The first connection to the supervisor was answered, that to a lane was not."""
    joined.wait(lambda: joined.connected(index))
    joined.curt = True
    joined.hang_up(index)
    joined.wait(lambda: current().failure is not None)
    with pytest.raises(gcclient.PeerLost, match=f"{name} .* closed {MAX_UNANSWERED} connections") as caught:
        gcclient.push_pull(torch.ones(3), "t")
    assert caught.value.phase == "attach"
    assert joined.accepted[index] == connections


def test_an_answer_in_between_makes_the_count_begin_anew(joined: FakeDaemon) -> None:
    link = current().daemon.control
    for _ in range(MAX_UNANSWERED):
        joined.curt = True
        joined.hang_up(-1)
        joined.wait(lambda: link.unanswered > 0)
        joined.curt = False
        joined.wait(lambda: link.answered)
        assert link.unanswered == 0
    assert torch.equal(gcclient.push_pull(torch.ones(3), "t"), torch.ones(3))


def test_after_a_failure_nobody_connects_again(joined: FakeDaemon) -> None:
    """A daemon that answers an undecodable message with a fault would otherwise hear it again and again."""
    joined.say(-1, Fault(b"", "NotRegistered", "cannot read that"))
    joined.wait(lambda: current().failure is not None)
    link, before = current().daemon.control, joined.accepted[-1]
    joined.hang_up(-1)
    joined.wait(lambda: link.lost_at > 0)
    current().daemon.read_now()
    assert link.channel is None and joined.accepted[-1] == before
