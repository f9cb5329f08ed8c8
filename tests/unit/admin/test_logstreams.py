"""The daemon's log over real gRPC: who gets what, who goes on where, and that nobody can hold up the daemon.

What may live here: tests of `gcserver/admin/logstreams.py` and of the method that uses it. What may not: the ring
(`test_logs.py`), gcctl (`test_gcctl_logs.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import pytest

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver.admin import logstreams, service
from gcserver.admin.logs import LogRing
from gcserver.admin.logstreams import LogStreams
from gcserver.admin.service import AdminServer, serve
from gcserver.admin.source import AdminError, ErrorKind
from tests.unit.admin.source import BIG, FixedSource

T = TypeVar("T")


def say(ring: LogRing, *messages: str, level: str = "info", ago: float = 0.0, lane: int | None = None) -> None:
    for message in messages:
        ring.append(time.time() - ago, level, "gcserver", message, lane=lane)


def talk(ring: LogRing, work: Callable[[Any, AdminServer], Awaitable[T]]) -> T:
    async def all_of_it() -> T:
        server = await serve(FixedSource(), "127.0.0.1:0", ring=ring)
        try:
            # A window that grows with what comes would take more of it from a server than a client reads.
            async with grpc.aio.insecure_channel(server.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
                return await work(pb_grpc.AdminServiceStub(channel), server)
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


async def messages(stub: Any, **request: Any) -> list[str]:
    answers = [answer async for answer in stub.GetLogs(pb.GetLogsRequest(**request), timeout=60)]
    assert {answer.incarnation for answer in answers} == {BIG}
    return [record.message for answer in answers for record in answer.records]


async def some(call: Any, count: int) -> list[pb.LogRecord]:
    found: list[pb.LogRecord] = []
    while len(found) < count:
        found += (await call.read()).records
    return found


def test_what_there_is() -> None:
    ring = LogRing()
    say(ring, "long ago", ago=3600)
    say(ring, "careful", level="warning", ago=60, lane=1)
    say(ring, "now")

    async def work(stub: Any, server: AdminServer) -> None:
        assert await messages(stub) == ["long ago", "careful", "now"]
        assert await messages(stub, since_seconds=600) == ["careful", "now"]
        assert await messages(stub, level=pb.LOG_LEVEL_WARNING) == ["careful"]
        assert await messages(stub, level=pb.LOG_LEVEL_ERROR) == []
        (answer,) = [a async for a in stub.GetLogs(pb.GetLogsRequest())]
        first, second, third = answer.records
        assert (second.sequence, second.level, second.node, second.lane) == (2, pb.LOG_LEVEL_WARNING, "a", 1)
        assert second.logger == "gcserver" and 0 < third.time - second.time - 60 < 60
        assert not first.HasField("lane")

    talk(ring, work)


def test_much_comes_in_several_messages() -> None:
    ring = LogRing()
    say(ring, *(f"{i} " + "x" * 1000 for i in range(300)))

    async def work(stub: Any, server: AdminServer) -> None:
        answers = [a async for a in stub.GetLogs(pb.GetLogsRequest())]
        assert len(answers) > 4 and max(a.ByteSize() for a in answers) < 80_000
        assert [int(r.message.split()[0]) for a in answers for r in a.records] == list(range(300))

    talk(ring, work)


def test_whoever_follows_gets_what_comes_until_the_daemon_stops() -> None:
    ring = LogRing()
    say(ring, "before")

    async def work(stub: Any, server: AdminServer) -> None:
        call = stub.GetLogs(pb.GetLogsRequest(follow=True, level=pb.LOG_LEVEL_INFO))
        assert [r.message for r in await some(call, 1)] == ["before"]
        thread = threading.Thread(target=say, args=(ring, "one", "two"))
        thread.start()
        say(ring, "not this", level="debug")
        assert [r.message for r in await some(call, 2)] == ["one", "two"]
        thread.join()
        say(ring, "stopping")
        await server.stop()
        assert [r.message for r in await some(call, 1)] == ["stopping"]
        assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK

    talk(ring, work)


def test_whoever_comes_back_goes_on_where_it_was() -> None:
    ring = LogRing(most=5)
    say(ring, *"abcdefgh")

    async def work(stub: Any, server: AdminServer) -> None:
        assert await messages(stub, after_sequence=6, incarnation=BIG) == ["g", "h"]
        assert await messages(stub, after_sequence=8, incarnation=BIG) == []
        (answer,) = [a async for a in stub.GetLogs(pb.GetLogsRequest(after_sequence=1, incarnation=BIG))]
        assert ("".join(r.message for r in answer.records), answer.lost) == ("defgh", 2)
        (answer,) = [a async for a in stub.GetLogs(pb.GetLogsRequest(after_sequence=7, incarnation=5))]
        assert ("".join(r.message for r in answer.records), answer.lost) == ("defgh", 0), (
            "of another life: all there is"
        )

    talk(ring, work)


def test_a_slow_reader_misses_records_and_holds_up_nobody() -> None:
    """It reads one answer and no more while ten times as much is logged as the ring and all buffers hold."""
    ring = LogRing(most_bytes=256 << 10)
    say(ring, "first")

    async def work(stub: Any, server: AdminServer) -> None:
        slow = stub.GetLogs(pb.GetLogsRequest(follow=True))
        assert [r.message for r in await some(slow, 1)] == ["first"]
        for number in range(2000):
            say(ring, f"{number} " + "x" * 4000)
            if number % 50 == 0:
                await stub.GetStatus(pb.GetStatusRequest(), timeout=60)
        say(ring, "last")
        assert sum(r.size for r in ring.after(0).records) <= 256 << 10
        assert (await messages(stub))[-1] == "last", "another reader is not in its way"
        seen, lost = 1, 0
        while True:
            answer = await slow.read()
            lost += answer.lost
            seen += len(answer.records)
            if answer.records and answer.records[-1].message == "last":
                break
        assert lost > 0 and seen + lost == 2002, "what it did not get is counted"

    talk(ring, work)


def test_who_does_not_read_at_all_is_cut_off() -> None:
    ring = LogRing()
    say(ring, "x")

    async def test() -> None:
        streams = LogStreams(ring, lambda: ("a", 1), patience=0.05, most=1)
        forever = asyncio.Event()

        async def never(message: pb.GetLogsResponse) -> None:
            await forever.wait()

        sent: list[pb.GetLogsResponse] = []

        async def at_once(message: pb.GetLogsResponse) -> None:
            sent.append(message)

        with pytest.raises(AdminError, match=r"not read for 0\.05 s") as caught:
            await streams.serve(pb.GetLogsRequest(follow=True), never)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        await streams.serve(pb.GetLogsRequest(), at_once)
        assert len(sent) == 1, "its place is free again"

    asyncio.run(test())


def test_who_was_cut_off_is_told_when_it_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LogStreams", lambda ring, who: LogStreams(ring, who, patience=0.2, most=1))
    ring = LogRing()
    say(ring, *(f"{number} " + "x" * 10_000 for number in range(300)))

    async def work(stub: Any, server: AdminServer) -> None:
        slow = stub.GetLogs(pb.GetLogsRequest(follow=True))
        last = (await some(slow, 1))[-1].sequence
        await until_free(stub)
        error = None
        while error is None:
            try:
                last = (await some(slow, 1))[-1].sequence
            except grpc.aio.AioRpcError as found:
                error = found
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "was not read for 0.2 s" in error.details()
        assert last < 300
        rest = await messages(stub, after_sequence=last, incarnation=BIG)
        assert [int(text.split()[0]) for text in rest] == list(range(last, 300)), "it can go on where it was"

    talk(ring, work)


async def until_free(stub: Any) -> None:
    """Until another reader is let in."""
    while True:
        try:
            await messages(stub, level=pb.LOG_LEVEL_CRITICAL)
            return
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.01)


def test_no_more_readers_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LogStreams", lambda ring, who: LogStreams(ring, who, most=2))
    ring = LogRing()

    async def work(stub: Any, server: AdminServer) -> None:
        calls = [stub.GetLogs(pb.GetLogsRequest(follow=True)) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await messages(stub)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "2 readers" in caught.value.details()
        for call in calls:
            call.cancel()
        await until_free(stub)

    talk(ring, work)


def test_a_reader_that_goes_away_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    ring = LogRing()

    async def work(stub: Any, server: AdminServer) -> None:
        for _ in range(10):
            call = stub.GetLogs(pb.GetLogsRequest(follow=True))
            await call.read()
            say(ring, *("x" * 10_000 for _ in range(100)))
            await stub.GetStatus(pb.GetStatusRequest(), timeout=60)
            call.cancel()
        await stub.GetStatus(pb.GetStatusRequest(), timeout=60)

    with caplog.at_level(logging.WARNING):
        talk(ring, work)
    assert not caplog.records


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (pb.GetLogsRequest(level=9), "level: expected one of debug, info, warning, error, critical, got the number 9"),
        (pb.GetLogsRequest(since_seconds=-1), "since_seconds: expected 0 or more seconds, got -1"),
        (pb.GetLogsRequest(since_seconds=float("nan")), "since_seconds: expected 0 or more"),
    ],
)
def test_wrong_requests(request_: pb.GetLogsRequest, part: str) -> None:
    async def work(stub: Any, server: AdminServer) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLogs(request_, timeout=60).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and part in caught.value.details()

    talk(LogRing(), work)


def test_a_stream_ends_by_itself_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever follows has to show a certificate that holds then."""
    monkeypatch.setattr(logstreams, "MAX_AGE", 0.0)
    ring = LogRing()
    say(ring, "x")

    async def work(stub: Any, server: AdminServer) -> None:
        assert await messages(stub, follow=True) == ["x"]

    talk(ring, work)
