"""Feeding targets: one input after the other, each by its own seed, watched for crashes, hangs and growing memory.

What may live here: what a target is, the loop, what a failure leaves behind. What may not: inputs (`mutate.py`),
targets, processes and the command line (`__main__.py`).

Input number i of a target under seed S is a function of (S, target, i) alone, so any of them can be made again; every
input meets a target in the same state.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

#: An input that keeps the processor for so many seconds hangs. Its own time: a busy machine is no hang.
PATIENCE: Final = 10.0
#: What may be resident at the end more than after the first tenth, and at the peak of any one input, bytes.
GROWTH: Final = 48 << 20
PEAK: Final = 512 << 20
#: How many more descriptors may be open at the end than after the first tenth.
DESCRIPTORS: Final = 32
#: Before that many inputs caches are not full, and pools not grown.
SETTLED: Final = 1000
CORPUS: Final = Path(__file__).parent / "corpus"


class Target(Protocol):
    """Something that reads what others wrote. One is made for a run; ``close`` gives back what it holds."""

    name: str

    def draw(self, rng: random.Random) -> bytes:
        """One input, mostly a valid one gone wrong."""
        ...

    def feed(self, data: bytes) -> str:
        """Give it the input, then a valid one. Returns what became of it in a word; raises if that is no documented
        outcome, or if what is valid is not served any more."""
        ...

    def close(self) -> None: ...


class Hang(Exception):
    """An input that takes too long."""


class Grown(Exception):
    """Memory or descriptors that grew with the inputs, or an input that took too much of it."""


@dataclass(slots=True)
class Failure:
    """``index`` is -1 where no single input is to blame."""

    target: str
    seed: int
    index: int
    error: str
    data: bytes = b""

    @property
    def command(self) -> str:
        return f"python -m tests.fuzz --target {self.target} --seed {self.seed} --at {max(self.index, 0)}"


@dataclass(slots=True)
class Result:
    """What a run of one target came to. Memory in bytes: resident after the first tenth and at the end, and the most
    there ever was."""

    target: str
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    resident: tuple[int, int] = (0, 0)
    peak: int = 0


def generator(target: str, seed: int, index: int) -> random.Random:
    """What input ``index`` is drawn from."""
    return random.Random(f"{seed}/{target}/{index}")


def resident() -> int:
    """Bytes of this process that are in memory, shared files left out."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _descriptors() -> int:
    """How many this process has open. Those of mapped files that only garbage still holds do not count."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def watched(seconds: float = PATIENCE) -> Iterator[Callable[[], None]]:
    """Raises Hang in what follows a call of what this gives, if it takes ``seconds`` of this process's time."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still at work after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, expired)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_PROF, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def explained(error: BaseException) -> str:
    """What was raised, and where."""
    where = traceback.extract_tb(error.__traceback__)[-3:]
    path = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(where))
    return f"{type(error).__name__}: {error}"[:2000] + f" [{path}]"


def feed(target: Target, data: bytes) -> str:
    """One input by itself. Raises what it brings about."""
    with watched() as start:
        start()
        return target.feed(data)


def run(
    make: Callable[[], Target],
    seed: int,
    indices: Iterable[int],
    count: int,
    at: Callable[[int], Any] = lambda index: None,
    most: int = 20,
) -> Result:
    """Feed a target the inputs of ``indices``, of which there are ``count``. ``at`` hears each before it is fed.

    Ends after ``most`` failures: one defect is met by many inputs.
    """
    target = make()
    result = Result(target.name)
    early = opened = left_open = 0
    # What is there by now stays: looking through it again and again for garbage takes longer than some inputs.
    gc.collect()
    gc.freeze()
    try:
        with watched() as start:
            for index in indices:
                at(index)
                data = target.draw(generator(target.name, seed, index))
                start()
                try:
                    result.outcomes[target.feed(data)] += 1
                except Exception as error:
                    result.failures.append(Failure(target.name, seed, index, explained(error), data))
                    target.close()
                    target = make()
                result.inputs += 1
                if result.inputs == max(count // 10, min(SETTLED, count)):
                    early, peak, opened = resident(), _peak(), _descriptors()
                if len(result.failures) >= most:
                    break
            left_open = _descriptors() - opened
    finally:
        target.close()
        gc.unfreeze()
    result.resident, result.peak = (early, resident()), _peak()
    if early and not result.failures:
        grown, most_at_once = result.resident[1] - early, result.peak - peak
        if grown > GROWTH or most_at_once > PEAK:
            said = f"{grown >> 20} MiB more at the end than after the first tenth, {most_at_once >> 20} MiB at the peak"
            result.failures.append(Failure(target.name, seed, -1, f"Grown: {said}"))
        if left_open > DESCRIPTORS:
            said = f"{left_open} more descriptors open at the end than after the first tenth"
            result.failures.append(Failure(target.name, seed, -1, f"Grown: {said}"))
    return result


def kept(name: str) -> list[Path]:
    """Inputs that once broke a target, one a file: lines of hex, after ``#`` what was wrong."""
    return sorted((CORPUS / name).glob("*.hex"))


def read(path: Path) -> bytes:
    """The input in such a file."""
    lines = path.read_text().splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))


def write(path: Path, data: bytes, about: str) -> None:
    """An input as such a file."""
    text = data.hex()
    lines = [f"# {line}" for line in about.splitlines()] + [text[i : i + 100] for i in range(0, len(text), 100)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
