"""What encryption between daemons costs: push_pull with CURVE beside push_pull without, in turn within one run.

``python -m benchmarks.security [--network loopback|1gbit|RATE] [--nodes 2] [--size 64MiB] [--codec none --codec SPEC]
[--lanes 1,2] [--lane-share 0.2] [--json FILE] [--quick]``

Clusters of daemons stand on the same hosts, with keys and without, for every number of lanes. The same worker processes
join a job on one, make some calls, leave, and join one on the next, turn after turn; each call begins after a barrier
and takes as long as the slowest rank. The figure is the median over all turns. ``ratio`` is the time without keys over
the time with them, at the same number of lanes: 1.00 costs nothing. ``x lanes`` is the time with the first number of
lanes over this one, alike in keys: above 1.00 more lanes are faster. CPU time is that of workers and daemons of all
nodes, for each GB (1e9 bytes) of tensor.

A machine with too few cores for more lanes shows nothing of what they would bring. With ``--lane-share`` every lane
process, its threads for ZeroMQ included, has that share of a core and no more: a slow core of its own.

What may live here: this measurement. What may not: the workers (``benchmarks.turns``), the lab and the daemons
(``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, common, turns
from benchmarks.lab import daemons, netns, quotas, workers

SYSTEMS = ("plain", "curve")
CODECS = ("none", "topk(ratio=0.01)")


def label(system: str, lanes: int) -> str:
    """What a cluster is called between the processes of a run."""
    return f"{system}, {lanes} lane(s)"


def measure(codec: str, args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, clusters and workers; yields the rows of one codec."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        clusters = {}
        for lanes in args.lanes:
            for system in SYSTEMS:
                settings = {"codec.default": codec} | dict(args.set) | {"node.lanes": str(lanes)}
                port = daemons.PORT + 100 * len(clusters)
                cluster = daemons.Daemons(lab.hosts, settings, port=port, secured=system == "curve")
                clusters[label(system, lanes)] = stack.enter_context(cluster)

        def task(host: netns.Host) -> turns.Task:
            return turns.Task(args.size, args.turns, args.calls, codec == "none", turns.of_clusters(clusters, host))

        if args.lane_share:
            stack.enter_context(quotas.slow(lanes_of(clusters.values()), args.lane_share))
        for result in workers.results("security", lab.hosts, clusters[label("curve", args.lanes[0])], task):
            yield rows_of(result, args, codec)


def lanes_of(clusters: Iterable[daemons.Daemons]) -> list[int]:
    """The pids of all lane processes."""
    pids = [pid for cluster in clusters for daemon in cluster for pid in daemon.pids()]
    return [pid for pid in pids if b"gcserver.runtime.lane" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def rows_of(result: dict[str, Any], args: argparse.Namespace, codec: str) -> list[common.Row]:
    """One row a cluster, with its ratios to the one without keys and to the one with the first number of lanes."""
    rows: dict[tuple[str, int], common.Row] = {}
    for lanes in args.lanes:
        for system in SYSTEMS:
            name = label(system, lanes)
            row = rows[system, lanes] = common.median_row(
                system, result["times"][name], nodes=args.nodes, bytes=args.size, network=args.network, codec=codec,
                lanes=lanes, lane_share=args.lane_share,
            )  # fmt: skip
            row["gbs"] = args.size / row["median_s"] / 1e9
            row["cpu_s_per_gb"] = result["cpu"][name] / args.size * 1e9
            row["ratio"] = rows[SYSTEMS[0], lanes]["median_s"] / row["median_s"]
            row["ratio_lanes"] = rows[system, args.lanes[0]]["median_s"] / row["median_s"]
    return list(rows.values())


TABLE = common.Table(
    {"codec": 18, "link": 7, "lanes": 6, "median": 10, "GB/s": 8, "ratio": 7, "x lanes": 9, "CPU s/GB": 10}
)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return TABLE.line(
        row["codec"],
        row["system"],
        str(row["lanes"]),
        common.show_seconds(row["median_s"]),
        f"{row['gbs']:.3f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_lanes']:.2f}",
        f"{row['cpu_s_per_gb']:.2f}",
    )


def share(text: str) -> float:
    """A part of one core."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a share of a core from 0.01 to 1, got {text!r}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, "16 MiB and few turns, under a minute")
    parser.add_argument("--nodes", type=command.count, default=2, help="number of nodes (default 2)")
    parser.add_argument("--size", type=command.size, help="of the tensor (default 64MiB)")
    parser.add_argument(
        "--codec", action="append", help=f"the daemons' codec.default, may be repeated (default {CODECS})"
    )
    parser.add_argument(
        "--lanes",
        type=command.counts,
        default=[1, 2],
        help="numbers of lanes, each with clusters of its own (default 1,2)",
    )
    parser.add_argument("--lane-share", type=share, default=0.0, help="of a core for each lane process (needs root)")
    parser.add_argument("--turns", type=command.count, default=9, help="of each system (default 9)")
    parser.add_argument("--calls", type=command.count, default=5, help="in each turn (default 5)")
    args = parser.parse_args(argv)
    args.codec = args.codec or list(CODECS)
    if args.quick:
        args.size, args.turns, args.calls = args.size or command.size("16MiB"), 3, 3
    args.size = args.size or command.size("64MiB")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, turns.worker, turns.Task):
        return 0
    heading = f"{args.nodes} nodes, {args.network}, {common.show_size(args.size)}\n{TABLE.head()}"
    parts = ((heading, measure(codec, args)) for codec in args.codec)
    return command.run(args, command.written("security", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
