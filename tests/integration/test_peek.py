"""Gradients of real jobs, read from outside their daemons.

What may live here: what only real daemons and workers show of `gcserver/runtime/peek.py` and `errortables.py`. What may
not: layouts (`tests/unit/runtime/test_peek.py`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from gcserver.core.control_events import JobMemory
from gcserver.core.events import DomainConfig
from gcserver.core.job import Job
from gcserver.runtime.errortables import ErrorTables
from gcserver.runtime.peek import JobGone, Peek, Watched
from gcserver.runtime.resolve import resolve
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import until
from tests.integration.peek_workers import SHAPES, gradient

LANES = 2


def only_domain(daemon: Daemon) -> Watched:
    """The only domain of the only job, as the daemon remembers it."""
    (file,) = daemon.state.glob("jobs/*/job.msgpack")
    memory = msgspec.msgpack.decode(file.read_bytes(), type=JobMemory)
    ((declared, sections),) = memory.domains
    config: DomainConfig = Job(memory.record, daemon.name, LANES, resolve).add_domain(declared).config
    return Watched(str(daemon.state), LANES, config, sections)


def files(daemon: Daemon) -> dict[str, tuple[int, int, bytes]]:
    """Time of change, size and content of what the lanes of a daemon keep."""
    found = {}
    for path in daemon.state.glob("jobs/*/*.*.*"):
        status = path.stat()
        found[path.name] = (status.st_mtime_ns, status.st_size, path.read_bytes())
    return found


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Its processes write nothing meanwhile: the settling of the step could come at any time."""
    pids = [daemon.pid, *daemon.lane_pids()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def compare(daemon: Daemon, rank: int, codec: str) -> None:
    """What is read of a daemon's memory is what ``rank`` pushed, and the memory is as it was."""
    before = files(daemon)
    assert {name.split(".")[2][:4] for name in before} >= {"chun", "reco", "heap"}
    with Peek(only_domain(daemon)) as peek:
        assert {t.name: t.shape for t in peek.tensors} == SHAPES
        for tensor in peek.tensors:
            reading = peek.read(tensor)
            assert reading is not None
            pushed = gradient(tensor.name, rank).reshape(-1)
            # the first step had no residual yet, whatever was left of it since
            np.testing.assert_array_equal(reading.contribution, pushed)
            if codec == "none":
                assert reading.outcome is not None
                mean = (gradient(tensor.name, 0) + gradient(tensor.name, 1)).reshape(-1) / 2
                np.testing.assert_array_equal(reading.outcome, mean)
        tables = ErrorTables(peek)
        tables.sample(60.0)
        found = tables.tables()
    assert set(found) == {"topk", "sidco", "qsgd", "powersgd"}
    for rows in found.values():
        assert [row.name for row in rows] == list(SHAPES)
        assert all(np.isfinite(row.errors).all() for row in rows)
    assert files(daemon) == before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("peek"), nodes=2, lanes=LANES) as made:
        yield made


def gone(cluster: Cluster) -> None:
    """No daemon remembers any job."""
    until("no job", lambda: not any(any(daemon.state.glob("jobs/*")) for daemon in cluster.daemons))


@pytest.mark.parametrize("codec", ["none", "topk(ratio=0.01)"])
def test_what_is_read_is_what_the_worker_pushed_and_reading_leaves_no_trace(cluster: Cluster, codec: str) -> None:
    job = cluster.start("tests.integration.peek_workers:push_and_pause", [0, 1], compression=codec)
    for rank in range(2):
        job.wait_mark("paused", rank)
    for rank, daemon in enumerate(cluster.daemons):
        with stopped(daemon):
            compare(daemon, rank, codec)
    job.kill()
    gone(cluster)


def test_a_job_that_ended_is_said_to_be_gone(cluster: Cluster) -> None:
    job = cluster.start("tests.integration.peek_workers:push_and_leave", [0, 1])
    job.wait_mark("pushed")
    watched = only_domain(cluster.daemons[0])
    with Peek(watched) as peek:
        for outcome in job.wait():
            assert outcome.ok() is None
        gone(cluster)
        with pytest.raises(JobGone):
            ErrorTables(peek).sample(60.0)
    with pytest.raises(JobGone):
        Peek(watched)
