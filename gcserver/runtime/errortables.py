"""What each level of a family of codecs would lose of a running job's gradients.

What may live here: which elements of a tensor are looked at, errors summed over samples, and the tables for planners.
What may not: where gradients are (`peek.py`), how a family's errors are computed (`gcserver.planner.errors_*`).

A sample is what is encoded at that moment, gradient and residual together. L-GreCo (section 4) adds gradients up
instead, because it cannot see residuals. Of several samples the root of the mean square counts. Errors are in the units
of the mean over all ranks, so that the owner's, which arise once, can be added to the contributions' (`with_owner`).

Large tensors are not read as a whole:
    topk, sidco   every so-and-so-many-th element, at most SPOTS; the distance has no factor in common with a row's
                  length, or the same columns would be looked at again and again
    qsgd          whole buckets, evenly spread, at most SPOTS elements
    powersgd      whole rows, evenly spread, at most AREA elements and never below ROWS rows; where these have more than
                  WIDE elements, of their columns so many, evenly spread
Squared errors are then multiplied by elements over those looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gcserver.planner import errors_lowrank, errors_quantised, errors_sparse
from gcserver.planner.errors import F32, F64, I64, LevelTable, quantiser_levels, sparse_levels
from gcserver.planner.profile import LevelErrors
from gcserver.runtime.peek import Peek, PeekTensor

SPOTS: Final = 1 << 18
AREA: Final = 1 << 20
ROWS: Final = 256
WIDE: Final = 1 << 22
BUCKET: Final = 1024
#: A plan waits for the sample: CPU time may take so many times as long.
STRETCH: Final = 4.0
#: levels of each family unless others are asked for: ratios 0.1 % to 10 %, bits 2 to 8, ranks 1 to 32, which differ the
#: less by one more the higher they are
LEVELS: Final[Mapping[str, I64]] = {
    "topk": sparse_levels(10_000, 9),
    "sidco": sparse_levels(10_000, 9),
    "qsgd": quantiser_levels(4),
    "powersgd": np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32], np.int64),
}


@dataclass(slots=True)
class Squares:
    """Squared errors at each level, summed over samples: of contributions, and of what owners encode."""

    sent: Any
    owned: Any
    samples: int = 0
    owned_samples: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """Which elements of a tensor (None: all), as what shape, and how many they stand for."""

    picks: I64 | None
    shape: tuple[int, ...]
    factor: float


@dataclass(slots=True)
class ErrorTables:
    """Samples of one domain. ``levels``: by family, of the names in LEVELS. ``clock``: by default CPU time, since
    whoever looks gives way to the training; ``wall`` is the time that passes meanwhile."""

    peek: Peek
    levels: Mapping[str, I64] = field(default_factory=lambda: dict(LEVELS))
    clock: Callable[[], float] = time.thread_time
    wall: Callable[[], float] = time.monotonic
    #: names of tensors that may wait until all others have been looked at
    later: Collection[str] = ()
    _sums: dict[tuple[str, str], Squares] = field(default_factory=dict)
    _looks: dict[tuple[str, str], Look] = field(default_factory=dict)
    _next: int = 0

    def sample(self, seconds: float) -> int:
        """Look at as many tensors as ``seconds`` allow, one at least, each once, the largest first; the next call goes
        on from there. No more than `STRETCH` times as long passes, however busy the cores.

        Returns how many were looked at. Raises `JobGone`, `PeekError`.
        """
        self.peek.alive()
        until, latest = self.clock() + seconds, self.wall() + STRETCH * seconds
        tensors = sorted(self.peek.tensors, key=lambda t: (t.name in self.later, -t.elements))
        for done in range(len(tensors)):
            if done and (self.clock() >= until or self.wall() >= latest):
                return done
            self._look_at(tensors[self._next % len(tensors)])
            self._next += 1
        return len(tensors)

    def tables(self) -> dict[str, tuple[LevelErrors, ...]]:
        """By family, of the tensors that were looked at, in the order of the domain."""
        found = {}
        for family, levels in self.levels.items():
            seen = [t for t in self.peek.tensors if (family, t.name) in self._sums]
            if seen:
                found[family] = _rows(self._table(family, levels, seen))
        return found

    def _look_at(self, tensor: PeekTensor) -> None:
        c = self.peek.config
        # a contribution is a sum of the local ranks, and there is one of each member
        weight = np.float32(len(c.members) / c.divisor)
        for family, levels in self.levels.items():
            key = (family, tensor.name)
            look = self._looks.get(key)
            if look is None:
                look = self._looks[key] = _look(family, tensor.shape)
            reading = self.peek.read(tensor, look.picks)
            if reading is None:
                return
            sent = _errors(family, (reading.contribution * weight).reshape(look.shape), levels)
            if not np.isfinite(sent).all():
                continue
            sums = self._sums.setdefault(key, Squares(np.zeros(levels.size), np.zeros(levels.size)))
            sums.sent += look.factor * sent**2
            sums.samples += 1
            if family == "powersgd" or reading.outcome is None:
                continue
            owned = _errors(family, reading.outcome.reshape(look.shape), levels)
            if np.isfinite(owned).all():
                sums.owned += look.factor * owned**2
                sums.owned_samples += 1

    def _table(self, family: str, levels: I64, tensors: list[PeekTensor]) -> LevelTable:
        all_sums = [self._sums[family, t.name] for t in tensors]
        sent = np.array([s.sent / s.samples for s in all_sums])
        names, default = tuple(t.name for t in tensors), np.zeros(len(tensors), np.int64)
        table = LevelTable(
            names, levels, np.array([_bytes(family, t, levels) for t in tensors]), np.sqrt(sent), default
        )
        told = [i for i, s in enumerate(all_sums) if s.owned_samples]
        if not told:
            return table
        # Where nothing can be told of the owner's loss, it is taken to be the same share as of all others.
        mean = {i: all_sums[i].owned / all_sums[i].owned_samples for i in told}
        whole = sum(sent[i] for i in told)
        share = np.divide(sum(mean.values()), whole, out=np.zeros(levels.size), where=whole > 0)
        owned = np.array([mean[i] if i in mean else share * sent[i] for i in range(len(tensors))])
        return table.with_owner(LevelTable(names, levels, table.sizes, np.sqrt(owned), default))


def _rows(table: LevelTable) -> tuple[LevelErrors, ...]:
    levels = tuple(int(level) for level in table.levels)
    return tuple(
        LevelErrors(name, levels, tuple(map(float, errors)), tuple(map(float, sizes)))
        for name, errors, sizes in zip(table.names, table.errors, table.sizes, strict=True)
    )


def _look(family: str, shape: tuple[int, ...]) -> Look:
    n = math.prod(shape)
    if family == "powersgd":
        rows, cols = errors_lowrank.matrix_shape(shape)
        if not cols:  # sent as it is: nothing of it is lost, so that a few elements tell as much as all
            few = min(n, ROWS)
            return Look(np.arange(few, dtype=np.int64), (few,), n / max(few, 1))
        used = min(rows, max(ROWS, AREA // cols))
        wide = min(cols, max(WIDE // used, 1))
        if (used, wide) == (rows, cols):
            return Look(None, shape, 1.0)
        picked = np.arange(used, dtype=np.int64) * rows // used
        columns = np.arange(wide, dtype=np.int64) * cols // wide
        return Look((picked[:, None] * cols + columns).reshape(-1), (used, wide), rows / used * (cols / wide))
    if n <= SPOTS:
        return Look(None, (n,), 1.0)
    if family == "qsgd":
        buckets = SPOTS // BUCKET
        picked = np.arange(buckets, dtype=np.int64) * (n // BUCKET) // buckets
        picks = (picked[:, None] * BUCKET + np.arange(BUCKET)).reshape(-1)
    else:
        step = -(-n // SPOTS)
        while math.gcd(step, shape[-1]) > 1:
            step += 1
        picks = np.arange(0, n, step, dtype=np.int64)
    return Look(picks, (picks.size,), n / picks.size)


def _errors(family: str, x: F32, levels: I64) -> F64:
    if family == "powersgd":
        return errors_lowrank.lowrank_errors(x, levels)
    if family == "qsgd":
        return errors_quantised.qsgd_errors(x, levels, BUCKET)
    return errors_sparse.sparse_errors(x, levels, estimated=family == "sidco")


def _bytes(family: str, tensor: PeekTensor, levels: I64) -> F64:
    if family == "powersgd":
        return errors_lowrank.lowrank_bytes(tensor.shape, levels)
    if family == "qsgd":
        return errors_quantised.qsgd_bytes(tensor.elements, levels, BUCKET)
    return errors_sparse.sparse_bytes(tensor.elements, levels)
