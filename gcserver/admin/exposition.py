"""HTTP for machines that look at the daemon: `/metrics` for Prometheus, `/healthz` and `/readyz` for a kubelet.

What may live here: just enough HTTP/1.1 to answer a GET in the supervisor's own loop, without a thread and without
waking up when nobody asks, and who is let in. What may not: what is counted (`metrics.py`), what ready means (the
caller says), TLS (`https.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from prometheus_client import exposition

from gcserver.admin import roles
from gcserver.admin.access import OPEN, Access
from gcserver.admin.metrics import Metrics

#: Request line and headers; a scraper sends a few hundred bytes.
_MAX_HEAD: Final = 16 << 10
#: A client that has sent nothing complete or read nothing by then is cut off, seconds.
_PATIENCE: Final = 5.0
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TEXT: Final = "text/plain; charset=utf-8"
#: kinds of errors: a request without the role, a TLS connection that came to nothing
DENIED: Final = "metrics_denied"
HANDSHAKE_FAILED: Final = "metrics_handshake_failed"
log = logging.getLogger("gcserver.admin")

Answer = tuple[int, str, bytes]


class MetricsServer:
    """A running HTTP server. ``address`` is what was bound, with the port the system chose if it was 0."""

    def __init__(
        self, metrics: Metrics, ready: Callable[[], str], refresh: Callable[[], None], access: Access = OPEN
    ) -> None:
        """With certificates over TLS, to clients whose certificate has the role."""
        self._access = access
        self._metrics, self._ready, self._refresh = metrics, ready, refresh
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Raises OSError naming the address."""
        tls = None
        if self._access.certificates is not None:
            from gcserver.admin.https import renewed

            tls = renewed(self._access.certificates, lambda: self._access.count(HANDSHAKE_FAILED))
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=_MAX_HEAD, reuse_port=False, ssl=tls,
                ssl_handshake_timeout=_PATIENCE if tls else None,
            )  # fmt: skip
        except OSError as error:
            hint = f"`ss -ltnp 'sport = :{port}'` shows who uses it; stop that or set another node.metrics"
            raise OSError(f"node.metrics: {host}:{port} cannot be bound: {error.strerror}; {hint}") from None
        name = self._server.sockets[0].getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    async def stop(self) -> None:
        """Close at once; a scrape under way is cut off."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                refusal = self._refusal(writer) if self._access.certificates else ""
                if refusal:
                    self._access.count(DENIED)
                writer.write(_message(403, _TEXT, f"{refusal}\n".encode(), True) if refusal else self._response(head))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_message(400, _TEXT, b"the request is too long\n", True))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            # a port scanner, or a scraper that went away: what it has not read is not kept for it
            writer.transport.abort()
        finally:
            writer.close()

    def _refusal(self, writer: asyncio.StreamWriter) -> str:
        """Why who is at the other end may not read this; "" where they may."""
        from gcserver.admin.https import identity_of

        who = identity_of(writer.get_extra_info("ssl_object"))
        if not roles.suffices(who.role, roles.METRICS):
            return f"expected a certificate with the role {roles.METRICS} or a higher one; {who.name!r} has none"
        return ""

    def _response(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _message(400, _TEXT, b"expected an HTTP/1.1 request\n", True)
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return _message(405, _TEXT, b"only GET and HEAD\n", True, "Allow: GET, HEAD\r\n")
        accept = next((line[7:].strip() for line in lines[1:] if line[:7].lower() == "accept:"), "")
        try:
            status, kind, body = self._route(target.partition("?")[0], accept)
        except Exception as error:  # a defect: the scraper sees it fail, the daemon goes on
            log.exception("a request for %s failed", target)
            status, kind, body = 500, _TEXT, f"{type(error).__name__}: {error}\n".encode()
        return _message(status, kind, body, method == "GET")

    def _route(self, path: str, accept: str) -> Answer:
        if path == "/metrics":
            self._refresh()
            try:
                encode, kind = exposition.choose_encoder(accept)
            except (TypeError, ValueError):
                # The library trips over versions that are no numbers: the plain form will do for whoever asks for one.
                encode, kind = exposition.choose_encoder("")
            return 200, kind, encode(self._metrics.registry)
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            reason = self._ready()
            return (503, _TEXT, f"{reason}\n".encode()) if reason else (200, _TEXT, b"ok\n")
        return 404, _TEXT, b"here are /metrics, /healthz and /readyz\n"


def _message(status: int, kind: str, body: bytes, with_body: bool, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{headers}\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")


def _nothing() -> None:
    pass


async def serve(
    metrics: Metrics,
    host: str,
    port: int,
    ready: Callable[[], str],
    refresh: Callable[[], None] = _nothing,
    access: Access = OPEN,
) -> MetricsServer:
    """Serve ``metrics`` over HTTP in the running loop. Raises OSError, whose text names address and key.

    ``ready`` returns why the daemon takes no jobs, "" when it does; ``refresh`` is called before every scrape, so that
    gauges are read when somebody asks rather than kept current for nobody. ``access``: see :class:`MetricsServer`.
    """
    server = MetricsServer(metrics, ready, refresh, access)
    await server.start(host, port)
    return server
