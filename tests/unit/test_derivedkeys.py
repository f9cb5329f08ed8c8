"""Keys from one secret: the same on every node, different for everything else, in files that a daemon reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver import derivedkeys, keys
from gcserver.derivedkeys import MIN_SECRET_BYTES, SecretError

SECRET = bytes(range(32))
TEXT = "0123456789abcdef" * 4


def test_every_node_derives_the_same_keys_and_no_two_are_alike() -> None:
    pair = derivedkeys.pair(SECRET, "job 17", "n1")
    assert pair == derivedkeys.pair(SECRET, "job 17", "n1") and pair.name == "n1"
    others = [("job 17", "n2"), ("job 18", "n1"), ("job 1", "7n1")]
    pairs = [pair, derivedkeys.pair(SECRET[::-1], "job 17", "n1"), *(derivedkeys.pair(SECRET, *o) for o in others)]
    assert len({p.public for p in pairs}) == len({p.secret for p in pairs}) == len(pairs)


def test_keys_stay_what_they_are() -> None:
    """Nodes of one job may run different releases; the purpose is the one of deploy/slurm."""
    pair = derivedkeys.pair(SECRET, "gradcomm slurm job key\x0017", "n1")
    assert pair.public == b"Y^%+2[aP.XiTCU5&5g/GE/w#I^R>Y7nl:@:]]kbB"


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(SecretError, match="has 31 bytes, expected at least 32"):
        derivedkeys.pair(SECRET[1:], "job 17", "n1")
    with pytest.raises(SecretError, match=r"GC_JOB_SECRET has 7 bytes, expected at least 32.*openssl rand") as raised:
        derivedkeys.of_environment({"GC_JOB_SECRET": "letmein"})
    assert "letmein" not in str(raised.value)


def test_the_secret_in_the_environment() -> None:
    assert derivedkeys.of_environment({"GC_JOB_SECRET": TEXT}) == TEXT.encode()
    assert len(TEXT) >= MIN_SECRET_BYTES
    assert derivedkeys.of_environment({}) is None and derivedkeys.of_environment({"GC_JOB_SECRET": ""}) is None
    environ = {"GC_JOB_SECRET": "short", "HOME": "/"}
    assert derivedkeys.take(environ) == b"short" and environ == {"HOME": "/"}
    assert derivedkeys.take(environ) == b""


def test_the_files_are_those_a_daemon_reads(tmp_path: Path) -> None:
    private, listed = derivedkeys.write(tmp_path, SECRET, "job 17", "n1", ["n2", "n1"])
    assert keys.read_pair(private) == derivedkeys.pair(SECRET, "job 17", "n1") and keys.exposed(private) == ""
    assert keys.read_admitted(listed) == {
        name: derivedkeys.pair(SECRET, "job 17", name).public for name in ("n1", "n2")
    }
    assert not (tmp_path / "n2.key").exists(), "a node has its own key only"
    assert SECRET not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_a_list_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, listed = derivedkeys.write(tmp_path, SECRET, "job 17", "n1", [])
    before = listed.read_text()

    def killed(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        derivedkeys.write_list(listed, {"n2": b"x" * 40})
    assert listed.read_text() == before
