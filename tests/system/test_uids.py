"""Other users of the machine: who may connect, and what they cannot reach. Root can be any of them; others skip this
(what they can try is in tests/unit/runtime/test_registrations.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gcproto import lane_messages, messages, packed
from gcproto.channel import ChannelClosed, connect
from gcproto.lane_messages import Attach, MapSection
from gcproto.messages import IAm, WhoAreYou
from gcserver.admin.callers import uids_of
from gcserver.admin.unixpeers import uids_at
from gcserver.core import control_events as cx
from gcserver.runtime.laneworkers import LaneWorkers
from gcserver.runtime.registrations import Registrations
from gcserver.runtime.setup import listen_unix
from gcserver.runtime.statefiles import map_file, private_directory
from gcserver.runtime.tickets import Tickets
from tests.unit.runtime.test_laneworkers import OURS, Lane
from tests.unit.runtime.test_registrations import Supervisor

SOMEBODY, ELSE = 54321, 54322
_to_worker = packed.Decoder[messages.ToWorker](messages.ToWorker)
_to_lane_worker = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
]


class Child:
    """``work`` in a forked process of user ``uid``; ``result()`` is what it returned, messages as dicts, or the name of
    what it raised. ``work`` imports nothing: that user may not be let into this interpreter's library."""

    def __init__(self, uid: int, work: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                found: Any = work()
            except Exception as error:
                found = type(error).__name__
            os.write(write, msgspec.json.encode(found))
        finally:
            os._exit(0)

    def result(self) -> Any:
        with open(self._read, "rb") as file:
            found = msgspec.json.decode(file.read())
        os.waitpid(self._pid, 0)
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter; pytest's are root's alone."""
    with tempfile.TemporaryDirectory(prefix="gc-uids-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def supervisor(folder: Path) -> Iterator[Supervisor]:
    fake = Supervisor(folder / "daemon.sock")
    registrations = Registrations(fake)  # type: ignore[arg-type]
    registrations.start()
    yield fake
    registrations.close()


def knock(path: Path, decode: Any, *said: Any) -> Callable[[], list[Any]]:
    """Connect, say something, and return what is said before the other side closes."""

    def work() -> list[Any]:
        channel = connect(str(path), decode)
        with contextlib.suppress(ChannelClosed):  # it may have been closed already, with an answer
            channel.send_all(said)
        channel._sock.setblocking(True)
        channel._sock.settimeout(30)
        heard = []
        with contextlib.suppress(ConnectionResetError):  # what was said was not read
            while data := channel._sock.recv(1 << 16):
                heard.append(decode(data[4:]))
        return heard

    return work


def test_the_sockets_mode_keeps_others_out(supervisor: Supervisor, folder: Path) -> None:
    assert (folder / "daemon.sock").stat().st_mode & 0o777 == 0o600
    assert Child(SOMEBODY, knock(folder / "daemon.sock", _to_worker, WhoAreYou())).result() == "PermissionError"


def test_another_uid_is_refused_whatever_the_sockets_mode(supervisor: Supervisor, folder: Path) -> None:
    (folder / "daemon.sock").chmod(0o666)
    child = Child(SOMEBODY, knock(folder / "daemon.sock", _to_worker))
    while not supervisor.warnings:
        supervisor.turn()
    (fault,) = child.result()
    assert (fault["t"], fault["kind"]) == ("fault", "NotAuthorised")
    said = f"only workers of uid 0 and root may connect to this daemon, this one is of uid {SOMEBODY}"
    assert fault["message"] == said
    assert supervisor.fed == [] and len(supervisor.readers) == 1


def test_another_uid_gets_no_arena_of_a_lane(folder: Path) -> None:
    """Not with the ticket of the job either, were it to get hold of one."""
    lane = Lane(folder)
    lane.workers = LaneWorkers(lane.process, listen_unix(str(folder / "lane.sock")), lane.tickets)
    (folder / "lane.sock").chmod(0o666)
    said = (Attach(OURS, 0, lane.tickets.ticket(OURS, 0)), MapSection(0, 0, 0))
    child = Child(SOMEBODY, knock(folder / "lane.sock", _to_lane_worker, *said))
    while not lane.counted:
        lane.workers.accept()
    (fault,) = child.result()
    assert (fault["t"], fault["kind"]) == ("fault", "NotAuthorised")
    assert lane.counted == ["workers_refused"] and lane.workers.connections == {}
    lane.workers.listener.close()
    lane.process.poller.close()


def test_a_daemon_of_another_user_serves_that_user_and_root(folder: Path) -> None:
    """The daemon is somebody's: somebody else is refused, root is served."""
    folder.chmod(0o777)
    ready, told = os.pipe()

    def daemon() -> list[Any]:
        fake = Supervisor(folder / "theirs.sock")
        registrations = Registrations(fake)  # type: ignore[arg-type]
        registrations.start()
        os.chmod(folder / "theirs.sock", 0o666)
        os.write(told, b"x")
        while not fake.fed or not fake.warnings:
            fake.turn()
        registrations.tell(cx.Tell(fake.fed[0].connection, IAm("a", "tcp://a:1", 1)))
        registrations.close()
        return [[type(e.message).__name__ for e in fake.fed], fake.warnings]

    serving = Child(SOMEBODY, daemon)
    os.read(ready, 1)
    refused = Child(ELSE, knock(folder / "theirs.sock", _to_worker))
    served = Child(0, knock(folder / "theirs.sock", _to_worker, WhoAreYou()))
    (fault,) = refused.result()
    assert fault["kind"] == "NotAuthorised" and f"only workers of uid {SOMEBODY} and root" in fault["message"]
    assert served.result() == [{"t": "iam", "node": "a", "address": "tcp://a:1", "lanes": 1}]
    fed, warnings = serving.result()
    assert fed == ["WhoAreYou"] and len(warnings) == 1
    os.close(ready)
    os.close(told)


def test_memory_and_keys_are_out_of_reach(folder: Path) -> None:
    """Descriptors are how memory is handed over; its names lead nobody else there."""
    state = folder / "state"
    private_directory(state)
    Tickets(state)
    map_file(state / "jobs" / "x" / "arena", 4096)
    for path in (state / "tickets.key", state / "jobs" / "x" / "arena"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert Child(SOMEBODY, path.read_bytes).result() == "PermissionError"
    state.chmod(0o755)
    (state / "jobs").chmod(0o755)
    (state / "jobs" / "x").chmod(0o755)
    for path in (state / "tickets.key", state / "jobs" / "x" / "arena"):
        assert Child(SOMEBODY, path.read_bytes).result() == "PermissionError", "the files are closed by themselves"


def test_the_audit_log_knows_whose_process_came_over_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, (ready, told) = server.getsockname()[1], os.pipe()

        def work() -> int:
            with socket.socket() as client:
                client.connect(("127.0.0.1", port))
                return os.read(ready, 1)[0]

        server.settimeout(30)
        child = Child(SOMEBODY, work)
        connection, (host, theirs) = server.accept()
        assert uids_of(f"ipv4:{host}:{theirs}") == {SOMEBODY}
        os.write(told, b"x")
        assert child.result() == ord("x")
        connection.close()
        os.close(ready)
        os.close(told)


def test_the_audit_log_knows_the_users_of_a_unix_socket(folder: Path) -> None:
    """Of two who are connected it names both."""
    path = folder / "admin.sock"
    listener = listen_unix(str(path))
    path.chmod(0o666)

    def stay() -> int:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            return len(client.recv(1))

    child = Child(SOMEBODY, stay)
    listener.setblocking(True)
    accepted, _ = listener.accept()
    assert uids_at(str(path)) == {SOMEBODY}
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(str(path))
        other, _ = listener.accept()
        assert uids_at(str(path)) == {0, SOMEBODY}
        other.close()
    accepted.send(b"x")
    assert child.result() == 1
    accepted.close()
    listener.close()
