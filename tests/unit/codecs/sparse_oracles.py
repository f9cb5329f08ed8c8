"""Plain numpy statements of what each sparsifier selects, writes and decodes; slow, obvious, and the tests' truth.

Only numpy here, nothing of gcserver: an oracle that shared code with its kernel would share its bugs.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

from tests.unit.codecs.oracles import bits64_of, magnitude_bits, topk_k

INFINITE = 0x7F800000
WIDTHS = {32: 0, 16: 1, 8: 2}


# ------------------------------------------------------------------------------------------------- packing
def pack_gaps(indices):
    """Groups of 32 gaps: their widths, then each group's bits, lowest first, padded with zero bits to whole bytes."""
    gaps = np.diff(np.asarray(indices, np.int64), prepend=-1) - 1
    groups = np.concatenate([gaps, np.zeros(-len(gaps) % 32, np.int64)]).reshape(-1, 32)
    widths = (groups.max(axis=1)[:, None] >> np.arange(40) > 0).sum(axis=1)
    streams = [b""] * len(groups)
    for width in set(widths.tolist()):
        alike = np.flatnonzero(widths == width)
        bits = (groups[alike][:, :, None] >> np.arange(width) & 1).reshape(len(alike), -1)
        for g, stream in zip(alike, np.packbits(bits.astype(bool), axis=1, bitorder="little"), strict=True):
            streams[g] = stream[: (min(32, len(gaps) - 32 * g) * width + 7) // 8].tobytes()
    return widths.astype(np.uint8).tobytes() + b"".join(streams)


def unpack_gaps(data, total):
    groups = -(-total // 32)
    widths = np.frombuffer(data, np.uint8, groups).astype(np.int64)
    counts = np.minimum(32, total - 32 * np.arange(groups))
    ends = groups + np.cumsum((counts * widths + 7) // 8)
    starts = ends - (counts * widths + 7) // 8
    raw = np.frombuffer(data + bytes(160), np.uint8)
    gaps = np.zeros((groups, 32), np.int64)
    for width in set(widths.tolist()) - {0}:
        alike = np.flatnonzero(widths == width)
        streams = raw[starts[alike][:, None] + np.arange(4 * width)]
        bits = np.unpackbits(streams, axis=1, bitorder="little").reshape(len(alike), 32, width)
        gaps[alike] = bits @ (1 << np.arange(width))
    return np.cumsum(gaps.ravel()[:total] + 1) - 1, int(ends[-1]) if groups else 0


def code_groups(values, width):
    """(headers, codes, decoded) of float32[groups, 128]; zeros fill up what is shorter."""
    limit, most = (126, 20) if width == 8 else (32766, 13)
    mags = magnitude_bits(values).astype(np.int64)
    high, low = mags.max(axis=1), mags.min(axis=1, initial=INFINITE, where=mags > 0)
    base = np.where(high > 0, low // 32 * 32, 0)
    shifts = np.arange(most + 1)
    fits = (high - base)[:, None] + ((1 << shifts) // 2) >> shifts <= limit
    shift = np.where(fits.any(axis=1), fits.argmax(axis=1), most)
    base = np.where(fits.any(axis=1), base, -(-(high - (limit << most)) // 32) * 32)
    top = ((INFINITE - 1 - base) >> shift) + 1
    most_of, half = np.minimum(top, limit + 1)[:, None], (1 << shift) // 2
    b, s = base[:, None], shift[:, None]
    q = np.where(mags > 0, np.clip(((mags - b + half[:, None]) >> s) + 1, 0, most_of), 0)
    sign = np.signbit(values).astype(np.int64)
    decoded = np.where(q > 0, b + ((q - 1) << s), 0) | sign << 31
    return base | shift, q | sign << (width - 1), decoded.astype(np.uint32).view(np.float32)


def places(counts):
    """(groups, where each value is in a table of groups of 128): a segment begins a group."""
    first = np.cumsum([0, *(-(-c // 128) for c in counts)])
    where = [128 * at + np.arange(c) for at, c in zip(first, counts, strict=False)]
    return int(first[-1]), np.concatenate([np.zeros(0, np.int64), *where])


def pack_values(values, counts, width):
    """(bytes, decoded values)."""
    if width == 32:
        return values.astype("<f4").tobytes(), values
    groups, where = places(counts)
    table = np.zeros(groups * 128, np.float32)
    table[where] = values
    headers, codes, decoded = code_groups(table.reshape(groups, 128), width)
    kind = "<u1" if width == 8 else "<u2"
    return headers.astype("<u4").tobytes() + codes.ravel()[where].astype(kind).tobytes(), decoded.ravel()[where]


def unpack_values(data, counts, width):
    total = sum(counts)
    if width == 32:
        return np.frombuffer(data, "<f4", total).copy()
    groups, where = places(counts)
    headers = np.frombuffer(data, "<u4", groups).astype(np.int64)
    codes = np.frombuffer(data, "<u1" if width == 8 else "<u2", total, 4 * groups).astype(np.int64)
    header = headers[where // 128]
    sign, q = codes >> (width - 1), codes & ((1 << (width - 1)) - 1)
    bits = np.where(q > 0, ((header & ~31) + ((q - 1) << (header & 31))) & 0x7FFFFFFF, 0) | sign << 31
    return bits.astype(np.uint32).view(np.float32)


def frame(chosen, v, bounds, packed=0, width=32):
    """(payload, residual): the elements of the sorted indices ``chosen`` of v, in segments."""
    chosen = np.asarray(chosen, np.int64)
    counts = [int(((chosen >= a) & (chosen < b)).sum()) for a, b in pairwise(bounds)]
    payload = struct.pack(f"<I{len(counts)}I", len(counts) | (packed | WIDTHS[width] << 1) << 24, *counts)
    payload += pack_gaps(chosen) if packed else chosen.astype("<u4").tobytes()
    with np.errstate(all="ignore"):
        data, decoded = pack_values(v[chosen], counts, width)
        residual = v.copy()
        residual[chosen] = v[chosen] - decoded
    return payload + data, residual


def decode(payload, n):
    word = struct.unpack_from("<I", payload)[0]
    m, packed, width = word & 0xFFFFFF, word >> 24 & 1, (32, 16, 8)[word >> 25]
    counts = struct.unpack_from(f"<{m}I", payload, 4)
    total, at = sum(counts), 4 + 4 * m
    if packed:
        index, used = unpack_gaps(payload[at:], total)
    else:
        index, used = np.frombuffer(payload, "<u4", total, at), 4 * total
    out = np.zeros(n, np.float32)
    out[index] = unpack_values(payload[at + used :], counts, width)
    return out


# ----------------------------------------------------------------------------------------------- selection
def largest(v, a, b, k):
    """The k largest magnitudes of v[a:b], lowest index first among equals, as sorted indices of v."""
    mags = magnitude_bits(v[a:b])
    if k == 0:
        return np.zeros(0, np.int64)
    limit = np.partition(mags, b - a - k)[b - a - k]
    above, equal = np.flatnonzero(mags > limit), np.flatnonzero(mags == limit)
    return np.sort(np.concatenate([above, equal[: k - len(above)]])) + a


def reaching(v, a, b, mask, cap):
    """Those of v[a:b] in the mask, or the cap largest if they are more."""
    index = np.flatnonzero(mask & (v[a:b] != 0)) + a
    return index if len(index) <= cap else largest(v, a, b, cap)


def threshold(v, bounds, value, cap):
    parts = [
        reaching(v, a, b, np.abs(v[a:b]) >= np.float32(value), min(b - a, max(1, int(cap * (b - a)))))
        for a, b in pairwise(bounds)
    ]
    return np.concatenate(parts)


def lane_sum(values):
    """float64: lane i % 16 adds in order, then lanes in order."""
    padded = np.concatenate([values.astype(np.float64), np.zeros(-len(values) % 16)]).reshape(-1, 16)
    lanes = np.cumsum(padded, axis=0)[-1] if len(padded) else np.zeros(16)
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def redsync(v, bounds, levels, trim, cap):
    parts = []
    for (a, b), level in zip(pairwise(bounds), levels, strict=True):
        if a == b:
            continue
        k, mags = topk_k(b - a, level), np.abs(v[a:b]).astype(np.float64)
        mean, top = lane_sum(mags) / (b - a), mags.max()
        if trim:
            for step in range(8):
                mask = mags > mean + (4.0 - step) / 5.0 * (top - mean)
                if (mask & (mags > 0)).sum() >= k:
                    break
            else:
                mask = mags > 0
        else:
            left, right = 0.0, 1.0
            while right - left > 0.2:
                q = (left + right) / 2
                mask = mags > mean + q * (top - mean)
                count = mask.sum()
                if k < count < 2 * k:
                    break
                left, right = (left, q) if count < k / 2 else (q, right)
        parts.append(reaching(v, a, b, mask, min(b - a, max(1, int(cap * k)))))
    return np.concatenate([np.zeros(0, np.int64), *parts])


def gaussiank(v, bounds, levels, cap, quantile):
    """quantile: of the normal distribution, a function."""
    parts = []
    for (a, b), level in zip(pairwise(bounds), levels, strict=True):
        if a == b:
            continue
        n, k, wide = b - a, topk_k(b - a, level), v[a:b].astype(np.float64)
        total = lane_sum(wide)
        mean = total / n
        variance = max(0.0, lane_sum(wide * wide) - total * mean) / max(1, n - 1)
        limit = mean + quantile(1.0 - level / 2_000_000) * np.sqrt(variance)
        for turn in range(3):
            mask = (np.abs(wide) > limit) & (wide != 0)
            if turn == 2 or 2 * k <= 3 * mask.sum() <= 4 * k:
                break
            limit *= 0.5 if 3 * mask.sum() < 2 * k else 1.5
        parts.append(reaching(v, a, b, mask, min(n, max(1, int(cap * k)))))
    return np.concatenate([np.zeros(0, np.int64), *parts])


# ------------------------------------------------------------------------------------------------- chance
def draw(seed, counters, limits):
    """Each below its limit."""
    high = bits64_of(seed, counters) >> np.uint64(32)
    return (high * np.asarray(limits, np.uint64) >> np.uint64(32)).astype(np.int64)


def randomk_places(seed, length, k):
    edges = np.arange(k + 1) * length // k
    offset = draw(seed, np.zeros(1, np.int64), length)
    return np.sort((offset + edges[:-1] + draw(seed, np.arange(1, k + 1), np.diff(edges))) % length)


def randomk(v, bounds, levels, seed, width=32, unbiased=False):
    """(payload, residual)."""
    m, values, residual = len(bounds) - 1, [np.zeros(0, np.float32)], v.copy()
    heads, counts, index = [], [], [np.zeros(0, np.int64)]
    for (a, b), level in zip(pairwise(bounds), levels, strict=True):
        k = topk_k(b - a, level)
        chosen = randomk_places(seed, b - a, k) + a if k else np.zeros(0, np.int64)
        factor = np.float32((b - a) / k) if unbiased and k else np.float32(1)
        values.append(v[chosen] * factor)
        index.append(chosen)
        heads += [b - a, k]
        counts.append(k)
    data, decoded = pack_values(np.concatenate(values), counts, width)
    where = np.concatenate(index)
    residual[where] = v[where] - decoded
    head = struct.pack(f"<IQ{2 * m}I", m | (8 | WIDTHS[width] << 1) << 24, seed, *heads)
    return head + data, residual


def dgc_sample(v, a, b, share, seed):
    """Magnitudes of the runs of 32 that a segment's threshold is estimated from."""
    n = b - a
    runs = min(n // 2, max(8192, int(share * n))) // 32
    stride = n // runs
    each = np.arange(runs)
    starts = each * stride + (bits64_of(seed, each) >> np.uint64(33)).astype(np.int64) % (stride - 31)
    return magnitude_bits(v)[a + starts[:, None] + np.arange(32)].ravel()


def dgc(v, bounds, levels, share, seed):
    parts = []
    for (a, b), level in zip(pairwise(bounds), levels, strict=True):
        n, k = b - a, topk_k(b - a, level)
        if n < 1 << 14 or 4 * k > n:
            parts.append(largest(v, a, b, k))
            continue
        sample = np.sort(dgc_sample(v, a, b, share, seed))[::-1]
        limit = int(sample[max(1, (len(sample) * k + n // 2) // n) - 1])
        for _ in range(11):
            index = np.flatnonzero(magnitude_bits(v[a:b]) > max(0, limit - 1)) + a
            if 3 * len(index) >= 2 * k or limit <= 1:
                break
            lowered = np.float32(0.7) * np.array([limit], np.uint32).view(np.float32)
            limit = int(lowered.astype(np.float32).view(np.uint32)[0])
        parts.append(index if 3 * len(index) <= 4 * k else largest(v, a, b, k))
    return np.concatenate([np.zeros(0, np.int64), *parts])


def momentum(x, residual, u, scale, decay, m, nesterov):
    """(v, new momentum) before anything is sent; float32, every operation rounded."""
    g = x * np.float32(scale)
    if nesterov:
        new = np.float32(m) * (u + g)
        return (residual * np.float32(decay) + new) + g, new
    new = np.float32(m) * u + g
    return residual * np.float32(decay) + new, new
