"""What each codec costs on one core of this machine, measured once and remembered.

What may live here: the measurement of a set of specs, its cache, and the cost of a spec next to measured ones. What may
not: the loops that are timed (`gcserver.bench`), which specs a plan should have (`gcserver.planner`).

Operations are what a lane does with one block: encoding with error feedback as in a job, adding and decoding a payload,
hashing it at either end. Their CPU time counts, not the clock's: the measurement may run beside a job on a busy
machine, and what the neighbours take is the profile's ``busy``, not the codec's cost. Sizes take turns, so that a
small block does not find its memory in the cache because it was there a moment ago.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from gcproto import wire
from gcserver import bench, codecs
from gcserver.codecs import Codec, parse, reduce
from gcserver.codecs.base import BY_NAME
from gcserver.codecs.tworounds import TwoRounds
from gcserver.planner.profile import CodecCost, Curve

#: elements; the longest block has 8 MiB
SIZES: Final = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
SECONDS: Final = 3.0
SPECS: Final = (
    "none",
    "fp16",
    "qsgd(bits=8)",
    "qsgd(bits=4)",
    *(f"{name}(ratio={ratio})" for name in ("topk", "sidco-e") for ratio in (0.05, 0.01, 0.001)),
    "powersgd(rank=4)",
    "powersgd(rank=8)",
)
#: another number whenever what is measured changes
FORM: Final = 1
#: steps before the clock starts, and the share of the time that is left for the rest
WARM: Final = 6
TIMED: Final = 0.6
OPERATIONS: Final = ("encode", "decode", "decode_add")
#: the parameters that decide how long a payload is; a codec has one of them or none
SIZING: Final = ("ratio", "bits", "rank")

Progress = Callable[[str, int, int], None]
Known = dict[str, CodecCost]


class CostUnknown(LookupError):
    """A spec of which no relative was measured: names it and what to do."""


def _quiet(spec: str, done: int, total: int) -> None:
    pass


def costs(
    specs: Sequence[str],
    directory: Path | None,
    progress: Progress = _quiet,
    seconds: float = SECONDS,
    sizes: Sequence[int] = SIZES,
) -> Known:
    """The cost of each spec, by the spec as given; those of this machine in ``directory`` (None: nothing is kept) are
    not measured again.

    progress(spec, done, total): called before each that is measured. seconds: for all of `SPECS`; others take their
    share. sizes: elements, ascending. Files of another machine, of other kernels or that cannot be read are left aside,
    and a folder that cannot be written costs the next call its time. Raises CodecError for a spec that is none.
    """
    wanted = {spec: parse(spec) for spec in specs}
    path = directory / f"codec-costs-{_machine_key(sizes)}.json" if directory is not None else None
    known = _read(path) if path is not None else {}
    missing = {_name(codec): codec for codec in wanted.values() if _name(codec) not in known}
    if missing:
        each = seconds / len(SPECS)
        for done, (name, cost) in enumerate(_measure(missing, sizes, each, progress), 1):
            known[name] = cost
            if path is not None and done == len(missing):
                _write(path, known)
    return {spec: known[_name(codec)] for spec, codec in wanted.items()}


def _measure(wanted: Mapping[str, Codec], sizes: Sequence[int], seconds: float, progress: Progress) -> Iterator[
    tuple[str, CodecCost]
]:  # fmt: skip
    fill = bench.source(bench.DATA[1])  # gradients have longer tails than the normal distribution
    memory = [bench.Buffers(n, fill, list(wanted.values())) for n in sizes]
    for done, (name, codec) in enumerate(wanted.items()):
        progress(codec.spec, done, len(wanted))
        acts: list[bench.Operation] = []
        nbytes = 0
        for buffers in memory:
            some, nbytes = _operations(codec, buffers)
            acts += [bench.Operation("gradcomm", op, act) for op, act in zip(OPERATIONS, some, strict=True)]
        times = bench.time_in_turn(acts, TIMED * seconds, time.thread_time)
        medians = [statistics.median(taken) for taken in times]
        curves = {
            op: Curve(tuple(zip(sizes, medians[i :: len(OPERATIONS)], strict=True))) for i, op in enumerate(OPERATIONS)
        }
        yield name, CodecCost(**curves, ratio=nbytes / (4 * sizes[-1]))


def _operations(codec: Codec, buffers: bench.Buffers) -> tuple[list[Callable[[], object]], int]:
    """Encode, decode and decode_add of one block, warmed up, and the bytes of its payload."""
    dense, spare, x = buffers.dense, buffers.spare, buffers.gradient(0)
    if isinstance(codec, TwoRounds):
        rounds = bench.Rounds(codec, buffers)
        rounds()
        payloads = rounds.out
        sums = [np.zeros(out.size // 4, np.float32) for out in payloads]

        def encode() -> None:
            rounds.encode()
            for out in payloads:
                wire.digest(out)

        def decode() -> None:
            wire.digest(payloads[1])
            rounds.finish()

        def add() -> None:
            for out, acc in zip(payloads, sums, strict=True):
                wire.digest(out)
                codec.decode_add(out, acc)

        return [encode, decode, add], sum(out.size for out in payloads)
    if codec.name == "none":  # sent from where it lies, added two at a time (`averaging.py`)
        raw, weight = x.view(np.uint8), 0.5

        def copy() -> None:
            wire.digest(raw)
            np.copyto(dense, x)

        return [
            lambda: wire.digest(raw),
            copy,
            lambda: (wire.digest(raw), reduce.add2_scale(spare, dense, x, weight)),
        ], raw.nbytes
    steps = bench.Steps(codec, buffers, 0)
    steps.warm(WARM)
    frame = buffers.payload[: steps.nbytes]
    frame[:] = steps.out[: steps.nbytes]

    def encode_one() -> None:
        steps()
        wire.digest(steps.out[: steps.nbytes])

    return [
        encode_one,
        lambda: (wire.digest(frame), codec.decode(frame, dense, bench.SCALE)),
        lambda: (wire.digest(frame), codec.decode_add(frame, spare)),
    ], frame.nbytes


# ------------------------------------------------------------------------------------------------ cache
def cpu_model() -> str:
    """What this machine's processor calls itself."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model", "cpu part")):
                return line.partition(":")[2].strip()
    return os.uname().machine


def _machine_key(sizes: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(codecs.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    versions = [metadata.version(name) for name in ("numpy", "numba", "xxhash")]
    digest.update(repr((FORM, cpu_model(), versions, tuple(sizes))).encode())
    return digest.hexdigest()[:16]


def _name(codec: Codec) -> str:
    """What a codec's cost is filed under: its whole spec, and of a third party's its source as well."""
    file = inspect.getsourcefile(type(codec))
    if file is None or Path(file).parent == Path(codecs.__file__).parent:
        return codec.spec
    return f"{codec.spec} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"


def _read(path: Path) -> Known:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known)
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, known: Known) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(known))
        # Two that measured at once: one of them will measure again what the other's file lacks.
        partial.replace(path)


# ------------------------------------------------------------------------------------------------ relatives
def cost_of(spec: str, known: Mapping[str, CodecCost]) -> CodecCost:
    """The cost of ``spec`` from the measured specs ``known``: its own, or from the same codec's nearest.

    Between two measured sizes of payload (ratio, bits, rank) seconds are interpolated; beyond them the line through the
    nearest two goes on, never below a share of the nearest that its payload's length accounts for. With one relative
    that share is all of adding, and nothing of what reads or writes every element. Raises CodecError for a spec that is
    none, `CostUnknown` where no spec of the codec was measured.
    """
    codec = parse(spec)
    near = []
    for other, cost in known.items():
        relative = parse(other)
        if relative.spec == codec.spec:
            return cost
        if relative.name == codec.name:
            factor = _payload(codec) / _payload(relative)
            near.append((_unlike(codec, relative), abs(math.log(factor)), factor, cost))
    if not near:
        raise CostUnknown(f"no {codec.name} was measured, so what {spec} costs is unknown: measure it with costs()")
    near.sort(key=lambda relative: relative[:2])
    least = near[0][0]
    _, _, factor, first = near[0]
    wanted = first.ratio * factor
    second = next((c for unlike, _, _, c in near[1:] if unlike == least and c.ratio != first.ratio), None)
    encode, decode, add = (
        _between(getattr(first, op), getattr(second, op, None), op, first, second, wanted) for op in OPERATIONS
    )
    return CodecCost(encode, decode, add, wanted)


def _between(
    first: Curve, second: Curve | None, op: str, near: CodecCost, far: CodecCost | None, wanted: float
) -> Curve:
    """The curve at payload ``wanted`` (over dense) from one or two measured ones."""
    factor = wanted / near.ratio
    sure = 1.0 if op == "decode_add" else 0.0  # of the seconds that are the payload's
    points = []
    for n, seconds in first.points:
        if second is None or far is None:
            value = seconds * (1.0 - sure + sure * factor)
        else:
            slope = (second(n) - seconds) / (far.ratio - near.ratio)
            value = seconds + slope * (wanted - near.ratio)
        # A line through two noisy points may go anywhere; nothing costs less than its payload's share of a neighbour.
        low, high = sorted((seconds, seconds * factor))
        points.append((n, min(max(value, low), high)))
    return Curve(tuple(points))


def _payload(codec: Codec) -> float:
    """Bytes of a large block's payload, or what they are in proportion to."""
    n = SIZES[-1]
    if isinstance(codec, TwoRounds):
        shape = (bench.square(n),)
        return 4.0 * sum(codec.payload_floats(stage, shape) for stage in (0, 1))
    return float(codec.max_bytes(n))


def _unlike(a: Codec, b: Codec) -> int:
    """In how many parameters, besides the one that sizes payloads, two specs of a codec differ."""
    mine, theirs = a.values(), b.values()
    names = [p.name for p in BY_NAME[a.name].params if p.name not in SIZING]
    return sum(mine.get(name) != theirs.get(name) for name in names) + (a.error_feedback != b.error_feedback)
