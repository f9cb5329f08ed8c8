"""A job whose workers are started again, as torchrun does after one has died: nothing of its earlier life is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from benchmarks.lab import procfs
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import until

LIFE = "tests.integration.incarnation_workers:life"


def folders(daemon: Daemon) -> int:
    """Jobs that a daemon keeps memory of."""
    return len(list((daemon.state / "jobs").glob("*")))


def wait_for_folders(cluster: Cluster, count: int) -> None:
    """Until every daemon keeps memory of ``count`` jobs."""
    until(f"memory of {count} jobs", lambda: all(folders(d) == count for d in cluster.daemons))


def test_a_new_life_gets_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Ranks move to other nodes, steps go back, and one worker of the old life sleeps until the new one trains."""
    with Cluster(
        tmp_path, nodes=2, options={"codec.default": "topk(ratio=0.05)", "partition_bytes": "256KiB"}
    ) as cluster:
        empty = [procfs.used_bytes(d.state) for d in cluster.daemons]
        old = cluster.start(LIFE, [0, 0, 1], job="train", number=1, first=1, steps=100_000)
        old.wait_mark("step 25")
        dead, asleep = old.workers[2], old.workers[1]
        os.kill(asleep.pid, signal.SIGSTOP)
        dead.process.kill()
        old.workers[0].process.wait(20)  # it is told at once

        new = cluster.start(LIFE, [1, 0, 0], job="train", number=2, first=11, steps=60)
        new.wait_mark("step 15")
        os.kill(asleep.pid, signal.SIGCONT)
        asleep.process.wait(20)
        told = old.wait(1)
        wait_for_folders(cluster, 1)  # the old life's memory is gone while the new one trains
        values = [outcome.ok() for outcome in new.wait(60)]
        wait_for_folders(cluster, 0)
        left = [procfs.used_bytes(d.state) for d in cluster.daemons]
        fresh = [outcome.ok() for outcome in cluster.run(LIFE, [1, 0, 0], job="fresh", number=2, first=11, steps=60)]

    for outcome in told[:2]:
        assert outcome.error == "WorkerLost" and "rank 2" in outcome.message, outcome
    assert told[2].error == "Died"
    assert [v["node"] for v in values] == [cluster.daemons[n].name for n in (1, 0, 0)]
    assert [v["wrong"] for v in values] == [0, 0, 0]
    # residuals of the old life would show in the averages
    assert len({v["digest"] for v in (*values, *fresh)}) == 1
    assert left == empty
