"""Sums, maxima and counts over v = x*scale + r*decay, for codecs that estimate a threshold from them.

What may live here: those passes, which read only. What follows from the numbers is the codec's own. Sums decide
what is sent, so their order is fixed: float64 lane j of 16 adds the elements i with i % 16 == j of a segment in
order, then the lanes are added in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.collect import BLOCK
from gcserver.codecs.jit import element, f32, hold, i64, place
from gcserver.codecs.vector import F32, F64, I8, I32, I64, MAGNITUDE, Ops, intrinsic

LANES = 16
BOUNDS = 8  #: bounds counted together


def _sums(terms: Callable[[Ops, Any], list[Any]]) -> Any:
    """An intrinsic ``f(x, r, lanes, n, scale, decay)``: terms of v, in float64, added to lanes[term][16] in memory.

    n: a multiple of 16. The first lane vector after those of the terms holds the largest magnitude's bits, as int32.
    """

    @intrinsic
    def block(typingctx: Any, x: Any, r: Any, lanes: Any, n: Any, scale: Any, decay: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            ops = Ops(b, LANES)
            px, pr, memory = (b.inttoptr(a, I8.as_pointer()) for a in args[:3])
            vscale, vdecay = (ops.splat(b.fptrunc(s, F32)) for s in args[4:])
            width = len(terms(ops, ops.const(F32, 0.0)))
            where = [b.gep(memory, [I64(8 * LANES * t)]) for t in range(width + 1)]
            sums = [cgutils.alloca_once_value(b, ops.load(p, F64)) for p in where[:width]]
            largest = cgutils.alloca_once_value(b, ops.load(where[width], I32))
            with cgutils.for_range_slice(b, I64(0), args[3], I64(LANES), inc=True) as (i, _):
                at = b.mul(i, I64(4))
                v = ops.fma_free(ops.stream(b.gep(px, [at]), F32), vscale, ops.stream(b.gep(pr, [at]), F32), vdecay)
                for memory_lanes, term in zip(sums, terms(ops, v), strict=True):
                    b.store(b.fadd(b.load(memory_lanes), term), memory_lanes)
                magnitude, before = ops.magnitude(v), b.load(largest)
                b.store(b.select(b.icmp_signed(">", magnitude, before), magnitude, before), largest)
            for memory_lanes, p in zip(sums, where, strict=False):
                ops.store(b.load(memory_lanes), p)
            ops.store(b.load(largest), where[width])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float64, types.float64), codegen

    return block


def _magnitude(ops: Ops, v: Any) -> list[Any]:
    return [ops.b.fpext(ops.b.bitcast(ops.magnitude(v), ops.type(F32)), ops.type(F64))]


def _moments(ops: Ops, v: Any) -> list[Any]:
    wide = ops.b.fpext(v, ops.type(F64))
    return [wide, ops.b.fmul(wide, wide)]


magnitude_block, moments_block = _sums(_magnitude), _sums(_moments)


@intrinsic
def count_block(typingctx: Any, where: Any, n: Any, scale: Any, decay: Any) -> Any:
    """Add to counts[j] how many magnitudes of v are above bounds[j], for all BOUNDS.

    where: addresses (x, r, bounds, counts), the last two of int64[BOUNDS]; n: a multiple of 32.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops = Ops(b, 32)
        px, pr, pbounds, pcounts = (b.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(b, args[0]))
        vscale, vdecay = (ops.splat(b.fptrunc(s, F32)) for s in args[2:])
        words = b.bitcast(pbounds, I64.as_pointer())
        counts = b.bitcast(pcounts, I64.as_pointer())
        bounds = [ops.splat(b.trunc(b.load(b.gep(words, [I64(j)])), I32)) for j in range(BOUNDS)]
        sums = [cgutils.alloca_once_value(b, b.load(b.gep(counts, [I64(j)]))) for j in range(BOUNDS)]
        with cgutils.for_range_slice(b, I64(0), args[1], I64(32), inc=True) as (i, _):
            at = b.mul(i, I64(4))
            v = ops.fma_free(ops.stream(b.gep(px, [at]), F32), vscale, ops.stream(b.gep(pr, [at]), F32), vdecay)
            magnitude = ops.magnitude(v)
            for bound, total in zip(bounds, sums, strict=True):
                mask = b.bitcast(b.icmp_signed(">", magnitude, bound), I32)
                b.store(b.add(b.load(total), b.zext(b.ctpop(mask), I64)), total)
        for j, total in enumerate(sums):
            b.store(b.load(total), b.gep(counts, [I64(j)]))
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 4), types.int64, types.float64, types.float64), codegen


@njit(nogil=True)
def padded(x, r, size, scale, decay, where):
    """The last elements of a segment as v in float32[BLOCK] at ``where``, with zeros after them."""
    from_x, sink = f32(x, size), f32(where, BLOCK)
    sink[:] = np.float32(0.0)
    scale32, decay32 = np.float32(scale), np.float32(decay)
    for i in range(size):
        sink[i] = (
            from_x[i] * scale32 if r == 0 else np.float32(from_x[i] * scale32) + np.float32(f32(r, size)[i] * decay32)
        )


@njit(nogil=True)
def block(x, r, start, n, scale, decay, zeros, sink):
    """(x, r, elements, scale, decay) for the passes over the block from ``start`` on.

    The last one, where it is not whole, is v at ``sink``, filled up with zeros. zeros, sink: addresses
    of work's (handing work itself on would count the references of all its arrays, once a block).
    """
    size = min(BLOCK, n - start)
    if size < BLOCK:
        padded(x + 4 * start, element(r, start), size, scale, decay, sink)
        return sink, zeros, BLOCK, 1.0, 0.0
    return x + 4 * start, zeros if r == 0 else r + 4 * start, size, scale, decay


@njit(nogil=True)
def sums(x, r, n, scale, decay, signed, work):
    """(first, second, largest): signed: sums of v and v*v; else of |v| and 0. largest: of |v|, its bits.

    x, r: addresses of a segment's float32[n], r = 0 for none.
    """
    memory = np.zeros(3 * LANES)
    lanes, zeros, sink = place(memory), place(work[2]), place(work[3])
    for start in range(0, n, BLOCK):
        px, pr, size, s, d = block(x, r, start, n, scale, decay, zeros, sink)
        if signed:
            moments_block(px, pr, lanes, size, s, d)
        else:
            magnitude_block(px, pr, lanes, size, s, d)
    first, second = 0.0, 0.0
    largest = np.int64(0)
    for j in range(LANES):
        first += memory[j]
        second += memory[LANES + j] if signed else 0.0
    bits = i64(lanes + 8 * LANES * (2 if signed else 1), LANES // 2)
    for j in range(LANES // 2):
        largest = max(largest, bits[j] & MAGNITUDE, bits[j] >> 32)
    hold(memory)
    return first, second, largest


@njit(nogil=True)
def counts_above(x, r, n, scale, decay, bounds, counts, work):
    """counts[j] = elements of a segment whose magnitude bits are above bounds[j]; int64[BOUNDS], bounds >= 0."""
    counts[:] = 0
    zeros, sink = place(work[2]), place(work[3])
    for start in range(0, n, BLOCK):
        # What fills a block up, zeros, is above no bound.
        px, pr, size, s, d = block(x, r, start, n, scale, decay, zeros, sink)
        count_block((px, pr, place(bounds), place(counts)), size, s, d)
