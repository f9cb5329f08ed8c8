"""What all sparsifiers share: collecting what reaches a threshold, and the payload it is written to.

What may live here: the layout of sparse payloads (their packing is `packing`'s), checking and decoding them, and the
kernel helpers with which a codec's encode kernel fills one. No rule of selection: each codec has its own file;
no Python interface: that is `sparsifier`'s.

How a codec's encode kernel uses it, all numbers and addresses except ``work``::

    work = workspace(slots)                  # slots >= sum of caps + max over segments of room(length, cap)
    counts, total, bad = u32(out + 4, m), 0, 0
    for each segment s of length n > 0 at first:
        count, reached, nonfinite = above(x + 4*first, r and r + 4*first, ro and ro + 4*first, n, first,
                                          scale, decay, below, cap, total, work)
        counts[s] = count; total += count; bad += nonfinite
    nbytes = finish(out, m, total, form, ro, uo, work)

``below`` is a bound on the magnitude's bits: ``bits_below(threshold)`` makes |v| >= threshold of it. ``select`` (of
`select`, same arguments with k in place of below and cap) appends exactly k instead. The kernel's arguments begin with
`sparsifier.Job`. With a momentum (uo != 0), `momentum.correct` comes first, and selection then reads v from ro,
without a residual, and keeps none (`topk` shows it); `finish` clears ro and uo where something was sent.

Payload (little-endian): u32 segments + form << 24; u32 count of each segment; the indices, relative to the partition
and strictly ascending: u32 each or packed; their values: f32 each or packed. form: bit 0 packed indices; bits 1 and 2
the width of values: 0 float32, 1 sixteen bits, 2 eight bits. Other forms are refused here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcproto.layouts import EXACT, MOST_SEGMENTS, PACKED
from gcserver.codecs.collect import BLOCK, collect, room, workspace
from gcserver.codecs.framed import CHECK, DECODE, OK
from gcserver.codecs.jit import f32, hold, kernel, place, u32
from gcserver.codecs.packing import (
    gap_bytes,
    pack_gaps,
    pack_values,
    unpack_gaps,
    unpack_values,
    valid_headers,
    value_bytes,
    value_groups,
)
from gcserver.codecs.select import magnitudes_block, select
from gcserver.codecs.stream import ordered, prefetch, put
from gcserver.codecs.vector import INFINITE, MAGNITUDE

AHEAD = 64  #: elements between asking for a line and using it

__all__ = ["above", "bits_below", "finish", "reaching", "room", "select", "workspace"]


@njit(nogil=True)
def bits_below(threshold):
    """The largest magnitude bits that do not reach a threshold (float64): those above them have |v| >= threshold.

    0 for a threshold that is zero, negative or NaN: whatever is not zero reaches it.
    """
    if not threshold > 0.0:
        return 0
    if threshold > 3.4028234663852886e38:
        return INFINITE - 1
    rounded = np.empty(1, np.float32)
    rounded[0] = threshold
    bits = np.int64(u32(place(rounded), 1)[0])
    # The float32 just at or above the threshold, less one; at least zero, which is never sent.
    return max(0, bits - 1 if np.float64(rounded[0]) >= threshold else bits)


@njit(nogil=True)
def reaching(x, r, n, scale, decay, below, work):
    """How many elements of v = x*scale + r*decay have magnitude bits above ``below``; reads only."""
    zeros, mags = work[2], work[5]
    total = np.int64(0)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        magnitudes_block((x + 4 * start, pr, place(mags)), size, (scale, decay))
        for i in range(size):
            total += np.int64(mags[i]) > below
    return total


@njit(nogil=True)
def nonfinite(found, at, work):
    """How many of the ``found`` elements in work's slots from ``at`` are infinite or NaN."""
    bits, bad = u32(place(work[1]) + 4 * at, found), np.int64(0)
    for i in range(found):
        bad += np.int64(bits[i]) & MAGNITUDE >= INFINITE
    return bad


@njit(nogil=True)
def above(x, r, ro, n, first, scale, decay, below, cap, at, work):
    """Append what exceeds ``below`` of a segment, at most ``cap`` elements: (appended, exceeding, non-finite).

    One pass over x and r (addresses of the segment's float32[n]; r = 0: no residual) collects the elements of
    v = x*scale + r*decay whose magnitude bits are > below into ``work``'s slots from ``at``, indices plus ``first``,
    ascending. ro (0: nobody wants it) receives v, and 0 where an element was taken. Only if more than cap (>= 1)
    exceed, further passes take exactly the cap largest, the lowest index first among equals, and the others
    stay in ro; ``exceeding`` counts all of them. Non-finite elements exceed every bound below INFINITE and are counted.
    """
    found = collect(x, r, ro, n, first, scale, decay, below, at, cap, work)
    if found >= 0:
        return found, found, nonfinite(found, at, work)
    reached = reaching(x, r, n, scale, decay, below, work)
    return cap, reached, select(x, r, ro, n, cap, first, scale, decay, at, work)


@njit(nogil=True)
def finish(out, m, total, form, ro, u, work):
    """Write the payload of ``total`` collected elements, whose counts are at out + 4 already; its length in bytes.

    form: the codec's, how indices and values are packed. ro: address of the whole new residual (0: none), which
    receives what rounding loses of the sent. u: address of a momentum to be zeroed where sent (0: none); without
    one, ro is expected to be 0 there already, so that exact values need no visit.
    """
    u32(out, 1)[0] = m | (form << 24)
    at = out + 4 + 4 * m
    idx, val, width = work[0], work[1], form >> 1
    if form & PACKED:
        at += pack_gaps(idx, total, at)
    else:
        u32(at, total)[:] = idx[:total]
        at += 4 * total
    if width == EXACT:
        f32(at, total)[:] = val[:total]
        at += 4 * total
        val[:total] = np.float32(0.0)
    else:
        at += pack_values(val, u32(out + 4, m), m, total, width, at)
    if ro != 0 and (u != 0 or width != EXACT):
        restore(idx, val, total, ro)
    if u != 0:
        val[:total] = np.float32(0.0)
        restore(idx, val, total, u)
    return at - out


@njit(nogil=True)
def restore(idx, val, total, target):
    """target[idx] = val, of float32 at an address, that a pass went around the caches for or that are long gone."""
    places, ready = f32(target, 1 << 32), max(0, total - AHEAD)
    for i in range(ready):
        prefetch(target + 4 * np.int64(idx[i + AHEAD]))
        places[np.int64(idx[i])] = val[i]
    for i in range(ready, total):
        places[np.int64(idx[i])] = val[i]


SHORT, FORM, SIZE, ORDER, RANGE, HEADER = range(1, 7)

#: what a payload lacks that breaks a rule
RULES = {
    SHORT: "its segment counts (it is cut short)",
    FORM: "a form of packing that exists",
    SIZE: "as many indices and values as its counts say, in sections of their exact length",
    ORDER: "strictly ascending indices",
    RANGE: "indices inside the partition and zero padding bits",
    HEADER: "bases and shifts of values in range",
}


@kernel("int64(int64, int64, int64, int64, float64, int64)")
def sparse_apply(payload, nbytes, out, n, scale, mode):
    """Check a payload for n elements, then (DECODE) out = decoded*scale or (ADD) out += decoded; which rule it breaks.

    Nothing is written if one is broken. CHECK needs no out.
    """
    if nbytes < 4:
        return SHORT
    word = np.int64(u32(payload, 1)[0])
    m, form = word & MOST_SEGMENTS, word >> 24
    if form > 5:
        return FORM
    at, left = payload + 4 + 4 * m, nbytes - 4 - 4 * m
    if left < 0:
        return SHORT
    counts = u32(payload + 4, m)
    total = np.int64(0)
    for s in range(m):
        total += np.int64(counts[s])
    width = form >> 1
    # An element takes at least a byte: nothing larger than the payload and the partition is ever allocated.
    if total > n or total > left:
        return SIZE
    groups = 0 if width == EXACT else value_groups(counts, m)
    sized = gap_bytes(total, at, left) if form & PACKED else 4 * total
    if sized < 0 or sized + value_bytes(total, groups, width) != left:
        return SIZE
    if width != EXACT and not valid_headers(at + sized, groups, width):
        return HEADER
    # Packed sections are unpacked once, for the check and for what follows.
    unpacked = np.empty(total if form & PACKED else 0, np.uint32)
    decoded = np.empty(total if width != EXACT and mode != CHECK else 0, np.float32)
    if form & PACKED:
        if not -1 <= unpack_gaps(at, sized, total, unpacked) < n:
            return RANGE
    elif total > 0:
        index = u32(at, total)
        disorder = 0
        for i in range(total - 1):
            disorder |= index[i] >= index[i + 1]
        if disorder:
            return ORDER
        if np.int64(index[total - 1]) >= n:
            return RANGE
    if mode == CHECK:
        return OK
    if width != EXACT:
        unpack_values(at + sized, counts, m, total, width, decoded)
    where = place(unpacked) if form & PACKED else at
    value = place(decoded) if width != EXACT else at + sized
    scatter(where, value, total, out, n, np.float32(scale), mode, (unpacked, decoded))
    return OK


@njit(nogil=True)
def scatter(where, value, total, out, n, factor, mode, alive):
    """out[where] += value, or out = 0 but value*factor where; ``alive`` keeps the memory at those addresses."""
    index, values = u32(where, total), f32(value, total)
    if mode == DECODE:
        spread(index, values, total, out, n, factor)
        return
    target = f32(out, n)
    # Asked for early enough, lines come several at a time; the order of additions stays that of the payload.
    ready = max(0, total - AHEAD)
    for i in range(ready):
        prefetch(out + 4 * np.int64(index[i + AHEAD]))
        target[np.int64(index[i])] += values[i]
    for i in range(ready, total):
        target[np.int64(index[i])] += values[i]


@njit(nogil=True)
def spread(index, values, total, out, n, factor):
    """out = 0, but value*factor where there is one; ``index`` ascends."""
    block = np.zeros(BLOCK, np.float32)
    i: Any = 0
    for start in range(0, n, BLOCK):
        first, end = i, start + BLOCK
        while i < total and np.int64(index[i]) < end:
            block[np.int64(index[i]) - start] = values[i] * factor
            i += 1
        put(place(block), out + 4 * start, min(BLOCK, n - start))
        for j in range(first, i):
            block[np.int64(index[j]) - start] = np.float32(0.0)
    ordered()
    hold(block)
