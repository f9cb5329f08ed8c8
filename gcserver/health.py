"""`gcserver health`: whether the daemon of this configuration answers and takes jobs, for probes of containers.

What may live here: one call of grpc.health.v1. What may not: what healthy means (`gcserver/admin/service.py`), looking
at a daemon otherwise (`gcctl`).
"""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gcserver.config import Config
from gcserver.values import Address, read_endpoint

#: seconds; a daemon that answers does so at once
TIMEOUT: Final = 5.0


class Unhealthy(RuntimeError):
    """Nobody answers, or nobody can be asked; the message says at which address and what to do."""


def serving(config: Config) -> bool:
    """Whether the daemon takes jobs; False while it drains. Raises Unhealthy."""
    address = config.node.admin
    if not address:
        raise Unhealthy("node.admin is off, so nobody can be asked: give it a Unix socket (unix:/path)")
    if config.admin.files is not None and not address.startswith("unix:"):
        raise Unhealthy(
            f"{address} wants an operator's certificate, which a probe does not have: make node.admin a Unix socket "
            "(unix:/path), or ask with gcctl"
        )
    address = reached_at(address)
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise Unhealthy(f"no daemon answers at {address}: {error.details() or error.code().name}") from None
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def reached_at(admin: str) -> str:
    """Where this machine reaches a ``node.admin``: what listens on all addresses listens on loopback."""
    if admin.startswith("unix:"):
        return admin
    bound = read_endpoint(admin)
    if not bound.wildcard:
        return admin
    return Address("::1" if ":" in bound.host else "127.0.0.1", bound.port).endpoint
