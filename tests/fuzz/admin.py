"""Target: operators' requests, as the bytes that gRPC hands over, to a daemon with a running job.

An input is the name of a method and the request's bytes. Refusals carry a documented status; a defect would be one too,
INTERNAL, and is a failure here. The daemon answers and its job goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from google.protobuf.message import DecodeError

from gcproto import admin_pb2 as pb
from gcproto.messages import Rule, Unregister
from gcserver.admin import audit_log, roles
from gcserver.admin.guard import Guard
from gcserver.admin.handshakes import Handshakes
from gcserver.admin.logs import LogRing
from gcserver.admin.logstreams import LogStreams
from gcserver.admin.service import Admin
from gcserver.admin.statuses import SERVICE
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from tests.fuzz import mutate
from tests.fuzz.control import JOB, quiet, sound
from tests.fuzz.supervisors import Node, Worker, alone

_RULE: Final = pb.PlanRule(pattern="w*", codec="topk(ratio=0.01)", scheme="all")
REQUESTS: Final[tuple[tuple[str, Any], ...]] = (
    ("GetStatus", pb.GetStatusRequest()), ("ListPeers", pb.ListPeersRequest()), ("ListJobs", pb.ListJobsRequest()),
    ("ListTensors", pb.ListTensorsRequest(job="train", domain="ddp", pattern="[wb]*")),
    ("SetCodec", pb.SetCodecRequest(job="train", pattern="w", codec="fp16")),
    ("GetPlan", pb.GetPlanRequest(job="train", timeline=True)),
    ("SetPlan", pb.SetPlanRequest(job=JOB.hex(), rules=[_RULE, _RULE], replace=True)),
    ("SetPlan", pb.SetPlanRequest(mode="auto", quality="fast")), ("Replan", pb.ReplanRequest(job="train")),
    ("SetController", pb.SetControllerRequest(controller="dc2-da2", parameters={"k_min": 0.01, "k_max": 0.5})),
    ("GetProfile", pb.GetProfileRequest(job="train")), ("Advise", pb.AdviseRequest(bandwidths=[1e6, 1e9])),
    ("StartTrace", pb.StartTraceRequest(job="train", steps=3, seconds=5.0, nodes=["a"])),
    ("StopTrace", pb.StopTraceRequest()), ("GetTrace", pb.GetTraceRequest()),
    ("GetLogs", pb.GetLogsRequest(since_seconds=60, level=pb.LOG_LEVEL_INFO, after_sequence=1, incarnation=1)),
    ("GetLogs", pb.GetLogsRequest(follow=True)),
    ("Drain", pb.DrainRequest(timeout_seconds=5.0, reason="upgrade")),
)  # fmt: skip
_KINDS: Final = {type(request).__name__: type(request) for _, request in REQUESTS}


class Aborted(Exception):
    """What a context raises to end a call."""


class Context:
    """As much of a call's context as the service uses."""

    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""
        self.written: list[Any] = []

    async def write(self, answer: Any) -> None:
        self.written.append(answer)

    def peer(self) -> str:
        return "unix:"

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.code, self.details = code, details
        raise Aborted


class Audit:
    """Stands where the audit log is: its lines are made as for the file, and kept."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def append(self, record: dict[str, Any]) -> None:
        line = audit_log._line(record)
        assert len(line) <= audit_log.MAX_LINE and line.count(b"\n") == 1, f"a line of {len(line)} bytes"
        self.lines.append(line)


class Requests:
    """A supervisor with a job of one node and its admin service."""

    name = "admin"

    def __init__(self) -> None:
        quiet()
        for method, request in REQUESTS:
            assert self.feed(_input(method, request.SerializeToString())) != "no request"

    def close(self) -> None:
        pass

    def draw(self, rng: random.Random) -> bytes:
        method, request = rng.choice(REQUESTS)
        kind = rng.randrange(4)
        if kind == 0:
            other = rng.choice(REQUESTS)[1].SerializeToString()
            return _input(method, mutate.spoil(rng, request.SerializeToString(), other))
        changed = type(request)()
        changed.CopyFrom(request)
        for _ in range(rng.choice((1, 1, 2))):
            _change(rng, changed)
        return _input(method, changed.SerializeToString())

    def feed(self, data: bytes) -> str:
        method, raw = msgspec.msgpack.decode(data, type=tuple[str, bytes])
        try:
            request = _KINDS[f"{method}Request"].FromString(raw)
        except DecodeError:
            return "no request"
        return asyncio.run(_ask(method, request))


def _input(method: str, raw: bytes) -> bytes:
    return msgspec.msgpack.encode((method, raw))


def _change(rng: random.Random, request: Any) -> None:
    """Set one field to something else; rules are fields of their own."""
    fields = request.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(list(fields))
    if field.type == field.TYPE_MESSAGE:
        if field.message_type.GetOptions().map_entry:
            request.parameters[rng.choice(("k_min", "start", *mutate.WORDS[:20]))] = rng.choice(mutate.FLOATS)
        else:
            rules = getattr(request, field.name)
            for _ in range(rng.choice((1, 1, 300))):
                rules.append(_RULE)
            _change(rng, rules[0])
        return
    value: Any
    if field.type == field.TYPE_STRING:
        value = rng.choice(mutate.WORDS)
        if rng.random() < 0.5:
            value = mutate.spoil(rng, _RULE.codec.encode()).decode("utf-8", "replace")
    elif field.type == field.TYPE_UINT32:
        value = rng.choice((0, 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
    elif field.type == field.TYPE_BOOL:
        value = rng.random() < 0.5
    elif field.type == field.TYPE_UINT64:
        value = rng.choice((0, 1, 2**32, 2**64 - 1, rng.randrange(2**64)))
    elif field.type == field.TYPE_ENUM:
        value = rng.choice((0, 1, 5, 6, -1, 2**31 - 1, -(2**31)))
    else:
        value = rng.choice((*mutate.FLOATS, rng.uniform(-1e9, 1e9)))
    if isinstance(getattr(request, field.name), str | bool | float | int):
        setattr(request, field.name, value)
    else:
        getattr(request, field.name).extend([value] * rng.choice((1, 3, 100)))


async def _ask(method: str, request: Any) -> str:
    root = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-", dir="/dev/shm"))
    node = Node(0, 100, root / "a")
    worker = Worker(node)
    context = Context()
    try:
        await alone(node, worker, JOB)
        node.feed(cx.SetPlan(1, JOB.hex(), (Rule("b", "fp16"),)))

        async def changed() -> None:
            pass

        ring = LogRing()
        ring.append(1.0, "info", "gcserver", "ready")
        service = Admin(node.status, LogStreams(ring, lambda: ("a", 1)), changed)
        audit = Audit()
        guard = Guard(False, audit, node.count, Handshakes(lambda: None))  # type: ignore[arg-type]
        path = f"/{SERVICE}/{method}"
        streams = pb.DESCRIPTOR.services_by_name["AdminService"].methods_by_name[method].server_streaming
        inner = getattr(service, method)
        if inspect.isasyncgenfunction(inner):
            work = _written(guard._yielding(path, inner)(request, context), context)
        else:
            work = (guard._writing if streams else guard._answering)(path, inner)(request, context)
        call = asyncio.ensure_future(work)
        await _settled(node, 1, call)
        outcome = _outcome(call, context)
        assert len(audit.lines) == (roles.METHODS[path] == roles.OPERATOR)
        if node.stopped.is_set():
            # A drain that waits for nobody ends the daemon, which hears nothing any more.
            assert method == "Drain"
            return f"{method} {outcome}, stopped"
        # Two steps later at most a plan has its step; the job goes on whatever was asked.
        assert node.machine.jobs[JOB].domains[0].settled == 4
        status = await service.GetStatus(pb.GetStatusRequest(), Context())
        assert status.node == "a"
        worker.say(Unregister())
        await asyncio.sleep(0)
        assert JOB not in node.machine.jobs
        sound(node)
        return f"{method} {outcome}"
    finally:
        worker.sock.close()
        node.close()
        shutil.rmtree(root, ignore_errors=True)


async def _written(answers: AsyncIterator[Any], context: Context) -> None:
    """As gRPC does with what a method yields."""
    async for answer in answers:
        await context.write(answer)


async def _settled(node: Node, first: int, call: asyncio.Future[Any]) -> None:
    """Four steps beside a call; one that still waits then is cancelled, as by a client that went away."""
    for step in range(first, first + 4):
        for _ in range(5):
            await asyncio.sleep(0)
        node.feed(cx.LaneSaid(0, fx.ReportStep((JOB, 0), step, False, node.machine.jobs[JOB].proposal, 5)))
    for _ in range(10):
        await asyncio.sleep(0)
    if not call.done():
        call.cancel()
    await asyncio.wait({call})


def _outcome(call: asyncio.Future[Any], context: Context) -> str:
    if call.cancelled():
        return "waits"
    error = call.exception()
    if error is None:
        for answer in context.written or [call.result()]:
            answer.SerializeToString()
        return "answered"
    if not isinstance(error, Aborted):
        raise error
    assert context.code is not grpc.StatusCode.INTERNAL, context.details
    # A status travels in a header.
    assert len(context.details.encode()) < 8 << 10, f"{len(context.details)} characters of explanation"
    return str(context.code.name)
