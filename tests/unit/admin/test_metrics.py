"""What is counted, and how it is scraped: over real HTTP, parsed by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gcserver.admin import catalogue as c
from gcserver.admin import exposition
from gcserver.admin.metrics import MAX_JOBS, Metrics
from gcserver.runtime import plannerlink

ROOT = Path(__file__).resolve().parents[3]
T = TypeVar("T")


def filled() -> Metrics:
    """Every series at least once."""
    m = Metrics("0.1.0", "a", 1)
    m.total(c.BYTES, "lane0", 100, direction="in", kind="wire", peer="b")
    m.total(c.BYTES, "lane0", 400, direction="in", kind="raw", peer="b")
    m.total(c.FRAMES, "lane0", 3, direction="out", peer="b")
    m.total(c.ROUNDS, "lane0", 5, training_job="gpt")
    m.observe_step("gpt", "settled", 0.03)
    m.observe_step("gpt", "void", None)
    m.set(c.RESIDUAL_NORM, 1.5, training_job="gpt")
    m.total(c.ERRORS, "lane0", 2, kind="frames_corrupt")
    m.waiting("gpt", {("b", "aggregate"): 3.0})
    m.set(c.PEER_UP, True, peer="b")
    m.set(c.PEER_LANE_UP, True, peer="b", lane="0")
    m.total(c.LANE_RESTARTS, "lane0", 1)
    m.set(c.ARENA, 1 << 20, training_job="gpt")
    m.set(c.PLAN_VERSION, 3, training_job="gpt")
    m.total(c.PLANNING, "planning", 2.5, part="start")
    m.set(c.PEER_RTT, 0.0012, peer="b")
    m.set(c.LANE_READY, True, lane="0")
    m.set(c.EXPIRES, 1.8e9, certificate="node")
    m.audited("gpt", 0.75)
    m.audited("gpt", 0.25)
    return m


def value(m: Metrics, name: str, **labels: str) -> float | None:
    return m.registry.get_sample_value(f"gradcomm_{name}", labels)


def jobs_in(m: Metrics) -> set[str]:
    return {
        s.labels["training_job"]
        for family in m.registry.collect()
        for s in family.samples
        if "training_job" in s.labels
    }


def test_what_is_counted_can_be_read() -> None:
    m = filled()
    assert value(m, "bytes_total", direction="in", kind="wire", peer="b") == 100
    assert value(m, "bytes_total", direction="in", kind="raw", peer="b") == 400
    assert value(m, "frames_total", direction="out", peer="b") == 3
    assert value(m, "rounds_total", training_job="gpt") == 5
    assert value(m, "steps_total", training_job="gpt", outcome="settled") == 1
    assert value(m, "steps_total", training_job="gpt", outcome="void") == 1
    assert value(m, "step_seconds_count", training_job="gpt") == 1
    assert value(m, "step_seconds_bucket", training_job="gpt", le="0.02") == 0
    assert value(m, "step_seconds_bucket", training_job="gpt", le="0.05") == 1
    assert value(m, "residual_norm", training_job="gpt") == 1.5
    assert value(m, "errors_total", kind="frames_corrupt") == 2
    assert value(m, "waiting_seconds", training_job="gpt", peer="b", wanted="aggregate") == 3
    assert value(m, "peer_up", peer="b") == 1
    assert value(m, "lane_restarts_total") == 1
    assert value(m, "arena_bytes", training_job="gpt") == 1 << 20
    assert value(m, "plan_version", training_job="gpt") == 3
    assert value(m, "planning_cpu_seconds_total", part="start") == 2.5
    assert value(m, "peer_rtt_seconds", peer="b") == 0.0012
    assert value(m, "lane_ready", lane="0") == 1
    assert value(m, "certificate_expires_timestamp_seconds", certificate="node") == 1.8e9
    assert value(m, "audit_error", training_job="gpt") == 0.25
    assert value(m, "audit_total", training_job="gpt") == 2
    assert value(m, "build_info", version="0.1.0", node="a", protocol="1") == 1


def test_the_parts_of_planning_are_named() -> None:
    assert c.PLANNING.about.endswith(f": {', '.join(plannerlink.PARTS)}.")


def test_totals_of_a_lane_survive_its_restart() -> None:
    m = Metrics("0.1.0", "a", 1)
    for reported in (100.0, 250.0, 250.0, 40.0, 90.0):  # it died after 250 and counted from 0 again
        m.total(c.BYTES, "lane0", reported, direction="in", kind="wire", peer="b")
    m.total(c.BYTES, "lane1", 7, direction="in", kind="wire", peer="b")
    m.total(c.LANE_RESTARTS, "supervisor", 2)
    assert value(m, "bytes_total", direction="in", kind="wire", peer="b") == 250 + 90 + 7
    assert value(m, "lane_restarts_total") == 2
    with pytest.raises(KeyError):
        m.total(c.ARENA, "lane0", 1)
    with pytest.raises(ValueError):
        m.total(c.BYTES, "lane0", 1, peer="b")


def test_whom_nobody_waits_for_any_more_disappears() -> None:
    m = Metrics("0.1.0", "a", 1)
    m.waiting("gpt", {("b", "push"): 1.0, ("c", "aggregate"): 2.0, ("c", "contribution"): 2.0})
    m.waiting("gpt", {("c", "aggregate"): 3.0})
    assert value(m, "waiting_seconds", training_job="gpt", peer="b", wanted="push") is None
    assert value(m, "waiting_seconds", training_job="gpt", peer="c", wanted="contribution") is None
    assert value(m, "waiting_seconds", training_job="gpt", peer="c", wanted="aggregate") == 3
    m.waiting("gpt", {})
    assert value(m, "waiting_seconds", training_job="gpt", peer="c", wanted="aggregate") is None


def test_a_finished_job_leaves_no_series() -> None:
    m = filled()
    m.observe_step("bert", "settled", 1.0)
    m.forget_job("gpt")
    m.forget_job("gpt")
    assert jobs_in(m) == {"bert"}
    m.total(c.ROUNDS, "lane0", 9, training_job="gpt")
    assert value(m, "rounds_total", training_job="gpt") == 9, "one of the same name counts from the beginning"


def test_a_peer_that_is_gone_leaves_no_series() -> None:
    m = filled()
    m.set(c.PEER_UP, True, peer="d")
    m.forget_peer("b")
    m.forget_peer("b")
    named = {(s.name, s.labels["peer"]) for f in m.registry.collect() for s in f.samples if "peer" in s.labels}
    assert named == {("gradcomm_peer_up", "d"), ("gradcomm_waiting_seconds", "b")}, "waits are the job's"
    m.total(c.BYTES, "lane0", 130, direction="in", kind="wire", peer="b")
    assert value(m, "bytes_total", direction="in", kind="wire", peer="b") == 130, "all that its lanes have counted"


def test_jobs_cannot_flood_the_registry() -> None:
    m = Metrics("0.1.0", "a", 1)
    for rounds in (1, 3):
        for i in range(MAX_JOBS + 50):
            m.total(c.ROUNDS, "lane0", rounds, training_job=f"job{i}")
            m.set(c.ARENA, i, training_job=f"job{i}")
            m.waiting(f"job{i}", {("b", "aggregate"): 3.0})
    assert len(jobs_in(m)) == MAX_JOBS + 1
    assert value(m, "rounds_total", training_job="job0") == 3
    assert value(m, "rounds_total", training_job="other") == 50 * 3, "each is told apart where it is counted"
    assert value(m, "arena_bytes", training_job="other") is None, "of one of them it would say nothing"
    assert value(m, "waiting_seconds", training_job="other", peer="b", wanted="aggregate") is None
    m.forget_job("job299")
    m.total(c.ROUNDS, "lane0", 1, training_job="job299")
    assert value(m, "rounds_total", training_job="other") == 50 * 3 + 1, "nothing is remembered of one that is over"


# ------------------------------------------------------------------------------------------------- HTTP
def served(work: Callable[[str, int], T], metrics: Metrics | None = None, reason: str = "") -> T:
    """``work(host, port)`` in a thread beside a running server."""

    async def all_of_it() -> T:
        m = metrics or filled()
        server = await exposition.serve(m, "127.0.0.1", 0, lambda: reason, lambda: m.set(c.PEER_UP, True, peer="late"))
        host, _, port = server.address.rpartition(":")
        try:
            return await asyncio.to_thread(work, host, int(port))
        finally:
            await server.stop()

    return asyncio.run(all_of_it())


def get(path: str, accept: str = "", method: str = "GET") -> Callable[[str, int], tuple[int, str, str]]:
    def work(host: str, port: int) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection(host, port, timeout=5)
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, answer.getheader("Content-Type", ""), body

    return work


def test_a_scrape_is_fresh_and_parses() -> None:
    status, kind, body = served(get("/metrics"))
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in parse_text(body)}
    assert {"gradcomm_bytes", "gradcomm_step_seconds", "gradcomm_waiting_seconds"} <= families.keys()
    assert any(s.labels == {"peer": "late"} for s in families["gradcomm_peer_up"].samples)
    assert "_created" not in body


def test_a_scrape_in_openmetrics() -> None:
    status, kind, body = served(get("/metrics?x=1", "application/openmetrics-text; version=1.0.0"))
    assert status == 200 and kind.startswith("application/openmetrics-text; version=1.0.0")
    assert "gradcomm_steps" in {family.name for family in parse_openmetrics(body)}


def test_names_that_need_escaping() -> None:
    m = Metrics("0.1.0", "a", 1)
    m.total(c.ROUNDS, "lane0", 1, training_job='a "job"\n\\ of mine')
    _, _, body = served(get("/metrics"), m)
    rounds = next(f for f in parse_text(body) if f.name == "gradcomm_rounds")
    assert rounds.samples[0].labels == {"training_job": 'a "job"\n\\ of mine'}


def test_probes() -> None:
    assert served(get("/healthz")) == (200, "text/plain; charset=utf-8", "ok\n")
    assert served(get("/readyz")) == (200, "text/plain; charset=utf-8", "ok\n")
    assert served(get("/readyz"), reason="draining")[::2] == (503, "draining\n")
    assert served(get("/healthz"), reason="draining")[0] == 200


def test_other_requests_are_refused() -> None:
    assert served(get("/"))[0] == 404
    assert served(get("/metrics", method="POST"))[0] == 405
    assert served(get("/metrics", method="HEAD"))[::2] == (200, "")


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / SPDY/3\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000]
)
def test_what_is_not_http_is_answered_and_hung_up_on(sent: bytes) -> None:
    def work(host: str, port: int) -> bytes:
        with socket.create_connection((host, port), timeout=5) as sock:
            sock.sendall(sent)
            try:
                return sock.makefile("rb").read()
            except ConnectionResetError:  # the rest of an endless header is thrown away with the connection
                return b"HTTP/1.1 400"

    assert served(work).startswith(b"HTTP/1.1 400")


def test_a_silent_client_keeps_nobody_waiting() -> None:
    def work(host: str, port: int) -> int:
        with socket.create_connection((host, port), timeout=5):
            return get("/healthz")(host, port)[0]

    began = time.monotonic()
    assert served(work) == 200
    assert time.monotonic() - began < 3


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"node.metrics: 127.0.0.1:{port} cannot be bound: .*; `ss -ltnp"):
            asyncio.run(exposition.serve(Metrics("0", "a", 1), "127.0.0.1", port, lambda: ""))


def test_the_catalogue_is_what_is_counted() -> None:
    actual = {}
    for family in filled().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for s in family.samples for label in s.labels if label != "le"}
        actual[name] = (family.type, family.documentation, labels, {s.name for s in family.samples})
    described = {s.name: (s.kind, s.about, set(s.labels), set(s.samples)) for s in c.SERIES}
    assert actual == described


def test_kinds_of_errors_are_there_before_anything_happens() -> None:
    m = Metrics("0.1.0", "a", 1)
    assert {kind: value(m, "errors_total", kind=kind) for kind in c.KINDS} == dict.fromkeys(c.KINDS, 0)
    m.total(c.ROUNDS, "lane0", 1, training_job="gpt")
    assert value(m, "steps_total", training_job="gpt", outcome="void") == 0


def test_every_kind_that_is_counted_is_in_the_catalogue() -> None:
    """Kinds are spelled where they are counted: as an argument, or as a constant of their own."""
    sources = [path.read_text() for path in (ROOT / "gcserver").rglob("*.py") if path.name != "catalogue.py"]
    counted = {kind for text in sources for kind in re.findall(r'\b[Cc]ount\(\s*"([a-z]+_[a-z_]+)"', text)}
    named = set(re.findall(r'^[A-Z_]+: Final = "([a-z]+_[a-z_]+)"$', "\n".join(sources), re.MULTILINE))
    assert len(counted) > 15 and counted <= c.KINDS.keys()
    assert c.KINDS.keys() - counted <= named | {"frames_stale"}
