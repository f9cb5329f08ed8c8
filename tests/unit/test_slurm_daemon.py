"""`deploy/slurm/job_daemon.py` as far as it needs neither Slurm nor root: keys, ports, what is started and ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gcserver import config, keys

SOURCE = Path(__file__).resolve().parents[2] / "deploy/slurm/job_daemon.py"
SECRET = bytes(range(32))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with its folders in a place of the test's."""
    spec = importlib.util.spec_from_file_location("job_daemon", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "job_daemon", module)
    spec.loader.exec_module(module)
    for name in ("RUN", "CACHE", "SHARED_MEMORY"):
        monkeypatch.setattr(module, name, tmp_path / name)
    return module


def test_every_node_derives_the_same_keys_and_no_two_are_alike(daemon: Any) -> None:
    pair = daemon.key_pair(SECRET, "17", "n1")
    assert pair == daemon.key_pair(SECRET, "17", "n1") and pair.name == "n1"
    others = [("17", "n2"), ("18", "n1"), ("171", "n")]
    pairs = [pair, daemon.key_pair(SECRET[::-1], "17", "n1"), *(daemon.key_pair(SECRET, *other) for other in others)]
    assert len({p.public for p in pairs}) == len({p.secret for p in pairs}) == len(pairs)


def test_a_short_secret_is_refused(daemon: Any) -> None:
    with pytest.raises(ValueError, match="has 31 bytes, expected at least 32"):
        daemon.key_pair(SECRET[1:], "17", "n1")


def test_the_files_of_keys_are_those_a_daemon_reads(daemon: Any, tmp_path: Path) -> None:
    daemon.write_keys(tmp_path, SECRET, "17", "n1", ["n1", "n2"])
    assert keys.read_pair(tmp_path / "n1.key") == daemon.key_pair(SECRET, "17", "n1")
    assert keys.exposed(tmp_path / "n1.key") == ""
    assert keys.read_admitted(tmp_path / "peers") == {
        name: daemon.key_pair(SECRET, "17", name).public for name in ("n1", "n2")
    }
    assert not (tmp_path / "n2.key").exists(), "a node has its own key only"


def test_ports_in_a_row(daemon: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert daemon.free_ports("127.0.0.1", port - 1, 3) > port
        assert daemon.free_ports("127.0.0.1", port, 1) > port
    with pytest.raises(OSError, match="no 3 free ports in a row from 65534"):
        daemon.free_ports("127.0.0.1", 65534, 3)


@pytest.mark.parametrize("secured", [True, False])
def test_the_daemon_accepts_what_it_is_started_with(daemon: Any, tmp_path: Path, secured: bool) -> None:
    base, secret = tmp_path / "base.toml", tmp_path / "secret"
    base.write_text("node.lanes = 2\n")
    secret.write_bytes(SECRET)
    where = daemon.Place("17", "n1")
    where.folder.mkdir(parents=True)
    site = {"GRADCOMM_CONFIG": str(base), "GRADCOMM_ADDRESS": "127.0.0.1", "GRADCOMM_FIRST_PORT": "23456"}
    argv = daemon.command(where, site | {"GRADCOMM_SECRET": str(secret) if secured else ""}, ["n1", "n2"])
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in argv[2:])
    settings = config.load(Path(flags.pop("config")), flags, {})
    assert (settings.node.name, settings.node.lanes, settings.insecure) == ("n1", 2, not secured)
    assert settings.node.listen.port >= 23456 and settings.node.socket == where.folder / "daemon.sock"
    assert (settings.security.key == where.folder / "n1.key") is secured


def test_the_end_removes_what_is_left_and_ends_no_stranger(daemon: Any, tmp_path: Path) -> None:
    """The number of a daemon that died may be another process's by then."""
    where = daemon.Place("17", "n1")
    where.folder.mkdir(parents=True)
    where.state.mkdir(parents=True)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen([*sleep, f"--node.socket={where.folder}/daemon.sock"], start_new_session=True)
    stranger = subprocess.Popen([*sleep, "--node.socket=/elsewhere/daemon.sock"], start_new_session=True)
    environ = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"}
    try:
        where.pid.write_text(str(stranger.pid))
        daemon.stop(environ)
        assert stranger.poll() is None
        assert not where.folder.exists() and not where.state.exists() and not where.pid.exists()
        where.folder.mkdir()
        where.pid.write_text(str(ours.pid))
        daemon.stop(environ)
        assert ours.wait(10) == -signal.SIGTERM
        daemon.stop(environ)
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()


def test_a_daemon_that_dies_is_started_again_until_it_ends_by_itself(daemon: Any, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    script = f"import os; open({str(lives)!r}, 'a').write('x'); n = os.path.getsize({str(lives)!r}); "
    dies = "os.kill(os.getpid(), 9) if n < 3 else exit(0)"
    assert daemon.keep([sys.executable, "-c", script + dies]) == 0 and lives.read_text() == "xxx"
    for status in (2, 1):
        lives.unlink()
        assert daemon.keep([sys.executable, "-c", f"{script}exit({status})"]) == status
        assert lives.read_text() == "x", "it would give up again"


def test_its_keeper_ends_with_it_when_both_are_told_to(daemon: Any, tmp_path: Path) -> None:
    where = daemon.Place("17", "n1")
    said = tmp_path / "said"
    script = f"import time; open({str(said)!r}, 'w'); time.sleep(60)"
    argv = [sys.executable, str(SOURCE), "keep", sys.executable, "-c", script]
    keeper = subprocess.Popen([*argv, f"--node.socket={where.folder}/daemon.sock"], start_new_session=True)
    try:
        while not said.exists():
            assert keeper.poll() is None
        where.pid.parent.mkdir(parents=True)
        where.pid.write_text(str(keeper.pid))
        daemon.stop({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"})
        assert keeper.wait(10) == 256 - signal.SIGTERM, "as the daemon ended, which was not started again"
        with pytest.raises(ProcessLookupError):
            os.killpg(keeper.pid, 0)
    finally:
        if keeper.poll() is None:
            os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()
