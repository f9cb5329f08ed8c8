"""Whose process is at the other end of a loopback connection, from the system's own table."""

from __future__ import annotations

import datetime as dt
import os
import socket
from pathlib import Path

import pytest

from gcserver.admin import callers
from gcserver.admin.callers import Caller, uids_of


@pytest.mark.parametrize(("family", "host", "peer"), [
    (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:[::1]:{}"),
])  # fmt: skip
def test_a_real_connection(family: socket.AddressFamily, host: str, peer: str) -> None:
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        assert family == socket.AF_INET6, "a machine without IPv6"
        return
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        there = peer.format(client.getsockname()[1])
        assert uids_of(there) == {os.getuid()}
        assert Caller("", "operator", there).who == f"uid {os.getuid()}"


def test_a_certificate_says_who_it_is() -> None:
    until = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    assert Caller("alice", "operator", "ipv4:127.0.0.1:1", until).who == "alice"
    assert Caller("", None, "ipv4:127.0.0.1:1", until).who == "ipv4:127.0.0.1:1", "not whose process it came from"


def test_another_users_connection(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1D24 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0\n"
        "   1: 0100007F:9C40 0100007F:1D24 01 00000000:00000000 00:00000000 00000000  1234        0 2 1 0\n"
        "   2: short\n"
    )
    none = tmp_path / "none"
    assert uids_of("ipv4:127.0.0.1:40000", {4: table, 6: none}) == {1234}
    assert uids_of("ipv4:127.0.0.1:40001", {4: table, 6: none}) == set()
    assert uids_of("ipv4:127.0.0.1:40000", {4: none, 6: none}) == set()
    # The same port, of a connection that is over and of another user's to somewhere else.
    line = "   3: 0100007F:9C40 0100007F:{} {} 00000000:00000000 00:00000000 00000000  {}        0 2 1 0\n"
    known = table.read_text()
    table.write_text(known.replace("   1:", line.format("1D25", "06", 0) + "   1:"))
    assert uids_of("ipv4:127.0.0.1:40000", {4: table, 6: none}) == {1234}
    table.write_text(known + line.format("1D26", "01", 77))
    assert uids_of("ipv4:127.0.0.1:40000", {4: table, 6: none}) == {77, 1234}
    # of a socket of IPv6 that is connected to an IPv4 address
    table.write_text(f"head\n 0: {'0' * 16}FFFF00000100007F:9C40 x 01 0:0 00:0 0 77 0 2 1 0\n")
    assert uids_of("ipv4:127.0.0.1:40000", {4: none, 6: table}) == {77}


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.1:40000", "unix:/run/admin.sock", "unix:", "ipv4:nonsense:1", ""])
def test_others_are_known_by_their_address(peer: str) -> None:
    assert uids_of(peer) == set() and Caller("", "operator", peer).who == peer


@pytest.mark.parametrize(("uids", "who"), [((1000,), "uid 1000"), ((1000, 0), "uid 0 or uid 1000"), ((), "unix:")])
def test_a_caller_over_a_unix_socket_is_one_of_those_connected(
    uids: tuple[int, ...], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "uids_at", lambda path: frozenset(uids if path == "/run/admin.sock" else (7,)))
    assert Caller("", "operator", "unix:", path="/run/admin.sock").who == who
