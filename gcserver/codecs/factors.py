"""Vectors of two exchanges on the wire with 16 bits an element: what is sent as it is, then what is rounded.

What may live here: that layout and its kernels. Which elements are sent as they are is the codec's business.

Layout: w (uint32), w elements as float32, all others as bfloat16 (to nearest even). So a payload says itself how many
elements it is of, and can be added up where the levels of its segments are not known yet.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gcserver.codecs.base import U8, CodecError
from gcserver.codecs.casts import (
    add_bfloat,
    add_raw,
    from_bfloat,
    load_bfloat,
    load_raw,
    store_bfloat,
    store_raw,
    to_bfloat,
)
from gcserver.codecs.framed import ADD, DECODE, OK
from gcserver.codecs.jit import kernel, u32
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import elementwise

HEAD = 4  #: bytes of w
SIZE = 1  #: the rule that a payload's length follows from its elements and w
RULES = {SIZE: f"{HEAD} + 4w bytes, and 2 for each element beyond w"}


def narrow_bytes(n: int, whole: int) -> int:
    """Bytes of a payload of n elements, the first ``whole`` of them as they are; nothing of no elements."""
    return HEAD + 4 * whole + 2 * (n - whole) if n else 0


def narrow_floats(payload: U8) -> int:
    """Elements of a payload. Raises CodecError if it is none."""
    if not payload.size:
        return 0
    whole = int.from_bytes(payload[:HEAD].tobytes(), "little")
    rest = payload.size - HEAD - 4 * whole
    if rest < 0 or rest % 2 or payload.size <= HEAD:
        raise CodecError("payload.nbytes", f"{RULES[SIZE]} (w is {whole})", payload.size)
    return whole + rest // 2


_round = elementwise([F], [F], lambda ops, values, _: [from_bfloat(ops, to_bfloat(ops, values[0]))])


@njit(nogil=True)
def rounded(x, n):
    """x = what a payload gives of n elements that are rounded, in place; the number of non-finite ones."""
    return _round((x, x), n, (1.0,))[0]


@kernel("int64(int64, int64, int64, int64)")
def narrow_write(x, out, n, whole):
    """The payload of float32[n] at x, the first ``whole`` as they are; the number of non-finite ones."""
    u32(out, 1)[0] = whole
    bad = store_raw((x, out + 4), whole, (1.0,))[0]
    return bad + store_bfloat((x + 4 * whole, out + 4 + 4 * whole), n - whole, (1.0,))[0]


@kernel("int64(int64, int64, int64, int64, float64, int64)")
def narrow_apply(payload, nbytes, out, n, scale, mode):
    """`framed.Readable.apply` of a payload of n elements: OK or SIZE."""
    if n == 0 or nbytes <= HEAD:
        return OK if n == nbytes == 0 else SIZE
    whole = np.int64(u32(payload, 1)[0])
    if whole > n or nbytes != HEAD + 4 * whole + 2 * (n - whole):
        return SIZE
    exact, rest = payload + HEAD, payload + HEAD + 4 * whole
    later = out + 4 * whole
    if mode == DECODE:
        load_raw((exact, out), whole, (scale,))
        load_bfloat((rest, later), n - whole, (scale,))
    elif mode == ADD:
        add_raw((out, exact, out), whole, (1.0,))
        add_bfloat((later, rest, later), n - whole, (1.0,))
    return OK
