"""A process that asked to end with its parent does, even where the parent is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Starts a child that says that it is there, and how it was told to end; both hold the pipe.
PARENT = """
import signal, subprocess, sys, time
from functools import partial
from gcserver.parent import ends_with_parent
child = "import os, signal, time\\n" \
    "signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b'told\\\\n') - 5))\\n" \
    "os.write(1, b'there\\\\n')\\ntime.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], preexec_fn=partial(ends_with_parent, signal.SIGTERM))
time.sleep(60)
"""


def test_a_child_is_told_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"there\n"
    finally:
        parent.kill()
        parent.wait()
    assert select.select([parent.stdout], [], [], 30)[0]
    assert parent.stdout.read() == b"told\n"
    parent.stdout.close()
