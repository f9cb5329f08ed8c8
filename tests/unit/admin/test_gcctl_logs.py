"""`gcctl logs` against a real service: lines, JSON, and following through restarts.

What may live here: tests of `gcserver/admin/gcctl_logs.py`. What may not: what the daemon sends (`test_logstreams.py`).
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin import gcctl, gcctl_logs
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_parser import parser
from gcserver.admin.logs import LogRing
from gcserver.admin.source import NodeStatus
from tests.unit.admin.serving import serving
from tests.unit.admin.source import FixedSource

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


@pytest.fixture
def daemon() -> Iterator[tuple[str, LogRing]]:
    ring = LogRing()
    ring.append(time.time() - 3600, "info", "gcserver", "ready: node a")
    ring.append(time.time(), "warning", "gcserver", "a worker is sent away", lane=1)
    ring.append(time.time(), "error", "gcserver.admin", "it \x1b[2J failed", "Traceback:\n  here\nValueError: so")
    with serving(FixedSource(), ring=ring) as server:
        yield server.address, ring


def out(capsys: pytest.CaptureFixture[str], daemon: tuple[str, LogRing], *arguments: str) -> str:
    assert gcctl.main(["--address", daemon[0], "logs", *arguments]) == Exit.OK
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_lines_for_a_person(capsys: pytest.CaptureFixture[str], daemon: tuple[str, LogRing]) -> None:
    first, second, third, *trace = out(capsys, daemon).splitlines()
    assert re.fullmatch(TIME + r"  info      a: ready: node a", first)
    assert re.fullmatch(TIME + r"  warning   a lane 1: a worker is sent away", second)
    assert third.endswith("  error     a: it \\x1b[2J failed"), "what is logged cannot drive the terminal"
    assert trace == ["    Traceback:", "      here", "    ValueError: so"]
    assert out(capsys, daemon, "--since", "10m").count("\n") == 5
    assert out(capsys, daemon, "--level", "warning", "--since", "2h").count("\n") == 5
    assert out(capsys, daemon, "--level", "critical") == ""


def test_a_line_of_json_for_each_record(capsys: pytest.CaptureFixture[str], daemon: tuple[str, LogRing]) -> None:
    first, second, third = [json.loads(line) for line in out(capsys, daemon, "--json").splitlines()]
    assert (first["sequence"], first["level"], first["node"], first["lane"]) == (1, "info", "a", None)
    assert (second["lane"], second["logger"], second["trace"]) == (1, "gcserver", "")
    assert third["message"] == "it \x1b[2J failed" and third["trace"].endswith("ValueError: so")


class Follower:
    """`gcctl logs --follow` in a thread: what it said and noted, and how it ended."""

    def __init__(self, address: str, *arguments: str) -> None:
        self.options = parser().parse_args(["logs", "--follow", *arguments])
        self.options.timeout, self.options.json = 60.0, False
        self.said: queue.Queue[str] = queue.Queue()
        self.notes: queue.Queue[str] = queue.Queue()
        self.reads = True
        self.error: Any = None
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def _run(self, address: str) -> None:
        try:
            gcctl_logs.run(address, None, self.options, self._say, self.notes.put)
        except Exception as error:
            self.error = error

    def _say(self, text: str) -> bool:
        self.said.put(text.rpartition(": ")[2])
        return self.reads

    def hears(self, count: int) -> list[str]:
        return [self.said.get(timeout=60) for _ in range(count)]

    def end(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


class Later(FixedSource):
    """The same daemon in another life."""

    def node(self) -> NodeStatus:
        return replace(super().node(), incarnation=77)


@contextlib.contextmanager
def followed(address: str) -> Iterator[tuple[LogRing, Follower]]:
    """A daemon that has said one thing, and who has heard it; the daemon goes at the end."""
    ring = LogRing()
    ring.append(time.time(), "info", "gcserver", "one")
    with serving(FixedSource(), address, ring=ring):
        follower = Follower(address)
        assert follower.hears(1) == ["one"]
        yield ring, follower


def test_following_through_a_restart(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    with followed(address) as (ring, follower):
        ring.append(time.time(), "info", "gcserver", "two")
        assert follower.hears(1) == ["two"]
    ring = LogRing()
    ring.append(time.time(), "info", "gcserver", "again")
    with serving(Later(), address, ring=ring):
        assert follower.hears(1) == ["again"]
        follower.reads = False
        ring.append(time.time(), "info", "gcserver", "last")
        assert follower.hears(1) == ["last"]
        assert follower.end() is None, "nobody reads any more"
    notes = [follower.notes.get_nowait() for _ in range(follower.notes.qsize())]
    assert notes[-1] == "the daemon was started again"
    assert all("went away; trying for 1 min" in note for note in notes[:-1])


def test_a_connection_that_is_lost_repeats_nothing(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    with followed(address) as (ring, follower):
        pass
    ring.append(time.time(), "info", "gcserver", "two")
    with serving(FixedSource(), address, ring=ring):
        assert follower.hears(1) == ["two"]
        follower.reads = False
        ring.append(time.time(), "info", "gcserver", "last")
        assert follower.end() is None


def test_a_daemon_that_stays_away(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    with followed(address) as (_, follower):
        follower.options.timeout = 0.1
    assert follower.end().code().name == "UNAVAILABLE"


def test_what_was_dropped_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Only who goes on where records are gone misses any."""
    ring = LogRing(most=3)
    for _ in range(9):
        ring.append(time.time(), "info", "gcserver", "x")
    with serving(FixedSource(), ring=ring) as server:
        assert gcctl.main(["--address", server.address, "logs"]) == Exit.OK
        assert capsys.readouterr().err == ""
        answer = gcctl_logs.pb.GetLogsResponse(lost=6, incarnation=3)
        notes: list[str] = []
        place = gcctl_logs._Place(3, 1)
        assert gcctl_logs._show(answer, place, False, lambda _: True, notes.append)
    assert notes == ["6 records are missing here: the daemon had dropped them before they were read"]


def test_who_cannot_be_reached(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for follow in ((), ("--follow",)):
        assert gcctl.main(["--address", f"unix:{tmp_path}/no.sock", "logs", *follow]) == Exit.UNREACHABLE
        assert "no daemon answers" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert gcctl.main(["--address", address, "--timeout", "300ms", "logs", "--follow"]) == Exit.TIMEOUT
    assert "did not answer within 300 ms" in capsys.readouterr().err
