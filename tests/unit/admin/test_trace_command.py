"""`gcctl trace` against the real service over real gRPC: what it asks, prints and writes, and what it refuses.

What may live here: tests of `gcserver/admin/trace_command.py`. What may not: what a file says (`test_tracefile.py`).
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from gcserver.admin import gcctl
from gcserver.admin.exits import Exit
from tests.trace_files import sound
from tests.unit.admin.test_gcctl import Daemon, daemon, err, out, server
from tests.unit.admin.traces import STEPS

__all__ = ["daemon", "server"]  # fixtures


def test_start_asks_for_what_was_said(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    said = out(capsys, "trace", "start", "--job", "gpt", "--steps", "3", "--seconds", "90", "--nodes", "a,b")
    assert said == "recording steps of all jobs on 2 node(s), for 60 s at most\n"
    out(capsys, "trace", "start", "--seconds", "1.5min")
    assert json.loads(out(capsys, "trace", "start", "--nodes", "all", "--json"))["nodes"] == ["a", "b"]
    assert daemon.source.asked == [
        ("start_trace", "gpt", 3, 90.0, ("a", "b")), ("start_trace", "", 0, 90.0, ()), ("start_trace", "", 0, 0.0, ()),
    ]  # fmt: skip


def test_the_job_of_a_context_is_the_one_that_is_traced(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "contexts.toml"
    file.write_text('current = "lab"\n[contexts.lab]\njob = "gpt"\n')
    monkeypatch.setenv("GCCTL_CONFIG", str(file))
    out(capsys, "trace", "start")
    out(capsys, "--context", "none", "trace", "start")
    assert daemon.source.asked == [("start_trace", "gpt", 0, 0.0, ()), ("start_trace", "", 0, 0.0, ())]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("start", "--steps", "-1"), "expected a whole number of at most nine digits; got '-1'"),
        (("start", "--steps", "many"), "expected a whole number of at most nine digits; got 'many'"),
        (("start", "--steps", "4294967296"), "nine digits; got '4294967296'"),
        (("start", "--seconds", "9" * 30), "expected at most 365 d"),
        (("start", "--seconds", "long"), "got 'long'"),
        ((), "COMMAND"),
        (("export", "trace.json"), "--otlp"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gcctl.main(["trace", *arguments])
    assert part in capsys.readouterr().err


@pytest.mark.usefixtures("daemon")
def test_stop_shows_what_each_node_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "trace", "stop")
        == """\
NODE  SPANS  DROPPED  CLOCK                           MISSING
a        21        0  -                               -
b        12        5  11 min 40 s ahead, within 5 ms  rank 3 did not answer
c         0        0  -                               it does not answer

37 spans of 2 node(s); nothing of 1
"""
    )


@pytest.mark.usefixtures("daemon")
def test_stop_writes_a_file_in_place_of_what_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    target.write_text("old")
    answer = json.loads(out(capsys, "trace", "stop", "--out", str(target), "--json"))
    assert [n["name"] for n in answer["nodes"]] == ["a", "b", "c"]
    slices = sound(json.loads(target.read_text()))
    assert {e["args"]["step"] for e in slices} == set(range(1, STEPS + 1)) and {e["node"] for e in slices} == {"a", "b"}
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("there", ["a link", "a file"])
def test_what_lies_where_the_new_file_is_made_is_not_written_through(
    there: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a folder that everybody may write to its name can be guessed."""
    target, victim = tmp_path / "trace.json", tmp_path / "victim"
    victim.write_text("mine")
    partial = tmp_path / f".trace.json.{os.getpid()}.part"
    partial.symlink_to(victim) if there == "a link" else partial.hardlink_to(victim)
    out(capsys, "trace", "stop", "--out", str(target))
    assert victim.read_text() == "mine" and not target.is_symlink() and json.loads(target.read_text())["traceEvents"]
    assert sorted(os.listdir(tmp_path)) == ["trace.json", "victim"]


def test_a_path_that_cannot_be_written_is_said_before_anything_is_ended(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = err(capsys, Exit.FAILED, "trace", "stop", "--out", str(tmp_path / "no" / "trace.json"))
    assert "no/trace.json cannot be written: No such file or directory; the daemons keep the trace" in said
    assert daemon.source.asked == []


@pytest.mark.usefixtures("daemon")
def test_a_full_disk_is_said_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/dev/full cannot be written: No space left on device" in err(
        capsys, Exit.FAILED, "trace", "stop", "--out", "/dev/full"
    )
    kept = tmp_path / "trace.json"
    kept.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        assert "File too large" in err(capsys, Exit.FAILED, "trace", "stop", "--out", str(kept))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept.read_text() == "old" and os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.usefixtures("daemon")
def test_a_name_that_is_too_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in err(capsys, Exit.FAILED, "trace", "stop", "--out", "a" * 300)


def test_a_refusal_leaves_what_was_there(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.source, "asked", _Forgetful())
    target = tmp_path / "trace.json"
    target.write_text("old")
    assert "still being recorded" in err(capsys, Exit.REFUSED, "trace", "stop", "--out", str(target))
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["trace.json"]


class _Forgetful(list[tuple[object, ...]]):
    """A source with it takes nothing for asked."""

    def append(self, asked: tuple[object, ...]) -> None:
        """It was not."""
