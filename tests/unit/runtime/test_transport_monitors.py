"""Connections that are given up while ZeroMQ has something to tell of them.

What may live here: a process that makes and drops many, which would stand still for ever if the order were wrong. What
may not: what a transport does with what it is told (`test_transport.py`).
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.lab.ports import free_address

#: Of a process with itself, so that ZeroMQ's thread has events of a connection just when that is dropped.
SCRIPT = """
import random, time, zmq
from gcserver.runtime.transport import ZmqTransport
context = zmq.Context()
transport = ZmqTransport(context, ADDRESS)
for peer in range(20):
    transport.open(peer, ADDRESS)
for turn in range(500):
    time.sleep(random.random() * 0.002)
    for peer in range(20):
        transport.reset(peer)
transport.close()
context.destroy(0)
print("done")
"""


def test_dropping_a_connection_never_waits_for_who_tells_of_it() -> None:
    script = SCRIPT.replace("ADDRESS", repr(free_address()))
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0 and found.stdout == "done\n", found.stderr
