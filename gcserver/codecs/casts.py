"""Codecs that send every element in some number format: none (float32), fp16, bf16.

What may live here: these codecs, their kernels, and the conversions of vectors that ``reduce`` shares.
They keep no residual: what rounding loses is lost, unbiased. Layout: n elements, little-endian, no header.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import cgutils

from gcserver.codecs.base import U32, Codec, CodecError, Encoded, register
from gcserver.codecs.framed import ADD, DECODE, OK, Call, Framed
from gcserver.codecs.jit import hold, kernel, place
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F16, I16, I32, INFINITE, Ops, elementwise
from gcserver.codecs.vector import F32 as F

#: Kernels take the format as a number so that one compiled function serves all three.
RAW, HALF, BFLOAT = 0, 1, 2
BLOCK = 1024  #: elements decoded at a time, into the L1 cache


def _unless(ops: Ops, rare: Any, usual: Any, fix: Callable[[], Any]) -> Any:
    """usual, replaced by fix() in the vectors that have a rare lane: the common case pays one test."""
    result = cgutils.alloca_once(ops.b, usual.type)
    ops.b.store(usual, result)
    with ops.b.if_then(ops.any(rare), likely=False):
        ops.b.store(fix(), result)
    return ops.b.load(result)


def to_half(ops: Ops, value: Any) -> Any:
    """float32 -> fp16, to nearest even; counts non-finite values (slot 0) and saturated ones (slot 1).

    Finite values that round beyond 65504 become +-65504: infinity would spread to every weight, the largest
    finite value clips one element.
    """
    b = ops.b

    def fix() -> Any:
        bad = ops.nonfinite(value)
        ops.count(bad, 0)
        ops.count(b.xor(bad, over), 1)
        limit = b.select(b.fcmp_ordered("<", value, ops.const(F, 0.0)), ops.const(F, -65504.0), ops.const(F, 65504.0))
        return b.fptrunc(b.select(b.xor(bad, over), limit, value), ops.type(F16))

    # From 65520 on rounding gives infinity.
    over = b.icmp_signed(">", ops.magnitude(value), ops.const(I32, 0x477FEFFF))
    return _unless(ops, over, b.fptrunc(value, ops.type(F16)), fix)


def from_half(ops: Ops, value: Any) -> Any:
    """fp16 -> float32, exact."""
    return ops.b.fpext(value, ops.type(F))


def to_bfloat(ops: Ops, value: Any) -> Any:
    """float32 -> bf16 bits, to nearest even; counts and saturates as ``to_half``; NaN stays NaN (quiet)."""
    b = ops.b
    bits, magnitude = ops.bits(value), ops.magnitude(value)
    top = b.lshr(bits, ops.const(I32, 16))

    def fix() -> Any:
        bad = ops.nonfinite(value)
        ops.count(bad, 0)
        ops.count(b.xor(bad, over), 1)
        isnan = b.icmp_signed(">", magnitude, ops.const(I32, INFINITE))
        # Cutting the low bits off gives the largest bf16 for what would overflow, and infinity for infinity.
        cut = b.select(isnan, b.or_(top, ops.const(I32, 0x40)), top)
        return b.trunc(b.select(over, cut, rounded), ops.type(I16))

    odd = b.and_(top, ops.const(I32, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, ops.const(I32, 0x7FFF))), ops.const(I32, 16))
    # 0x7F7F8000 is the first magnitude that rounds up to infinity.
    over = b.icmp_signed(">", magnitude, ops.const(I32, 0x7F7F7FFF))
    return _unless(ops, over, b.trunc(rounded, ops.type(I16)), fix)


def from_bfloat(ops: Ops, value: Any) -> Any:
    """bf16 bits -> float32, exact."""
    b = ops.b
    return b.bitcast(b.shl(b.zext(value, ops.type(I32)), ops.const(I32, 16)), ops.type(F))


def _raw(ops: Ops, value: Any) -> Any:
    ops.count(ops.nonfinite(value), 0)
    return value


def _store(convert: Any) -> Any:
    def body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
        return [convert(ops, ops.b.fmul(values[0], scalars[0]))]

    return body


def _load(convert: Any) -> Any:
    def body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
        return [ops.b.fmul(convert(ops, values[0]), scalars[0])]

    return body


def _load_add(convert: Any) -> Any:
    def body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
        return [ops.b.fadd(values[0], convert(ops, values[1]))]

    return body


def _same(ops: Ops, value: Any) -> Any:
    return value


store_raw = elementwise([F], [F], _store(_raw))
store_half = elementwise([F], [F16], _store(to_half))
store_bfloat = elementwise([F], [I16], _store(to_bfloat))
load_raw = elementwise([F], [F], _load(_same))
load_half = elementwise([F16], [F], _load(from_half))
load_bfloat = elementwise([I16], [F], _load(from_bfloat))
add_raw = elementwise([F, F], [F], _load_add(_same))
add_half = elementwise([F, F16], [F], _load_add(from_half))
add_bfloat = elementwise([F, I16], [F], _load_add(from_bfloat))


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, float64)")
def cast_store(kind, out, x, n, scale):
    """out = kind(x*scale) for n elements; returns (non-finite, saturated)."""
    if kind == RAW:
        return store_raw((x, out), n, (scale,))
    if kind == HALF:
        return store_half((x, out), n, (scale,))
    return store_bfloat((x, out), n, (scale,))


@kernel("void(int64, int64, int64, int64, float64)")
def cast_load(kind, out, payload, n, scale):
    """out = float32(payload)*scale for n elements of kind."""
    block = np.empty(BLOCK, np.float32)
    size = 4 if kind == RAW else 2
    for start in range(0, n, BLOCK):
        part, at = min(BLOCK, n - start), payload + size * start
        if kind == RAW:
            load_raw((at, place(block)), part, (scale,))
        elif kind == HALF:
            load_half((at, place(block)), part, (scale,))
        else:
            load_bfloat((at, place(block)), part, (scale,))
        put(place(block), out + 4 * start, part)
    ordered()
    hold(block)


@kernel("void(int64, int64, int64, int64)")
def cast_add(kind, acc, payload, n):
    """acc += float32(payload) for n elements of kind."""
    if kind == RAW:
        add_raw((acc, payload, acc), n, (1.0,))
    elif kind == HALF:
        add_half((acc, payload, acc), n, (1.0,))
    else:
        add_bfloat((acc, payload, acc), n, (1.0,))


def apply_cast(
    codec: Codec, kind: int, itemsize: int, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int
) -> int:
    """`framed.Readable.apply` for payloads that are n elements of a kind and nothing else; CodecError unless they are.

    itemsize: bytes of an element.
    """
    if nbytes != n * itemsize:
        raise CodecError("payload.nbytes", f"{n * itemsize} ({codec.name} of {n})", nbytes)
    if mode == DECODE:
        cast_load(kind, out, payload, n, scale)
    elif mode == ADD:
        cast_add(kind, out, payload, n)
    return OK


class Cast(Framed):
    """What none, fp16 and bf16 share; ``kind`` and ``itemsize`` tell them apart."""

    kind: int
    itemsize: int
    units = "mean"
    conserves = False

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return n * self.itemsize

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        nonfinite, saturated = cast_store(self.kind, call.out, call.x, call.n, call.scale)
        return Encoded(call.n * self.itemsize, nonfinite, saturated)

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        return apply_cast(self, self.kind, self.itemsize, payload, nbytes, out, n, scale, mode)


@register
class NoCodec(Cast):
    """float32 as it is; conserves trivially (nothing is lost)."""

    id, name, kind, itemsize = 0, "none", RAW, 4
    conserves = True


@register
class Fp16(Cast):
    """IEEE half precision, to nearest even, saturating at +-65504."""

    id, name, kind, itemsize = 1, "fp16", HALF, 2


@register
class Bf16(Cast):
    """bfloat16: float32's range with 8 bits of mantissa, to nearest even."""

    id, name, kind, itemsize = 2, "bf16", BFLOAT, 2
