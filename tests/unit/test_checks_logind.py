"""Whether doctor knows that a logout would take a daemon's memory away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gcserver import checks_logind
from gcserver.checks_logind import FIRST_PERSON, kept_at_logout

STATE = Path("/dev/shm/gradcomm-a")


@pytest.fixture
def logind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A busctl that notes what it is asked and prints what is in the file that is returned; empty, it fails."""
    answer, tools = tmp_path / "answer", tmp_path / "bin"
    tools.mkdir()
    busctl = tools / "busctl"
    busctl.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\nread -r line <{answer} || exit 1\necho "$line"\n')
    busctl.chmod(0o755)
    answer.write_text("b true\n")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(checks_logind.pwd, "getpwuid", _person)
    return answer


class _Entry:
    pw_name = "ada"


def _person(uid: int) -> _Entry:
    if uid != FIRST_PERSON:
        raise KeyError(uid)
    return _Entry()


def test_a_person_is_warned(logind: Path, tmp_path: Path) -> None:
    found = kept_at_logout(STATE, FIRST_PERSON, 10, tmp_path)
    assert found is not None and found.result == "warn"
    assert str(STATE) in found.text and "ada" in found.text and "loginctl enable-linger ada" in found.fix
    assert (tmp_path / "asked").read_text().split()[-2:] == ["org.freedesktop.login1.Manager", "RemoveIPC"]


def test_who_lingers_is_well(logind: Path, tmp_path: Path) -> None:
    (tmp_path / "ada").touch()
    found = kept_at_logout(STATE, FIRST_PERSON, 10, tmp_path)
    assert found is not None and (found.result, found.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("state", "uid"),
    [(STATE, 0), (STATE, FIRST_PERSON - 1), (STATE, FIRST_PERSON + 1), (Path("/run/gradcomm"), FIRST_PERSON)],
)
def test_whom_logind_has_no_say_about(logind: Path, tmp_path: Path, state: Path, uid: int) -> None:
    assert kept_at_logout(state, uid, 10, tmp_path) is None


@pytest.mark.parametrize("answer", ["b false\n", "", "Failed to connect\n"])
def test_only_a_clear_yes_counts(logind: Path, tmp_path: Path, answer: str) -> None:
    logind.write_text(answer)
    assert kept_at_logout(STATE, FIRST_PERSON, 10, tmp_path) is None


def test_without_systemd_there_is_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kept_at_logout(STATE, FIRST_PERSON, 10, tmp_path) is None
