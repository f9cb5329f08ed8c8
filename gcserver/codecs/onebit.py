"""onebit: one sign bit an element and two means a segment (Seide et al. 2014), with error feedback.

What may live here: the codec, its kernels, its layout. An element decodes to the mean of the negative
elements of its segment if it was negative, else to the mean of the others, so that signs and the
segment's sum survive; the rest goes to the residual. Layout (little-endian): u32 segments; then for each
u32 length, f32 mean of negatives, f32 mean of the others, ceil(length/8) bytes, bit i%8 of byte i//8
set if element i was negative, padding bits zero.

Passes: one over gradient and residual for signs and sums, with error feedback a second that writes
the new residual. Sums are float64 in 16 lanes over blocks of 4096 elements counted from the segment's
start, lanes then blocks added in index order: the same bytes on any CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from gcserver.codecs.base import F32, I64, U8, Codec, CodecError, Encoded, register
from gcserver.codecs.jit import (
    as_bytes,
    f32,
    f32_address,
    i64,
    kernel,
    place,
    residual_addresses,
    segment_table,
    u8,
    u8_address,
    u32,
)
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import F64, I8, I16, I32, Ops, elementwise, intrinsic
from gcserver.codecs.vector import I64 as L

LANES = 16
BLOCK = 4096


@intrinsic
def scan_block(typingctx: Any, x: Any, r: Any, bits: Any, n: Any, scale: Any, decay: Any) -> Any:
    """(sum of negatives, sum of the others, count of negatives) of v = x*scale + r*decay; packs signs.

    n elements at addresses x and r (float32), one bit each to ``bits`` (ceil(n/8) bytes). A non-finite v shows
    in a non-finite sum: finite float32 values cannot overflow float64.
    """
    result = types.Tuple((types.float64, types.float64, types.int64))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops = Ops(b, LANES)
        byte = I8.as_pointer()
        px, pr, pbits = (b.inttoptr(a, byte) for a in args[:3])
        total = args[3]
        vscale, vdecay = (ops.splat(b.fptrunc(s, F)) for s in args[4:])
        zero, wide_zero = ops.const(F, 0.0), ops.const(F64, 0.0)
        negative_sum, other_sum = (cgutils.alloca_once_value(b, wide_zero) for _ in range(2))
        negatives = cgutils.alloca_once_value(b, L(0))
        for total_sum in (negative_sum, other_sum):
            b.store(wide_zero, total_sum)
        b.store(L(0), negatives)

        def step(xs: Any, rs: Any, store_bits: Any) -> None:
            v = ops.fma_free(xs, vscale, rs, vdecay)
            mask = b.fcmp_ordered("<", v, zero)
            low, high = b.select(mask, v, zero), b.select(mask, zero, v)
            for lanes, part in ((negative_sum, low), (other_sum, high)):
                b.store(b.fadd(b.load(lanes), b.fpext(part, ops.type(F64))), lanes)
            packed = b.bitcast(mask, I16)
            count = b.zext(b.ctpop(packed), L)
            b.store(b.add(b.load(negatives), count), negatives)
            store_bits(packed)

        whole = b.and_(total, L(-LANES))
        with cgutils.for_range_slice(b, L(0), whole, L(LANES), inc=True) as (i, _):
            offset = b.mul(i, L(4))
            target = b.gep(pbits, [b.lshr(i, L(3))])
            step(
                ops.load(b.gep(px, [offset]), F),
                ops.load(b.gep(pr, [offset]), F),
                lambda packed: b.store(packed, b.bitcast(target, I16.as_pointer()), align=1),
            )
        rest = b.sub(total, whole)
        with b.if_then(b.icmp_signed(">", rest, L(0)), likely=False):
            # The last lanes are padded with zeros, which change no sum and set no bit.
            buffers = []
            for source in (px, pr):
                buffer = cgutils.alloca_once(b, ops.type(F))
                b.store(zero, buffer)
                start = b.bitcast(b.gep(source, [b.mul(whole, L(4))]), F.as_pointer())
                into = b.bitcast(buffer, F.as_pointer())
                with cgutils.for_range_slice(b, L(0), rest, L(1), inc=True) as (i, _):
                    b.store(b.load(b.gep(start, [i]), align=1), b.gep(into, [i]))
                buffers.append(buffer)

            def partial(packed: Any) -> None:
                target = b.gep(pbits, [b.lshr(whole, L(3))])
                b.store(b.trunc(packed, I8), target)
                with b.if_then(b.icmp_signed(">", rest, L(8))):
                    b.store(b.trunc(b.lshr(packed, I16(8)), I8), b.gep(target, [L(1)]))

            step(b.load(buffers[0]), b.load(buffers[1]), partial)

        sums = []
        for total_lanes in (negative_sum, other_sum):
            lanes = b.load(total_lanes)
            total_sum = b.extract_element(lanes, I32(0))
            for lane in range(1, LANES):
                total_sum = b.fadd(total_sum, b.extract_element(lanes, I32(lane)))
            sums.append(total_sum)
        return context.make_tuple(b, result, [*sums, b.load(negatives)])

    return result(types.int64, types.int64, types.int64, types.int64, types.float64, types.float64), codegen


def _residual_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    scale, decay, low, high = scalars
    v = ops.fma_free(values[0], scale, values[1], decay)
    mask = ops.b.fcmp_ordered("<", v, ops.const(F, 0.0))
    return [ops.b.fsub(v, ops.b.select(mask, low, high))]


def _nonfinite_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    ops.count(ops.nonfinite(ops.fma_free(values[0], scalars[0], values[1], scalars[1])), 0)
    return []


count_nonfinite = elementwise([F, F], [], _nonfinite_body)
residual_block = elementwise([F, F], [F], _residual_body)


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


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64, float64, float64)")
def onebit_encode(x, r, ro, out, table, m, scale, decay):
    """Encode m segments; r and ro are 0 for none. Returns (bytes written, non-finite elements)."""
    bounds = i64(table, m + 1)
    zeros = np.zeros(BLOCK if r == 0 else 1, np.float32)
    u32(out, 1)[0] = m
    at, bad = out + 4, 0
    for s in range(m):
        first, length = bounds[s], bounds[s + 1] - bounds[s]
        low_sum, high_sum, negatives = 0.0, 0.0, 0
        for start in range(0, length, BLOCK):
            size = min(BLOCK, length - start)
            where = 4 * (first + start)
            rp = place(zeros) if r == 0 else r + where
            a, b, c = scan_block(x + where, rp, at + 12 + start // 8, size, scale, decay)
            low_sum += a
            high_sum += b
            negatives += c
            if not (np.isfinite(a) and np.isfinite(b)):
                bad += count_nonfinite((x + where, rp), size, (scale, decay))[0]
        low, high = np.float32(0.0), np.float32(0.0)
        if negatives > 0:
            low = np.float32(low_sum / negatives)
        if negatives < length:
            high = np.float32(high_sum / (length - negatives))
        u32(at, 1)[0] = length
        means = f32(at + 4, 2)
        means[0], means[1] = low, high
        at += 12 + (length + 7) // 8
        if ro != 0:
            for start in range(0, length, BLOCK):
                size = min(BLOCK, length - start)
                where = 4 * (first + start)
                rp = place(zeros) if r == 0 else r + where
                residual_block((x + where, rp, ro + where), size, (scale, decay, np.float64(low), np.float64(high)))
    return at - out, bad


OK, SHORT, LENGTHS, TRAILING, PADDING = range(5)


@kernel("int64(int64, int64, int64)")
def onebit_check(payload, nbytes, n):
    """OK if the payload is exactly a frame of n elements, else which rule it breaks."""
    if nbytes < 4:
        return SHORT
    data = u8(payload, nbytes)
    at: Any = 4
    left = n
    for _ in range(np.int64(u32(payload, 1)[0])):
        if nbytes - at < 12:
            return SHORT
        length = np.int64(u32(payload + at, 1)[0])
        if length > left:
            return LENGTHS
        left -= length
        at += 12 + (length + 7) // 8
        if at > nbytes:
            return SHORT
        if length % 8 and data[at - 1] >> (length % 8):
            return PADDING
    if left != 0:
        return LENGTHS
    return OK if at == nbytes else TRAILING


@kernel("void(int64, int64, float64, boolean)")
def onebit_decode(payload, out, scale, add):
    """out = (or +=) decoded*scale for a checked payload."""
    at, factor = payload + 4, np.float32(scale)
    for _ in range(np.int64(u32(payload, 1)[0])):
        length = np.int64(u32(at, 1)[0])
        means = f32(at + 4, 2)
        low, high = np.float32(means[0] * factor), np.float32(means[1] * factor)
        groups = length // 32
        if add:
            unpack_add(at + 12, out, groups, low, high)
        else:
            unpack_store(at + 12, out, groups, low, high)
        bits, target = u8(at + 12, (length + 7) // 8), f32(out, length)
        for i in range(groups * 32, length):
            value = low if (bits[i >> 3] >> (i & 7)) & 1 else high
            target[i] = np.float32(target[i] + value) if add else value
        at += 12 + (length + 7) // 8
        out += 4 * length


_RULES = {
    SHORT: "all of its segments (it is cut short)",
    LENGTHS: "segment lengths that add up to the partition",
    TRAILING: "nothing after the last segment",
    PADDING: "zero padding bits after each segment's last sign",
}


@register
class OneBit(Codec):
    """1 bit an element plus 12 bytes a segment; error feedback by default."""

    id, name = 32, "onebit"
    keeps_residual = True
    units = "sum"
    conserves = True

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return 4 + 12 * segments + (n + 7 * segments) // 8

    def encode(
        self,
        x: F32,
        residual_in: F32 | None,
        residual_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Encoded:
        n = x.size
        px, r, ro = residual_addresses(self, x, residual_in, residual_out)
        table, m, alive = segment_table(segments, n)
        target = u8_address("out", out, self.max_bytes(n, m), write=True)
        nbytes, bad = onebit_encode(px, r, ro, target, table, m, float(scale), self.decay)
        del alive
        return Encoded(nbytes, bad)

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        source = self._check(payload, out.size)
        onebit_decode(source, f32_address("out", out, out.size, write=True), float(scale), False)

    def decode_add(self, payload: U8, acc: F32) -> None:
        source = self._check(payload, acc.size)
        onebit_decode(source, f32_address("acc", acc, acc.size, write=True), 1.0, True)

    def check(self, payload: U8, n: int) -> None:
        self._check(payload, n)

    def _check(self, payload: U8, n: int) -> int:
        data = as_bytes(payload)
        source = u8_address("payload", data)
        rule = onebit_check(source, data.size, n)
        if rule != OK:
            raise CodecError("payload", f"a onebit frame of {n} elements: {_RULES[rule]}", f"{data.size} bytes")
        return source
