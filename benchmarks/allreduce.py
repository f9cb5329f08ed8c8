"""push_pull of gradcomm beside gloo's all-reduce, in turn within one run.

``python -m benchmarks.allreduce [--nodes 2,4] [--sizes 4KiB..256MiB] [--network loopback|1gbit|RATE] [--codec none]
[--json FILE] [--quick]``

The same worker processes hold a gloo group and a gradcomm session. Every repetition calls each system once, each after
a barrier; a call's time is the longest of all ranks, the figure the median over repetitions (at least 7). Inputs are
written anew before each call, outside the time. gloo sums, gradcomm averages: gloo is spared the division.

CPU time is what the calls cost every process that works for them: the workers for gloo, workers and daemons for
gradcomm, from barrier to barrier, for each GB (1e9 bytes) of tensor, all nodes together.

``link`` is the share of the link's payload rate that was reached, counting the 2(n-1)/n of the data that must leave
(and enter) each node. The payload rate is 95.6 % of the shaped rate: 1448 bytes of every 1514 (TCP over Ethernet).

What may live here: this measurement. What may not: the lab and the daemons (``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import command, common
from benchmarks.lab import daemons, netns, procfs, workers

PAYLOAD_SHARE = 1448 / 1514
SYSTEMS = ("gradcomm", "gradcomm new", "gradcomm resident", "gloo")
CALL = {
    "gradcomm": "in place",
    "gradcomm new": "new tensor",
    "gradcomm resident": "resident",
    "gloo": "in place",
}


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker has to do; crosses to it as JSON."""

    sizes: tuple[int, ...]
    systems: tuple[str, ...]
    runs: int
    seconds: float
    check: bool
    daemon_pids: tuple[int, ...]


# ------------------------------------------------------------------------------------------------ worker
def worker(task: Task) -> None:
    """Measures every size; rank 0 prints one JSON line a size with times and CPU seconds by system."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # ranks and address from torchrun's variables
    gradcomm: Any = None
    if any(s.startswith("gradcomm") for s in task.systems):
        import gcclient as gradcomm

        gradcomm.init()
    pids = [*task.daemon_pids, os.getpid()]
    try:
        for nbytes in task.sizes:
            calls = _Calls(torch, dist, gradcomm, task.systems, nbytes)
            times, cpu = _measure(dist, torch, task, calls, pids)
            if dist.get_rank() == 0:
                print(json.dumps({"bytes": nbytes, "times": times, "cpu": cpu}), flush=True)
        dist.barrier()
    finally:
        if gradcomm is not None:
            gradcomm.shutdown()
        dist.destroy_process_group()


class _Calls:
    """The systems as functions of one buffer, and whether they return what they should."""

    def __init__(self, torch: Any, dist: Any, gradcomm: Any, systems: Sequence[str], nbytes: int) -> None:
        self.rank, self.nodes = dist.get_rank(), dist.get_world_size()
        elements = max(1, nbytes // 4)
        # small integers: sums and averages are exact, so that a wrong byte is seen
        self.base = torch.arange(elements, dtype=torch.float32).remainder_(251.0)
        self.x = self.base.clone()
        name = f"x{nbytes}"
        #: a tensor that lives in the arena, in place as well
        self.resident = gradcomm.empty(f"resident{nbytes}", elements) if gradcomm is not None else self.x
        act: dict[str, Callable[[], Any]] = {
            "gradcomm": lambda: gradcomm.push_pull_(self.x, name=name),
            "gradcomm resident": lambda: gradcomm.push_pull_(self.resident),
            "gradcomm new": lambda: gradcomm.push_pull(self.x, name=name),
            "gloo": lambda: (dist.all_reduce(self.x), self.x)[1],
        }
        self.act = {system: act[system] for system in systems}

    def refill(self, system: str) -> None:
        x = self.resident if system == "gradcomm resident" else self.x
        x.copy_(self.base).add_(2.0 * self.rank)

    def check(self, system: str, got: Any) -> None:
        """Raises RuntimeError if the result is not the exact average (gloo: sum)."""
        want = self.base + (self.nodes - 1.0)
        if system == "gloo":
            want = want * self.nodes
        wrong = int((got != want).sum())
        if wrong:
            raise RuntimeError(f"{system}: {wrong} of {want.numel()} elements are wrong on rank {self.rank}")


def _measure(
    dist: Any, torch: Any, task: Task, calls: _Calls, pids: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(times of the slowest rank, CPU seconds of one call over all processes), by system."""

    def turn(system: str) -> tuple[float, float, Any]:
        calls.refill(system)
        dist.barrier()
        cpu = procfs.cpu_seconds(pids)
        start = time.perf_counter()
        got = calls.act[system]()
        taken = time.perf_counter() - start
        dist.barrier()  # what daemons still do for the other ranks belongs to the call
        return taken, procfs.cpu_seconds(pids) - cpu, got

    longest = 0.0
    for _ in range(2):  # declares tensors, opens connections, touches pages
        for system in calls.act:
            taken, _, got = turn(system)
            longest = max(longest, taken)
            if task.check:
                calls.check(system, got)
            del got
    agreed = torch.tensor([longest])
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    runs = min(200, max(task.runs, int(task.seconds / (float(agreed) * len(calls.act)))))

    times = torch.zeros(len(calls.act), runs, dtype=torch.float64)
    cpu = torch.zeros(len(calls.act), dtype=torch.float64)
    for run in range(runs):
        for i, system in enumerate(calls.act):
            times[i, run], used, _ = turn(system)
            cpu[i] += used / runs
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return (
        {s: times[i].tolist() for i, s in enumerate(calls.act)},
        {s: float(cpu[i]) for i, s in enumerate(calls.act)},
    )


# ------------------------------------------------------------------------------------------------ parent
def measure(nodes: int, args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, daemons and workers; yields the rows of one size after the other."""
    network, codec = args.network, args.codec
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(nodes, network))
        settings = {"codec.default": codec} | dict(args.set)
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, settings)) if args.gradcomm else None
        systems = SYSTEMS if cluster is not None else ("gloo",)

        def task(host: netns.Host) -> Task:
            pids = tuple(cluster[host.index].pids()) if cluster is not None else ()
            return Task(tuple(args.sizes), systems, args.runs, args.seconds, codec == "none", pids)

        for result in workers.results("allreduce", lab.hosts, cluster, task):
            yield rows_of(result, nodes, network, codec)


def rows_of(result: dict[str, Any], nodes: int, network: str, codec: str) -> list[common.Row]:
    """Rows of one size, each with the ratio to gloo and, on a shaped network, the share of the link."""
    nbytes, rate = result["bytes"], netns.rate_of(network)
    rows = []
    for system, times in result["times"].items():
        row = common.median_row(
            system.split()[0], times, call=CALL[system], nodes=nodes, bytes=nbytes, network=network,
            codec="none" if system == "gloo" else codec,
        )  # fmt: skip
        row["gbs"] = nbytes / row["median_s"] / 1e9
        row["cpu_s_per_gb"] = result["cpu"][system] / nbytes * 1e9
        if rate is not None:
            must_cross = 2 * (nodes - 1) / nodes * nbytes * 8
            row["link_share"] = must_cross / row["median_s"] / (netns.bits_per_second(rate) * PAYLOAD_SHARE)
        rows.append(row)
    gloo = next((r for r in rows if r["system"] == "gloo"), None)
    if gloo is not None:
        for row in rows:
            row["ratio_gloo"] = gloo["median_s"] / row["median_s"]
            row["cpu_ratio_gloo"] = row["cpu_s_per_gb"] / gloo["cpu_s_per_gb"] if gloo["cpu_s_per_gb"] else math.nan
    return rows


TABLE = common.Table(
    {"size": 9, "system": 10, "call": 12, "median": 10, "GB/s": 8, "x gloo": 8, "CPU s/GB": 10, "x gloo ": 9, "link": 8}
)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return TABLE.line(
        common.show_size(row["bytes"]),
        row["system"],
        row["call"],
        common.show_seconds(row["median_s"]),
        f"{row['gbs']:.3f}",
        f"{row.get('ratio_gloo', math.nan):.2f}",
        f"{row['cpu_s_per_gb']:.2f}",
        f"{row.get('cpu_ratio_gloo', math.nan):.2f}",
        f"{row['link_share']:.1%}" if "link_share" in row else "-",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, "two nodes, 4 KiB, 1 MiB and 16 MiB, under a minute")
    parser.add_argument(
        "--nodes", type=command.counts, default="2,4", help="numbers of nodes, each measured in turn (default 2,4)"
    )
    parser.add_argument(
        "--sizes", type=command.sizes, help="of the tensor: FROM..TO in steps of four, or a list (default 4KiB..256MiB)"
    )
    parser.add_argument("--codec", default="none", help="the daemons' codec.default (default none)")
    parser.add_argument("--runs", type=command.count, default=7, help="repetitions, at least (default 7)")
    parser.add_argument("--seconds", type=float, default=3.0, help="goes on repeating for this long a size (default 3)")
    parser.add_argument("--no-gradcomm", dest="gradcomm", action="store_false", help="gloo alone, as a baseline")
    args = parser.parse_args(argv)
    if args.quick:
        args.nodes, args.sizes, args.seconds = [2], args.sizes or command.sizes("4KiB,1MiB,16MiB"), 1.0
    args.sizes = args.sizes or command.sizes("4KiB..256MiB")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, worker, Task):
        return 0
    parts = (
        (f"{nodes} nodes, {args.network}, codec {args.codec}\n{TABLE.head()}", measure(nodes, args))
        for nodes in args.nodes
    )
    return command.run(args, command.written("allreduce", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
