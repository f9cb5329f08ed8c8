"""Real torchrun: ranks and daemons find each other without a peer list and without a process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.lab.daemons import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT


def test_two_torchruns_with_unequal_numbers_of_workers(tmp_path: Path) -> None:
    """One torchrun a node; both nodes are on this machine, so only the daemons' names tell them apart."""
    with Cluster(tmp_path, nodes=2, know_peers=False) as cluster:
        port, runs = free_ports(1), []
        for node, workers in enumerate((1, 2)):
            environ = {
                **{k: v for k, v in os.environ.items() if not k.startswith("GC_")},
                "GC_NODE_SOCKET": str(cluster.daemons[node].socket),
                "GC_TEST_OUT": str(tmp_path / "found"),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
            argv += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            argv += [str(ROOT / "tests" / "integration" / "torchrun_script.py")]
            with (tmp_path / f"torchrun{node}.log").open("wb") as log:
                runs.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        try:
            statuses = [run.wait(100) for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
        logs = "".join((tmp_path / f"torchrun{n}.log").read_text() for n in (0, 1))
        assert statuses == [0, 0], logs
        found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(3)]
        names = [d.name for d in cluster.daemons]
    assert [f["place"] for f in found] == [[0, 3, 0, 1], [1, 3, 0, 2], [2, 3, 1, 2]]
    assert [f["node"] for f in found] == [names[0], names[1], names[1]]
    assert {f["total"] for f in found} == {7.0}
