"""One worker process for each host of a lab, and what the first of them reports.

What may live here: starting workers as torchrun would, reading rank 0's lines, ending them. What may not: what they do.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.lab import daemons, netns, processes


def results(
    hosts: Sequence[netns.Host],
    cluster: daemons.Daemons | None,
    job: str,
    argv: Callable[[netns.Host], list[str]],
) -> Iterator[Any]:
    """Runs ``argv(host)`` as rank ``host.index``; yields what rank 0 prints, one JSON value a line.

    ``cluster``: the daemons that ``job`` goes through, one a host; None without any. Raises RuntimeError with their
    logs if a worker fails.
    """
    with contextlib.ExitStack() as stack:
        workers: list[subprocess.Popen[Any]] = []
        stack.callback(lambda: processes.end(workers, grace=3.0))
        for host in hosts:
            env = cluster[host.index].environment(job) if cluster is not None else host.environment()
            env |= {
                "RANK": str(host.index),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "OMP_NUM_THREADS": "1",
            }
            workers.append(host.start(argv(host), env=env, stdout=subprocess.PIPE if host.index == 0 else None))
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            yield json.loads(line)
        codes = daemons.workers_stopped(workers, 20.0)
        if any(codes):
            logs = "\n".join(d.log_tail(10) for d in cluster) if cluster is not None else ""
            raise RuntimeError(f"workers ended with {codes}\n{logs}")
