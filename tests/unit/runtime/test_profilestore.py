"""Profiles in files: there and back, whose file is whose, and what is broken is said and harmless."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gcproto.manifest import Section, TensorSpec
from gcserver.core.events import Member
from gcserver.planner.profile import Profile, dump
from gcserver.runtime import profilestore
from gcserver.runtime.profilestore import LEFT_AFTER, ProfileStore, file_name
from tests.unit.planner.test_profile import a_profile

SECTIONS = (Section(0, (TensorSpec("w", (3, 4), 0), TensorSpec("b", (4,), 0))),)
MEMBERS = (Member(1, "a", 2), Member(2, "b", 2))
NAME = file_name("train", "ddp.0", SECTIONS, MEMBERS, "a")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> ProfileStore:
    return ProfileStore(tmp_path / "deep" / "profiles", said.append)


def _path(store: ProfileStore, name: str = NAME) -> Path:
    assert store._folder is not None
    return store._folder / name


def test_what_is_saved_is_loaded(store: ProfileStore, said: list[str]) -> None:
    assert store.load(NAME) is None, "nothing there yet is no reason to complain"
    store.save(NAME, a_profile())
    assert store.load(NAME) == a_profile() and not said
    assert [p.name for p in _path(store).parent.iterdir()] == [NAME], "nothing half written is left"
    assert _path(store).stat().st_mode & 0o777 == 0o600 and _path(store).parent.stat().st_mode & 0o777 == 0o700


def test_the_name_tells_jobs_apart_by_all_that_matters() -> None:
    other = (Section(0, (TensorSpec("w", (4, 3), 0), TensorSpec("b", (4,), 0))),)
    names = {
        NAME,
        file_name("train2", "ddp.0", SECTIONS, MEMBERS, "a"),
        file_name("train", "ddp.1", SECTIONS, MEMBERS, "a"),
        file_name("train", "ddp.0", other, MEMBERS, "a"),
        file_name("train", "ddp.0", SECTIONS, MEMBERS[:1], "a"),
        file_name("train", "ddp.0", SECTIONS, MEMBERS, "b"),
    }
    assert len(names) == 6
    assert file_name("train", "ddp.0", SECTIONS, MEMBERS, "a") == NAME


@pytest.mark.parametrize("label", ["../../etc/x", "a/b", "", ".hidden", "x" * 300, "\0"])
def test_a_label_leads_out_of_no_folder(label: str) -> None:
    name = file_name(label, "ddp.0", SECTIONS, MEMBERS, "a")
    assert os.path.basename(name) == name and not name.startswith(".") and len(name) < 100 and "\0" not in name


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no json",
        b"{}",
        dump(a_profile())[:-20],
        msgspec.json.encode(msgspec.structs.replace(a_profile(), form=0)),
    ],
)
def test_a_broken_or_old_file_is_said_and_written_anew(store: ProfileStore, said: list[str], text: bytes) -> None:
    store.save(NAME, a_profile())
    _path(store).write_bytes(text)
    assert store.load(NAME) is None
    assert len(said) == 1 and str(_path(store)) in said[0] and "measured anew" in said[0]
    store.save(NAME, a_profile())
    assert store.load(NAME) == a_profile()


def test_a_file_has_a_largest_size(store: ProfileStore, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(NAME, a_profile())
    monkeypatch.setattr(profilestore, "MAX_BYTES", 100)
    assert store.load(NAME) is None and "at most 100 bytes" in said[0]


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    store = ProfileStore(tmp_path / "file" / "below", said.append)
    store.save(NAME, a_profile())
    assert store.load(NAME) is None
    assert any("cannot be kept" in s and "plan.profiles" in s for s in said)


def test_a_name_that_is_a_folder_leaves_no_half_file(store: ProfileStore, said: list[str]) -> None:
    _path(store).mkdir(parents=True)
    store.save(NAME, a_profile())
    assert len(said) == 1 and [p.name for p in _path(store).parent.iterdir()] == [NAME]


def test_what_was_begun_and_left_is_removed_once_it_is_old(store: ProfileStore) -> None:
    folder = _path(store).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, age in ((".old.tmp", 2 * LEFT_AFTER), (".new.tmp", 0.0), ("notes.tmp", 2 * LEFT_AFTER)):
        (folder / name).touch()
        written = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (written, written))
    store.save(NAME, a_profile())
    assert {p.name for p in folder.iterdir()} == {NAME, ".new.tmp", "notes.tmp"}


def test_without_a_folder_nothing_is_kept(said: list[str]) -> None:
    store = ProfileStore(None, said.append)
    store.save(NAME, a_profile())
    assert store.load(NAME) is None and not said


def test_only_the_newest_are_kept(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilestore, "MAX_FILES", 3)
    kept: Profile = a_profile()
    names = [file_name(f"p{i}", "ddp", (), (), "a") for i in range(6)]
    for i, name in enumerate(names[:5]):
        store.save(name, kept)
        os.utime(_path(store, name), (i, i))
    others = ["codec-costs-0123456789abcdef.json", "rules.json"]
    for name in others:
        _path(store, name).write_text("{}")
        os.utime(_path(store, name), (0, 0))
    store.save(names[5], kept)
    assert sorted(p.name for p in _path(store).parent.iterdir()) == sorted([*names[3:], *others])
