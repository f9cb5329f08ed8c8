"""Training runs on the hosts of a lab, one worker a host, and what their logs say.

What may live here: starting ``examples/train_gpt.py`` under one method, following it while it runs. What may not:
comparing methods (``examples.report``), printing.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.lab import daemons, netns, processes

TRAIN = Path(__file__).with_name("train_gpt.py")
WINDOW = 10  # steps over which losses are averaged: one batch says little


@dataclass(frozen=True, slots=True)
class Method:
    """A way of averaging gradients: its name in tables, who does it, with which codec."""

    name: str
    comm: str
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all ranks: when it ended on rank 0, s; its loss, mean of all ranks; bytes each host sent in it."""

    number: int
    seconds: float
    loss: float
    sent: tuple[int, ...]


@dataclass(slots=True)
class Record:
    """What a run did."""

    method: Method
    steps: list[Step] = field(default_factory=list)

    def durations(self, skip: int = 0) -> list[float]:
        """Seconds of each step after the first ``skip`` (and the very first, which has no step before it)."""
        ends = [s.seconds for s in self.steps]
        return [b - a for a, b in itertools.pairwise(ends)][max(0, skip - 1) :]

    def step_seconds(self, skip: int = 2) -> float:
        """Median over steps; the first two open connections and rebuild buckets."""
        return statistics.median(self.durations(skip))

    def step_bytes(self, skip: int = 2) -> float:
        """Bytes a host sends a step, headers included: median over steps, mean over hosts."""
        return statistics.median(statistics.fmean(s.sent) for s in self.steps[skip:])

    def loss_at(self, step: int, window: int = WINDOW) -> float:
        """Mean loss of the ``window`` steps up to and including ``step`` (from 1), fewer at the beginning."""
        return statistics.fmean(s.loss for s in self.steps[max(0, step - window) : step])


class RunError(RuntimeError):
    """A worker ended with an error; ``str()`` holds the end of what it printed."""


class Run:
    """A run in progress, a context manager that ends its workers whatever happens.

    hosts: one worker each. cluster: their daemons (None where the method needs none). folder: for logs.
    """

    def __init__(
        self,
        method: Method,
        hosts: Sequence[netns.Host],
        cluster: daemons.Daemons | None,
        folder: Path,
        *,
        steps: int = 0,
        seconds: float = 0.0,
        job: str | None = None,
    ) -> None:
        self.record = Record(method)
        self.job = job or daemons.job_name("demo")
        self.hosts, self.cluster, self.folder = tuple(hosts), cluster, folder
        self.limits = ["--steps", str(steps), "--seconds", str(seconds)]
        self.workers: list[subprocess.Popen[Any]] = []
        self._lines: list[list[dict[str, Any]]] = [[] for _ in self.hosts]
        self._read: list[int] = [0 for _ in self.hosts]

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends workers that still run."""
        with processes.uninterrupted():
            processes.end(self.workers, grace=3.0)

    def follow(self, on_step: Callable[[Record], None] | None = None, timeout: float = 300.0) -> Record:
        """Waits for the end; ``on_step`` is called about ten times a second while steps arrive.

        Raises RunError when a worker fails or the run takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while any(w.poll() is None for w in self.workers):
            if any(w.poll() for w in self.workers) or time.monotonic() > deadline:
                break
            if self.update() and on_step is not None:
                on_step(self.record)
            time.sleep(0.1)
        late = time.monotonic() > deadline
        codes = daemons.workers_stopped(self.workers, 5.0)
        self.update()
        if any(codes):
            self._fail(f"took longer than {timeout:g} s" if late else f"workers ended with {codes}")
        return self.record

    def update(self) -> bool:
        """Reads what the logs have gained; whether a step is new."""
        for rank in range(len(self.hosts)):
            path = self._log(rank)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._read[rank])
                    new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._read[rank] += len(whole)
                self._lines[rank] += [json.loads(line) for line in whole.splitlines()]
        done = min(map(len, self._lines))
        before = len(self.record.steps)
        for i in range(before, done):
            now = [lines[i] for lines in self._lines]
            # the first step's bytes have no beginning to count from
            sent = tuple(lines[i]["sent"] - lines[i - 1]["sent"] if i else 0 for lines in self._lines)
            loss = statistics.fmean(line["loss"] for line in now)
            self.record.steps.append(Step(i + 1, now[0]["s"], loss, sent))
        return done > before

    def _start(self) -> None:
        method, port = self.record.method, daemons.free_ports(1)
        argv = [sys.executable, str(TRAIN), "--comm", method.comm, "--quiet", *self.limits]
        argv += ["--codec", method.codec] if method.codec is not None else []
        for host in self.hosts:
            use = self.cluster is not None and method.comm == "gradcomm"
            env = self.cluster[host.index].environment(self.job) if use and self.cluster else host.environment()
            env |= {
                "RANK": str(host.index),
                "WORLD_SIZE": str(len(self.hosts)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.hosts[0].address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),  # or torch leaves one in /tmp
            }
            with self._output(host.index).open("wb") as output:
                log = ["--log", str(self._log(host.index))]
                self.workers.append(host.start([*argv, *log], env=env, stdout=output, stderr=output))

    def _log(self, rank: int) -> Path:
        return self.folder / f"{self.job}.{rank}.jsonl"

    def _output(self, rank: int) -> Path:
        return self.folder / f"{self.job}.{rank}.txt"

    def _fail(self, what: str) -> None:
        said = []
        for rank in range(len(self.hosts)):
            tail = self._output(rank).read_text(errors="replace").strip().splitlines()[-12:]
            said += [f"rank {rank}: {line}" for line in tail]
        if self.cluster is not None and self.record.method.comm == "gradcomm":
            for daemon in self.cluster:
                said += [f"{daemon.name}: {line}" for line in daemon.log_tail(8).splitlines()]
        raise RunError(f"{self.record.method.name}: {what}\n" + "\n".join(said))
