"""A controller on two real daemons: its ratios reach the lanes, payloads follow, kills do not stop it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.operators import ask, reachable

TRAINING = "tests.integration.ddp_workers:training"
CODEC = "topk(ratio=0.1)"


def options(controller: str) -> dict[str, str]:
    return {"plan.controller": controller, "log.level": "debug", "min_compress_bytes": "0"}


def levels(log: str) -> list[int]:
    """What a daemon's log says its lanes were told, in millionths."""
    return [int(level) for level in re.findall(r"tuned: notch -1, level (\d+)", log)]


@pytest.mark.parametrize(("ratio", "lanes"), [(0.005, 1), pytest.param(0.3, 2, marks=pytest.mark.long)])
def test_payloads_follow_the_ratio(tmp_path: Path, ratio: float, lanes: int) -> None:
    """The controller is the one that the first rank's worker names, whatever the daemons' is."""
    environ = {"GC_CONTROLLER": f"dc2-da2(k_min={ratio},k_max={ratio})"}
    with reachable(Cluster(tmp_path, nodes=2, lanes=lanes, options=options("dc2-da4"))) as cluster:
        job = cluster.start(TRAINING, [0, 1], environ=environ, steps=150, compressions=[CODEC])
        job.wait_mark(f"{CODEC} 20")
        for daemon in cluster.daemons:
            found = ask(daemon, "tensors")["tensors"]
            share = sum(int(t["bytes_wire"]) for t in found) / sum(int(t["bytes_raw"]) for t in found)
            assert share == pytest.approx(2 * ratio, rel=0.1), "value and index of each selected element"
            assert set(levels(daemon.text())) == {round(1e6 * ratio)}
        values = [o.ok() for o in job.wait(90)]
    assert values[0]["hashes"] == values[1]["hashes"]


def test_ratios_move_and_outlive_lanes_and_daemons(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, options=options("dc2-da5")) as cluster:
        killed = cluster.daemons[1]
        job = cluster.start(TRAINING, [0, 1], steps=60, compressions=[CODEC])
        job.wait_mark(f"{CODEC} 20")
        os.kill(killed.lane_pids()[0], signal.SIGKILL)
        job.wait_mark(f"{CODEC} 40")
        killed.kill()
        before = killed.text()
        killed.start()
        values = [o.ok() for o in job.wait(90)]
        logs = [daemon.text() for daemon in cluster.daemons]
    assert values[0]["hashes"] == values[1]["hashes"]
    for log in logs:
        told = levels(log)
        assert all(5_000 <= level <= 300_000 for level in told) and len(set(told)) > 1, "the delays of steps differ"
    here, there = map(levels, logs)
    assert set(here) - set(there), "each node has its own"
    died, at = before.split("starting it again", 1)
    assert levels(at)[0] == levels(died)[-1], "the new lane is told what the old one was told last"
    assert levels(logs[1][len(before) :])[0] in levels(before), "the new daemon goes on from what was saved"
