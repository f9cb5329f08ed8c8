"""A service over real gRPC with certificates, and clients with theirs.

What may live here: starting and asking. What may not: what the answer should be.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver.admin.access import Access, Paths
from gcserver.admin.audit_log import AuditLog
from gcserver.admin.certificates import Certificates
from gcserver.admin.service import AdminServer, serve
from tests.unit.admin.source import FixedSource

T = TypeVar("T")
CODEC = pb.SetCodecRequest(job="gpt", pattern="wte*", codec="fp16")


class Service:
    """A running one: what it counted, and calls to it as whoever has ``paths``."""

    def __init__(self, server: AdminServer, source: FixedSource, counted: Counter[str], audit: Path) -> None:
        self.server, self.source, self.counted = server, source, counted
        self._audit = audit

    def channel(self, paths: Paths | None) -> Any:
        """To the server as the operator whose files these are; None: without TLS."""
        if paths is None:
            return grpc.aio.insecure_channel(self.server.address)
        files = (paths.ca.read_bytes(), paths.key.read_bytes(), paths.certificate.read_bytes())
        return grpc.aio.secure_channel(self.server.address, grpc.ssl_channel_credentials(*files))

    async def ask(self, paths: Paths | None, request: Any) -> Any:
        """The answer (of a stream: all of them), or the grpc.RpcError in its place."""
        async with self.channel(paths) as channel:
            method = getattr(pb_grpc.AdminServiceStub(channel), type(request).__name__.removesuffix("Request"))
            try:
                call = method(request, timeout=60)
                return [answer async for answer in call] if hasattr(call, "__aiter__") else await call
            except grpc.RpcError as error:
                return error

    def audited(self) -> list[dict[str, Any]]:
        """The lines of the audit log."""
        text = self._audit.read_text()
        assert not text or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]


def secured(
    folder: Path, node: Paths | None, work: Callable[[Service], Awaitable[T]], address: str = "127.0.0.1:0"
) -> T:
    """``work(service)`` beside a service with the certificates ``node`` and an audit log."""

    async def all_of_it() -> T:
        counted: Counter[str] = Counter()

        def count(kind: str) -> None:
            counted[kind] += 1

        audit = AuditLog(folder / "audit.jsonl", lambda: count("audit_log_lost"))
        loop = asyncio.get_running_loop()
        certificates = None
        if node is not None:
            certificates = Certificates(node, lambda: loop.call_soon_threadsafe(count, "certificates_unusable"))
        source = FixedSource()
        server = await serve(source, address, Access(certificates, audit, count))
        try:
            return await work(Service(server, source, counted, folder / "audit.jsonl"))
        finally:
            await server.stop()

    return asyncio.run(all_of_it())
