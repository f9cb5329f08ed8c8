"""What a step costs each node as the cluster grows: bytes and messages per node, of clusters of 2 to 1,024 nodes.

``python -m benchmarks.cluster_size [--nodes 2,8,64,1024] [--steps 3] [--model 256MiB] [--jobs N] [--json FILE]``

No network and no payloads: every node is a real lane machine (`gcserver.core.lane`), whose frames are handed over in
memory. The model is cut into one partition per node (owner scheme, codec none); every rank's gradient is an integer,
and every node's sum of every partition is compared with the right one. The collector is off: a million links would have
it look at millions of objects again and again, and nothing here is a cycle.

What must leave a node in a step does not grow with the cluster: 2 (n-1)/n of the model, contributions to the n-1 other
owners and n-1 times its own aggregate. Messages do: 2 (n-1) a step (more where payloads are so large that credit is
returned by messages of its own), and one heartbeat to each peer, every second.

With several processes each plays a share of the nodes; frames between them cross as the bytes of the wire.

What may live here: this measurement. What may not: the nodes (``benchmarks.cluster_share``), how long a step takes
(``benchmarks.allreduce``).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks import command, common
from benchmarks.cluster_share import Share, Traffic

#: nodes that each process lets begin before frames are handed over
BURST = 64
#: head of what one process hands to another: how many bytes it handed over in this turn, to all others together
_HANDED = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Played:
    """What one process played: outputs, CPU seconds, traffic by node in the steps, messages by node of one tick."""

    outputs: int
    cpu_seconds: float
    traffic: tuple[Traffic, ...]
    beats: tuple[int, ...]


def expected(nodes: int, model: int) -> float:
    """Bytes of blocks that leave each node in a step."""
    return 2 * (nodes - 1) * model / nodes


class Turns:
    """Hands frames to the other shares, turn by turn, until none is under way. ``others``: a connection by share."""

    def __init__(self, share: Share, others: dict[int, Connection]) -> None:
        self.share, self.others = share, others

    def all(self, begin: Callable[[int], None]) -> None:
        """``begin`` for every node of the share, a few a turn, and whatever follows."""
        share = self.share
        waiting = list(share.indices)
        # Every share takes as many turns, also one that has a node less.
        turns = -(-len(range(0, share.nodes, share.shares)) // BURST)
        busy = True
        while busy or turns > 0:
            for node in waiting[:BURST]:
                begin(node)
            share.drain()
            del waiting[:BURST]
            turns -= 1
            busy = self._exchange()
            share.drain()

    def _exchange(self) -> bool:
        """Whether any share handed something over."""
        batches = {other: b"".join(self.share.away[other]) for other in self.others}
        handed = sum(map(len, batches.values()))
        for other, connection in sorted(self.others.items()):
            self.share.away[other].clear()
            mine = _HANDED.pack(sum(map(len, batches.values()))) + batches[other]
            # The lower one of two speaks first; the pairs are in one order everywhere, so nobody waits in a circle.
            if self.share.mine < other:
                connection.send_bytes(mine)
                theirs = connection.recv_bytes()
            else:
                theirs = connection.recv_bytes()
                connection.send_bytes(mine)
            handed += _HANDED.unpack_from(theirs)[0]
            self.share.arrive(theirs[_HANDED.size :])
        return handed > 0


def play(nodes: int, model: int, steps: int, mine: int, others: dict[int, Connection]) -> Played:
    """One process's share of a cluster, from the first hello to the last step and one heartbeat."""
    began = time.process_time()
    gc.disable()
    share = Share(nodes, model, mine, len(others) + 1)
    turns = Turns(share, others)
    turns.all(share.meet)
    turns.all(share.open)
    before = {i: Traffic(t.messages, t.payload, t.overhead) for i, t in share.traffic.items()}
    for step in range(1, steps + 1):
        turns.all(lambda node, step=step: share.push(node, step))
    traffic = tuple(
        Traffic(t.messages - b.messages, t.payload - b.payload, t.overhead - b.overhead)
        for t, b in zip(share.traffic.values(), before.values(), strict=True)
    )
    after = [t.messages for t in share.traffic.values()]
    turns.all(share.beat)
    beats = tuple(t.messages - a for t, a in zip(share.traffic.values(), after, strict=True))
    gc.enable()
    return Played(share.outputs, time.process_time() - began, traffic, beats)


def _process(nodes: int, model: int, steps: int, mine: int, others: dict[int, Connection], result: Connection) -> None:
    result.send(play(nodes, model, steps, mine, others))


def cluster(nodes: int, model: int, steps: int, jobs: int = 1) -> common.Row:
    """A cluster of ``nodes`` over ``steps`` steps of a model of so many bytes, in ``jobs`` processes.

    Raises RuntimeError when a process ends without a result, AssertionError when a node has not all outputs.
    """
    began = time.monotonic()
    jobs = min(jobs, nodes)
    others: list[dict[int, Connection]] = [{} for _ in range(jobs)]
    context = multiprocessing.get_context("fork")
    for a in range(jobs):
        for b in range(a + 1, jobs):
            others[a][b], others[b][a] = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(1, jobs)]
    processes = [
        context.Process(target=_process, args=(nodes, model, steps, i, others[i], results[i - 1][1]), daemon=True)
        for i in range(1, jobs)
    ]
    for process in processes:
        process.start()
    for connection in (c for mine in others[1:] for c in mine.values()):
        # Held by the processes alone, so that the end of one is seen.
        connection.close()
    for _, theirs in results:
        theirs.close()
    try:
        played = [play(nodes, model, steps, 0, others[0])] + [mine.recv() for mine, _ in results]
    except (EOFError, OSError) as error:
        raise RuntimeError("a process of the cluster ended before it was done; what it printed says why") from error
    finally:
        for process in processes:
            process.join(10)
    outputs = sum(p.outputs for p in played)
    if outputs != nodes * nodes * steps:
        raise AssertionError(f"{outputs} outputs on {nodes} nodes in {steps} steps, expected {nodes * nodes * steps}")
    traffic = [t for p in played for t in p.traffic]
    beats = [n for p in played for n in p.beats]
    return {
        "system": "gradcomm",
        "nodes": nodes,
        "steps": steps,
        "model": model,
        "jobs": jobs,
        "payload_bytes_mean": sum(t.payload for t in traffic) / nodes / steps,
        "payload_bytes_max": max(t.payload for t in traffic) / steps,
        "payload_bytes_expected": expected(nodes, model),
        "overhead_bytes_mean": sum(t.overhead for t in traffic) / nodes / steps,
        "messages_mean": sum(t.messages for t in traffic) / nodes / steps,
        "messages_max": max(t.messages for t in traffic) / steps,
        "beats_mean": sum(beats) / nodes,
        "seconds": time.monotonic() - began,
        "cpu_seconds": sum(p.cpu_seconds for p in played),
    }


TABLE = common.Table(
    {"nodes": 7, "MB sent, mean": 15, "max": 9, "expected": 11, "overhead": 11, "messages": 11, "heartbeats/s": 15,
     "seconds": 10, "CPU": 8}
)  # fmt: skip


def show(row: common.Row) -> str:
    """The row as a line of the table: MB (1e6 bytes) and messages per node and step."""
    return TABLE.line(
        str(row["nodes"]),
        *(f"{row[f'payload_bytes_{what}'] / 1e6:.1f}" for what in ("mean", "max", "expected")),
        f"{row['overhead_bytes_mean'] / 1e6:.3f}",
        f"{row['messages_mean']:.1f}",
        f"{row['beats_mean']:.1f}",
        f"{row['seconds']:.1f}",
        f"{row['cpu_seconds']:.1f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=command.counts, default=[2, 8, 64, 1024], help="sizes of clusters")
    parser.add_argument("--steps", type=command.count, default=3)
    parser.add_argument("--model", type=command.size, default="256MiB", help="size of the model")
    parser.add_argument("--jobs", type=command.count, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print(common.describe(common.machine()))
    print(f"model of {common.show_size(args.model)}, one partition per node, {args.steps} steps; per node and step:")
    print(TABLE.head(), flush=True)
    rows = []
    for nodes in args.nodes:
        rows.append(cluster(nodes, args.model, args.steps, args.jobs))
        print(show(rows[-1]), flush=True)
    common.write_json(args.json, rows, command=command.written("cluster_size", argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
