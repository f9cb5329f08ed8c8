"""The daemon's log over gRPC: each reader at its own pace, none of which can hold up the daemon or fill its memory.

What may live here: who reads, what is sent next, cutting off who does not read. What may not: what is kept
(`logs.py`), who may read (`guard.py`), gRPC's own calls but for the one that sends.

Nothing waits for a reader: of each at most one message is under way, and what it has not taken stays in the ring, or is
counted as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from gcproto import admin_pb2 as pb
from gcserver.admin.logs import LEVELS, LogRecord, LogRing
from gcserver.admin.source import AdminError, ErrorKind

#: Readers at a time.
MOST_READERS: Final = 16
#: A reader that has not taken a message for so long is cut off, seconds.
PATIENCE: Final = 30.0
#: A stream that follows ends after so long, so that whoever goes on shows a certificate that holds then, seconds.
MAX_AGE: Final = 3600.0
#: bytes of a message, about
_BATCH: Final = 64 << 10

Send = Callable[[pb.GetLogsResponse], Awaitable[None]]


class LogStreams:
    """All readers of a ring. ``who`` gives the node's name and the incarnation of the daemon."""

    def __init__(
        self, ring: LogRing, who: Callable[[], tuple[str, int]], patience: float = PATIENCE, most: int = MOST_READERS
    ) -> None:
        self._ring, self._who, self._patience, self._most = ring, who, patience, most
        self._readers = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Whoever follows gets what is there, and then the end of the stream."""
        self._closed.set()

    async def serve(self, request: pb.GetLogsRequest, send: Send) -> None:
        """Answer one request. Raises :class:`AdminError` where it is wrong, where there are too many, and where nobody
        reads what is sent."""
        level, since = _level(request), _since(request)
        if self._readers >= self._most:
            text = f"{self._readers} readers of the log are the most there may be; end one, or ask again later"
            raise AdminError(ErrorKind.UNAVAILABLE, text)
        self._readers += 1
        try:
            await self._serve(request, level, since, send)
        finally:
            self._readers -= 1

    async def _serve(self, request: pb.GetLogsRequest, level: str, since: float, send: Send) -> None:
        node, incarnation = self._who()
        known = bool(request.after_sequence) and request.incarnation == incarnation
        # To a new reader nothing is lost: it asks for what there is.
        position = request.after_sequence if known else self._ring.oldest - 1
        end = time.monotonic() + MAX_AGE
        first = True
        with _woken(self._ring) as woken:
            while True:
                woken.clear()
                closing = self._closed.is_set()
                batch = self._ring.after(position, level, since, _BATCH)
                position = batch.position
                if batch.records or batch.lost or first:
                    records = [_message(record, node) for record in batch.records]
                    await self._send(
                        send, pb.GetLogsResponse(records=records, lost=batch.lost, incarnation=incarnation)
                    )
                first = False
                if batch.more:
                    continue
                left = end - time.monotonic()
                if not request.follow or closing or left <= 0:
                    return
                await _either(woken, self._closed, left)

    async def _send(self, send: Send, message: pb.GetLogsResponse) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await send(message)
        except TimeoutError:
            text = f"the log was not read for {self._patience:g} s; ask again for what comes after the last record"
            raise AdminError(ErrorKind.UNAVAILABLE, text) from None


@contextlib.contextmanager
def _woken(ring: LogRing) -> Iterator[asyncio.Event]:
    """An event that is set after each record."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    under_way = False

    def arrive() -> None:
        nonlocal under_way
        under_way = False
        event.set()

    def wake() -> None:
        nonlocal under_way
        if under_way:
            return  # of many records at once only the first has to wake anybody
        under_way = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            loop.call_soon_threadsafe(arrive)

    ring.listen(wake)
    try:
        yield event
    finally:
        ring.leave(wake)


async def _either(woken: asyncio.Event, closed: asyncio.Event, seconds: float) -> None:
    """Until there is something new, the end has come, or ``seconds`` are over."""
    waits = {asyncio.ensure_future(woken.wait()), asyncio.ensure_future(closed.wait())}
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _level(request: pb.GetLogsRequest) -> str:
    if not request.level:
        return LEVELS[0]
    if request.level not in pb.LogLevel.values():
        text = f"level: expected one of {', '.join(LEVELS)}, got the number {request.level}"
        raise AdminError(ErrorKind.INVALID, text, "level")
    return LEVELS[request.level - 1]


def _since(request: pb.GetLogsRequest) -> float:
    """Seconds since 1970 of the oldest record that is wanted."""
    ago = request.since_seconds
    if not math.isfinite(ago) or ago < 0:
        raise AdminError(ErrorKind.INVALID, f"since_seconds: expected 0 or more seconds, got {ago}", "since_seconds")
    return time.time() - ago if ago else 0.0


def _message(record: LogRecord, node: str) -> pb.LogRecord:
    return pb.LogRecord(
        sequence=record.sequence,
        time=record.time,
        level=pb.LogLevel.Value(f"LOG_LEVEL_{record.level.upper()}"),
        node=node,
        lane=record.lane,
        logger=record.logger,
        message=record.message,
        trace=record.trace,
    )
