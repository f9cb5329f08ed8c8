"""One pass over gradient and residual that collects the elements above a bound and keeps the rest.

What may live here: that pass and the workspace it fills; who chooses the bound (``select`` for an exact k, the
threshold codecs) lives elsewhere. Masks come out of vector code, indices out of the masks' set bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from gcserver.codecs.jit import f32, i64, place, u32
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32, I1, I8, I32, I64, MAGNITUDE, Ops, intrinsic

BLOCK = 1024  #: elements between checks of capacity


@intrinsic
def mask_block(typingctx: Any, where: Any, n: Any, scale: Any, decay: Any, below: Any) -> Any:
    """v = x*scale + r*decay to a block, and one bit an element: whether its magnitude is > below.

    where: addresses (x, r, block, words); n: a multiple of 32; words: uint32[n/32].
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops = Ops(b, 32)
        px, pr, block, pwords = (b.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(b, args[0]))
        vscale, vdecay = (ops.splat(b.fptrunc(a, F32)) for a in args[2:4])
        vbelow = ops.splat(b.trunc(args[4], I32))
        with cgutils.for_range_slice(b, I64(0), args[1], I64(32), inc=True) as (i, _):
            at = b.mul(i, I64(4))
            x, r = ops.stream(b.gep(px, [at]), F32), ops.stream(b.gep(pr, [at]), F32)
            v = ops.fma_free(x, vscale, r, vdecay)
            ops.store(v, b.gep(block, [at]))
            mask = b.bitcast(b.icmp_signed(">", ops.magnitude(v), vbelow), I32)
            word = b.bitcast(b.gep(pwords, [b.lshr(i, I64(3))]), I32.as_pointer())
            b.store(mask, word, align=1)
        return context.get_dummy_value()

    int_, float_ = types.int64, types.float64
    return types.void(types.UniTuple(int_, 4), int_, float_, float_, int_), codegen


def _bit_intrinsic(name: str) -> Any:
    @intrinsic
    def operation(typingctx: Any, word: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            # Zero has no lowest bit; 64 is what the callers' unused slots may hold.
            return b.cttz(args[0], I1(0)) if name == "cttz" else b.ctpop(args[0])

        return types.int64(types.int64), codegen

    return operation


lowest_bit, bit_count = _bit_intrinsic("cttz"), _bit_intrinsic("ctpop")

AT_ONCE = 3  #: set bits extracted without asking whether they exist: a wrong guess costs more than two bits
DENSE = 10  #: set bits a block from which that pays
HISTOGRAM = 8192  #: bins of a workspace
MARGIN = BLOCK + AT_ONCE  #: slots of a workspace beyond its capacity, written before it is checked


@njit(nogil=True)
def extract(origin, values, found, indices, collected, masks):
    """Append the elements of a block whose bits are set in the masks; zero them in the block. Their new number.

    origin: index of the block's first element; values: address of the block's float32; indices, collected, masks: of
    work's (handing work itself on would count the references of all its arrays, once a block).
    """
    idx, val = u32(indices, 1 << 32), f32(collected, 1 << 32)
    words, residual = i64(masks, BLOCK // 64), f32(values, BLOCK)
    before, reached = found, np.int64(0)
    for w in range(BLOCK // 64):
        reached += bit_count(words[w])
    if reached > DENSE:
        for w in range(BLOCK // 64):
            word, base = words[w], origin + 64 * w
            slot, found = found, found + bit_count(word)
            while True:
                for j in range(AT_ONCE):
                    idx[slot + j] = np.uint32(base + lowest_bit(word))
                    word &= word - 1
                slot += AT_ONCE
                if slot >= found:
                    break
    elif reached > 0:
        for w in range(BLOCK // 64):
            word, base = words[w], origin + 64 * w
            while word != 0:
                idx[found] = np.uint32(base + lowest_bit(word))
                word &= word - 1
                found += 1
    for c in range(before, found):
        local = np.int64(idx[c]) - origin
        val[c] = residual[local]
        residual[local] = 0.0
    return found


@njit(nogil=True)
def collect(x, r, ro, n, first, scale, decay, below, at, limit, work):
    """Collect a segment's elements of magnitude > below into ``work`` from slot ``at``, indices plus ``first``.

    Returns their number, or -1 as soon as there are more than ``limit`` (work holds at + limit + MARGIN). ro receives
    v, and 0 where an element was collected. r = 0: no residual; ro = 0: nobody wants the new one.
    """
    zeros, block, masks = place(work[2]), place(work[3]), place(work[5])
    idx, val = place(work[0]), place(work[1])
    residual = f32(block, BLOCK)
    words32 = u32(masks, BLOCK // 32)
    found: Any = at
    last = at + limit
    scale32, decay32 = np.float32(scale), np.float32(decay)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        px = x + 4 * start
        pr = zeros if r == 0 else r + 4 * start
        whole = size & ~31
        if size < BLOCK:
            words32[:] = 0
        mask_block((px, pr, block, masks), whole, scale, decay, below)
        if whole < size:
            xs, rs, bits = f32(px, size), f32(pr, size), u32(block, size)
            tail = np.uint32(0)
            for i in range(whole, size):
                residual[i] = np.float32(xs[i] * scale32) + np.float32(rs[i] * decay32)
                if np.int64(bits[i]) & MAGNITUDE > below:
                    tail |= np.uint32(1) << np.uint32(i - whole)
            words32[whole // 32] = tail
        found = extract(first + start, block, found, idx, val, masks)
        if ro != 0:
            put(block, ro + 4 * start, size)
        if found > last:
            ordered()
            return -1
    ordered()
    return found - at


@njit(nogil=True)
def workspace(slots):
    """Memory of one encode: so many indices and values collected, and a block's worth of each kernel's scratch.

    (idx uint32, val float32, zeros float32, block float32, keys uint16, words uint32, histogram uint32). The first two
    are where elements are collected and stay until the payload is written; the others are nobody's between calls.
    """
    return (
        np.empty(slots + MARGIN, np.uint32),
        np.empty(slots + MARGIN, np.float32),
        np.zeros(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.uint16),
        np.empty(BLOCK, np.uint32),
        np.empty(HISTOGRAM, np.uint32),
    )


@njit(nogil=True)
def room(n, k):
    """Candidates worth providing for when k of n are wanted."""
    return min(n, 4 * k + 8192)
