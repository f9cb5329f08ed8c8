"""Forked workers: how they end, which no other test would notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.daemon import ROOT

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
    end = time.monotonic() + 30
    while worker.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not worker.exists()
