"""Daemons that are killed while workers run: nothing is lost, and the result is the undisturbed one, bit by bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Daemon

COUNTING = "tests.integration.client_workers:counting"
TRAINING = "tests.integration.ddp_workers:training"


def _kill_lane(daemon: Daemon) -> None:
    """The supervisor starts the lane again by itself."""
    os.kill(daemon.lane_pids()[0], signal.SIGKILL)


def _kill_supervisor(daemon: Daemon) -> None:
    daemon.kill_supervisor()
    daemon.start()


def _kill_all(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


KILLS = [
    pytest.param(_kill_lane, id="lane"),
    pytest.param(_kill_supervisor, id="supervisor"),
    pytest.param(_kill_all, id="daemon"),
]


@pytest.mark.parametrize("kill", KILLS)
def test_every_sum_is_exact_across_a_kill(tmp_path: Path, kill: Callable[[Daemon], None]) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        job = cluster.start(COUNTING, [0, 1, 1], steps=60, elements=400_000)
        job.wait_mark("step 15")
        kill(cluster.daemons[1])
        job.wait_mark("step 35")
        kill(cluster.daemons[0])
        outcomes = job.wait(80)
    for outcome in outcomes:
        assert outcome.ok()["wrong"] == 0
    assert all(o.ok()["reconnects"] for o in outcomes)


@pytest.mark.parametrize("compression", ["none", "topk(ratio=0.05)"])
def test_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path, compression: str) -> None:
    with Cluster(tmp_path, nodes=2, options={"min_compress_bytes": "0"}) as cluster:
        args = {"steps": 50, "compression": compression}
        calm = [o.ok() for o in cluster.run(TRAINING, [0, 1], **args)]
        job = cluster.start(TRAINING, [0, 1], **args)
        job.wait_mark("step 10")
        _kill_lane(cluster.daemons[1])
        job.wait_mark("step 20")
        _kill_supervisor(cluster.daemons[0])
        job.wait_mark("step 32")
        _kill_all(cluster.daemons[1])
        shaken = [o.ok() for o in job.wait(80)]
    assert all(v["reconnects"] for v in shaken)
    assert {v["hash"] for v in shaken} == {v["hash"] for v in calm}
    assert len({v["hash"] for v in calm}) == 1
