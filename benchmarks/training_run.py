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

from benchmarks import common, proposed_buckets, training_systems, training_worker
from benchmarks.lab import daemons, netns, workers
from benchmarks.training_systems import System
from benchmarks.training_worker import Task
from gcproto import admin_pb2, admin_pb2_grpc
from gcproto.modes import BALANCED
from gcserver.planner.profile import Profile

#: Losses of so many steps are averaged for the loss at the end.
LAST = 20
STARTS_WITHIN = 120.0
ANSWERS_WITHIN = 30.0
#: what an untimed step may take at most, s: 110 MB dense at 100 Mbit/s between four nodes take 15
SLOWEST_STEP = 60.0
#: what the daemons of one host, several side by side, may have of ports each
PORTS = 32
#: steps; who is ended from outside does not get there
MOST = 1_000_000
#: is told how many steps are done, and of how many
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Lines:
    """The steps of one turn as all ranks logged them: the line of every rank, by step. ``buckets``: DDP's, bytes.

    ``untimed``: how many steps at the beginning were not to be timed. ``planning``: CPU time of its daemons' planning
    processes since the turn before, s by what for (`plannerlink.PARTS`); also for other systems that share them, and
    what codecs cost is known to daemons that were there before.
    """

    steps: tuple[tuple[Mapping[str, Any], ...], ...]
    held_out: float | None
    buckets: tuple[int, ...] = ()
    untimed: int = 0
    planning: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, logs: Sequence[Sequence[Mapping[str, Any]]], untimed: int) -> Lines:
        steps = zip(*([line for line in log if "step" in line] for log in logs), strict=False)
        held = [line["held_out"] for log in logs for line in log if "held_out" in line]
        buckets = [line["buckets"] for log in logs for line in log if "buckets" in line]
        return cls(tuple(steps), held[0] if held else None, tuple(buckets[0]) if buckets else (), untimed)

    def duration(self) -> float:
        """From the end of the first step to that of the last, s."""
        return max(line["end"] for line in self.steps[-1]) - max(line["end"] for line in self.steps[0])

    def seconds(self) -> list[float]:
        """Of each timed step, from its predecessor's end to its own, each on the slowest rank."""
        ends = [max(line["end"] for line in step) for step in self.steps]
        return [b - a for a, b in itertools.pairwise(ends)][self._before :]

    def sent(self) -> float:
        """Bytes a host sends a timed step, all headers included: median over steps, mean over hosts."""
        totals = [statistics.fmean(line["sent"] for line in step) for step in self.steps]
        return statistics.median([b - a for a, b in itertools.pairwise(totals)][self._before :])

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time a timed step costs a rank and a daemon, s: means over steps and hosts."""
        first, last, nodes = self.steps[self._before], self.steps[-1], len(self.steps[0])
        steps = len(self.steps) - 1 - self._before
        used = (sum(line[key] for line in last) - sum(line[key] for line in first) for key in ("cpu", "daemons"))
        ranks, others = (total / nodes / steps for total in used)
        return ranks, others

    @property
    def _before(self) -> int:
        """Index of the step at whose end the first timed one begins. Where the very first begins nobody knows."""
        return max(0, self.untimed - 1)

    def losses(self) -> list[float]:
        """Of each step, mean of all ranks."""
        return [statistics.fmean(line["loss"] for line in step) for step in self.steps]


@dataclass(slots=True)
class _Ranks:
    """Ranks of a system and its daemons. ``read``: how many lines each had logged by the end of its last turn;
    ``planned``: what their planning had taken by then."""

    workers: workers.Workers
    read: list[int]
    cluster: daemons.Daemons | None
    planned: dict[str, float]

    def news(self) -> list[list[dict[str, Any]]]:
        """What each has logged since."""
        return [log[read:] for log, read in zip(self.workers.lines, self.read, strict=True)]

    def wait(self, timeout: float, on_step: OnStep, steps: int, asks: str | None) -> None:
        """Until all ask for that since their last turn, which is to have so many steps; None: until they have ended.

        Raises WorkerError.
        """

        def tell() -> None:
            on_step(min(sum("step" in line for line in log) for log in self.news()), steps)

        def asked() -> bool:
            return all(any(line.get("asks") == asks for line in log) for log in self.news())

        self.workers.wait(timeout, tell, asked if asks else None)

    def turn(self, untimed: int) -> Lines:
        """The turn that has just ended."""
        before, self.planned = self.planned, _planning_so_far(self.cluster)
        spent = {part: s - before.get(part, 0.0) for part, s in self.planned.items()}
        lines = dataclasses.replace(Lines.of(self.news(), untimed), planning=spent)
        self.read = [len(log) for log in self.workers.lines]
        return lines


class Stage:
    """A lab and, as systems need them, daemons in it; a context manager.

    ``base`` are settings of the daemons. Daemons stay for the next system unless that needs other settings or this one
    failed: it may have been them, and what failed must not fail the next. What they measure for MergeComp's buckets is
    measured once. Where ranks stay between their turns all daemons do.
    """

    def __init__(
        self, lab: netns.Lab | netns.Loopback, rate: str | None, base: Mapping[str, str], folder: Path
    ) -> None:
        self.lab, self.rate, self.base, self.folder = lab, rate, dict(base), folder
        self._stack = contextlib.ExitStack()
        self._clusters: list[daemons.Daemons] = []
        self._staying: dict[System, _Ranks] = {}
        self._profile: Profile | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_all()

    def run(self, system: System, task: Task, on_step: OnStep) -> Lines:
        """All of a task's steps, or another turn of ranks that stayed.

        Raises WorkerError if a rank fails, DaemonError if a daemon does.
        """
        try:
            if system in self._staying:
                return self._turn(self._staying[system], task, on_step)
            if system.buckets == training_systems.MERGECOMP:
                task = dataclasses.replace(task, caps=self._cut(system, task))
            return self._run(system, task, on_step)
        except workers.WorkerError:
            self._end_all()
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
        settings = {**self.base, **proposed_buckets.SETTINGS, "plan.profiles": str(folder)}
        task = dataclasses.replace(
            task, comm=training_systems.AUTO, codec="", unshaped=0, steps=MOST, seconds=0.0, stays=False
        )
        with (
            daemons.Daemons(self.lab.hosts, settings, port=self._port()) as cluster,
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
        return proposed_buckets.measured(folder, job)  # all of it, as the daemons have ended

    def _run(self, system: System, task: Task, on_step: OnStep) -> Lines:
        job = daemons.job_name("training")
        cluster = self._daemons(system.settings, task.stays) if system.daemons else None
        planned = _planning_so_far(cluster)
        task = dataclasses.replace(task, daemons=tuple(d.process.pid for d in cluster or ()))
        self._shape(None if task.unshaped else self.rate)
        untimed = task.unshaped + task.settle
        steps, timeout = untimed + task.steps, STARTS_WITHIN + untimed * SLOWEST_STEP + _timed(task)
        started = workers.Workers(system.method, self._argv(task), self.lab.hosts, cluster, self.folder, job)
        with contextlib.ExitStack() as stack:
            ranks = _Ranks(stack.enter_context(started), [0] * len(self.lab.hosts), cluster, planned)
            if task.unshaped:
                ranks.wait(timeout, on_step, steps, training_worker.LINKS)
                self._shape(self.rate)
                started.say(training_worker.GO)
            ranks.wait(timeout, on_step, steps, training_worker.TURN if task.stays else None)
            if task.stays:
                self._staying[system] = ranks
                self._stack.push(stack.pop_all())
            return ranks.turn(untimed)

    def _turn(self, ranks: _Ranks, task: Task, on_step: OnStep) -> Lines:
        """Another turn of ranks that stayed: a step that is not timed, and the timed ones."""
        self._shape(self.rate)
        ranks.workers.say(training_worker.GO)
        ranks.wait(SLOWEST_STEP + _timed(task), on_step, 1 + task.steps, training_worker.TURN)
        return ranks.turn(untimed=1)

    def _argv(self, task: Task) -> list[str]:
        return ["-m", "benchmarks.training_worker", "--task", task.text()]

    def _shape(self, rate: str | None) -> None:
        if self.lab.means is not None:
            self.lab.set_rate(rate)

    def _daemons(self, settings: Mapping[str, str], stay: bool) -> daemons.Daemons:
        """Those with these settings, started if they do not run yet; unless all ``stay``, those with others end."""
        settings = {**self.base, **settings}
        for cluster in self._clusters:
            if cluster.settings == settings:
                return cluster
        if not stay:
            self._end_all()
        cluster = self._stack.enter_context(daemons.Daemons(self.lab.hosts, settings, port=self._port()))
        self._clusters.append(cluster)
        return cluster

    def _port(self) -> int:
        """The first of those that no daemons here have."""
        return daemons.PORT + PORTS * len(self._clusters)

    def _end_all(self) -> None:
        self._staying.clear()
        self._clusters.clear()
        self._stack.close()


def _planning_so_far(cluster: daemons.Daemons | None) -> dict[str, float]:
    """CPU time of the planning processes, s by what for, of all daemons that answer: steps are not lost for it."""
    found: dict[str, float] = {}
    for daemon in cluster or ():
        with grpc.insecure_channel(daemon.admin) as channel, contextlib.suppress(grpc.RpcError):
            admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            status = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=ANSWERS_WITHIN)
            for part, seconds in status.planning_cpu_seconds.items():
                found[part] = found.get(part, 0.0) + seconds
    return found


def _timed(task: Task) -> float:
    """What the timed steps of a turn may take at most, s."""
    return (task.seconds or task.steps * SLOWEST_STEP) + 2 * SLOWEST_STEP


def speed_row(lines: Lines) -> common.Row:
    """Step times: median, tenth and ninetieth percentile, s; what a step costs a host: bytes sent, CPU seconds."""
    worker, daemon = lines.cpu_seconds()
    times = lines.seconds()
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else (times[0], times[0])
    return {
        "median_s": statistics.median(times),
        "p10_s": low,
        "p90_s": high,
        "runs": len(times),
        "step_bytes": lines.sent(),
        "worker_cpu_s": worker,
        "daemon_cpu_s": daemon,
        "ddp_buckets": list(lines.buckets),
        **_planning_columns(lines),
    }


def _planning_columns(lines: Lines) -> common.Row:
    """Where something was planned: from the end of the first step to that of the last, and the CPU time of planning,
    s by what for."""
    if not any(lines.planning.values()):
        return {}
    return {"train_s": lines.duration()} | {f"planning_{part}_s": s for part, s in lines.planning.items()}


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
        "step_bytes": lines.sent(),
        **_planning_columns(lines),
    }
