"""What powersgd computes of a partition's segments in each of its three calls, and where the pieces of a segment lie.

What may live here: the table of segments that all three walk, and the kernels. No interface, no checks of arrays
(`powersgd`); products are `lowrank`'s, Gram-Schmidt is `orthonormal`'s, rounding `factors`'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit

from gcserver.codecs.base import I64
from gcserver.codecs.casts import store_raw
from gcserver.codecs.chance import bits64
from gcserver.codecs.factors import rounded
from gcserver.codecs.jit import f32, i64, kernel, place
from gcserver.codecs.lowrank import (
    LINE,
    correct,
    expand_matrix,
    gather_matrix,
    pack,
    pack_array,
    packed,
    project_rows,
)
from gcserver.codecs.lowrank_tiles import PROJECTED, WIDTH
from gcserver.codecs.orthonormal import orthonormalise
from gcserver.codecs.stream import ordered
from gcserver.codecs.tworounds import Shape

#: columns of the table the kernels walk, one row a segment
FIRST, ROWS, COLS, RANK, ROOM, PAY0, PAY1, STATE, LEFT, OWN = range(10)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pieces of each segment lie, in float32 elements; the same on all nodes.

    table: int64[m*10]. FIRST: in the gradient; ROWS, COLS; RANK: 0 if sent as it is; ROOM: rows of its warm Q in the
    state; PAY0, PAY1: in the payloads (P^T: rank rows of ROWS, or the segment itself; Q^T: rank rows of COLS); STATE:
    of the warm Q^T, behind the residual; LEFT, OWN: in work, of P^^T (or the segment's sum) and of the node's own
    Q, packed. whole: elements of segments that are sent as they are; they come first in payload 0 of a narrow layout.
    """

    n: int
    table: I64
    whole: int
    pay0: int
    pay1: int
    state: int
    work: int

    def sent(self, stage: int) -> tuple[int, int]:
        """(elements of the vector of round 0 or 1, how many of them are sent as they are)."""
        return (self.pay1, 0) if stage else (self.pay0, self.whole)


def largest_rank(rows: int, cols: int, rank: int) -> int:
    """The largest rank up to ``rank`` with 2*rank*(rows + cols) < rows*cols (P and Q save half); 0 if none."""
    if rows * cols == 0:
        return 0
    return max(0, min(rank, -(-rows * cols // (2 * (rows + cols))) - 1))


@lru_cache(maxsize=4096)
def layout(shapes: tuple[Shape, ...], rank: int, ranks: tuple[int, ...] | None, narrow: bool = False) -> Layout:
    """The layout of segments of these shapes; ranks: each one's own (at most ``rank``, or WHOLE), None for ``rank``."""
    rooms = [largest_rank(high, wide, rank) for high, wide in shapes]
    wanted = (rank,) * len(shapes) if ranks is None else ranks
    ranked = [own if own <= room else 0 for own, room in zip(wanted, rooms, strict=True)]
    sizes = [high * wide if wide else high for high, wide in shapes]
    whole = sum(n for n, used in zip(sizes, ranked, strict=True) if not used)
    rows = []
    first = pay1 = state = work = 0
    # In payload 0 of a narrow layout what is sent as it is has a part of its own, before all else.
    pay0 = [whole if narrow else 0, 0]
    for (high, wide), room, used, n in zip(shapes, rooms, ranked, sizes, strict=True):
        left, own = (used * high, used * wide) if used else (n, 0)
        part = int(narrow and not used)
        # A state must not move when levels change: it has room for the largest.
        rows.append((first, high, wide, used, room, pay0[part], pay1, state, work, work + left))
        first, pay1, state = first + n, pay1 + own, state + room * wide
        pay0[part] += left
        work += left + used * (-(-wide // WIDTH) * WIDTH)
    return Layout(first, np.array(rows, np.int64).reshape(-1), whole, pay0[0], pay1, state, work)


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
    block = np.empty(PROJECTED * LINE, np.float32)
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
        left, sums = f32(target, rank * rows), np.empty(PROJECTED * (rank + 4), np.float64)
        i = 0
        while i < rows:
            step, at = PROJECTED if rows - i >= PROJECTED else 1, 4 * i * cols
            before = 0 if old == 0 else old + at
            place_of_v = v + 4 * first + at
            bad += project_rows(source + at, before, place_of_v, step, cols, thin, rank, scale, decay, sums, block)
            for k in range(rank):
                for j in range(step):
                    left[k * rows + i + j] = np.float32(sums[j * rank + k])
            i += step
    ordered()
    return bad


@kernel("int64(int64, int64, int64, int64, int64, int64, boolean)")
def powersgd_middle(aggregate, v, work, out, table, m, narrow):
    """P^ and the vector of round 1, as it is sent if ``narrow``, from the sum of P; returns its non-finite elements."""
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
        if narrow:
            bad += rounded(target, rank * cols)
            pack(target, own, cols, rank, False)
        else:
            bad += store_raw((target, target), rank * cols, (1.0,))[0]
    return bad


@njit(nogil=True)
def take_back(own, exact, sums, n, rank):
    """own (packed) -= exact - sums, rank columns of n each: what is missing in the sums is as if never sent."""
    wide, told = f32(exact, rank * n), f32(sums, rank * n)
    missing, tiles = np.empty(rank * n, np.float32), np.empty(packed(n, rank), np.float32)
    for j in range(rank * n):
        missing[j] = wide[j] - told[j]
    # the tiles' ends are nobody's columns, but are read
    tiles[:] = np.float32(0.0)
    pack_array(missing, place(tiles), n, rank)
    kept = f32(own, packed(n, rank))
    for j in range(kept.size):
        kept[j] -= tiles[j]


@njit(nogil=True)
def _expand(target, v, rows, cols, left, sums, scratch, own, rank, factor):
    """`lowrank.expand_matrix` of the sums, packed into the array scratch."""
    pack(sums, place(scratch), cols, rank, False)
    return expand_matrix(target, v, rows, cols, left, place(scratch), own, rank, factor)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, float64)")
def powersgd_finish(aggregate, exact, v, work, q, out, table, m, factor):
    """The result, V turned into the residual and the next Q (q: 0 to drop it); the result's non-finite elements.

    exact: the sum before it was rounded, 0: it was not, or not here.
    """
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
            if exact != 0:
                take_back(own, exact + 4 * row[PAY1], sums, cols, rank)
            bad += _expand(target, v + 4 * row[FIRST], rows, cols, left, sums, all_, own, rank, factor32)
        if q != 0:
            keep_columns(sums, q + 4 * row[STATE], cols, rank, row[ROOM])
    return bad
