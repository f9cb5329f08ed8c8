"""natural compression (Horvath et al. 2019): the nearest powers of two, one of them at random.

What may live here: the codec, its kernels, its layout. |v| in [2^e, 2^(e+1)] becomes 2^(e+1) with probability
|v|/2^e - 1, else 2^e: the expectation is v, the relative variance at most 1/8 (theorem 3), and since a power of two
is an exponent, rounding is one integer addition of 23 random bits to the bits of |v|.

bits=9 sends the sign and float32's whole exponent, as the paper does. bits=8 sends the sign and the 127 powers from
2^-86 to 2^40, and 0: smaller values become 0 or ±2^-86 at random, larger ones saturate at ±2^40 and are counted.
Layout (little-endian): u32 segments; for each u32 length and u32 bits; then for each, with 8 bits, a byte an element:
sign << 7 | code, where code 0 is 0 and code c is 2^(c-87); with 9 bits a byte an element, the biased exponent (0 is 0,
c is 2^(c-127)), then the signs as bits, element i in bit i % 8 of byte i // 8. One pass over memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.base import U32, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.framed import ADD, CHECK, OK, Call, Graded
from gcserver.codecs.jit import address, hold, i64, kernel, place, u8, u32
from gcserver.codecs.quantise import value_both, value_plain
from gcserver.codecs.segmented import PADDING, RULES, WORD, segments_check
from gcserver.codecs.stochastic import key, stochastic
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import I8, I32, Ops, elementwise, intrinsic
from gcserver.codecs.vector import I64 as L

BLOCK = 1024  #: elements worked on at a time, in the L1 cache
BIAS = 40  #: what an 8-bit code lacks to float32's biased exponent


def _exponents(ops: Ops, v: Any, words: Any, bias: int) -> tuple[Any, Any]:
    """(codes as I32, decoded values); counts non-finite (slot 0) and saturated elements (slot 1)."""
    b, magnitude = ops.b, ops.magnitude(v)
    top = ops.const(I32, 127 if bias else 254)
    limit = (127 + BIAS if bias else 254) << 23
    over = b.icmp_signed(">", magnitude, ops.const(I32, limit))
    chance = b.lshr(words, ops.const(I32, 9))
    if bias:
        # Below the smallest power: added to it, its mantissa is the probability, and its code is one less.
        smallest = (bias + 1) << 23
        small = b.icmp_signed("<", magnitude, ops.const(I32, smallest))
        shifted = b.fadd(b.bitcast(magnitude, ops.type(F)), b.bitcast(ops.const(I32, smallest), ops.type(F)))
        magnitude = b.select(small, ops.bits(shifted), magnitude)
        code = b.sub(b.lshr(b.add(magnitude, chance), ops.const(I32, 23)), ops.const(I32, bias))
        code = b.add(code, b.sext(small, ops.type(I32)))
    else:
        code = b.lshr(b.add(magnitude, chance), ops.const(I32, 23))
    with b.if_then(ops.any(over), likely=False):
        bad = ops.nonfinite(v)
        ops.count(bad, 0)
        ops.count(b.xor(bad, over), 1)
    code = b.select(over, top, code)
    return code, _powers(ops, code, b.fcmp_ordered("<", v, ops.const(F, 0.0)), bias)


def _powers(ops: Ops, code: Any, negative: Any, bias: int) -> Any:
    b, zero = ops.b, ops.const(I32, 0)
    bits = b.shl(b.add(code, ops.const(I32, bias)), ops.const(I32, 23))
    if bias:
        bits = b.select(b.icmp_signed("==", code, zero), zero, bits)
    sign = b.select(negative, ops.const(I32, 0x80000000), zero)
    return b.bitcast(b.or_(bits, sign), ops.type(F))


def _encode_body(bias: int, feedback: bool) -> Any:
    def body(ops: Ops, values: list[Any], scalars: list[Any], words: Any) -> list[Any]:
        b, v = ops.b, values[0]
        if bias:
            v = b.fmul(v, scalars[0])
            if len(values) > 1:
                v = b.fadd(v, b.fmul(values[1], scalars[1]))
        code, decoded = _exponents(ops, v, words, bias)
        if bias:
            negative = b.fcmp_ordered("<", v, ops.const(F, 0.0))
            code = b.or_(code, b.select(negative, ops.const(I32, 128), ops.const(I32, 0)))
        return [b.trunc(code, ops.type(I8)), b.fsub(v, decoded)][: 2 if feedback else 1]

    return body


# 8 bits straight from gradient and residual; 9 bits from values already computed, whose signs are packed apart.
eight_plain = stochastic([F], [I8], _encode_body(BIAS, False))
eight_feedback = stochastic([F, F], [I8, F], _encode_body(BIAS, True))
nine_plain = stochastic([F], [I8], _encode_body(0, False))
nine_feedback = stochastic([F], [I8, F], _encode_body(0, True))


def _eight(ops: Ops, code: Any) -> Any:
    b, wide = ops.b, ops.b.sext(code, ops.type(I32))
    negative = b.icmp_signed("<", wide, ops.const(I32, 0))
    return _powers(ops, b.and_(wide, ops.const(I32, 127)), negative, BIAS)


def _nine(ops: Ops, code: Any, sign: Any) -> Any:
    b = ops.b
    return _powers(ops, b.zext(code, ops.type(I32)), b.icmp_signed("!=", sign, ops.const(I8, 0)), 0)


eight_store = elementwise([I8], [F], lambda ops, v, s: [ops.b.fmul(_eight(ops, v[0]), s[0])])
eight_add = elementwise([F, I8], [F], lambda ops, v, s: [ops.b.fadd(v[0], _eight(ops, v[1]))])
nine_store = elementwise([I8, I8], [F], lambda ops, v, s: [ops.b.fmul(_nine(ops, v[0], v[1]), s[0])])
nine_add = elementwise([F, I8, I8], [F], lambda ops, v, s: [ops.b.fadd(v[0], _nine(ops, v[1], v[2]))])


def _signs(packing: bool) -> Any:
    """An intrinsic ``f(wide, words, groups)``: float32 signs to bits, or bits to bytes 0 and 255; 32 a group."""

    @intrinsic
    def signs(typingctx: Any, wide: Any, words: Any, groups: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            ops = Ops(b, 32)
            lanes, bits = b.inttoptr(args[0], I8.as_pointer()), b.inttoptr(args[1], I32.as_pointer())
            with cgutils.for_range(b, args[2]) as loop:
                at = b.gep(bits, [loop.index])
                if packing:
                    v = ops.load(b.gep(lanes, [b.mul(loop.index, L(128))]), F)
                    b.store(b.bitcast(b.fcmp_ordered("<", v, ops.const(F, 0.0)), I32), at, align=1)
                else:
                    mask = b.bitcast(b.load(at, align=1), ir.VectorType(ir.IntType(1), 32))
                    ops.store(b.sext(mask, ops.type(I8)), b.gep(lanes, [b.mul(loop.index, L(32))]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return signs


pack_signs, unpack_signs = _signs(True), _signs(False)


@kernel("UniTuple(int64, 3)(int64, int64, int64, int64, int64, int64, int64, float64, float64, int64, int64)")
def natural_encode(x, r, ro, out, table, levels, m, scale, decay, k0, k1):
    """Encode m segments at 8 or 9 bits; r and ro are 0 for none. Returns (bytes, non-finite, saturated)."""
    bounds, how, head = i64(table, m + 1), u32(levels, m), u32(out + 4, 2 * m)
    u32(out, 1)[0] = m
    zeros, rest, values = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    words = np.empty(BLOCK // 8, np.uint8)
    at: Any = out + 4 + 8 * m
    bad, saturated = np.int64(0), np.int64(0)
    for s in range(m):
        first, n, bits = bounds[s], bounds[s + 1] - bounds[s], np.int64(how[s])
        head[2 * s], head[2 * s + 1] = n, bits
        for start in range(0, n, BLOCK):
            part, where = min(BLOCK, n - start), first + start
            px, chance = x + 4 * where, (where, k0, k1)
            pr = r + 4 * where if r else place(zeros)
            if bits == 8:
                if r or ro:
                    odd = eight_feedback((px, pr, at + start, place(rest)), part, chance, (scale, decay))
                else:
                    odd = eight_plain((px, at + start), part, chance, (scale, decay))
            else:
                if r:
                    value_both((px, pr, place(values)), part, (scale, decay))
                else:
                    value_plain((px, place(values)), part, (scale, decay))
                if ro:
                    odd = nine_feedback((place(values), at + start, place(rest)), part, chance, (1.0,))
                else:
                    odd = nine_plain((place(values), at + start), part, chance, (1.0,))
                values[part:] = 0.0
                pack_signs(place(values), place(words), (part + 31) // 32)
                size = (part + 7) // 8
                u8(at + n + start // 8, size)[:] = words[:size]
            if ro:
                put(place(rest), ro + 4 * where, part)
            bad += odd[0]
            saturated += odd[1]
        at += n if bits == 8 else n + (n + 7) // 8
    ordered()
    hold(rest)
    return at - out, bad, saturated


@njit(nogil=True)
def extent(length, bits):
    """(bytes, bits of the last one in use) of a segment's data; -1 bytes where it is neither of 8 nor of 9 bits."""
    if bits == 8:
        return length, 0
    return (length + (length + 7) // 8 if bits == 9 else -1), length % 8


check_frame = segments_check(extent)


@kernel("int64(int64, int64, int64)")
def natural_check(payload, nbytes, n):
    """OK if the payload is exactly a frame of n elements, else which rule it breaks."""
    return check_frame(payload, nbytes, n)


@kernel("void(int64, int64, float64, boolean)")
def natural_decode(payload, out, scale, add):
    """out = decoded*scale, or out += decoded, for a checked payload."""
    m = np.int64(u32(payload, 1)[0])
    head = u32(payload + 4, 2 * m)
    signs, words = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.uint8)
    decoded = np.empty(BLOCK, np.float32)
    at: Any = payload + 4 + 8 * m
    target: Any = out
    for s in range(m):
        n: Any = np.int64(head[2 * s])
        bits = np.int64(head[2 * s + 1])
        if bits == 8:
            if add:
                eight_add((target, at, target), n, (1.0,))
            else:
                for start in range(0, n, BLOCK):
                    part = min(BLOCK, n - start)
                    eight_store((at + start, place(decoded)), part, (scale,))
                    put(place(decoded), target + 4 * start, part)
            at += n
        else:
            for start in range(0, n, BLOCK):
                part, here = min(BLOCK, n - start), target + 4 * start
                size = (part + 7) // 8
                words[:size] = u8(at + n + start // 8, size)
                unpack_signs(place(signs), place(words), (part + 31) // 32)
                if add:
                    nine_add((here, at + start, place(signs), here), part, (1.0,))
                else:
                    nine_store((at + start, place(signs), place(decoded)), part, (scale,))
                    put(place(decoded), here, part)
            at += n + (n + 7) // 8
        target += 4 * n
    ordered()
    hold(decoded)


@register
class Natural(Graded):
    """8 or 9 bits an element plus 8 bytes a segment, 4 a frame."""

    id, name = 50, "natural"
    params = (Param("bits", 8, 8, 9, "8: powers from 2^-86 to 2^40; 9: all of float32's", integer=True),)
    keeps_residual = True
    default_decay = 0.0
    units = "sum"
    conserves = True
    levels = (8, 9)
    exact = 9
    rules = RULES | {WORD: "8 or 9 bits an element", PADDING: "zero padding bits after each segment's last sign"}

    def configure(self, bits: float = 8) -> None:
        self.level = int(bits)

    def values(self) -> dict[str, float | str]:
        return {"bits": self.level}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        if level not in (8, 9):
            raise CodecError("level", "8 or 9 for natural (bits an element)", level)
        return cls(bits=level)

    @property
    def bits(self) -> int:
        return self.level

    def bound(self, n: int, segments: int, bits: int) -> int:
        return 4 + 8 * segments + n + ((n + 7 * segments) // 8 if bits == 9 else 0)

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        bits = np.full(call.m, self.level, np.uint32) if levels is None else levels
        where = address("levels", bits, bits.dtype, call.m)
        return Encoded(*natural_encode(*call.arrays, where, call.m, call.scale, self.decay, *key(call.seed)))

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        rule = int(natural_check(payload, nbytes, n))
        if rule == OK and mode != CHECK:
            natural_decode(payload, out, scale, mode == ADD)
        return rule
