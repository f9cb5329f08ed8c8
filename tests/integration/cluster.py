"""Real daemons and real workers on loopback, for tests.

What may live here: daemons that know each other; running functions as worker processes and collecting what they return.
What may not: one daemon's life (`daemon.py`), assertions about the protocol, torch (the parent stays light).

    with Cluster(tmp_path, nodes=2) as cluster:
        for outcome in cluster.run("tests.integration.client_workers:sums", ranks=[0, 0, 1]):
            assert outcome.value == ...

``ranks=[0, 0, 1]``: ranks 0 and 1 live on node 0, rank 2 on node 1. A worker function is called with the keyword
arguments given to ``run`` in its own process, with the variables torchrun would set and GC_NODE_SOCKET and GC_JOB,
and returns something JSON can hold. Where jobs may follow one another in the same processes,
``run("...:several", functions=[...])`` runs them all and :func:`parts` takes the outcomes apart.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import secrets
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab import processes
from benchmarks.lab.ports import free_ports
from gcserver import keys as node_keys
from gcserver.keys import KeyPair
from tests.integration.daemon import ROOT, Daemon
from tests.integration.forked import Forked


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker came to: ``value`` returned, or ``error`` (exception class name) with ``message``."""

    rank: int
    status: int
    value: Any = None
    error: str = ""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def ok(self) -> Any:
        """The value; AssertionError with the worker's log if there is none."""
        assert not self.error and self.status == 0, f"rank {self.rank}: {self.error}: {self.message}\n{self.log}"
        return self.value


@dataclass(slots=True)
class Worker:
    """One worker process."""

    rank: int
    process: Forked
    folder: Path
    #: starts the same worker in another folder
    fork: Callable[[Path], Forked]

    @property
    def pid(self) -> int:
        return self.process.pid

    def marks(self) -> list[str]:
        """What the worker noted with :func:`mark` so far."""
        path = self.folder / "marks"
        return path.read_text().splitlines() if path.exists() else []

    def outcome(self) -> Outcome:
        log = (self.folder / "log").read_text(errors="replace")
        status = self.process.returncode
        path = self.folder / "result.json"
        if not path.exists():
            return Outcome(self.rank, status, error="Died", message=f"exit status {status}, no result", log=log)
        return Outcome(self.rank, status, log=log, **json.loads(path.read_text()))


class Job:
    """Workers of one run. ``wait`` for their outcomes, in rank order."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    def wait(self, timeout: float = 90.0) -> list[Outcome]:
        """All outcomes; workers still running after ``timeout`` seconds are killed and reported as such, with what they
        were at in their logs."""
        end = time.monotonic() + timeout
        late = False
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        if late:
            for worker in self.workers:
                worker.process.tell_stacks()
            time.sleep(1)  # until they are written
        self.kill()
        return [worker.outcome() for worker in self.workers]

    def wait_mark(self, text: str, rank: int = 0, timeout: float = 60.0) -> None:
        """Until worker ``rank`` noted ``text``; RuntimeError if it ends before."""
        end = time.monotonic() + timeout
        worker = self.workers[rank]
        while text not in worker.marks():
            if worker.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"rank {rank} never noted {text!r}: {worker.folder.joinpath('log').read_text()}")
            time.sleep(0.002)

    def restart(self, rank: int) -> None:
        """Start a worker that has ended again, as a new process; its outcome takes the place of the old one's."""
        before = self.workers[rank]
        assert before.process.poll() is not None
        folder = before.folder.with_name(f"{before.folder.name}-again")
        folder.mkdir()
        self.workers[rank] = Worker(rank, before.fork(folder), folder, before.fork)

    def kill(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()


class Cluster(processes.Owner):
    """``nodes`` daemons that know each other, on loopback. Use as a context manager.

    ``options``: configuration keys for all daemons (``{"codec.default": "fp16"}``); ``lanes`` each.
    ``know_peers=False`` leaves out the static list, for rendezvous through torch's store. ``keys=True`` gives every
    daemon keys: ``pairs`` by name, all of them in the list ``admitted``. ``forked=False``: every process of a daemon is
    an interpreter of its own, as in use, instead of one forked with its modules loaded (`forked_daemon.py`).
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        lanes: int = 1,
        options: Mapping[str, str] | None = None,
        know_peers: bool = True,
        keys: bool = False,
        forked: bool = True,
    ) -> None:
        self.folder = folder
        self.lanes = lanes
        mark = secrets.token_hex(3)
        ports = free_ports((lanes + 1) * nodes)
        common = {"node.lanes": str(lanes), **(options or {})}
        self.daemons = [
            Daemon(f"{chr(ord('a') + i)}{mark}", ports + i * (lanes + 1), folder, common, forked) for i in range(nodes)
        ]
        for daemon in self.daemons:
            others = [f"{d.name}={d.address}" for d in self.daemons if d is not daemon]
            if know_peers and others:
                daemon.options["cluster.peers"] = ",".join(others)
        self.pairs: dict[str, KeyPair] = {}
        self.admitted = folder / "peers"
        if keys:
            self._make_keys()
        self._jobs: list[Job] = []
        self._runs = 0

    def _make_keys(self) -> None:
        for daemon in self.daemons:
            pair = self.pairs[daemon.name] = node_keys.generate(daemon.name)
            secret, _ = node_keys.write(pair, self.folder)
            daemon.options |= {"security.key": str(secret), "security.peers": str(self.admitted)}
        self.admit(*self.pairs.values())

    def admit(self, *pairs: KeyPair) -> None:
        """Make these the list of admitted nodes, at once as far as whoever reads it can tell."""
        new = self.admitted.with_suffix(".new")
        new.write_text("".join(node_keys.line(pair.name, pair.public) + "\n" for pair in pairs))
        new.replace(self.admitted)

    def _open(self) -> None:
        for daemon in self.daemons:
            daemon.start()
        for daemon in self.daemons:
            daemon.wait_ready()

    def close(self) -> None:
        """End every process this cluster started."""
        for job in self._jobs:
            job.kill()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.terminate()
        for daemon in self.daemons:
            daemon.stop()

    def start(
        self,
        function: str,
        ranks: Sequence[int],
        *,
        job: str = "",
        environ: Mapping[str, str] | None = None,
        **args: Any,
    ) -> Job:
        """Start a worker for each entry of ``ranks``; rank r lives on node ``ranks[r]``. See the module's text."""
        self._runs += 1
        label = job or f"job{self._runs}"
        store = free_ports(1)
        workers = []
        for rank, node in enumerate(ranks):
            folder = self.folder / f"{label}-{self._runs}-{rank}"
            folder.mkdir(parents=True)
            local = [r for r, n in enumerate(ranks) if n == node]
            variables = {
                **{k: v for k, v in os.environ.items() if not k.startswith("GC_")},
                "RANK": str(rank),
                "WORLD_SIZE": str(len(ranks)),
                "LOCAL_RANK": str(local.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(local)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store),
                "GC_NODE_SOCKET": str(self.daemons[node].socket),
                "GC_JOB": label,
                "GC_TEST_JOB": label,
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            }

            def fork(folder: Path, variables: dict[str, str] = variables) -> Forked:
                return Forked(functools.partial(_main, function, args, folder), variables, ROOT, folder / "log")

            workers.append(Worker(rank, fork(folder), folder, fork))
        started = Job(workers)
        self._jobs.append(started)
        return started

    def run(
        self,
        function: str,
        ranks: Sequence[int],
        *,
        job: str = "",
        environ: Mapping[str, str] | None = None,
        timeout: float = 90.0,
        **args: Any,
    ) -> list[Outcome]:
        """:meth:`start` and wait."""
        return self.start(function, ranks, job=job, environ=environ, **args).wait(timeout)


# --------------------------------------------------------------------------------------- in the worker
def mark(text: str) -> None:
    """In a worker: note ``text`` for the parent (:meth:`Job.wait_mark`)."""
    with open(os.path.join(os.environ["GC_TEST_FOLDER"], "marks"), "a") as file:
        file.write(text + "\n")


def wait_for(path: str) -> None:
    """In a worker: until the parent has made this file."""
    while not os.path.exists(path):
        time.sleep(0.01)


def several(functions: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """In a worker: call each ``("module:function", arguments)`` in turn, whatever becomes of the ones before."""
    found = []
    for number, (function, args) in enumerate(functions):
        os.environ["GC_JOB"] = f"{os.environ['GC_TEST_JOB']}.{number}"
        try:
            found.append({"value": call(function, args)})
        except Exception as error:
            traceback.print_exc()
            found.append(_failure(error))
    return found


def parts(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """What :func:`several` came to: for each function its outcomes, in rank order. AssertionError with the logs of all
    workers that did not get there."""
    lost = [f"rank {o.rank}: {o.error}: {o.message}\n{o.log}" for o in outcomes if o.error or o.status]
    assert not lost, "\n".join(lost)
    by_rank = [[Outcome(o.rank, 0, log=o.log, **part) for part in o.value] for o in outcomes]
    return [list(group) for group in zip(*by_rank, strict=True)]


def call(function: str, args: Mapping[str, Any]) -> Any:
    """In a worker: ``module:function`` with ``args``."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(**args)


def _failure(error: Exception) -> dict[str, Any]:
    facts = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | tuple)}
    return {"error": type(error).__name__, "message": str(error), "facts": facts}


def _main(where: str, args: Mapping[str, Any], folder: Path) -> None:
    os.environ["GC_TEST_FOLDER"] = str(folder)

    def finish(result: dict[str, Any]) -> None:
        partial = folder / "result.tmp"
        partial.write_text(json.dumps(result))
        partial.replace(folder / "result.json")

    try:
        from tests.integration import devices  # imports torch, which the parent does not need

        devices.choose()
        value = call(where, args)
    except Exception as error:
        finish(_failure(error))
        raise  # to the top, as in a training script
    finish({"value": value})
