"""Vector code of the products of a block of rows with a few columns, for `lowrank`'s loops.

What may live here: intrinsics that keep rows x ranks accumulators in registers, and the two ways they address
memory. No loop over blocks, no decision which tile to use.

`project` and `gather` read a node's own matrix and their result is exchanged as it is: they may fuse
multiply and add where the CPU can. What `expand` writes to ``out`` every node computes for itself from
the same bytes: there nothing is fused, and the order of every sum is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gcserver.codecs.jit import compiled_for
from gcserver.codecs.vector import F32, F64, I8, I32, I64, Ops, intrinsic

#: Tiles of accumulators must fit the registers: AVX-512 has 32 of 16 float32, AVX2 16 of 8.
WIDE = "avx512f" in compiled_for()
#: Columns are swept by vectors of so many float32, what is left of them by shorter ones.
_WIDTHS = (16, 8, 1) if WIDE else (8, 1)
WIDTH = _WIDTHS[0]
#: Rows of a tile of each product; what is left of a matrix is done row by row.
PROJECTED, GATHERED, EXPANDED = (4, 8, 4) if WIDE else (2, 8, 2)


class _Rows:
    """Addresses of elements of a float32 matrix given as (base, bytes from row to row)."""

    def __init__(self, b: Any, pair: Any) -> None:
        base, self.stride = cgutils.unpack_tuple(b, pair)
        self.b, self.base = b, b.inttoptr(base, I8.as_pointer())

    def at(self, row: int, column: Any) -> Any:
        b = self.b
        return b.gep(self.base, [b.add(b.mul(self.stride, I64(row)), b.mul(column, I64(4)))])


class _Tile:
    """Addresses of elements of a packed tile of ``ranks`` columns at ``base``; see `pack`."""

    def __init__(self, b: Any, base: Any, ranks: int) -> None:
        self.b, self.base, self.ranks = b, b.inttoptr(base, I8.as_pointer()), ranks

    def at(self, k: int, row: Any) -> Any:
        b = self.b
        group = b.mul(b.and_(row, I64(-WIDTH)), I64(4 * self.ranks))
        lane = b.mul(b.and_(row, I64(WIDTH - 1)), I64(4))
        return b.gep(self.base, [b.add(b.add(group, lane), I64(4 * WIDTH * k))])


def _sweep(b: Any, n: Any, run: Callable[[Ops, Any, Any], None]) -> None:
    """run(ops, start, stop) for the whole vectors of n elements, then for the rest, in the end one by one."""
    start: Any = I64(0)
    for width in _WIDTHS:
        stop = b.add(start, b.and_(b.sub(n, start), I64(-width)))
        with b.if_then(b.icmp_signed("<", start, stop), likely=width == WIDTH):
            run(Ops(b, width), start, stop)
        start = stop


def _fused(ops: Ops, x: Any, y: Any, z: Any) -> Any:
    """x*y + z, in one rounding where the CPU has an instruction for it."""
    vector = ops.type(F32)
    function = cgutils.get_or_insert_function(
        ops.b.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{ops.width}f32"
    )
    return ops.b.call(function, [x, y, z])


def _sum_lanes(ops: Ops, value: Any) -> Any:
    """The lanes of a vector added in halves."""
    b, width = ops.b, ops.width
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(I32, width), [first + i for i in range(width)]) for first in (0, width))
        value = b.fadd(b.shuffle_vector(value, value, low), b.shuffle_vector(value, value, high))
    return b.extract_element(value, I32(0))


def _splat_load(ops: Ops, pointer: Any) -> Any:
    return ops.splat(ops.b.load(ops.b.bitcast(pointer, F32.as_pointer()), align=1))


_PAIR = types.UniTuple(types.int64, 2)


def project(rows: int, ranks: int) -> Any:
    """An intrinsic ``f(v, q, n, sums)``: sums[i*ranks + k] += sum over n columns of V[i,:]*Q[:,k].

    v: (address, row stride in bytes); q: address of a packed tile; sums: address of float64[rows*ranks].
    """

    @intrinsic
    def tile(typingctx: Any, v: Any, q: Any, n: Any, sums: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            matrix, thin = _Rows(b, args[0]), _Tile(b, args[1], ranks)
            target = b.inttoptr(args[3], F64.as_pointer())

            def run(ops: Ops, start: Any, stop: Any) -> None:
                zero = ops.const(F32, 0.0)
                totals = [[cgutils.alloca_once(b, zero.type) for _ in range(ranks)] for _ in range(rows)]
                for row in totals:
                    for total in row:
                        b.store(zero, total)
                with cgutils.for_range_slice(b, start, stop, I64(ops.width), inc=True) as (j, _):
                    factors = [ops.load(thin.at(k, j), F32) for k in range(ranks)]
                    for i, row in enumerate(totals):
                        value = ops.load(matrix.at(i, j), F32)
                        for factor, total in zip(factors, row, strict=True):
                            b.store(_fused(ops, value, factor, b.load(total)), total)
                for place_, total in enumerate(total for row in totals for total in row):
                    where = b.gep(target, [I64(place_)])
                    wide = b.fpext(_sum_lanes(ops, b.load(total)), F64)
                    b.store(b.fadd(b.load(where), wide), where)

            _sweep(b, args[2], run)
            return context.get_dummy_value()

        return types.void(_PAIR, types.int64, types.int64, types.int64), codegen

    return tile


def gather(rows: int, ranks: int) -> Any:
    """An intrinsic ``f(v, p, q, n)``: Q[:,k] += sum over rows i of P[i,k]*V[i,:], for n columns of V.

    v, p (the transpose): (address, row stride in bytes); q: address of a packed tile.
    """

    @intrinsic
    def tile(typingctx: Any, v: Any, p: Any, q: Any, n: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            matrix, left, thin = _Rows(b, args[0]), _Rows(b, args[1]), _Tile(b, args[2], ranks)

            def run(ops: Ops, start: Any, stop: Any) -> None:
                factors = [[_splat_load(ops, left.at(k, I64(i))) for i in range(rows)] for k in range(ranks)]
                with cgutils.for_range_slice(b, start, stop, I64(ops.width), inc=True) as (j, _):
                    values = [ops.load(matrix.at(i, j), F32) for i in range(rows)]
                    # All loads before any store: rows often lie a multiple of 4 KiB apart, and a load
                    # from there may wait for the store.
                    totals = [ops.load(thin.at(k, j), F32) for k in range(ranks)]
                    for k, column in enumerate(factors):
                        for value, factor in zip(values, column, strict=True):
                            totals[k] = _fused(ops, value, factor, totals[k])
                    for k, total in enumerate(totals):
                        ops.store(total, thin.at(k, j))

            _sweep(b, args[3], run)
            return context.get_dummy_value()

        return types.void(_PAIR, _PAIR, types.int64, types.int64), codegen

    return tile


def expand(rows: int, ranks: int, first: bool = False, last: bool = False) -> Any:
    """An intrinsic ``f(out, v, p, sums, own, n, factor)``: out += P sums^T, then v -= P own^T, for n columns.

    out, v, p (the transpose): (address, row stride in bytes); sums, own: addresses of packed tiles. An element of
    out is ((0 + p0*q0) + p1*q1) + ..., each operation rounded. first: these are the first ranks, so out is not read but
    starts from zero. last: these are the last ones, so out ends multiplied by factor (float32), and its non-finite
    elements are counted: the result. Otherwise factor is not used, and the result is 0.
    """

    @intrinsic
    def tile(typingctx: Any, out: Any, v: Any, p: Any, sums: Any, own: Any, n: Any, factor: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            result, matrix, left = (_Rows(b, a) for a in args[:3])
            all_, mine = (_Tile(b, a, ranks) for a in args[3:5])
            found = cgutils.alloca_once(b, I64)
            b.store(I64(0), found)

            def run(ops: Ops, start: Any, stop: Any) -> None:
                factors = [[_splat_load(ops, left.at(k, I64(i))) for k in range(ranks)] for i in range(rows)]
                scale = ops.splat(args[6])
                bad = cgutils.alloca_once(b, ops.type(I32))
                ops.counts = (bad,)
                b.store(ops.const(I32, 0), bad)
                with cgutils.for_range_slice(b, start, stop, I64(ops.width), inc=True) as (j, _):
                    sum_rows = [ops.load(all_.at(k, j), F32) for k in range(ranks)]
                    own_rows = [b.fneg(ops.load(mine.at(k, j), F32)) for k in range(ranks)]
                    # As in `gather`, all loads before any store.
                    rests = [ops.load(matrix.at(i, j), F32) for i in range(rows)]
                    zero = ops.const(F32, 0.0)
                    totals = [zero if first else ops.load(result.at(i, j), F32) for i in range(rows)]
                    for i in range(rows):
                        for k in range(ranks):
                            totals[i] = b.fadd(totals[i], b.fmul(factors[i][k], sum_rows[k]))
                            rests[i] = _fused(ops, factors[i][k], own_rows[k], rests[i])
                        if last:
                            totals[i] = b.fmul(totals[i], scale)
                            ops.count(ops.nonfinite(totals[i]), 0)
                    for i in range(rows):
                        ops.store(totals[i], result.at(i, j))
                        ops.store(rests[i], matrix.at(i, j))
                if last:
                    for lane in range(ops.width):
                        one = b.zext(b.extract_element(b.load(bad), I32(lane)), I64)
                        b.store(b.add(b.load(found), one), found)

            _sweep(b, args[5], run)
            return b.load(found)

        return types.int64(_PAIR, _PAIR, _PAIR, types.int64, types.int64, types.int64, types.float32), codegen

    return tile


project_rows4, project_rows2, project_rows1 = (project(PROJECTED, k) for k in (4, 2, 1))
project_row4, project_row2, project_row1 = (project(1, k) for k in (4, 2, 1))
gather_rows4, gather_rows2, gather_rows1 = (gather(GATHERED, k) for k in (4, 2, 1))
gather_row4, gather_row2, gather_row1 = (gather(1, k) for k in (4, 2, 1))
expand_rows4, expand_rows2, expand_rows1 = (expand(EXPANDED, k) for k in (4, 2, 1))
expand_row4, expand_row2, expand_row1 = (expand(1, k) for k in (4, 2, 1))
expand_whole4, expand_whole2, expand_whole1 = (expand(EXPANDED, k, first=True, last=True) for k in (4, 2, 1))
expand_first4, expand_last4 = expand(EXPANDED, 4, first=True), expand(EXPANDED, 4, last=True)
