"""Speed of powersgd on one core, against the arithmetic of torch's own PowerSGD hook, measured in turn.

``python -m benchmarks.lowrank [--shapes 4096x4096 cnn ...] [--ranks 4 ...] [--json FILE]``. A shape may be a model of
``benchmarks.training``: all its matrices, one after the other. Torch's side is what
``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`` computes between its collectives, on one thread: bmm
for P, its orthogonalisation, bmm for Q, bmm for P Q^T, and with error feedback the addition of the residual, the
copy and the subtraction, all into buffers that exist (the hook itself allocates some of them anew, which is slower).
Ours is begin, middle and finish. Medians; the systems take turns within every repetition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import Row, Table, describe, machine, median_row, write_json
from gcserver.codecs.jit import compile_kernel
from gcserver.codecs.powersgd import PowerSgd
from gcserver.codecs.powersgd_kernels import largest_rank, powersgd_begin, powersgd_finish, powersgd_middle
from gcserver.codecs.tworounds import Shape

Stages = dict[str, Callable[[], object]]


def ours(rows: int, cols: int, rank: int, feedback: bool) -> Stages:
    """begin, middle and finish of one matrix, one node."""
    codec, shapes = PowerSgd(rank=rank, decay=1.0 if feedback else 0.0), ((rows, cols),)
    n, rng = rows * cols, np.random.default_rng(0)
    segments = np.array([0, n], np.int64)
    x, out = rng.standard_normal(n, np.float32), np.ones(n, np.float32)
    old = rng.standard_normal(codec.state_floats(n, 1, shapes), np.float32)
    new, work = np.ones_like(old), np.ones(codec.work_floats(shapes), np.float32)
    first, second = (np.ones(4 * codec.payload_floats(stage, shapes), np.uint8) for stage in (0, 1))
    return {
        "P": lambda: codec.begin(x, old, new, work, first, segments, shapes),
        "Q": lambda: codec.middle(first.view(np.float32), new, work, second, segments, shapes),
        "PQ": lambda: codec.finish(second.view(np.float32), new, work, out, segments, shapes, 2),
    }


def torch_hook(rows: int, cols: int, rank: int, feedback: bool) -> Stages:
    """The same stages as torch's hook computes them."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

    torch.set_num_threads(1)
    matrix, residual, copy, result = (torch.randn(1, rows, cols) for _ in range(4))
    p, q = torch.randn(1, rows, rank), torch.randn(1, cols, rank)

    def left() -> None:
        if feedback:
            matrix.add_(residual, alpha=0.0)  # values must not grow from run to run; the work is the same
            copy.copy_(matrix)
        torch.bmm(matrix, q, out=p)

    def right() -> None:
        _orthogonalize(p)
        torch.bmm(matrix.transpose(1, 2), p, out=q)

    def product() -> None:
        torch.bmm(p, q.transpose(1, 2), out=result)
        if feedback:
            torch.sub(copy, result, out=residual)

    return {"P": left, "Q": right, "PQ": product}


def matrices(text: str) -> list[Shape]:
    """The shapes that ``ROWSxCOLS`` or a model's name stands for. Raises ValueError for neither."""
    if "x" in text:
        rows, cols = map(int, text.split("x"))
        return [(rows, cols)]
    from benchmarks.models.workloads import WORKLOADS

    if text not in WORKLOADS:
        raise ValueError(f"expected ROWSxCOLS or one of {', '.join(WORKLOADS)}, got {text!r}")
    parameters = WORKLOADS[text].model(0).parameters()
    return [(len(p), p.numel() // len(p)) for p in parameters if p.dim() > 1]


def copying(rows: int, cols: int) -> Stages:
    """What a pass over the matrix takes at least."""
    source, target = np.ones(rows * cols, np.float32), np.zeros(rows * cols, np.float32)
    return {"P": lambda: np.copyto(target, source)}


def measure(shapes: Sequence[Shape], rank: int, feedback: bool, runs: int) -> list[Row]:
    """One row a system: the median of the three stages' sum, and of each, of all these matrices together."""
    systems = {
        "gradcomm": [ours(*shape, rank, feedback) for shape in shapes],
        "torch": [torch_hook(*shape, rank, feedback) for shape in shapes],
        "memcpy": [copying(*shape) for shape in shapes],
    }
    taken: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for run in range(runs + 1):
        for system, each_matrix in systems.items():
            times = dict.fromkeys(each_matrix[0], 0.0)
            for stages in each_matrix:
                for stage, act in stages.items():
                    start = time.perf_counter()
                    act()
                    times[stage] += time.perf_counter() - start
            if run:  # the first turn touches pages
                taken[system].append(times)
    result = []
    for system, each in taken.items():
        parts = {f"{stage}_s": statistics.median(t[stage] for t in each) for stage in each[0]}
        case = {"rank": rank, "feedback": feedback}
        result.append(median_row(system, [sum(t.values()) for t in each], **case, **parts))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "1000x16777", "65536x256"], metavar="SHAPE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    for kernel in (powersgd_begin, powersgd_middle, powersgd_finish):
        compile_kernel(kernel)
    print(describe(machine()))
    widths = {"feedback": 10, "system": 10, "P": 9, "Q": 9, "PQ": 9, "ms": 9, "torch/ours": 12}
    table = Table({"shape, rank": 24} | widths)
    print(table.head())
    rows: list[Row] = []
    for shape in args.shapes:
        try:
            named = matrices(shape)
        except ValueError as error:
            parser.error(f"--shapes: {error}")
        for rank in args.ranks:
            compressed = [size for size in named if largest_rank(*size, rank) == rank]
            if not compressed:
                parser.error(f"--ranks: {rank} saves too little on {shape} to be used")
            for feedback in (False, True):
                part = measure(compressed, rank, feedback, args.runs)
                rows += [row | {"shape": shape} for row in part]
                medians = {row["system"]: row["median_s"] for row in part}
                for row in part:
                    stages = [f"{1e3 * row[f'{s}_s']:.2f}" if f"{s}_s" in row else "" for s in ("P", "Q", "PQ")]
                    ratio = f"{medians['torch'] / row['median_s']:.2f}x" if row["system"] == "gradcomm" else ""
                    head = f"{shape}, {rank}", "yes" if feedback else "no", row["system"]
                    print(table.line(*head, *stages, f"{1e3 * row['median_s']:.2f}", ratio), flush=True)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
