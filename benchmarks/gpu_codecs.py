"""The GPU codecs on the device that is there: are their payloads the daemon's, and how long do they take?

``python -m benchmarks.gpu_codecs [--elements 1M 16M 64M 256M] [--codecs SPEC ...] [--compile] [--json FILE]``. First
equality: every codec encodes the same vectors on the device and on the CPU (by the daemon's own codec where its
dependencies are installed, else by the same torch code), three steps with error feedback, and the payloads are
compared: equal to the bit, and how many elements decode to values further apart than 1e-6 of themselves. Then times:
encode (with its ``settle``) without and with error feedback, decode and decode_add of a payload on the device,
against a copy on the device and ``torch.topk`` of 1 % in the same turns; medians. Without CUDA everything runs on the
CPU, at 1 M elements: that shows that it works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import Row, Table, describe, machine, median_row, write_json
from gcclient.gpu_codecs import compile_kernels, make
from gcclient.gpu_codecs.base import GpuCodec

SPECS = [
    "fp16",
    "bf16",
    "topk(ratio=0.01)",
    "topk(ratio=0.001)",
    "randomk(ratio=0.01)",
    "sidco-e(ratio=0.01)",
    "sidco-e(ratio=0.001)",
    "onebit",
    "efsignsgd",
    "qsgd(bits=4)",
    "qsgd(bits=4,kind=l2)",
    "terngrad",
]
UNITS = {"K": 1 << 10, "M": 1 << 20}


def read_elements(text: str) -> int:
    """``"16M"`` as 2**24."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def encode(codec: GpuCodec, x: torch.Tensor, bounds: list[int], steps: int) -> torch.Tensor:
    """The payload of the last of some steps with state, on x's device."""
    n, m = x.numel(), len(bounds) - 1
    floats = codec.state_floats(n, m)
    states = [torch.zeros(floats, device=x.device) if floats else None for _ in range(2)]
    out = torch.zeros(codec.max_bytes(n, m), dtype=torch.uint8, device=x.device)
    nbytes = 0
    for step in range(steps):
        nbytes = codec.encode(x, states[0], states[1], out, bounds, 0.5, seed=step).settle().nbytes
        states.reverse()
    return out[:nbytes]


def daemon_payload(spec: str, x: np.ndarray[Any, Any], bounds: list[int], steps: int) -> bytes:
    """The same by the daemon's codec; ImportError where it cannot run."""
    from gcserver.codecs import parse

    codec, n, m = parse(spec), x.size, len(bounds) - 1
    floats = codec.state_floats(n, m)
    states = [np.zeros(floats, np.float32) if floats else None for _ in range(2)]
    out = np.zeros(codec.max_bytes(n, m), np.uint8)
    nbytes = 0
    for step in range(steps):
        nbytes = codec.encode(x, states[0], states[1], out, np.array(bounds), 0.5, seed=step).nbytes
        states.reverse()
    return out[:nbytes].tobytes()


def compare(spec: str, device: torch.device, n: int) -> Row:
    """Whether the device's payload is the reference's, and how far apart they decode."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32)
    bounds, steps, codec = [0, 1000, n // 3, n], 3, make(spec)
    payload = encode(codec, torch.from_numpy(x).to(device), bounds, steps).cpu()
    try:
        reference, by = torch.frombuffer(bytearray(daemon_payload(spec, x, bounds, steps)), dtype=torch.uint8), "daemon"
    except ImportError:
        reference, by = encode(codec, torch.from_numpy(x), bounds, steps), "torch on the CPU"
    decoded = [torch.zeros(n) for _ in range(2)]
    for data, out in zip((payload, reference), decoded, strict=True):
        codec.decode(data, out)
    on_device = torch.zeros(n, device=device)
    codec.decode(payload.to(device), on_device)
    a, b = decoded
    apart = ((a - b).abs() > 1e-6 * torch.maximum(a.abs(), b.abs())).sum().item()
    return {
        "system": "equality",
        "codec": spec,
        "elements": n,
        "against": by,
        "equal_bytes": torch.equal(payload, reference),
        "elements_apart": apart,
        "device_decodes_alike": torch.equal(on_device.cpu(), a),
    }


def operations(spec: str, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """encode without and with error feedback, decode and decode_add, of one codec."""
    codec, n = make(spec), x.numel()
    out = torch.zeros(codec.max_bytes(n), dtype=torch.uint8, device=x.device)
    dense = torch.zeros(n, device=x.device)
    floats = codec.state_floats(n)
    plain = make(f"{spec}+ef(decay=0)") if floats else codec
    found: dict[str, Callable[[], object]] = {
        "encode": lambda: plain.encode(x, None, None, out, scale=0.5, seed=1).settle()
    }
    if floats:
        old, new = torch.zeros(floats, device=x.device), torch.zeros(floats, device=x.device)
        found["encode+ef"] = lambda: codec.encode(x, old, new, out, scale=0.5, seed=1).settle()
    payload = out[: plain.encode(x, None, None, out, seed=1).settle().nbytes].clone()
    found["decode"] = lambda: codec.decode(payload, dense, 0.5)
    found["decode_add"] = lambda: codec.decode_add(payload, dense)
    return found


def measure(specs: list[str], n: int, device: torch.device, runs: int) -> list[Row]:
    """Rows of all codecs and peers at one size; they take turns."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, device=device, generator=generator)
    dense, k = torch.empty_like(x), max(1, n // 100)
    peers: dict[str, Callable[[], object]] = {
        "copy": lambda: dense.copy_(x),
        "torch.topk 1%": lambda: torch.topk(x.abs(), k, sorted=False),
    }
    rows: list[Row] = []
    for spec in specs:
        # One codec at a time: at 256 M elements the buffers of all would not fit.
        acts = {("peer", name): act for name, act in peers.items()}
        acts |= {(spec, name): act for name, act in operations(spec, x).items()}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in acts}
        for run in range(runs + 2):
            for key, act in acts.items():
                synchronise(device)
                start = time.perf_counter()
                act()
                synchronise(device)
                if run > 1:  # the first turns allocate, and compile
                    times[key].append(time.perf_counter() - start)
        medians = {key: statistics.median(taken) for key, taken in times.items()}
        for (system, op), taken in times.items():
            if system != "peer":
                ratios = {
                    "copies": medians[system, op] / medians["peer", "copy"],
                    "ratio_torch_topk": medians["peer", "torch.topk 1%"] / medians[system, op],
                }
                rows.append(median_row(system, taken, op=op, elements=n, gbs=4e-9 * n / medians[system, op], **ratios))
        rows += [median_row(name, times["peer", name], op=f"beside {spec}", elements=n) for name in peers]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", nargs="+", type=read_elements, help="such as 1M 16M (CUDA: 1M 16M 64M 256M)")
    parser.add_argument("--codecs", nargs="+", default=SPECS, metavar="SPEC")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile the elementwise parts")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    sizes = args.elements or [n << 20 for n in ((1, 16, 64, 256) if cuda else (1,))]
    name = torch.cuda.get_device_name() if cuda else "no CUDA device: these are the CPU's times, of no meaning"
    compile_kernels(args.compile)
    print(f"{describe(machine())}\n{name}\n")

    table = Table({"codec": 26, "against": 18, "equal bytes": 13, "apart": 8, "decodes alike": 15})
    print(table.head())
    rows: list[Row] = []
    for spec in args.codecs:
        row = compare(spec, device, min(sizes[0], 1 << 20))
        rows.append(row)
        cells = row["against"], str(row["equal_bytes"]), str(row["elements_apart"]), str(row["device_decodes_alike"])
        print(table.line(spec, *cells), flush=True)
    table = Table({"codec": 26, "elements": 12, "op": 12, "ms": 10, "GB/s": 9, "copies": 9, "torch.topk": 12})
    print("\n" + table.head())
    for n in sizes:
        for row in measure(args.codecs, n, device, args.runs):
            rows.append(row)
            if "copies" in row:
                cells = f"{1e3 * row['median_s']:.3f}", f"{row['gbs']:.1f}", f"{row['copies']:.1f}"
                ratio = f"{row['ratio_torch_topk']:.2f}x"
                print(table.line(row["system"], str(n), row["op"], *cells, ratio), flush=True)
    write_json(args.json, rows, device=name)


if __name__ == "__main__":
    main()
