"""What a daemon logged last: a ring of records, bounded in number and bytes, and the handler that fills it.

What may live here: records, what is kept of them, who is woken by a new one. What may not: who reads them over the
network (`logstreams.py`), where else lines go.

Any thread may log. A record costs a lock and an append, whoever reads: readers come and take what they have not seen,
and who is too slow finds that some are gone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Records that are kept, and bytes of text in them; whichever is reached first.
MOST: Final = 10_000
MOST_BYTES: Final = 4 << 20
#: Longest message, and longest traceback, bytes of UTF-8; of longer ones the middle is left out.
MOST_TEXT: Final = 16 << 10
#: bytes that a record is counted with beside its text
_OVERHEAD: Final = 64
#: from what matters least to what matters most, as `logging` names them and as `LogLevel` in admin.proto does
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_NUMBERS: Final = tuple(logging.getLevelNamesMapping()[level.upper()] for level in LEVELS)
_formatter: Final = logging.Formatter()


@dataclass(frozen=True, slots=True)
class LogRecord:
    """``time``: seconds since 1970. ``level``: one of LEVELS. ``lane``: who said it; None: the supervisor."""

    sequence: int
    time: float
    level: str
    logger: str
    message: str
    trace: str = ""
    lane: int | None = None

    @property
    def size(self) -> int:
        """Bytes that it is counted with."""
        return _OVERHEAD + len(self.message.encode()) + len(self.trace.encode())


@dataclass(frozen=True, slots=True)
class Batch:
    """``records`` in order, ``lost`` records before them that are no longer there, ``position`` to go on from, and
    whether there are ``more``."""

    records: tuple[LogRecord, ...]
    lost: int
    position: int
    more: bool


class LogRing:
    """The newest records of one life of a daemon, numbered from 1. All methods may be called by any thread."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._records: deque[LogRecord] = deque()
        self._bytes = 0
        self._last = 0
        self._wake: list[Callable[[], None]] = []

    def append(
        self, time: float, level: str, logger: str, message: str, trace: str = "", lane: int | None = None
    ) -> None:
        """Keep a record, and drop the oldest ones where it is one too many. ``level`` is one of LEVELS."""
        message, trace = bounded(message), bounded(trace)
        with self._lock:
            self._last += 1
            record = LogRecord(self._last, time, level, logger, message, trace, lane)
            self._records.append(record)
            self._bytes += record.size
            while len(self._records) > self._most or self._bytes > self._most_bytes:
                self._bytes -= self._records.popleft().size
            wake = tuple(self._wake)
        for call in wake:
            call()

    def after(self, position: int, level: str = LEVELS[0], since: float = 0.0, most_bytes: int = MOST_BYTES) -> Batch:
        """Records with numbers above ``position`` that matter at least as much as ``level`` and were made at ``since``
        (seconds since 1970) or later: the first of them, at least one and else up to ``most_bytes``."""
        least = LEVELS.index(level)
        with self._lock:
            first = self._last - len(self._records) + 1
            # From the end: whoever follows wants a few of many.
            waiting = tuple(itertools.islice(reversed(self._records), max(0, self._last - position)))[::-1]
            last = self._last
        found: list[LogRecord] = []
        size = 0
        for record in waiting:
            if record.time < since or LEVELS.index(record.level) < least:
                continue
            size += record.size
            if found and size > most_bytes:
                return Batch(tuple(found), max(0, first - 1 - position), found[-1].sequence, True)
            found.append(record)
        return Batch(tuple(found), max(0, first - 1 - position), last, False)

    @property
    def oldest(self) -> int:
        """Number of the oldest record that is there; of the next one where none is."""
        with self._lock:
            return self._last - len(self._records) + 1

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called after each record, by the thread that logs it: it must not wait for anything."""
        with self._lock:
            self._wake.append(wake)

    def leave(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wake.remove(wake)


class LogHandler(logging.Handler):
    """Puts what is logged into a ring. A record may have an attribute ``lane``."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        try:
            trace = _formatter.formatException(record.exc_info) if record.exc_info else ""
            lane = getattr(record, "lane", None)
            self._ring.append(record.created, level_of(record.levelno), record.name, record.getMessage(), trace, lane)
        except Exception:
            self.handleError(record)


def level_of(number: int) -> str:
    """The one of LEVELS that a record of `logging` with this level belongs to."""
    return LEVELS[max(0, sum(number >= least for least in _NUMBERS) - 1)]


def bounded(text: str, most: int = MOST_TEXT) -> str:
    """Valid UTF-8 of at most ``most`` bytes: of what is longer the beginning and the end, and how much is left out."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= most:
        return encoded.decode()
    note = f" ... {len(encoded)} bytes in all ... "
    half = (most - len(note)) // 2
    return encoded[:half].decode(errors="ignore") + note + encoded[-half:].decode(errors="ignore")
