"""What the workers of test_private.py do, in processes of their own.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import gcclient
from gcclient import autostart
from gcclient.api import current
from tests.integration import client_workers
from tests.integration.cluster import mark


def counting(steps: int, pause: float = 0.0) -> dict[str, Any]:
    """Exact sums, where torch's store leads daemons to each other."""
    dist.init_process_group("gloo")
    return client_workers.counting(steps, 100_000, pause)


def on_machines_of_their_own() -> dict[str, Any]:
    """Each rank looks for a daemon by itself, and finds none of another rank's, as on another machine."""
    join = autostart._join
    autostart._join = lambda name, label: join(f"{name} on machine {os.environ['RANK']}", label)
    dist.init_process_group("gloo")
    gcclient.init(deadline=60)
    total = float(gcclient.push_pull(torch.tensor([float(gcclient.rank() + 1)]), average=False))
    socket = current().socket
    mark(socket)
    until = time.monotonic() + 60
    while not os.path.exists(os.environ["GC_TEST_SEEN"]) and time.monotonic() < until:
        time.sleep(0.02)
    gcclient.shutdown()
    return {"total": total, "socket": socket}


def abandoned() -> dict[str, Any]:
    """Two ranks that look for a daemon by themselves; one of them is killed."""
    torch.set_num_threads(1)
    gcclient.init(deadline=30)
    total = float(gcclient.push_pull(torch.tensor([float(gcclient.rank() + 1)]), average=False))
    socket, local = current().socket, gcclient.local_size()
    mark(socket)
    if gcclient.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    try:
        gcclient.push_pull(torch.ones(3))
    except gcclient.GradcommError as failure:
        error = type(failure).__name__
    return {"total": total, "socket": socket, "local": local, "error": error}
