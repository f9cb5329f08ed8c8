"""What surviving lost nodes costs: push_pull in a job with on_loss "shrink" beside one with "fail", in turn in one run.

``python -m benchmarks.commits [--nodes 2] [--sizes 4KiB,1MiB,64MiB] [--network loopback|1gbit|RATE] [--json FILE]``

A job that goes on without lost nodes settles a step once all members have said that they hold all of it; one that
ends with its first loss has no such messages. The same worker processes join one job after the other on the same
daemons. ``ratio`` is the median of "shrink" over that of "fail": 1.00 costs nothing. Epochs are kept in a real etcd; no
step asks it for anything.

What may live here: this measurement. What may not: the workers (``benchmarks.turns``), the lab and the daemons
(``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import command, common, turns
from benchmarks.lab import daemons, netns
from benchmarks.lab.etcd import Etcd

POLICIES = ("fail", "shrink")


def measure(args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Starts lab, etcd, daemons and workers; yields the rows of one size after the other."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gccommits-")))
        etcd = stack.enter_context(Etcd(folder, lab.hosts[0]))
        settings = {"cluster.etcd": etcd.url} | dict(args.set)
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, settings))

        def ways(host: netns.Host) -> dict[str, turns.Way]:
            pids = tuple(cluster[host.index].pids())
            return {policy: turns.Way({"on_loss": policy}, pids) for policy in POLICIES}

        yield from turns.measured("commits", lab.hosts, cluster, args, "on_loss", ways)


TABLE = turns.table("on_loss", 9)


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return turns.line(TABLE, row, "on_loss")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return turns.read(turns.parser(__doc__, "policy", 11), argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, turns.worker, turns.Task):
        return 0
    heading = f"{args.nodes} nodes, {args.network}\n{TABLE.head()}"
    return command.run(args, command.written("commits", argv), [(heading, measure(args))], show)


if __name__ == "__main__":
    sys.exit(main())
