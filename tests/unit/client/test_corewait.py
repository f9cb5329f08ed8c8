"""What the system says of a thread that waits for a core."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from gcclient.corewait import CoreWait


def spin(seconds: float) -> None:
    """Use a core until so much CPU time is spent."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_only_a_thread_that_wants_a_core_and_has_none_waits() -> None:
    """A process of its own shares one core with this thread: each of them waits while the other runs."""
    if not Path("/proc/self/schedstat").exists():
        assert CoreWait().seconds() == 0.0
        return
    cores = os.sched_getaffinity(0)
    wait = CoreWait()
    assert wait.seconds() == 0.0, "nobody is watched yet"
    wait.here()
    child = 0
    try:
        os.sched_setaffinity(0, {min(cores)})
        child = os.fork()
        if not child:
            while True:
                pass
        began, waited, ran = time.perf_counter(), wait.seconds(), time.thread_time()
        spin(0.1)
        gone = time.perf_counter() - began
        waited = wait.seconds() - waited
        assert waited > 0.02
        assert waited + time.thread_time() - ran == pytest.approx(gone, abs=0.02, rel=0.2)
    finally:
        if child:
            os.kill(child, 9)
            os.waitpid(child, 0)
        os.sched_setaffinity(0, cores)
    before = wait.seconds()
    time.sleep(0.1)
    assert wait.seconds() - before < 0.05, "sleeping is no waiting for a core"


def test_the_first_thread_is_the_one_and_its_count_stays_when_it_is_gone() -> None:
    wait = CoreWait()
    thread = threading.Thread(target=lambda: (wait.here(), spin(0.01)))
    thread.start()
    thread.join()
    last = wait.seconds()
    wait.here()
    spin(0.02)
    assert wait.seconds() == wait.seconds() >= last


def test_where_the_system_does_not_say_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcclient.corewait.get_native_id", lambda: -1)
    wait = CoreWait()
    wait.here()
    spin(0.01)
    assert wait.seconds() == 0.0
