"""`deploy/slurm/job_daemon.py` as far as it needs neither Slurm nor root: keys, ports, what is started and ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

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


def test_the_files_of_keys_are_those_a_daemon_reads(daemon: Any, tmp_path: Path) -> None:
    """Of the job: daemons of another one are not admitted."""
    for job in ("17", "18"):
        daemon.write_keys(tmp_path / job, SECRET, job, "n1", ["n1", "n2"])
    assert keys.read_pair(tmp_path / "17" / "n1.key").name == "n1"
    one, other = (keys.read_admitted(tmp_path / job / "peers") for job in ("17", "18"))
    assert one.keys() == other.keys() == {"n1", "n2"} and not set(one.values()) & set(other.values())


def test_ports_in_a_row(daemon: Any) -> None:
    daemon.RUN.mkdir()
    where = daemon.Place("17", "n1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert daemon.choose_ports(where, "127.0.0.1", port - 1, 3) > port
        assert daemon.choose_ports(where, "127.0.0.1", port, 1) > port
    with pytest.raises(OSError, match="no 3 free ports in a row from 65534"):
        daemon.choose_ports(where, "127.0.0.1", 65534, 3)


def test_jobs_that_begin_at_once_get_ports_of_their_own(daemon: Any) -> None:
    """Their daemons have bound nothing yet."""
    daemon.RUN.mkdir()
    (daemon.RUN / "16.n1.ports").write_text("")
    first, second = daemon.Place("17", "n1"), daemon.Place("18", "n1")
    port = daemon.choose_ports(first, "127.0.0.1", 23_456, 2)
    assert daemon.choose_ports(second, "127.0.0.1", 23_456, 2) >= port + 2
    daemon.stop({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"})
    assert daemon.choose_ports(second, "127.0.0.1", port, 2) == port, "one that is over gives them back"


@pytest.mark.parametrize("secured", [True, False])
def test_the_daemon_accepts_what_it_is_started_with(daemon: Any, tmp_path: Path, secured: bool) -> None:
    base, secret = tmp_path / "base.toml", tmp_path / "secret"
    secret.write_bytes(SECRET)
    where = daemon.Place("17", "n1")
    where.folder.mkdir(parents=True)
    base.write_text("node.lanes = 2\nlog.level = 'warning'\n")
    site = {"GRADCOMM_CONFIG": str(base), "GRADCOMM_ADDRESS": "127.0.0.1", "GRADCOMM_FIRST_PORT": "23456"}
    argv = daemon.command(where, site | {"GRADCOMM_SECRET": str(secret) if secured else ""}, ["n1", "n2"])
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in argv[2:])
    settings = config.load(Path(flags.pop("config")), flags, {})
    assert (settings.node.name, settings.node.lanes, settings.insecure) == ("n1", 2, not secured)
    assert settings.node.listen.port >= 23456 and settings.node.socket == where.folder / "daemon.sock"
    assert settings.log.level == "info", "or it would not say that it is ready"
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


def test_one_that_keeps_dying_is_given_up(daemon: Any, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    script = f"import os; open({str(lives)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    assert daemon.keep([sys.executable, "-c", script]) == -signal.SIGKILL and lives.read_text() == "xxx"


def test_a_keeper_that_is_told_to_end_between_two_lives_ends(tmp_path: Path) -> None:
    """The signal finds no daemon, and the next one must not live on."""
    script = (
        "import os, subprocess, sys, time\n"
        "if os.path.exists(sys.argv[1]): time.sleep(60)\n"
        "open(sys.argv[1], 'w')\n"
        "subprocess.Popen(['sh', '-c', f'sleep 0.1; kill -TERM -{os.getpgrp()}'])\n"
        "os.kill(os.getpid(), 9)"
    )
    argv = [sys.executable, str(SOURCE), "keep", sys.executable, "-c", script, str(tmp_path / "first")]
    keeper = subprocess.Popen(argv, start_new_session=True)
    try:
        assert keeper.wait(30) == 256 - signal.SIGTERM
    finally:
        if keeper.poll() is None:
            os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()


def test_a_group_that_ends_by_itself_is_no_error(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = daemon.Place("17", "n1")
    where.folder.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    where.pid.write_text(str(gone.pid))
    seen = iter([True])
    monkeypatch.setattr(daemon, "_lives", lambda group, where: next(seen, False))
    daemon.stop({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"})
    assert not where.folder.exists() and not where.pid.exists()


@pytest.fixture
def started(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """A prolog in which the daemon is ready at once, or what ``instead`` does; the commands of the daemons."""

    def prolog(instead: Callable[[], None] | None = None, **settings: str) -> list[list[str]]:
        commands = []

        class Process:
            pid = 1

            def __init__(self, argv: list[str], *, stdout: IO[str], **options: Any) -> None:
                commands.append(argv)
                print("ready: node n1" if instead is None else "starting", file=stdout, flush=True)
                self._polled = 0
                if instead is not None:
                    instead()

            def poll(self) -> int | None:
                self._polled += 1
                return None if instead is None or self._polled < 3 else 1

        monkeypatch.setattr(daemon.subprocess, "Popen", Process)
        site = {"GRADCOMM_NODES": "n1 n2", "GRADCOMM_ADDRESS": "127.0.0.1", "SLURM_JOB_UID": str(os.getuid())}
        daemon.SHARED_MEMORY.mkdir(exist_ok=True)
        daemon.start({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1", **site, **settings})
        return commands

    return prolog


def test_what_others_put_in_its_place_is_removed(
    daemon: Any, started: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """Everybody may write where memory lies, and numbers of jobs can be guessed."""
    where = daemon.Place("17", "n1")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    where.state.parent.mkdir()
    where.state.symlink_to(kept)
    where.folder.mkdir(parents=True)
    where.log.symlink_to(kept / "file")
    assert len(started()) == 1
    for folder in (where.state, where.folder):
        assert stat.S_ISDIR(folder.lstat().st_mode) and stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert (kept / "file").read_text() == "" and not where.log.is_symlink()
    (where.state / "of").mkdir()
    started()
    assert not list(where.state.iterdir())


def test_what_cannot_be_removed_is_not_used(
    daemon: Any, started: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A user that goes on writing there could otherwise lead root's writing elsewhere."""
    where = daemon.Place("17", "n1")
    where.folder.mkdir(parents=True)
    where.log.symlink_to(daemon.RUN / "elsewhere")
    monkeypatch.setattr(daemon.shutil, "rmtree", lambda folder, **options: None)
    assert started() == []
    assert "no daemon was started" in capsys.readouterr().err and not (daemon.RUN / "elsewhere").exists()


def test_a_log_that_is_a_pipe_by_now_holds_up_nobody(daemon: Any, started: Callable[..., list[list[str]]]) -> None:
    where = daemon.Place("17", "n1")

    def pipe() -> None:
        where.log.unlink()
        os.mkfifo(where.log)

    assert len(started(pipe)) == 1


def test_a_configuration_that_is_wrong_is_in_the_log(
    daemon: Any, started: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    base = tmp_path / "base.toml"
    base.write_text("node.lane = 2\n")
    assert started(GRADCOMM_CONFIG=str(base)) == []
    assert "no daemon was started: node.lane (" in daemon.Place("17", "n1").log.read_text()


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
def test_without_settings_the_node_stays_in_service(script: str, tmp_path: Path) -> None:
    missing = tmp_path / "slurm.conf"
    run = subprocess.run(
        ["sh", SOURCE.with_name(script)],
        env={"GRADCOMM_CONF": str(missing)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (run.returncode, run.stdout) == (0, "") and f"cannot read {missing}" in run.stderr


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
