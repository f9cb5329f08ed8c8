"""Codes of 2 to 8 bits, packed without gaps and unpacked again.

What may live here: the two conversions between bytes (one code each) and a little-endian bit stream, in which
code i takes bits [i*b, (i+1)*b) and bit j is bit j % 8 of byte j // 8. What codes mean is for codecs to say.

Eight codes make b bytes. Packing pushes the gaps out of a 64-bit word of eight codes in three steps of
shift, mask and or (pairs, fours, all eight), in four words a vector; unpacking takes the same steps back.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.jit import u8
from gcserver.codecs.vector import I8, I32, I64, Ops, intrinsic

LANES = 4  #: words of eight codes at a time


def _field(word: int, bits: int) -> int:
    """A mask of the low ``bits`` of every ``word`` bits."""
    return sum(((1 << bits) - 1) << at for at in range(0, 64, word))


def _squeeze(ops: Ops, x: Any, bits: int) -> Any:
    b = ops.b
    for half in (8, 16, 32):
        # Two fields of `have` bits, `half` apart, become one.
        have = bits * half // 8
        low = ops.const(I64, _field(2 * half, have))
        high = b.and_(b.lshr(x, ops.const(I64, half - have)), ops.const(I64, _field(2 * half, have) << have))
        x = b.or_(b.and_(x, low), high)
    return x


def _spread(ops: Ops, x: Any, bits: int) -> Any:
    b = ops.b
    for half in (32, 16, 8):
        have = bits * half // 8
        low = _field(2 * half, have)
        high = b.and_(b.shl(x, ops.const(I64, half - have)), ops.const(I64, low << half))
        x = b.or_(b.and_(x, ops.const(I64, low)), high)
    return x


def _conversion(packing: bool) -> Any:
    """An intrinsic ``f(bits, source, target, groups)`` that packs or unpacks groups of eight codes of 2..7 bits."""

    @intrinsic
    def convert(typingctx: Any, bits: Any, source: Any, target: Any, groups: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            byte = I8.as_pointer()
            src, dst = (b.inttoptr(a, byte) for a in args[1:3])
            wide, narrow = (src, dst) if packing else (dst, src)

            def at(base: Any, index: Any, step: int, kind: Any) -> Any:
                return b.bitcast(b.gep(base, [b.mul(index, I64(step))]), kind.as_pointer())

            def run(width: int, lanes: int, start: Any, stop: Any) -> None:
                ops = Ops(b, lanes)
                group = ir.IntType(8 * width)  # exactly its bytes: nothing is read or written beside them
                with cgutils.for_range_slice(b, start, stop, I64(lanes), inc=True) as (i, _):
                    words = at(wide, i, 8, ops.type(I64))
                    if packing:
                        x = _squeeze(ops, b.load(words, align=1), width)
                        for lane in range(lanes):
                            one = b.trunc(b.extract_element(x, I32(lane)), group)
                            b.store(one, at(narrow, b.add(i, I64(lane)), width, group), align=1)
                    else:
                        x = ir.Constant(ops.type(I64), ir.Undefined)
                        for lane in range(lanes):
                            one = b.load(at(narrow, b.add(i, I64(lane)), width, group), align=1)
                            x = b.insert_element(x, b.zext(one, I64), I32(lane))
                        b.store(_spread(ops, x, width), words, align=1)

            whole = b.and_(args[3], I64(-LANES))
            for width in range(2, 8):
                with b.if_then(b.icmp_signed("==", args[0], I64(width))):
                    run(width, LANES, I64(0), whole)
                    run(width, 1, whole, args[3])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return convert


pack_groups, unpack_groups = _conversion(True), _conversion(False)


@njit(nogil=True)
def pack(bits, source, target, n):
    """n codes, one a byte at source, to ceil(n*bits/8) bytes at target; bits 2..7, padding bits 0."""
    groups = n // 8
    pack_groups(bits, source, target, groups)
    rest = n - 8 * groups
    if rest:
        size = (rest * bits + 7) // 8
        codes, stream = u8(source + 8 * groups, rest), u8(target + bits * groups, size)
        stream[:] = 0
        for i in range(rest):
            at, code = i * bits, int(codes[i])
            stream[at >> 3] |= (code << (at & 7)) & 255
            if (at & 7) + bits > 8:
                stream[(at >> 3) + 1] |= code >> (8 - (at & 7))


@njit(nogil=True)
def unpack(bits, source, target, n):
    """n codes of the stream at source, one a byte to target; bits 2..7; reads ceil(n*bits/8) bytes."""
    groups = n // 8
    unpack_groups(bits, source, target, groups)
    rest = n - 8 * groups
    if rest:
        size = (rest * bits + 7) // 8
        stream, codes = u8(source + bits * groups, size), u8(target + 8 * groups, rest)
        for i in range(rest):
            at = i * bits
            code = int(stream[at >> 3]) >> (at & 7)
            if (at & 7) + bits > 8:
                code |= int(stream[(at >> 3) + 1]) << (8 - (at & 7))
            codes[i] = code & ((1 << bits) - 1)
