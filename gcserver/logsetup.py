"""How the processes of a daemon write their log to stderr: as text, or one JSON object a line.

What may live here: setting up a process's logging by ``log.format``, what a line of JSON holds, and that lines of
several processes stay whole. What may not: what is kept of the log (`admin/logs.py`), what is logged.

With ``json`` everything that Python writes to stderr becomes a record: what is logged, warnings, exceptions that end a
process or a thread, and what libraries print. Code that is not Python's writes past this.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import logging
import os
import select
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

import msgspec

from gcserver.admin.logs import bounded, level_of

CONSOLE, JSON = "console", "json"
FORMATS: Final = (CONSOLE, JSON)
#: Longest line, bytes with its end: container runtimes cut longer ones at 16 KiB, the journal at 48 KiB.
MOST_LINE: Final = 16_000
#: Longest name of a node, a logger or a job in a line, bytes.
_MOST_NAME: Final = 256
_STDERR: Final = 2
_formatter: Final = logging.Formatter()
log = logging.getLogger("gcserver")
#: of what a library prints; it has a level of its own, so that ``log.level`` does not hide what text would show
_printed = logging.getLogger("stderr")


class Voice(msgspec.Struct, frozen=True):
    """How a process logs. ``lane``: which it is; None: none. ``level``, ``form``: ``log.level`` and ``log.format``."""

    node: str = ""
    level: str = "info"
    form: str = CONSOLE
    lane: int | None = None


def begin(voice: Voice) -> None:
    """Have this process log so from now on, instead of as an earlier call said."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, JsonHandler)]:
        root.removeHandler(handler)
    if voice.form == JSON:
        root.setLevel(voice.level.upper())
        root.addHandler(JsonHandler(voice))
        _catch()
    else:
        logging.basicConfig(
            level=voice.level.upper(),
            stream=sys.stderr,
            format=f"%(asctime)s %(levelname)s {voice.node}: %(message)s",
        )


def begin_child(voice: Voice) -> None:
    """The same in a process that the daemon starts, whose text goes to stderr as it comes."""
    if voice.form == JSON:
        begin(voice)


def _catch() -> None:
    """What would be text on stderr becomes records."""
    for name in (_printed.name, "py.warnings"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _ends
    threading.excepthook = lambda e: log.error(
        "a thread ends by an exception", exc_info=(e.exc_type, e.exc_value or e.exc_type(), e.exc_traceback)
    )
    if not isinstance(sys.stderr, Printed):
        sys.stderr = Printed()
        atexit.register(sys.stderr.finish)


def _ends(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("the process ends by an exception", exc_info=(kind, error, trace))


def of_job(logger: logging.Logger, label: str | None) -> logging.LoggerAdapter[logging.Logger]:
    """``logger`` for what is about the job called so; None: no job that is known."""
    return logging.LoggerAdapter(logger, {"job": label})


def complain(program: str, text: str, level: int = logging.ERROR, trace: bool = False) -> None:
    """One line on stderr: a record where lines are JSON, else ``program: text``. ``trace``: with the traceback of the
    exception that is being handled."""
    if any(isinstance(handler, JsonHandler) for handler in logging.getLogger().handlers):
        log.log(level, "%s", text, exc_info=trace)
        return
    if trace:
        traceback.print_exc()
    print(f"{program}:", text, file=sys.stderr, flush=True)


class JsonHandler(logging.Handler):
    """Writes records to stderr, one line each. A record may have attributes ``lane`` and ``job``."""

    def __init__(self, voice: Voice, descriptor: int = _STDERR) -> None:
        super().__init__()
        self._voice, self._descriptor = voice, descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:
            message = f"{record.msg!r} with {record.args!r}: cannot be formatted: {error}"
        write_line(self._descriptor, line_of(record, message, self._voice))


def line_of(record: logging.LogRecord, message: str, voice: Voice) -> bytes:
    """A record as a line of ASCII. Long texts lose their middle."""
    lane: int | None = getattr(record, "lane", voice.lane)
    job: str | None = getattr(record, "job", None)
    trace = [record.exc_info and _formatter.formatException(record.exc_info), record.stack_info]
    exception = "\n".join(filter(None, trace))
    most = MOST_LINE
    while True:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": level_of(record.levelno),
            "logger": bounded(record.name, _MOST_NAME),
            "node": bounded(voice.node, _MOST_NAME),
            "lane": lane,
            "job": None if job is None else bounded(job, _MOST_NAME),
            "message": bounded(message, most),
            "exception": bounded(exception, most) or None,
        }
        line = json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"
        if len(line) <= MOST_LINE:
            return line
        most -= max(most // 8, 1)


def write_line(descriptor: int, line: bytes) -> None:
    """Write a line in one piece, whatever other processes write there meanwhile by this function.

    The lock is on the file, pipe or socket itself, so that processes need nothing else in common, and it goes with a
    process that ends. Where nobody reads any more, or nothing can be written, the line is lost.
    """
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        try:
            left = memoryview(line)
            while left:
                try:
                    left = left[os.write(descriptor, left) :]
                except BlockingIOError:  # somebody who has the same pipe made it so
                    select.select([], [descriptor], [])
        finally:
            _lock(descriptor, fcntl.LOCK_UN)
    except OSError:
        pass


def _lock(descriptor: int, how: int) -> None:
    try:
        fcntl.lockf(descriptor, how)
    except OSError:
        pass  # a file system without locks


class Printed(io.TextIOBase):
    """A stream whose lines become records of the logger "stderr"."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._begun = ""
        self._thread = threading.local()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return _STDERR

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def finish(self) -> None:
        """Say what has no end of line yet."""
        with self._lock:
            rest, self._begun = self._begun, ""
        self._say(rest)

    def _say(self, line: str) -> None:
        if not line.strip():
            return
        if getattr(self._thread, "busy", False):
            # A handler prints what went wrong with it: that may not become a record again.
            write_line(_STDERR, line.encode(errors="backslashreplace") + b"\n")
            return
        self._thread.busy = True
        try:
            _printed.warning("%s", line)
        finally:
            self._thread.busy = False
