"""Daemons that are killed while workers run: nothing is lost, and the result is the undisturbed one, bit by bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, reachable

COUNTING = "tests.integration.client_workers:counting"
TRAINING = "tests.integration.ddp_workers:training"
WRAPPED = "tests.integration.optimizer_workers:training"


_kill_supervisor, _kill_all = Daemon.restart_supervisor, Daemon.restart


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes whose daemons are killed and started again: whatever they went through, they serve the next job."""
    with Cluster(tmp_path_factory.mktemp("killed"), nodes=2, options={"min_compress_bytes": "0"}) as made:
        yield made


def test_every_sum_is_exact_across_kills(cluster: Cluster) -> None:
    """A lane, a supervisor and a whole daemon; one rank on one node and two on the other."""
    job = cluster.start(COUNTING, [0, 1, 1], steps=60, elements=400_000)
    for step, node, kill in (
        (10, 1, Daemon.kill_lane),
        (20, 0, _kill_supervisor),
        (30, 1, _kill_all),
        (40, 0, _kill_all),
    ):
        job.wait_mark(f"step {step}")
        kill(cluster.daemons[node])
    for outcome in job.wait(80):
        value = outcome.ok()
        assert value["wrong"] == 0 and value["reconnects"] >= 2


@pytest.mark.long  # `make soak-kills` has every codec
def test_the_weights_are_those_of_an_undisturbed_run(cluster: Cluster, tmp_path: Path) -> None:
    """Uncompressed, with error feedback at both ends, and in two exchanges with a random start; every tensor is
    compressed. What is disturbed is encrypted, which changes no bit either."""
    codecs = ["none", "topk(ratio=0.05)", "powersgd(rank=4)", "powersgd(rank=4,values=16)"]
    calm = [o.ok() for o in cluster.run(TRAINING, [0, 1], steps=36, compressions=codecs)]
    with Cluster(tmp_path, nodes=2, options={"min_compress_bytes": "0"}, keys=True) as secured:
        job = secured.start(TRAINING, [0, 1], steps=36, compressions=codecs)
        for codec, step, node, kill in (
            (codecs[0], 20, 1, _kill_all),
            (codecs[1], 10, 1, Daemon.kill_lane),
            (codecs[1], 25, 0, _kill_supervisor),
            (codecs[2], 10, 0, Daemon.kill_lane),
            (codecs[2], 25, 1, _kill_all),
            (codecs[3], 10, 1, Daemon.kill_lane),
            (codecs[3], 25, 0, _kill_all),
        ):
            job.wait_mark(f"{codec} {step}")
            kill(secured.daemons[node])
        shaken = [o.ok() for o in job.wait(120)]
    assert all(v["reconnects"] >= 2 for v in shaken)
    for value in (*calm, *shaken):
        assert value["hashes"] == calm[0]["hashes"]


def test_the_wrappers_groups_survive_a_kill(cluster: Cluster) -> None:
    arguments = {"steps": 16, "compression": "topk(ratio=0.05)", "groups": "layer-wise"}
    calm = [o.ok() for o in cluster.run(WRAPPED, [0, 1], **arguments)]
    job = cluster.start(WRAPPED, [0, 1], **arguments)
    job.wait_mark("step 4")
    cluster.daemons[1].kill_lane()
    job.wait_mark("step 9")
    _kill_all(cluster.daemons[0])
    shaken = [o.ok() for o in job.wait(90)]
    assert all(v["reconnects"] >= 1 for v in shaken)
    assert len({v["hash"] for v in (*calm, *shaken)}) == 1


def test_a_restarted_daemon_finds_its_peers_where_it_was_told(tmp_path: Path) -> None:
    """The configuration says where a peer is reached from here, which may be another address than it advertises."""
    cluster = reachable(Cluster(tmp_path, nodes=2))
    a, b = cluster.daemons
    told = b.address.replace("127.0.0.1", "localhost")
    a.options["cluster.peers"] = f"{b.name}={told}"
    with cluster:
        job = cluster.start(COUNTING, [0, 1], steps=40, elements=10_000)
        job.wait_mark("step 10")
        _kill_all(a)
        for outcome in job.wait(60):
            assert outcome.ok()["wrong"] == 0
        a.wait_ready()  # workers are served a moment before operators are
        assert [p["address"] for p in ask(a, "peers")["peers"]] == [told]


def test_a_lane_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    """Also in a daemon's first seconds, in which a lane that gives up by itself ends the daemon."""
    cluster = Cluster(tmp_path, nodes=1)
    (daemon,) = cluster.daemons
    try:
        daemon.start()
        while not daemon.lane_pids():
            assert daemon.process is not None and daemon.process.poll() is None, daemon.text()
            time.sleep(0.001)
        daemon.kill_lane()
        daemon.wait_ready()
        assert cluster.run("tests.integration.memory_workers:little", [0])[0].ok() == 2.0
    finally:
        cluster.close()
    assert "lane 0 died (status -9)" in daemon.text()
