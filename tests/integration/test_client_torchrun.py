"""Real torchrun: ranks and daemons find each other without a peer list and without a process group."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.lab.ports import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.torchruns import torchruns

#: what is said of the weights, after a script that leaves them in `model`
WEIGHTS = """
import hashlib, os, pathlib
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
pathlib.Path(f"{os.environ['GC_TEST_OUT']}.{os.environ['RANK']}").write_text(hashlib.sha256(weights).hexdigest())
"""


def test_two_torchruns_with_unequal_numbers_of_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, know_peers=False) as cluster:
        torchruns(cluster, tmp_path, ROOT / "tests" / "integration" / "torchrun_script.py", (1, 2))
        found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(3)]
        names = [d.name for d in cluster.daemons]
    assert [f["place"] for f in found] == [[0, 3, 0, 1], [1, 3, 0, 2], [2, 3, 1, 2]]
    assert [f["node"] for f in found] == [names[0], names[1], names[1]]
    assert {f["total"] for f in found} == {7.0}


@pytest.mark.parametrize("by", ["mpirun", "srun"])
def test_ranks_that_torchrun_did_not_start_meet_at_the_master(by: str, tmp_path: Path) -> None:
    """No torch.distributed, no peer list: MASTER_ADDR and MASTER_PORT say where rank 0 listens."""
    with Cluster(tmp_path, nodes=2, know_peers=False) as cluster:
        outcomes = cluster.run("tests.integration.client_workers:launched", [0, 1, 1], by=by, port=free_ports(1))
    found = [outcome.ok() for outcome in outcomes]
    assert [f["place"] for f in found] == [[0, 3, 0, 1], [1, 3, 0, 2], [2, 3, 1, 2]]
    assert {f["total"] for f in found} == {9.0}


def test_the_script_of_the_start_page_trains_on_two_nodes(tmp_path: Path) -> None:
    """As it stands in docs/start.md: it learns, with the same weights on both."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(text + WEIGHTS)
    with Cluster(tmp_path, nodes=2, know_peers=False) as cluster:
        said = torchruns(cluster, tmp_path, script, (1, 1))
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tmp_path / "found.0").read_text() == (tmp_path / "found.1").read_text()
