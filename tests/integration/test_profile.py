"""Two daemons profile a DDP job while it runs, and leave what they know in files."""

from __future__ import annotations

import json
from pathlib import Path

from gcclient.timing import EVERY, FIRST, FIRST_STEPS
from gcserver.planner.profile import Profile, load
from gcserver.runtime.measurements import SETTLING
from tests.integration.cluster import Cluster
from tests.integration.operators import ctl, reachable, until

TRAIN = "tests.integration.profile_workers:train"
UNTIL = "tests.integration.planning_workers:train"
PAUSE, FORWARD, STEPS = 0.02, 0.05, 20


def _saved(folder: Path) -> list[Profile]:
    return [load(path.read_bytes(), path.name) for path in sorted(folder.glob("*.json"))]


def test_both_daemons_know_when_gradients_are_ready(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    options = {"plan.profiles": str(folder)}
    arguments = {"steps": STEPS, "compression": "fp16", "pause": PAUSE, "forward": FORWARD}
    with Cluster(tmp_path, nodes=2, options=options) as cluster:
        values = [o.ok() for o in cluster.run(TRAIN, [0, 1], job="profiled", **arguments)]
        for daemon in cluster.daemons:
            assert daemon.stop() == 0
        found = _saved(folder)
        assert len(found) == 2, [d.text() for d in cluster.daemons]
    for value, profile in zip(values, found, strict=True):
        assert (profile.job, profile.domain, profile.nodes, profile.local_ranks) == ("profiled", "ddp.0", 2, 1)
        assert sorted(t.name for t in profile.tensors) == sorted(value["names"])
        layers = [int(t.name.split(".")[1]) for t in profile.tensors]
        assert layers == [2, 2, 1, 1, 0, 0], "the last layer's gradients are the first"
        ready = [t.ready for t in profile.tensors]
        assert ready[0] == 0.0 and ready == sorted(ready)
        # Between the layers' gradients the pass rests; copying, which is not counted, cannot shorten that.
        assert ready[2] >= PAUSE and ready[2] + PAUSE <= ready[4]
        assert profile.forward >= FORWARD + PAUSE
        addresses = {t.name: (t.address, t.elements) for t in profile.tensors}
        assert [addresses[n][0] for n in value["names"]] == sorted(a for a, _ in addresses.values())
        assert sum(b[1] for b in profile.blocks) == profile.elements == 64 * 300 + 300 * 300 + 3000 + 610
        (pace,) = profile.steps
        assert pace.plan == 0 and pace.seconds > 0
        # Workers may know that the last step is settled, and leave, before a daemon does.
        assert STEPS - 2 - SETTLING <= pace.steps <= STEPS - 1 - SETTLING
        assert profile.copy > 0 and profile.busy == 1.0, "no codec was calibrated"
        assert profile.tolerant, "SGD without momentum"


def test_a_daemon_that_keeps_no_profiles_has_one_again_soon_after_it_was_killed(tmp_path: Path) -> None:
    """Its workers measure again; otherwise they would with step 500."""
    stop = tmp_path / "stop"
    with reachable(Cluster(tmp_path, nodes=2)) as cluster:
        a = cluster.daemons[0]

        def tensors() -> int:
            status, said, complained = ctl(a, "--json", "profile")
            if status:  # as long as it has none
                assert "too little has been measured yet" in complained or "no job" in complained, complained
                return 0
            return sum(len(domain["tensors"]) for domain in json.loads(said)["domains"])

        job = cluster.start(UNTIL, [0, 1], job="gpt", stop=str(stop), pause=0.1, width=20)
        job.wait_mark(f"step {FIRST + FIRST_STEPS + 1}")  # what is measured by itself is over
        assert tensors() == 6
        a.restart()
        a.wait_ready()
        until("a profile of the daemon's second life", lambda: tensors() == 6, timeout=30.0)
        stop.touch()
        values = [outcome.ok() for outcome in job.wait(60)]
    assert values[0]["hash"] == values[1]["hash"] and values[0]["steps"] == values[1]["steps"] < EVERY
