"""Shared memory that cannot be had ends the job that asked for it, with a clear error, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver.runtime.statefiles import Heap, MemoryShort, map_file
from tests.integration.cluster import Cluster


def test_a_job_that_does_not_fit_ends_and_the_next_one_runs(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        lanes = [daemon.lane_pids() for daemon in cluster.daemons]
        for outcome in cluster.run("tests.integration.memory_workers:too_much", [0, 1]):
            assert outcome.error == "OutOfMemory"
            assert "cannot be had" in outcome.message
            assert "doctor --params" in outcome.message
        for outcome in cluster.run("tests.integration.memory_workers:little", [0, 1]):
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
