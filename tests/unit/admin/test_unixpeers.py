"""Who is connected to a Unix socket, by the kernel's table; other users are in tests/system/test_uids.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gcserver.admin import unixpeers
from gcserver.admin.unixpeers import uids_at


def bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_those_connected_count_and_no_others(tmp_path: Path) -> None:
    with bound(tmp_path / "a") as here, bound(tmp_path / "b"):
        assert uids_at(str(tmp_path / "a")) == frozenset()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "a"))
            accepted, _ = here.accept()
            assert uids_at(str(tmp_path / "a")) == {os.getuid()}
            assert uids_at(str(tmp_path / "b")) == frozenset(), "nobody is connected there"
            accepted.close()
        assert uids_at(str(tmp_path / "a")) == frozenset(), "who has left is not connected"


def test_a_table_longer_than_one_answer(tmp_path: Path) -> None:
    """The kernel sends what does not fit in further messages."""
    held: list[socket.socket] = []
    with bound(tmp_path / "a") as listener:
        for _ in range(300):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(tmp_path / "a"))
            held += [client, listener.accept()[0]]
        names = [name for name, _, _ in unixpeers._connected().values()]
        assert names.count(os.fsencode(tmp_path / "a")) == 300
        assert uids_at(str(tmp_path / "a")) == {os.getuid()}
    for end in held:
        end.close()


def test_a_kernel_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> socket.socket:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(unixpeers.socket, "socket", refuse)
    assert uids_at("/run/admin.sock") == frozenset()


def test_an_answer_that_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __enter__(self) -> Kernel:
            return self

        def __exit__(self, *args: object) -> None:
            return None

        def settimeout(self, seconds: float) -> None:
            assert seconds > 0

        def send(self, data: bytes) -> None:
            assert len(data) == 40

        def recv(self, size: int) -> bytes:
            return bytes.fromhex("24000000 0200 0000 01000000 00000000 feffffff") + bytes(16)

    monkeypatch.setattr(unixpeers.socket, "socket", lambda *args: Kernel())
    with pytest.raises(FileNotFoundError):
        unixpeers._connected()
    assert uids_at("/run/admin.sock") == frozenset()
