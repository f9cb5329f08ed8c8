"""Each look at the machine against the real thing: bound ports, served sockets, directories, names, limits."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lab.ports import free_ports
from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import FromWorker, IAm, WhoAreYou
from gcproto.packed import Decoder
from gcserver import checks, config
from gcserver.config import Config, Peer
from gcserver.values import Address


def configured(**flags: str) -> Config:
    return config.load(flags={name.replace("__", "."): text for name, text in flags.items()})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """A socket that answers WhoAreYou as a supervisor does."""
    path = tmp_path / "daemon.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            channel: Channel[FromWorker] = Channel(sock, Decoder(FromWorker))
            until = time.monotonic() + 5
            while time.monotonic() < until:
                try:
                    received = channel.receive()
                except ChannelClosed:
                    break
                for message, _ in received:
                    assert isinstance(message, WhoAreYou)
                    channel.send(IAm("a", "tcp://127.0.0.1:7470", 1))
                time.sleep(0.002)
            channel.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield path
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


# ---------------------------------------------------------------------------------------------- addresses
def test_all_that_is_bound() -> None:
    c = configured(node__lanes="2")
    assert [(what, str(address)) for what, _, address in checks.bound_addresses(c)] == [
        ("lane 0", "tcp://127.0.0.1:7470"),
        ("lane 1", "tcp://127.0.0.1:7471"),
        ("the control link", "tcp://127.0.0.1:7472"),
        ("the admin service", "tcp://127.0.0.1:7460"),
        ("metrics", "tcp://127.0.0.1:7461"),
    ]
    assert len(checks.bound_addresses(configured(node__admin="unix:/run/x", node__metrics=""))) == 2


def test_a_port_in_use() -> None:
    port = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        found = checks.port_free("lane 0", "node.listen", Address("127.0.0.1", port))
        assert found.fatal and f"127.0.0.1:{port} for lane 0 is in use" in found.text
        assert "node.listen" in found.fix and "ss -ltnp" in found.fix
        assert checks.port_free("lane 0", "node.listen", Address("0.0.0.0", port)).fatal
    assert checks.port_free("lane 0", "node.listen", Address("127.0.0.1", port)).result == "ok"


def test_an_address_of_another_machine() -> None:
    found = checks.port_free("metrics", "node.metrics", Address("192.0.2.1", 7461))
    assert found.fatal and "no address of this machine" in found.text and "node.metrics" in found.fix


def test_what_peers_are_told() -> None:
    local = configured()
    assert checks.advertised(local, 1).result == "ok"
    for told in ("127.0.1.1", "localhost"):
        c = configured(node__listen="tcp://0.0.0.0:7470", node__advertise=f"tcp://{told}:7470", insecure="true")
        found = checks.advertised(c, 2)
        assert found.fatal and "means itself" in found.text and "node.advertise" in found.fix
    c = configured(node__listen="tcp://0.0.0.0:7470", node__advertise="tcp://192.0.2.1:7470", insecure="true")
    assert checks.advertised(c, 1).result == "ok"


def test_a_hanging_name_service_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        release.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    c = configured(node__listen="tcp://0.0.0.0:7470", node__advertise="tcp://some-host:7470", insecure="true")
    began = time.monotonic()
    found = checks.advertised(c, 0.1)
    release.set()
    assert found.result == "warn" and "did not resolve within 0.1 s" in found.text
    assert time.monotonic() - began < 1


# -------------------------------------------------------------------------------------------------- peers
@pytest.mark.parametrize(
    ("peers", "part"),
    [
        (
            "a=tcp://10.0.0.2:7470",
            "a=tcp://10.0.0.2:7470 has this node's name, but this node is at tcp://127.0.0.1:7470",
        ),
        ("b=tcp://127.0.0.1:7470", "has this node's address, but this node is 'a'"),
    ],
)
def test_names_that_cannot_be(peers: str, part: str) -> None:
    (found,) = checks.peer_names(configured(node__name="a", cluster__peers=peers))
    assert found.fatal and part in found.text and found.fix


def test_one_list_for_all_nodes_is_right() -> None:
    c = configured(node__name="a", cluster__peers="a=tcp://127.0.0.1:7470,b=tcp://127.0.0.1:7480")
    assert checks.peer_names(c) == []


def test_peers_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = Peer("b", Address("127.0.0.1", listening.getsockname()[1]))
        assert checks.peer_reachable(there, 2).result == "ok"
    refused = checks.peer_reachable(there, 2)
    assert refused.result == "warn" and "nothing listens" in refused.text and "start gcserver on b" in refused.fix
    unknown = checks.peer_reachable(Peer("b", Address("no-such-host.invalid", 7470)), 5)
    assert unknown.fatal and ("does not resolve" in unknown.text or "did not answer" in unknown.text)


def test_a_peer_behind_a_full_queue_times_out() -> None:
    """A listener that accepts nobody and whose queue is full drops connections, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        pending = [socket.socket() for _ in range(4)]
        for sock in pending:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        began = time.monotonic()
        found = checks.peer_reachable(Peer("b", Address("127.0.0.1", full.getsockname()[1])), 0.3)
        assert found.fatal and "did not answer within 0.3 s" in found.text and "firewall" in found.fix
        assert time.monotonic() - began < 2
        for sock in pending:
            sock.close()


# ------------------------------------------------------------------------------------------------- socket
def test_a_socket_that_is_served(daemon: Path) -> None:
    assert checks.ask_daemon(daemon, 2) == IAm("a", "tcp://127.0.0.1:7470", 1)
    found = checks.socket_served(daemon, 2)
    assert found.fatal and f"daemon 'a' at tcp://127.0.0.1:7470 already serves {daemon}" in found.text


def test_a_socket_that_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    assert checks.socket_served(path, 1).result == "ok"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert checks.socket_served(path, 1).result == "ok"


def test_something_else_on_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        began = time.monotonic()
        found = checks.socket_served(path, 0.2)
        assert found.fatal and "not an answering daemon" in found.text
        assert time.monotonic() - began < 1


def test_an_admin_socket_that_is_served(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    assert checks.admin_socket_served(path, 1).result == "ok"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        assert checks.admin_socket_served(path, 1).result == "ok", "left behind, nobody listens"
        other.listen()
        found = checks.admin_socket_served(path, 1)
        assert found.fatal and f"unix:{path} for the admin service is served by another process" in found.text


def test_directories(tmp_path: Path) -> None:
    def look(path: Path) -> checks.Check:
        return checks.directory_usable("socket", "node.socket", path)

    assert look(tmp_path).result == look(tmp_path / "new" / "deeper").result == "ok"
    (tmp_path / "file").write_text("")
    assert "no directory" in look(tmp_path / "file" / "x").text
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "by everybody" in look(tmp_path / "open").text
    (tmp_path / "open").chmod(0o1777)
    assert look(tmp_path / "open").result == "ok"
    if os.getuid() == 0:
        os.chown(tmp_path / "open", 12345, -1)
        assert "belongs to uid 12345" in look(tmp_path / "open").text
    else:
        (tmp_path / "open").chmod(0o500)
        assert "cannot be written" in look(tmp_path / "open").text


# ------------------------------------------------------------------------------------------------- memory
def test_shared_memory(tmp_path: Path) -> None:
    c = configured(node__state="/dev/shm/gradcomm-test/x")
    assert checks.mount_of(Path("/dev/shm"))[0] == "/dev/shm"
    found = checks.shared_memory(c, 1 << 50)
    assert found.fatal and "/dev/shm has" in found.text and "1 PiB" not in found.text and "1024 TiB" in found.text
    assert "remount" in found.fix
    assert checks.shared_memory(c).result in ("ok", "warn")
    if checks.mount_of(tmp_path)[1] not in ("tmpfs", "ramfs"):
        on_disk = checks.shared_memory(configured(node__state=str(tmp_path / "s")))
        assert on_disk.result == "warn" and "would be written to it" in on_disk.text


def test_a_full_file_system_keeps_no_daemon_from_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.statvfs(tmp_path)
    full = os.statvfs_result([system[0], 4096, 1 << 20, 0, 0, *system[5:]])
    monkeypatch.setattr(checks.os, "statvfs", lambda _: full)
    c = configured(node__state=str(tmp_path))
    assert checks.shared_memory(c).fatal
    (tmp_path / "jobs").mkdir()
    assert checks.shared_memory(c).fatal
    (tmp_path / "jobs" / "00").mkdir()
    found = checks.shared_memory(c)
    assert found.result == "warn" and "go on, new ones will not fit" in found.text and "remount" in found.fix
    assert checks.shared_memory(c, 1 << 20).fatal  # whoever asks for a model is told about that model


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_has_capability", lambda bit: False)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
        found = checks.locked_memory(1 << 20)
        assert found.result == "warn" and "64 KiB" in found.text and "ulimit -l" in found.fix
        assert checks.locked_memory(1 << 16).result == "ok"
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


# ------------------------------------------------------------------------------------------------ machine
def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon raises its soft limit to the hard one."""
    for limits, result in (((200, 200), "warn"), ((200, 4096), "ok"), ((200, resource.RLIM_INFINITY), "ok")):
        monkeypatch.setattr("gcserver.runtime.shortage.resource.getrlimit", lambda which, limits=limits: limits)
        found = checks.open_files(configured())
        assert found.result == result
    monkeypatch.setattr("gcserver.runtime.shortage.resource.getrlimit", lambda which: (200, 200))
    found = checks.open_files(configured())
    assert "200" in found.text and "ulimit -Hn" in found.fix


def test_cores(tmp_path: Path) -> None:
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    assert checks.cores(None, 1).result in ("ok", "warn")
    nowhere = checks.cores((60000,), 1)
    assert nowhere.fatal and "60000" in nowhere.text and "node.cores" in nowhere.fix
    some = checks.cores((allowed[0], 60000), 1)
    assert some.result == "warn" and "60000" in some.text
    crowded = checks.cores((allowed[0],), 2)
    assert crowded.result == "warn" and "share" in crowded.text


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense", None)])
def test_cpu_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert checks.cpu_quota(tmp_path) == quota
    assert checks.cpu_quota(tmp_path / "none") is None


def test_clock() -> None:
    assert checks.clock().text.startswith("monotonic")
