"""The gRPC service on `node.admin`: what the daemon says and does for an operator.

What may live here: the server, its methods, health and reflection. What may not: the answers (a `Source` gives them),
field by field translation (`convert.py`), how refusals look on the wire (`statuses.py`), who may call what
(`guard.py`).
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

# gRPC's own lines on stderr ("E0000 ... add_port") say nothing that the errors below do not say better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcproto.advice import BANDWIDTH_FORM, MAX_BANDWIDTHS, is_bandwidth
from gcproto.modes import STATIC
from gcserver import values
from gcserver.admin import convert
from gcserver.admin.access import OPEN, Access
from gcserver.admin.guard import Guard
from gcserver.admin.handshakes import Handshakes
from gcserver.admin.logs import LogRing
from gcserver.admin.logstreams import LogStreams
from gcserver.admin.source import MAX_REQUEST, AdminError, ErrorKind, NodeState, PlanRule, Source
from gcserver.admin.statuses import SERVICE

if TYPE_CHECKING:
    from gcserver.admin.audit_log import AuditLog
    from gcserver.admin.certificates import Certificates, Material

#: How long requests under way may take when the server stops, seconds.
_GRACE: Final = 1.0
#: A connection is made anew after this long at the latest, so that a CA that is no longer trusted ends what it let in.
_MAX_AGE_MS: Final = 3_600_000
#: and calls that are under way then may take so much longer
_LAST_CALLS_MS: Final = 600_000
#: kind of error that a TLS connection is counted as which led to no call
HANDSHAKE_FAILED: Final = "admin_handshake_failed"


class Admin(pb_grpc.AdminServiceServicer):
    """The methods of `AdminService` over a source. They raise AdminError; the guard makes a status of that."""

    def __init__(self, source: Source, logs: LogStreams, changed: Callable[[], Awaitable[None]]) -> None:
        self._source = source
        self._logs = logs
        self._changed = changed

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return convert.status(self._source.node())

    async def ListPeers(self, request: pb.ListPeersRequest, context: Any) -> pb.ListPeersResponse:
        return pb.ListPeersResponse(peers=[convert.peer(p) for p in self._source.peers()])

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=[convert.job(j) for j in self._source.jobs()])

    async def ListTensors(self, request: pb.ListTensorsRequest, context: Any) -> pb.ListTensorsResponse:
        found = await self._source.tensors(request.job, request.domain, request.pattern)
        return pb.ListTensorsResponse(tensors=[convert.tensor(t) for t in found])

    async def SetCodec(self, request: pb.SetCodecRequest, context: Any) -> pb.SetCodecResponse:
        if not request.codec.strip():
            text = 'codec: expected a spec such as "none" or "topk(ratio=0.01)", got an empty one'
            raise AdminError(ErrorKind.INVALID, text, "codec")
        result = await self._source.set_codec(request.job, request.pattern or "*", request.codec.strip())
        return convert.change(result, pb.SetCodecResponse)

    async def GetPlan(self, request: pb.GetPlanRequest, context: Any) -> pb.GetPlanResponse:
        return convert.plan(await self._source.plan(request.job, request.timeline))

    async def SetPlan(self, request: pb.SetPlanRequest, context: Any) -> pb.SetPlanResponse:
        rules = tuple(PlanRule(r.pattern, r.codec.strip(), r.scheme) for r in request.rules)
        by_hand = bool(rules or request.replace)
        chosen = bool(request.mode or request.quality)
        if not by_hand and not chosen:
            text = "rules: expected at least one, replace to go back to the defaults, or a mode; got none"
            raise AdminError(ErrorKind.INVALID, text, "rules")
        if by_hand and request.mode not in ("", STATIC):
            text = f"mode: expected {STATIC!r} together with rules, got {request.mode!r}, which makes its own"
            raise AdminError(ErrorKind.INVALID, text, "mode")
        if by_hand and request.quality:
            text = f"quality: expected none together with rules, which nobody plans, got {request.quality!r}"
            raise AdminError(ErrorKind.INVALID, text, "quality")
        # An operator's rules make the mode static by themselves, from whichever node they come.
        if by_hand:
            result = await self._source.set_plan(request.job, rules, request.replace)
        else:
            result = await self._source.set_mode(request.job, request.mode, request.quality)
        return convert.change(result, pb.SetPlanResponse)

    async def Replan(self, request: pb.ReplanRequest, context: Any) -> pb.ReplanResponse:
        return convert.change(await self._source.replan(request.job), pb.ReplanResponse)

    async def SetController(self, request: pb.SetControllerRequest, context: Any) -> pb.SetControllerResponse:
        parameters = dict(request.parameters)
        result = await self._source.set_controller(request.job, request.controller.strip(), parameters)
        return convert.change(result, pb.SetControllerResponse)

    async def GetProfile(self, request: pb.GetProfileRequest, context: Any) -> pb.GetProfileResponse:
        found = await self._source.profile(request.job)
        return pb.GetProfileResponse(domains=[convert.alike(pb.DomainProfile, d) for d in found])

    async def Advise(self, request: pb.AdviseRequest, context: Any) -> pb.AdviseResponse:
        bad = [b for b in request.bandwidths if not is_bandwidth(b)]
        if bad:
            text = f"bandwidths: expected {BANDWIDTH_FORM}, got {bad[0]}"
            raise AdminError(ErrorKind.INVALID, text, "bandwidths")
        if (count := len(request.bandwidths)) > MAX_BANDWIDTHS:
            # Each takes the planning process seconds, and plans of other jobs wait for it.
            text = f"bandwidths: expected at most {MAX_BANDWIDTHS}, got {count}"
            raise AdminError(ErrorKind.INVALID, text, "bandwidths")
        found = await self._source.advise(request.job, tuple(request.bandwidths))
        return pb.AdviseResponse(domains=[convert.alike(pb.Advice, d) for d in found])

    async def StartTrace(self, request: pb.StartTraceRequest, context: Any) -> pb.StartTraceResponse:
        if not math.isfinite(request.seconds):
            raise AdminError(ErrorKind.INVALID, f"seconds: expected a number, got {request.seconds}", "seconds")
        nodes = tuple(request.nodes)
        found = await self._source.start_trace(request.job, request.steps, request.seconds, nodes)
        return convert.alike(pb.StartTraceResponse, found)

    async def StopTrace(self, request: pb.StopTraceRequest, context: Any) -> pb.StopTraceResponse:
        return convert.alike(pb.StopTraceResponse, await self._source.stop_trace())

    async def GetTrace(self, request: pb.GetTraceRequest, context: Any) -> AsyncIterator[pb.GetTraceResponse]:
        async for part in self._source.trace():
            yield convert.trace_part(part)

    async def GetLogs(self, request: pb.GetLogsRequest, context: Any) -> None:
        await self._logs.serve(request, context.write)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        timeout = request.timeout_seconds
        if not math.isfinite(timeout) or timeout < 0:
            text = f"timeout_seconds: expected 0 or more seconds, got {timeout}"
            raise AdminError(ErrorKind.INVALID, text, "timeout_seconds")
        result = await self._source.drain(timeout, request.reason)
        await self._changed()
        return pb.DrainResponse(message=result.message, jobs_running=result.jobs_running)


class Health(health.aio.HealthServicer):
    """grpc.health.v1 that looks at the source whenever it is asked."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    async def refresh(self) -> None:
        """Tell watchers. A degraded daemon serves; one that drains takes no new jobs."""
        serving = self._source.node().state in (NodeState.SERVING, NodeState.DEGRADED)
        kinds = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", SERVICE):
            await self.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        await self.refresh()
        return await super().Check(request, context)


class AdminServer:
    """A running server. ``address`` is what was bound, with the port the system chose if it was 0."""

    def __init__(
        self, server: Any, health_service: Health, logs: LogStreams, address: str, handshakes: Handshakes,
        audit: AuditLog | None,
    ) -> None:  # fmt: skip
        self._server = server
        self._logs = logs
        self._health = health_service
        self._handshakes = handshakes
        self._audit = audit
        self.address = address

    def settle(self) -> None:
        """Bring the counts up to date."""
        self._handshakes.settle()

    async def stop(self) -> None:
        """Let requests under way end, then close."""
        self._logs.close()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_GRACE)
        if self._audit is not None:
            await self._audit.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)


async def serve(source: Source, address: str, access: Access = OPEN, ring: LogRing | None = None) -> AdminServer:
    """Serve `source` on ``host:port`` or ``unix:/path`` in the running loop. Raises OSError, whose text is all.

    ``ring``: what the daemon logs; None: nothing.

    A Unix socket is served without TLS, whatever certificates there are: its mode says who may connect.
    """
    path = Path(address.removeprefix("unix:")) if address.startswith("unix:") else None
    certificates = access.certificates if path is None else None
    handshakes = Handshakes(lambda: access.count(HANDSHAKE_FAILED))
    server = grpc.aio.server(
        interceptors=(Guard(certificates is not None, access.audit, access.count, handshakes, path=str(path or "")),),
        options=[
            # without this a second daemon would share the port and take half of the requests
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_REQUEST),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_age_ms", _MAX_AGE_MS),
            ("grpc.max_connection_age_grace_ms", _LAST_CALLS_MS),
        ],
    )
    health_service = Health(source)
    await health_service.refresh()
    logs = LogStreams(ring or LogRing(), lambda: (source.node().node, source.node().incarnation))
    pb_grpc.add_AdminServiceServicer_to_server(Admin(source, logs, health_service.refresh), server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = _bind(server, address, path, _credentials(certificates, handshakes) if certificates else None)
    except OSError:
        await server.stop(None)
        raise
    await server.start()
    if path is None:
        address = f"{address.rpartition(':')[0]}:{port}"
    return AdminServer(server, health_service, logs, address, handshakes, access.audit)


def _credentials(certificates: Certificates, handshakes: Handshakes) -> Any:
    """mTLS with whatever certificates are newest when a connection begins."""
    used = certificates.current()

    def newest() -> Any:
        nonlocal used
        handshakes.began()
        found = certificates.current()
        if found is used:
            return None  # gRPC goes on with what it has
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), newest, require_client_authentication=True)


def _configuration(material: Material) -> Any:
    pair = (material.key_pem, material.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.ca_pem)


def _bind(server: Any, address: str, path: Path | None, credentials: Any) -> int:
    if path is not None:
        _clear(path)
    elif address.rpartition(":")[2] != "0":
        try:
            values.read_endpoint(address)  # gRPC would take port 99999 modulo 65536
        except ValueError as error:
            raise OSError(f"node.admin: {error}; got {address!r}") from None
    before = os.umask(0o177)  # a Unix socket is nobody else's from its first moment on
    try:
        if credentials is not None:
            port: int = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
        return port
    except RuntimeError as error:
        raise _why(address, error) from None
    finally:
        os.umask(before)


def _clear(path: Path) -> None:
    """Make way for a Unix socket: remove one that nobody serves. gRPC would take even a served one away."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"node.admin: unix:{path} is served by another process; stop it or set another node.admin")


def _why(address: str, error: RuntimeError) -> OSError:
    """gRPC says only that it could not bind; bind once more to hear the reason."""
    if address.startswith("unix:"):
        return OSError(f"node.admin: {address} cannot be bound: {error}")
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return OSError(f"node.admin: {address} cannot be bound: {error}")
    except OSError as reason:
        hint = f"`ss -ltnp 'sport = :{port}'` shows who uses it; stop that or set another node.admin"
        return OSError(f"node.admin: {address} cannot be bound: {os.strerror(reason.errno or 0)}; {hint}")
