"""Products of a matrix with a thin one, in few passes over the matrix.

What may live here: the loops over blocks of rows and columns that powersgd's kernels are made of; no codec, no
layout, no state. Each streams the matrix once, whatever the rank: a strip of columns of a few rows is corrected by
the residual, or read, and serves all columns of the thin matrix while it is in the caches.

A thin matrix (rank columns of n float32) is exchanged and kept as its transpose, rank rows of n, and packed into
tiles (`pack`) for the products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcserver.codecs.casts import store_raw
from gcserver.codecs.jit import f32, hold, place
from gcserver.codecs.lowrank_tiles import (
    EXPANDED,
    GATHERED,
    PROJECTED,
    WIDE,
    WIDTH,
    expand_first4,
    expand_last4,
    expand_row1,
    expand_row2,
    expand_row4,
    expand_rows1,
    expand_rows2,
    expand_rows4,
    expand_whole1,
    expand_whole2,
    expand_whole4,
    gather_row1,
    gather_row2,
    gather_row4,
    gather_rows1,
    gather_rows2,
    gather_rows4,
    project_row1,
    project_row2,
    project_row4,
    project_rows1,
    project_rows2,
    project_rows4,
)
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32, Ops, elementwise

STRIP = 8192 // PROJECTED  #: columns worked on at a time, so that a block of rows stays in the caches for all ranks
#: float32 between the rows of a block: were they a multiple of 4 KiB apart, loads would wait for stores to others
GAP = 16
LINE = STRIP + GAP  #: float32 from row to row of such a block


def _corrected(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    # Without an old residual zeros are added all the same: -0 becomes 0 either way.
    kept = ops.b.fmul(values[1], scalars[1]) if len(values) > 1 else ops.const(F32, 0.0)
    value = ops.b.fadd(ops.b.fmul(values[0], scalars[0]), kept)
    ops.count(ops.nonfinite(value), 0)
    return [value]


_correct_both = elementwise([F32, F32], [F32], _corrected)
_correct_fresh = elementwise([F32], [F32], _corrected)


@njit(nogil=True)
def correct(x, r, v, n, scale, decay):
    """v = x*scale + r*decay for n elements (r = 0: no residual); the number of non-finite ones."""
    if r == 0:
        return _correct_fresh((x, v), n, (scale, decay))[0]
    return _correct_both((x, r, v), n, (scale, decay))[0]


@njit(nogil=True)
def packed(n, rank):
    """float32 elements of a packed thin matrix of rank columns of n."""
    return rank * ((n + WIDTH - 1) // WIDTH * WIDTH)


@njit(nogil=True)
def tile_width(rank, k):
    """Columns of the tile that begins at column k: 4, in the end 2 and 1."""
    return 4 if rank - k >= 4 else 2 if rank - k >= 2 else 1


@njit(nogil=True)
def pack(source, target, n, rank, back):
    """A thin matrix from its transpose at source (rank rows of n) to tiles at target, or back.

    A tile of w columns holds, for every `WIDTH` elements, those of the first column, of the next, ...: the kernels
    read it as one stream. Columns of their own would lie a multiple of 4 KiB apart and evict each other.
    """
    high = (n + WIDTH - 1) // WIDTH * WIDTH
    lines, tiles = f32(source, rank * n), f32(target, rank * high)
    k = 0
    while k < rank:
        width = tile_width(rank, k)
        for c in range(width):
            line, first = lines[(k + c) * n : (k + c + 1) * n], k * high + WIDTH * c
            for j in range(0, n, WIDTH):
                group = first + j * width
                for i in range(min(WIDTH, n - j)):
                    if back:
                        line[j + i] = tiles[group + i]
                    else:
                        tiles[group + i] = line[j + i]
        k += width


@njit(nogil=True)
def pack_array(source, target, n, rank):
    """`pack` of a kernel's own array (see `jit.place`)."""
    pack(place(source), target, n, rank, False)


@njit(nogil=True)
def project_rows(x, r, v, rows, n, q, rank, scale, decay, sums, block):
    """V = x*scale + r*decay for 1 or `PROJECTED` rows of n columns, and sums[i*rank + k] = (V Q)[i, k].

    q: packed; sums: float64[PROJECTED*(rank + 4)]; block: float32[PROJECTED*LINE] of scratch. Returns the number of
    non-finite elements of V, after which `ordered` is due.
    """
    sums[:] = 0.0
    part, high = sums[PROJECTED * rank :], packed(n, 1)
    bad = np.int64(0)
    for start in range(0, n, STRIP):
        size = min(STRIP, n - start)
        for i in range(rows):
            at = 4 * (i * n + start)
            line = place(block) + 4 * i * LINE
            bad += correct(x + at, 0 if r == 0 else r + at, line, size, scale, decay)
            put(line, v + at, size)
        matrix, k = (place(block), 4 * LINE), 0
        while k < rank:
            width = tile_width(rank, k)
            thin = q + 4 * (k * high + start * width)
            part[:] = 0.0
            if width == 4:
                if rows == PROJECTED:
                    project_rows4(matrix, thin, size, place(part))
                else:
                    project_row4(matrix, thin, size, place(part))
            elif width == 2:
                if rows == PROJECTED:
                    project_rows2(matrix, thin, size, place(part))
                else:
                    project_row2(matrix, thin, size, place(part))
            elif rows == PROJECTED:
                project_rows1(matrix, thin, size, place(part))
            else:
                project_row1(matrix, thin, size, place(part))
            for i in range(rows):
                for j in range(width):
                    sums[i * rank + k + j] += part[i * width + j]
            k += width
    return bad


@njit(nogil=True)
def gather_matrix(v, rows, n, p, q, rank):
    """Q (packed) = V^T P; p: P's transpose, rank rows of ``rows``."""
    high = packed(n, 1)
    f32(q, rank * high)[:] = np.float32(0.0)
    for start in range(0, n, STRIP):
        size, i = min(STRIP, n - start), 0
        while i < rows:
            step = GATHERED if rows - i >= GATHERED else 1
            matrix, k = (v + 4 * (i * n + start), 4 * n), 0
            while k < rank:
                width = tile_width(rank, k)
                left, thin = (p + 4 * (k * rows + i), 4 * rows), q + 4 * (k * high + start * width)
                if width == 4:
                    if step == GATHERED:
                        gather_rows4(matrix, left, thin, size)
                    else:
                        gather_row4(matrix, left, thin, size)
                elif width == 2:
                    if step == GATHERED:
                        gather_rows2(matrix, left, thin, size)
                    else:
                        gather_row2(matrix, left, thin, size)
                elif step == GATHERED:
                    gather_rows1(matrix, left, thin, size)
                else:
                    gather_row1(matrix, left, thin, size)
                k += width
            i += step


@njit(nogil=True)
def expand_matrix(out, v, rows, n, p, sums, own, rank, factor):
    """out = (P sums^T)*factor and v -= P own^T, matrices of rows x n; the non-finite elements of out.

    p: P's transpose, rank rows of ``rows``; sums, own: packed.
    """
    bad = np.int64(0)
    high = packed(n, 1)
    # Both thin matrices' strips are read again for every few rows, so they should stay in the second-level cache; four
    # rows of a longer one would fill the first.
    strip = 1024 if WIDE or rank > 16 else 2048 if rank > 8 else STRIP
    block = np.empty(EXPANDED * (strip + GAP), np.float32)
    line = 4 * (strip + GAP)
    for start in range(0, n, strip):
        size, i = min(strip, n - start), 0
        while i < rows:
            step = EXPANDED if rows - i >= EXPANDED else 1
            at = 4 * (i * n + start)
            target, rest, left = (place(block), line), (v + at, 4 * n), (p + 4 * i, 4 * rows)
            if step == EXPANDED and rank == 4:
                bad += expand_whole4(target, rest, left, sums + 16 * start, own + 16 * start, size, factor)
            elif step == EXPANDED and rank == 2:
                bad += expand_whole2(target, rest, left, sums + 8 * start, own + 8 * start, size, factor)
            elif step == EXPANDED and rank == 1:
                bad += expand_whole1(target, rest, left, sums + 4 * start, own + 4 * start, size, factor)
            elif step == EXPANDED and rank > 4 and rank % 4 == 0:
                bad += _expand_by_fours(target, rest, left, sums, own, start, size, high, rank, factor)
            else:
                bad += _expand_by_tiles(target, rest, left, sums, own, start, size, high, step, rank, factor)
            for row in range(step):
                put(place(block) + row * line, out + at + 4 * row * n, size)
            i += step
    ordered()
    hold(block)
    return bad


@njit(nogil=True)
def _expand_by_fours(target, rest, left, sums, own, start, size, high, rank, factor):
    """`_expand_by_tiles` of two and more tiles of four columns: without passes of their own for zeros and factor."""
    step, at = 16 * high, 16 * start
    expand_first4(target, rest, left, sums + at, own + at, size, factor)
    for k in range(4, rank - 4, 4):
        part, at = (left[0] + k * left[1], left[1]), at + step
        expand_rows4(target, rest, part, sums + at, own + at, size, factor)
    part, at = (left[0] + (rank - 4) * left[1], left[1]), at + step
    return expand_last4(target, rest, part, sums + at, own + at, size, factor)


@njit(nogil=True)
def _expand_by_tiles(target, rest, left, sums, own, start, size, high, rows, rank, factor):
    for row in range(rows):
        f32(target[0] + row * target[1], size)[:] = np.float32(0.0)
    k = 0
    while k < rank:
        width = tile_width(rank, k)
        at = 4 * (k * high + start * width)
        part = (left[0] + k * left[1], left[1])
        if width == 4:
            if rows == EXPANDED:
                expand_rows4(target, rest, part, sums + at, own + at, size, factor)
            else:
                expand_row4(target, rest, part, sums + at, own + at, size, factor)
        elif width == 2:
            if rows == EXPANDED:
                expand_rows2(target, rest, part, sums + at, own + at, size, factor)
            else:
                expand_row2(target, rest, part, sums + at, own + at, size, factor)
        elif rows == EXPANDED:
            expand_rows1(target, rest, part, sums + at, own + at, size, factor)
        else:
            expand_row1(target, rest, part, sums + at, own + at, size, factor)
        k += width
    bad = np.int64(0)
    for row in range(rows):
        line = target[0] + row * target[1]
        bad += store_raw((line, line), size, (np.float64(factor),))[0]
    return bad
