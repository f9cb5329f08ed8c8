"""Workers whose gradients are copied by a device on its own time, through real daemons (`tests/late_copies.py`)."""

from __future__ import annotations

from pathlib import Path

from tests.integration.cluster import Cluster, parts
from tests.integration.ddp_checks import check_branches, check_training

UNDER = "tests.late_copies:under"
FUNCTIONS = {
    "tests.integration.ddp_workers:against_gloo": {"steps": 12},
    "tests.integration.ddp_workers:branches": {},
    "tests.integration.optimizer_workers:against_ddp": {"steps": 3, "groupings": [None, "layer-wise", 2]},
    "tests.integration.client_workers:unnamed": {},
    "tests.integration.sharded_optimizer_workers:unused": {},
}


def test_what_is_delivered_is_what_it_is_without(tmp_path: Path) -> None:
    options = {"partition_bytes": str(256 << 10)}
    with Cluster(tmp_path, nodes=2, lanes=2, options=options, know_peers=False) as cluster:
        functions = [(UNDER, {"function": name, "args": given}) for name, given in FUNCTIONS.items()]
        outcomes = parts(cluster.run("tests.integration.cluster:several", [0, 0, 1, 1], functions=functions))
    training, branches, wrapped, unnamed, sharded = outcomes
    check_training(training, 12)
    check_branches(branches)
    for outcome in wrapped:
        assert all(each["difference"] < 1e-6 for each in outcome.ok()["found"])
    assert [o.ok()["wrong"] for o in unnamed] == [[]] * 4
    assert [o.ok()["wrong"] for o in sharded] == [0] * 4
