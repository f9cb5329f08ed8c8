"""Target: what reaches the port for metrics, probes and the dashboard, as bytes; it is open to whoever reaches it.

Each connection is answered with a status or cut off; a defect would be a 500, and is a failure here.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Final

from gcserver.admin.dashboard import Dashboard
from gcserver.admin.exposition import MetricsServer
from gcserver.admin.metrics import Metrics
from tests.fuzz import mutate
from tests.fuzz.control import quiet
from tests.unit.admin.source import FixedSource

VALID: Final = tuple(
    f"{line}\r\n{rest}\r\n".encode()
    for line in ("GET /metrics HTTP/1.1", "GET /healthz HTTP/1.1", "HEAD /readyz?full=1 HTTP/1.0", "POST /x HTTP/1.1",
                 "GET / HTTP/1.1", "GET /dashboard/main.js HTTP/1.1", "GET /dashboard/events HTTP/1.1")
    for rest in ("", "Host: x\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1\r\n",
                 "Accept-Encoding: gzip\r\nX: y\r\nContent-Length: 5\r\n", "Host: evil.example:7461\r\n")
)  # fmt: skip


class _Writer:
    """As much of a connection as the server writes to."""

    def __init__(self) -> None:
        self.data = b""
        self.cut = False
        self.transport = SimpleNamespace(
            abort=self._abort, get_write_buffer_size=lambda: 0, is_closing=lambda: self.cut
        )

    def _abort(self) -> None:
        self.cut = True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        """``name`` is sockname: it came over loopback, where the Host header counts for every path."""
        return "127.0.0.1", 7461

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class Scrapes:
    """The HTTP server, without its socket."""

    name = "metrics"

    def __init__(self) -> None:
        quiet()
        self._dashboard = Dashboard(FixedSource(), frozenset({"a.cluster"}))
        self._server = MetricsServer(Metrics("0", "a", 1), lambda: "", lambda: None, dashboard=self._dashboard)
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.run_until_complete(self._dashboard.stop())
        self._loop.close()

    def draw(self, rng: random.Random) -> bytes:
        valid = rng.choice(VALID)
        kind = rng.randrange(8)
        if kind == 0:
            return rng.randbytes(rng.randrange(100))
        if kind == 1:
            return valid[:-2] + b"X: " + b"y" * rng.choice((10, 16_000, 40_000)) + b"\r\n\r\n"
        return mutate.spoil(rng, valid, rng.choice(VALID))

    def feed(self, data: bytes) -> str:
        status = self._loop.run_until_complete(self._ask(data))
        assert self._loop.run_until_complete(self._ask(VALID[0])) == "200"
        return status

    async def _ask(self, data: bytes) -> str:
        reader = asyncio.StreamReader(limit=16 << 10)
        reader.feed_data(data)
        reader.feed_eof()
        writer = _Writer()
        await self._server._converse(reader, writer)  # type: ignore[arg-type]
        if writer.cut:
            return "cut off"
        status = writer.data.split(b" ")[1].decode()
        assert status != "500", writer.data
        return status
