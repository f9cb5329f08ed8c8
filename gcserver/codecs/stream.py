"""What a pass writes and does not read again: to memory, around the caches.

What may live here: copies and requests of memory, for kernels. What is computed is the passes' own, in a block of the
first levels of cache, from where `put` takes it. A store that misses the caches fetches its line only to overwrite all
of it, and drives something else out; one that goes around them does neither. A model's residuals are in no cache when
they are needed next, nor is an average when its worker reads it; a sum that the owner goes on with at once comes back
from memory, which costs less than the lines that were not fetched.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.jit import f32
from gcserver.codecs.vector import F32, I8, I32, I64, LINE_BYTES, intrinsic, request

_FLOATS = LINE_BYTES // 4


@intrinsic
def prefetch(typingctx: Any, where: Any) -> Any:
    """Ask for the line at an address to be brought to the second level of cache; never faults."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # To the second level: asking for the first is no faster than waiting for the loads themselves.
        request(b, b.inttoptr(args[0], I8.as_pointer()), 2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _lines(typingctx: Any, source: Any, target: Any, n: Any) -> Any:
    """Copy n bytes, whole lines, to an address that begins one, around the caches."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(F32, _FLOATS).as_pointer()
        read, write = (b.inttoptr(a, I8.as_pointer()) for a in args[:2])
        around = b.module.add_metadata([I32(1)])
        with cgutils.for_range_slice(b, I64(0), args[2], I64(LINE_BYTES), inc=True) as (i, _):
            value = b.load(b.bitcast(b.gep(read, [i]), line), align=1)
            b.store(value, b.bitcast(b.gep(write, [i]), line), align=LINE_BYTES).set_metadata("nontemporal", around)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def ordered(typingctx: Any) -> Any:
    """Let no later store be seen before those of `put`, which are in no order otherwise.

    The strongest of fences: a weaker one is no instruction at all on x86, whose other stores need none.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True)
def put(source, target, n):
    """Copy n float32 between addresses, whole lines around the caches; `ordered` is due before others look."""
    values, places = f32(source, n), f32(target, n)
    before = min(n, (-target % LINE_BYTES) // 4) if target % 4 == 0 else n
    for i in range(before):
        places[i] = values[i]
    whole = (n - before) // _FLOATS * _FLOATS
    _lines(source + 4 * before, target + 4 * before, 4 * whole)
    for i in range(before + whole, n):
        places[i] = values[i]
