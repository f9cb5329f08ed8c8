"""What recording a trace costs: push_pull while `gcctl trace` records beside push_pull while it does not, in turn.

``python -m benchmarks.tracing [--nodes 2] [--sizes 4KiB,1MiB,64MiB] [--codec fp16] [--network loopback|1gbit|RATE]
[--json FILE]``

The same worker processes join one job after the other on the same daemons; during every other one a trace of all nodes,
lanes and workers is recorded. It is begun before the first of a turn's calls and ended after the last, outside the
times. ``ratio`` is the median with a trace over that without: 1.00 costs nothing.

What may live here: this measurement. What may not: the workers (``benchmarks.turns``), the lab and the daemons
(``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from benchmarks import command, common, turns
from benchmarks.lab import daemons, netns

#: (name, what gcctl does before a turn's calls, and after them); asked for something else, it costs what it costs then
WAYS = (
    ("plain", ("status",), ("status",)),
    ("traced", ("trace", "start"), ("trace", "stop")),
)


def measure(args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, daemons and workers; yields the rows of one size after the other."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        settings = {"codec.default": args.codec} | dict(args.set)
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, settings))

        def ways(host: netns.Host) -> dict[str, turns.Way]:
            daemon = cluster[host.index]
            at, pids = ("--address", daemon.admin), tuple(daemon.pids())
            return {way: turns.Way({}, pids, (*at, *before), (*at, *after)) for way, before, after in WAYS}

        exact = args.codec == "none"
        yield from turns.measured("tracing", lab.hosts, cluster, args, "way", ways, exact, codec=args.codec)


TABLE = turns.table("way", 8)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return turns.line(TABLE, row, "way", digits=3)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = turns.parser(__doc__, "way", 21)
    parser.add_argument("--codec", default="fp16", help="the daemons' codec.default (default fp16)")
    return turns.read(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, turns.worker, turns.Task):
        return 0
    heading = f"{args.nodes} nodes, {args.network}, codec {args.codec}\n{TABLE.head()}"
    return command.run(args, command.written("tracing", argv), [(heading, measure(args))], show)


if __name__ == "__main__":
    sys.exit(main())
