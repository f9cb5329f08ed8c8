"""Who was stopped and wakes after its job has failed: what it still sends is refused and counted, and hurts nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.operators import ask, reachable, until
from tests.integration.test_slow import waits

pytestmark = pytest.mark.system


def test_a_daemon_that_wakes_after_the_deadline(tmp_path: Path) -> None:
    """Its lane first: it knows nothing of the end, takes what came meanwhile for its turn, and answers it."""
    go = tmp_path / "go"
    with reachable(Cluster(tmp_path, nodes=2, options={"job.deadline": "4s"})) as cluster:
        a, b = cluster.daemons
        job = cluster.start("tests.integration.slow_workers:hesitant", [0, 1], go=str(go))
        job.wait_mark("hesitates")
        until("b to have pushed", lambda: [w for w in waits(b) if w["node"] == a.name])
        (lane,) = b.lane_pids()
        stopped = [lane, b.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            # a's contribution now lies before b's lane, which owns a block and has its own.
            go.touch()
            job.workers[0].process.wait(60)
            before = ask(a, "status")["errors"].get("frames_stale", 0)
            os.kill(stopped.pop(0), signal.SIGCONT)
            until("the late average to be refused", lambda: ask(a, "status")["errors"].get("frames_stale", 0) > before)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        first, second = job.wait()
        assert (first.error, first.facts["step"], first.facts["missing"]) == ("StepTimeout", 2, [b.name]), first
        # The other had what it needed: a's contribution came, and a block's average of a's own.
        assert second.error in ("", "StepTimeout"), second
        assert b.lane_pids() == [lane]
        for outcome in cluster.run("tests.integration.memory_workers:little", [0, 1]):
            assert outcome.ok() == 2.0
