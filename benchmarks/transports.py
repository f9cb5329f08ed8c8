"""What lanes speak to each other: push_pull over UCX beside push_pull over ZeroMQ, in turn within one run.

``python -m benchmarks.transports [--network loopback|1gbit|RATE] [--nodes 2] [--sizes 4KiB,1MiB,64MiB] [--json FILE]
[--quick]``

Two clusters of daemons stand on the same hosts, one over ZeroMQ, one over UCX with TCP. The same worker processes join
a job on one, make some calls, leave, and join one on the next, turn after turn; each call begins after a barrier and
takes as long as the slowest rank. ``ratio`` is the median over that of ZeroMQ: below 1.00 UCX is faster. CPU time is
that of workers and daemons of all nodes for each call. Needs the system's libucp (docs/rdma.md).

What may live here: this measurement. What may not: the workers (``benchmarks.turns``), the lab and the daemons
(``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence

from benchmarks import command, common, turns
from benchmarks.lab import daemons, netns

#: The configuration of each way, and what UCX is told to use.
WAYS = {
    "zmq": ({"node.transport": "zmq"}, {}),
    "ucx tcp": ({"node.transport": "ucx"}, {"UCX_TLS": "tcp"}),
}


def measure(args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, clusters and workers; yields the rows of one size after the other."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        clusters = {}
        for way, (settings, variables) in WAYS.items():
            port = daemons.PORT + 100 * len(clusters)
            cluster = daemons.Daemons(lab.hosts, dict(args.set) | settings, port=port, variables=variables)
            clusters[way] = stack.enter_context(cluster)
        found = functools.partial(turns.of_clusters, clusters)
        yield from turns.measured("transports", lab.hosts, clusters["zmq"], args, "transport", found)


TABLE = turns.table("transport", 10)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return turns.line(TABLE, row, "transport")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return turns.read(turns.parser(__doc__, "transport", 11), argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, turns.worker, turns.Task):
        return 0
    heading = f"{args.nodes} nodes, {args.network}\n{TABLE.head()}"
    return command.run(args, command.written("transports", argv), [(heading, measure(args))], show)


if __name__ == "__main__":
    sys.exit(main())
