"""A node is killed, the rest goes on, and the node comes back into the running job: daemons, lanes, workers and etcd
are real.

What may live here: runs in which a node comes back, with its weights and every sum checked. What may not: what a worker
does (`rejoin_workers.py`), runs that only lose nodes (`test_losses.py`).
"""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Job
from tests.system.etcd import Etcd, needs_etcd

pytestmark = [pytest.mark.system, needs_etcd, pytest.mark.timeout(400)]
TRAINING = "tests.integration.rejoin_workers:training"
ALL, MORE = 0b111, 25


def options(etcd: Etcd, on_loss: str, codec: str) -> dict[str, str]:
    asked = {"cluster.etcd": etcd.url, "cluster.lease": "4s", "job.on_loss": on_loss, "job.deadline": "60s"}
    return asked | {"codec.default": codec}


def kill_worker(job: Job, node: int) -> None:
    worker = job.workers[node].process
    worker.kill()
    worker.wait()


def bring_back(cluster: Cluster, node: int, with_memory: bool) -> None:
    """Start a killed daemon again, on a host that was restarted or not."""
    daemon = cluster.daemons[node]
    if not with_memory:
        shutil.rmtree(daemon.state)
    daemon.start()
    daemon.wait_ready()


@pytest.mark.parametrize(
    ("node", "what", "on_loss", "codec"),
    [
        (1, "node", "shrink", "topk(ratio=0.01)"),
        (0, "node without memory", "shrink", "onebit"),
        (2, "worker", "skip", "none"),
    ],
    ids=["node", "host", "worker"],
)
def test_a_node_is_killed_and_comes_back(tmp_path: Path, node: int, what: str, on_loss: str, codec: str) -> None:
    with Etcd(tmp_path) as etcd, Cluster(tmp_path, nodes=3, options=options(etcd, on_loss, codec)) as cluster:
        job = cluster.start(TRAINING, [0, 1, 2], more=MORE)
        stays = (node + 1) % 3
        job.wait_mark("step 10", rank=stays)
        if what != "worker":
            cluster.daemons[node].kill()
        kill_worker(job, node)
        job.wait_mark("sum of 2", rank=stays)
        if what != "worker":
            bring_back(cluster, node, what == "node")
        job.restart(node)
        values = [outcome.ok() for outcome in job.wait(150)]
    back, stayed = values[node], [v for rank, v in enumerate(values) if rank != node]
    assert len({v["weights"] for v in values}) == 1, "the same weights and momentum on all ranks"
    assert len({v["steps"] for v in values}) == 1
    rest = ALL & ~(1 << node)
    for v in stayed:
        skipped = [m for m in v["masks"] if m]
        assert [m for m, _ in groupby(skipped)] == [ALL, rest, ALL], "one membership a step"
        ((at, ranks),) = v["came"]
        assert ranks == [node] and v["masks"][at:] == [ALL] * MORE == v["masks"][-MORE:]
        assert v["ones"][at:] == [3] * MORE and at == back["began"]
        assert [len(r) for _, r in v["changes"]] == [2, 3]
    assert back["masks"] == [ALL] * MORE and back["ones"] == [3] * MORE and back["came"] == []
    assert [(v["size"], v["rank"], v["epoch"]) for v in values] == [(3, r, 3) for r in range(3)]
    assert {v["root"] for v in values} == {1 if node == 0 else 0}
