"""HTTP for who looks at the daemon: `/metrics` for Prometheus, `/healthz` and `/readyz` for a kubelet, `/` for people.

What may live here: answering requests in the supervisor's own loop, without a thread and without waking up when nobody
asks, and who is let in. What may not: what is counted (`metrics.py`), the dashboard (`dashboard.py`), what ready means
(the caller says), HTTP's bytes (`http.py`), TLS (`https.py`).
"""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import exposition

from gcserver.admin import http, pages, roles, streams
from gcserver.admin.access import OPEN, Access
from gcserver.admin.dashboard import EVENTS, Dashboard
from gcserver.admin.http import Answer, Request, text
from gcserver.admin.metrics import Metrics

if TYPE_CHECKING:
    from gcserver.admin.certificates import Identity

#: Request line and headers; a scraper sends a few hundred bytes.
_MAX_HEAD: Final = 16 << 10
#: A client that has sent nothing complete or read nothing by then is cut off, seconds.
_PATIENCE: Final = 5.0
#: kinds of errors: a request without the role, a TLS connection that came to nothing
DENIED: Final = "metrics_denied"
HANDSHAKE_FAILED: Final = "metrics_handshake_failed"
log = logging.getLogger("gcserver.admin")


class MetricsServer:
    """A running HTTP server. ``address`` is what was bound, with the port the system chose if it was 0."""

    def __init__(
        self,
        metrics: Metrics,
        ready: Callable[[], str],
        refresh: Callable[[], None],
        access: Access = OPEN,
        dashboard: Dashboard | None = None,
    ) -> None:
        """With certificates over TLS, to clients whose certificate has the role; without them the dashboard is shown
        under this node's own names only. ``dashboard`` None: there is none."""
        self._access, self._dashboard = access, dashboard
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
                ssl_handshake_timeout=_PATIENCE if tls else None, ssl_shutdown_timeout=_PATIENCE if tls else None,
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
        if self._dashboard is not None:
            await self._dashboard.stop()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
                who = self._identity(writer)
                answer, with_body = self._respond(head, who, _loopback(writer))
                if answer is not None:
                    writer.write(http.message(answer, with_body))
                    await writer.drain()
            if answer is None and self._dashboard is not None:
                await self._dashboard.streams.serve(reader, writer, _left(who))
        except asyncio.LimitOverrunError:
            writer.write(http.message(text(400, "the request is too long")))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            # a port scanner, or a scraper that went away: what it has not read is not kept for it
            writer.transport.abort()
        finally:
            writer.close()

    def _identity(self, writer: asyncio.StreamWriter) -> Identity | None:
        """Who is at the other end; None where nobody has a certificate."""
        if self._access.certificates is None:
            return None
        from gcserver.admin.https import identity_of

        return identity_of(writer.get_extra_info("ssl_object"))

    def _respond(self, head: bytes, who: Identity | None, local: bool) -> tuple[Answer | None, bool]:
        """(answer, or None for a stream of events; whether with a body). ``local``: it came to a loopback address."""
        if who is not None and not roles.suffices(who.role, roles.METRICS):
            said = f"expected a certificate with the role {roles.METRICS} or a higher one; {who.name!r} has none"
            return self._denied(403, said), True
        try:
            request = http.parse(head)
        except http.Refused as refused:
            return refused.answer, True
        try:
            answer = self._answer(request, who is None, local)
        except Exception as error:  # a defect: the scraper sees it fail, the daemon goes on
            log.exception("a request for %s failed", request.path)
            answer = text(500, f"{type(error).__name__}: {error}")
        return answer, request.method == "GET"

    def _answer(self, request: Request, anybody: bool, local: bool) -> Answer | None:
        """None: to be answered with a stream of events. ``anybody``: nobody was asked for a certificate."""
        page = self._dashboard is not None and _for_people(request.path)
        names = self._dashboard.names if self._dashboard is not None else frozenset()
        host = request.headers.get("host", "")
        # What is served to this machine alone is not for a stranger's page in a browser here either. A scraper that
        # comes over the network does so by whichever name the node has there; one here may leave the header out.
        if anybody and (page or (local and host)) and not pages.is_own(host, names):
            return self._denied(421, f"expected an address or a name of this node as Host, got {host[:100]!r}")
        if self._dashboard is None or not page:
            return self._route(request)
        if request.path == EVENTS and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            # It could not read them, but it could take all the places.
            return self._denied(403, "expected this node's own page to ask, not one of another site")
        answer = self._dashboard.answer(request)
        return answer if answer is not None or request.path == EVENTS else self._route(request)

    def _denied(self, status: int, said: str) -> Answer:
        self._access.count(DENIED)
        return text(status, said)

    def _route(self, request: Request) -> Answer:
        if request.path == "/metrics":
            self._refresh()
            try:
                encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
            except (TypeError, ValueError):
                # The library trips over versions that are no numbers: the plain form will do for whoever asks for one.
                encode, kind = exposition.choose_encoder("")
            return Answer(200, kind, encode(self._metrics.registry))
        if request.path == "/healthz":
            return text(200, "ok")
        if request.path == "/readyz":
            reason = self._ready()
            return text(503, reason) if reason else text(200, "ok")
        return text(404, "here are /metrics, /healthz and /readyz" + (", and a page at /" if self._dashboard else ""))


def _for_people(path: str) -> bool:
    return path == pages.ROOT or path.startswith(pages.PARTS)


def _loopback(writer: asyncio.StreamWriter) -> bool:
    """Whether a connection was made to an address that only this machine has."""
    name = writer.get_extra_info("sockname")
    return isinstance(name, tuple) and ipaddress.ip_address(name[0].partition("%")[0]).is_loopback


def _left(who: Identity | None) -> float:
    """For how many seconds somebody may be told more without showing a certificate again."""
    if who is None:
        return streams.MAX_AGE
    return max((who.until - dt.datetime.now(dt.UTC)).total_seconds(), 0.0)


def _nothing() -> None:
    pass


async def serve(
    metrics: Metrics,
    host: str,
    port: int,
    ready: Callable[[], str],
    refresh: Callable[[], None] = _nothing,
    access: Access = OPEN,
    dashboard: Dashboard | None = None,
) -> MetricsServer:
    """Serve ``metrics`` over HTTP in the running loop. Raises OSError, whose text names address and key.

    ``ready`` returns why the daemon takes no jobs, "" when it does; ``refresh`` is called before every scrape, so that
    gauges are read when somebody asks rather than kept current for nobody. ``access``, ``dashboard``: see
    :class:`MetricsServer`.
    """
    server = MetricsServer(metrics, ready, refresh, access, dashboard)
    await server.start(host, port)
    return server
