"""Large jobs on real daemons, every element checked: 10,000 tensors, a step of 100,000 partitions, a tensor of 4 GiB.

They need minutes and gigabytes, not root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import Cluster

pytestmark = pytest.mark.long
WORKERS = "tests.system.large_workers"
GIB = 1 << 30


def available() -> int:
    """Bytes of memory this machine can still give, shared memory included."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) << 10


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, forked=False) as cluster:
        for outcome in cluster.run(f"{WORKERS}:parameters", [0, 1], count=10_000, elements=7, steps=3, groups=None):
            assert outcome.ok()["wrong"] == 0
        for outcome in cluster.run(f"{WORKERS}:calls", [0, 1], count=10_000):
            assert outcome.ok() == 0


@pytest.mark.timeout(300)
def test_a_step_of_a_hundred_thousand_partitions(tmp_path: Path) -> None:
    """A group of its own for each of so many parameters: no block crosses the end of a group."""
    with Cluster(tmp_path, nodes=2, forked=False) as cluster:
        outcomes = cluster.run(
            f"{WORKERS}:parameters", [0, 1], count=100_000, elements=4, steps=2, groups="layer-wise", timeout=280
        )
        for outcome in outcomes:
            assert outcome.ok()["wrong"] == 0


@pytest.mark.timeout(300)
def test_a_tensor_of_four_gibibytes(tmp_path: Path) -> None:
    """Addresses and lengths beyond 2**32. Each node holds it twice, as input and as output."""
    nodes = 2 if available() > 20 * GIB else 1
    if available() < 10 * GIB:
        pytest.skip("less than 10 GiB of memory are free")
    with Cluster(tmp_path, nodes=nodes, forked=False) as cluster:
        for outcome in cluster.run(f"{WORKERS}:huge", list(range(nodes)), elements=GIB + 12_345, timeout=280):
            assert outcome.ok()["wrong"] == 0
