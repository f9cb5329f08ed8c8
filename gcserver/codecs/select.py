"""Exact selection of the k largest magnitudes of a segment, lowest index first among equals.

What may live here: the kernel helpers that find the k-th magnitude and choose; no codec, no layout. The
pass over the data is ``collect``'s.

Magnitudes compare as the integers of their bits. Two ways lead to the same exact answer:
1. Large segments: a sample of whole cache lines predicts a threshold a little too low. One pass over
   gradient and residual writes the new residual and collects what reaches it: some 1.3 k candidates,
   from which exactly k are chosen. Too few or too many candidates: the second way.
2. A histogram of exponent and 3 bits of mantissa finds the bin of the k-th (refined over two more passes
   only if too many share that bin), then the same collecting pass runs with a bound that is certain.
The prediction never decides bytes, only which way is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcserver.codecs.collect import BLOCK, HISTOGRAM, collect, room
from gcserver.codecs.jit import f32, place, u32
from gcserver.codecs.vector import F32, I16, I32, INFINITE, MAGNITUDE, Ops, elementwise

BINS = 2048  #: exponent and 3 bits of mantissa
FINE_BINS = HISTOGRAM  #: the sample's: exponent and 5 bits
FINE_FROM = 1 << 17  #: shorter segments are predicted with BINS
SAMPLED_FROM = 1 << 13  #: shorter segments are cheaper to count than to sample
LINE = 32  #: elements sampled together: two cache lines


def _value(ops: Ops, values: list[Any], scalars: list[Any]) -> Any:
    return ops.fma_free(values[0], scalars[0], values[1], scalars[1])


def _keys_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    magnitude = ops.magnitude(_value(ops, values, scalars))
    return [ops.b.trunc(ops.b.lshr(magnitude, ops.const(I32, 20)), ops.type(I16))]


def _magnitudes_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    return [ops.magnitude(_value(ops, values, scalars))]


def _values_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    value = _value(ops, values, scalars)
    ops.count(ops.nonfinite(value), 0)
    return [value]


keys_block = elementwise([F32, F32], [I16], _keys_body)
magnitudes_block = elementwise([F32, F32], [I32], _magnitudes_body)
values_block = elementwise([F32, F32], [F32], _values_body)


@njit(nogil=True)
def walk(hist, bins, k):
    """(bin, elements above it, elements in it) of the k-th largest."""
    above = np.int64(0)
    # Most bins are empty: sixteen at a time until the one that matters is among them.
    for start in range(bins - 16, -1, -16):
        group = np.int64(0)
        for key in range(start, start + 16):
            group += np.int64(hist[key])
        if above + group >= k:
            for key in range(start + 15, start - 1, -1):
                here = np.int64(hist[key])
                if above + here >= k:
                    return key, above, here
                above += here
        above += group
    return 0, above, 0


@njit(nogil=True)
def predict(x, r, n, k, scale, decay, work):
    """(below, likely): bounds around the k-th magnitude from a sample, below a safe one; (-1, 0) when hopeless."""
    zeros, hist = work[2], work[6]
    wanted = max(16384, 32 * n // k)
    lines = min(wanted, n // 16) // LINE
    stride = n // lines
    # Small segments: a coarser threshold costs less than clearing and walking the fine histogram.
    shift, bins = (18, FINE_BINS) if n >= FINE_FROM else (20, BINS)
    hist[:bins] = 0
    mags = np.empty(LINE, np.uint32)
    jitter = np.uint64(0x9E3779B97F4A7C15)
    for j in range(lines):
        # A place in each stride that is no multiple of anything, so that no period of the data hides.
        jitter = jitter * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        start = j * stride + np.int64((jitter >> np.uint64(33)) % np.uint64(stride - LINE + 1))
        pr = place(zeros) if r == 0 else r + 4 * start
        magnitudes_block((x + 4 * start, pr, place(mags)), LINE, (scale, decay))
        for i in range(LINE):
            hist[np.int64(mags[i]) >> shift] += np.uint32(1)
    share = lines * LINE * (k / n)
    low = np.int64(share + 4.0 * np.sqrt(share) + 4.0)
    high = np.int64(share - 4.0 * np.sqrt(share))
    key, above, here = walk(hist, bins, low)
    if key == 0:
        # Mostly zeros, as an embedding's gradient: collect whatever is not zero.
        return 0, INFINITE
    # So many equal magnitudes that the workspace would not hold them?
    if (above + here) * 1.1 / (lines * LINE) * n > room(n, k) - BLOCK:
        return -1, 0
    if high > 0:
        high_key, _, _ = walk(hist, bins, high)
        return (key << shift) - 1, (high_key + 1) << shift
    return (key << shift) - 1, INFINITE


@njit(nogil=True)
def count(x, r, n, scale, decay, work, tables):
    """Fill the histogram of exponent and 3 mantissa bits; returns the number of non-finite elements."""
    zeros, keys, hist = work[2], work[4], work[6]
    hist[: BINS * tables] = 0
    spread = BINS if tables == 4 else 0
    pk = place(keys)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        keys_block((x + 4 * start, pr, pk), size, (scale, decay))
        whole = size & ~3
        # Four tables, so that runs of equal keys do not wait for each other's stores.
        for i in range(0, whole, 4):
            hist[np.int64(keys[i])] += np.uint32(1)
            hist[np.int64(keys[i + 1]) + spread] += np.uint32(1)
            hist[np.int64(keys[i + 2]) + 2 * spread] += np.uint32(1)
            hist[np.int64(keys[i + 3]) + 3 * spread] += np.uint32(1)
        for i in range(whole, size):
            hist[np.int64(keys[i])] += np.uint32(1)
    for t in range(1, tables):
        for key in range(BINS):
            hist[key] += hist[t * BINS + key]
    bad = np.int64(0)
    for key in range(INFINITE >> 20, BINS):
        bad += np.int64(hist[key])
    return bad


@njit(nogil=True)
def refine(x, r, n, scale, decay, work, shift, prefix):
    """Histogram of the 10 bits below ``shift + 10`` of the elements whose bits above equal prefix."""
    zeros, mags, hist = work[2], work[5], work[6]
    hist[:1024] = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        magnitudes_block((x + 4 * start, pr, place(mags)), size, (scale, decay))
        for i in range(size):
            magnitude = np.int64(mags[i])
            if magnitude >> (shift + 10) == prefix:
                hist[(magnitude >> shift) & 1023] += np.uint32(1)


@njit(nogil=True)
def kth(val, found, k, low, high, hist):
    """(T, ties): k-th largest magnitude of ``found`` values at an address, and how many equal to it to take.

    All magnitudes are >= low; T is looked for in [low, high) first.
    """
    bits = u32(val, found)
    while True:
        shift = 0
        while (high - low - 1) >> shift >= BINS:
            shift += 1
        hist[: BINS + 8] = 0
        above = np.int64(0)
        for i in range(found):
            magnitude = np.int64(bits[i]) & MAGNITUDE
            above += magnitude >= high
            # What lies outside is counted in eight bins nobody reads: no branch, no two stores in a row to one place.
            inside = (magnitude >= low) & (magnitude < high)
            hist[(magnitude - low) >> shift if inside else BINS + (i & 7)] += np.uint32(1)
        if above >= k:
            low, high = high, MAGNITUDE + 1
            continue
        key, over, _ = walk(hist, BINS, k - above)
        if shift == 0:
            return low + key, k - above - over
        low += key << shift
        high = min(high, low + (1 << shift))


@njit(nogil=True)
def settle(found, k, low, high, ro, first, at, work):
    """Keep exactly k of the candidates in slots from ``at``, give ro the others back; returns the non-finite ones."""
    idx, val = work[0], work[1]
    threshold, ties = kth(place(val) + 4 * at, found, k, low, high, work[6])
    bits, residual = u32(place(val), at + found), f32(ro, 1 << 32)
    taken: Any = at
    bad = np.int64(0)
    for i in range(at, at + found):
        magnitude, where = np.int64(bits[i]) & MAGNITUDE, idx[i]
        bad += magnitude >= INFINITE
        tie = (magnitude == threshold) & (ties > 0)
        ties -= tie
        take = (magnitude > threshold) | tie
        if ro != 0 and not take:
            residual[np.int64(where) - first] = val[i]
        idx[taken], val[taken] = where, val[i]
        taken += take
    return bad


@njit(nogil=True)
def merge(x, r, ro, n, k, first, scale, decay, threshold, found, at, work):
    """Add the first k - found elements equal to a threshold to the ``found`` above it, in order.

    Returns how many of those above are non-finite.
    """
    idx, val, zeros, mags = work[0], work[1], work[2], work[5]
    residual = f32(ro, 1 << 32)
    scale32, decay32 = np.float32(scale), np.float32(decay)
    ties = k - found
    # Out of the way first: the merged list, written from the front, then never overtakes what it reads.
    for i in range(at + found - 1, at - 1, -1):
        idx[i + ties], val[i + ties] = idx[i], val[i]
    taken, c, last = at, at + ties, at + k
    bad = np.int64(0)
    for i in range(c, last):
        bad += not np.isfinite(val[i])
    for start in range(0, n, BLOCK):
        if ties == 0:
            break
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        magnitudes_block((x + 4 * start, pr, place(mags)), size, (scale, decay))
        xs, rs = f32(x + 4 * start, size), f32(pr, size)
        for i in range(size):
            if np.int64(mags[i]) == threshold and ties > 0:
                ties -= 1
                while c < last and np.int64(idx[c]) < first + start + i:
                    idx[taken], val[taken] = idx[c], val[c]
                    taken += 1
                    c += 1
                idx[taken] = np.uint32(first + start + i)
                val[taken] = np.float32(xs[i] * scale32) + np.float32(rs[i] * decay32)
                taken += 1
                if ro != 0:
                    residual[start + i] = 0.0
    while c < last:
        idx[taken], val[taken] = idx[c], val[c]
        taken += 1
        c += 1
    return bad


@njit(nogil=True)
def take_all(x, r, ro, n, first, scale, decay, at, work):
    """k = n: every element goes out and no residual stays; returns the number of non-finite elements."""
    idx, zeros, bad, values = work[0], work[2], np.int64(0), place(work[1]) + 4 * at
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        bad += values_block((x + 4 * start, pr, values + 4 * start), size, (scale, decay))[0]
    for i in range(n):
        idx[at + i] = np.uint32(first + i)
    if ro != 0:
        f32(ro, n)[:] = np.float32(0.0)
    return bad


@njit(nogil=True)
def select(x, r, ro, n, k, first, scale, decay, at, work):
    """Append the k largest of v = x*scale + r*decay to ``work`` in slots from ``at``, indices plus ``first``.

    ro receives v without them. Returns the number of non-finite elements of v. work holds at + room(n, k) slots.
    """
    if k == n:
        return take_all(x, r, ro, n, first, scale, decay, at, work)
    limit = room(n, k)
    if n >= SAMPLED_FROM and k <= n // 8:
        below, likely = predict(x, r, n, k, scale, decay, work)
        if below >= 0:
            found = collect(x, r, ro, n, first, scale, decay, below, at, limit, work)
            if found >= k:
                return settle(found, k, below + 1, likely, ro, first, at, work)
            if found >= 0 and below == 0:
                return merge(x, r, ro, n, k, first, scale, decay, np.int64(0), found, at, work)
    tables = 4 if n >= 4096 else 1
    bad = count(x, r, n, scale, decay, work, tables)
    key, above, here = walk(work[6], BINS, k)
    if above + here <= limit:
        low, high = key << 20, (key + 1) << 20
        found = collect(x, r, ro, n, first, scale, decay, low - 1, at, limit, work)
        settle(found, k, low, high, ro, first, at, work)
        return bad
    left = k - above
    for shift in (10, 0):
        refine(x, r, n, scale, decay, work, shift, key)
        low, above, _ = walk(work[6], 1024, left)
        left -= above
        key = (key << 10) | low
    found = collect(x, r, ro, n, first, scale, decay, key, at, limit, work)
    merge(x, r, ro, n, k, first, scale, decay, key, found, at, work)
    return bad
