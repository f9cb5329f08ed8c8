"""Folders of private daemons: whose they are, who needs them, how they are found, and when they go."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gcserver import private_folder
from gcserver.private_folder import Door


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "SHARED", tmp_path)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_is_its_users_alone() -> None:
    made = private_folder.make()
    assert _mode(made.path) == _mode(made.path.parent) == 0o700
    assert _mode(made.path / "users") == 0o600


def test_what_nobody_needs_any_more_goes_when_the_next_one_is_made() -> None:
    dead, living = private_folder.make(), private_folder.make()
    os.close(dead.alive)
    half = living.path.parent / "job-half"
    half.mkdir()
    made = private_folder.make()
    assert {p.name for p in made.path.parent.glob("job-*")} == {living.path.name, made.path.name}


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with private_folder.locked(path):
        path.unlink()
        with private_folder.locked(path):
            assert path.exists()


@pytest.mark.parametrize(
    ("allowed", "lanes", "cores"), [(8, 1, (7,)), (8, 3, (5, 6, 7)), (7, 3, ()), (3, 1, ()), (4, 1, (3,))]
)
def test_cores_are_taken_only_where_enough_are_left(allowed: int, lanes: int, cores: tuple[int, ...]) -> None:
    made = private_folder.make()
    assert private_folder.reserve_cores(made.path, lanes, set(range(allowed))) == cores


def test_two_daemons_have_different_cores_until_one_is_gone() -> None:
    first, second, third = (private_folder.make() for _ in range(3))
    assert private_folder.reserve_cores(first.path, 2, set(range(8))) == (6, 7)
    assert private_folder.reserve_cores(second.path, 2, set(range(8))) == (4, 5)
    os.close(first.alive)
    private_folder.make()
    assert private_folder.reserve_cores(third.path, 2, set(range(8))) == (6, 7)


def test_a_daemon_is_used_until_the_last_hold_is_closed() -> None:
    made = private_folder.make()
    users = private_folder.watch(made.path)
    other = private_folder.join(made.path)
    os.close(made.hold)
    assert not private_folder.nobody_uses(users)
    os.close(other)
    assert private_folder.nobody_uses(users)


def test_a_door_leads_to_a_daemon_whose_keeper_listens_and_to_no_other() -> None:
    made, door = private_folder.make(), Door.named("job 7")
    assert door == Door.named("job 7") != Door.named("job 8")
    assert door.enter() is None
    users = private_folder.watch(made.path)
    door.open(made.path)
    os.close(made.hold)
    found = door.enter()
    assert found is not None and found[0] == made.path
    assert not door.close(made.path, users), "somebody has come in"
    os.close(found[1])
    assert door.close(made.path, users)
    assert not door.link.is_symlink() and not door.lock.exists()
    door.open(made.path)
    os.close(users)
    assert door.enter() is None, "its keeper is gone"


def test_a_door_that_leads_to_another_daemon_by_now_stays() -> None:
    old, new, door = private_folder.make(), private_folder.make(), Door.named("job")
    users = private_folder.watch(old.path)
    os.close(old.hold)
    door.open(new.path)
    assert door.close(old.path, users)
    assert door.link.readlink() == new.path
