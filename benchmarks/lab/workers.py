"""Processes on the hosts of a lab, one a host: started with torchrun's variables, followed by their logs or lines.

What may live here: starting them, reading the JSON lines they log while they run, saying a word to them, why they
failed. What may not: what they compute, and what the lines mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lab import daemons, netns, ports, processes
from benchmarks.lab.jsonlog import JsonLog
from gcserver.copies import around_caches


class WorkerError(RuntimeError):
    """A worker ended with an error or took too long; ``str()`` holds the end of what all of them printed."""


def alone(rank: int, size: int) -> dict[str, str]:
    """The variables torchrun and gcrun would set for a rank that is the only one of its machine, but for the rendezvous
    and the daemon's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        **around_caches(os.environ),
    }


def environment(host: netns.Host, hosts: Sequence[netns.Host], port: int) -> dict[str, str]:
    """The variables torchrun would set for the only rank on ``host``; the first host's ``port`` is the rendezvous."""
    return alone(host.index, len(hosts)) | {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}


class Workers(processes.Owner):
    """``python ARGV --log FILE`` on every host, a context manager that ends them whatever happens.

    name: for errors. argv: what Python is given. cluster: the daemons that the workers use, None where they need none.
    folder: for logs. ``lines`` holds what each rank has logged so far, a list of JSON values a rank.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        hosts: Sequence[netns.Host],
        cluster: daemons.Daemons | None,
        folder: Path,
        job: str,
    ) -> None:
        self.name, self.argv, self.job = name, tuple(argv), job
        self.hosts, self.cluster, self.folder = tuple(hosts), cluster, folder
        self.workers: list[subprocess.Popen[Any]] = []
        self.lines: list[list[dict[str, Any]]] = [[] for _ in self.hosts]
        self._logs = [JsonLog(folder / f"{job}.{host.index}.jsonl") for host in self.hosts]

    def close(self) -> None:
        """Ends workers that still run."""
        with processes.uninterrupted():
            processes.end(self.workers, grace=3.0)
            for worker in self.workers:
                if worker.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):  # a word it did not live to read is still in the buffer
                        worker.stdin.close()

    def update(self) -> bool:
        """Reads what the logs have gained; whether a line that all ranks have is new."""
        before = min(map(len, self.lines))
        for lines, log in zip(self.lines, self._logs, strict=True):
            lines += log.news()
        return min(map(len, self.lines)) > before

    def wait(
        self,
        timeout: float,
        on_lines: Callable[[], None] | None = None,
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Until all have ended, or ``until`` holds; ``on_lines`` is called at most ten times a second as lines arrive.

        Raises WorkerError when one fails or it takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while any(w.poll() is None for w in self.workers):
            if any(w.poll() for w in self.workers) or time.monotonic() > deadline:
                break
            if self.update() and on_lines is not None:
                on_lines()
            if until is not None and until():
                return
            time.sleep(0.1)
        late = time.monotonic() > deadline
        codes = daemons.workers_stopped(self.workers, 5.0)
        self.update()
        if any(codes):
            self._fail(f"took longer than {timeout:g} s" if late else f"workers ended with {codes}")
        if until is not None and not until():
            self._fail("workers ended before they had done what was asked")

    def say(self, word: str) -> None:
        """One line to the standard input of every worker. Raises WorkerError if one does not read any more."""
        for worker in self.workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(f"{word}\n".encode())
                worker.stdin.flush()
            except BrokenPipeError:
                self._fail(f"a worker ended before it was told {word!r}")

    def _open(self) -> None:
        port = ports.free_ports(1)
        for host in self.hosts:
            env = self.cluster[host.index].environment(self.job) if self.cluster is not None else host.environment()
            env |= environment(host, self.hosts, port)
            env["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")  # or torch leaves one in /tmp
            argv = [sys.executable, *self.argv, "--log", str(self._logs[host.index].path)]
            with self._output(host.index).open("wb") as output:
                self.workers.append(host.start(argv, env=env, stdin=subprocess.PIPE, stdout=output, stderr=output))

    def _output(self, rank: int) -> Path:
        return self.folder / f"{self.job}.{rank}.txt"

    def _fail(self, what: str) -> None:
        said = []
        for rank in range(len(self.hosts)):
            tail = self._output(rank).read_text(errors="replace").strip().splitlines()[-12:]
            said += [f"rank {rank}: {line}" for line in tail]
        for daemon in self.cluster or ():
            said += [f"{daemon.name}: {line}" for line in daemon.log_tail(8).splitlines()]
        raise WorkerError(f"{self.name}: {what}\n" + "\n".join(said))


def results(
    name: str,
    hosts: Sequence[netns.Host],
    cluster: daemons.Daemons | None,
    task: Callable[[netns.Host], object],
) -> Iterator[Any]:
    """Runs ``python -m benchmarks.NAME --worker TASK`` as each rank, with ``task(host)`` as JSON; yields what rank 0
    prints, one JSON value a line.

    ``cluster``: the daemons that the job goes through, one a host; None without any. Raises WorkerError with their logs
    if a worker fails.
    """
    port, job = ports.free_ports(1), daemons.job_name(name)
    with contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[Any]] = []
        stack.callback(lambda: processes.end(started, grace=3.0))
        for host in hosts:
            env = cluster[host.index].environment(job) if cluster is not None else host.environment()
            env |= environment(host, hosts, port)
            argv = [sys.executable, "-m", f"benchmarks.{name}", "--worker", msgspec.json.encode(task(host)).decode()]
            started.append(host.start(argv, env=env, stdout=subprocess.PIPE if host.index == 0 else None))
        assert started[0].stdout is not None
        for line in started[0].stdout:
            yield json.loads(line)
        codes = daemons.workers_stopped(started, 20.0)
        if any(codes):
            logs = "\n".join(d.log_tail(10) for d in cluster) if cluster is not None else ""
            raise WorkerError(f"{name}: workers ended with {codes}\n{logs}")
