"""How fast the codecs are on this machine: one core, beside memcpy and numpy, measured in turn.

What may live here: the measurement of every registered codec, its table, and the targets it is held to. What may not:
torch (`benchmarks/codecs.py` adds torch's side through ``peers``), argument parsing, and anything a daemon needs.

All buffers exist and are touched before anything is timed, peers' too: page faults on fresh temporaries halve a
peer's speed and flatter ours. One codec at a time: its operations and the peers it is compared with take turns within
every repetition, and ratios are of medians within such a group, so that a noisy machine disturbs all alike. Encoders
run as in a job: states swap from step to step, each step has another gradient (a window sliding over one array), and
some steps come before the clock starts, so that thresholds and stages have settled.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import isqrt
from typing import Any

import numpy as np

from gcserver.codecs import Codec, CodecError, names, parse
from gcserver.codecs.base import BY_NAME, F32, U8
from gcserver.codecs.tworounds import TwoRounds

Row = dict[str, Any]
DATA = ("normal", "laplace")
SIZES = (1 << 20, 1 << 24)
SECONDS = 60.0
SCALE = 0.5  #: what a gradient is multiplied by while it is encoded, as with two nodes
SLIDE = 1 << 16  #: elements over which the window of gradients slides
CHUNK = 1 << 20
LEAST, MOST = 3, 25  #: repetitions of one group
WARM_STEPS, WARM_SECONDS = 20, 1.0
#: beside one spec for every codec that is registered
VARIANTS = (
    "topk(ratio=0.001)",
    "topk(ratio=0.01,packed=1,values=16)",
    "sidco-e(ratio=0.001)",
    "sidco-e(ratio=0.01,packed=1,values=16)",
    "qsgd(bits=8)",
    "natural(bits=9)",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that is timed: who does what."""

    system: str
    op: str
    act: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Target:
    """``codec``'s ``op`` is to be ``factor`` times as fast as ``peer`` is in the same group."""

    codec: str
    op: str
    factor: float
    peer: str


#: (codecs, {operation: times}, peer), at 16 M elements
_TARGETS: tuple[tuple[tuple[str, ...], dict[str, float], str], ...] = (
    (("sidco-e(ratio=0.01)", "sidco-e(ratio=0.001)"), {"encode": 30, "encode+ef": 20}, "torch.topk"),
    (("topk(ratio=0.01)",), {"encode": 20, "encode+ef": 12}, "torch.topk"),
    (("topk(ratio=0.01)",), {"encode": 2, "encode+ef": 2}, "np.partition"),
    (("onebit", "signsgd"), {"encode": 0.6}, "memcpy"),
    (("qsgd",), {"encode": 0.12, "decode_add": 0.25}, "memcpy"),
    (("fp16", "bf16"), {"encode": 0.9, "decode_add": 0.9}, "memcpy"),
    (("topk(ratio=0.01)", "sidco-e(ratio=0.01)"), {"decode_add": 20}, "np.add"),
    (("powersgd",), {"encode": 1, "encode+ef": 1}, "torch powersgd"),
)
TARGETS = tuple(
    Target(codec, op, factor, peer) for codecs, ops, peer in _TARGETS for codec in codecs for op, factor in ops.items()
)


class Buffers:
    """The memory that all groups share; every page is touched."""

    def __init__(self, n: int, source: Callable[[int], F32], codecs: Sequence[Codec]) -> None:
        self.n = n
        self.base = source(n + SLIDE)
        flat = [codec for codec in codecs if not isinstance(codec, TwoRounds)]
        floats = max([0, *(sum(c.state_floats(n, 1) for c in pair) for pair in map(_pair, flat))])
        nbytes = max([0, *(codec.max_bytes(n) for codec in flat)])
        self.old, self.new = np.ones(floats, np.float32), np.ones(floats, np.float32)
        self.dense, self.spare = np.ones(n, np.float32), np.ones(n, np.float32)
        self.payload, self.scratch = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def gradient(self, step: int) -> F32:
        """float32[n], another one each step, at a multiple of 64 bytes in the same array."""
        first = step * 16 * 397 % SLIDE
        return self.base[first : first + self.n]


#: operations of other libraries that take turns with a codec's
Peers = Callable[[Codec, Buffers], Sequence[Operation]]


class Steps:
    """Encoding step after step with one codec; ``nbytes`` of the last payload, which lies in ``out``."""

    def __init__(self, codec: Codec, buffers: Buffers, first: int) -> None:
        self.codec, self.buffers, self.out = codec, buffers, buffers.scratch
        self.step = self.nbytes = 0
        floats = codec.state_floats(buffers.n, 1)
        self.states: list[F32 | None] = [None, None]
        if floats:
            self.states = [state[first : first + floats] for state in (buffers.old, buffers.new)]
            for state in (buffers.old, buffers.new):
                state[first : first + floats] = 0.0

    def __call__(self) -> None:
        self.step += 1
        old, new = self.states
        x = self.buffers.gradient(self.step)
        self.nbytes = self.codec.encode(x, old, new, self.out, None, SCALE, self.step).nbytes
        self.states = [new, old]

    def warm(self, steps: int = WARM_STEPS) -> None:
        """Steps enough for thresholds and stages to settle, or a second of them."""
        began = time.perf_counter()
        while self.step < steps and (self.step < LEAST or time.perf_counter() - began < WARM_SECONDS):
            self()


class Rounds:
    """begin, middle and finish of one matrix, as square as n elements make it; called, they are timed as one."""

    def __init__(self, codec: TwoRounds, buffers: Buffers) -> None:
        self.codec, self.buffers, self.step = codec, buffers, 0
        self.shapes = (square(buffers.n),)
        self.n = self.shapes[0][0] * self.shapes[0][1]
        self.segments = np.array([0, self.n], np.int64)
        floats = codec.state_floats(self.n, 1, self.shapes)
        self.states = [np.zeros(floats, np.float32), np.ones(floats, np.float32)]
        self.work = np.ones(codec.work_floats(self.shapes), np.float32)
        self.out = [np.ones(codec.payload_bytes(stage, self.shapes), np.uint8) for stage in (0, 1)]
        #: what one member's payloads come to: the same memory where they are that
        self.sums = [
            out.view(np.float32) if codec.plain else np.ones(codec.payload_floats(stage, self.shapes), np.float32)
            for stage, out in enumerate(self.out)
        ]

    def __call__(self) -> None:
        self.encode()
        self.finish()

    def encode(self) -> None:
        """Both contributions of a step."""
        self.step += 1
        (old, new), (first, second), work = self.states, self.out, self.work
        x, more = self.buffers.gradient(self.step)[: self.n], (self.segments, self.shapes)
        self.codec.begin(x, old, new, work, first, *more, SCALE, 1)
        self.codec.middle(self._sum(0), new, work, second, *more)

    def _sum(self, stage: int) -> F32:
        if not self.codec.plain:
            self.codec.decode(self.out[stage], self.sums[stage])
        return self.sums[stage]

    def finish(self) -> None:
        """The result of the last `encode`."""
        (old, new), work = self.states, self.work
        out, more = self.buffers.dense[: self.n], (self.segments, self.shapes)
        self.codec.finish(self._sum(1), new, work, out, *more, 2.0)
        self.states = [new, old]


def square(n: int) -> tuple[int, int]:
    """(rows, cols) of the most nearly square matrix of at most n elements that wastes less than a row."""
    rows = max(1, isqrt(n))
    return rows, n // rows


def source(kind: str) -> Callable[[int], F32]:
    """A generator of float32[n] of unit scale, the same each time; kind: one of `DATA`."""
    if kind not in DATA:
        raise CodecError("data", f"one of {', '.join(DATA)}", repr(kind))

    def fill(n: int) -> F32:
        rng, out = np.random.default_rng(0), np.empty(n, np.float32)
        for first in range(0, n, CHUNK):
            part = out[first : first + CHUNK]
            part[:] = rng.standard_normal(part.size, np.float32) if kind == "normal" else rng.laplace(size=part.size)
        return out

    return fill


def default_specs(sample: F32) -> list[str]:
    """One spec for every registered codec at 1 %, then the variants; a threshold is the 99th percentile of sample."""
    specs = []
    for name in names():
        given = []
        for param in BY_NAME[name].params:
            if param.default is None:
                cut = float(np.quantile(np.abs(sample), 0.99)) * SCALE if name == "threshold" else param.low
                given.append(f"{param.name}={0.01 if param.name == 'ratio' else float(f'{cut:.3g}')}")
        specs.append(f"{name}({','.join(given)})" if given else name)
    return specs + list(VARIANTS)


def _pair(codec: Codec) -> tuple[Codec, ...]:
    """The codec without error feedback, and with it where it is allowed."""
    bare = codec.spec.partition("+")[0]
    if not codec.keeps_residual:
        return (codec,)
    try:
        return parse(f"{bare}+ef(decay=0)"), codec if codec.error_feedback else parse(f"{bare}+ef")
    except CodecError:  # refused: its residual could grow without bound
        return (parse(f"{bare}+ef(decay=0)"),)


def operations(codec: Codec, buffers: Buffers) -> tuple[list[Operation], int]:
    """What is timed of a codec, warmed up; and the bytes of a payload."""
    pair, found, first = _pair(codec), [], 0
    if isinstance(codec, TwoRounds):
        for one, op in zip(pair, ("encode", "encode+ef"), strict=False):
            rounds = Rounds(one, buffers)  # type: ignore[arg-type]
            rounds()
            found.append(Operation("gradcomm", op, rounds))
        return found, sum(out.size for out in rounds.out)
    frame: U8 = buffers.payload[:0]
    for one, op in zip(pair, ("encode", "encode+ef"), strict=False):
        steps = Steps(one, buffers, first)
        steps.warm()
        first += one.state_floats(buffers.n, 1)
        found.append(Operation("gradcomm", op, steps))
        if op == "encode":
            frame = buffers.payload[: steps.nbytes]
            frame[:] = buffers.scratch[: steps.nbytes]
    dense = buffers.dense
    found.append(Operation("gradcomm", "decode", lambda: codec.decode(frame, dense, SCALE)))
    found.append(Operation("gradcomm", "decode_add", lambda: codec.decode_add(frame, dense)))
    return found, frame.size


def numpy_peers(codec: Codec, buffers: Buffers) -> list[Operation]:
    """memcpy for all; for sparsifiers also a partition at 1 % (of a copy in a warm buffer) and a dense sum."""
    x, dense, spare, n = buffers.gradient(0), buffers.dense, buffers.spare, buffers.n
    peers = [Operation("memcpy", "copy", lambda: np.copyto(dense, x))]
    if codec.takes_momentum:  # a sparsifier

        def partition() -> None:
            np.abs(x, out=spare)
            spare.partition(n - max(1, n // 100))

        peers.append(Operation("np.add", "add", lambda: np.add(dense, x, out=dense)))
        peers.append(Operation("np.partition", "1 %", partition))
    return peers


def time_in_turn(
    acts: Sequence[Operation], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Times of each, s of ``clock``, in LEAST to MOST repetitions in which they take turns, about ``seconds`` in all.

    What takes more than a third of the time by itself rests once it has two results.
    """
    times: list[list[float]] = [[] for _ in acts]
    began = time.perf_counter()
    for run in range(MOST + 1):
        for each, taken in zip(acts, times, strict=True):
            if len(taken) >= 2 and sum(taken) > seconds / 3:
                continue
            start = clock()
            each.act()
            if run:  # the first turn touches pages
                taken.append(clock() - start)
        if run >= LEAST and time.perf_counter() - began > seconds:
            break
    return times


def measure(
    n: int,
    specs: Sequence[str] | None = None,
    data: str = "normal",
    seconds: float = SECONDS,
    peers: Peers | None = None,
    fill: Callable[[int], F32] | None = None,
    begin: Callable[[str, int, int], None] = lambda codec, done, total: None,
) -> Iterator[list[Row]]:
    """The rows of one codec after the other, at n elements, in about ``seconds`` for all (compilation apart).

    specs: None for all. data: one of `DATA`, or any name where ``fill`` gives the gradients. begin(codec, done, total)
    is called before each. A row: codec, system, op, elements, data, payload_bytes, median_s, runs, gbs (GB/s of
    input) and ``x NAME`` for every peer NAME of the group: how many times as fast. Raises CodecError.
    """
    check([n], specs or ())
    make = fill or source(data)
    wanted = list(default_specs(make(min(n, CHUNK))) if specs is None else specs)
    codecs = [parse(spec) for spec in wanted]
    buffers = Buffers(n, make, codecs)
    for done, (spec, codec) in enumerate(zip(wanted, codecs, strict=True)):
        begin(spec, done, len(wanted))
        own, nbytes = operations(codec, buffers)
        others = numpy_peers(codec, buffers) + list(peers(codec, buffers) if peers else ())
        acts = [*others, *own]
        times = time_in_turn(acts, seconds / len(wanted))
        medians = [statistics.median(taken) for taken in times]
        rows = []
        for act, taken, median in zip(acts, times, medians, strict=True):
            row: Row = {"codec": spec, "system": act.system, "op": act.op, "elements": n, "data": data}
            row |= {"payload_bytes": nbytes, "median_s": median, "runs": len(taken), "gbs": 4e-9 * n / median}
            for peer, other in zip(others, medians, strict=False):
                # A peer that does several things is compared with the same thing.
                if _alike(peer, act.op, others):
                    row[f"x {peer.system}"] = other / median
            rows.append(row)
        yield rows


def _alike(peer: Operation, op: str, others: Sequence[Operation]) -> bool:
    several = sum(each.system == peer.system for each in others) > 1
    return peer.op == op if several or peer.op in ("encode", "encode+ef", "decode", "decode_add") else True


HEAD = f"{'codec':38}{'op':12}{'ms':>9}{'GB/s':>8}{'memcpy':>8}{'topk':>8}{'partition':>10}{'add':>7}{'plain':>8}"
_SHOWN = {"x memcpy": 8, "x torch.topk": 8, "x np.partition": 10, "x np.add": 7}


def line(row: Row) -> str:
    """A row of the table under `HEAD`; the last column is torch's own version of the method, where it was measured."""
    ratios = {key: value for key, value in row.items() if key.startswith("x ")}
    plain = [value for key, value in ratios.items() if key not in _SHOWN]
    name = row["codec"] if row["system"] == "gradcomm" else f"  {row['system']}"
    cells = [_digits(ratios[key]).rjust(width) if key in ratios else " " * width for key, width in _SHOWN.items()]
    shown = f"{name:38}{row['op']:12}{1e3 * row['median_s']:9.3f}{row['gbs']:8.2f}{''.join(cells)}"
    return (shown + (_digits(plain[0]).rjust(8) if plain and row["system"] == "gradcomm" else "")).rstrip()


def reached(rows: Sequence[Row]) -> Iterator[tuple[Target, float | None]]:
    """Every target with what came of it; None where codec or peer were not measured."""
    for target in TARGETS:
        fit = [row for row in rows if (row["codec"], row["op"]) == (target.codec, target.op)]
        ratios = [row.get(f"x {target.peer}") for row in fit if row["system"] == "gradcomm"]
        yield target, ratios[0] if ratios else None


def target_lines(rows: Sequence[Row]) -> list[str]:
    """The table of targets, for one size."""
    lines = [f"{'codec':26}{'op':12}{'against':16}{'wanted':>9}{'reached':>9}  met"]
    for target, ratio in reached(rows):
        shown = "-" if ratio is None else f"{_digits(ratio)}x"
        met = "not measured" if ratio is None else "yes" if ratio >= target.factor else "no"
        against = f"{target.peer:16}{f'{target.factor:g}x':>9}"
        lines.append(f"{target.codec:26}{target.op:12}{against}{shown:>9}  {met}")
    return lines


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    import llvmlite.binding

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", "numba")},
    }


def check(sizes: Sequence[int], specs: Sequence[str]) -> None:
    """CodecError unless every size and spec is one; before minutes are spent on the others."""
    for n in sizes:
        if n < 1:
            raise CodecError("elements", "a whole number from 1", n)
    for spec in specs:
        parse(spec)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
