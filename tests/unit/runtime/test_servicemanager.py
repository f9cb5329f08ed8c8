"""What is said to a service manager, on a real datagram socket, and when its watchdog is left to run out.

What may live here: tests of `gcserver/runtime/servicemanager.py`. What may not: a real systemd (`tests/system`).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.runtime import servicemanager
from gcserver.runtime.servicemanager import LANE_STARTS_WITHIN, ServiceManager, hanging
from gcserver.runtime.waiters import LANE_SILENT_AFTER


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


def said(sock: socket.socket) -> list[str]:
    """The next message, by lines."""
    return sock.recv(4096).decode().split("\n")


def nothing_more(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        sock.recv(4096)
    except BlockingIOError:
        return True
    return False


def lane(index: int = 0, ready: bool = True, age: float = 0.0, quiet: float = 0.0, restarts: int = 0) -> Any:
    now = time.monotonic()
    return SimpleNamespace(index=index, ready=ready, started=now - age, heard=now - quiet, restarts=restarts)


def test_without_a_service_manager_nothing_is_said() -> None:
    environ = {"WATCHDOG_USEC": "1000000", "HOME": "/"}
    manager = ServiceManager(environ)
    assert not manager.present and manager.every == 0.0 and environ == {"HOME": "/"}
    manager.ready("serving")
    manager.tick([lane()])
    manager.stopping("done")


def test_a_life_as_it_is_told(heard: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": heard.getsockname(), "HOME": "/"}
    manager = ServiceManager(environ)
    assert manager.present and environ == {"HOME": "/"}, "children must not speak in its name"
    before = time.monotonic_ns() // 1000
    with manager.reloading():
        pass
    manager.ready("node a: serving")
    assert said(heard) == ["READY=1", "STATUS=node a: serving"], "who is not ready yet does not become so by a reload"
    with manager.reloading():
        begun, stamp = said(heard)
        name, _, at = stamp.partition("=")
        assert begun == "RELOADING=1" and name == "MONOTONIC_USEC"
        assert before <= int(at) <= time.monotonic_ns() // 1000
    assert said(heard) == ["READY=1"]
    with pytest.raises(ZeroDivisionError), manager.reloading():
        raise ZeroDivisionError
    assert said(heard)[0] == "RELOADING=1" and said(heard) == ["READY=1"], "it goes on as it was"
    manager.stopping("a defect\nREADY=1")
    assert said(heard) == ["STOPPING=1", "STATUS=a defect READY=1"]
    with manager.reloading():
        pass
    assert nothing_more(heard), "nor does who is about to end"


def test_abstract_names() -> None:
    name = f"gc-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready("serving")
        assert said(sock) == ["READY=1", "STATUS=serving"]


def test_a_socket_that_fails_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    manager.ready("serving")
    manager.stopping("done")
    (record,) = caplog.records
    assert "READY=1" in record.getMessage() and "nobody" in record.getMessage()


@pytest.mark.parametrize(
    ("usec", "pid", "every"),
    [("2000000", "", 0.5), ("2000000", "mine", 0.5), ("2000000", "1", 0.0), ("", "", 0.0), ("soon", "", 0.0)],
)
def test_whose_watchdog_it_is(heard: socket.socket, usec: str, pid: str, every: float) -> None:
    pid = pid.replace("mine", str(os.getpid()))
    environ = {"NOTIFY_SOCKET": heard.getsockname(), "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    assert ServiceManager(environ).every == every and environ == {}


def test_signs_of_life_are_given_when_due(heard: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(servicemanager.time, "monotonic", lambda: now)
    manager = ServiceManager({"NOTIFY_SOCKET": heard.getsockname(), "WATCHDOG_USEC": "4000000"})
    for _ in range(3):
        manager.tick([])
    assert said(heard) == ["WATCHDOG=1"] and nothing_more(heard)
    now += 1.0
    manager.tick([])
    heard.settimeout(10)
    assert said(heard) == ["WATCHDOG=1"]


def test_no_sign_of_life_while_a_lane_hangs(heard: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": heard.getsockname(), "WATCHDOG_USEC": "4"})
    hung = lane(1, quiet=LANE_SILENT_AFTER + 1)
    for _ in range(3):
        manager.tick([lane(0), hung])
    assert nothing_more(heard)
    (record,) = caplog.records
    assert "lane 1 does not answer" in record.getMessage()
    hung.heard = time.monotonic()
    manager.tick([lane(0), hung])
    heard.settimeout(10)
    assert said(heard) == ["WATCHDOG=1"], "it answered in time after all"


def test_which_lanes_hang() -> None:
    late = LANE_STARTS_WITHIN + 1
    table = [
        lane(0),
        None,
        lane(2, quiet=LANE_SILENT_AFTER + 1),
        lane(3, ready=False, age=1, quiet=1, restarts=1),
        lane(4, ready=False, age=late, quiet=late, restarts=1),
        lane(5, ready=False, age=late, quiet=late),
    ]
    assert hanging(table) == (2, 4), "in order: about to be started, or starting for the first time"
