"""Processes that end, what /proc says of them, and what a lab refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import daemons, netns, processes, procfs

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def started(argv: list[str]) -> subprocess.Popen[bytes]:
    process = processes.start(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if procfs.kill_survivors([pid], grace=0.0) == []:
            return True
        time.sleep(0.02)
    return False


def test_end_asks_first_and_kills_who_does_not_listen() -> None:
    polite, stubborn = started(SLEEP), started(STUBBORN)
    assert processes.end([polite, stubborn], grace=0.5) == [stubborn.pid]
    assert polite.returncode == -signal.SIGTERM
    assert stubborn.returncode == -signal.SIGKILL
    assert processes.end([polite, stubborn]) == []


def test_killing_takes_what_the_process_started_along() -> None:
    code = f"import subprocess, sys, time; subprocess.Popen({SLEEP!r}); time.sleep(600)"
    parent = started([sys.executable, "-c", f"import signal; signal.signal(15, signal.SIG_IGN); {code}"])
    family = procfs.tree(parent.pid)
    assert len(family) == 2
    processes.end([parent], grace=0.2)
    assert all(gone(pid) for pid in family)


@pytest.mark.skipif(processes.which("setpriv") is None, reason="util-linux's setpriv is not installed")
def test_a_child_does_not_outlive_a_killed_parent() -> None:
    inner = processes.dies_with_parent(SLEEP)
    code = f"import subprocess, time; p = subprocess.Popen({inner!r}, start_new_session=True); time.sleep(600)"
    parent = processes.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    (child,) = set(procfs.tree(parent.pid)) - {parent.pid}
    parent.kill()
    parent.wait()
    assert gone(child)


def test_sigterm_runs_clean_ups() -> None:
    code = (
        "import time\nfrom benchmarks.lab.processes import exits_on_signals\n"
        "with exits_on_signals():\n  try:\n    print('up', flush=True); time.sleep(600)\n"
        "  finally:\n    print('clean', flush=True)"
    )
    process = started([sys.executable, "-c", code])
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.read() == b"clean\n"
    assert process.wait() == 128 + signal.SIGTERM


def test_a_process_is_measured() -> None:
    before = procfs.cpu_seconds([os.getpid()])
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    used = procfs.cpu_seconds([os.getpid()]) - before
    assert 0.09 < used < 5
    assert procfs.cpu_seconds([2**22 + 1]) == 0.0


def test_what_a_process_used_stays_used_when_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as child:
        clock = procfs.CpuClock([os.getpid(), child.pid])
        before = clock.seconds()
        child.communicate("\n")
    assert clock.seconds() >= before > 0.0
    assert procfs.cpu_seconds([child.pid]) == 0.0
    here = [os.getpid()]
    assert 1 << 20 < procfs.anonymous_bytes(here) <= procfs.resident_bytes(here)
    fds = procfs.descriptors(here)
    with open(os.devnull):
        assert procfs.descriptors(here) == fds + 1


def test_memory_of_files_is_what_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 1 << 20)
    assert procfs.used_bytes(tmp_path) == 0
    (tmp_path / "full").write_bytes(b"x" * 65536)
    assert procfs.used_bytes(tmp_path) >= 65536


def test_workers_are_ended_by_the_first_failure() -> None:
    workers = [started(SLEEP), processes.start([sys.executable, "-c", "raise SystemExit(3)"])]
    began = time.monotonic()
    assert daemons.workers_stopped(workers, 60.0) == [-signal.SIGTERM, 3]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 10**8), ("1.5gbit", 1_500_000_000), ("8000bit", 8000)])
def test_rates_are_read(rate: str, bits: int) -> None:
    assert netns.bits_per_second(rate) == bits


def test_what_cannot_be_built_is_refused_before_anything_exists() -> None:
    with pytest.raises(ValueError, match="such as 100mbit"):
        netns.bits_per_second("fast")
    with pytest.raises(ValueError, match="expected 1 to 250"):
        netns.Lab(0, "1gbit", means="root")
    with pytest.raises(ValueError, match="cannot be shaped"):
        netns.Loopback(2).set_rate("1gbit")


def test_the_bucket_is_a_millisecond_but_not_too_small() -> None:
    assert netns.tbf(10**9)[4] == "125000"
    assert netns.tbf(10**8)[4] == "32768"


def test_the_probe_says_why() -> None:
    probe = netns.probe()
    assert probe.reason
    assert netns.shaping() == probe.means


@pytest.mark.slow
def test_a_daemon_that_cannot_start_is_named_with_its_log() -> None:
    with pytest.raises(daemons.DaemonError, match=r"n0 ended with status 2(.|\n)*node.cores"):
        daemons.Daemons(netns.Loopback(1).hosts, {"node.cores": "none of them"}).__enter__()


def test_a_daemon_is_told_where_it_finds_its_peers() -> None:
    hosts = [netns.Host(i, f"10.77.0.{i + 1}", "eth0") for i in range(3)]
    cluster = daemons.Daemons(hosts, routes={(0, 1): "tcp://127.0.0.1:8470"})
    try:
        cluster._prepare()
        peers = [d.argv[d.argv.index("--cluster.peers") + 1] for d in cluster]
    finally:
        cluster.close()
    straight = "n0=tcp://10.77.0.1:7470,n1=tcp://10.77.0.2:7470,n2=tcp://10.77.0.3:7470"
    assert peers == [straight.replace("10.77.0.2:7470", "127.0.0.1:8470"), straight, straight]
