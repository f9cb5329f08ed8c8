"""`gcctl logs` of a real daemon: records of the supervisor and of a lane, followed through both their ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from gcserver.admin.exits import Exit
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.operators import ctl, reachable, until


def test_the_log_of_a_daemon(tmp_path: Path) -> None:
    with reachable(Cluster(tmp_path, nodes=1)) as cluster:
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
