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

from gcproto.layouts import FIRST, SECOND, SPREAD, rounding_keys
from gcserver.codecs.vector import I32, Ops, emit, intrinsic


def key(seed: int) -> tuple[int, int]:
    """(k0, k1), two 32-bit keys from a seed in 0 <= seed < 2**64, by one step of splitmix64."""
    return rounding_keys(int(seed))


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


def stochastic(inputs: list[Any], outputs: list[Any], body: Body, width: int = 32, asked: int = 0) -> Any:
    """``elementwise`` with chance: an intrinsic ``f(addresses, n, (first, k0, k1), scalars) -> (count, count)``.

    As in `vector.elementwise`, and the body's fourth argument is the words of elements first, first + 1, ... The last
    ``asked`` addresses are only asked for, as in `vector.emit`.
    """

    @intrinsic
    def loop(typingctx: Any, addresses: Any, n: Any, chance: Any, scalars: Any) -> Any:
        if set(addresses) != {types.int64} or set(scalars) != {types.float64} or set(chance) != {types.int64}:
            raise TypingError(f"addresses and chance are int64, scalars float64, not {addresses}, {chance}, {scalars}")
        result = types.UniTuple(types.int64, 2)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            first, k0, k1 = (b.trunc(a, I32) for a in cgutils.unpack_tuple(b, args[2]))

            def each(ops: Ops, i: Any, values: list[Any], scalars: list[Any]) -> list[Any]:
                drawn = words(ops, b.add(b.trunc(i, I32), first), k0, ops.splat(k1))
                return body(ops, values, scalars, drawn)

            totals = emit(b, inputs, outputs, (args[0], args[1], args[3]), each, width, asked)
            return context.make_tuple(b, result, totals)

        return result(addresses, types.int64, chance, scalars), codegen

    return loop
