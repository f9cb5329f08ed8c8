"""Plain numpy statements of what each codec writes and decodes; slow, obvious, and the tests' truth.

Only numpy here, nothing of gcserver: an oracle that shared code with its kernel would share its bugs.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

INF_BITS = 0x7F800000
MASK = 2**64 - 1


def bits64(seed, counter):
    """Output number ``counter`` of splitmix64 started with ``seed``."""
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def bits64_of(seed, counters):
    """uint64: the outputs of these numbers."""
    z = np.uint64(seed & MASK) + (np.asarray(counters).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def lanes_sum(terms, block):
    """The sum of float64 terms: 16 lanes in blocks of so many, lanes in order, then blocks in order."""
    total = 0.0
    for start in range(0, len(terms), block):
        part = terms[start : start + block]
        rows = np.concatenate([np.zeros(16), part, np.zeros(-len(part) % 16)]).reshape(-1, 16)
        # Sums that accumulate are taken in order, which others of numpy's are not.
        total = total + np.cumsum(np.cumsum(rows, axis=0)[-1])[-1]
    return total


def corrected(x, residual, scale=1.0, decay=1.0):
    """v = x*scale + residual*decay in float32, each operation rounded."""
    r = np.zeros_like(x) if residual is None else residual
    with np.errstate(all="ignore"):
        return x * np.float32(scale) + r * np.float32(decay)


def nonfinite(v):
    return int((~np.isfinite(v)).sum())


def magnitude_bits(v):
    return v.view(np.uint32).astype(np.int64) & 0x7FFFFFFF


def topk_k(n, level):
    return min(n, max(1, n * level // 1_000_000))


def topk(v, bounds, level):
    """(payload, residual)."""
    indices, values, counts = [], [], []
    residual = v.copy()
    for a, b in pairwise(bounds):
        k = topk_k(b - a, level)
        mags = magnitude_bits(v[a:b])
        limit = np.partition(mags, b - a - k)[b - a - k] if k else INF_BITS
        above, equal = np.flatnonzero(mags > limit), np.flatnonzero(mags == limit)
        # Of equal ones those of lowest index.
        chosen = np.sort(np.concatenate([above, equal[: k - len(above)]])) + a
        counts.append(len(chosen))
        indices.append(chosen)
        values.append(v[chosen])
        residual[chosen] = 0
    payload = struct.pack(f"<I{len(counts)}I", len(counts), *counts)
    payload += np.concatenate(indices).astype("<u4").tobytes() + np.concatenate(values).astype("<f4").tobytes()
    return payload, residual


def topk_decode(payload, n):
    (m,) = struct.unpack_from("<I", payload)
    k = sum(struct.unpack_from(f"<{m}I", payload, 4))
    out = np.zeros(n, np.float32)
    index = np.frombuffer(payload, "<u4", k, 4 + 4 * m)
    out[index] = np.frombuffer(payload, "<f4", k, 4 + 4 * m + 4 * k)
    return out


def fp16(v):
    """(uint16 bits, saturated): nearest even, finite values saturate."""
    with np.errstate(over="ignore"):
        half = v.astype(np.float16)
    over = np.isinf(half) & np.isfinite(v)
    half[over] = np.copysign(np.float16(65504), half[over])
    return half.view(np.uint16), int(over.sum())


def bf16(v):
    """(uint16 bits, saturated): nearest even by exact comparison with both neighbours."""
    bits = v.view(np.uint32).astype(np.int64)
    low = bits & 0xFFFF0000
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & ((low >> 16) & 1 == 1))
    rounded = (low >> 16) + up
    over = ((rounded & 0x7FFF) == 0x7F80) & np.isfinite(v)
    rounded = np.where(over, rounded - 1, rounded)
    rounded = np.where(np.isnan(v), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16), int(over.sum())


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
