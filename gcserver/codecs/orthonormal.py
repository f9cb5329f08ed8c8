"""Gram-Schmidt on the columns of a thin matrix, the same bytes on every machine.

What may live here: the sum of products in a fixed order, and the orthonormalisation; no codec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.jit import f32, place
from gcserver.codecs.vector import F64, I8, I32, I64, Ops, intrinsic

LANES, BLOCK = 16, 4096  #: of the float64 sums
DEPENDENT = 1e-20  #: a column that keeps less of its squared length than this is a combination of those before


@intrinsic
def dot_block(typingctx: Any, x: Any, y: Any, n: Any) -> Any:
    """Sum of x*y of n float64: lane j of 16 adds the elements i with i % 16 == j in order, then lanes in order."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops = Ops(b, LANES)
        px, py = (b.inttoptr(a, I8.as_pointer()) for a in args[:2])
        zero = ops.const(F64, 0.0)
        total = cgutils.alloca_once(b, zero.type)
        b.store(zero, total)
        whole = b.and_(args[2], I64(-LANES))
        with cgutils.for_range_slice(b, I64(0), whole, I64(LANES), inc=True) as (i, _):
            at = b.mul(i, I64(8))
            product = b.fmul(ops.load(b.gep(px, [at]), F64), ops.load(b.gep(py, [at]), F64))
            b.store(b.fadd(b.load(total), product), total)
        lanes = b.bitcast(total, F64.as_pointer())
        with cgutils.for_range_slice(b, whole, args[2], I64(1), inc=True) as (i, _):
            x_i, y_i = (b.load(b.bitcast(b.gep(p, [b.mul(i, I64(8))]), F64.as_pointer())) for p in (px, py))
            lane = b.gep(lanes, [b.sub(i, whole)])
            b.store(b.fadd(b.load(lane), b.fmul(x_i, y_i)), lane)
        vector = b.load(total)
        result = b.extract_element(vector, I32(0))
        for i in range(1, LANES):
            result = b.fadd(result, b.extract_element(vector, I32(i)))
        return result

    return types.float64(types.int64, types.int64, types.int64), codegen


@njit(nogil=True)
def dot(x, y, n):
    """Sum of x*y of n float64 in the fixed order: blocks of 4096 in order, each as `dot_block`."""
    total = 0.0
    for start in range(0, n, BLOCK):
        total += dot_block(x + 8 * start, y + 8 * start, min(BLOCK, n - start))
    return total


@njit(nogil=True)
def orthonormalise(source, target, n, rank):
    """target = an orthonormal basis of the columns of source (Gram-Schmidt), both rank rows of n float32.

    In float64, column by column, each earlier column subtracted in order; once more if less than half of the
    length is left ("twice is enough"). A column that was zero or depends on those before becomes zero: no
    direction is invented that other nodes' gradients do not have. One that is not finite becomes NaN throughout.
    """
    wide = np.empty(max(1, rank * n), np.float64)
    column = f32(source, rank * n)
    for i in range(rank * n):
        wide[i] = np.float64(column[i])
    base = place(wide)
    for k in range(rank):
        mine = wide[k * n : (k + 1) * n]
        at = base + 8 * k * n
        before = dot(at, at, n)
        after = before
        if before > 0.0:
            for _ in range(2):
                for j in range(k):
                    share = dot(base + 8 * j * n, at, n)
                    other = wide[j * n : (j + 1) * n]
                    for i in range(n):
                        mine[i] -= share * other[i]
                after = dot(at, at, n)
                if k == 0 or after >= 0.25 * before:
                    break
        out = f32(target + 4 * k * n, n)
        if not np.isfinite(before) or not np.isfinite(after):
            mine[:] = np.nan
        elif before == 0.0 or after <= DEPENDENT * before:
            mine[:] = 0.0
        else:
            length = np.sqrt(after)
            for i in range(n):
                mine[i] /= length
        for i in range(n):
            out[i] = np.float32(mine[i])
