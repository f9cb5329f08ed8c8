"""Workers that join one job after the other, in turn: the same tensor and calls, by daemons or policies that differ.

What may live here: what such a worker does and reports (`security.py` and the following); options, rows and table of
those that compare ways at several sizes (`commits.py`, `tracing.py`, `transports.py`). What may not: which jobs are
compared, and how the figures are read.

Each turn joins a job of every way, makes some calls and leaves. A call begins after a barrier and takes as long as the
slowest rank. Results are compared with the exact ones where the codec loses nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import command, common
from benchmarks.lab import daemons, netns, procfs, workers

SIZES = "4KiB,1MiB,64MiB"


def parser(about: str | None, of: str, calls: int) -> argparse.ArgumentParser:
    """With the options of a benchmark at several sizes; ``of``: what has its turns."""
    made = command.parser(about, "two sizes and few turns, under a minute")
    made.add_argument("--nodes", type=command.count, default=2, help="number of nodes (default 2)")
    made.add_argument(
        "--sizes", type=command.sizes, help=f"of the tensor: FROM..TO in steps of four, or a list (default {SIZES})"
    )
    made.add_argument("--turns", type=command.count, default=9, help=f"of each {of} (default 9)")
    made.add_argument("--calls", type=command.count, default=calls, help=f"in each turn (default {calls})")
    return made


def read(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What such a command line says, ``--quick`` seen to."""
    args = made.parse_args(argv)
    if args.quick:
        args.sizes, args.turns, args.calls = args.sizes or command.sizes("4KiB,1MiB"), 3, 5
    args.sizes = args.sizes or command.sizes(SIZES)
    return args


def rows(
    result: dict[str, Any], args: argparse.Namespace, nbytes: int, column: str, ways: Iterable[str], **more: Any
) -> list[common.Row]:
    """A row for each way, named in ``column``; ``ratio`` is to the first."""
    found: list[common.Row] = []
    for way in ways:
        row = common.median_row(
            "gradcomm", result["times"][way], nodes=args.nodes, bytes=nbytes, network=args.network, **more,
            **{column: way},
        )  # fmt: skip
        row["cpu_ms"] = result["cpu"][way] * 1e3
        row["ratio"] = row["median_s"] / (found[0] if found else row)["median_s"]
        found.append(row)
    return found


def table(column: str, width: int) -> common.Table:
    """Of such rows, the way in ``column``, ``width`` letters wide."""
    return common.Table({"size": 9, column: width, "median": 10, "ratio": 7, "CPU": 10})


def line(of: common.Table, row: common.Row, column: str, digits: int = 2) -> str:
    """The row as a line of the table; ``digits``: of the ratio, after the point."""
    return of.line(
        common.show_size(row["bytes"]),
        row[column],
        common.show_seconds(row["median_s"]),
        f"{row['ratio']:.{digits}f}",
        f"{row['cpu_ms']:.2f} ms",
    )


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the job. ``init``: arguments of `gcclient.init`; ``pids``: of the daemon of this host; ``before``
    and ``after``: what rank 0 has `gcctl` do before a turn's calls and after them, nothing if empty."""

    init: Mapping[str, str]
    pids: tuple[int, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker has to do; crosses to it as JSON. ``nbytes``: of a tensor of fp32, ``exact``: it is averaged."""

    nbytes: int
    turns: int
    calls: int
    exact: bool
    ways: dict[str, Way]


def of_clusters(clusters: Mapping[str, daemons.Daemons], host: netns.Host) -> dict[str, Way]:
    """A way for each cluster of daemons: its socket on that host."""
    return {
        name: Way({"socket": str(cluster[host.index].socket)}, tuple(cluster[host.index].pids()))
        for name, cluster in clusters.items()
    }


def measured(
    name: str,
    hosts: Sequence[netns.Host],
    cluster: daemons.Daemons,
    args: argparse.Namespace,
    column: str,
    ways: Callable[[netns.Host], dict[str, Way]],
    exact: bool = True,
    **more: Any,
) -> Iterator[list[common.Row]]:
    """The :func:`rows` of one size of ``args`` after the other, by workers of which there is one a host.

    ``name``: of the benchmark that they belong to. ``cluster``: the daemons whose variables they have. ``ways``: of a
    host, in the order of the rows. ``exact``: the codec loses nothing. ``more``: further parameters of the rows. Raises
    WorkerError.
    """
    for nbytes in args.sizes:

        def task(host: netns.Host, nbytes: int = nbytes) -> Task:
            return Task(nbytes, args.turns, args.calls, exact, ways(host))

        for result in workers.results(name, hosts, cluster, task):
            yield rows(result, args, nbytes, column, result["times"], **more)


def worker(task: Task) -> None:
    """Rank 0 prints one JSON line: seconds of each call, and CPU seconds of one over all nodes, by way."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {name: [] for name in task.ways}
    cpu: dict[str, list[float]] = {name: [] for name in task.ways}
    for _ in range(task.turns):
        for name in task.ways:
            took, used = _turn(torch, dist, task, name)
            times[name] += took
            cpu[name].append(used)
    if dist.get_rank() == 0:
        means = {name: sum(each) / len(each) for name, each in cpu.items()}
        print(json.dumps({"times": times, "cpu": means}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _turn(torch: Any, dist: Any, task: Task, name: str) -> tuple[list[float], float]:
    """(seconds of each call on the slowest rank, CPU seconds of one call over all nodes)."""
    import gcclient

    gcclient.init(**task.ways[name].init)
    rank, nodes = dist.get_rank(), dist.get_world_size()
    base = torch.arange(max(task.nbytes // 4, 1), dtype=torch.float32).remainder_(251.0)
    want = base + (nodes - 1.0)
    x = base.clone()
    times = torch.zeros(task.calls + 1, dtype=torch.float64)
    pids = [*task.ways[name].pids, os.getpid()]
    used = torch.zeros(1, dtype=torch.float64)
    try:
        _steer(rank, task.ways[name].before)
        for call in range(task.calls + 1):  # the first declares the tensor and touches its pages
            x.copy_(base).add_(2.0 * rank)
            dist.barrier()
            before = procfs.cpu_seconds(pids)
            began = time.perf_counter()
            gcclient.push_pull_(x, name="x")
            times[call] = time.perf_counter() - began
            dist.barrier()  # what daemons still do for the other ranks belongs to the call
            if call:
                used += (procfs.cpu_seconds(pids) - before) / task.calls
        _steer(rank, task.ways[name].after)
        if task.exact and not torch.equal(x, want):
            raise RuntimeError(f"{name}: {int((x != want).sum())} of {x.numel()} elements are wrong on rank {rank}")
    finally:
        gcclient.shutdown()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return times[1:].tolist(), float(used)


def _steer(rank: int, arguments: tuple[str, ...]) -> None:
    """What rank 0 has gcctl do."""
    if rank == 0 and arguments:
        subprocess.run([daemons.program("gcctl"), *arguments], check=True, stdout=subprocess.DEVNULL)
