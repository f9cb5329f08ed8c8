"""Packing of sparse payloads: gaps between indices in as few bits as they need, values in 16 or 8 bits.

What may live here: the two packings, both ways, as kernel helpers on addresses. No frame: where the sections
lie and what else is checked is `sparse`'s.

*Indices.* The gap of an index is its distance from the one before, less one (the first: the index itself). Gaps go in
groups of 32: one byte an entire group for its width w (the bits of its widest gap, 0..32), then, after all
widths, the groups' gaps, w bits each, lowest bit first: exactly w 32-bit words a group, the last one cut to whole
bytes and padded with zero bits. Unpacking is a load, a shift and a mask an index, with no branch.

*Values.* Floats of one sign, read as integers, are a piecewise linear logarithm. A value is its sign and a code
of 15 or 7 bits: 0 is zero, q > 0 the magnitude whose bits are base + ((q - 1) << shift). Base and shift (one 32-bit
word: base is a multiple of 32, shift below it) belong to a group of up to 128 values of one segment, and fit its
smallest and largest magnitude: no overflow, no underflow of small gradients as in fp16. The shift is at most 13 (16
bits) or 20 (8 bits): a value within 2^30 (2^14) of its group's largest is off by at most 2^-11 (2^-4) of itself;
what is smaller becomes 0. Decoded and original magnitude lie within a factor of two or one is 0, so their
difference is a float32: what rounding loses goes to the residual exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcproto.layouts import EIGHT, EXACT, GAPS, MAX_SHIFT, SIXTEEN, VALUES
from gcserver.codecs.jit import f32, place, u8, u16, u32, u64
from gcserver.codecs.vector import INFINITE, MAGNITUDE

MAX_SHIFT_16, MAX_SHIFT_8 = MAX_SHIFT[SIXTEEN], MAX_SHIFT[EIGHT]


@njit(nogil=True)
def bit_length(value):
    """Bits needed to write a non-negative integer; 0 for 0."""
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@njit(nogil=True)
def pack_gaps(idx, total, at):
    """Write the ascending indices idx[:total] to address ``at``; returns the bytes written."""
    groups = (total + GAPS - 1) // GAPS
    widths, end = u8(at, groups), at + groups
    before = np.int64(-1)
    for g in range(groups):
        start, count = g * GAPS, min(GAPS, total - g * GAPS)
        wide = np.int64(0)
        last = before
        for i in range(start, start + count):
            here = np.int64(idx[i])
            wide |= here - last - 1
            last = here
        w = bit_length(wide)
        widths[g] = np.uint8(w)
        pending, held, slot = np.uint64(0), 0, 0
        words = u32(end, GAPS)
        for i in range(start, start + count):
            here = np.int64(idx[i])
            pending |= np.uint64(here - before - 1) << np.uint64(held)
            before = here
            held += w
            if held >= 32:
                words[slot] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                pending >>= np.uint64(32)
                held -= 32
                slot += 1
        end += 4 * slot
        rest = u8(end, 8)
        for j in range((held + 7) // 8):
            rest[j] = np.uint8((pending >> np.uint64(8 * j)) & np.uint64(255))
        end += (held + 7) // 8
    return end - at


@njit(nogil=True)
def gap_bytes(total, at, left):
    """Length of a section of ``total`` packed indices at an address, or -1 if it is none of at most ``left`` bytes."""
    groups = (total + GAPS - 1) // GAPS
    if groups > left:
        return -1
    widths, size = u8(at, groups), np.int64(groups)
    wide = np.int64(0)
    for g in range(groups):
        w = np.int64(widths[g])
        wide |= w > 32
        size += (min(GAPS, total - g * GAPS) * w + 7) // 8
    return -1 if wide or size > left else size


@njit(nogil=True)
def unpack_gaps(at, nbytes, total, idx):
    """Indices of a section that ``gap_bytes`` measured into idx; the last (-1: none), -2 for set padding bits.

    What does not fit 32 bits shows in the result (int64), which ascends without bound.
    """
    groups = (total + GAPS - 1) // GAPS
    widths, source, stop = u8(at, groups), at + groups, at + nbytes
    padded = np.zeros(4 * 32 + 8, np.uint8)
    position = np.int64(-1)
    for g in range(groups):
        start, count, w = g * GAPS, min(GAPS, total - g * GAPS), np.int64(widths[g])
        size = (count * w + 7) // 8
        here = source
        if source + 4 * w + 8 > stop:
            # Loads of eight bytes would reach beyond the section.
            padded[size : size + 8] = 0
            padded[:size] = u8(source, size)
            here = place(padded)
            if count * w % 8 and padded[size - 1] >> np.uint8(count * w % 8):
                return np.int64(-2)
        mask = (np.uint64(1) << np.uint64(w)) - np.uint64(1)
        bit = np.int64(0)
        for i in range(start, start + count):
            gap = (u64(here + (bit >> 3), 1)[0] >> np.uint64(bit & 7)) & mask
            bit += w
            position += np.int64(gap) + 1
            idx[i] = np.uint32(position)
        source += size
    return position


@njit(nogil=True)
def value_groups(counts, m):
    """Groups of values of m segments: none crosses a segment, so that merging segments changes no value."""
    groups = np.int64(0)
    for s in range(m):
        groups += (np.int64(counts[s]) + VALUES - 1) // VALUES
    return groups


@njit(nogil=True)
def value_bytes(total, groups, width):
    """Bytes of a section of values: width EXACT, SIXTEEN or EIGHT."""
    if width == EXACT:
        return 4 * total
    return 4 * groups + (2 * total if width == SIXTEEN else total)


@njit(nogil=True)
def pack_group(values, count, width, header, codes):
    """Code one group of float32 at an address; afterwards the values are what rounding lost of them."""
    limit: Any = 126 if width == EIGHT else 32766
    most: Any = MAX_SHIFT_8 if width == EIGHT else MAX_SHIFT_16
    bits, floats = u32(values, count), f32(values, count)
    low: Any = MAGNITUDE
    high = np.int64(0)
    for i in range(count):
        magnitude = np.int64(bits[i]) & MAGNITUDE
        high = max(high, magnitude)
        low = min(low, magnitude if magnitude > 0 else MAGNITUDE)
    base: Any = min(low, high) & ~31
    shift = np.int64(0)
    half = np.int64(0)
    while shift < most and (high - base + half) >> shift > limit:
        shift += 1
        half = 1 << (shift - 1)
    if (high - base + half) >> shift > limit:
        # Too far apart: the smallest become zero.
        base = (high - (limit << shift) + 31) & ~31
    u32(header, 1)[0] = np.uint32(base | shift)
    # Rounding up must not turn a finite value into infinity.
    top = max(0, ((INFINITE - 1 - base) >> shift) + 1)
    one = np.empty(1, np.float32)
    decoded = u32(place(one), 1)
    narrow, wide = u8(codes, count), u16(codes, count)
    for i in range(count):
        sign, magnitude = np.int64(bits[i]) >> 31, np.int64(bits[i]) & MAGNITUDE
        q = min(max(0, ((magnitude - base + half) >> shift) + 1), min(top, limit + 1))
        q = q if magnitude > 0 else 0
        back = base + ((q - 1) << shift) if q > 0 else 0
        decoded[0] = np.uint32(back | (sign << 31))
        floats[i] = floats[i] - one[0]
        if width == EIGHT:
            narrow[i] = np.uint8(q | (sign << 7))
        else:
            wide[i] = np.uint16(q | (sign << 15))


@njit(nogil=True)
def pack_values(val, counts, m, total, width, at):
    """Write the values of m segments to address ``at``; returns its bytes. val then holds what rounding lost."""
    groups = value_groups(counts, m)
    header, codes = at, at + 4 * groups
    size = 1 if width == EIGHT else 2
    done = np.int64(0)
    for s in range(m):
        left: Any = np.int64(counts[s])
        while left > 0:
            count: Any = min(VALUES, left)
            pack_group(place(val) + 4 * done, count, width, header, codes)
            header += 4
            codes += size * count
            done += count
            left -= count
    return value_bytes(total, groups, width)


@njit(nogil=True)
def valid_headers(at, groups, width):
    """Whether every group's base and shift are such as an encoder may write."""
    words = u32(at, groups)
    bad = np.int64(0)
    most = MAX_SHIFT_8 if width == EIGHT else MAX_SHIFT_16
    for g in range(groups):
        word = np.int64(words[g])
        bad |= (word > MAGNITUDE) | ((word & 31) > most)
    return bad == 0


@njit(nogil=True)
def unpack_values(at, counts, m, total, width, val):
    """The values of a section with valid headers into val[:total]."""
    groups = value_groups(counts, m)
    headers, codes = u32(at, groups), at + 4 * groups
    narrow, wide = u8(codes, total), u16(codes, total)
    bits = u32(place(val), total)
    done = np.int64(0)
    g = 0
    for s in range(m):
        left: Any = np.int64(counts[s])
        while left > 0:
            count: Any = min(VALUES, left)
            word = np.int64(headers[g])
            base, shift = np.uint32(word & ~31), np.uint32(word & 31)
            for i in range(done, done + count):
                code = np.uint32(narrow[i]) << np.uint32(24) if width == EIGHT else np.uint32(wide[i]) << np.uint32(16)
                q = (code & np.uint32(MAGNITUDE)) >> np.uint32(24 if width == EIGHT else 16)
                magnitude = (base + ((q - np.uint32(1)) << shift)) & np.uint32(MAGNITUDE)
                bits[i] = (code & np.uint32(0x80000000)) | (magnitude if q > 0 else np.uint32(0))
            done += count
            left -= count
            g += 1
