"""Roles and the audit log over real gRPC with real certificates: who may do what, and what is written of it."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import re
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver import pki
from gcserver.admin import handshakes, roles
from gcserver.admin.callers import Caller
from gcserver.admin.guard import Guard
from gcserver.admin.handshakes import Handshakes
from gcserver.admin.service import serve
from gcserver.admin.source import ErrorKind
from tests.unit.admin.credentials import Folder
from tests.unit.admin.secured import CODEC, Service, secured
from tests.unit.admin.source import FixedSource

REQUESTS: list[Any] = [
    pb.GetStatusRequest(), pb.ListPeersRequest(), pb.ListJobsRequest(), pb.ListTensorsRequest(), pb.GetPlanRequest(),
    pb.GetProfileRequest(), pb.AdviseRequest(), pb.GetTraceRequest(), pb.GetLogsRequest(), CODEC,
    pb.SetPlanRequest(rules=[pb.PlanRule(pattern="*", codec="fp16")]), pb.ReplanRequest(),
    pb.SetControllerRequest(controller="dc2-da2"), pb.StartTraceRequest(), pb.StopTraceRequest(), pb.DrainRequest(),
]  # fmt: skip


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("ours"))


def needs(request: Any) -> str:
    name = type(request).__name__.removesuffix("Request")
    return roles.METHODS[f"/gradcomm.admin.v1.AdminService/{name}"]


def test_a_viewer_may_look_and_an_operator_do_everything(ours: Folder, tmp_path: Path) -> None:
    asked = {type(r).__name__.removesuffix("Request") for r in REQUESTS}
    assert asked == {m.name for m in pb.DESCRIPTOR.services_by_name["AdminService"].methods}, "no method is left out"
    viewer, operator = ours.operator("eve", "viewer"), ours.operator("alice", "operator")

    async def work(service: Service) -> None:
        for request in REQUESTS:
            answer = await service.ask(viewer, request)
            if needs(request) == "viewer":
                assert not isinstance(answer, grpc.RpcError), answer
                continue
            name = type(request).__name__.removesuffix("Request")
            assert answer.code() is grpc.StatusCode.PERMISSION_DENIED
            assert answer.details() == f"{name} needs the role operator; the certificate 'eve' has the role viewer"
            info = error_details_pb2.ErrorInfo()
            assert rpc_status.from_call(answer).details[0].Unpack(info) and info.reason == "DENIED"
        changes = [r for r in REQUESTS if needs(r) == "operator"]
        assert service.source.asked == [("advise", "", ())], "nothing that was refused reached the daemon"
        assert service.counted == {"admin_denied": len(changes)} and len(changes) == 7
        for request in REQUESTS:
            answer = await service.ask(operator, request)
            assert not isinstance(answer, grpc.RpcError), answer
        assert service.counted["admin_denied"] == len(changes)

    secured(tmp_path, ours.node(), work)


def test_health_and_reflection_need_a_role_too(ours: Folder, tmp_path: Path) -> None:
    """Methods that stream, of services that are not ours."""

    async def use(channel: Any) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        assert len((await listing.read()).list_services_response.service) == 3

    async def refused(channel: Any) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        for call in (
            health.Check(health_pb2.HealthCheckRequest(), timeout=60),
            health.Watch(health_pb2.HealthCheckRequest(), timeout=60).read(),
            # Nothing is sent: the refusal does not wait for it, and would leave the sending half-way ("internal").
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=60).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "needs the role viewer; the certificate 'nobody' has no role" in caught.value.details()

    async def work(service: Service) -> None:
        async with service.channel(ours.operator("eve", "viewer")) as channel:
            await use(channel)
        assert not service.counted
        async with service.channel(ours.nobody()) as channel:
            await refused(channel)
        assert service.counted == {"admin_denied": 3}

    secured(tmp_path, ours.node(), work)


def test_who_has_no_certificate_of_our_ca_gets_no_connection(
    ours: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "SETTLED", 0.0)
    foreign = Folder(tmp_path / "foreign").operator("alice", "operator")
    foreign.ca.write_bytes(ours.ca_file.read_bytes())  # it trusts our node; we do not know it
    node = ours.node()

    async def work(service: Service) -> None:
        for refused, whose in enumerate((None, ours.expired(), foreign, node), 1):
            answer = await service.ask(whose, CODEC)
            assert isinstance(answer, grpc.RpcError) and answer.code() is grpc.StatusCode.UNAVAILABLE
            service.server.settle()
            # gRPC's clients may try again by themselves
            assert service.counted["admin_handshake_failed"] >= refused
        assert service.source.asked == [] and service.audited() == []
        before = service.counted["admin_handshake_failed"]
        assert (await service.ask(ours.operator("alice", "operator"), CODEC)).plan_version == 3
        service.server.settle()
        assert service.counted["admin_handshake_failed"] == before

    secured(tmp_path, node, work)


def test_a_renewed_certificate_and_a_new_ca_are_used_at_once(tmp_path: Path) -> None:
    """Without a restart, and without a moment in which half of a renewal is used."""
    ours, next_one = Folder(tmp_path / "pki"), Folder(tmp_path / "next")
    alice, node = ours.operator("alice", "operator"), ours.node()
    bob = next_one.operator("bob", "operator")

    async def serial(service: Service) -> int:
        host, _, port = service.server.address.rpartition(":")
        pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=60)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    async def work(service: Service) -> None:
        assert (await service.ask(alice, pb.GetStatusRequest())).node == "a"
        first = await serial(service)
        # The key alone: what is in force stays.
        renewed = pki.node(ours.ca, "a", ["127.0.0.1"], 5)
        node.key.write_bytes(renewed.key_pem)
        assert await serial(service) == first and (await service.ask(alice, pb.GetStatusRequest())).node == "a"
        assert service.counted["certificates_unusable"] == 1
        node.certificate.write_bytes(renewed.certificate_pem)
        assert await serial(service) == renewed.certificate.serial_number != first
        assert (await service.ask(alice, pb.GetStatusRequest())).node == "a"
        assert service.counted["certificates_unusable"] == 1
        # Another CA beside the first: both let in. Then it alone.
        assert isinstance(await service.ask(bob, pb.GetStatusRequest()), grpc.RpcError)
        bob.ca.write_bytes(ours.ca_file.read_bytes())
        both = ours.ca_file.read_bytes() + next_one.ca.certificate_pem
        ours.ca_file.write_bytes(both)
        for whose in (alice, bob):
            assert (await service.ask(whose, pb.GetStatusRequest())).node == "a"
        under_new = pki.node(next_one.ca, "a", ["127.0.0.1"], 5)
        node.key.write_bytes(under_new.key_pem)
        node.certificate.write_bytes(under_new.certificate_pem)
        ours.ca_file.write_bytes(next_one.ca.certificate_pem)
        bob.ca.write_bytes(next_one.ca.certificate_pem)
        assert (await service.ask(bob, pb.GetStatusRequest())).node == "a"
        assert isinstance(await service.ask(alice, pb.GetStatusRequest()), grpc.RpcError)

    secured(tmp_path, node, work)


def test_a_certificate_that_expires_on_an_open_connection() -> None:
    """A connection is made with a certificate that held; calls are looked at one by one."""
    counted: list[str] = []
    now = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    guard = Guard(True, None, counted.append, Handshakes(lambda: None), lambda: now)
    method = "/gradcomm.admin.v1.AdminService/GetStatus"
    who = Caller("alice", "operator", "ipv4:10.0.0.1:1", now)
    assert guard._refusal(method, who) is None
    now += dt.timedelta(seconds=1)
    error = guard._refusal(method, who)
    assert error is not None and error.kind is ErrorKind.UNAUTHENTICATED
    assert error.message == "the certificate 'alice' expired on 2026-05-01 00:00 UTC; connect with a new one"
    assert counted == ["admin_denied"]


def test_a_method_that_is_not_in_the_table_is_refused(
    ours: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = {m: r for m, r in roles.METHODS.items() if not m.endswith("/GetStatus")}
    monkeypatch.setattr(roles, "METHODS", rest)

    async def work(service: Service) -> None:
        for whose in (ours.operator("alice", "operator"), ours.operator("eve", "viewer")):
            answer = await service.ask(whose, pb.GetStatusRequest())
            assert answer.code() is grpc.StatusCode.PERMISSION_DENIED and "nobody may call it" in answer.details()

    secured(tmp_path, ours.node(), work)


# -------------------------------------------------------------------------------------------- audit log
def test_every_attempt_to_change_is_a_line(ours: Folder, tmp_path: Path) -> None:
    alice, eve = ours.operator("alice", "operator"), ours.operator("eve", "viewer")

    async def work(service: Service) -> None:
        await service.ask(alice, CODEC)
        await service.ask(eve, CODEC)
        await service.ask(alice, pb.SetCodecRequest(codec="topk(ratio=3)"))
        await service.ask(alice, pb.GetStatusRequest())
        lines = service.audited()
        for line in lines:
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
            assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", line.pop("peer"))
        arguments = {"job": "gpt", "pattern": "wte*", "codec": "fp16"}
        assert lines[:2] == [
            {
                "who": "alice", "role": "operator", "method": "SetCodec", "arguments": arguments,
                "outcome": "done", "status": "OK", "message": "takes effect at step 44 on every node",
            },
            {
                "who": "eve", "role": "viewer", "method": "SetCodec", "arguments": arguments,
                "outcome": "refused", "status": "PERMISSION_DENIED",
                "message": "SetCodec needs the role operator; the certificate 'eve' has the role viewer",
            },
        ]  # fmt: skip
        third = lines[2]
        assert (third["outcome"], third["status"]) == ("refused", "INVALID_ARGUMENT") and "ratio" in third["message"]
        assert third["arguments"] == {"codec": "topk(ratio=3)"} and len(lines) == 3

    secured(tmp_path, ours.node(), work)


def test_a_call_without_an_answer_may_have_happened(ours: Folder, tmp_path: Path) -> None:
    alice = ours.operator("alice", "operator")

    async def work(service: Service) -> None:
        reached, forever = asyncio.Event(), asyncio.Event()

        async def never(job: str) -> Any:
            reached.set()
            await forever.wait()

        service.source.replan = never  # type: ignore[method-assign]
        async with service.channel(alice) as channel:
            call = pb_grpc.AdminServiceStub(channel).Replan(pb.ReplanRequest(job="gpt"))
            waiting = asyncio.ensure_future(call.wait_for_connection())
            await reached.wait()
            call.cancel()
            waiting.cancel()
            while not service.audited():
                await asyncio.sleep(0.01)
        await service.ask(alice, pb.SetCodecRequest(codec="later"))
        first, second = service.audited()
        assert (first["method"], first["outcome"], first["status"]) == ("Replan", "unknown", "CANCELLED")
        assert (second["method"], second["outcome"], second["status"]) == ("SetCodec", "unknown", "UNAVAILABLE")

    secured(tmp_path, ours.node(), work)


def test_without_certificates_it_says_whose_process_it_was(tmp_path: Path) -> None:
    """Loopback: everything is allowed, and the system knows the uid."""

    async def work(service: Service) -> None:
        assert (await service.ask(None, CODEC)).plan_version == 3
        (line,) = service.audited()
        assert (line["who"], line["role"], line["outcome"]) == (f"uid {os.getuid()}", "operator", "done")

    secured(tmp_path, None, work)


def test_a_unix_socket_needs_no_certificate(ours: Folder, tmp_path: Path) -> None:
    """Its mode is the access control, also where certificates are configured."""
    address = f"unix:{tmp_path}/admin.sock"

    async def work(service: Service) -> None:
        assert (tmp_path / "admin.sock").stat().st_mode & 0o777 == 0o600
        assert (await service.ask(None, CODEC)).plan_version == 3
        (line,) = service.audited()
        assert (line["who"], line["role"], line["outcome"]) == (f"uid {os.getuid()}", "operator", "done")
        assert line["peer"].startswith("unix:")

    secured(tmp_path, ours.node(), work, address)


def test_a_unix_socket_is_nobody_elses_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask is: between making and chmod there would be a moment."""

    def chmod(self: Path, mode: int) -> None:
        raise AssertionError("too late")

    before = os.umask(0)
    try:
        monkeypatch.setattr(Path, "chmod", chmod)

        async def work() -> int:
            server = await serve(FixedSource(), f"unix:{tmp_path}/admin.sock")
            mode = (tmp_path / "admin.sock").stat().st_mode & 0o777
            await server.stop()
            return mode

        assert asyncio.run(work()) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)
