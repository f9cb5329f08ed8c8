"""A keeper and what it keeps: restarted when killed, ended when nobody uses it, given up when it is of no use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gcserver import private_folder
from gcserver.private_folder import Door, Folder

ROOT = Path(__file__).resolve().parents[2]
KEEPER = """
import sys
from pathlib import Path
from gcserver.keeper import Keeper
from gcserver.private_folder import Door
folder, alive, hold, link, *command = sys.argv[1:]
sys.exit(Keeper(Path(folder), int(alive), int(hold), Door(Path(link)) if link else None, command).run())
"""
#: A daemon that notes its lives, and how it was told to end.
DAEMON = """
import os, signal, sys, time
from pathlib import Path
Path("state").mkdir(exist_ok=True)
def end(*_):
    with open("../ended", "a") as file: file.write("drained ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open("lives", "a") as file: file.write(f"{os.getpid()} ")
while True: time.sleep(60)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(private_folder, "SHARED", tmp_path)
    return private_folder.make()


def _keep(made: Folder, script: str, door: str = "") -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", KEEPER, str(made.path), str(made.alive), str(made.hold), door]
    try:
        return subprocess.Popen(
            [*argv, sys.executable, "-c", script], cwd=made.path, pass_fds=(made.alive, made.hold),
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        os.close(made.alive)


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _lives(made: Folder) -> list[int]:
    path = made.path / "lives"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_a_killed_daemon_is_started_again_and_an_unused_one_is_drained(made: Folder) -> None:
    keeper = _keep(made, DAEMON)
    _wait(lambda: len(_lives(made)) == 1)
    os.kill(_lives(made)[0], signal.SIGKILL)
    _wait(lambda: len(_lives(made)) == 2)
    os.close(made.hold)
    assert keeper.wait(30) == 0
    assert (made.path.parent / "ended").read_text() == "drained "
    assert not made.path.exists()


def test_a_daemon_whose_keeper_is_killed_drains_by_itself(made: Folder) -> None:
    keeper = _keep(made, DAEMON)
    _wait(lambda: len(_lives(made)) == 1)
    keeper.kill()
    keeper.wait()
    _wait((made.path.parent / "ended").exists)
    _wait(lambda: not Path(f"/proc/{_lives(made)[0]}").exists())
    private_folder.make()
    assert not made.path.exists(), "the next one clears up"


def test_a_keeper_that_is_told_to_end_drains(made: Folder) -> None:
    keeper = _keep(made, DAEMON)
    _wait(lambda: len(_lives(made)) == 1)
    keeper.terminate()
    assert keeper.wait(30) == 0
    assert (made.path.parent / "ended").exists() and not made.path.exists()


@pytest.mark.parametrize(
    ("script", "status", "lives"),
    [
        ("import sys; open('../n', 'a').write('x'); sys.exit(2)", 2, 1),
        ("import os; os.makedirs('state', exist_ok=True); open('../n', 'a').write('x'); os.abort()", 134, 3),
        ("open('../n', 'a').write('x')", 0, 1),
    ],
    ids=["that cannot start", "that keeps dying", "that an operator drained"],
)
def test_a_daemon_is_given_up(made: Folder, script: str, status: int, lives: int) -> None:
    assert _keep(made, script).wait(30) == status
    assert len((made.path.parent / "n").read_text()) == lives
    assert not made.path.exists()


def test_the_door_of_an_unused_daemon_is_closed_before_it_ends(made: Folder) -> None:
    door = Door.named("job")
    keeper = _keep(made, DAEMON, str(door.link))
    _wait(lambda: len(_lives(made)) == 1)
    with private_folder.locked(door.lock):
        door.open(made.path)
        found = door.enter()
    assert found is not None
    os.close(made.hold)
    time.sleep(0.1)
    assert keeper.poll() is None, "somebody came in by the door"
    os.close(found[1])
    assert keeper.wait(30) == 0
    assert not door.link.is_symlink()
