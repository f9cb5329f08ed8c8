"""Slow is not dead: a process that stops is named, with what is awaited and since when, and the job goes on exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, ctl, reachable, series, until


def waits(daemon: Daemon) -> list[dict[str, Any]]:
    """Everything the only job of a daemon waits for."""
    (job,) = ask(daemon, "top", "--once")["jobs"]
    return [*job["waiting_for"], *(w for d in job["domains"] for w in d["waiting_for"])]


@pytest.mark.slow
def test_who_is_stopped_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with reachable(Cluster(tmp_path, nodes=2), metrics=True) as cluster:
        a, b = cluster.daemons
        job = cluster.start("tests.integration.admin_workers:loop", [0, 1], job="slow", stop=str(stop))
        job.wait_mark("running")
        (lane,) = b.lane_pids()
        os.kill(lane, signal.SIGSTOP)
        try:
            (waited,) = until("b to be named", lambda: waits(a))
            assert waited["node"] == b.name and waited["reason"] == "exchange" and waited["step"] >= 20
            assert waited["wanted"] in ("contribution", "aggregate") and waited["since_seconds"] >= 1.0
            name = f"waiting_seconds{{peer={b.name},training_job=slow,wanted={waited['wanted']}}}"
            assert series(a)[name] >= waited["since_seconds"]
            shown = ctl(a, "top", "--once")[1]
            (row,) = [line.split() for line in shown.splitlines() if line.startswith("slow ")]
            assert row[1] == "running" and row[4:7] == [b.name, waited["wanted"], str(waited["step"])], shown
            status = until("b to miss its lane", lambda: _if_degraded(ask(b, "status")))
            assert status["lanes"][0]["state"] == "silent" and status["reason"] == "lane 0 is silent"
        finally:
            os.kill(lane, signal.SIGCONT)
        until("the wait to end", lambda: not waits(a) and name not in series(a))
        assert ask(b, "status")["state"] == "serving"

        os.kill(job.workers[1].pid, signal.SIGSTOP)
        try:
            assert {w["node"] for w in until("b to be named at a", lambda: waits(a))} == {b.name}
            (waited,) = until("its rank to be named at b", lambda: waits(b))
            assert (waited["node"], waited["reason"]) == ("rank 1", "push"), waited
        finally:
            os.kill(job.workers[1].pid, signal.SIGCONT)
        stop.touch()
        for outcome in job.wait():
            assert outcome.ok()["inexact"] == []


def _if_degraded(status: dict[str, Any]) -> dict[str, Any]:
    return status if status["state"] == "degraded" else {}
