"""A controller on two real daemons: its ratios reach the lanes, payloads follow, kills do not stop it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, ctl, reachable, until

TRAINING = "tests.integration.ddp_workers:training"
CODEC = "topk(ratio=0.1)"


def options(controller: str) -> dict[str, str]:
    return {"plan.controller": controller, "log.level": "debug", "min_compress_bytes": "0"}


def levels(log: str) -> list[int]:
    """What a daemon's log says its lanes were told, in millionths."""
    return [int(level) for level in re.findall(r"tuned: notch -1, level (\d+)", log)]


def steered(daemon: Daemon) -> Any:
    """The model's controller in what `gcctl plan` says; None where there is none."""
    domains = [d for d in ask(daemon, "plan")["domains"] if d["label"].startswith("ddp.")]
    return next((c for d in domains for c in d["controllers"]), None)


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


def test_under_an_operators_controller_a_late_worker_counts_as_skew(tmp_path: Path) -> None:
    """Every node takes it up at the same step. What a controller makes of skew: `tests/unit/planner/test_dc2.py`."""
    stop = tmp_path / "stop"
    # A member's first payload alone says not when it began: there have to be several.
    small = {**options("none"), "partition_bytes": "256KiB"}
    with reachable(Cluster(tmp_path, nodes=2, options=small)) as cluster:
        waiting, late = cluster.daemons
        given = {"stop": str(stop), "pause": 0.0, "width": 800, "late": 0.3, "compression": CODEC}
        job = cluster.start("tests.integration.planning_workers:train", [0, 1], **given)
        job.wait_mark("step 1")
        assert steered(waiting) is None
        status, said, complained = ctl(late, "set-controller", "dc2-da5", "k_min=0.01", "k_max=0.2")
        assert status == 0, complained
        assert "takes effect at step" in said and "on every node" in said

        def skewed() -> Any:
            """The newest step of the node that waits, where most of it was skew."""
            c = steered(waiting)
            return c and c["steps"] >= 10 and c["delay_seconds"] > 0.2 and c["skew_seconds"] > c["delay_seconds"] / 2

        until("a step that was mostly skew", skewed)
        until("the late node's controller", lambda: (c := steered(late)) and c["steps"] >= 10)
        for daemon in cluster.daemons:
            assert steered(daemon)["name"].startswith("dc2-da5") and set(levels(daemon.text()))
        stop.touch()
        values = [o.ok() for o in job.wait(90)]
    assert values[0]["hash"] == values[1]["hash"] and values[0]["steps"] == values[1]["steps"]


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
