"""Step times of gradcomm's optimizer wrapper by how tensors are merged (MergeComp), in turn within one run.

``python -m benchmarks.grouping [--groupings layer-wise,default,1,2,4,8] [--layers 80] [--width 160] [--codec SPEC]
[--network loopback|1gbit|RATE] [--runs 15] [--json FILE] [--quick]``

The model is ``layers`` square linear layers with biases: twice as many tensors, half of them tiny. Each grouping has a
copy of it, a plain SGD and a wrapper over the same daemons; "compute" has no wrapper. Every repetition makes one step
(forward, backward, optimizer step) of each, each after a barrier; a step's time is the longest of all ranks, the figure
the median over repetitions. ``x layer-wise`` is how many times faster than one group a tensor the whole step is, ``x
exchange`` the same of what a step takes beyond "compute".

Nothing is too small to compress here (``min_compress_bytes = 0``), as in the paper; ``--set min_compress_bytes=64KiB``
leaves small groups dense, as a daemon does unless told otherwise. "default" is no grouping: blocks cut by size, each
pushed as soon as it is complete.

What may live here: this measurement. What may not: the lab and the daemons (``benchmarks.lab``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import command, common
from benchmarks.lab import daemons, netns, workers

COMPUTE = "compute"
DEFAULT = "default"
LAYER_WISE = "layer-wise"


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker has to do; crosses to it as JSON."""

    groupings: tuple[str, ...]
    layers: int
    width: int
    codec: str
    runs: int


# ------------------------------------------------------------------------------------------------ worker
def worker(task: Task) -> None:
    """Measures all groupings; rank 0 prints one JSON line: times by grouping, s, and the model's bytes."""
    import torch
    import torch.distributed as dist

    import gcclient

    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # ranks and address from torchrun's variables
    gcclient.init()
    try:
        steps = {grouping: _step(task, grouping) for grouping in (COMPUTE, *task.groupings)}
        times = torch.zeros(len(steps), task.runs, dtype=torch.float64)
        warm_up = 3  # plans take effect, pages are touched
        for run in range(-warm_up, task.runs):
            for i, step in enumerate(steps.values()):
                dist.barrier()
                start = time.perf_counter()
                step(run)
                times[i, max(run, 0)] = time.perf_counter() - start
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            parameters = task.layers * (task.width + 1) * task.width
            found = dict(zip(steps, times.tolist(), strict=True))
            print(json.dumps({"times": found, "bytes": 4 * parameters}), flush=True)
        dist.barrier()
    finally:
        gcclient.shutdown()
        dist.destroy_process_group()


def _step(task: Task, grouping: str) -> Callable[[int], None]:
    """One training step of a fresh model whose gradients are exchanged in such groups."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import gcclient

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(task.width, task.width) for _ in range(task.layers)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    if grouping != COMPUTE:
        groups = None if grouping == DEFAULT else int(grouping) if grouping.isdigit() else grouping
        named = model.named_parameters()
        optimizer = gcclient.DistributedOptimizer(optimizer, named, compression=task.codec, groups=groups)

    rank = dist.get_rank()

    def step(run: int) -> None:
        x = torch.randn(8, task.width, generator=torch.Generator().manual_seed(100 * run + rank))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


# ------------------------------------------------------------------------------------------------ parent
def measure(args: argparse.Namespace, codec: str) -> Iterator[list[common.Row]]:
    """Starts lab, daemons and workers; yields the rows of one codec."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.open_network(args.nodes, args.network))
        settings = {"min_compress_bytes": "0"} | dict(args.set)
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, settings))
        task = Task(args.groupings, args.layers, args.width, codec, args.runs)
        for result in workers.results("grouping", lab.hosts, cluster, lambda _: task):
            yield rows_of(result, args, codec)


def rows_of(result: dict[str, Any], args: argparse.Namespace, codec: str) -> list[common.Row]:
    """Rows of one codec, each with its ratios to layer-wise where that was measured."""
    times = result["times"]
    compute = statistics.median(times[COMPUTE])
    rows = []
    for grouping, each in times.items():
        row = common.median_row(
            "gradcomm", each, grouping=grouping, codec=codec, network=args.network, nodes=args.nodes,
            tensors=2 * args.layers, bytes=result["bytes"],
        )  # fmt: skip
        row["exchange_s"] = max(0.0, row["median_s"] - compute)
        rows.append(row)
    base = next((row for row in rows if row["grouping"] == LAYER_WISE), None)
    if base is not None:
        for row in rows:
            row["ratio_layer_wise"] = base["median_s"] / row["median_s"]
            if row["exchange_s"]:
                row["exchange_ratio_layer_wise"] = base["exchange_s"] / row["exchange_s"]
    return rows


TABLE = common.Table({"grouping": 12, "step": 10, "exchange": 10, "x layer-wise": 14, "x exchange": 12})


def show(row: common.Row) -> str:
    """The row as a line of the table."""
    return TABLE.line(
        row["grouping"],
        common.show_seconds(row["median_s"]),
        common.show_seconds(row["exchange_s"]),
        f"{row.get('ratio_layer_wise', math.nan):.2f}",
        f"{row.get('exchange_ratio_layer_wise', math.nan):.2f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, "one codec, three groupings, five repetitions")
    parser.add_argument("--groupings", default="layer-wise,default,1,2,4,8", help="as listed; numbers: so many groups")
    parser.add_argument("--layers", type=command.count, default=80, help="two tensors each (default 80)")
    parser.add_argument("--width", type=command.count, default=160, help="of a layer (default 160: 8.2 MB in all)")
    parser.add_argument(
        "--codec", action="append", help="may be given again: each in turn (default none and topk(ratio=0.01))"
    )
    parser.add_argument("--nodes", type=command.count, default=2)
    parser.add_argument("--runs", type=command.count, default=15, help="repetitions (default 15)")
    args = parser.parse_args(argv)
    if args.quick:
        args.groupings, args.codec, args.runs = "layer-wise,default,2", ["topk(ratio=0.01)"], 5
    args.codec = args.codec or ["none", "topk(ratio=0.01)"]
    args.groupings = tuple(args.groupings.split(","))
    odd = [g for g in args.groupings if g not in (LAYER_WISE, DEFAULT) and not (g.isdecimal() and int(g))]
    if odd:
        parser.error(f"--groupings: expected {LAYER_WISE}, {DEFAULT} or numbers of groups, got {odd[0]}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if command.worked(args, worker, Task):
        return 0
    where = f"{args.nodes} nodes, {args.network}, {2 * args.layers} tensors"
    parts = ((f"{where}, codec {codec}\n{TABLE.head()}", measure(args, codec)) for codec in args.codec)
    return command.run(args, command.written("grouping", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
