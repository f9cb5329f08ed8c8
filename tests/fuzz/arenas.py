"""Target: shared memory that a lane takes up again: slot headers, block records, heaps, the ring of steps.

An input is the job's shape and a list of (file, what to do to it). A job is interrupted after its first step, files of
one node are spoiled, and a new life of its lane goes on with the job. Workers can write the arena, and memory may be
damaged: the lane goes on or ends the job, and the next one is exact.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import msgspec

from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.runtime.records import RECORD, STEP
from tests.fuzz import frames, lanes, mutate
from tests.fuzz.frames import expected
from tests.fuzz.lanes import JOB, KINDS, Pair, Shape

#: files of a lane's domain and how much of each is worth changing
FILES: Final = {
    "00000000.0.chunk0": 256,
    "00000000.0.records0": 2 * RECORD.itemsize,
    "00000000.0.heap0": 256,
    "00000000.0.steps": 4 * STEP.itemsize,
}
#: (file, offset, bytes to write there; a file cut off there if there are none)
Change = tuple[str, int, bytes]


class Arenas(frames.LaneTarget):
    """Two lanes; files of one are spoiled between two of its lives."""

    name = "arenas"

    def draw(self, rng: random.Random) -> bytes:
        changes: list[Change] = []
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            name = rng.choice(list(FILES))
            at = rng.randrange(FILES[name]) & ~7
            kind = rng.randrange(10)
            if kind == 0:
                data = b""
            elif kind == 1:
                data = rng.randbytes(rng.choice((8, 64, 600)))
            elif kind == 2:
                data = bytes(rng.choice((8, 64, 600)))
            else:
                at += rng.choice((0, 0, 4))
                width = rng.choice((4, 8))
                data = (mutate.number(rng, rng.randrange(4)) % (1 << 8 * width)).to_bytes(width, "little")
            changes.append((name, at, data))
        return msgspec.msgpack.encode((rng.randrange(len(KINDS)), changes))

    def feed(self, data: bytes) -> str:
        kind, changes = msgspec.msgpack.decode(data, type=tuple[int, list[Change]])
        shape, pair = Shape(*KINDS[kind]), Pair()
        try:
            self._begin(pair, shape)
            folder = pair.root / "a" / "jobs" / JOB.hex()
            for name, at, content in changes:
                _spoil(folder / name, at, content)
            pair.again(0, 101)
            outcome = self._again(pair, shape)
            pair.end(JOB)
            pair.tick()
            assert pair.next(shape) == (expected(kind).next_outputs,) * 2
            return outcome
        finally:
            pair.close()

    def _begin(self, pair: Pair, shape: Shape) -> None:
        """The first step, settled on both, and the second as far as it goes without node a's contribution."""
        for lane in (pair.a, pair.b):
            lane.open(JOB, shape)
        for step in (1, 2):
            for lane in (pair.a, pair.b) if step == 1 else (pair.b,):
                lane.push(JOB, step)
            pair.carry()
            for lane in (pair.a, pair.b) if step == 1 else ():
                lane.process.orders.take(ev.Settled((JOB, 0), step, False, 0))
        assert all(lane.heard(fx.ReportStep, JOB) for lane in (pair.a, pair.b))

    def _again(self, pair: Pair, shape: Shape) -> str:
        pair.tick()
        pair.a.open(JOB, shape, 1)
        pair.carry()
        pair.tick()
        if (JOB, 0) in pair.a.process.executor.domains:
            pair.a.push(JOB, 2)
        pair.carry()
        pair.tick()
        faults = pair.a.faults(JOB)
        assert set(faults) <= lanes.FAULTS, faults
        return faults[0] if faults else "stuck" if pair.a.outputs(JOB) is None else "went on"


def _spoil(path: Path, at: int, content: bytes) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        if content:
            file.seek(at)
            file.write(content)
        else:
            file.truncate(at)
