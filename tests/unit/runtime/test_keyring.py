"""The keys of a running daemon: the list read again, and who hears of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver import derivedkeys, keys
from gcserver.config import SecurityConfig
from gcserver.core.control_events import PeerExpelled
from gcserver.keys import KeyFileError
from gcserver.runtime.keyring import open_keyring, unwelcome
from tests.unit.key_pairs import fixed_pair

A, B, C = (fixed_pair(name) for name in "abc")


class Supervisor:
    """What a keyring uses of one."""

    def __init__(self) -> None:
        self.admitted: list[Any] = []
        self.told: list[Any] = []
        self.counted: list[str] = []
        self.peers = SimpleNamespace(transport=SimpleNamespace(admit=self.admitted.append))
        self.lanes = SimpleNamespace(admit=self.told.append)
        self.count = self.counted.append
        self.node = "a"
        self.machine = SimpleNamespace(jobs={})
        self.fed: list[Any] = []
        self.feed = self.fed.append

    def run_job(self, *nodes: str, ended: bool = False) -> None:
        """One more job of these nodes."""
        record = SimpleNamespace(members=[SimpleNamespace(node=node) for node in nodes])
        self.machine.jobs[len(self.machine.jobs)] = SimpleNamespace(record=record, ended=ended or None)


def lines(*pairs: keys.KeyPair) -> str:
    return "".join(keys.line(pair.name, pair.public) + "\n" for pair in pairs)


def test_without_keys_there_is_no_keyring() -> None:
    assert open_keyring(Supervisor(), "a", SecurityConfig(None, None)) is None  # type: ignore[arg-type]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    secret, public = keys.write(A, tmp_path)
    for security in (SecurityConfig(public, public), SecurityConfig(secret, secret)):
        with pytest.raises(KeyFileError):
            open_keyring(Supervisor(), "a", security)  # type: ignore[arg-type]


def test_the_key_of_another_node_is_refused(tmp_path: Path) -> None:
    secret, public = keys.write(A, tmp_path)
    with pytest.raises(KeyFileError, match="key of node 'a', this is 'z'"):
        open_keyring(Supervisor(), "z", SecurityConfig(secret, public))  # type: ignore[arg-type]


def test_a_new_list_goes_to_every_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    supervisor, path = Supervisor(), tmp_path / "peers"
    secret, _ = keys.write(A, tmp_path)
    path.write_text(lines(A, B))
    ring = open_keyring(supervisor, "a", SecurityConfig(secret, path))  # type: ignore[arg-type]
    assert ring is not None and ring.pair == A and ring.admitted == {"a": A.public, "b": B.public}
    ring.tick()
    assert not supervisor.admitted and not supervisor.told
    new = keys.generate("a")
    path.write_text(lines(new, C))
    for _ in range(keys.LOOKS_TO_LOSE):
        ring.tick()
    now = {"a": new.public, "c": C.public}
    assert supervisor.admitted == [now] and supervisor.told == [now] and ring.admitted == now
    for said in (": admitted: c", "no longer admitted: b", "another key: a"):
        assert said in caplog.text


SECRET = bytes(range(40, 80))


def _derived(name: str) -> keys.KeyPair:
    return derivedkeys.pair(SECRET, derivedkeys.PRIVATE, name)


def published(*pairs: keys.KeyPair) -> tuple[tuple[str, str], ...]:
    return tuple((pair.name, pair.public.decode()) for pair in pairs)


def test_with_a_jobs_secret_nodes_are_admitted_by_the_keys_that_it_gives_them(tmp_path: Path) -> None:
    """When a worker names them; a daemon that is started again finds them on the list."""
    supervisor = Supervisor()
    security = SecurityConfig(*derivedkeys.write(tmp_path, SECRET, derivedkeys.PRIVATE, "a", []))
    ring = open_keyring(supervisor, "a", security, SECRET)  # type: ignore[arg-type]
    b, c = _derived("b"), keys.KeyPair("c", C.public, C.secret)
    assert ring is not None and unwelcome(ring, published(b)) == ""
    assert ring.admitted == {"a": _derived("a").public, "b": b.public}
    assert supervisor.admitted == [ring.admitted] and supervisor.told == [ring.admitted]
    assert unwelcome(ring, published(b)) == "" and len(supervisor.told) == 1, "once"

    assert "c has another key than this job's secret gives it (GC_JOB_SECRET)" in unwelcome(ring, published(b, c))
    assert "runs without keys, and this node with" in unwelcome(ring, (("d", ""),))
    assert "another key" in unwelcome(ring, published(keys.KeyPair("b", C.public, b""))), "a name keeps its key"
    assert "another key" in unwelcome(ring, (("no/name", b.public.decode()),))
    assert ring.admitted.keys() == {"a", "b"} == keys.read_admitted(tmp_path / "peers").keys()

    again = open_keyring(Supervisor(), "a", security, SECRET)  # type: ignore[arg-type]
    assert again is not None and again.admitted == ring.admitted


@pytest.mark.parametrize("secret", [b"", b"short", bytes(32)])
def test_a_list_that_does_not_come_from_the_secret_is_its_operators(tmp_path: Path, secret: bytes) -> None:
    private, _ = keys.write(A, tmp_path)
    listed = tmp_path / "peers"
    listed.write_text(lines(A))
    ring = open_keyring(Supervisor(), "a", SecurityConfig(private, listed), secret)  # type: ignore[arg-type]
    assert ring is not None and not ring.derived
    assert "not in this node's security.peers" in unwelcome(ring, published(_derived("b")))
    assert listed.read_text() == lines(A)


def test_a_list_that_cannot_be_written_admits_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    security = SecurityConfig(*derivedkeys.write(tmp_path, SECRET, derivedkeys.PRIVATE, "a", []))
    ring = open_keyring(Supervisor(), "a", security, SECRET)  # type: ignore[arg-type]
    assert ring is not None

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(derivedkeys, "write_list", full)
    assert "b" in unwelcome(ring, published(_derived("b"))) and ring.admitted.keys() == {"a"}


def test_jobs_lose_whoever_is_not_on_the_list(tmp_path: Path) -> None:
    """When the list changed; also those taken up again after the change."""
    supervisor, path = Supervisor(), tmp_path / "peers"
    secret, _ = keys.write(A, tmp_path)
    path.write_text(lines(B, C))
    ring = open_keyring(supervisor, "a", SecurityConfig(secret, path))  # type: ignore[arg-type]
    assert ring is not None
    supervisor.run_job("a", "b", "c")
    supervisor.run_job("a", "d", ended=True)
    ring.tick()
    assert supervisor.fed == [], "all are admitted; this node need not be on its own list; an ended job has lost nobody"
    new = keys.generate("b")
    path.write_text(lines(new))
    for _ in range(keys.LOOKS_TO_LOSE):
        assert supervisor.fed == []
        ring.tick()
    assert supervisor.fed == [PeerExpelled("c")], "another key is not none: its owner comes back with that"
    assert supervisor.admitted == [{"b": new.public}], "told before, so that nothing more is sent"
    supervisor.run_job("a", "e")
    ring.tick()
    assert supervisor.fed[1:] == [PeerExpelled("c"), PeerExpelled("e")]


def test_a_list_that_went_bad_is_counted_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, path = Supervisor(), tmp_path / "peers"
    secret, _ = keys.write(A, tmp_path)
    path.write_text(lines(A, B))
    ring = open_keyring(supervisor, "a", SecurityConfig(secret, path))  # type: ignore[arg-type]
    assert ring is not None
    path.write_text("rubbish\n")
    for _ in range(4):
        ring.tick()
    assert supervisor.counted == ["key_lists_unusable"] and not supervisor.admitted and not supervisor.told
    assert ring.admitted == {"a": A.public, "b": B.public} and "stay admitted" in caplog.text


def test_who_asks_need_not_wait_for_the_list_to_be_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, path = Supervisor(), tmp_path / "peers"
    secret, _ = keys.write(A, tmp_path)
    path.write_text(lines(A, B))
    ring = open_keyring(supervisor, "a", SecurityConfig(secret, path))  # type: ignore[arg-type]
    assert ring is not None
    supervisor.run_job("a", "b")
    path.write_text(lines(A, C))
    ring.reload()
    assert supervisor.admitted == [{"a": A.public, "c": C.public}] and supervisor.fed == [PeerExpelled("b")]
    ring.reload()
    assert len(supervisor.admitted) == 1, "it has not changed again"
    path.write_text("rubbish\n")
    for _ in range(2):
        ring.reload()
    assert supervisor.counted == ["key_lists_unusable"] * 2, "who asks is told, each time"
    assert caplog.text.count("stay admitted") == 2
