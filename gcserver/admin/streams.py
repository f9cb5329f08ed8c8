"""Server-sent events to a bounded number of clients, none of which can hold up the daemon or fill its memory.

What may live here: who listens, what each has still to get, cutting off who does not read. What may not: what is sent
(`dashboard.py`), HTTP but for the head of a stream.

Only the newest event of a topic counts: a client that has not read the last ones gets no more until it has, and then
the newest of each topic it missed. So at most one event of each topic is kept for it, by the transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gcserver.admin import http
from gcserver.admin.pages import CONFINED

#: Clients at a time; each costs a socket and what was said last.
MOST: Final = 16
#: A client that has not read what it was sent for so long is cut off, seconds.
PATIENCE: Final = 10.0
#: A stream ends after so long and is opened anew by the browser, with whatever certificates hold then, seconds.
MAX_AGE: Final = 3600.0
#: milliseconds after which a browser comes back
_RETRY: Final = b"retry: 2000\n\n"
_HEAD: Final = http.head(200, "text/event-stream", *CONFINED, ("X-Accel-Buffering", "no"))


def encoded(event: str, data: bytes) -> bytes:
    """One event. ``data``: JSON, which has no line ends."""
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@dataclass(eq=False, slots=True)
class _Client:
    writer: asyncio.StreamWriter
    missed: set[str] = field(default_factory=set)
    #: since when it has not read all it was sent; None: it has
    behind: float | None = None


class Streams:
    """All listeners. ``first`` is called when there is one after there was none."""

    def __init__(
        self, first: Callable[[], None], most: int = MOST, patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._first, self._most, self._patience, self._clock = first, most, patience, clock
        self._clients: set[_Client] = set()
        self._newest: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def full(self) -> bool:
        return len(self._clients) >= self._most

    def publish(self, topic: str, message: bytes) -> None:
        """To all who listen; who has not read the last ones gets it, or a newer one, when they have."""
        self._newest[topic] = message
        for client in list(self._clients):
            client.missed.add(topic)
            self._send(client)

    def forget(self, topic: str) -> None:
        """There is nothing to say of it any more."""
        self._newest.pop(topic, None)

    def _send(self, client: _Client) -> None:
        transport = client.writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size():
            client.behind = self._clock() if client.behind is None else client.behind
            if self._clock() - client.behind > self._patience:
                transport.abort()
            return
        client.behind = None
        for topic in sorted(client.missed & self._newest.keys()):
            client.writer.write(self._newest[topic])
        client.missed.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        """Until the client leaves, is cut off, or ``seconds`` are over. To be called only while not ``full``."""
        client = _Client(writer, set(self._newest))
        writer.write(_HEAD + _RETRY)
        for topic in sorted(client.missed):
            writer.write(self._newest[topic])
        client.missed.clear()
        self._clients.add(client)
        if len(self._clients) == 1:
            self._first()
        try:
            async with asyncio.timeout(min(seconds, MAX_AGE)):
                # Whatever it says now is no request: it has made its one.
                await reader.read(1)
        except TimeoutError:
            pass
        finally:
            self._clients.discard(client)
            if writer.transport.get_write_buffer_size():
                # Closing would wait for it to be read.
                writer.transport.abort()
