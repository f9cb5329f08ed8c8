"""Training runs on the hosts of a lab, one worker a host, and what their logs say.

What may live here: starting ``examples/train_gpt.py`` under one method, following it while it runs. What may not:
comparing methods (``examples.report``), printing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lab import daemons, netns, workers

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


class Run(workers.Workers):
    """A run in progress; ``record`` grows with every :meth:`update`.

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
        argv = [str(TRAIN), "--comm", method.comm, "--quiet", "--steps", str(steps), "--seconds", str(seconds)]
        argv += ["--codec", method.codec] if method.codec is not None else []
        used = cluster if method.comm == "gradcomm" else None
        super().__init__(method.name, argv, hosts, used, folder, job or daemons.job_name("demo"))
        self.record = Record(method)

    def follow(self, on_step: Callable[[Record], None] | None = None, timeout: float = 300.0) -> Record:
        """Waits for the end; ``on_step`` is called about ten times a second while steps arrive.

        Raises WorkerError when a worker fails or the run takes longer than ``timeout`` seconds.
        """
        self.wait(timeout, None if on_step is None else lambda: on_step(self.record))
        return self.record

    def update(self) -> bool:
        """Reads what the logs have gained; whether a step is new."""
        new = super().update()
        for i in range(len(self.record.steps), min(map(len, self.lines))):
            now = [lines[i] for lines in self.lines]
            # the first step's bytes have no beginning to count from
            sent = tuple(lines[i]["sent"] - lines[i - 1]["sent"] if i else 0 for lines in self.lines)
            loss = statistics.fmean(line["loss"] for line in now)
            self.record.steps.append(Step(i + 1, now[0]["s"], loss, sent))
        return new
