"""The log of a real daemon: its lines of JSON, and `gcctl logs`, followed through a lane's and the daemon's end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from gcserver.admin.exits import Exit
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT, Daemon
from tests.integration.operators import ctl, reachable, until


def _written(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.text().splitlines()]


def test_the_log_of_a_daemon(tmp_path: Path) -> None:
    with reachable(Cluster(tmp_path, nodes=1, options={"log.format": "json"})) as cluster:
        (daemon,) = cluster.daemons
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"{daemon.socket}.lane0")
            stranger.sendall(b"\xff" * 64)
            until("the lane to say so", lambda: "lane 0: a worker sent" in ctl(daemon, "logs")[1])
        status, said, _ = ctl(daemon, "logs", "--json")
        records = [json.loads(line) for line in said.splitlines()]
        assert status == Exit.OK and [r["sequence"] for r in records] == list(range(1, len(records) + 1))
        assert {r["node"] for r in records} == {daemon.name}
        (ready,) = [r for r in records if r["message"].startswith("ready: node")]
        assert (ready["level"], ready["lane"]) == ("info", None)
        (lane,) = [r for r in records if r["lane"] is not None]
        assert (lane["level"], lane["lane"]) == ("warning", 0)
        assert ctl(daemon, "logs", "--level", "warning")[1].count("\n") == 1

        written = _written(daemon)
        assert [(w["message"], w["level"], w.get("lane"), w["node"]) for w in written if w["logger"] != "stderr"] == [
            (r["message"], r["level"], r["lane"], r["node"]) for r in records if r["logger"] != "stderr"
        ]
        assert not any("job" in w for w in written)
        cluster.run("tests.integration.client_workers:counting", [0], steps=2, elements=100)
        formed = [w for w in _written(daemon) if " formed, " in w["message"]]
        assert [f"job {w['job']} formed, 1 ranks" in w["message"] for w in formed] == [True]

        argv = [sys.executable, "-m", "gcserver.admin.gcctl", "--address", daemon.options["node.admin"]]
        argv += ["--timeout", "1s", "logs", "--follow", "--level", "warning"]
        follower = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert follower.stdout is not None
        assert "lane 0: a worker sent" in follower.stdout.readline(), "what there was comes first"
        daemon.kill_lane()
        assert f"{daemon.name}: lane 0 died (status -9)" in follower.stdout.readline()
        os.kill(daemon.pid, signal.SIGTERM)
        _, complaint = follower.communicate(timeout=60)
        assert follower.returncode == Exit.UNREACHABLE and "no daemon answers" in complaint
