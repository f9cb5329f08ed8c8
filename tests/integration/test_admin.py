"""Two real daemons and a running job, looked at and steered: gcctl, metrics, health, set-codec, set-plan, trace, drain.

All tests share the daemons but the last one; the last but one drains the first of them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.lab.ports import free_ports
from gcserver.admin.exits import Exit
from tests.integration.cluster import Cluster, Job
from tests.integration.daemon import ROOT, Daemon
from tests.integration.operators import ask, ctl, reachable, scrape, series, until
from tests.trace_files import Event, named, sound

WORKER = "tests.integration.admin_workers:loop"
SCHEMES = "tests.integration.admin_workers:schemes"
TRACED = "tests.integration.admin_workers:training"
ELEMENTS = 40_000
STEPS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two daemons that know each other, with admin on a Unix socket and metrics on a port."""
    with reachable(Cluster(tmp_path_factory.mktemp("admin"), nodes=2), metrics=True) as made:
        yield made


def gcctl(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As operators start it, from the environment; the tests' other questions are asked in this process."""
    command = [sys.executable, "-m", "gcserver.admin.gcctl", *arguments]
    environ = {**os.environ, "GC_NODE_ADMIN": daemon.options["node.admin"]}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)


def start(cluster: Cluster, stop: Path, worker: str = WORKER, label: str = "steered") -> Job:
    job = cluster.start(worker, [0, 1], job=label, stop=str(stop))
    job.wait_mark("running")
    return job


def test_a_daemon_without_jobs(cluster: Cluster) -> None:
    a, b = cluster.daemons
    status = ask(a, "status")
    assert (status["node"], status["state"], status["listen"]) == (a.name, "serving", a.address)
    assert [lane["pid"] for lane in status["lanes"]] == a.lane_pids()
    peer = until("b to be up", lambda: [p for p in ask(a, "peers")["peers"] if p["state"] == "up"])[0]
    assert (peer["name"], peer["address"]) == (b.name, b.address)
    measured = until("a round trip", lambda: [p for p in ask(a, "peers")["peers"] if p.get("rtt_seconds")])[0]
    assert 0.0 < measured["rtt_seconds"] < 1.0
    assert ask(a, "jobs") == {"jobs": []}
    refused = gcctl(a, "set-codec", "fp16")
    assert refused.returncode == Exit.NOT_FOUND and "no job" in refused.stderr and refused.stderr.count("\n") == 1
    assert scrape(a, "/readyz") == (200, "ok\n")
    with grpc.insecure_channel(a.options["node.admin"]) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
def test_a_lane_of_a_peer_that_is_silent_is_shown_until_it_is_heard(cluster: Cluster) -> None:
    a, b = cluster.daemons

    def peer(state: str) -> list[Any]:
        return [p for p in ask(a, "peers")["peers"] if p["state"] == state]

    until("b to be up", lambda: peer("up"))
    (lane,) = b.lane_pids()
    os.kill(lane, signal.SIGSTOP)
    try:
        (shown,) = until("its lane to be missed", lambda: peer("restarting"))
        numbers = series(a)
    finally:
        os.kill(lane, signal.SIGCONT)
    assert shown["reason"].startswith("lane 0: nothing heard for ")
    (link,) = shown["lanes"]
    assert link["state"] == "restarting" and shown["since_seconds"] == link["since_seconds"] > 3
    assert shown["last_heard_seconds"] < link["since_seconds"], "its supervisor is heard"
    assert numbers[f"peer_lane_up{{lane=0,peer={b.name}}}"] == numbers[f"peer_up{{peer={b.name}}}"] == 0.0
    (shown,) = until("it to be heard again", lambda: peer("up"))
    assert shown["reason"] == shown["lanes"][0]["reason"] == ""


@pytest.mark.slow
def test_a_running_job_is_seen_and_steered(cluster: Cluster, tmp_path: Path) -> None:
    """fp16 cannot hold the mean exactly, so each rank sees for itself in which step the change arrived."""
    a, b = cluster.daemons
    job = start(cluster, tmp_path / "stop")

    (seen,) = ask(a, "jobs")["jobs"]
    assert (seen["label"], seen["state"], seen["world_size"], seen["epoch"]) == ("steered", "running", 2, 1)
    assert seen["members"] == [{"node": a.name, "ranks": [0]}, {"node": b.name, "ranks": [1]}]
    assert ask(b, "jobs")["jobs"][0]["id"] == seen["id"]
    domain = next(d for d in seen["domains"] if d["tensors"])
    assert (domain["tensors"], domain["elements"], domain["codec"]) == (1, ELEMENTS, "none")
    (tensor,) = ask(a, "tensors", "--job", "steered")["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("model.weight", "float32", [ELEMENTS])
    assert (tensor["codec"], tensor["bytes_raw"]) == ("none", 4 * ELEMENTS)
    assert ask(a, "tensors", "--pattern", "other*") == {"tensors": []}

    status, _, complained = ctl(b, "set-codec", "--job", "steered", "topk(ratio=7)")
    assert status == Exit.REFUSED and "ratio" in complained
    status, _, complained = ctl(b, "tensors", "--job", "other")
    assert status == Exit.NOT_FOUND and "steered" in complained

    status, table, _ = ctl(a, "tensors")
    assert status == 0 and "model.weight" in table.splitlines()[1]
    changed = ask(b, "set-codec", "--pattern", "model.*", "fp16")  # asked of the node that does not lead the job
    effective = changed["effective_step"]
    until("the change", lambda: ask(a, "jobs")["jobs"][0]["step"] > effective + 5)
    for daemon in (a, b):
        (tensor,) = ask(daemon, "tensors")["tensors"]
        assert tensor["codec"] == "fp16"
        assert ask(daemon, "jobs")["jobs"][0]["plan_version"] == changed["plan_version"]
        assert 0 < tensor["bytes_wire"] <= 2 * ELEMENTS + 64

    again = ask(a, "set-codec", "none")
    until("the change back", lambda: ask(b, "jobs")["jobs"][0]["step"] > again["effective_step"] + 5)
    numbers = until("counts of a lane", lambda: _if_counted(series(a), b.name))
    raw, wire = numbers[f"bytes_total{{direction=out,kind=raw,peer={b.name}}}"], _sent(numbers, b.name)
    assert 0 < wire < raw * 1.05
    assert numbers["steps_total{outcome=settled,training_job=steered}"] > effective
    assert numbers["step_seconds_count{training_job=steered}"] > 0
    assert numbers["rounds_total{training_job=steered}"] > 0
    assert numbers["arena_bytes{training_job=steered}"] > 2 * 4 * ELEMENTS
    assert numbers[f"peer_up{{peer={b.name}}}"] == 1

    (tmp_path / "stop").touch()
    first, second = (outcome.ok() for outcome in job.wait())
    assert first == second, "every rank saw the same bytes in every step"
    assert first["inexact"] == list(range(effective, again["effective_step"])), "changed at one step, and back"
    until("the job to leave", lambda: ask(a, "jobs") == {"jobs": []})
    until("its series to go", lambda: not any("training_job=steered" in name for name in series(a)))


def _sent(numbers: dict[str, float], peer: str) -> float:
    return numbers.get(f"bytes_total{{direction=out,kind=wire,peer={peer}}}", 0.0)


def _if_counted(numbers: dict[str, float], peer: str) -> dict[str, float]:
    return numbers if _sent(numbers, peer) and numbers.get("step_seconds_count{training_job=steered}") else {}


def in_force(daemon: Daemon) -> tuple[int, int, str, str, str]:
    """(plan, first step, codec, scheme, reason) of the only tensor."""
    (domain,) = [d for d in ask(daemon, "plan")["domains"] if d["groups"]]
    (group,) = domain["groups"]
    return domain["plan_version"], domain["since_step"], group["codec"], group["scheme"], group["reason"]


@pytest.mark.slow
def test_a_running_job_changes_its_scheme_and_back(cluster: Cluster, tmp_path: Path) -> None:
    """Each scheme rounds at other places, so every rank sees from its bits which one made a result."""
    a, b = cluster.daemons
    job = start(cluster, tmp_path / "stop", SCHEMES)
    assert in_force(a) == (0, 0, "none", "owner", "no rule matches")
    status, _, complained = ctl(b, "set-plan", "*=fp16", "model.*=fp16@ring")
    assert status == Exit.REFUSED and "rules[1]" in complained and "expected one of owner, all" in complained

    asked: list[int] = []

    def change(daemon: Daemon, *arguments: str) -> None:
        said = ask(daemon, "set-plan", *arguments)
        asked.append(said["effective_step"])
        until("the change", lambda: all(in_force(d)[:2] == (said["plan_version"], asked[-1]) for d in (a, b)))

    change(b, "other.*=onebit", "*=fp16")
    assert in_force(a) == in_force(b) and in_force(a)[2:] == ("fp16", "owner", "")
    change(a, "model.*=fp16@all")
    assert in_force(a) == in_force(b) and in_force(a)[2:] == ("fp16", "all", "")
    rules = ask(b, "plan")["rules"]
    assert [(r["pattern"], r["codec"], r["scheme"]) for r in rules] == [
        ("other.*", "onebit", "owner"), ("*", "fp16", "owner"), ("model.*", "fp16", "all"),
    ]  # fmt: skip
    change(b, "--replace", "*=fp16")
    assert in_force(a) == in_force(b) and in_force(a)[2:] == ("fp16", "owner", "")
    change(a, "--replace")
    assert in_force(a)[2:] == ("none", "owner", "no rule matches") and ask(a, "plan")["rules"] == []
    status, shown, _ = ctl(a, "plan")
    assert status == 0 and "model.weight" in shown and "no rule matches" in shown

    (tmp_path / "stop").touch()
    first, second = (outcome.ok() for outcome in job.wait())
    assert first == second, "every rank saw the same in every step"
    bounds = [1, *asked, first["steps"] + 1]
    made = ["none", "owner", "all", "owner", "none"]
    assert first["runs"] == [[what, bounds[i], bounds[i + 1] - 1] for i, what in enumerate(made)]
    until("the job to leave", lambda: ask(a, "jobs") == ask(b, "jobs") == {"jobs": []})


KINDS = {"ready", "push", "encode", "wire", "aggregate", "decode", "pull"}


def refused(daemon: Daemon, *arguments: str, end: Exit = Exit.REFUSED) -> str:
    """What gcctl complains of."""
    status, said, complained = ctl(daemon, *arguments)
    assert (status, said) == (end, ""), complained
    return complained


@pytest.mark.slow
def test_steps_are_traced_over_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.daemons
    target = tmp_path / "trace.json"
    assert "no trace was started at this node" in refused(a, "trace", "stop")
    job = start(cluster, tmp_path / "stop", TRACED, "traced")
    assert ask(a, "trace", "start", "--job", "traced", "--steps", str(STEPS))["nodes"] == [a.name, b.name]
    assert "is being recorded here" in refused(a, "trace", "start")
    (seen,) = ask(a, "jobs")["jobs"]
    until("the steps", lambda: ask(a, "jobs")["jobs"][0]["step"] > seen["step"] + STEPS + 2)
    nowhere = refused(a, "trace", "stop", "--out", str(tmp_path / "no" / "trace.json"), end=Exit.FAILED)
    assert "no/trace.json cannot be written: No such file" in nowhere
    full = refused(a, "trace", "stop", "--out", "/dev/full", end=Exit.FAILED)
    assert "cannot be written: No space left on device" in full
    found = ask(a, "trace", "stop", "--out", str(target))
    (tmp_path / "stop").touch()
    assert all(outcome.ok() > STEPS for outcome in job.wait())
    assert f"was started at {a.name}: ask that node" in refused(b, "trace", "stop")

    ours, theirs = found["nodes"]
    for node, daemon in ((ours, a), (theirs, b)):
        assert (node["name"], node["dropped"], node["absent"], node["reason"]) == (daemon.name, 0, [], "")
    for clock in theirs["clocks"]:
        assert abs(clock["offset"]) <= clock["error"] < 1.0, "both daemons read the same clock"
    file = json.loads(target.read_text())
    slices = [e for e in sound(file) if e["args"]["group"] == "ddp.0"]
    _, other = file["otherData"]["nodes"]
    assert abs(other["clock_ahead_us"]) <= other["clock_error_us"] + 1.0, "and so frames say"
    steps = sorted({e["args"]["step"] for e in slices})
    assert len(steps) == STEPS and steps[0] > 1 and steps == list(range(steps[0], steps[0] + STEPS))
    for step in steps:
        of = [e for e in slices if e["args"]["step"] == step]
        for daemon in (a, b):
            _check_node([e for e in of if e["node"] == daemon.name])
        owners = {e["args"]["tensor"]: e["node"] for e in named(of, "aggregate", part="finalise")}
        assert set(owners.values()) == {a.name, b.name}, "each owns some"
        for tensor, owner in owners.items():
            _check_course([e for e in of if e["args"].get("tensor") == tensor], owner, 2 * other["clock_error_us"])
    until("the job to leave", lambda: ask(a, "jobs") == ask(b, "jobs") == {"jobs": []})


def _check_node(slices: list[Event]) -> None:
    """What one node did in a step."""
    assert {e["cat"] for e in slices} >= KINDS
    (whole,) = named(slices, "step")
    assert all(e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 0.01 for e in slices)
    kernels = [e["dur"] for kind in ("encode", "aggregate", "decode") for e in named(slices, kind)]
    assert 0 < sum(kernels) <= whole["dur"], "one lane does one thing at a time"


def _check_course(slices: list[Event], owner: str, slack: float) -> None:
    """A step of one tensor, from the node that does not own it there and back. ``slack``: of clocks, microseconds."""
    away = [e for e in slices if e["node"] != owner]
    (encoded,), (decoded,), (pulled,) = (named(away, kind) for kind in ("encode", "decode", "pull"))
    (out,), (back,) = (named(slices, "wire", what=what) for what in ("contribution", "aggregate"))
    (averaged,) = named(slices, "aggregate", part="finalise")
    assert (out["node"], back["node"]) == (owner, encoded["node"])
    for first, then in itertools.pairwise([encoded, out, averaged, back, decoded, pulled]):
        # A frame is on its way until its receiver begins with it.
        assert first["ts"] + first["dur"] <= then["ts"] + slack + 1.0, (first, then)


@pytest.mark.slow
def test_started_wrong(cluster: Cluster, tmp_path: Path) -> None:
    """Each says at once what is wrong, without a traceback, and does not exit with 0."""
    a, _ = cluster.daemons
    own = {
        "node.name": "stranger", "node.listen": f"tcp://127.0.0.1:{free_ports(2)}", "node.admin": "",
        "node.metrics": "", "node.socket": str(tmp_path / "stranger.sock"),
        "node.state": "/dev/shm/gradcomm-test-stranger",
    }  # fmt: skip
    for changed, status, part in [
        ({"node.listen": a.address}, 1, "is in use"),
        ({"node.metrics": a.options["node.metrics"]}, 1, "for metrics is in use"),
        ({"node.socket": str(a.socket)}, 1, f"daemon '{a.name}' at {a.address} already serves"),
        ({"node.admin": a.options["node.admin"]}, 1, "is served by another process"),
        ({"node.state": str(a.state)}, 1, "another daemon"),
        ({"cluster.peers": "b=tcp://10.0.0.1:1,b=tcp://10.0.0.2:1"}, 2, "'b' is there twice"),
        ({"node.listen": "tcp://0.0.0.0:7470"}, 2, "insecure"),
        ({"node.cores": "60000"}, 1, "60000"),
    ]:
        flags = [f"--{key}={value}" for key, value in (own | changed).items()]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "gcserver.cli", "run", *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (status, "")
        assert part in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert time.monotonic() - began < 15  # five are promised; a busy machine gets three times that
    assert ask(a, "status")["state"] == "serving", "none of them disturbed the daemon that runs"


@pytest.mark.slow
def test_drain_lets_jobs_end(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.daemons
    job = start(cluster, tmp_path / "stop")
    drained = ask(a, "drain", "--reason", "kernel upgrade")
    assert drained["jobs_running"] == 1
    assert ask(a, "drain", "--reason", "kernel upgrade")["jobs_running"] == 1, "draining twice is not an error"
    status = ask(a, "status")
    assert status["state"] == "draining" and "kernel upgrade" in status["reason"]
    assert scrape(a, "/readyz")[0] == 503 and scrape(a, "/healthz")[0] == 200
    with grpc.insecure_channel(a.options["node.admin"]) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    (late,) = cluster.run(WORKER, [0], job="late", stop=str(tmp_path / "stop"), timeout=30)
    assert late.error == "Draining" and "kernel upgrade" in late.message

    (tmp_path / "stop").touch()
    for outcome in job.wait():
        assert outcome.ok()["inexact"] == []
    assert a.process is not None and a.process.wait(15) == 0
    assert ask(b, "status")["state"] == "serving"
    status, _, complained = ctl(a, "status")
    assert status == Exit.UNREACHABLE and f"no daemon answers at {a.options['node.admin']}" in complained


@pytest.mark.slow
def test_a_saved_job_whose_codec_is_gone(tmp_path: Path) -> None:
    """As after an upgrade: the job ends everywhere and says why; the daemon goes on."""
    made = Cluster(tmp_path, nodes=2)
    made.daemons[1].options["node.admin"] = f"unix:{tmp_path}/admin.sock"
    with made as cluster:
        _, b = cluster.daemons
        job = start(cluster, tmp_path / "stop")
        ask(b, "set-plan", "other.*=onebit")
        b.kill()
        (saved,) = b.state.glob("jobs/*/job.msgpack")
        content = saved.read_bytes()
        assert content.count(b"onebit") == 1
        saved.write_bytes(content.replace(b"onebit", b"twobit"))
        b.start()
        b.wait_ready()
        for outcome in job.wait(60):
            assert outcome.error == "CodecError", outcome
            assert f"{b.name} came back and cannot run this job any more: rule 'other.*'" in outcome.message
            assert "twobit" in outcome.message
        until("the job to be forgotten", lambda: ask(b, "jobs") == {"jobs": []})
        (tmp_path / "stop").touch()
        for outcome in cluster.run(WORKER, [0, 1], job="next", stop=str(tmp_path / "stop"), timeout=60):
            assert outcome.ok()["inexact"] == []
        assert "Traceback" not in b.text()
