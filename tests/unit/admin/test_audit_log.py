"""The file of the audit log: appended to, private, and no trouble to the daemon whatever becomes of the disk."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin import audit_log
from gcserver.admin.audit_log import MAX_ITEMS, MAX_LINE, MAX_TEXT, MAX_WAITING, AuditLog, bounded

ROOT = Path(__file__).resolve().parents[3]


def written(path: Path, work: Callable[[AuditLog], Awaitable[Any]]) -> int:
    """``work(log)``; how many lines were lost."""

    async def all_of_it() -> int:
        lost = 0

        def count() -> None:
            nonlocal lost
            lost += 1

        log = AuditLog(path, count)
        await work(log)
        await log.close()
        await asyncio.sleep(0)
        return lost

    return asyncio.run(all_of_it())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_to_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def work(log: AuditLog) -> None:
        for i in range(3):
            await log.append({"method": "SetCodec", "n": i})
            assert lines(path)[-1]["n"] == i, "it is in the file before the call is answered"

    before = os.umask(0)
    try:
        assert written(path, work) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert written(path, work) == 0
    assert [line["n"] for line in lines(path)] == [0, 1, 2, 0, 1, 2]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def work(log: AuditLog) -> None:
        await log.append({"n": 1})
        path.rename(tmp_path / "audit.1")
        await log.append({"n": 2})
        path.unlink()
        path.write_text("")
        await log.append({"n": 3})

    assert written(path, work) == 0
    assert lines(tmp_path / "audit.1") == [{"n": 1}] and lines(path) == [{"n": 3}]


def test_nothing_in_a_record_can_pretend_to_be_another_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    said = 'x"\n{"who": "root"}\x1b[2J\u2028\ud800'

    async def work(log: AuditLog) -> None:
        await log.append({"message": said})

    assert written(path, work) == 0
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().isascii() and b"\x1b" not in path.read_bytes()
    assert lines(path) == [{"message": said}]


def test_records_are_bounded(tmp_path: Path) -> None:
    rules = [{"pattern": "p" * 1000, "codec": "fp16"}] * 100
    short = bounded({"rules": rules, "text": "t" * 5000, "n": 1.5, **{str(i): i for i in range(100)}})
    assert len(short) == MAX_ITEMS + 1 and short["..."] == f"{103 - MAX_ITEMS} more"
    assert len(short["rules"]) == MAX_ITEMS + 1 and short["rules"][-1] == f"... {100 - MAX_ITEMS} more"
    assert short["rules"][0]["pattern"] == "p" * MAX_TEXT + "... (1000 characters)" and short["n"] == 1.5
    path = tmp_path / "audit.jsonl"

    async def work(log: AuditLog) -> None:
        # every character takes twelve bytes as JSON writes it
        await log.append({"who": "a", "arguments": bounded({str(i): "\U0001f600" * 1000 for i in range(100)})})

    assert written(path, work) == 0
    (line,) = lines(path)
    assert line["who"] == "a" and line["arguments"]["cut"].endswith(" bytes")
    assert len(path.read_bytes()) < MAX_LINE


def test_a_file_that_cannot_be_opened_is_named_at_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in (
        (tmp_path / "no" / "such", "No such file"), (tmp_path, "directory"), (pipe, "No such device"),
        (Path("/dev/full"), "no regular file"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=rf"admin\.audit_log: {path} cannot be opened: .*{why}"):
            AuditLog(path, lambda: None)


FULL = """
import asyncio, resource, sys
from pathlib import Path
from gcserver.admin.audit_log import AuditLog

path, lost = Path(sys.argv[1]), 0

def count():
    global lost
    lost += 1

async def work():
    log = AuditLog(path, count)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
    for n in range(6):
        await log.append({"n": n, "fill": "x" * 80})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await log.append({"n": "room again"})
    await log.close()

asyncio.run(work())
print(lost)
"""


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    """The system's own refusal to write on, in the middle of a line; what comes later is whole again."""
    path = tmp_path / "audit.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "4\n"
    whole, torn = [], []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line)["n"])
        except ValueError:
            torn.append(line)
    assert whole == [0, 1, "room again"] and len(torn) == 1
    assert done.stderr.count("cannot be written") == 1, "said once"


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "PATIENCE", 0.0)
    released = threading.Event()
    write = os.write

    def hang(descriptor: int, data: bytes) -> int:
        released.wait()
        return write(descriptor, data)

    monkeypatch.setattr(audit_log.os, "write", hang)
    path = tmp_path / "audit.jsonl"

    async def work(log: AuditLog) -> None:
        await log.append({"n": 0})
        while log._lines.qsize():
            await asyncio.sleep(0)  # the thread has taken it, and hangs
        for n in range(MAX_WAITING + 10):
            await log.append({"n": n})
        released.set()
        while len(lines(path)) < MAX_WAITING + 1:
            await asyncio.sleep(0)

    assert written(path, work) == 10
