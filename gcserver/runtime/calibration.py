"""What each codec costs on one core of this machine, measured once and remembered.

What may live here: the measurement of a set of specs, and its cache. What may not: the loops that are timed
(`gcserver.bench`), which specs a plan should have, and what one costs that was not measured (`gcserver.planner`).

Operations are what a lane does with one block: encoding with error feedback as in a job, adding and decoding a payload,
hashing it at either end. Their CPU time counts, not the clock's: the measurement may run beside a job on a busy
machine, and what the neighbours take is the profile's ``busy``, not the codec's cost. Sizes take turns, so that a
small block does not find its memory in the cache because it was there a moment ago.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from gcproto import wire
from gcproto.packed import UNREADABLE
from gcserver import bench, codecs
from gcserver.codecs import Codec, parse, reduce
from gcserver.codecs.tworounds import TwoRounds
from gcserver.planner.profile import CODEC_COSTS, CodecCost, Curve
from gcserver.runtime.filing import patiently

#: elements; the longest block has 8 MiB
SIZES: Final = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
#: a spec takes so long, about
SECONDS: Final = 0.25
#: another number whenever what is measured changes
FORM: Final = 1
#: steps before the clock starts, and the share of the time that is left for the rest
WARM: Final = 6
TIMED: Final = 0.6
OPERATIONS: Final = ("encode", "decode", "decode_add")

Progress = Callable[[str, int, int], None]
Known = dict[str, CodecCost]


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

    progress(spec, done, total): called before each that is measured. seconds: for each, about. sizes: elements,
    ascending. Files of another machine, of other kernels or that cannot be read are left aside, also where the disk
    does not answer, and a folder that cannot be written costs the next call its time. Raises CodecError for a spec that
    is none.
    """
    wanted = {spec: parse(spec) for spec in specs}
    path = directory / f"{CODEC_COSTS}{_machine_key(sizes)}.json" if directory is not None else None
    known: Known = {}
    if path is not None:
        known = patiently("what codecs cost could not be read", partial(_read, path), known)
    missing = {_name(codec): codec for codec in wanted.values() if _name(codec) not in known}
    if missing:
        known |= _measure(missing, sizes, seconds, progress)
        if path is not None:
            patiently("what codecs cost could not be kept", partial(_write, path, known), None)
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
        sums = [np.zeros(codec.floats_in(out), np.float32) for out in payloads]

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
    except (OSError, *UNREADABLE):
        return {}


def _write(path: Path, known: Known) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(known))
        # Two that measured at once: one of them will measure again what the other's file lacks.
        partial.replace(path)
