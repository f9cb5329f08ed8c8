"""How processes write their log: what a line of JSON holds, that it stays one line, and what becomes one."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gcserver import logsetup
from gcserver.logsetup import JSON, MOST_LINE, JsonHandler, Voice, line_of, of_job, write_line

ROOT = Path(__file__).resolve().parents[2]
VOICE = Voice("n1", form=JSON)


def _record(message: object = "said", *arguments: object, **more: Any) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "gcserver", "levelno": logging.INFO, "msg": message, "args": arguments})
    record.__dict__.update(more)
    return record


def _fields(record: logging.LogRecord, voice: Voice = VOICE) -> dict[str, Any]:
    line = line_of(record, record.getMessage(), voice)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    found: dict[str, Any] = json.loads(line)
    return found


def _run(code: str, voice: Voice = VOICE, status: int = 0) -> list[str]:
    """The lines on stderr of a process that logs by ``voice`` and then does ``code``."""
    begin = (
        "import logging, sys, threading, warnings, msgspec\nfrom gcserver import logsetup\n"
        f"logsetup.begin(msgspec.json.decode({msgspec.json.encode(voice)!r}, type=logsetup.Voice))\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stderr.splitlines()


def test_what_a_line_holds() -> None:
    said = _fields(_record("%s of %d", "one", 2, created=1763817189.25))
    assert said == {
        "time": "2025-11-22T13:13:09.250000+00:00", "level": "info", "logger": "gcserver", "node": "n1",
        "message": "one of 2",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", said["time"]), "RFC 3339"


def test_lane_and_job_where_they_are_known() -> None:
    assert _fields(_record(lane=2, job="gpt")) | {"time": ""} == {
        "time": "", "level": "info", "logger": "gcserver", "node": "n1", "lane": 2, "job": "gpt", "message": "said",
    }  # fmt: skip
    lane = Voice("n1", form=JSON, lane=0)
    assert _fields(_record(), lane)["lane"] == 0
    assert "lane" not in _fields(_record(lane=None)) and "job" not in _fields(_record(job=None))


def test_an_exception_is_a_field_and_the_line_stays_one() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        said = _fields(_record("first\nsecond\x1b[31m\u2028\x85", exc_info=sys.exc_info()))
    assert said["message"] == "first\nsecond\x1b[31m\u2028\x85"
    assert said["exception"].startswith("Traceback") and said["exception"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize("character", ["x", "\x01", "ü", "\udc80", "🙂"])
def test_a_line_has_a_bound_whatever_is_in_it(character: str) -> None:
    record = _record("begin" + character * 100_000 + "end", name=character * 5000, job=character * 5000)
    record.exc_text = None
    line = line_of(record, record.getMessage(), Voice(character * 5000, form=JSON))
    assert len(line) <= MOST_LINE
    message = json.loads(line)["message"]
    assert message.startswith("begin") and message.endswith("end") and "bytes in all" in message


def test_a_record_that_cannot_be_formatted_is_not_lost() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as lines:
        JsonHandler(VOICE, writing).emit(_record("%d steps", "many"))
        os.close(writing)
        said = json.loads(lines.read())
    assert "'%d steps' with ('many',)" in said["message"]


WRITE = """
import sys
from gcserver.logsetup import write_line
for number in range(200):
    write_line(int(sys.argv[1]), (sys.argv[2] * (5000 + 37 * number % 9000) + "\\n").encode())
"""


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_lines_of_several_processes_stay_whole(kind: str, tmp_path: Path) -> None:
    """Longer ones than what a pipe takes in one piece, and than what fits into it; the journal's end is a socket."""
    if kind == "file":
        writing = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        reading = os.open(tmp_path / "log", os.O_RDONLY)
    elif kind == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (end.detach() for end in socket.socketpair())
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(writing), letter], cwd=ROOT, pass_fds=(writing,))
        for letter in "abc"
    ]
    os.close(writing)
    if kind == "file":
        assert [process.wait(60) for process in processes] == [0, 0, 0]
    with os.fdopen(reading, "rb") as lines:
        found = lines.read().splitlines()
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(found) == 600 and all(len(set(line)) == 1 for line in found)


def test_a_pipe_that_takes_nothing_for_a_while_and_one_that_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as others that share it may have made it
    line = b"x" * 300_000 + b"\n"
    writer = threading.Thread(target=write_line, args=(writing, line))
    writer.start()
    with os.fdopen(reading, "rb") as lines:
        assert lines.readline() == line
    writer.join(30)
    assert not writer.is_alive()
    write_line(writing, b"to nobody\n")
    os.close(writing)
    write_line(writing, b"nowhere\n")


def test_all_that_python_writes_to_stderr_becomes_records() -> None:
    lines = _run(
        "warnings.warn('careful')\n"
        "print('a library', 'prints', file=sys.stderr)\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start(); thread.join()\n"
        "sys.stderr.write('no end')\n"
        "raise LookupError('gone')",
        status=1,
    )
    said = [json.loads(line) for line in lines]
    assert [(s["logger"], s["level"]) for s in said] == [
        ("py.warnings", "warning"), ("stderr", "warning"), ("gcserver", "error"), ("gcserver", "critical"),
        ("stderr", "warning"),
    ]  # fmt: skip
    assert "UserWarning: careful" in said[0]["message"] and said[1]["message"] == "a library prints"
    assert "ZeroDivisionError" in said[2]["exception"] and said[3]["exception"].endswith("LookupError: gone")
    assert said[4]["message"] == "no end"


def test_the_level_holds_for_what_is_logged_and_hides_nothing_that_text_would_show() -> None:
    lines = _run(
        "logging.getLogger('gcserver').warning('hidden')\nlogging.getLogger('gcserver').error('shown')\n"
        "warnings.warn('careful')\nprint('printed', file=sys.stderr)",
        Voice("n1", "error", JSON),
    )
    assert [json.loads(line)["message"].split("\n")[0].rpartition(" ")[2] for line in lines] == [
        "shown", "careful", "printed",
    ]  # fmt: skip


def test_a_handler_that_prints_what_is_wrong_with_it_is_no_endless_loop() -> None:
    lines = _run(
        "class Broken(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        print('broken', file=sys.stderr)\n"
        "logging.getLogger().addHandler(Broken())\nprint('hello', file=sys.stderr)"
    )
    assert json.loads(lines[0])["message"] == "hello" and lines[1:] == ["broken"]


def test_text_is_as_it_always_was() -> None:
    (line,) = _run("logging.getLogger('gcserver').info('ready')", Voice("n1"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO n1: ready", line)
    (line,) = _run("print('printed', file=sys.stderr)", Voice("n1"))
    assert line == "printed"


def test_what_is_said_later_replaces_what_was_said_first() -> None:
    lines = _run("logsetup.begin(logsetup.Voice('n2', 'error', 'json'))\nlogsetup.complain('gcserver', 'no')\n"
                 "logging.getLogger('gcserver').info('hidden')")  # fmt: skip
    (said,) = (json.loads(line) for line in lines)
    assert (said["node"], said["message"], said["level"]) == ("n2", "no", "error")


def test_children_are_silent_about_text() -> None:
    before = list(logging.getLogger().handlers)
    logsetup.begin_child(Voice("n1", lane=1))
    assert logging.getLogger().handlers == before


def test_of_which_job_a_line_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        of_job(logging.getLogger("gcserver"), "gpt").info("planned")
    assert [record.job for record in caplog.records] == ["gpt"]  # type: ignore[attr-defined]
