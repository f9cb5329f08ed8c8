"""Loops over arrays written directly as vector code, for numba kernels.

What may live here: generators of numba intrinsics that emit LLVM vectors of a fixed width. Why not leave
it to LLVM's vectoriser: it widens uint32 arithmetic to 64 bits (numba's typing), gives up on loops that
count as they go, and may choose lanes by what the CPU has. Here the lanes are written down, so bytes
do not depend on the CPU, and one pass does everything: arithmetic, conversion, counting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.errors import TypingError

#: numba's decorator without its types, which know nothing of what it does to a signature.
intrinsic: Any = extending.intrinsic

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(b) for b in (1, 8, 16, 32, 64))

#: Elements a step: four AVX2 or two AVX-512 registers of float32, enough to hide latencies.
WIDTH = 32

LINE_BYTES = 64  #: of a cache line
#: Bytes between asking for what a pass reads and reading it. Passes go from block to block, a page (1024 float32)
#: each: a processor's own prefetching ends where a page does, and past branches that nobody foresees it cannot look.
BYTES_AHEAD = 2048

MAGNITUDE = 0x7FFFFFFF  #: float32 bits without the sign
INFINITE = 0x7F800000  #: magnitudes from here on are infinity or NaN


def request(b: Any, pointer: Any, level: int = 3) -> None:
    """Ask for the line at a pointer to be brought to the first level of cache (3) or the second (2); never faults."""
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    b.call(b.module.declare_intrinsic("llvm.prefetch", [byte], kind), [pointer, I32(0), I32(level), I32(1)])


class Ops:
    """The vector operations a loop body may use, at one width; thin names over an IR builder."""

    def __init__(self, builder: Any, width: int, counts: Any = ()) -> None:
        self.b, self.width, self.counts = builder, width, counts

    def type(self, element: Any) -> Any:
        return ir.VectorType(element, self.width)

    def const(self, element: Any, value: float) -> Any:
        return ir.Constant(self.type(element), [value] * self.width)

    def splat(self, scalar: Any) -> Any:
        empty = ir.Constant(self.type(scalar.type), ir.Undefined)
        first = self.b.insert_element(empty, scalar, I32(0))
        return self.b.shuffle_vector(first, empty, ir.Constant(self.type(I32), [0] * self.width))

    def load(self, pointer: Any, element: Any) -> Any:
        return self.b.load(self.b.bitcast(pointer, self.type(element).as_pointer()), align=1)

    def stream(self, pointer: Any, element: Any) -> Any:
        """`load` in a pass over memory: asks for what is BYTES_AHEAD of it too."""
        self.ask(pointer, element, BYTES_AHEAD)
        return self.load(pointer, element)

    def ask(self, pointer: Any, element: Any, beyond: int = 0) -> None:
        """Ask for as many elements as there are lanes, so many bytes beyond a pointer; nothing for single ones."""
        if self.width > 1:
            for line in range(beyond, beyond + self.width * _SIZES[element], LINE_BYTES):
                request(self.b, self.b.gep(pointer, [I64(line)]))

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=1)

    def bits(self, value: Any) -> Any:
        return self.b.bitcast(value, self.type(I32))

    def magnitude(self, value: Any) -> Any:
        return self.b.and_(self.bits(value), self.const(I32, MAGNITUDE))

    def nonfinite(self, value: Any) -> Any:
        """Mask of the float32 lanes that are infinite or NaN."""
        return self.b.icmp_signed(">", self.magnitude(value), self.const(I32, INFINITE - 1))

    def any(self, mask: Any) -> Any:
        """Whether any lane of a mask is set."""
        packed = self.b.bitcast(mask, ir.IntType(self.width))
        return self.b.icmp_unsigned("!=", packed, ir.Constant(packed.type, 0))

    def count(self, mask: Any, slot: int) -> None:
        """Count the set lanes of a mask, in one of the loop's two counters; also valid inside a branch."""
        lanes = self.b.sub(self.b.load(self.counts[slot]), self.b.sext(mask, self.type(I32)))
        self.b.store(lanes, self.counts[slot])

    def fma_free(self, x: Any, scale: Any, r: Any, decay: Any) -> Any:
        """x*scale + r*decay, each operation rounded: contracting them would change bytes by CPU."""
        return self.b.fadd(self.b.fmul(x, scale), self.b.fmul(r, decay))


Body = Callable[[Ops, list[Any], list[Any]], list[Any]]

_SIZES = {F32: 4, F64: 8, F16: 2, I8: 1, I16: 2, I32: 4, I64: 8}


def emit(
    b: Any,
    inputs: list[Any],
    outputs: list[Any],
    args: Any,
    body: Callable[[Ops, Any, list[Any], list[Any]], list[Any]],
    width: int = WIDTH,
    asked: int = 0,
) -> list[Any]:
    """Write the loops of `elementwise`, whose arguments ``args`` are: the totals of the two counters.

    body(ops, i, inputs, scalars): as there, i the number of the first lane's element. width: elements a step. asked:
    so many addresses of float32 at the end of args are only asked for, a step as many as there are lanes: what is
    needed next, where the inputs are in the cache already.
    """
    where, scalars = cgutils.unpack_tuple(b, args[0]), cgutils.unpack_tuple(b, args[2])
    pointers = [b.inttoptr(a, I8.as_pointer()) for a in where]
    floats = [b.fptrunc(s, F32) for s in scalars]
    totals = [cgutils.alloca_once_value(b, I64(0)) for _ in range(2)]

    def run(lanes: int, start: Any, stop: Any) -> None:
        zero = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        counts = [cgutils.alloca_once_value(b, zero) for _ in range(2)]
        ops = Ops(b, lanes, counts)
        vectors = [ops.splat(s) for s in floats]
        for count in counts:
            b.store(zero, count)
        with cgutils.for_range_slice(b, start, stop, I64(lanes), inc=True) as (i, _):
            elements = inputs + outputs + [F32] * asked
            at = [b.gep(p, [b.mul(i, I64(_SIZES[e]))]) for p, e in zip(pointers, elements, strict=True)]
            ends = len(inputs), len(inputs + outputs)
            sources, targets, following = at[: ends[0]], at[ends[0] : ends[1]], at[ends[1] :]
            take = ops.load if asked else ops.stream
            values = [take(p, e) for p, e in zip(sources, inputs, strict=True)]
            for p in following:
                ops.ask(p, F32)
            stored = body(ops, i, values, vectors)
            for value, p in zip(stored, targets, strict=True):
                ops.store(value, p)
        for count, total in zip(counts, totals, strict=True):
            packed = b.load(count)
            for lane in range(lanes):
                one = b.zext(b.extract_element(packed, I32(lane)), I64)
                b.store(b.add(b.load(total), one), total)

    whole = b.and_(args[1], I64(-width))
    run(width, I64(0), whole)
    run(1, whole, args[1])
    return [b.load(t) for t in totals]


def elementwise(inputs: list[Any], outputs: list[Any], body: Body) -> Any:
    """An intrinsic ``f(addresses, n, scalars) -> (count, count)`` for use inside kernels.

    inputs, outputs: LLVM element types; ``addresses`` is the tuple of int64 addresses, inputs first. An
    output may be the same memory as an input, not overlap it otherwise. ``scalars``: a tuple of float64,
    handed to the body rounded to float32 and splatted (at least one). body(ops, inputs, scalars) returns the
    output vectors; what it counted with ``ops.count`` is the result. Asks for what follows its inputs in memory.
    """

    @intrinsic
    def loop(typingctx: Any, addresses: Any, n: Any, scalars: Any) -> Any:
        result = types.UniTuple(types.int64, 2)
        if set(addresses) != {types.int64} or set(scalars) != {types.float64}:
            raise TypingError(f"addresses are int64 and scalars float64, not {addresses}, {scalars}")

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def each(ops: Ops, i: Any, values: list[Any], scalars: list[Any]) -> list[Any]:
                return body(ops, values, scalars)

            totals = emit(builder, inputs, outputs, args, each)
            return context.make_tuple(builder, result, totals)

        return result(addresses, types.int64, scalars), codegen

    return loop
