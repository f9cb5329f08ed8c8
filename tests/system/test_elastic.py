"""The recipe of docs/elastic.md: a torchrun for each machine, one of which is killed, and comes back.

What may live here: running `examples/elastic.py` as the page says. What may not: what a loss does to sums
(`test_losses.py`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import procfs
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.system.etcd import Etcd, needs_etcd

pytestmark = [pytest.mark.system, needs_etcd, pytest.mark.timeout(400)]
NODES, STEPS = 3, 60


def torchrun(cluster: Cluster, node: int, log: Path, steps: int = STEPS) -> subprocess.Popen[bytes]:
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GC_")},
        "GC_NODE_SOCKET": str(cluster.daemons[node].socket),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    argv += [str(ROOT / "examples" / "elastic.py"), "--machine", str(node), "--machines", str(NODES)]
    argv += ["--steps", str(steps), "--pause", "0.05"]
    with log.open("wb") as out:
        return subprocess.Popen(argv, env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def kill(run: subprocess.Popen[bytes]) -> None:
    """SIGKILL a torchrun and its worker, which is in a session of its own."""
    if run.poll() is None:
        for pid in procfs.tree(run.pid):
            os.kill(pid, signal.SIGKILL)
    run.wait()


def wait_for(log: Path, text: bytes) -> None:
    end = time.monotonic() + 180
    while text not in log.read_bytes():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def test_a_machine_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The machine of rank 0, with a daemon that takes up what its memory has of the job."""
    logs = [tmp_path / f"torchrun{node}.log" for node in (*range(NODES), "0 again")]
    with Etcd(tmp_path) as etcd:
        options = {"cluster.etcd": etcd.url, "cluster.lease": "4s", "codec.default": "topk(ratio=0.1)"}
        with Cluster(tmp_path, nodes=NODES, options=options) as cluster:
            started = [torchrun(cluster, node, log, 500) for node, log in enumerate(logs[:NODES])]
            try:
                wait_for(logs[1], b"step 15 of 3")
                cluster.daemons[0].kill()
                kill(started[0])
                wait_for(logs[1], b"epoch 2: 2 workers")
                cluster.daemons[0].start()
                cluster.daemons[0].wait_ready()
                started.append(torchrun(cluster, 0, logs[-1], 500))
                statuses = [run.wait(240) for run in started[1:]]
            finally:
                for run in started:
                    kill(run)
    texts = [log.read_text() for log in logs[1:]]
    assert statuses == [0, 0, 0], "\n".join(texts)
    for text in texts[:2]:
        assert all(f"of {size} workers" in text for size in (2, 3)) and "epoch 3: 3 workers" in text
    for text in texts:
        assert "step 500 of 3 workers" in text, text
    weights = {tuple(re.findall(r"weights (\w{64})", text)) for text in texts}
    assert len(weights) == 1 and all(map(len, weights)), "the same weights on all"


def test_a_machine_is_killed_and_the_others_finish(tmp_path: Path) -> None:
    logs = [tmp_path / f"torchrun{node}.log" for node in range(NODES)]
    with Etcd(tmp_path) as etcd:
        options = {"cluster.etcd": etcd.url, "cluster.lease": "4s"}
        with Cluster(tmp_path, nodes=NODES, options=options) as cluster:
            started = [torchrun(cluster, node, log) for node, log in enumerate(logs)]
            try:
                wait_for(logs[0], b"step 15 ")
                cluster.daemons[0].kill()
                kill(started[0])
                statuses = [run.wait(240) for run in started[1:]]
            finally:
                for run in started:
                    kill(run)
    texts = [log.read_text() for log in logs[1:]]
    assert statuses == [0, 0], "\n".join(texts)
    for text in texts:
        assert "of 3 workers" in text and f"step {STEPS} of 2 workers" in text
    weights = [re.findall(r"weights (\w{64})", text) for text in texts]
    assert len(weights[0]) == 1 and weights[0] == weights[1], "the same weights on all that are left"
