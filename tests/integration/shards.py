"""Two nodes whose workers sum gradients among themselves first, for tests of `hierarchy`.

What may live here: clusters, layouts of ranks and checks that several of those tests share. What may not: tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.cluster import Cluster, Outcome, parts

#: the node of each rank
EVEN: Final = [0, 0, 1, 1]
UNEVEN: Final = [0, 1, 1]
MORE: Final = [0, 0, 1, 1, 1]


def two_nodes(folder: Path) -> Cluster:
    """Small blocks, so that models of a test have several."""
    options = {"partition_bytes": str(256 << 10), "min_compress_bytes": "1KiB"}
    return Cluster(folder, nodes=2, lanes=2, options=options, know_peers=False)


def run_several(cluster: Cluster, ranks: list[int], functions: list[tuple[str, dict[str, Any]]]) -> list[list[Outcome]]:
    """One function after the other in one job; each function's outcomes, a rank each."""
    return parts(cluster.run("tests.integration.cluster:several", ranks, functions=functions))


def check_a_kill_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, function: str, mark: str, **given: Any
) -> None:
    """Train with and without the second node's daemon killed at ``mark``; ``hashes`` of weights have to be the same."""
    found = []
    for kill in (False, True):
        options = {"min_compress_bytes": "1KiB"}
        with Cluster(tmp_path_factory.mktemp("killed"), nodes=2, options=options) as cluster:
            job = cluster.start(function, EVEN, **given)
            if kill:
                job.wait_mark(mark)
                cluster.daemons[1].restart()
            values = [o.ok() for o in job.wait()]
        assert all((v["reconnects"] > 0) is (kill and rank > 1) for rank, v in enumerate(values))
        found += [h for v in values for h in v.get("hashes", [v.get("hash")])]
    assert len(set(found)) == 1 and found[0]
