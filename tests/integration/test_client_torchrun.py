"""Real torchrun: ranks and daemons find each other without a peer list and without a process group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.lab.ports import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT

#: what is said of the weights, after a script that leaves them in `model`
WEIGHTS = """
import hashlib, os, pathlib
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
pathlib.Path(f"{os.environ['GC_TEST_OUT']}.{os.environ['RANK']}").write_text(hashlib.sha256(weights).hexdigest())
"""


def torchruns(cluster: Cluster, folder: Path, script: Path, workers: tuple[int, int]) -> str:
    """One torchrun a node, with so many workers each, until they end in good order; what they printed. Both nodes are
    on this machine, so only the daemons' names tell them apart."""
    port, runs = free_ports(1), []
    for node, number in enumerate(workers):
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GC_")},
            "GC_NODE_SOCKET": str(cluster.daemons[node].socket),
            "GC_TEST_OUT": str(folder / "found"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={number}"]
        argv += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", str(script)]
        with (folder / f"torchrun{node}.log").open("wb") as log:
            runs.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    try:
        statuses = [run.wait(100) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    logs = "".join((folder / f"torchrun{n}.log").read_text() for n in (0, 1))
    assert statuses == [0, 0], logs
    return logs


def test_two_torchruns_with_unequal_numbers_of_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, know_peers=False) as cluster:
        torchruns(cluster, tmp_path, ROOT / "tests" / "integration" / "torchrun_script.py", (1, 2))
        found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(3)]
        names = [d.name for d in cluster.daemons]
    assert [f["place"] for f in found] == [[0, 3, 0, 1], [1, 3, 0, 2], [2, 3, 1, 2]]
    assert [f["node"] for f in found] == [names[0], names[1], names[1]]
    assert {f["total"] for f in found} == {7.0}


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
