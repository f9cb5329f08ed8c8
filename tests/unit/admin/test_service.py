"""The admin service over real channels: answers, refusals with details, health, reflection, addresses in use."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver.admin import convert
from gcserver.admin.service import Admin, serve
from gcserver.admin.source import AdminError, ErrorKind, JobState, JobStatus, NodeState, PeerState, PlanRule
from gcserver.admin.statuses import LONGEST, SERVICE, rich_status
from tests.unit.admin.source import BIG, FixedSource

T = TypeVar("T")
ZIP = pb.PlanRule(pattern="*", codec="zip")


def talk(work: Callable[[FixedSource, Any], Awaitable[T]], address: str = "127.0.0.1:0") -> T:
    """A server, a channel to it, ``work(source, channel)``, and both closed again."""

    async def all_of_it() -> T:
        source = FixedSource()
        server = await serve(source, address)
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                return await work(source, channel)
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


def ask_from_thread(work: Callable[[str], T]) -> T:
    """``work(address)`` in a thread beside a server, for clients that block."""

    async def all_of_it() -> T:
        server = await serve(FixedSource(), "127.0.0.1:0")
        try:
            return await asyncio.to_thread(work, server.address)
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


def test_every_answer_arrives_whole() -> None:
    async def work(source: FixedSource, channel: Any) -> None:
        stub = pb_grpc.AdminServiceStub(channel)
        s = await stub.GetStatus(pb.GetStatusRequest())
        assert (s.node, s.incarnation, s.state, s.uptime_seconds) == ("a", BIG, pb.NODE_STATE_SERVING, 7500.0)
        assert dict(s.errors) == {"frames_corrupt": 2}
        assert (s.lanes[0].pid, list(s.lanes[0].cores), s.lanes[0].rounds) == (411, [0, 1], 77)
        b, c = (await stub.ListPeers(pb.ListPeersRequest())).peers
        assert (b.name, b.state, b.rtt_seconds, b.frames_resent) == ("b", pb.PEER_STATE_UP, 0.0012, 3)
        assert c.state == pb.PEER_STATE_REFUSED and not c.HasField("last_heard_seconds")
        (j,) = (await stub.ListJobs(pb.ListJobsRequest())).jobs
        assert (j.label, j.step, [list(m.ranks) for m in j.members]) == ("gpt", 41, [[0, 1], [2]])
        assert j.domains[0].waiting_for[0].reason == "exchange"
        tensors = (await stub.ListTensors(pb.ListTensorsRequest(pattern="wte*"))).tensors
        assert [(t.name, list(t.shape), t.bytes_wire) for t in tensors] == [("wte.weight", [64, 16], 2048)]
        changed = await stub.SetCodec(pb.SetCodecRequest(job="gpt", codec=" fp16 "))
        assert (changed.plan_version, changed.effective_step) == (3, 44)
        assert source.asked == [("set_codec", "gpt", "*", "fp16")]
        rules = [pb.PlanRule(pattern="w*", codec=" fp16 ", scheme="all", origin="whose")]
        changed = await stub.SetPlan(pb.SetPlanRequest(job="gpt", rules=rules, replace=True))
        assert (changed.plan_version, changed.effective_step) == (4, 46)
        assert source.asked[1:] == [("set_plan", "gpt", (PlanRule("w*", "fp16", "all"),), True)]
        plan = await stub.GetPlan(pb.GetPlanRequest())
        assert (plan.job, plan.proposed_version, [r.origin for r in plan.rules]) == ("gpt", 2, ["plan"])
        world, calls = plan.domains
        assert (world.plan_version, world.since_step, len(world.rules)) == (1, 12, 2)
        assert [(s.first_step, s.plan_version) for s in world.switches] == [(44, 2)]
        topk, dense = world.groups
        assert (topk.blocks, topk.tensors, topk.bytes, topk.scheme, topk.rule.pattern) == (
            12,
            7,
            3 << 20,
            "all",
            "wte*",
        )
        assert (dense.codec, dense.reason) == ("none", "no rule matches; small: to everyone at once")
        assert not dense.HasField("rule") and not calls.groups

    talk(work)


def test_every_state_has_its_number() -> None:
    """A state that the contract does not know would fail only when it happens."""
    for state in NodeState:
        assert pb.NodeState.Value(f"NODE_STATE_{state.name}")
    for state in PeerState:
        assert pb.PeerState.Value(f"PEER_STATE_{state.name}")
    for state in JobState:
        assert convert.job(JobStatus("j", "", state)).state == pb.JobState.Value(f"JOB_STATE_{state.name}")


@pytest.mark.parametrize(
    ("request_", "code", "text", "field"),
    [
        (pb.SetCodecRequest(codec="topk(ratio=3)"), code_pb2.INVALID_ARGUMENT, "ratio", "codec"),
        (pb.SetCodecRequest(codec="  "), code_pb2.INVALID_ARGUMENT, "got an empty one", "codec"),
        (pb.SetCodecRequest(job="bert", codec="none"), code_pb2.NOT_FOUND, "jobs: gpt", "job"),
        (pb.SetCodecRequest(codec="later"), code_pb2.UNAVAILABLE, "peer b does not answer", ""),
        (pb.SetPlanRequest(), code_pb2.INVALID_ARGUMENT, "expected at least one", "rules"),
        (
            pb.SetPlanRequest(rules=[pb.PlanRule(pattern="*", codec="none")], quality="best"),
            code_pb2.INVALID_ARGUMENT,
            "expected none together with rules",
            "quality",
        ),
        (
            pb.SetPlanRequest(rules=[pb.PlanRule(pattern="*", codec="zip")]),
            code_pb2.INVALID_ARGUMENT,
            "zip",
            "rules[0]",
        ),
        (pb.GetPlanRequest(job="bert"), code_pb2.NOT_FOUND, "jobs: gpt", "job"),
        (pb.ListTensorsRequest(job="bert"), code_pb2.NOT_FOUND, "no job 'bert' here", "job"),
        (pb.AdviseRequest(bandwidths=[float("nan")]), code_pb2.INVALID_ARGUMENT, "to 1e+15, got nan", "bandwidths"),
        (pb.AdviseRequest(bandwidths=[1e9] * 65), code_pb2.INVALID_ARGUMENT, "at most 64, got 65", "bandwidths"),
        (pb.DrainRequest(timeout_seconds=-1), code_pb2.INVALID_ARGUMENT, "0 or more", "timeout_seconds"),
        (pb.DrainRequest(timeout_seconds=float("nan")), code_pb2.INVALID_ARGUMENT, "0 or more", "timeout_seconds"),
    ],
)
def test_a_refusal_is_a_rich_status(request_: Any, code: int, text: str, field: str) -> None:
    def ask(address: str) -> Any:
        with grpc.insecure_channel(address) as channel:
            method = getattr(pb_grpc.AdminServiceStub(channel), type(request_).__name__.removesuffix("Request"))
            with pytest.raises(grpc.RpcError) as caught:
                method(request_, timeout=5)
            return rpc_status.from_call(caught.value)

    status = ask_from_thread(ask)
    assert status.code == code
    assert text in status.message
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert info.domain == SERVICE and info.metadata.get("field", "") == field
    if code == code_pb2.INVALID_ARGUMENT:
        assert status.details[1].Unpack(bad)
        assert bad.field_violations[0].field == field


def test_a_refusal_that_quotes_a_long_name_still_says_why() -> None:
    """From 8 KiB of headers on gRPC refuses some at random, beyond 16 KiB all: they come as errors of the transport."""
    for long in ("x" * 20_000, "\u20ac" * 20_000):
        status = rich_status(AdminError(ErrorKind.INVALID, f"no controller {long}; expected one of none", "controller"))
        assert len(status.message.encode()) <= LONGEST + 8 and len(status.SerializeToString()) < 3 * LONGEST
        assert 3 * len(status.message.encode()) + 4 / 3 * len(status.SerializeToString()) < 8192 - 512
        assert status.message.startswith("no controller") and status.message.endswith("expected one of none")

    def ask(address: str) -> Any:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            pb_grpc.AdminServiceStub(channel).GetPlan(pb.GetPlanRequest(job="\u20ac" * 20_000), timeout=5)
        return rpc_status.from_call(caught.value)

    assert ask_from_thread(ask).code == code_pb2.NOT_FOUND


def test_several_jobs_and_none_named() -> None:
    async def work(source: FixedSource, channel: Any) -> None:
        source.jobs_here = [*source.jobs_here, JobStatus("bert", "ff" * 16, JobState.RUNNING)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.AdminServiceStub(channel).SetCodec(pb.SetCodecRequest(codec="none"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "gpt, bert" in caught.value.details()

    talk(work)


def test_a_defect_is_internal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work(source: FixedSource, channel: Any) -> None:
        source.defect = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest())
        source.defect = False
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError: of all things" in caught.value.details()

    talk(work)
    assert any(record.exc_info for record in caplog.records)


def test_health_follows_the_daemon() -> None:
    async def work(source: FixedSource, channel: Any) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for state, expected in [
            (NodeState.SERVING, serving),
            (NodeState.DEGRADED, serving),
            (NodeState.STOPPING, not_serving),
            (NodeState.SERVING, serving),
        ]:
            source.state = state
            for name in ("", SERVICE):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == serving
        await pb_grpc.AdminServiceStub(channel).Drain(pb.DrainRequest(timeout_seconds=5, reason="upgrade"))
        assert (await watch.read()).status == not_serving
        assert source.asked == [("drain", 5.0, "upgrade")]

    talk(work)


def test_a_stranger_can_call_it_by_reflection() -> None:
    """Descriptors come from the server alone, as grpcurl does it."""

    def ask(address: str) -> str:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
            method = DescriptorPool(database).FindServiceByName(SERVICE).FindMethodByName("GetStatus")
            request = message_factory.GetMessageClass(method.input_type)
            response = message_factory.GetMessageClass(method.output_type)
            call = channel.unary_unary(
                f"/{SERVICE}/GetStatus",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            node: str = call(request(), timeout=5).node
            return node

    assert ask_from_thread(ask) == "a"


def test_a_port_in_use_is_said() -> None:
    async def work() -> None:
        first = await serve(FixedSource(), "127.0.0.1:0")
        try:
            with pytest.raises(
                OSError, match=r"node.admin: 127.0.0.1:\d+ cannot be bound: Address already in use; `ss "
            ):
                await serve(FixedSource(), first.address)
        finally:
            await first.stop()
        again = await serve(FixedSource(), first.address)  # and it is free again afterwards
        await again.stop()

    asyncio.run(work())


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "192.0.2.1:7460"])
def test_an_address_that_cannot_be_bound_is_said(address: str) -> None:
    with pytest.raises(OSError, match=r"node\.admin: "):
        asyncio.run(serve(FixedSource(), address))


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "run" / "admin.sock"

    async def work(source: FixedSource, channel: Any) -> str:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(OSError, match="is served by another process"):
            await serve(FixedSource(), f"unix:{path}")
        node: str = (await pb_grpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest())).node
        return node

    assert talk(work, f"unix:{path}") == "a"
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stale:  # what a killed daemon leaves behind
        stale.bind(str(path))
    assert talk(work, f"unix:{path}") == "a"


def test_no_method_is_left_to_the_generated_base() -> None:
    """The generated servicer refuses every call as not implemented."""
    methods = {m.name for m in pb.DESCRIPTOR.services_by_name["AdminService"].methods}
    assert methods and methods <= set(vars(Admin))
