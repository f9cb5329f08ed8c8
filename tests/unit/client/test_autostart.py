"""Asking for a private daemon and holding it, with a stand-in for what starts it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

import gcclient
from gcclient import api, autostart


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a daemon that is there; what was asked is noted in ``asked``."""
    os.mkfifo(tmp_path / "users")
    script = tmp_path / "starter"
    script.write_text(f'#!/bin/sh\necho "$3" >> {tmp_path}/asked\necho {tmp_path}\nread end\n')
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    yield tmp_path
    autostart.let_go()


def _asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_ranks_of_a_job_ask_for_the_same_and_single_processes_for_their_own(folder: Path) -> None:
    keeper = os.open(folder / "users", os.O_RDONLY | os.O_NONBLOCK)
    assert autostart.socket_for("gpt", 2) == str(folder / "daemon.sock")
    assert autostart.socket_for("gpt", 2) == str(folder / "daemon.sock")
    autostart.socket_for("gpt", 1)
    assert _asked(folder) == ["gpt", f"gpt of process {os.getpid()}"], "what is held is not asked for again"
    assert not select.select([keeper], [], [], 0)[0], "it is held"
    autostart.let_go()
    assert select.select([keeper], [], [], 0)[0], "and no more"
    os.close(keeper)


def test_a_daemon_whose_keeper_is_gone_is_asked_for_again(folder: Path) -> None:
    keeper = os.open(folder / "users", os.O_RDONLY | os.O_NONBLOCK)
    autostart.socket_for("gpt", 2)
    os.close(keeper)
    keeper = os.open(folder / "users", os.O_RDONLY | os.O_NONBLOCK)
    autostart.socket_for("gpt", 2)
    assert len(_asked(folder)) == 1, "one keeper after the other is as good"
    os.close(keeper)
    with pytest.raises(gcclient.NoDaemon, match="no private daemon could be started"):
        autostart.socket_for("gpt", 2)
    assert len(_asked(folder)) == 2


def test_what_cannot_be_started_is_no_daemon(folder: Path) -> None:
    (folder / "starter").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(gcclient.NoDaemon, match=r"GC_AUTOSTART=1.*gcserver run"):
        autostart.socket_for("gpt", 2)
    (folder / "starter").write_text("#!/bin/sh\necho error: no room\nexit 1\n")
    with pytest.raises(gcclient.NoDaemon, match=r"no private daemon could be started \(no room\)"):
        autostart.socket_for("gpt", 2)


def test_init_asks_only_where_nobody_names_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Asked(Exception):
        pass

    def socket_for(label: str, size: int) -> str:
        asked.append((label, size))
        raise Asked

    monkeypatch.setattr(autostart, "socket_for", socket_for)
    monkeypatch.setattr("gcclient.reach.CONNECT_FOR", 0.0)
    monkeypatch.setattr(api, "default_socket", lambda: "/nowhere/default.sock")
    monkeypatch.setenv("GC_AUTOSTART", "1")
    with pytest.raises(Asked):
        gcclient.init(0, 2, job="gpt")
    assert asked == [("gpt", 2)]
    with pytest.raises(gcclient.NoDaemon, match="/nowhere/given"):
        gcclient.init(0, 2, job="gpt", socket="/nowhere/given.sock")
    monkeypatch.setenv("GC_NODE_SOCKET", "/nowhere/variable.sock")
    with pytest.raises(gcclient.NoDaemon, match="/nowhere/variable"):
        gcclient.init(0, 2, job="gpt")
    monkeypatch.delenv("GC_NODE_SOCKET")
    monkeypatch.setenv("GC_AUTOSTART", "0")
    with pytest.raises(gcclient.NoDaemon, match="/nowhere/default"):
        gcclient.init(0, 2, job="gpt")
    monkeypatch.setenv("GC_AUTOSTART", "maybe")
    with pytest.raises(ValueError, match="GC_AUTOSTART=maybe: expected 1"):
        gcclient.init(0, 2, job="gpt")
    assert len(asked) == 1
