"""Plans that the planner makes of jobs on two real daemons, and what operators see and do about them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin.exits import Exit
from gcserver.planner.families import DENSE, ladder
from gcserver.runtime import calibration
from gcserver.runtime.plannerlink import PARTS
from gcserver.runtime.profiler import GUESS
from tests.integration.cluster import Cluster, Job
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, ctl, reachable, scrape

TRAIN = "tests.integration.planning_workers:train"
WRAPPED = "tests.integration.planning_workers:train_wrapped"
SHARDED = "tests.integration.group_workers:hsdp_until"
#: The model is one block, and single frames tell nothing of a link: the test says how fast that is. Steps are so long
#: that none has been timed when a run is planned that starts from a profile.
#: The model says what its plans may lose, which is more than the daemons say.
ARGUMENTS: dict[str, Any] = {"pause": 0.25, "width": 200, "quality": "fast", "exclude": ["4.bias"]}
WITHIN = 90.0


def until(true: Callable[[], Any], job: Job, daemon: Daemon) -> Any:
    """What ``true`` returns once it is something; the job goes on meanwhile."""
    end = time.monotonic() + WITHIN
    while not (found := true()):
        assert time.monotonic() < end, daemon.text()
        assert all(w.process.poll() is None for w in job.workers), [w.outcome() for w in job.workers]
        time.sleep(0.1)
    return found


def model(daemon: Daemon) -> Any:
    """The model's process group in what `gcctl plan` says."""
    return next((d for d in ask(daemon, "plan")["domains"] if d["label"].startswith(("ddp.", "fsdp."))), None)


def in_force(daemon: Daemon, version: int) -> Callable[[], Any]:
    return lambda: (d := model(daemon)) is not None and d["plan_version"] >= version and d


def planners(daemon: Daemon) -> list[int]:
    """Planning processes of a daemon."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    return [int(c) for c in children if b"plannerprocess" in Path(f"/proc/{c}/cmdline").read_bytes()]


def spent(daemon: Daemon) -> dict[str, float]:
    """CPU time that planning has taken, s by part, as Prometheus sees it."""
    lines = re.findall(r'^gradcomm_planning_cpu_seconds_total\{part="(\w+)"\} (\S+)$', scrape(daemon)[1], re.MULTILINE)
    return {part: float(seconds) for part, seconds in lines}


def finish(job: Job, stop: Path) -> None:
    """All ranks have the same parameters after the same steps."""
    stop.touch()
    values = [o.ok() for o in job.wait(60)]
    assert values[0]["steps"] == values[1]["steps"] and values[0]["hash"] == values[1]["hash"]


def planned(folder: Path, **more: str) -> Cluster:
    """Two daemons that plan; they find here what codecs cost, which would take some seconds each to measure well."""
    calibration.costs((DENSE, *ladder("fast")), folder / "profiles", seconds=0.008)
    options = {
        "plan.mode": "auto", "plan.quality": "safe", "plan.warmup_steps": "0", "plan.profiles": f"{folder}/profiles",
        "min_compress_bytes": "0", **more,
    }  # fmt: skip
    return reachable(Cluster(folder, nodes=2, options=options), metrics=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    # Nobody is to find out that the link is another one than the test says.
    return planned(tmp_path, **{"plan.probe_every": "0s"})


def gone(cluster: Cluster, folder: Path) -> None:
    """The job is over on both nodes, which have saved its profile."""
    a, b = cluster.daemons
    until(lambda: len(list((folder / "profiles").glob("gpt-*.json"))) == 2, Job([]), a)
    until(lambda: not ask(a, "jobs")["jobs"] and not ask(b, "jobs")["jobs"], Job([]), a)


def slow_link(folder: Path, job: str) -> None:
    """Have every profile say that the job's link carries 200 kbit/s."""
    found = sorted(folder.glob(f"{job}-*.json"))
    assert len(found) == 2
    for path in found:
        profile = json.loads(path.read_text())
        profile["link"] = {"latency": 1e-4, "bandwidth": 2.5e4, "noise": 0.0, "samples": 50}
        path.write_text(json.dumps(profile))


def test_a_job_is_planned_by_its_first_node_and_steered_by_operators(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.daemons
    with cluster:
        # On loopback nothing has to be compressed.
        job = cluster.start(TRAIN, [0, 1], job="gpt", stop=f"{tmp_path}/first", **ARGUMENTS)
        job.wait_mark("step 1")
        assert spent(b) == dict.fromkeys(PARTS, 0.0)
        forecast = until(lambda: (d := model(a)) is not None and d["forecast"], job, a)
        took = spent(a)
        assert list(took) == list(PARTS) and took["studies"] == 0
        assert all(took[part] > 0 for part in ("start", "codecs", "errors", "plans"))
        assert forecast["reason"].startswith("dense: compression would gain")
        assert 0 < forecast["compute_seconds"] <= forecast["expected_seconds"] == forecast["dense_seconds"]
        assert {c["codec"] for c in forecast["considered"]} > {"fp16", "sidco-e(ratio=0.001,packed=1)"}
        assert all(c["reason"] for c in forecast["considered"])
        (profile,) = ask(a, "profile")["domains"]
        assert (profile["job"], profile["nodes"], len(profile["tensors"])) == ("gpt", 2, 6)
        assert json.loads(profile["json"])["codecs"].keys() == {c["codec"] for c in profile["codecs"]}
        (advice,) = ask(b, "advise", "1mbit", "10gbit")["domains"]
        # What b has received may be too little to measure its link by.
        guessed = {GUESS.bandwidth} if "is a guess" in advice["verdict"] else set()
        assert {r["bandwidth"] for r in advice["rows"] if not r["measured"]} == {125e3, 1.25e9} | guessed
        finish(job, tmp_path / "first")
        gone(cluster, tmp_path)

        # The next run starts from what this one left. Its link is slow, as far as anybody knows.
        slow_link(tmp_path / "profiles", "gpt")
        job = cluster.start(TRAIN, [0, 1], job="gpt", stop=f"{tmp_path}/second", **ARGUMENTS)
        job.wait_mark("step 1")
        here = until(in_force(a, 1), job, a)
        there = until(in_force(b, 1), job, b)
        assert (here["plan_version"], here["since_step"]) == (there["plan_version"], there["since_step"])
        assert here["rules"] == there["rules"]
        assert {g["codec"] for g in here["groups"]} == {g["codec"] for g in there["groups"]} != {"none"}
        assert [(r["pattern"], r["codec"], r["origin"]) for r in here["rules"]][-1] == ("4.bias", "none", "exclude")
        assert ("4.bias", "none") in {(g["first_tensor"], g["codec"]) for g in here["groups"]}
        plan = ask(a, "plan")
        assert (plan["mode"], plan["quality"]) == ("auto", "fast")
        assert plan["planner"].startswith("plan 1 since step")
        assert here["forecast"]["plan_version"] == 1
        assert here["forecast"]["expected_seconds"] < here["forecast"]["dense_seconds"] / 2
        assert there["forecast"] is None and ask(b, "plan")["planner"].startswith(f"node {a.name} plans for job 'gpt'")

        # Drawings hold both sides.
        for name in ("step.json", "step.html"):
            status, _, complained = ctl(a, "plan", "--timeline", str(tmp_path / name))
            assert status == 0, complained
        events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        assert {e["cat"] for e in events if e["ph"] == "X"} == {"predicted", "measured"}
        computing = {e["cat"] for e in events if e["ph"] == "X" and e["name"].startswith("compute ")}
        assert computing == {"predicted", "measured"}, "of both sides, what workers compute"
        assert "measured" in (tmp_path / "step.html").read_text()

        # The other node does not plan. A planning process that dies is another one the next time.
        status, _, complained = ctl(b, "set-plan", "--mode", "espresso")
        assert status == Exit.REFUSED and f"{a.name} plans for job 'gpt': ask its daemon" in complained
        assert f"{a.name} plans" in ctl(b, "replan")[2]
        (pid,) = planners(a)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), job, a)
        answer = ask(a, "replan")
        assert answer["plan_version"] != 1 and answer["message"]
        assert spent(a)["start"] > took["start"], "of each process"

        # The daemon that plans starts anew: it still knows whose the plan is, and why.
        before = ask(a, "plan")
        a.restart()
        a.wait_ready()
        plan = until(lambda: (p := ask(a, "plan"))["domains"] and p, job, a)
        assert (plan["mode"], plan["proposed_version"]) == ("auto", before["proposed_version"])
        # The figures may be newer, but it is the same choice for the same reason.
        assert model(a)["forecast"]["reason"].partition(":")[0] == here["forecast"]["reason"].partition(":")[0]

        # Rules given at the other node are noticed by the one that plans.
        version = ask(b, "set-plan", "--replace", "*=fp16")["plan_version"]
        until(lambda: ask(a, "plan")["mode"] == "static", job, a)
        assert "made by operators" in ctl(a, "replan")[2]
        assert until(in_force(a, version), job, a)["rules"][-2]["codec"] == "fp16"
        assert "planner (lgreco, safe)" in ctl(a, "set-plan", "--mode", "lgreco", "--quality", "safe")[1]
        plan = ask(a, "plan")
        assert (plan["mode"], plan["quality"]) == ("lgreco", "safe")
        until(lambda: (p := ask(b, "plan"))["mode"] == "lgreco" and p["quality"] == "safe", job, b)
        # Each part alone: the one picks no schemes, the other knows that one trip does between two nodes.
        for mode, scheme in (("lgreco", "owner"), ("espresso", "all")):
            assert ctl(a, "set-plan", "--mode", mode, "--quality", "fast")[0] == 0

            def made(before: int = version) -> Any:
                d = model(a)
                return d and d["forecast"] and d["forecast"]["plan_version"] == d["plan_version"] > before and d

            plan = until(made, job, a)
            assert plan["rules"][0]["codec"].startswith("sidco-e") and plan["rules"][0]["scheme"] == scheme
            version = plan["plan_version"]
        finish(job, tmp_path / "second")


def test_groups_that_a_plan_proposes_are_those_of_the_next_run(tmp_path: Path) -> None:
    """MergeComp on gradcomm's own wrapper: `gcctl plan --json` has groups as `groups=` takes them, and a job that is
    declared with them has nothing more to gain by that."""
    cluster = planned(tmp_path, **{"plan.mode": "mergecomp", "plan.probe_every": "0s", "partition_bytes": "256KiB"})
    a = cluster.daemons[0]

    def run(name: str, groups: Any) -> dict[str, Any]:
        """What is forecast of a job with these groups."""
        stop = tmp_path / name
        job = cluster.start(WRAPPED, [0, 1], job="gpt", stop=str(stop), pause=0.1, width=800, groups=groups)
        job.wait_mark("step 1")
        found = until(lambda: next((f for d in ask(a, "plan")["domains"] if (f := d["forecast"])), None), job, a)
        finish(job, stop)
        gone(cluster, tmp_path)
        return dict(found)

    with cluster:
        told = run("first", [["2.bias", "2.weight"], ["1.bias", "1.weight", "0.bias", "0.weight"]])
        groups = [g["tensors"] for g in told["proposed_groups"]]
        assert sorted(t for g in groups for t in g) == [f"{i}.{kind}" for i in range(3) for kind in ("bias", "weight")]
        apart = [{name[0] for name in group} for group in groups]
        assert not any({"0", "1"} <= layers for layers in apart), "the middle layer need not wait for the first"
        done = run("second", groups)
    assert done["proposed_groups"] == []


@pytest.mark.long
def test_an_attached_fully_shard_model_is_planned_within_the_quality_it_says(cluster: Cluster, tmp_path: Path) -> None:
    """A backward pass is a step of it; each of the three modules is a tensor."""
    a, stop = cluster.daemons[0], tmp_path / "stop"
    with cluster:
        given = {"stop": str(stop), "pause": 0.05, "quality": "fast", "exclude": ["4"]}
        job = cluster.start(SHARDED, [0, 1], job="hsdp", **given)
        job.wait_mark("step 1")
        forecast = until(lambda: (d := model(a)) is not None and d["forecast"], job, a)
        assert "sidco-e(ratio=0.001,packed=1)" in {c["codec"] for c in forecast["considered"]}, "only fast takes it"
        assert 0 < forecast["compute_seconds"] <= forecast["expected_seconds"]
        assert ask(a, "plan")["quality"] == "fast"
        (profile,) = ask(a, "profile")["domains"]
        assert {t["name"] for t in json.loads(profile["json"])["tensors"]} == {"0", "2", "4"}
        stop.touch()
        values = [o.ok() for o in job.wait(60)]
    assert values[0] == values[1]
    # In the first pass every tensor is declared, with a step of its own.
    assert values[0]["counted"] == values[0]["steps"] + 2 and values[0]["rows"]
