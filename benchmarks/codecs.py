"""Speed of every codec and reduction on one core, against memcpy, numpy and torch measured in turn.

``python -m benchmarks.codecs [--elements N ...] [--codecs SPEC ...] [--data normal|laplace|gradients] [--json FILE]``.
How it is measured is `gcserver.bench`'s affair (``gcserver bench codecs`` is the same without torch); here torch's side
is added: ``torch.topk`` of 1 % of magnitudes that exist already, its casts into given buffers, the arithmetic of its
PowerSGD hook, and a plain torch version of every other method: `gcclient.gpu_codecs` on CPU tensors, or `plain`'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks import plain
from benchmarks.common import Row, describe, machine, median_row, write_json
from benchmarks.lowrank import torch_hook
from gcclient import gpu_codecs
from gcproto.dtypes import DType
from gcserver import bench
from gcserver.codecs import Codec, reduce
from gcserver.codecs.base import F32
from gcserver.codecs.warmup import warmup

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: elements up to which whole methods in plain torch are run: their temporaries take some 20 times the gradient
PLAIN = 1 << 24


class TorchPeers:
    """torch doing the same as a codec, or the nearest thing, on one thread; buffers are made once and kept."""

    def __init__(self, plain: bool = True) -> None:
        self.plain = plain
        self.magnitudes: torch.Tensor | None = None

    def __call__(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        found = self._cast(codec, buffers) + self._topk(codec, buffers) + self._powersgd(codec, buffers)
        if self.plain and buffers.n <= PLAIN and codec.name not in CASTS:
            found += (self._twin if codec.name in gpu_codecs.names() else self._method)(codec, buffers)
        return found

    def _topk(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        if not codec.takes_momentum:
            return []
        if self.magnitudes is None or self.magnitudes.numel() != buffers.n:
            self.magnitudes = torch.from_numpy(np.abs(buffers.gradient(0)))
        k, magnitudes = max(1, buffers.n // 100), self.magnitudes
        values, indices = torch.ones(k), torch.ones(k, dtype=torch.int64)
        act = lambda: torch.topk(magnitudes, k, sorted=False, out=(values, indices))  # noqa: E731
        return [bench.Operation("torch.topk", "1 %", act)]

    def _cast(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        if codec.name not in CASTS:
            return []
        x, dense = torch.from_numpy(buffers.gradient(0)), torch.from_numpy(buffers.dense)
        wire = torch.from_numpy(buffers.scratch)[: 2 * buffers.n].view(CASTS[codec.name])
        acts: dict[str, Callable[[], object]] = {
            "encode": lambda: wire.copy_(x),
            "decode": lambda: dense.copy_(wire),
            "decode_add": lambda: dense.add_(wire),
        }
        return [bench.Operation("torch cast", op, act) for op, act in acts.items()]

    def _powersgd(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        if codec.name != "powersgd":
            return []
        rows, cols = bench.square(buffers.n)

        def whole(feedback: bool) -> Callable[[], object]:
            stages = torch_hook(rows, cols, codec.rank, feedback)  # type: ignore[attr-defined]
            return lambda: [act() for act in stages.values()]

        return [bench.Operation("torch powersgd", op, whole(op == "encode+ef")) for op in ("encode", "encode+ef")]

    def _method(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        n, ratio = buffers.n, float(codec.values().get("ratio", 0.0))
        k, cut = max(1, int(ratio * n)), float(codec.values().get("value", 0.0))
        x, dense, found = torch.from_numpy(buffers.gradient(0)), torch.from_numpy(buffers.dense), []
        for op in ("encode", "encode+ef"):
            residual = torch.zeros(n) if op == "encode+ef" else None
            method = plain.make(codec.name, n, k, cut, residual)
            if method is None or (residual is not None and not isinstance(method, plain.Thresholded)):
                continue
            act = lambda method=method: method.encode(x, bench.SCALE)  # noqa: E731
            found.append(bench.Operation("plain torch", op, act))
            if op == "encode":
                payload = method.encode(x, bench.SCALE)
                add = lambda method=method, payload=payload: method.decode_add(payload, dense)  # noqa: E731
                found.append(bench.Operation("plain torch", "decode_add", add))
        return found

    def _twin(self, codec: Codec, buffers: bench.Buffers) -> list[bench.Operation]:
        bare, n, found = codec.spec.partition("+")[0], buffers.n, []
        x, dense = torch.from_numpy(buffers.gradient(0)), torch.from_numpy(buffers.dense)
        twin = gpu_codecs.make(f"{bare}+ef(decay=0)" if codec.keeps_residual else bare)
        out = torch.ones(max(twin.max_bytes(n), 1), dtype=torch.uint8)
        floats = twin.state_floats(n)
        old, new = (torch.zeros(floats), torch.zeros(floats)) if floats else (None, None)
        size = twin.encode(x, old, new, out, None, bench.SCALE, 1).settle().nbytes
        frame = out[:size].clone()
        encode = lambda: twin.encode(x, old, new, out, None, bench.SCALE, 1).settle()  # noqa: E731
        found.append(bench.Operation("plain torch", "encode", encode))
        if codec.error_feedback:
            both = gpu_codecs.make(f"{bare}+ef")
            before, after = torch.zeros(both.state_floats(n)), torch.zeros(both.state_floats(n))
            feedback = lambda: both.encode(x, before, after, out, None, bench.SCALE, 1).settle()  # noqa: E731
            found.append(bench.Operation("plain torch", "encode+ef", feedback))
        found.append(bench.Operation("plain torch", "decode_add", lambda: twin.decode_add(frame, dense)))
        return found


def gradients(n: int) -> F32:
    """float32[n]: gradients of a small convolutional classifier over some steps of training, end to end, repeated."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 8 * 8, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    optimizer, parts = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    means = torch.randn(10, 3, 32, 32)
    for _ in range(4):
        labels = torch.randint(0, 10, (32,))
        loss = torch.nn.functional.cross_entropy(model(means[labels] + torch.randn(32, 3, 32, 32)), labels)
        optimizer.zero_grad()
        loss.backward()
        parts += [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return np.resize(torch.cat(parts).numpy(), n).astype(np.float32, copy=False)


def reductions(n: int, data: str, seconds: float) -> list[Row]:
    """The kernels of uncompressed aggregation, against memcpy."""
    x, old, new, dense = (np.ones(n, np.float32) for _ in range(4))
    half = np.zeros(2 * n, np.uint8)
    acts = [
        bench.Operation("memcpy", "copy", lambda: np.copyto(dense, x)),
        bench.Operation("reduce", "add2", lambda: reduce.add2(dense, x, old)),
        bench.Operation("reduce", "add2_scale", lambda: reduce.add2_scale(dense, x, old, 0.5)),
        bench.Operation("reduce", "acc_add", lambda: reduce.acc_add(dense, x)),
        bench.Operation("reduce", "scale_copy", lambda: reduce.scale_copy(dense, x, 0.5)),
        bench.Operation("reduce", "sum_ranks(4)", lambda: reduce.sum_ranks(dense, [x, old, new, x])),
        bench.Operation("reduce", "load_add bf16", lambda: reduce.load_add(dense, half, DType.BF16)),
        bench.Operation("reduce", "store fp16", lambda: reduce.store(half, x, DType.F16, 0.5)),
    ]
    rows = []
    for act, times in zip(acts, bench.time_in_turn(acts, seconds), strict=True):
        row = median_row(act.system, times, codec="reduce", op=act.op, elements=n, data=data)
        rows.append(row | {"gbs": 4e-9 * n / row["median_s"]})
    return [row | {"x memcpy": rows[0]["median_s"] / row["median_s"]} for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=list(bench.SIZES))
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", help="instead of all")
    parser.add_argument("--data", choices=(*bench.DATA, "gradients"), default="normal")
    parser.add_argument("--seconds", type=float, default=bench.SECONDS, help="time per size, about")
    parser.add_argument("--no-plain", action="store_true", help="leave out whole methods in plain torch")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bench.check(args.elements, args.codecs or ())
    warmup()
    print(describe(machine()), flush=True)
    rows: list[Row] = []
    for n in args.elements:
        began, part = time.perf_counter(), list[Row]()
        print(f"\n{n} elements, {args.data}\n{bench.HEAD}", flush=True)
        fill = gradients if args.data == "gradients" else None
        peers = TorchPeers(not args.no_plain)
        for group in bench.measure(n, args.codecs, args.data, args.seconds, peers, fill):
            part += group
            print("\n".join(bench.line(row) for row in group), flush=True)
        if args.codecs is None:
            more = reductions(n, args.data, 2.0)
            part += more
            print("\n".join(bench.line(row) for row in more), flush=True)
        rows += part
        print("\n".join(["", *bench.target_lines(part), "", f"{time.perf_counter() - began:.0f} s"]), flush=True)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
