"""A worker asks for automatic plans and for advice: what both daemons make of it, what it is told on either node."""

from __future__ import annotations

from pathlib import Path

from gcserver.planner.families import DENSE, ladder
from gcserver.runtime import calibration
from tests.integration.cluster import Cluster
from tests.integration.operators import ask, reachable

TRAIN = "tests.integration.advice_workers:train"
STEPS = 12


def test_rank_0_chooses_who_plans_and_both_nodes_give_advice(tmp_path: Path) -> None:
    folder, stop = tmp_path / "profiles", tmp_path / "stop"
    # What codecs cost is found here by both daemons, which would take some seconds each to measure it well.
    calibration.costs((DENSE, *ladder("fast")), folder, seconds=0.008)
    # Planned is not: these are the user's words and questions, not what the planner makes of such a small model.
    options = {"plan.profiles": str(folder), "plan.warmup_steps": "100000"}
    with reachable(Cluster(tmp_path, nodes=2, options=options)) as cluster:
        job = cluster.start(TRAIN, [0, 1], job="advised", stop=str(stop), steps=STEPS)
        for rank in (0, 1):
            job.wait_mark("advised", rank)
        plans = [ask(daemon, "plan") for daemon in cluster.daemons]
        stop.touch()
        values = [outcome.ok() for outcome in job.wait()]
    assert [(p["mode"], p["quality"]) for p in plans] == [("auto", "fast")] * 2
    assert "waits" in plans[0]["planner"]
    for value in values:
        assert value["whole"], "small enough for codecs of whole matrices, which a plan may choose"
        assert "too little has been measured" in value["refused"] and "What to do: ask again" in value["refused"]
        rows = [tuple(row) for row in value["rows"]]
        links = list(dict.fromkeys(bandwidth for bandwidth, *_ in rows))
        assert len(links) == 3 and links[1:] == [12.5e6, 1.25e9]
        own = set() if "is a guess" in value["verdict"] else {links[0]}  # 480 KB a step may be too little to measure by
        assert {bandwidth for bandwidth, measured, *_ in rows if measured} == own
        assert [plan for bandwidth, _, plan, _ in rows if bandwidth == 12.5e6] == [
            "none", "fp16", "safe", "balanced", "fast",
        ]  # fmt: skip
        assert value["compute"] > 0 and all(seconds >= value["compute"] for *_, seconds in rows)
        slow, quick = ({plan: seconds for b, _, plan, seconds in rows if b == bandwidth} for bandwidth in links[1:])
        assert quick["none"] < slow["none"] and slow["fast"] <= slow["none"], "480 KB are 40 ms at 100 Mbit/s"
        assert value["lines"][0] == value["verdict"] and len(value["lines"]) == 3 + len(rows)
        assert "100 Mbit/s" in value["lines"][8]
