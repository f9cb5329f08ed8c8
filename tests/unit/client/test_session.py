"""Joining, failing, leaving: what is said to a daemon, and what becomes of its answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import gcclient
from gcclient import session as session_module
from gcclient.api import current
from gcproto import lane_messages, messages
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault, Register, Waiting
from gcproto.paths import default_socket
from gcproto.timings import TensorTimes
from tests.unit.client.fake import FakeDaemon


def test_register_says_who_we_are(joined: FakeDaemon) -> None:
    (register,) = (m for m in joined.heard[-1] if isinstance(m, Register))
    assert (register.label, register.rank, register.world_size) == ("unit", 0, 1)
    assert (register.local_rank, register.local_size, register.pid) == (0, 1, os.getpid())
    assert len(register.number) == 16
    assert gcclient.is_initialized()
    assert (gcclient.rank(), gcclient.size(), gcclient.local_rank(), gcclient.local_size()) == (0, 1, 0, 1)
    assert gcclient.stats()["job"] == "unit" and gcclient.stats()["node"] == "fake"


def test_what_the_daemon_can_do_without_is_not_kept_for_later(joined: FakeDaemon) -> None:
    session = current()
    late, now = (TensorTimes(0, step, (0,)) for step in (4, 5))
    session._attached = False
    session.inform(late)
    session._attached = True
    session.inform(now)
    joined.wait(lambda: now in joined.heard[-1])
    assert late not in joined.heard[-1]


def test_leaving_in_good_order(daemon: FakeDaemon) -> None:
    gcclient.init(0, 1, socket=daemon.socket)
    descriptors = len(os.listdir("/proc/self/fd"))
    gcclient.shutdown()
    daemon.wait(lambda: messages.Unregister() in daemon.heard[-1])
    assert not gcclient.is_initialized()
    with pytest.raises(gcclient.NotInitialized, match=r"init\(\) first"):
        gcclient.push_pull(torch.ones(1))
    gcclient.shutdown()
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_leaving_waits_until_the_goodbye_was_read(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined.pause():
        monkeypatch.setattr(session_module, "GOODBYE_FOR", 0.3)
        began = time.monotonic()
        gcclient.shutdown()
        assert 0.3 <= time.monotonic() - began < 5
    joined.wait(lambda: messages.Unregister() in joined.heard[-1])


def test_a_refusal_ends_init(daemon: FakeDaemon) -> None:
    daemon.answer = lambda m: Fault(b"", "Draining", "no new jobs") if isinstance(m, Register) else None
    with pytest.raises(gcclient.Draining, match="no new jobs"):
        gcclient.init(0, 1, socket=daemon.socket)
    assert not gcclient.is_initialized()


def test_what_the_daemon_waits_for_is_logged(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "GRACE", 0.5)
    daemon.answer = lambda m: Waiting("ranks [1] of job 'unit'") if isinstance(m, Register) else None
    with pytest.raises(gcclient.StepTimeout, match="the job to form") as caught:
        gcclient.init(0, 1, socket=daemon.socket, deadline=0.1)
    assert "waiting for ranks [1] of job 'unit'" in caplog.text
    assert caught.value.missing == ("ranks [1] of job 'unit'",)


def test_a_fault_fails_what_is_pending_and_what_follows(joined: FakeDaemon) -> None:
    joined.silent = True
    handle = gcclient.push_pull_async(torch.ones(3), "t")
    threading.Timer(0.1, lambda: joined.say(-1, Fault(b"", "PeerLost", "b is gone", missing=("b",)))).start()
    with pytest.raises(gcclient.PeerLost, match="b is gone") as caught:
        gcclient.synchronize(handle)
    assert caught.value.missing == ("b",) and caught.value.job == "unit"
    assert gcclient.poll(handle)
    with pytest.raises(gcclient.PeerLost):
        gcclient.push_pull(torch.ones(3), "t")
    with pytest.raises(gcclient.PeerLost):
        gcclient.broadcast_parameters({})


def test_what_cannot_be_encoded_was_not_declared(joined: FakeDaemon) -> None:
    """Sections are numbered: one that was counted but not sent would make the daemon wait for it for ever."""
    gcclient.push_pull(torch.ones(3), "before")
    session = current()
    domain = session.domains[0]
    with pytest.raises(UnicodeEncodeError):
        session.declare(domain, (TensorSpec("a\udc80", (3,), int(DType.F32)),))
    with pytest.raises(OverflowError):
        session.declare(domain, (TensorSpec("a", (1 << 64,), int(DType.F32)),))
    with pytest.raises(UnicodeEncodeError):
        session.domain(DeclareDomain("a\udc80", 7, (0,)))
    assert len(domain.sections) == 1 and 7 not in session.domains
    assert torch.equal(gcclient.push_pull(torch.ones(3), "after"), torch.ones(3))
    assert [m.section.index for m in joined.heard[-1] if isinstance(m, DeclareSection)] == [0, 1]


def test_init_after_a_failure_joins_anew(joined: FakeDaemon) -> None:
    joined.answer = lambda m: Fault(b"", "PeerLost", "b is gone") if isinstance(m, lane_messages.Push) else None
    with pytest.raises(gcclient.PeerLost):
        gcclient.push_pull(torch.ones(3), "t")
    joined.answer = lambda m: None
    gcclient.init(0, 1, socket=joined.socket, job="unit")
    assert torch.equal(gcclient.push_pull(torch.ones(3), "t"), torch.ones(3))


def test_a_forked_child_neither_uses_nor_holds_the_connection(joined: FakeDaemon) -> None:
    channels = [link.channel for link in current().daemon.links()]
    ours = {os.readlink(f"/proc/self/fd/{channel.fileno()}") for channel in channels if channel is not None}
    assert len(ours) == 3, "the supervisor's and two lanes'"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        kept = ours & {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
        os.write(writer, f"{gcclient.is_initialized()} {len(kept)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() == "False 0"
    os.close(reader)
    os.close(writer)
    assert torch.equal(gcclient.push_pull(torch.ones(3), "t"), torch.ones(3))


@pytest.mark.parametrize(("ending", "orderly"), [("pass", True), ("raise SystemExit(0)", True), ("1 / 0", False)])
def test_leaving_at_exit(daemon: FakeDaemon, ending: str, orderly: bool) -> None:
    """An exception ends the process without goodbye, so that the other ranks hear at once that it is lost."""
    script = f"import gcclient; gcclient.init(0, 1, socket={daemon.socket!r}); {ending}"
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=60, check=False)
    daemon.wait(lambda: not daemon.connected(-1))
    assert (messages.Unregister() in daemon.heard[-1]) == orderly


def test_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket() == "/run/user/7/gradcomm/daemon.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket() == f"/tmp/gradcomm-{os.getuid()}/daemon.sock"
    assert default_socket("b").endswith("/daemon-b.sock")
