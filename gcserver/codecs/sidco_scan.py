"""SIDCo's look at the data: a sample of it, sums over its exceedances, and one pass that also collects.

What may live here: the passes and the order in which they add. What the sums mean is `sidco_fit`'s, what is done
with them `sidco`'s.

Sums decide bytes. Order: blocks of 1024 from the segment's start, the last one filled up with zeros; in a block,
groups of 32; a group's elements j, j+8, j+16, j+24 are added as (a+b)+(c+d) to lane j of 8, in float32, starting
from 0; a block's lanes are added to lanes of float64, those in order at the end. So an addition's error stays
below 2**-19 of the sum, whatever the length, and no CPU and no thread changes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from gcproto.layouts import LN2
from gcserver.codecs.collect import BLOCK, extract, mask_block
from gcserver.codecs.jit import f32, i32, place, u32
from gcserver.codecs.select import LINE, values_block, walk
from gcserver.codecs.sidco_fit import ln
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32, F64, I8, I32, I64, MAGNITUDE, Ops, intrinsic, ir

LANES = 8
GROUP = 32
CUTS = 3  #: thresholds of earlier stages whose exceedances one pass can sum
COUNT, SUM, SQUARES = 0, LANES, 2 * LANES  #: where an accumulator of 24 float64 lanes keeps what
ACCUMULATOR = 3 * LANES
FLOOR = 2.0**-52  #: smallest normalised magnitude whose logarithm is looked at, as in the authors' code
FLOOR_EXPONENT = 127 - 52


class _Lanes(Ops):
    """Eight lanes of a group of 32."""

    def eighth(self, value: Any, part: int) -> Any:
        mask = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES * part, LANES * part + LANES)))
        return self.b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

    def fold(self, value: Any, join: Any) -> Any:
        a, b, c, d = (self.eighth(value, part) for part in range(4))
        return join(join(a, b), join(c, d))

    def small(self, element: Any, value: float) -> Any:
        return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def _accumulate(everything: bool, squares: bool) -> Any:
    @intrinsic
    def block(typingctx: Any, where: Any, n: Any, cut: Any, unit: Any) -> Any:
        """Add to the accumulator at where[1] what a block of float32 at where[0] holds above ``cut``, or all of it."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            ops, eight = _Lanes(b, GROUP), Ops(b, LANES)
            source, accumulator = (b.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(b, args[0]))
            vcut, vunit = (ops.splat(b.fptrunc(a, F32)) for a in args[2:4])
            zeros = [ops.small(I32, 0), ops.small(F32, 0.0), ops.small(F32, 0.0)]
            count, sum_, square = (cgutils.alloca_once(b, zero.type) for zero in zeros)
            for slot, zero in zip((count, sum_, square), zeros, strict=True):
                b.store(zero, slot)
            with cgutils.for_range_slice(b, I64(0), args[1], I64(GROUP), inc=True) as (i, _):
                value = ops.load(b.gep(source, [b.mul(i, I64(4))]), F32)
                magnitude = b.bitcast(ops.magnitude(value), ops.type(F32))
                kept = magnitude
                if not everything:
                    ones = b.sext(b.fcmp_ordered(">", magnitude, vcut), ops.type(I32))
                    kept = b.bitcast(b.and_(b.bitcast(magnitude, ops.type(I32)), ones), ops.type(F32))
                    b.store(b.sub(b.load(count), ops.fold(ones, b.add)), count)
                b.store(b.fadd(b.load(sum_), ops.fold(kept, b.fadd)), sum_)
                if squares:
                    scaled = b.fmul(kept, vunit)
                    b.store(b.fadd(b.load(square), ops.fold(b.fmul(scaled, scaled), b.fadd)), square)
            wide = ir.VectorType(F64, LANES)
            found = [b.sitofp(b.load(count), wide), b.fpext(b.load(sum_), wide)]
            if squares:
                found.append(b.fpext(b.load(square), wide))
            for at, value in zip((COUNT, SUM, SQUARES), found, strict=False):
                place_ = b.gep(accumulator, [I64(8 * at)])
                eight.store(b.fadd(eight.load(place_, F64), value), place_)
            return context.get_dummy_value()

        int_, float_ = types.int64, types.float64
        return types.void(types.UniTuple(int_, 2), int_, float_, float_), codegen

    return block


all_sums, all_squares = _accumulate(True, False), _accumulate(True, True)
sums_above, squares_above = _accumulate(False, False), _accumulate(False, True)


@intrinsic
def logs_block(typingctx: Any, where: Any, n: Any, unit: Any) -> Any:
    """Products of mantissas and sums of biased exponents of max(|v|*unit, FLOOR), lane by lane.

    where: addresses (float32[n], float32[8], int32[8]); n: a multiple of 32, at most 1024, so that 128 mantissas
    below 2 stay below infinity. A logarithm costs some twenty operations, a product one.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops, eight = _Lanes(b, GROUP), Ops(b, LANES)
        source, mantissas, exponents = (b.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(b, args[0]))
        vunit = ops.splat(b.fptrunc(args[2], F32))
        floor = ops.const(F32, FLOOR)
        product, total = (cgutils.alloca_once(b, ops.small(e, 0).type) for e in (F32, I32))
        b.store(ops.small(F32, 1.0), product)
        b.store(ops.small(I32, 0), total)
        with cgutils.for_range_slice(b, I64(0), args[1], I64(GROUP), inc=True) as (i, _):
            value = ops.load(b.gep(source, [b.mul(i, I64(4))]), F32)
            scaled = b.fmul(b.bitcast(ops.magnitude(value), ops.type(F32)), vunit)
            bits = ops.bits(b.select(b.fcmp_ordered(">", scaled, floor), scaled, floor))
            exponent = b.lshr(bits, ops.const(I32, 23))
            one = b.or_(b.and_(bits, ops.const(I32, 0x7FFFFF)), ops.const(I32, 0x3F800000))
            mantissa = b.bitcast(one, ops.type(F32))
            b.store(b.add(b.load(total), ops.fold(exponent, b.add)), total)
            b.store(b.fmul(b.load(product), ops.fold(mantissa, b.fmul)), product)
        eight.store(b.load(product), mantissas)
        eight.store(b.load(total), exponents)
        return context.get_dummy_value()

    int_, float_ = types.int64, types.float64
    return types.void(types.UniTuple(int_, 3), int_, float_), codegen


@njit(nogil=True)
def total(sums, i, what):
    """The sum of one quantity's lanes, in order."""
    result = 0.0
    for lane in range(LANES):
        result += sums[ACCUMULATOR * i + what + lane]
    return result


@njit(nogil=True)
def add_logs(source, n, unit, lanes, logs):
    """Add a block's logarithms to logs: (a mantissa in [1, 2), the exponents' sum). n: a multiple of 32."""
    logs_block((source, place(lanes), place(lanes) + 4 * LANES), n, unit)
    exponents = i32(place(lanes) + 4 * LANES, LANES)
    mantissa, exponent = logs[0], logs[1]
    for lane in range(LANES):
        m, e = math.frexp(mantissa * np.float64(lanes[lane]))
        mantissa = 2.0 * m
        exponent += e - 1 + np.float64(exponents[lane])
    logs[0], logs[1] = mantissa, exponent - 127.0 * n


@njit(nogil=True)
def logs_sum(logs, padding, unit):
    """The sum of the logarithms of magnitudes, of blocks filled up with so many zeros."""
    exponent = logs[1] - padding * (FLOOR_EXPONENT - 127.0)
    return ln(logs[0]) + exponent * LN2


@njit(nogil=True)
def clear(sums, logs):
    """Start all accumulators anew."""
    sums[:] = 0.0
    logs[0], logs[1] = 1.0, 0.0


@njit(nogil=True)
def draw(x, r, n, lines, scale, decay, sample, work):
    """v of ``lines`` whole cache lines of 32 elements, one from each stride of the segment, to sample."""
    zeros = work[2]
    stride = n // lines
    jitter = np.uint64(0x9E3779B97F4A7C15)
    for j in range(lines):
        # A place in each stride that is no multiple of anything, so that no period of the data hides.
        jitter = jitter * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        start = j * stride + np.int64((jitter >> np.uint64(33)) % np.uint64(stride - LINE + 1))
        pr = place(zeros) if r == 0 else r + 4 * start
        values_block((x + 4 * start, pr, place(sample) + 4 * LINE * j), LINE, (scale, decay))


@njit(nogil=True)
def add_all(source, n, squares, unit, sums):
    """Add a block's magnitudes (and their squares, of magnitude*unit) to accumulator 0."""
    if squares:
        all_squares((source, place(sums)), n, 0.0, unit)
    else:
        all_sums((source, place(sums)), n, 0.0, unit)


@njit(nogil=True)
def add_above(source, n, cut, squares, unit, sums, i):
    """Add the count and the magnitudes above a cut (and their squares) to accumulator i."""
    where = (source, place(sums) + 8 * ACCUMULATOR * i)
    if squares:
        squares_above(where, n, cut, unit)
    else:
        sums_above(where, n, cut, unit)


@njit(nogil=True)
def rank(sample, size, k, hist):
    """Magnitude bits of the k-th largest of a sample, rounded down to 13 bits of mantissa."""
    bits = u32(place(sample), size)
    hist[:8192] = 0
    for i in range(size):
        hist[(np.int64(bits[i]) & MAGNITUDE) >> 18] += np.uint32(1)
    key, over, _ = walk(hist, 8192, k)
    hist[:256] = 0
    for i in range(size):
        magnitude = np.int64(bits[i]) & MAGNITUDE
        if magnitude >> 18 == key:
            hist[(magnitude >> 10) & 255] += np.uint32(1)
    fine, _, _ = walk(hist, 256, k - over)
    return (key << 18) | (fine << 10)


@njit(nogil=True)
def scan(x, r, ro, n, first, scale, decay, below, at, limit, cuts, used, unit, squares, with_logs, sums, logs, work):
    """The one pass: v to ro, candidates of magnitude bits > below to ``work`` from slot ``at``, and all sums.

    Accumulator 0 sums all of v, accumulator i what exceeds cuts[i-1], i <= used. squares: whether they are wanted of
    (all, exceedances). Returns the number of candidates, or -1 as soon as there are more than
    ``limit``; ro holds 0 in their place. ro = 0: nobody wants it; r = 0: no residual.
    """
    zeros, block, words = place(work[2]), place(work[3]), place(work[5])
    idx, val = place(work[0]), place(work[1])
    lanes = np.empty(2 * LANES, np.float32)
    found, last = at, at + limit
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        px = x + 4 * start
        pr = zeros if r == 0 else r + 4 * start
        if size < BLOCK:
            # The last block is filled up with zeros, which change no sum.
            values, bits = f32(block, BLOCK), u32(block, BLOCK)
            values[:] = np.float32(0.0)
            values_block((px, pr, block), size, (scale, decay))
            masks = u32(words, BLOCK // GROUP)
            masks[:] = 0
            for i in range(size):
                if np.int64(bits[i]) & MAGNITUDE > below:
                    masks[i >> 5] |= np.uint32(1) << np.uint32(i & 31)
        else:
            mask_block((px, pr, block, words), BLOCK, scale, decay, below)
        add_all(block, BLOCK, squares[0], unit, sums)
        for i in range(used):
            add_above(block, BLOCK, cuts[i], squares[1], unit, sums, i + 1)
        if with_logs:
            add_logs(block, BLOCK, unit, lanes, logs)
        found = extract(first + start, block, found, idx, val, words)
        if ro != 0:
            put(block, ro + 4 * start, size)
        if found > last:
            ordered()
            return -1
    ordered()
    return found - at
