"""The audit log: one JSON line for every attempt to change something, accepted or refused.

What may live here: the file and its lines. What may not: which calls are changes (`roles.py`), who made one
(`guard.py`), audits of gradients (`gcserver.runtime.audits`).

A thread of its own writes, so that a disk that hangs or is full holds up nothing: what cannot be written is counted and
said in the daemon's log, and the daemon goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: Longest line, bytes; longer ones lose their arguments.
MAX_LINE: Final = 8192
#: Lines that wait for the disk; more are lost, and counted.
MAX_WAITING: Final = 256
MAX_TEXT: Final = 128
MAX_ITEMS: Final = 8
#: How long a call waits for its line to be in the file before it is answered all the same, seconds.
PATIENCE: Final = 1.0
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
log = logging.getLogger("gcserver.admin")


class AuditLog:
    """Appends to ``path`` (created with mode 0600). ``lost`` is called in the loop for each line that is not written.

    A file that was moved away, as logrotate does, is made anew.
    """

    def __init__(self, path: Path, lost: Callable[[], None]) -> None:
        """Raises OSError, whose text names key and path."""
        self._path = path
        self._lost = lost
        self._file = -1
        #: the last line was written in part only
        self._torn = False
        self._failing = False
        self._lines: queue.Queue[tuple[bytes, Callable[[bool], None]] | None] = queue.Queue(MAX_WAITING)
        try:
            self._open()
        except OSError as error:
            raise OSError(f"admin.audit_log: {path} cannot be opened: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    async def append(self, record: dict[str, Any]) -> None:
        """Write a record, and wait until it is in the file, but not for long. Never raises."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()

        def done(ok: bool) -> None:
            if not ok:
                self._lost()
            if not written.done():
                written.set_result(None)

        def tell(ok: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon did not wait any longer
                loop.call_soon_threadsafe(done, ok)

        try:
            self._lines.put_nowait((_line(record), tell))
        except queue.Full:
            self._lost()
            return
        await asyncio.wait({written}, timeout=PATIENCE)

    async def close(self) -> None:
        """Let what waits be written, but not for long."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        await asyncio.to_thread(self._thread.join, PATIENCE)

    # ------------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            line, tell = item
            tell(self._write(line))
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> bool:
        """Whether the whole line is in the file."""
        try:
            self._follow()
            data = (b"\n" if self._torn else b"") + line
            count = os.write(self._file, data)
            # What follows a part of a line begins on one of its own.
            self._torn = count < len(data) and (count > 0 or self._torn)
            if count < len(data):
                raise OSError(f"only {count} of {len(data)} bytes could be written")
        except OSError as error:
            if not self._failing:
                log.error("admin.audit_log: %s cannot be written: %s; lines are lost", self._path, error)
            self._failing = True
            return False
        if self._failing:
            log.info("admin.audit_log: %s can be written again", self._path)
        self._failing = False
        return True

    def _follow(self) -> None:
        """The file of that name may be another one by now."""
        if self._file >= 0:
            try:
                there, ours = os.stat(self._path), os.fstat(self._file)
                if (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev):
                    return
            except FileNotFoundError:
                pass
            os.close(self._file)
            self._file, self._torn = -1, False
        self._open()

    def _open(self) -> None:
        opened = os.open(self._path, _FLAGS, 0o600)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise OSError("it is no regular file")
        self._file = opened


def _line(record: dict[str, Any]) -> bytes:
    """One line, ASCII: nothing in it can pretend to be another line or steer a terminal."""
    line = json.dumps(record).encode() + b"\n"
    if len(line) > MAX_LINE:
        line = json.dumps({**record, "arguments": {"cut": f"{len(line)} bytes"}}).encode() + b"\n"
    return line


def bounded(value: Any) -> Any:
    """The same with long texts and lists cut."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} characters)"
    if isinstance(value, dict):
        kept = {bounded(str(k)): bounded(v) for k, v in list(value.items())[:MAX_ITEMS]}
        return kept if len(value) <= MAX_ITEMS else {**kept, "...": f"{len(value) - MAX_ITEMS} more"}
    if isinstance(value, list):
        kept_items = [bounded(v) for v in value[:MAX_ITEMS]]
        return kept_items if len(value) <= MAX_ITEMS else [*kept_items, f"... {len(value) - MAX_ITEMS} more"]
    return value
