"""Two daemons profile a DDP job while it runs, and leave what they know in files."""

from __future__ import annotations

from pathlib import Path

from gcserver.planner.profile import Profile, load
from gcserver.runtime.measurements import SETTLING
from tests.integration.cluster import Cluster

TRAIN = "tests.integration.profile_workers:train"
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
