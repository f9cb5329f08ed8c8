"""What encryption between daemons costs: push_pull with CURVE beside push_pull without, in turn within one run.

``python -m benchmarks.security [--network loopback|1gbit|RATE] [--nodes 2] [--size 64MiB] [--codec none --codec SPEC]
[--set node.lanes=2] [--json FILE] [--quick]``

Two clusters of daemons stand on the same hosts, one with keys and one without. The same worker processes join a job on
one, make some calls, leave, and join one on the other, turn after turn; each call begins after a barrier and takes as
long as the slowest rank. The figure is the median over all turns. ``ratio`` is the time without keys over the time with
them: 1.00 costs nothing. CPU time is that of workers and daemons of all nodes, for each GB (1e9 bytes) of tensor.

What may live here: this measurement. What may not: the lab and the daemons (``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks import command, common
from benchmarks.lab import daemons, netns, procfs, workers

SYSTEMS = ("plain", "curve")
CODECS = ("none", "topk(ratio=0.01)")


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker has to do; crosses to it as JSON. ``sockets`` and ``pids``: of this host's daemons, by system."""

    nbytes: int
    turns: int
    calls: int
    exact: bool
    sockets: dict[str, str]
    pids: dict[str, tuple[int, ...]]


# ------------------------------------------------------------------------------------------------ worker
def worker(task: Task) -> None:
    """Rank 0 prints one JSON line: seconds of each call, and CPU seconds of one, by system."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    cpu: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for _ in range(task.turns):
        for system in SYSTEMS:
            took, used = _turn(torch, dist, task, system)
            times[system] += took
            cpu[system].append(used)
    if dist.get_rank() == 0:
        means = {system: sum(each) / len(each) for system, each in cpu.items()}
        print(json.dumps({"times": times, "cpu": means}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _turn(torch: Any, dist: Any, task: Task, system: str) -> tuple[list[float], float]:
    """(seconds of each call on the slowest rank, CPU seconds of one call over all nodes)."""
    import gcclient

    gcclient.init(socket=task.sockets[system])
    rank, nodes = dist.get_rank(), dist.get_world_size()
    base = torch.arange(task.nbytes // 4, dtype=torch.float32).remainder_(251.0)
    want = base + (nodes - 1.0)
    x = base.clone()
    times = torch.zeros(task.calls + 1, dtype=torch.float64)
    pids = [*task.pids[system], os.getpid()]
    used = torch.zeros(1, dtype=torch.float64)
    try:
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
        if task.exact and not torch.equal(x, want):
            raise RuntimeError(f"{system}: {int((x != want).sum())} of {x.numel()} elements are wrong on rank {rank}")
    finally:
        gcclient.shutdown()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return times[1:].tolist(), float(used)


# ------------------------------------------------------------------------------------------------ parent
def measure(codec: str, args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, both clusters and workers; yields the rows of one codec."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        settings = {"codec.default": codec} | dict(args.set)
        clusters = {}
        for i, system in enumerate(SYSTEMS):
            port = daemons.PORT + 100 * i
            cluster = daemons.Daemons(lab.hosts, settings, port=port, secured=system == "curve")
            clusters[system] = stack.enter_context(cluster)

        def task(host: netns.Host) -> Task:
            sockets = {system: str(cluster[host.index].socket) for system, cluster in clusters.items()}
            pids = {system: tuple(cluster[host.index].pids()) for system, cluster in clusters.items()}
            return Task(args.size, args.turns, args.calls, codec == "none", sockets, pids)

        for result in workers.results("security", lab.hosts, clusters["curve"], task):
            yield rows_of(result, args, codec)


def rows_of(result: dict[str, Any], args: argparse.Namespace, codec: str) -> list[common.Row]:
    """One row a system, that with keys with its ratio to that without."""
    lanes = int(dict(args.set).get("node.lanes", "1"))
    rows = []
    for system in SYSTEMS:
        row = common.median_row(
            system, result["times"][system], nodes=args.nodes, bytes=args.size, network=args.network, codec=codec,
            lanes=lanes,
        )  # fmt: skip
        row["gbs"] = args.size / row["median_s"] / 1e9
        row["cpu_s_per_gb"] = result["cpu"][system] / args.size * 1e9
        rows.append(row)
    plain = rows[0]
    for row in rows:
        row["ratio"] = plain["median_s"] / row["median_s"]
    return rows


TABLE = common.Table({"codec": 18, "link": 7, "lanes": 6, "median": 10, "GB/s": 8, "ratio": 7, "CPU s/GB": 10})


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return TABLE.line(
        row["codec"],
        row["system"],
        str(row["lanes"]),
        common.show_seconds(row["median_s"]),
        f"{row['gbs']:.3f}",
        f"{row['ratio']:.2f}",
        f"{row['cpu_s_per_gb']:.2f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, "16 MiB and few turns, under a minute")
    parser.add_argument("--nodes", type=command.count, default=2, help="number of nodes (default 2)")
    parser.add_argument("--size", help="of the tensor (default 64MiB)")
    parser.add_argument(
        "--codec", action="append", help=f"the daemons' codec.default, may be repeated (default {CODECS})"
    )
    parser.add_argument("--turns", type=command.count, default=9, help="of each system (default 9)")
    parser.add_argument("--calls", type=command.count, default=5, help="in each turn (default 5)")
    args = parser.parse_args(argv)
    args.codec = args.codec or list(CODECS)
    if args.quick:
        args.size, args.turns, args.calls = args.size or "16MiB", 3, 3
    try:
        args.size = common.read_size(args.size or "64MiB")
    except ValueError as error:
        parser.error(f"--size: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        worker(msgspec.json.decode(args.worker, type=Task))
        return 0
    heading = f"{args.nodes} nodes, {args.network}, {common.show_size(args.size)}\n{TABLE.head()}"
    parts = ((heading, measure(codec, args)) for codec in args.codec)
    return command.run(args, command.written("security", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
