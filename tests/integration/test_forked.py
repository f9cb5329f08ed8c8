"""Forked workers: how they end and what is known of those that do not, which no other test would notice."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.cluster import wait_for
from tests.integration.daemon import ROOT
from tests.integration.forked import TELLS_STACKS, Forked
from tests.integration.operators import until

PARENT = """
import functools, os, sys, time
from pathlib import Path
from tests.integration.forked import Forked
worker = Forked(functools.partial(time.sleep, 100), dict(os.environ), Path.cwd(), Path(sys.argv[1]))
print(worker.pid, flush=True)
time.sleep(100)
"""


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        worker = Path("/proc") / parent.stdout.readline().strip()
        try:
            assert worker.name and worker.exists()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    until("the end of the worker", lambda: not worker.exists())


def test_a_worker_says_what_it_is_at(tmp_path: Path) -> None:
    go = tmp_path / "go"
    worker = Forked(functools.partial(wait_for, str(go)), dict(os.environ), tmp_path, tmp_path / "log")
    try:
        until("a worker that listens", lambda: _catches(worker.pid, TELLS_STACKS))
        worker.tell_stacks()
        until("its stacks", lambda: "in wait_for" in (tmp_path / "log").read_text())
        go.touch()
        assert worker.wait(30) == 0
    finally:
        worker.kill()


def _catches(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)
