"""The dashboard over real HTTP: files, events, who is refused, and that nobody is looked at for nobody."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from gcserver.admin import exposition, streams
from gcserver.admin.access import Access
from gcserver.admin.dashboard import Dashboard
from gcserver.admin.metrics import Metrics
from gcserver.admin.source import AdminError, ErrorKind, PlanStatus
from tests.unit.admin.source import JOB, FixedSource

T = TypeVar("T")


class Served:
    """A server on loopback and what it counted."""

    def __init__(self, source: FixedSource, port: int, counted: Counter[str], dashboard: Dashboard) -> None:
        self.source, self.port, self.counted, self.dashboard = source, port, counted, dashboard

    def get(self, path: str, host: str = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers=({"Host": host} if host else {}) | headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.headers), body

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """(event, data) as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/dashboard/events")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")

        def read() -> Iterator[tuple[str, Any]]:
            name = ""
            while line := answer.readline():
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)

        try:
            yield read()
        finally:
            connection.close()
            answer.close()


def served(work: Callable[[Served], T], source: FixedSource | None = None) -> T:
    """``work`` in a thread beside a running server that looks every 20 ms."""

    async def all_of_it() -> T:
        counted: Counter[str] = Counter()
        given = source or FixedSource()
        dashboard = Dashboard(given, frozenset({"a.cluster"}), every=0.02, closer_every=0.02)
        access = Access(None, None, lambda kind: counted.update([kind]))
        server = await exposition.serve(
            Metrics("0.1.0", "a", 1), "127.0.0.1", 0, lambda: "", access=access, dashboard=dashboard
        )
        try:
            port = int(server.address.rpartition(":")[2])
            return await asyncio.to_thread(work, Served(given, port, counted, dashboard))
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


def test_the_page_and_its_parts() -> None:
    def work(s: Served) -> None:
        status, headers, page = s.get("/")
        assert status == 200 and page.startswith("<!doctype html>") and "Content-Security-Policy" in headers
        assert s.get("/dashboard/main.js")[1]["Content-Type"].startswith("text/javascript")
        assert s.get("/", method="HEAD")[::2] == (200, "")
        for other in ("", "../metrics.py", "%2e%2e/metrics.py", "index.html"):
            assert s.get(f"/dashboard/{other}")[0] == 404
        assert s.get("/metrics")[0] == 200 and s.get("/elsewhere")[0] == 404

    served(work)


def test_a_stranger_s_name_does_not_lead_here() -> None:
    """DNS rebinding: a page of somebody else's, whose name leads to this address for a moment."""

    def work(s: Served) -> None:
        for n, path in enumerate(("/", "/dashboard/events", "/dashboard/main.js", "/metrics", "/readyz"), 1):
            status, _, said = s.get(path, "evil.example:7461")
            assert status == 421
            assert said == "expected an address or a name of this node as Host, got 'evil.example:7461'\n"
            assert s.counted == {"metrics_denied": n}
        for own in ("a.cluster:7461", "localhost", "[::1]:7461"):
            assert s.get("/", own)[0] == s.get("/metrics", own)[0] == 200
        with socket.create_connection(("127.0.0.1", s.port), 20) as bare:
            bare.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b" 200 " in bare.recv(100), "a scraper of old sends no Host, browsers do"

    served(work)


def test_another_site_s_page_cannot_take_a_place() -> None:
    def work(s: Served) -> None:
        for n, site in enumerate(("cross-site", "same-site"), 1):
            status, _, said = s.get("/dashboard/events", **{"Sec-Fetch-Site": site})
            assert (status, said) == (403, "expected this node's own page to ask, not one of another site\n")
            assert s.counted == {"metrics_denied": n}
        assert s.get("/", **{"Sec-Fetch-Site": "cross-site"})[0] == 200, "a link may lead here"

    served(work)


def test_what_happens_comes_by_itself() -> None:
    def work(s: Served) -> None:
        with s.events() as events:
            first = next(data for event, data in events if event == "overview")
            assert first["node"]["name"] == "a" and first["links"][0]["rate_in"] is None
            details = next(data for event, data in events if event == "details")
            assert details["label"] == "gpt" and details["steps"][0]["predicted"]["bars"]
            s.source.jobs_here = [replace(JOB, step=JOB.step + 7, plan_version=9)]
            later = next(data for event, data in events if event == "overview" and data["jobs"][0]["plan"] == 9)
            assert later["jobs"][0]["steps_rate"] is not None
            assert [c["text"] for c in later["faults"]["changes"]] == ["job gpt has plan 9"]
            s.source.jobs_here = []
            assert next(data for event, data in events if event == "overview" and not data["jobs"])

    served(work)


def test_nobody_is_looked_at_for_nobody() -> None:
    looks = 0

    class Counting(FixedSource):
        def peers(self) -> list[Any]:
            nonlocal looks
            looks += 1
            return super().peers()

    async def test() -> None:
        dashboard = Dashboard(Counting(), every=0.001, closer_every=0.001)
        server = await exposition.serve(Metrics("0", "a", 1), "127.0.0.1", 0, lambda: "", dashboard=dashboard)
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read()).endswith(b"</html>\n")
        writer.close()
        assert looks == 0 and not dashboard._tasks, "a page that is loaded and gone"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"event: overview")
        writer.close()
        while not all(task.done() for task in dashboard._tasks):
            await asyncio.sleep(0.001)
        assert looks > 0 and not len(dashboard.streams)
        await server.stop()

    asyncio.run(test())


def test_too_many_pages_are_refused_and_a_closed_one_makes_room() -> None:
    def work(s: Served) -> None:
        s.dashboard.streams._most = 2
        with s.events() as one:
            next(one)
            with s.events() as two:
                next(two)
                status, _, said = s.get("/dashboard/events")
                assert (status, said) == (503, "2 pages are open on this dashboard; close one, or ask another node\n")
                assert s.get("/")[0] == 200 and s.get("/metrics")[0] == 200
                assert s.get("/dashboard/events", method="HEAD")[0] == 405
        while s.dashboard.streams.full:
            time.sleep(0.001)
        with s.events() as again:
            next(again)

    served(work)


def test_a_client_that_never_reads_is_cut_off_and_others_are_served() -> None:
    """Real sockets: what the system's buffers do not take is what counts."""

    async def test() -> None:
        open_ones = streams.Streams(lambda: None, patience=0.05)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await open_ones.serve(reader, writer, 60.0)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        stuck = socket.create_connection(("127.0.0.1", port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while len(open_ones) < 2:
            await asyncio.sleep(0.001)
        event = streams.encoded("big", b"x" * (1 << 18))
        while len(open_ones) == 2:
            open_ones.publish("big", event)
            await reader.readuntil(b"event: big\n")
            await asyncio.sleep(0.001)
        stuck.close()
        writer.close()
        server.close()
        while len(open_ones):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_defect_is_told_once_in_the_log_and_to_who_watches(caplog: pytest.LogCaptureFixture) -> None:
    def work(s: Served) -> None:
        with s.events() as events:
            assert next(events)[0] in ("overview", "details")
            s.source.defect = True
            troubles = (data for event, data in events if event == "trouble")
            for _ in range(3):
                said = next(troubles)
            assert said == {"what": "overview", "text": "ZeroDivisionError: of all things; the daemon's log has more"}
            s.source.defect = False
            after = next(data for data in troubles if data != said)
            assert after == {"what": "overview", "text": ""}, "it is in nobody's way any more"

    with caplog.at_level(logging.ERROR, "gcserver.admin"):
        served(work)
    assert [r.getMessage() for r in caplog.records] == ["the dashboard's look at overview failed"]


def test_a_job_that_ends_while_it_is_looked_at_is_left_out() -> None:
    class Ending(FixedSource):
        async def tensors(self, job: str, domain: str, pattern: str) -> list[Any]:
            self.jobs_here = []
            return await super().tensors(job, domain, pattern)

    def work(s: Served) -> None:
        with s.events() as events:
            for event, data in events:
                assert event == "overview"
                if not data["jobs"]:
                    break

    served(work, Ending())


def test_a_job_is_shown_without_a_prediction_where_there_can_be_none() -> None:
    class Unpredictable(FixedSource):
        async def plan(self, job: str, timeline: bool) -> PlanStatus:
            if timeline:
                raise AdminError(ErrorKind.UNAVAILABLE, "the planning process was killed")
            return await super().plan(job, timeline)

    def work(s: Served) -> None:
        with s.events() as events:
            details = next(data for event, data in events if event == "details")
            assert details["layers"]["tensors"] == 2 and details["steps"][0]["predicted"]["bars"] == []

    served(work, Unpredictable())


def test_a_new_job_is_looked_at_closer_at_once() -> None:
    async def test() -> None:
        source = FixedSource()
        source.jobs_here = []
        dashboard = Dashboard(source, every=0.01, closer_every=3600.0)
        server = await exposition.serve(Metrics("0", "a", 1), "127.0.0.1", 0, lambda: "", dashboard=dashboard)
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"event: overview")
        source.jobs_here = [JOB]
        await reader.readuntil(b"event: details")
        writer.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(test(), 30))
