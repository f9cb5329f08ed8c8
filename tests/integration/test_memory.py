"""Shared memory that cannot be had ends the job that asked for it, with a clear error, and no other.

And what a running job takes is what the formula says (docs/memory.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver.runtime.memory_parts import SHARED, total
from gcserver.runtime.statefiles import Heap, MemoryShort, map_file
from tests.integration.cluster import Cluster
from tests.integration.operators import until
from tests.job_memory import expected

WORKERS = "tests.integration.memory_workers"


def test_a_job_takes_what_the_formula_says_and_one_that_does_not_fit_ends(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, forked=False) as cluster:
        lanes = [daemon.lane_pids() for daemon in cluster.daemons]
        for outcome in cluster.run(f"{WORKERS}:too_much", [0, 1]):
            assert outcome.error == "OutOfMemory"
            assert "would take 512 GiB of shared memory" in outcome.message
            assert "doctor --params" in outcome.message
        for outcome in cluster.run(f"{WORKERS}:little", [0, 1]):
            assert outcome.ok() == 2.0
        for codec in ("none", "onebit"):
            end = tmp_path / f"end of {codec}"
            job = cluster.start(f"{WORKERS}:large", [0, 1, 0], elements=700_001, compression=codec, end=str(end))
            for rank in range(3):
                job.wait_mark("averaged", rank)
            for daemon in cluster.daemons:
                (folder,) = daemon.state.glob("jobs/*")
                # The supervisor writes it once it has heard that the step is settled, which workers may know first.
                until("the step to be in the ledger", lambda folder=folder: list(folder.glob("*.ledger")))
                sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix != ".msgpack"}
                heaps = sum(size for name, size in sizes.items() if ".heap" in name)
                parts = expected(folder, daemon.name)
                exact = sum(p.nbytes for p in parts if p.exact)
                content = sum(p.nbytes for p in parts if p.what.startswith("codec states"))
                assert sum(sizes.values()) - heaps == exact
                assert content <= heaps <= total(parts, SHARED) - exact
                assert (content > 0) == (codec != "none")
            end.touch()
            for outcome in job.wait():
                assert outcome.ok() == 2.0
        # nobody died of it
        assert [daemon.lane_pids() for daemon in cluster.daemons] == lanes


def test_a_file_without_memory_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(MemoryShort, match="cannot be had"):
        map_file(tmp_path / "chunk", 1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_heap_file_whose_maker_was_killed_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "x.heap0").touch()
    heap = Heap(tmp_path, "x")
    heap.reopen()
    assert heap.allocate(100) == (0, 0)
    assert heap.view((0, 0), 100).nbytes == 100
