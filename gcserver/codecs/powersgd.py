"""powersgd: a gradient matrix as the product of two thin ones (Vogels et al. 2019, algorithm 1), in two rounds.

What may live here: the codec, where its pieces lie in payloads, state and scratch, and the kernels that walk over
segments. Products are `lowrank`'s, Gram-Schmidt is `orthonormal`'s, the interface of two rounds `tworounds`'.

One step, on every node, for a matrix V (rows x cols, gradient plus residual) and the warm Q (cols x rank):
    begin   P = V Q                              -> payload 0; all nodes' P are summed
    middle  P^ = orthonormalise(sum P)           Q = V^T P^ -> payload 1; all nodes' Q are summed
    finish  result = P^ (sum Q)^T / divisor      residual = V - P^ Q^T      warm Q = sum Q
Both payloads are plain float32 vectors and sum like uncompressed gradients (in member order): P and Q are
all-reducible. P^, the result and the warm Q come from summed bytes alone, by arithmetic whose order is fixed,
so all nodes hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit

from gcserver.codecs.base import F32, I64, U8, U32, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.casts import store_raw
from gcserver.codecs.chance import bits64
from gcserver.codecs.jit import address, f32, f32_address, i64, kernel, place, u8_address
from gcserver.codecs.lowrank import (
    STRIP,
    correct,
    expand_matrix,
    gather_matrix,
    pack,
    pack_array,
    packed,
    project_rows,
)
from gcserver.codecs.lowrank_tiles import WIDTH
from gcserver.codecs.orthonormal import orthonormalise
from gcserver.codecs.stream import ordered
from gcserver.codecs.tworounds import Shape, TwoRounds

RANKS = (1, 64)
#: the level of a segment that is sent as it is: larger than any rank at which one could be compressed
WHOLE = RANKS[1] + 1
#: columns of the table the kernels walk, one row a segment
FIRST, ROWS, COLS, RANK, ROOM, PAY0, PAY1, STATE, LEFT, OWN = range(10)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pieces of each segment lie, in float32 elements; the same on all nodes.

    table: int64[m*10]. FIRST: in the gradient; ROWS, COLS; RANK: 0 if sent as it is; ROOM: rows of its warm Q in the
    state; PAY0, PAY1: in the payloads (P^T: rank rows of ROWS, or the segment itself; Q^T: rank rows of COLS); STATE:
    of the warm Q^T, behind the residual; LEFT, OWN: in work, of P^^T (or the segment's sum) and of the node's own
    Q, packed.
    """

    n: int
    table: I64
    pay0: int
    pay1: int
    state: int
    work: int


def largest_rank(rows: int, cols: int, rank: int) -> int:
    """The largest rank up to ``rank`` with 2*rank*(rows + cols) < rows*cols (P and Q save half); 0 if none."""
    if rows * cols == 0:
        return 0
    return max(0, min(rank, -(-rows * cols // (2 * (rows + cols))) - 1))


@lru_cache(maxsize=4096)
def layout(shapes: tuple[Shape, ...], rank: int, ranks: tuple[int, ...] | None) -> Layout:
    """The layout of segments of these shapes; ranks: each one's own (at most ``rank``, or WHOLE), None for ``rank``."""
    rows = []
    first = pay0 = pay1 = state = work = 0
    for i, (high, wide) in enumerate(shapes):
        room = largest_rank(high, wide, rank)
        wanted = rank if ranks is None else ranks[i]
        used = wanted if wanted <= room else 0
        n = high * wide if wide else high
        left, own = (used * high, used * wide) if used else (n, 0)
        # A state must not move when levels change: it has room for the largest.
        rows.append((first, high, wide, used, room, pay0, pay1, state, work, work + left))
        first, pay0, pay1, state = first + n, pay0 + left, pay1 + own, state + room * wide
        work += left + used * (-(-wide // WIDTH) * WIDTH)
    return Layout(first, np.array(rows, np.int64).reshape(-1), pay0, pay1, state, work)


@njit(nogil=True)
def shrink(n):
    """The power of two by which n numbers below 1 are to be multiplied so that their sum stays below 1."""
    factor = 1.0
    while n > 1:
        n = (n + 1) // 2
        factor *= 0.5
    return factor


@njit(nogil=True)
def warm_columns(old, new, n, rank, seed, segment):
    """new (packed) = the rank warm columns of n at old (0: none); a column of zeros is drawn afresh."""
    columns, own_seed = np.empty(rank * n, np.float32), np.int64(bits64(seed, segment) >> np.uint64(1))
    for k in range(rank):
        target, alive = columns[k * n : (k + 1) * n], False
        if old != 0:
            source = f32(old + 4 * k * n, n)
            for j in range(n):
                target[j] = source[j]
                alive |= source[j] != 0.0
        if not alive:
            factor = shrink(n) * 2.0**-23
            for j in range(n):
                # 24 bits: a number in [-1, 1) that float32 holds exactly.
                drawn = np.int64(bits64(own_seed, k * n + j) >> np.uint64(40)) - (1 << 23)
                target[j] = np.float32(np.float64(drawn) * factor)
    pack_array(columns, new, n, rank)


@njit(nogil=True)
def keep_columns(sums, new, n, rank, room):
    """new = the columns of the aggregated Q, each times a power of two so that no later V Q can overflow; rest 0.

    Powers of two only: they scale the columns of P, which is orthonormalised anyway, and change no bit of P^.
    """
    for k in range(room):
        target, largest = f32(new + 4 * k * n, n), np.float32(0.0)
        if k < rank:
            source = f32(sums + 4 * k * n, n)
            for j in range(n):
                largest = max(largest, abs(source[j]))
        if largest > 0.0 and np.isfinite(largest):
            factor = math.ldexp(1.0, -math.frexp(np.float64(largest))[1]) * shrink(n)
            for j in range(n):
                target[j] = np.float32(np.float64(source[j]) * factor)
        else:
            target[:] = np.float32(0.0)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, float64, float64, int64)")
def powersgd_begin(x, r, v, q, work, out, table, m, scale, decay, seed):
    """V and the payload of round 0; r, q: 0 for none. Returns the non-finite elements of V."""
    rows_of, bad = i64(table, 10 * m), 0
    block = np.empty(2 * STRIP, np.float32)
    for s in range(m):
        row = rows_of[10 * s : 10 * s + 10]
        first, rows, cols, rank = row[FIRST], row[ROWS], row[COLS], row[RANK]
        source, target = x + 4 * first, out + 4 * row[PAY0]
        old = 0 if r == 0 else r + 4 * first
        if rank == 0:
            n = rows * cols if cols > 0 else rows
            bad += correct(source, old, target, n, scale, decay)
            f32(v + 4 * first, n)[:] = np.float32(0.0)
            continue
        thin = work + 4 * row[OWN]
        warm_columns(0 if q == 0 else q + 4 * row[STATE], thin, cols, rank, seed, s)
        left, sums = f32(target, rank * rows), np.empty(2 * rank + 8, np.float64)
        for i in range(0, rows, 2):
            step, at = min(2, rows - i), 4 * i * cols
            before = 0 if old == 0 else old + at
            place_of_v = v + 4 * first + at
            bad += project_rows(source + at, before, place_of_v, step, cols, thin, rank, scale, decay, sums, block)
            for k in range(rank):
                for j in range(step):
                    left[k * rows + i + j] = np.float32(sums[j * rank + k])
    ordered()
    return bad


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def powersgd_middle(aggregate, v, work, out, table, m):
    """P^ and the payload of round 1 from the sum of P; returns its non-finite elements."""
    rows_of, bad = i64(table, 10 * m), 0
    for s in range(m):
        row = rows_of[10 * s : 10 * s + 10]
        rows, cols, rank = row[ROWS], row[COLS], row[RANK]
        source, left, own = aggregate + 4 * row[PAY0], work + 4 * row[LEFT], work + 4 * row[OWN]
        if rank == 0:
            bad += store_raw((source, left), rows * cols if cols > 0 else rows, (1.0,))[0]
            continue
        orthonormalise(source, left, rows, rank)
        gather_matrix(v + 4 * row[FIRST], rows, cols, left, own, rank)
        target = out + 4 * row[PAY1]
        pack(target, own, cols, rank, True)
        bad += store_raw((target, target), rank * cols, (1.0,))[0]
    return bad


@njit(nogil=True)
def _expand(target, v, rows, cols, left, sums, scratch, own, rank, factor):
    """`lowrank.expand_matrix` of the sums, packed into the array scratch."""
    pack(sums, place(scratch), cols, rank, False)
    return expand_matrix(target, v, rows, cols, left, place(scratch), own, rank, factor)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, float64)")
def powersgd_finish(aggregate, v, work, q, out, table, m, factor):
    """The result, V turned into the residual and the next Q (q: 0 to drop it); the result's non-finite elements."""
    rows_of, bad, factor32 = i64(table, 10 * m), 0, np.float32(factor)
    for s in range(m):
        row = rows_of[10 * s : 10 * s + 10]
        rows, cols, rank = row[ROWS], row[COLS], row[RANK]
        target, left = out + 4 * row[FIRST], work + 4 * row[LEFT]
        sums = aggregate + 4 * row[PAY1]
        if rank == 0:
            bad += store_raw((left, target), rows * cols if cols > 0 else rows, (factor,))[0]
        else:
            own, all_ = work + 4 * row[OWN], np.empty(packed(cols, rank), np.float32)
            bad += _expand(target, v + 4 * row[FIRST], rows, cols, left, sums, all_, own, rank, factor32)
        if q != 0:
            keep_columns(sums, q + 4 * row[STATE], cols, rank, row[ROOM])
    return bad


@register
class PowerSgd(TwoRounds):
    """Rank-r approximation with a warm start and error feedback; vectors and small matrices are sent as they are.

    A segment is compressed where 2*rank*(rows + cols) < rows*cols. Its level is its own rank, up to the codec's, or
    WHOLE.
    """

    id, name = 64, "powersgd"
    params = (Param("rank", 4, *RANKS, "columns of P and Q", integer=True),)
    keeps_residual = True
    units = "sum"
    conserves = True
    levels = RANKS
    exact = WHOLE

    rank: int

    def configure(self, rank: float = 4) -> None:
        self.rank = self.level = int(rank)
        #: of single segments: their state has room for the codec's rank
        self.levels = (RANKS[0], self.rank)  # type: ignore[misc]

    def values(self) -> dict[str, float | str]:
        return {"rank": self.rank}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        if not RANKS[0] <= level <= RANKS[1]:
            raise CodecError("level", f"{RANKS[0]}..{RANKS[1]} for powersgd (the rank)", level)
        return cls(rank=level)

    def payload_floats(self, stage: int, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        where = self._layout(shapes, levels)
        return where.pay1 if stage else where.pay0

    def work_floats(self, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """What P^, the sums of uncompressed segments and the node's own Q take; without error feedback V too."""
        where = self._layout(shapes, levels)
        return where.work + (0 if self.error_feedback else where.n)

    def state_floats(self, n: int, segments: int = 1, shapes: Sequence[Shape] | None = None) -> int:
        """The residual, then the warm Q of each segment (room for the codec's rank; below n/2 together)."""
        residual = n if self.error_feedback else 0
        return residual + (n // 2 if shapes is None else self._layout(shapes, None).state)

    def _layout(self, shapes: Sequence[Shape], levels: U32 | None) -> Layout:
        if levels is None:
            return layout(tuple(shapes), self.rank, None)
        address("levels", levels, np.dtype(np.uint32), len(shapes))
        ranks = tuple(levels.tolist())
        wrong = [r for r in ranks if not RANKS[0] <= r <= self.rank and r != WHOLE]
        if wrong or len(ranks) != len(shapes):
            wanted = f"ranks up to the codec's, {self.rank}, or {WHOLE} for what is sent whole, one a segment"
            raise CodecError("levels", wanted, wrong[0] if wrong else f"{len(ranks)} for {len(shapes)} segments")
        return layout(tuple(shapes), self.rank, ranks)

    def _open(self, segments: I64, shapes: Sequence[Shape], levels: U32 | None) -> Layout:
        where = self._layout(shapes, levels)
        bounds = [0]
        for rows, cols in shapes:
            if rows < 0 or cols < 0:
                raise CodecError("shapes", "(rows, cols), neither negative", (rows, cols))
            bounds.append(bounds[-1] + (rows * cols if cols else rows))
        if segments is None or segments.tolist() != bounds:
            got = None if segments is None else segments[:8].tolist()
            raise CodecError("segments", f"the boundaries of the shapes, {bounds[:8]}", got)
        return where

    def _memory(self, where: Layout, state_out: F32 | None, work: F32) -> tuple[int, int, int]:
        """Addresses of V, of the warm Q to write, and of what work holds besides V."""
        floats = where.work + (0 if self.error_feedback else where.n)
        scratch = address("work", work, np.dtype(np.float32), floats, write=True)
        kept = where.state + (where.n if self.error_feedback else 0)
        if state_out is None:
            if self.error_feedback:
                raise CodecError("state_out", f"float32[{kept}]", "None", "V lies in it between the rounds")
            return scratch + 4 * where.work, 0, scratch
        state = f32_address("state_out", state_out, kept, write=True)
        if self.error_feedback:
            return state, state + 4 * where.n, scratch
        return scratch + 4 * where.work, state, scratch

    def begin(
        self,
        x: F32,
        state_in: F32 | None,
        state_out: F32 | None,
        work: F32,
        out: U8,
        segments: I64,
        shapes: Sequence[Shape],
        scale: float = 1.0,
        seed: int = 0,
        levels: U32 | None = None,
    ) -> Encoded:
        where = self._open(segments, shapes, levels)
        px = f32_address("x", x, where.n)
        v, new, scratch = self._memory(where, state_out, work)
        residual = warm = 0
        if state_in is not None:
            start = f32_address("state_in", state_in, where.state + (where.n if self.error_feedback else 0))
            residual, warm = (start, start + 4 * where.n) if self.error_feedback else (0, start)
            if state_in.size and state_out is not None and start == min(v, new):
                raise CodecError("state_out", "memory of its own (versions, not updates in place)", "an input's")
        target = u8_address("out", out, 4 * where.pay0, write=True)
        m = len(shapes)
        bad = powersgd_begin(
            px, residual, v, warm, scratch, target, where.table.ctypes.data, m, float(scale), float(self.decay), seed
        )
        return Encoded(4 * where.pay0, bad)

    def middle(
        self,
        aggregate: F32,
        state_out: F32 | None,
        work: F32,
        out: U8,
        segments: I64,
        shapes: Sequence[Shape],
        levels: U32 | None = None,
    ) -> Encoded:
        where = self._open(segments, shapes, levels)
        v, _, scratch = self._memory(where, state_out, work)
        source = f32_address("aggregate", aggregate, where.pay0)
        target = u8_address("out", out, 4 * where.pay1, write=True)
        bad = powersgd_middle(source, v, scratch, target, where.table.ctypes.data, len(shapes))
        return Encoded(4 * where.pay1, bad)

    def finish(
        self,
        aggregate: F32,
        state_out: F32 | None,
        work: F32,
        out: F32,
        segments: I64,
        shapes: Sequence[Shape],
        divisor: float,
        levels: U32 | None = None,
    ) -> int:
        where = self._open(segments, shapes, levels)
        v, warm, scratch = self._memory(where, state_out, work)
        source = f32_address("aggregate", aggregate, where.pay1)
        target = f32_address("out", out, where.n, write=True)
        if where.n and target == v:
            raise CodecError("out", "memory of its own", "state_out's")
        factor = float(np.float32(1.0 / divisor))
        table = where.table.ctypes.data
        return int(powersgd_finish(source, v, scratch, warm, target, table, len(shapes), factor))
