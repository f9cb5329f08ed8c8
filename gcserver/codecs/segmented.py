"""Frames that begin with a table of their segments: u32 segments; for each, u32 length and u32 word; then their data.

What may live here: the walk that checks such a frame, and the rules that frames of segments can break. What a word
means, and how long the data of a segment are, is for codecs to say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcserver.codecs.framed import OK
from gcserver.codecs.jit import u8, u32

SHORT, LENGTHS, WORD, SIZE, PADDING = range(1, 6)

#: what a payload lacks that breaks a rule; what words and padding are, codecs add
RULES = {
    SHORT: "all of its segments (it is cut short)",
    LENGTHS: "segment lengths that add up to the partition",
    SIZE: "nothing after the last segment",
}


def segments_check(extent: Any) -> Any:
    """``f(payload, nbytes, n)`` for kernels: OK if the payload is exactly a frame of n elements, else the rule broken.

    extent(length, word): a compiled function; (bytes of a segment's data, bits of its last byte in use, 0 for all),
    bytes below 0 for a word there is none of.
    """

    # A closure: numba caches no kernel that hands a function to another.
    @njit(nogil=True)
    def check(payload, nbytes, n):
        if nbytes < 4:
            return SHORT
        m = np.int64(u32(payload, 1)[0])
        if nbytes < 4 + 8 * m:
            return SHORT
        head, data = u32(payload + 4, 2 * m), u8(payload, nbytes)
        at, left = 4 + 8 * m, n
        for s in range(m):
            length = np.int64(head[2 * s])
            if length > left:
                return LENGTHS
            left -= length
            size, used = extent(length, np.int64(head[2 * s + 1]))
            if size < 0:
                return WORD
            at += size
            if at > nbytes:
                return SHORT
            if used and data[at - 1] >> used:
                return PADDING
        if left != 0:
            return LENGTHS
        return OK if at == nbytes else SIZE

    return check
