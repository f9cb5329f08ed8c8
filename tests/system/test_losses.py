"""Whole nodes are killed in the middle of a run, and the rest goes on: daemons, lanes, workers and etcd are real.

What may live here: runs that lose nodes, with every sum checked. What may not: what a worker does (`loss_workers.py`).
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Job
from tests.system.etcd import Etcd, needs_etcd

pytestmark = [pytest.mark.system, needs_etcd, pytest.mark.timeout(400)]
SUMS = "tests.integration.loss_workers:sums"
TRAINING = "tests.integration.loss_workers:training"
#: all of three ranks, and without rank 1
ALL, REST = 0b111, 0b101
STEPS = 60


def kill_node(cluster: Cluster, job: Job, node: int) -> None:
    """SIGKILL a daemon, its lane and its worker at once."""
    worker = job.workers[node].process
    cluster.daemons[node].kill()
    worker.kill()
    worker.wait()


def options(etcd: Etcd, on_loss: str) -> dict[str, str]:
    return {"cluster.etcd": etcd.url, "cluster.lease": "4s", "job.on_loss": on_loss, "job.deadline": "60s"}


def lose_the_middle(tmp_path: Path, function: str, on_loss: str) -> list[dict[str, Any]]:
    """Three nodes, the middle one killed in step 20; what the other two came to.

    Where the step is to be skipped it must be under way: what all that are left hold when a node is lost counts.
    """
    stall = 20 if on_loss == "skip" else 0
    with Etcd(tmp_path) as etcd, Cluster(tmp_path, nodes=3, options=options(etcd, on_loss)) as cluster:
        job = cluster.start(function, [0, 1, 2], steps=STEPS, elements=300_000, stall=stall)
        job.wait_mark("step 20", rank=1)
        kill_node(cluster, job, 1)
        first, _, last = job.wait(150)
    return [first.ok(), last.ok()]


def runs(masks: list[int]) -> list[int]:
    return [mask for mask, _ in groupby(masks)]


def test_shrink_runs_the_step_again_without_the_lost_node(tmp_path: Path) -> None:
    values = lose_the_middle(tmp_path, SUMS, "shrink")
    for place, value in enumerate(values):
        assert len(value["masks"]) == STEPS and runs(value["masks"]) == [ALL, REST], "one membership a step"
        assert value["wrong"] == 0 and value["skipped"] == 0
        assert (value["size"], value["rank"], value["epoch"]) == (2, place, 2)
        assert value["changes"] == [[2, [0, 2]]]
    assert values[0]["masks"] == values[1]["masks"], "all that are left saw the same"


def test_skip_gives_up_the_step_and_goes_on(tmp_path: Path) -> None:
    values = lose_the_middle(tmp_path, SUMS, "skip")
    for value in values:
        assert runs([m for m in value["masks"] if m]) == [ALL, REST] and value["wrong"] == 0
        assert value["skipped"] == 2 and value["masks"].index(0) == 19, "both calls of step 20"
    assert values[0]["masks"] == values[1]["masks"]


@pytest.mark.parametrize("on_loss", ["shrink", "skip"])
def test_training_goes_on(tmp_path: Path, on_loss: str) -> None:
    values = lose_the_middle(tmp_path, TRAINING, on_loss)
    for value in values:
        assert value["whole"]
        # averages of 6 * step * (1 + 2 + 4) over three, then of 6 * step * (1 + 4) over two
        shares = [mean / step for step, mean in enumerate(value["means"], 1)]
        assert runs([share for share in shares if share]) == [14.0, 15.0]
        assert shares.count(0.0) == value["skipped"] == (on_loss == "skip")
    assert values[0]["weight"] == values[1]["weight"]


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd, Cluster(tmp_path, nodes=3, options=options(etcd, "shrink")) as cluster:
        job = cluster.start(SUMS, [0, 1, 2], steps=STEPS, elements=1000, pause=0.05)
        job.wait_mark("step 10", rank=0)
        kill_node(cluster, job, 0)
        job.wait_mark("step 30", rank=2)
        kill_node(cluster, job, 2)
        value = job.wait(180)[1].ok()
    assert runs(value["masks"]) == [0b111, 0b110, 0b010] and value["wrong"] == 0
    assert (value["size"], value["rank"], value["epoch"]) == (1, 0, 3)


def test_who_cannot_reach_etcd_halts(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        asked = options(etcd, "shrink") | {"job.deadline": "10s"}
        with Cluster(tmp_path, nodes=2, options=asked) as cluster:
            job = cluster.start(SUMS, [0, 1], steps=100_000, elements=1000)
            job.wait_mark("step 10", rank=0)
            etcd.stop()
            kill_node(cluster, job, 1)
            outcome = job.wait(90)[0]
    assert outcome.error == "StepIndeterminate" and "127.0.0.1" in outcome.message, outcome.log
