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

from gcserver.codecs.collect import AT_ONCE, BLOCK, collect
from gcserver.codecs.jit import f32, place, u32
from gcserver.codecs.vector import F32, I16, I32, INFINITE, MAGNITUDE, Ops, elementwise

BINS = 2048  #: exponent and 3 bits of mantissa
FINE_BINS = 8192  #: the sample's: exponent and 5 bits
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
    above: Any = 0
    # Most bins are empty: sixteen at a time until the one that matters is among them.
    for start in range(bins - 16, -1, -16):
        group: Any = 0
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
def predict(x, r, n, k, scale, decay, scratch, hist):
    """(below, likely): bounds around the k-th magnitude from a sample, below a safe one; (-1, 0) when hopeless."""
    zeros = scratch[2]
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
    # So many equal magnitudes that the scratch memory would not hold them?
    fits = scratch[0].size - 2 * BLOCK
    if (above + here) * 1.1 / (lines * LINE) * n > fits:
        return -1, 0
    if high > 0:
        high_key, _, _ = walk(hist, bins, high)
        return (key << shift) - 1, (high_key + 1) << shift
    return (key << shift) - 1, INFINITE


@njit(nogil=True)
def count(x, r, n, scale, decay, scratch, hist, tables):
    """Fill the histogram of exponent and 3 mantissa bits; returns the number of non-finite elements."""
    zeros, keys = scratch[2], scratch[4]
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
    bad: Any = 0
    for key in range(INFINITE >> 20, BINS):
        bad += np.int64(hist[key])
    return bad


@njit(nogil=True)
def refine(x, r, n, scale, decay, scratch, hist, shift, prefix):
    """Histogram of the 10 bits below ``shift + 10`` of the elements whose bits above equal prefix."""
    zeros, mags = scratch[2], scratch[5]
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
    """(T, ties): k-th largest magnitude of the candidates, and how many equal to it are to be taken.

    All magnitudes are >= low; T is looked for in [low, high) first.
    """
    bits = u32(place(val), found)
    while True:
        shift = 0
        while (high - low - 1) >> shift >= BINS:
            shift += 1
        hist[: BINS + 8] = 0
        above = 0
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
def settle(found, k, low, high, ro, first, idx_out, val_out, scratch, hist):
    """Choose exactly k of the candidates, write them out, give the others back to ro; returns the non-finite ones."""
    idx, val = scratch[0], scratch[1]
    threshold, ties = kth(val, found, k, low, high, hist)
    bits, residual = u32(place(val), found), f32(ro, 1 << 32)
    taken: Any = 0
    bad: Any = 0
    for i in range(found):
        magnitude, where = np.int64(bits[i]) & MAGNITUDE, idx[i]
        bad += magnitude >= INFINITE
        tie = (magnitude == threshold) & (ties > 0)
        ties -= tie
        take = (magnitude > threshold) | tie
        if ro != 0 and not take:
            residual[np.int64(where)] = val[i]
        idx[taken], val[taken] = np.uint32(first + np.int64(where)), val[i]
        taken += take
    u32(idx_out, k)[:] = idx[:k]
    f32(val_out, k)[:] = val[:k]
    return bad


@njit(nogil=True)
def merge(x, r, ro, n, k, first, scale, decay, threshold, found, idx_out, val_out, scratch):
    """Write out the ``found`` elements above a known threshold and the first k - found equal to it.

    Returns how many of those above are non-finite.
    """
    idx, val, zeros, mags = scratch[0], scratch[1], scratch[2], scratch[5]
    out_idx, out_val, residual = u32(idx_out, k), f32(val_out, k), f32(ro, 1 << 32)
    scale32, decay32 = np.float32(scale), np.float32(decay)
    ties, taken, c = k - found, 0, 0
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
                while c < found and np.int64(idx[c]) < start + i:
                    out_idx[taken] = np.uint32(first + np.int64(idx[c]))
                    out_val[taken] = val[c]
                    taken += 1
                    c += 1
                out_idx[taken] = np.uint32(first + start + i)
                out_val[taken] = np.float32(xs[i] * scale32) + np.float32(rs[i] * decay32)
                taken += 1
                if ro != 0:
                    residual[start + i] = 0.0
    while c < found:
        out_idx[taken] = np.uint32(first + np.int64(idx[c]))
        out_val[taken] = val[c]
        taken += 1
        c += 1
    bad = 0
    for i in range(found):
        bad += not np.isfinite(val[i])
    return bad


@njit(nogil=True)
def take_all(x, r, ro, n, first, scale, decay, idx_out, val_out, scratch):
    """k = n: every element goes out and no residual stays; returns the number of non-finite elements."""
    zeros, bad = scratch[2], 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        bad += values_block((x + 4 * start, pr, val_out + 4 * start), size, (scale, decay))[0]
    out_idx = u32(idx_out, n)
    for i in range(n):
        out_idx[i] = np.uint32(first + i)
    if ro != 0:
        f32(ro, n)[:] = np.float32(0.0)
    return bad


@njit(nogil=True)
def select(x, r, ro, n, k, first, scale, decay, idx_out, val_out, scratch, hist):
    """Write the k largest of v = x*scale + r*decay to idx_out (uint32, plus first) and val_out (float32).

    ro receives v without them. Returns the number of non-finite elements of v. All but scratch and hist are
    numbers and addresses; the outputs may be unaligned.
    """
    if k == n:
        return take_all(x, r, ro, n, first, scale, decay, idx_out, val_out, scratch)
    if n >= SAMPLED_FROM and k <= n // 8:
        below, likely = predict(x, r, n, k, scale, decay, scratch, hist)
        if below >= 0:
            found = collect(x, r, ro, n, scale, decay, below, scratch)
            if found >= k:
                return settle(found, k, below + 1, likely, ro, first, idx_out, val_out, scratch, hist)
            if found >= 0 and below == 0:
                return merge(x, r, ro, n, k, first, scale, decay, 0, found, idx_out, val_out, scratch)
    tables = 4 if n >= 4096 else 1
    bad = count(x, r, n, scale, decay, scratch, hist, tables)
    key, above, here = walk(hist, BINS, k)
    if above + here <= scratch[0].size - BLOCK - AT_ONCE:
        low, high = key << 20, (key + 1) << 20
        found = collect(x, r, ro, n, scale, decay, low - 1, scratch)
        settle(found, k, low, high, ro, first, idx_out, val_out, scratch, hist)
        return bad
    left = k - above
    for shift in (10, 0):
        refine(x, r, n, scale, decay, scratch, hist, shift, key)
        low, above, _ = walk(hist, 1024, left)
        left -= above
        key = (key << 10) | low
    found = collect(x, r, ro, n, scale, decay, key, scratch)
    merge(x, r, ro, n, k, first, scale, decay, key, found, idx_out, val_out, scratch)
    return bad
