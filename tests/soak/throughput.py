"""Load for minutes, everything checked: ``python -m tests.soak.throughput --minutes 10``, ``make soak``.

Two daemons and several jobs at once, each with one worker a node (``tests.soak.worker``) that pushes integer-valued
fp32 gradients and compares every aggregate bit by bit on every rank. Every second job is switched to fp16 while it
runs, in which these averages are exact as well. Throughput, memory and descriptors are sampled twice a second.

Judged, after a warm-up of the first fifth (8 s at least): of what remains, the medians of the first and last third.

- daemons' own memory (RssAnon of all their processes): grows by at most 5 % and 4 MiB, whichever is more;
- their shared memory (files of the state directory): by at most 1 MiB;
- both are at most what the formula of docs/memory.md says, at every sample: of the daemons and all their jobs;
- their descriptors: by at most 2;
- throughput of all jobs together: the last third reaches at least half of the first (the machine may be shared);
- after the jobs have left: shared memory back to within 1 MiB, descriptors to within 4, of what they were before;
  "before" is after another round of the same jobs, five seconds long, so that what is opened once and kept is there.

Exit status 1 if a bit was wrong, a worker or a daemon failed, or something was not flat. What may live here: the load,
the samples, the judgement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.lab import daemons, netns, processes, procfs
from gcserver.runtime.ledger import RESERVE
from gcserver.runtime.memory import of_daemon
from gcserver.runtime.memory_parts import PRIVATE, SHARED, total
from tests.job_memory import expected

MIB = 1 << 20
#: A daemon's other files: its lock and numbers, a page each.
FEW_FILES = 64 << 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the daemons, all together; seconds since the load began, bytes pushed by rank 0 of all jobs."""

    seconds: float
    pushed: int
    memory: int
    shared: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing judged: its value early and late, what is allowed, whether it held."""

    what: str
    early: float
    late: float
    limit: float
    good: bool

    def line(self, scale: float = 1.0, unit: str = "") -> str:
        mark = "ok" if self.good else "FAILED"
        values = f"{self.early / scale:10.1f} {self.late / scale:10.1f} {self.limit / scale:10.1f} {unit:6}"
        return f"  {self.what:34}{values} {mark}"


class Job:
    """One job's workers and what their rank 0 reports."""

    def __init__(self, label: str, codec: str, workers: list[subprocess.Popen[Any]]) -> None:
        self.label, self.codec, self.workers = label, codec, workers
        self.report: dict[str, Any] = {"steps": 0, "bytes": 0, "wrong": 0, "last": False}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.workers[0].stdout is not None
        for line in self.workers[0].stdout:
            self.report = json.loads(line)

    def finish(self) -> list[int]:
        codes = daemons.workers_stopped(self.workers, 30.0)
        self._reader.join(5.0)
        return codes


def start_job(cluster: daemons.Daemons, index: int, seconds: float) -> Job:
    """Worker i runs beside daemon i."""
    label, workers = daemons.job_name(f"soak{index}"), []
    for daemon in cluster:
        ranks = {"RANK": str(daemon.host.index), "WORLD_SIZE": str(len(cluster)), "LOCAL_RANK": "0"}
        env = daemon.environment(label) | ranks | {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", "tests.soak.worker", "--seconds", str(seconds), "--seed", str(index + 1)]
        out = subprocess.PIPE if daemon.host.index == 0 else subprocess.DEVNULL
        workers.append(daemon.host.start(argv, env=env, stdout=out))
    return Job(label, "fp16" if index % 2 else "none", workers)


def sample(cluster: daemons.Daemons, jobs: Sequence[Job], began: float) -> Sample:
    pids = [pid for daemon in cluster for pid in daemon.pids()]
    return Sample(
        time.monotonic() - began,
        sum(job.report["bytes"] for job in jobs),
        procfs.anonymous_bytes(pids),
        procfs.used_bytes(cluster.state),
        procfs.descriptors(pids),
    )


def formula(cluster: daemons.Daemons) -> tuple[int, int]:
    """(private, shared) bytes that the daemons may take with the jobs they have now."""
    private = shared = 0
    for daemon in cluster:
        parts = of_daemon(1)
        for job in daemon.state.glob("jobs/*"):
            parts += expected(job, daemon.name)
            shared += sum(file.stat().st_size for file in job.glob("*.msgpack"))
        private += total(parts, PRIVATE)
        shared += total(parts, SHARED) + RESERVE + FEW_FILES
    return private, shared


def judge(samples: Sequence[Sample], before: Sample, after: Sample, most: tuple[int, int]) -> list[Verdict]:
    """The rules of this file's docstring. ``most``: what :func:`formula` says."""
    warm = max(8.0, samples[-1].seconds / 5)
    steady = [s for s in samples if s.seconds >= warm]
    third = max(1, len(steady) // 3)
    first, last = steady[:third], steady[-third:]

    def medians(name: str) -> tuple[float, float]:
        early, late = ([getattr(s, name) for s in part] for part in (first, last))
        return statistics.median(early), statistics.median(late)

    def rate(part: Sequence[Sample]) -> float:
        return (part[-1].pushed - part[0].pushed) / max(1e-9, part[-1].seconds - part[0].seconds)

    memory, shared, descriptors = medians("memory"), medians("shared"), medians("descriptors")
    limits = (max(1.05 * memory[0], memory[0] + 4 * MIB), shared[0] + MIB, descriptors[0] + 2)
    verdicts = [
        Verdict("daemons' memory", *memory, limits[0], memory[1] <= limits[0]),
        Verdict("shared memory", *shared, limits[1], shared[1] <= limits[1]),
        Verdict("descriptors", *descriptors, limits[2], descriptors[1] <= limits[2]),
    ]
    for name, limit in zip(("memory", "shared"), most, strict=True):
        sizes = [getattr(s, name) for s in samples]
        what = "daemons' memory, formula" if name == "memory" else "shared memory, formula"
        verdicts.append(Verdict(what, sizes[0], max(sizes), limit, max(sizes) <= limit))
    early, late = rate(first), rate(last)
    verdicts.append(Verdict("throughput (at least)", early, late, early / 2, late >= early / 2 > 0))
    limit = before.shared + MIB
    verdicts.append(Verdict("shared memory, jobs gone", before.shared, after.shared, limit, after.shared <= limit))
    ends = (before.descriptors, after.descriptors, before.descriptors + 4)
    verdicts.append(Verdict("descriptors, jobs gone", *ends, ends[1] <= ends[2]))
    return verdicts


def soak(seconds: float, jobs_wanted: int, nodes: int) -> tuple[list[Sample], list[Verdict], list[str], list[Job]]:
    """(samples, verdicts, failures, jobs) of one run."""
    failures: list[str] = []
    with netns.Loopback(nodes) as lab, daemons.Daemons(lab.hosts) as cluster, contextlib.ExitStack() as stack:
        lives = [daemon.process.pid for daemon in cluster]
        jobs: list[Job] = []
        stack.callback(lambda: processes.end([w for job in jobs for w in job.workers], grace=3.0))
        failures += start_jobs(cluster, jobs, jobs_wanted, 5.0)
        for job in jobs:
            job.finish()
        before = emptied(cluster)
        failures += start_jobs(cluster, jobs, jobs_wanted, seconds)
        began, samples, said = time.monotonic(), [], 0.0
        most = formula(cluster)
        while not any(w.poll() is not None for job in jobs for w in job.workers):
            samples.append(sample(cluster, jobs, began))
            if time.monotonic() - said >= 10.0:
                said = time.monotonic()
                print(progress(samples, jobs), flush=True)
            time.sleep(0.5)
            if time.monotonic() - began > seconds + 60:
                failures.append(f"the jobs did not end {seconds + 60:.0f} s after they began")
                break
        for job in jobs:
            codes = job.finish()
            if any(codes) or not job.report["last"] or job.report["wrong"]:
                failures.append(f"job {job.label}: workers ended with {codes}, {job.report}")
        failures += [
            f"{daemon.name} ended or was restarted\n{daemon.log_tail()}"
            for daemon, pid in zip(cluster, lives, strict=True)
            if daemon.process.poll() is not None or daemon.process.pid != pid
        ]
        after = emptied(cluster)
        if failures:
            failures += [f"{daemon.name}:\n{daemon.log_tail(10)}" for daemon in cluster]
    if len(samples) < 6:
        return samples, [], [*failures, f"only {len(samples)} samples: too short to judge"], jobs
    return samples, judge(samples, before, after, most), failures, jobs


def start_jobs(cluster: daemons.Daemons, jobs: list[Job], wanted: int, seconds: float) -> list[str]:
    """Puts new jobs into ``jobs`` and switches the codec of each after its first steps; what went wrong."""
    jobs[:] = [start_job(cluster, index, seconds) for index in range(wanted)]
    waiting, failures = list(jobs), []
    while waiting:
        for job in [job for job in waiting if job.report["steps"]]:
            waiting.remove(job)
            failures += [text for text in [switch_codec(cluster, job)] if text]
        if any(w.poll() for job in waiting for w in job.workers):
            break  # the caller sees their statuses
        time.sleep(0.02)
    return failures


def emptied(cluster: daemons.Daemons, patience: float = 10.0) -> Sample:
    """The daemons without jobs: waits until they have used the same for a second."""
    began = time.monotonic()
    now, since = sample(cluster, [], began), began
    while time.monotonic() - since < 1.0 and time.monotonic() - began < patience:
        time.sleep(0.1)
        new = sample(cluster, [], began)
        if (new.shared, new.descriptors) != (now.shared, now.descriptors):
            now, since = new, time.monotonic()
    return now


def switch_codec(cluster: daemons.Daemons, job: Job) -> str:
    """``gcctl set-codec`` for a job that wants another than none; what went wrong, or nothing."""
    if job.codec == "none":
        return ""
    gcctl = str(Path(sys.executable).with_name("gcctl"))
    argv = [gcctl, "--address", cluster[0].admin, "set-codec", "--job", job.label, job.codec]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return f"set-codec {job.codec}: {done.stderr.strip()}" if done.returncode else ""


def progress(samples: Sequence[Sample], jobs: Sequence[Job]) -> str:
    now = samples[-1]
    steps = " + ".join(str(job.report["steps"]) for job in jobs)
    start = samples[0]
    rate = (now.pushed - start.pushed) / max(1e-9, now.seconds - start.seconds) / 1e6
    return (
        f"{now.seconds:6.0f} s  {steps} steps exact  {rate:.0f} MB/s  memory {now.memory / MIB:.1f} MiB  "
        f"shared {now.shared / MIB:.1f} MiB  {now.descriptors} descriptors"
    )


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Throughput, memory and descriptors over time, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(8, 8), sharex=True, layout="constrained")
    at = [s.seconds for s in samples]
    window = max(1, len(samples) // 60)
    rates = [
        (b.pushed - a.pushed) / (b.seconds - a.seconds) / 1e6 for a, b in zip(samples, samples[window:], strict=False)
    ]
    series = (
        ("MB/s", at[window:], rates),
        ("daemons' memory, MiB", at, [s.memory / MIB for s in samples]),
        ("shared memory, MiB", at, [s.shared / MIB for s in samples]),
        ("descriptors", at, [float(s.descriptors) for s in samples]),
    )
    for each, (label, x, y) in zip(axes, series, strict=True):
        each.plot(x, y)
        each.set_ylabel(label)
        each.set_ylim(0, 1.2 * max(y, default=1.0) or 1.0)
    axes[-1].set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=10.0)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 4))
    parser.add_argument("--plot", type=Path, default=Path("out/soak.png"), metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    seconds = args.seconds if args.seconds is not None else 60 * args.minutes
    if seconds < 20:
        parser.error("--seconds: expected at least 20, or nothing about memory can be said")
    print(f"{args.jobs} jobs on {args.nodes} nodes for {seconds:g} s", flush=True)
    with processes.exits_on_signals():
        samples, verdicts, failures, jobs = soak(seconds, args.jobs, args.nodes)
    for job in jobs:
        exact = "all exact" if not job.report["wrong"] else f"{job.report['wrong']} aggregates WRONG"
        print(f"job {job.label}, {job.codec}: {job.report['steps']} steps, {exact}")
    print(f"  {'':34}{'early':>10} {'late':>10} {'limit':>10}")
    for verdict in verdicts:
        inbytes = "memory" in verdict.what or "throughput" in verdict.what
        unit = "MB/s" if "throughput" in verdict.what else "MiB" if inbytes else ""
        print(verdict.line(1e6 if unit == "MB/s" else MIB if inbytes else 1.0, unit))
    failures += [
        f"{v.what}: {v.early:.0f} early, {v.late:.0f} late, limit {v.limit:.0f}" for v in verdicts if not v.good
    ]
    print(*(f"FAILED: {text}" for text in failures) if failures else ["passed"], sep="\n", flush=True)
    if samples:
        plot(samples, args.plot)
        print(f"picture: {os.fspath(args.plot)}")
    rows: list[common.Row] = [
        {"system": "gradcomm", "job": j.label, "codec": j.codec, "nodes": args.nodes, **j.report} for j in jobs
    ]
    common.write_json(
        args.json, rows, verdicts=[asdict(v) for v in verdicts], samples=[asdict(s) for s in samples], failures=failures
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
