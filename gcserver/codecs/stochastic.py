"""Chance for stochastic codecs: a 32-bit word for each element, a pure function of (seed, element number).

What may live here: the counter-based generator and the loop that hands its words to vector code. No codec.

A counter, not a stream: whoever encodes a partition, in whatever blocks and on whatever machine, draws the
same word for the same element, so that a step repeated after a crash gives the same bytes (DESIGN section 4).
The word is a two-round multiply-xorshift hash (the constants of `lowbias32`) keyed before either round:

    z = splitmix64(seed); k0, k1 = low and high 32 bits of z
    h = i*0x9E3779B9 + k0;  h ^= h >> 16;  h *= 0x7FEB352D;  h ^= h >> 15;  h ^= k1;  h *= 0x846CA68B    (mod 2**32)

Eight cheap operations on eight lanes at once (the first product is a constant a lane). Take the high bits: in a
product they are the well mixed ones. It is no cipher, and need not be: what is asked of it is that roundings have the
right mean and variance, and are independent of one another and between seeds; `tests/unit/codecs/test_stochastic.py`
measures that. Without the first product, which spreads a counter over all 32 bits, neighbours are correlated by 1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError

from gcserver.codecs.vector import F32, I8, I16, I32, I64, Ops, intrinsic

_MASK = (1 << 64) - 1
SPREAD, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def key(seed: int) -> tuple[int, int]:
    """(k0, k1), two 32-bit keys from a seed in 0 <= seed < 2**64, by one step of splitmix64."""
    z = (int(seed) + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def words(ops: Ops, first: Any, k0: Any, k1: Any) -> Any:
    """The words of as many elements as there are lanes, from element ``first`` on.

    first, k0: 32-bit integers, k1: a vector of them.
    """
    b = ops.b
    steps = ir.Constant(ops.type(I32), [lane * SPREAD & 0xFFFFFFFF for lane in range(ops.width)])
    h = b.add(ops.splat(b.add(b.mul(first, I32(SPREAD)), k0)), steps)
    h = b.mul(b.xor(h, b.lshr(h, ops.const(I32, 16))), ops.const(I32, FIRST))
    h = b.xor(b.xor(h, b.lshr(h, ops.const(I32, 15))), k1)
    return b.mul(h, ops.const(I32, SECOND))


#: body(ops, inputs, scalars, words) -> outputs
Body = Callable[[Ops, list[Any], list[Any], Any], list[Any]]


def stochastic(inputs: list[Any], outputs: list[Any], body: Body, width: int = 32) -> Any:
    """``elementwise`` with chance: an intrinsic ``f(addresses, n, (first, k0, k1), scalars) -> (count, count)``.

    As in `vector.elementwise`, and the body's fourth argument is the words of elements first, first + 1, ...
    """
    sizes = {F32: 4, I8: 1, I16: 2, I32: 4}

    @intrinsic
    def loop(typingctx: Any, addresses: Any, n: Any, chance: Any, scalars: Any) -> Any:
        if set(addresses) != {types.int64} or set(scalars) != {types.float64} or set(chance) != {types.int64}:
            raise TypingError(f"addresses and chance are int64, scalars float64, not {addresses}, {chance}, {scalars}")
        result = types.UniTuple(types.int64, 2)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            where = cgutils.unpack_tuple(b, args[0])
            first, k0, k1 = (b.trunc(a, I32) for a in cgutils.unpack_tuple(b, args[2]))
            floats = [b.fptrunc(s, F32) for s in cgutils.unpack_tuple(b, args[3])]
            pointers = [b.inttoptr(a, I8.as_pointer()) for a in where]
            totals = [cgutils.alloca_once_value(b, I64(0)) for _ in range(2)]

            def run(lanes: int, start: Any, stop: Any) -> None:
                zero = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
                counts = [cgutils.alloca_once_value(b, zero) for _ in range(2)]
                for count in counts:
                    b.store(zero, count)
                ops = Ops(b, lanes, counts)
                vectors, second = [ops.splat(s) for s in floats], ops.splat(k1)
                with cgutils.for_range_slice(b, start, stop, I64(lanes), inc=True) as (i, _):
                    at = [b.gep(p, [b.mul(i, I64(sizes[e]))]) for p, e in zip(pointers, inputs + outputs, strict=True)]
                    drawn = words(ops, b.add(b.trunc(i, I32), first), k0, second)
                    values = [ops.load(p, e) for p, e in zip(at, inputs, strict=False)]
                    stored = body(ops, values, vectors, drawn)
                    for value, p in zip(stored, at[len(inputs) :], strict=True):
                        ops.store(value, p)
                for count, total in zip(counts, totals, strict=True):
                    packed = b.load(count)
                    for lane in range(lanes):
                        one = b.zext(b.extract_element(packed, I32(lane)), I64)
                        b.store(b.add(b.load(total), one), total)

            whole = b.and_(args[1], I64(-width))
            run(width, I64(0), whole)
            run(1, whole, args[1])
            return context.make_tuple(b, result, [b.load(t) for t in totals])

        return result(addresses, types.int64, chance, scalars), codegen

    return loop
