"""Speed of every codec and reduction on one core, against memcpy and torch measured in turn.

``python -m benchmarks.codecs [--elements N ...] [--json FILE]``. Prints GB/s of float32 input (4 bytes an
element, whatever crosses the wire) and the ratio to a memcpy of the same input in the same run; for topk also
to ``torch.topk``. All buffers are preallocated and touched first, for peers too. Medians; the systems take
turns within every repetition, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from gcproto.dtypes import DType
from gcserver.codecs import parse, reduce
from gcserver.codecs.warmup import warmup

Operation = tuple[str, str, Callable[[], object]]


def codec_operations(spec: str, x: np.ndarray, buffers: dict[str, np.ndarray]) -> list[Operation]:
    """encode without and with error feedback, decode and decode_add of one codec."""
    codec = parse(spec)
    n = x.size
    payload = np.zeros(codec.max_bytes(n), np.uint8)
    scratch = payload.copy()
    old, new, dense = buffers["old"], buffers["new"], buffers["dense"]
    nbytes = codec.encode(x, None, None, payload, None).nbytes
    frame = payload[:nbytes]
    operations: list[Operation] = [
        (codec.spec, "encode", lambda: codec.encode(x, None, None, scratch, None, 0.5)),
        (codec.spec, "decode", lambda: codec.decode(frame, dense, 0.5)),
        (codec.spec, "decode_add", lambda: codec.decode_add(frame, dense)),
    ]
    if codec.error_feedback:
        operations.insert(1, (codec.spec, "encode+ef", lambda: codec.encode(x, old, new, scratch, None, 0.5)))
    return operations


def reduce_operations(x: np.ndarray, buffers: dict[str, np.ndarray]) -> list[Operation]:
    """The kernels of uncompressed aggregation."""
    old, new, dense = buffers["old"], buffers["new"], buffers["dense"]
    half = np.zeros(2 * x.size, np.uint8)
    return [
        ("reduce", "add2", lambda: reduce.add2(dense, x, old)),
        ("reduce", "add2_scale", lambda: reduce.add2_scale(dense, x, old, 0.5)),
        ("reduce", "acc_add", lambda: reduce.acc_add(dense, x)),
        ("reduce", "scale_copy", lambda: reduce.scale_copy(dense, x, 0.5)),
        ("reduce", "sum_ranks(4)", lambda: reduce.sum_ranks(dense, [x, old, new, x])),
        ("reduce", "load_add bf16", lambda: reduce.load_add(dense, half, DType.BF16)),
        ("reduce", "store fp16", lambda: reduce.store(half, x, DType.F16, 0.5)),
    ]


def peer_operations(x: np.ndarray, buffers: dict[str, np.ndarray]) -> list[Operation]:
    """memcpy, numpy and torch doing the nearest thing."""
    dense, old = buffers["dense"], buffers["old"]
    peers: list[Operation] = [
        ("memcpy", "copy", lambda: np.copyto(dense, x)),
        ("numpy", "add", lambda: np.add(x, old, out=dense)),
    ]
    try:
        import torch
    except ModuleNotFoundError:
        return peers
    torch.set_num_threads(1)
    source, magnitude, k = torch.from_numpy(x), torch.empty(x.size), max(1, x.size // 100)
    values, indices = torch.empty(k), torch.empty(k, dtype=torch.int64)
    half = torch.zeros(x.size, dtype=torch.float16)

    def topk() -> None:
        torch.abs(source, out=magnitude)
        torch.topk(magnitude, k, sorted=False, out=(values, indices))

    peers += [
        ("torch", "topk 1%", topk),
        ("torch", "cast fp16", lambda: half.copy_(source)),
    ]
    return peers


def measure(n: int, seconds: float, runs: int) -> list[dict[str, object]]:
    """Rows of all systems at one size; at most about ``seconds``."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n, np.float32)
    buffers = {name: rng.standard_normal(n, np.float32) for name in ("old", "new", "dense")}
    operations = peer_operations(x, buffers)
    for spec in ("none", "fp16", "bf16", "topk(ratio=0.01)", "topk(ratio=0.001)", "onebit"):
        operations += codec_operations(spec, x, buffers)
    operations += reduce_operations(x, buffers)
    times: list[list[float]] = [[] for _ in operations]
    deadline = time.perf_counter() + seconds
    for run in range(runs + 1):
        for (_, _, act), taken in zip(operations, times, strict=True):
            start = time.perf_counter()
            act()
            if run:  # the first turn touches pages
                taken.append(time.perf_counter() - start)
        if run >= 3 and time.perf_counter() > deadline:
            break
    medians = {(s, o): statistics.median(t) for (s, o, _), t in zip(operations, times, strict=True)}
    memcpy, torch_topk = medians["memcpy", "copy"], medians.get(("torch", "topk 1%"))
    rows = []
    for ((system, op), median), taken in zip(medians.items(), times, strict=True):
        row: dict[str, object] = {
            "system": system,
            "op": op,
            "elements": n,
            "median_s": median,
            "runs": len(taken),
            "gbs": 4e-9 * n / median,
            "ratio_memcpy": memcpy / median,
        }
        if system.startswith("topk") and op.startswith("encode") and torch_topk:
            row["ratio_torch_topk"] = torch_topk / median
        rows.append(row)
    return rows


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    import llvmlite.binding
    import numba

    return {
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--runs", type=int, default=15, help="repetitions, at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="time per size, about")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    warmup()
    rows = []
    for n in args.elements:
        part = measure(n, args.seconds, args.runs)
        rows += part
        print(
            f"\n{n} elements ({4e-6 * n:.1f} MB)\n"
            f"{'system':26}{'op':16}{'ms':>9}{'GB/s':>8}{'memcpy':>8}{'torch.topk':>12}"
        )
        for row in part:
            topk = f"{row['ratio_torch_topk']:11.1f}x" if "ratio_torch_topk" in row else ""
            print(
                f"{row['system']:26}{row['op']:16}{1e3 * row['median_s']:9.3f}{row['gbs']:8.2f}"
                f"{row['ratio_memcpy']:7.2f}x{topk}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
