"""Daemons whose lanes speak UCX: real workers get exact sums, and nothing that is killed changes one.

What may live here: whole daemons with `node.transport = ucx`, over TCP. What may not: single transports
(`test_ucx.py`, `test_ucx_endings.py`). Needs the system's libucp (Debian's libucx0).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.system.ucx import needs_ucx
from tests.system.ucx import tls as tls  # a fixture

COUNTING = "tests.integration.client_workers:counting"

pytestmark = [pytest.mark.system, needs_ucx]


def uses_ucx(pid: int) -> bool:
    return "/libucp.so" in Path(f"/proc/{pid}/maps").read_text()


def test_sums_are_exact_whoever_is_killed(tls: str, tmp_path: Path) -> None:
    """A lane, a supervisor and a whole daemon, with keys on the control link and two lanes each."""
    options = {"node.transport": "ucx", "insecure": "true"}
    with Cluster(tmp_path, nodes=2, lanes=2, options=options, keys=True, forked=False) as cluster:
        assert all(uses_ucx(pid) for daemon in cluster.daemons for pid in daemon.lane_pids())
        job = cluster.start(COUNTING, [0, 1, 1], steps=60, elements=1_000_000)
        for step, node, kill in (
            (10, 1, Daemon.kill_lane),
            (20, 0, Daemon.restart_supervisor),
            (30, 1, Daemon.restart),
            (40, 0, Daemon.kill_lane),
        ):
            job.wait_mark(f"step {step}")
            kill(cluster.daemons[node])
        for outcome in job.wait(120):
            value = outcome.ok()
            assert value["wrong"] == 0 and value["reconnects"] >= 2
        said = "".join(daemon.text() for daemon in cluster.daemons)
        assert "Assertion" not in said and "a defect" not in said, said[-4000:]


def test_a_node_that_speaks_something_else_is_said(tls: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, options={"node.transport": "ucx"}, forked=False) as cluster:
        other = cluster.daemons[1]
        other.stop()
        other.options["node.transport"] = "zmq"
        other.start()
        other.wait_ready()
        first, end = cluster.daemons[0], time.monotonic() + 60
        while "another node.transport" not in first.text():
            assert time.monotonic() < end, first.text()
            time.sleep(0.05)
