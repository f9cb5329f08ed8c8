"""Real torchrun, one for each node of a cluster of tests.

What may live here: starting them, waiting for them. What may not: the scripts that they run, assertions about those.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.ports import free_ports
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT


def torchruns(
    cluster: Cluster, folder: Path, script: Path, workers: tuple[int, int], arguments: Sequence[str] = ()
) -> str:
    """One torchrun a node, with so many workers each, until they end in good order; what they printed. Both nodes are
    on this machine, so only the daemons' names tell them apart."""
    port, logs = free_ports(1), [folder / f"torchrun{node}.log" for node in range(len(workers))]
    with contextlib.ExitStack() as running:
        runs = []
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
            argv += arguments
            with logs[node].open("wb") as log:
                run = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            running.callback(_end, run)
            runs.append(run)
        statuses = [run.wait(100) for run in runs]
    said = "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], said
    return said


def _end(run: subprocess.Popen[bytes]) -> None:
    """With its workers, which it ends when it is told to, and leaves when it is killed."""
    run.terminate()
    try:
        run.wait(20)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
