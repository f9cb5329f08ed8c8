"""What is short for one job ends that job, with an error that says what to do, and no other.

Beside each job that asks too much another one runs, whose every average is compared. All tests share two daemons; the
memory files of the second lie in a file system of 460 MiB, its profiles in one that is full, which takes root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Outcome
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, reachable, until
from tests.integration.test_profile import FORWARD, PAUSE, STEPS, TRAIN
from tests.soak.injectors import fill

pytestmark = pytest.mark.system
LARGE = "tests.integration.memory_workers:large"
MIB = 1 << 20


@contextlib.contextmanager
def file_system(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` at ``folder``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    folder = tmp_path_factory.mktemp("resources")
    with file_system(folder / "memory", "460m") as memory, file_system(folder / "profiles", "64k") as profiles:
        fill(profiles / "filler")
        made = reachable(Cluster(folder, nodes=2, options={"partition_bytes": "64MiB"}, forked=False))
        made.daemons[1].state = memory / "state"
        made.daemons[1].options["plan.profiles"] = str(profiles)
        with made as started:
            yield started


@contextlib.contextmanager
def another_job(cluster: Cluster, folder: Path) -> Iterator[None]:
    """One that runs all the while and is exact; afterwards nobody has died, and the next job runs as well."""
    stop, processes = folder / "stop", [(d.pid, *d.lane_pids()) for d in cluster.daemons]
    job = cluster.start("tests.integration.admin_workers:loop", [0, 1], job="other", stop=str(stop))
    job.wait_mark("running")
    yield
    stop.touch()
    for outcome in job.wait():
        assert outcome.ok()["inexact"] == []
    for outcome in cluster.run("tests.integration.memory_workers:little", [0, 1]):
        assert outcome.ok() == 2.0
    assert [(d.pid, *d.lane_pids()) for d in cluster.daemons] == processes
    for daemon in cluster.daemons:
        until("jobs to be forgotten", lambda daemon=daemon: ask(daemon, "jobs") == {"jobs": []})
        assert not list(daemon.state.glob("jobs/*"))


def refused(outcomes: list[Outcome], kind: str, *words: str) -> None:
    """Every rank got this error, and it says these words."""
    for outcome in outcomes:
        assert outcome.error == kind, f"{outcome.error}: {outcome.message}\n{outcome.log}"
        assert all(word in outcome.message for word in words), outcome.message


def test_a_model_that_does_not_fit_is_refused_when_it_is_declared(cluster: Cluster, tmp_path: Path) -> None:
    b = cluster.daemons[1]
    with another_job(cluster, tmp_path):
        outcomes = cluster.run(LARGE, [0, 1], elements=64 * MIB)
        words = ("would take", "of shared memory (", "averages", f"free in {b.state}", "doctor --params")
        refused(outcomes, "OutOfMemory", f"{b.name}: 'weight' shape [{64 * MIB}]", *words)


def test_shared_memory_that_is_gone_when_a_codec_needs_it(cluster: Cluster, tmp_path: Path) -> None:
    """The tensors fit when they are declared; then something else takes the rest."""
    b = cluster.daemons[1]
    go = tmp_path / "go"
    with another_job(cluster, tmp_path):
        job = cluster.start(LARGE, [0, 1], elements=16 * MIB, go=str(go), compression="onebit")
        job.wait_mark("declared", 0)
        job.wait_mark("declared", 1)
        filler = b.state.parent / "filler"
        fill(filler)
        go.touch()
        try:
            refused(job.wait(), "OutOfMemory", f"{b.name}: ", "cannot be had", "No space left", "doctor --params")
        finally:
            filler.unlink()


def test_profiles_on_a_full_disk_cost_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    with another_job(cluster, tmp_path):
        arguments = {"steps": STEPS, "compression": "fp16", "pause": PAUSE, "forward": FORWARD}
        for outcome in cluster.run(TRAIN, [0, 1], **arguments):
            assert outcome.ok()["names"]
    b = cluster.daemons[1]
    until("the warning", lambda: "profiles cannot be kept in" in b.text() and "No space left on device" in b.text())


@contextlib.contextmanager
def no_more_descriptors(pid: int) -> Iterator[None]:
    """A process may open nothing more for a while."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    first = next(n for n in itertools.count() if n not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (first, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("who", ["lane", "supervisor"])
def test_a_daemon_without_descriptors(cluster: Cluster, tmp_path: Path, who: str) -> None:
    b = cluster.daemons[1]
    pid = b.pid if who == "supervisor" else b.lane_pids()[0]
    with another_job(cluster, tmp_path), no_more_descriptors(pid):
        outcomes = cluster.run(LARGE, [1], elements=1000)
        refused(outcomes, "OutOfDescriptors", "Too many open files", "raise the limit on open files")


@contextlib.contextmanager
def no_more_memory(daemon: Daemon, more: int) -> Iterator[None]:
    """A daemon's lane may take ``more`` bytes of address space and then nothing."""
    (pid,) = daemon.lane_pids()
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.prlimit(pid, resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def test_a_lane_that_cannot_map_an_arena(cluster: Cluster, tmp_path: Path) -> None:
    a = cluster.daemons[0]
    with another_job(cluster, tmp_path), no_more_memory(a, 8 * MIB):
        outcomes = cluster.run(LARGE, [0, 0], elements=16 * MIB)
        refused(outcomes, "OutOfMemory", f"{a.name}: ", "cannot be had", "let the daemon have more memory")


def test_a_lane_without_memory_for_a_sum(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks of one node: their sum, a block of 64 MiB, is made in the lane's own memory."""
    a = cluster.daemons[0]
    go = tmp_path / "go"
    with another_job(cluster, tmp_path):
        job = cluster.start(LARGE, [0, 0], elements=64 * MIB, go=str(go))
        job.wait_mark("declared", 0)
        job.wait_mark("declared", 1)
        with no_more_memory(a, MIB):
            go.touch()
            refused(job.wait(), "OutOfMemory", f"{a.name}: memory cannot be had", "let the daemon have more memory")
