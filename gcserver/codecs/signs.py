"""Frames of signs: the layout the sign codecs share, its kernels, and their common base class.

What may live here: packing, checking and decoding frames of one bit an element with 0, 1 or 2 numbers a
segment, and the kernels that encode them; the passes over the data are `signscan`'s, the codecs are in
`onebit` and `sign`. Layout (little-endian): u32 segments; then for each u32 length, its numbers as f32,
ceil(length/8) bytes: bit i%8 of byte i//8 is set if element i is negative, padding bits are zero.

numbers  a negative element decodes to   another to
0        -1                              1
1        -a                              a
2        a                               b
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.chance import bits64
from gcserver.codecs.framed import ADD, CHECK, OK, Framed
from gcserver.codecs.jit import f32, hold, i64, kernel, place, u8, u32, u64
from gcserver.codecs.segmented import LENGTHS, PADDING, RULES, SHORT, SIZE
from gcserver.codecs.signscan import (
    BLOCK,
    STEP,
    count_nonfinite,
    mean_plain,
    mean_residual,
    means_plain,
    means_residual,
    residual_block,
    votes_plain,
    votes_state,
    zero_words,
)
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import I8, I32, INFINITE, Ops, intrinsic
from gcserver.codecs.vector import I64 as L


def _unpack(add: bool) -> Any:
    """An intrinsic ``f(bits, target, groups, low, high)``: 32 elements a group, stored or added."""

    @intrinsic
    def unpack(typingctx: Any, bits: Any, target: Any, groups: Any, low: Any, high: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            ops = Ops(b, 32)
            words = b.inttoptr(args[0], I32.as_pointer())
            out = b.inttoptr(args[1], I8.as_pointer())
            vlow, vhigh = (ops.splat(a) for a in args[3:])
            with cgutils.for_range(b, args[2]) as loop:
                mask = b.bitcast(b.load(b.gep(words, [loop.index]), align=1), ir.VectorType(ir.IntType(1), 32))
                value = b.select(mask, vlow, vhigh)
                target_words = b.gep(out, [b.mul(loop.index, L(128))])
                if add:
                    value = b.fadd(ops.load(target_words, F), value)
                ops.store(value, target_words)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.float32, types.float32), codegen

    return unpack


unpack_store, unpack_add = _unpack(False), _unpack(True)


@njit(nogil=True)
def padded(source, size, scratch):
    """Address of a copy of ``size`` elements in scratch (float32[BLOCK]), zeros up to a multiple of STEP."""
    scratch[:size] = f32(source, size)
    scratch[size : (size + STEP - 1) // STEP * STEP] = np.float32(0.0)
    return place(scratch)


@njit(nogil=True)
def wide_sums(numbers, x, r, size, scale, decay):
    """What the passes sum, all in float64, of a block whose float32 partial sums overflow.

    Element i is added to lane i % 8 in order, then lanes in order.
    """
    lanes = np.zeros((2, 8))
    xs, rs, scale32, decay32 = f32(x, size), f32(r, size), np.float32(scale), np.float32(decay)
    for i in range(size):
        v = np.float32(xs[i] * scale32) + np.float32(rs[i] * decay32)
        if numbers == 1:
            lanes[0, i % 8] += np.float64(abs(v))
        else:
            lanes[0 if v < 0 else 1, i % 8] += np.float64(v)
    a, b = 0.0, 0.0
    for lane in range(8):
        a += lanes[0, lane]
        b += lanes[1, lane]
    return a, b


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64, int64, float64, float64)")
def means_encode(numbers, x, r, ro, out, table, m, scale, decay):
    """Signs of m segments with the mean magnitude (numbers 1) or two means (2); r and ro are 0 for none.

    Returns (bytes written, non-finite elements).
    """
    bounds = i64(table, m + 1)
    zeros, words = np.zeros(BLOCK, np.float32), np.empty(BLOCK // 8, np.uint8)
    x_pad, r_pad = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    u32(out, 1)[0] = m
    at, bad = out + 4, 0
    for s in range(m):
        first, length = bounds[s], bounds[s + 1] - bounds[s]
        header = 4 + 4 * numbers
        low_sum, high_sum, negatives = 0.0, 0.0, 0
        for start in range(0, length, BLOCK):
            size = min(BLOCK, length - start)
            px, pr = x + 4 * (first + start), place(zeros) if r == 0 else r + 4 * (first + start)
            bits, whole = at + header + start // 8, size
            if size % STEP:
                px, bits = padded(px, size, x_pad), place(words)
                pr = pr if r == 0 else padded(pr, size, r_pad)
                whole = (size + STEP - 1) // STEP * STEP
            where = (px, pr, np.int64(0), bits)
            if numbers == 2:
                a, b, c = (
                    means_plain(where, whole, scale, decay) if r == 0 else means_residual(where, whole, scale, decay)
                )
            else:
                a, b, c = (
                    mean_plain(where, whole, scale, decay) if r == 0 else mean_residual(where, whole, scale, decay)
                )
            if not np.isfinite(a + b):
                found = count_nonfinite((px, pr), size, (scale, decay))[0]
                bad += found
                if found == 0:
                    a, b = wide_sums(numbers, px, pr, size, scale, decay)
            if size % STEP:
                u8(at + header + start // 8, (size + 7) // 8)[:] = words[: (size + 7) // 8]
            low_sum += a
            high_sum += b
            negatives += c
        low, high = np.float32(0.0), np.float32(0.0)
        if numbers == 2:
            if negatives > 0:
                low = np.float32(low_sum / negatives)
            if negatives < length:
                high = np.float32(high_sum / (length - negatives))
            f32(at + 4, 2)[0], f32(at + 4, 2)[1] = low, high
        else:
            if length > 0:
                high = np.float32(low_sum / length)
            low = -high
            f32(at + 4, 1)[0] = high
        u32(at, 1)[0] = length
        at += header + (length + 7) // 8
        if ro != 0:
            for start in range(0, length, BLOCK):
                size, where = min(BLOCK, length - start), 4 * (first + start)
                pr = place(zeros) if r == 0 else r + where
                scalars = (scale, decay, np.float64(low), np.float64(high))
                # What padded the first pass is free in the second.
                residual_block((x + where, pr, place(x_pad)), size, scalars)
                put(place(x_pad), ro + where, size)
    ordered()
    return at - out, bad


@njit(nogil=True)
def break_ties(source, bits, n, scale, seed, first_word, zeros):
    """Give the zeros among source*scale the signs that chance has for them; zeros: uint8[BLOCK/8] of scratch."""
    zero_words(source, place(zeros), n, scale)
    masks, signs = u64(place(zeros), n // 64), u64(bits, n // 64)
    for w in range(n // 64):
        if masks[w]:
            signs[w] = (signs[w] & ~masks[w]) | (bits64(seed, first_word + w) & masks[w])


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64, float64, float64, int64)")
def votes_encode(x, r, ro, out, table, m, scale, decay, seed):
    """Signs of v = x*scale + r*decay of m segments, without numbers; v to ro. r and ro are 0 for none.

    Returns (bytes written, non-finite elements).
    """
    bounds = i64(table, m + 1)
    zeros, sink = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    words, masks = np.empty(BLOCK // 8, np.uint8), np.empty(BLOCK // 8, np.uint8)
    x_pad, r_pad = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    u32(out, 1)[0] = m
    at, bad = out + 4, 0
    for s in range(m):
        first, length = bounds[s], bounds[s + 1] - bounds[s]
        u32(at, 1)[0] = length
        for start in range(0, length, BLOCK):
            size, offset = min(BLOCK, length - start), 4 * (first + start)
            px, pr = x + offset, place(zeros) if r == 0 else r + offset
            pv = place(sink) if ro == 0 else ro + offset
            bits, whole = at + 4 + start // 8, size
            if size % STEP:
                px, bits, pv = padded(px, size, x_pad), place(words), place(sink)
                pr = pr if r == 0 else padded(pr, size, r_pad)
                whole = (size + STEP - 1) // STEP * STEP
            where = (px, pr, pv, bits)
            if r == 0 and ro == 0:
                extremes = votes_plain(where, whole, scale, decay)[2]
            else:
                extremes = votes_state(where, whole, scale, decay)[2]
            if extremes & 0xFFFFFFFF == 0:
                if r == 0 and ro == 0:
                    break_ties(px, bits, whole, scale, seed, start // 64, masks)
                else:
                    break_ties(pv, bits, whole, 1.0, seed, start // 64, masks)
            if extremes >> 32 >= INFINITE:
                bad += count_nonfinite((px, pr), size, (scale, decay))[0]
            if size % STEP:
                if size % 8:
                    words[size // 8] &= np.uint8((1 << (size % 8)) - 1)
                u8(at + 4 + start // 8, (size + 7) // 8)[:] = words[: (size + 7) // 8]
                if ro != 0:
                    f32(ro + offset, size)[:] = sink[:size]
        at += 4 + (length + 7) // 8
    return at - out, bad


@kernel("int64(int64, int64, int64, int64)")
def signs_check(numbers, payload, nbytes, n):
    """OK if the payload is exactly a frame of n elements, else which rule it breaks."""
    if nbytes < 4:
        return SHORT
    data = u8(payload, nbytes)
    header = 4 + 4 * numbers
    at: Any = 4
    left = n
    for _ in range(np.int64(u32(payload, 1)[0])):
        if nbytes - at < header:
            return SHORT
        length = np.int64(u32(payload + at, 1)[0])
        if length > left:
            return LENGTHS
        left -= length
        at += header + (length + 7) // 8
        if at > nbytes:
            return SHORT
        if length % 8 and data[at - 1] >> (length % 8):
            return PADDING
    if left != 0:
        return LENGTHS
    return OK if at == nbytes else SIZE


@kernel("void(int64, int64, int64, float64, boolean)")
def signs_decode(numbers, payload, out, scale, add):
    """out = (or +=) decoded*scale for a checked payload."""
    at, factor = payload + 4, np.float32(scale)
    header = 4 + 4 * numbers
    decoded = np.empty(BLOCK, np.float32)
    for _ in range(np.int64(u32(payload, 1)[0])):
        length = np.int64(u32(at, 1)[0])
        number = f32(at + 4, numbers)
        low, high = -factor, factor
        if numbers == 1:
            high = np.float32(number[0] * factor)
            low = -high
        elif numbers == 2:
            low, high = np.float32(number[0] * factor), np.float32(number[1] * factor)
        groups = length // 32
        if add:
            unpack_add(at + header, out, groups, low, high)
        else:
            for start in range(0, groups, BLOCK // 32):
                some: Any = min(BLOCK // 32, groups - start)
                unpack_store(at + header + 4 * start, place(decoded), some, low, high)
                put(place(decoded), out + 128 * start, 32 * some)
        bits, target = u8(at + header, (length + 7) // 8), f32(out, length)
        for i in range(groups * 32, length):
            value = low if (bits[i >> 3] >> (i & 7)) & 1 else high
            target[i] = np.float32(target[i] + value) if add else value
        at += header + (length + 7) // 8
        out += 4 * length
    ordered()
    hold(decoded)


class Signs(Framed):
    """What the sign codecs share: one bit an element and ``numbers`` float32 a segment."""

    numbers: int
    rules = RULES | {PADDING: "zero padding bits after each segment's last sign"}

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return 4 + (4 + 4 * self.numbers) * segments + (n + 7 * segments) // 8

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        rule = int(signs_check(self.numbers, payload, nbytes, n))
        if rule == OK and mode != CHECK:
            signs_decode(self.numbers, payload, out, scale, mode == ADD)
        return rule
