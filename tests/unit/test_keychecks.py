"""What the doctor says about keys: unusable, exposed, not fitting together."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver import config, doctor, keychecks, keys
from gcserver.checks import Check
from gcserver.config import Config
from tests.unit.key_pairs import fixed_pair

A, B = fixed_pair("a"), fixed_pair("b")


def configured(folder: Path, listed: str, **more: str) -> Config:
    """Node a with its key and a list of ``listed`` lines."""
    secret = folder / "a.key"
    if not secret.exists():
        keys.write(A, folder)
    (folder / "peers").write_text(listed)
    flags = {"node.name": "a", "security.key": str(secret), "security.peers": str(folder / "peers"), **more}
    return config.load(flags=flags)


def lines(*pairs: keys.KeyPair) -> str:
    return "".join(keys.line(pair.name, pair.public) + "\n" for pair in pairs)


def wrong(c: Config) -> Check:
    (found,) = [check for check in keychecks.keys_of(c) if check.result != "ok"]
    assert found.fix
    return found


def test_keys_that_fit_are_fine(tmp_path: Path) -> None:
    c = configured(tmp_path, lines(A, B), **{"cluster.peers": "a=tcp://h:1,b=tcp://h:9"})
    (found,) = keychecks.keys_of(c)
    assert found.result == "ok" and "2 nodes" in found.text


def test_no_keys() -> None:
    assert keychecks.keys_of(config.load())[0].result == "ok"
    c = config.load(flags={"node.listen": "tcp://0.0.0.0:7470", "insecure": "true"})
    assert wrong(c).result == "warn" and "keygen" in wrong(c).fix


@pytest.mark.parametrize(
    ("listed", "result", "part"),
    [
        ("rubbish\n", "fail", ":1: expected"),
        (lines(B), "warn", "a is not in"),
        (lines(B, fixed_pair("a", "new")), "fail", "another key for a"),
    ],
)
def test_a_list_that_does_not_fit(tmp_path: Path, listed: str, result: str, part: str) -> None:
    found = wrong(configured(tmp_path, listed))
    assert (found.result, part in found.text) == (result, True), found


def test_a_key_of_another_node(tmp_path: Path) -> None:
    found = wrong(configured(tmp_path, lines(A), **{"node.name": "z"}))
    assert found.fatal and "is of node 'a', this is 'z'" in found.text


def test_a_peer_without_a_key(tmp_path: Path) -> None:
    found = wrong(configured(tmp_path, lines(A), **{"cluster.peers": "b=tcp://h:9"}))
    assert found.result == "warn" and "b of cluster.peers is not in" in found.text


def test_files_that_others_can_read_or_write(tmp_path: Path) -> None:
    c = configured(tmp_path, lines(A))
    (tmp_path / "a.key").chmod(0o644)
    assert wrong(c).fatal and "0644" in wrong(c).text and "chmod 600" in wrong(c).fix
    (tmp_path / "a.key").chmod(0o600)
    (tmp_path / "peers").chmod(0o666)
    assert wrong(c).fatal and "everybody" in wrong(c).text


def test_a_daemon_does_not_start_with_a_key_that_others_can_read(tmp_path: Path) -> None:
    c = configured(
        tmp_path, lines(A), **{"node.socket": str(tmp_path / "d.sock"), "node.admin": "", "node.metrics": ""}
    )
    assert not [p for p in doctor.preflight(c) if p.name == "keys"]
    (tmp_path / "a.key").chmod(0o604)
    assert [p.fatal for p in doctor.preflight(c) if p.name == "keys"] == [True]
