"""A collector of OpenTelemetry's as far as tests need one: a real HTTP receiver that decodes what it is sent.

What may live here: receiving. What may not: what should have come.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2


class Collector(ThreadingHTTPServer):
    """Takes traces at /v1/traces; answers ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Any] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """(attributes of the resource, span) of all that came."""
        return [
            (plain(resource.resource.attributes), span)
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        self.server.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not to stderr."""


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as they were given."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running one."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
