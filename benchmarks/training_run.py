"""One system of ``benchmarks.training`` on the hosts of a lab: its ranks, its daemons, and what its log says.

What may live here: from a task to a row of the results. What may not: which cells and systems there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks import common, proposed_buckets, training_systems
from benchmarks.lab import daemons, netns, workers
from benchmarks.training_systems import System
from benchmarks.training_worker import Task
from gcproto import admin_pb2_grpc
from gcproto.modes import BALANCED
from gcserver.planner.profile import Profile

#: Losses of so many steps are averaged for the loss at the end.
LAST = 20
STARTS_WITHIN = 120.0
#: what an untimed step may take at most, s: 110 MB dense at 100 Mbit/s between four nodes take 15
SLOWEST_STEP = 60.0
#: steps; who is ended from outside does not get there
MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Lines:
    """The steps of one run as all ranks logged them: the line of every rank, by step. ``buckets``: DDP's, bytes."""

    steps: tuple[tuple[Mapping[str, Any], ...], ...]
    held_out: float | None
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(cls, logs: Sequence[Sequence[Mapping[str, Any]]]) -> Lines:
        steps = zip(*([line for line in log if "step" in line] for log in logs), strict=False)
        held = [line["held_out"] for log in logs for line in log if "held_out" in line]
        buckets = [line["buckets"] for log in logs for line in log if "buckets" in line]
        return cls(tuple(steps), held[0] if held else None, tuple(buckets[0]) if buckets else ())

    def seconds(self, skip: int) -> list[float]:
        """From the end of a step to the end of the next, each that of the slowest rank, but for the first ``skip``."""
        ends = [max(line["end"] for line in step) for step in self.steps]
        return [b - a for a, b in itertools.pairwise(ends)][max(0, skip - 1) :]

    def sent(self, skip: int) -> float:
        """Bytes a host sends a step, all headers included: median over steps, mean over hosts."""
        totals = [statistics.fmean(line["sent"] for line in step) for step in self.steps]
        return statistics.median([b - a for a, b in itertools.pairwise(totals)][max(0, skip - 1) :])

    def cpu_seconds(self, skip: int) -> tuple[float, float]:
        """CPU time a step costs a rank and a daemon, s: means over steps and hosts."""
        first, last, nodes = self.steps[max(0, skip - 1)], self.steps[-1], len(self.steps[0])
        steps = len(self.steps) - max(1, skip)
        used = (sum(line[key] for line in last) - sum(line[key] for line in first) for key in ("cpu", "daemons"))
        ranks, others = (total / nodes / steps for total in used)
        return ranks, others

    def losses(self) -> list[float]:
        """Of each step, mean of all ranks."""
        return [statistics.fmean(line["loss"] for line in step) for step in self.steps]


class Stage:
    """A lab and, as systems need them, daemons in it; a context manager.

    ``base`` are settings of the daemons. Daemons stay for the next system unless that needs other settings or this one
    failed: it may have been them, and what failed must not fail the next. What they measure for MergeComp's buckets is
    measured once.
    """

    def __init__(
        self, lab: netns.Lab | netns.Loopback, rate: str | None, base: Mapping[str, str], folder: Path
    ) -> None:
        self.lab, self.rate, self.base, self.folder = lab, rate, dict(base), folder
        self._stack = contextlib.ExitStack()
        self._cluster: daemons.Daemons | None = None
        self._profile: Profile | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_daemons()

    def run(self, system: System, task: Task, on_step: Callable[[int], None]) -> Lines:
        """All of a task's steps; ``on_step`` gets how many are done.

        Raises WorkerError if a rank fails, DaemonError if a daemon does.
        """
        try:
            if system.buckets == training_systems.MERGECOMP:
                task = dataclasses.replace(task, caps=self._cut(system, task))
            return self._run(system.method, system.settings if system.daemons else None, task, on_step)
        except workers.WorkerError:
            self._end_daemons()
            raise

    def _cut(self, system: System, task: Task) -> tuple[float, ...]:
        """MergeComp's buckets for the system. Raises WorkerError where they cannot be told, too."""
        try:
            if self._profile is None:
                self._profile = self._measured(task)
            quality = {**self.base, **system.settings}.get("plan.quality", BALANCED)
            return proposed_buckets.caps(self._profile, system.codec, quality)
        except ValueError as error:
            raise workers.WorkerError(f"{system.method}: {error}") from error

    def _measured(self, task: Task) -> Profile:
        """What the daemons measure while the task's model trains."""
        folder, job, asked = self.folder / "profiles", daemons.job_name("measured"), 0
        cluster = self._daemons({**proposed_buckets.SETTINGS, "plan.profiles": str(folder)})
        assert cluster is not None
        task = dataclasses.replace(task, comm=training_systems.AUTO, codec="", unshaped=0, steps=MOST, seconds=0.0)
        with (
            workers.Workers(job, self._argv(task), self.lab.hosts, cluster, self.folder, job) as ranks,
            grpc.insecure_channel(cluster[0].admin) as channel,
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]

            def planned() -> bool:
                nonlocal asked
                done = min(map(len, ranks.lines))
                if done <= asked:
                    return False
                asked = done
                try:
                    return proposed_buckets.planned(admin, job)
                except grpc.RpcError as error:
                    raise workers.WorkerError(f"{job}: no daemon says whether it has a plan: {error}") from error

            self._shape(self.rate)
            ranks.wait(proposed_buckets.PATIENCE, until=planned)
        self._end_daemons()  # so that all is written
        return proposed_buckets.measured(folder, job)

    def _run(self, name: str, settings: Mapping[str, str] | None, task: Task, on_step: Callable[[int], None]) -> Lines:
        """``settings``: of the daemons beside the base; None: without any."""
        job, cluster = daemons.job_name("training"), self._daemons(settings)
        task = dataclasses.replace(task, daemons=tuple(d.process.pid for d in cluster or ()))
        self._shape(None if task.unshaped else self.rate)
        untimed = (task.unshaped + task.settle) * SLOWEST_STEP
        timeout = STARTS_WITHIN + untimed + (task.seconds or task.steps * SLOWEST_STEP) + 2 * SLOWEST_STEP
        with workers.Workers(name, self._argv(task), self.lab.hosts, cluster, self.folder, job) as ranks:

            def tell() -> None:
                on_step(min(sum("step" in line for line in log) for log in ranks.lines))

            def asked() -> bool:
                return all(any("asks" in line for line in log) for log in ranks.lines)

            if task.unshaped:
                ranks.wait(timeout, tell, asked)
                self._shape(self.rate)
                ranks.say("go")
            ranks.wait(timeout, tell)
            return Lines.of(ranks.lines)

    def _argv(self, task: Task) -> list[str]:
        return ["-m", "benchmarks.training_worker", "--task", task.text()]

    def _shape(self, rate: str | None) -> None:
        if self.lab.means is not None:
            self.lab.set_rate(rate)

    def _daemons(self, settings: Mapping[str, str] | None) -> daemons.Daemons | None:
        """Those with these settings, started if they do not run yet or run with others."""
        if settings is None:
            return None
        settings = {**self.base, **settings}
        if self._cluster is None or self._cluster.settings != settings:
            self._end_daemons()
            self._cluster = self._stack.enter_context(daemons.Daemons(self.lab.hosts, settings))
        return self._cluster

    def _end_daemons(self) -> None:
        self._cluster = None
        self._stack.close()


def speed_row(lines: Lines, task: Task) -> common.Row:
    """Step times: median, tenth and ninetieth percentile, s; what a step costs a host: bytes sent, CPU seconds."""
    untimed = task.unshaped + task.settle
    worker, daemon = lines.cpu_seconds(untimed)
    times = lines.seconds(untimed)
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else (times[0], times[0])
    return {
        "median_s": statistics.median(times),
        "p10_s": low,
        "p90_s": high,
        "runs": len(times),
        "step_bytes": lines.sent(untimed),
        "worker_cpu_s": worker,
        "daemon_cpu_s": daemon,
        "ddp_buckets": list(lines.buckets),
    }


def loss_row(lines: Lines, task: Task) -> common.Row:
    """The mean of the last training losses, all of them, and the loss of batches nobody trained on."""
    losses = lines.losses()
    return {
        "seed": task.seed,
        "steps": len(losses),
        "loss": statistics.fmean(losses[-LAST:]),
        "loss_held_out": lines.held_out,
        "losses": [round(loss, 6) for loss in losses],
        "ddp_buckets": list(lines.buckets),
        "step_bytes": lines.sent(1),
    }
