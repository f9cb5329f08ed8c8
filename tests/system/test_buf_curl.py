"""A daemon asked by a client that has none of our code and no admin.proto: `buf curl`, which learns by reflection."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.lab.ports import free_ports
from gcproto import admin_pb2 as pb
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import ask
from tests.system.buf import buf

__all__ = ["buf"]  # a fixture

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, buf: Path, tmp_path: Path) -> Iterator[tuple[Daemon, list[str], str]]:
    """A daemon, the options that lead to it, and what its URLs begin with."""
    cluster = Cluster(tmp_path, nodes=1)
    (daemon,) = cluster.daemons
    if request.param == "tcp":
        address = f"127.0.0.1:{free_ports(1)}"
        options, base = [], f"http://{address}"
    else:
        address = f"unix:{tmp_path}/admin.sock"
        options, base = ["--unix-socket", f"{tmp_path}/admin.sock"], "http://localhost"
    daemon.options["node.admin"] = address
    with cluster:
        yield daemon, options, base


def curl(buf: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(buf), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_any_client_can_ask_and_steer(buf: Path, served: tuple[Daemon, list[str], str]) -> None:
    daemon, options, base = served

    def call(method: str, **request: Any) -> subprocess.CompletedProcess[str]:
        return curl(buf, *options, "--data", json.dumps(request), f"{base}/{SERVICE.full_name}/{method}")

    listed = curl(buf, *options, "--list-methods", base)
    assert listed.returncode == 0, listed.stderr + daemon.text()
    assert {f"{SERVICE.full_name}/{m.name}" for m in SERVICE.methods} <= set(listed.stdout.split())

    answer = call("GetStatus")
    assert answer.returncode == 0, answer.stderr + daemon.text()
    status, known = json.loads(answer.stdout), ask(daemon, "status")
    assert status["node"] == daemon.name and status["state"] == "NODE_STATE_SERVING"
    assert int(status["incarnation"]) == known["incarnation"]
    assert [(lane["pid"], lane["state"]) for lane in status["lanes"]] == [(daemon.lane_pids()[0], "ready")]

    refused = call("SetCodec", job="gpt", codec="fp16")
    assert refused.returncode == grpc.StatusCode.NOT_FOUND.value[0] << 3, "buf curl ends with the code times eight"
    assert "no job" in refused.stderr

    said = call("GetLogs")  # a stream
    assert said.returncode == 0 and "ready: node" in said.stdout, said.stderr
