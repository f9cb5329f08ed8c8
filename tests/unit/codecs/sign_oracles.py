"""Plain numpy statements of the sign codecs: slow, obvious, and their tests' truth.

Only numpy here, nothing of gcserver: an oracle that shared code with its kernel would share its bugs.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

from tests.unit.codecs import oracles


def sums(*parts):
    """The sum of each of some float32 vectors of one length, in the order docs/codecs.md fixes, as float64."""
    totals = [0.0] * len(parts)
    for start in range(0, len(parts[0]), 4096):
        blocks = [p[start : start + 4096] for p in parts]
        added = [in_lanes(grouped(b)) for b in blocks]
        if not np.isfinite(added).all():  # float32 overflows: then none of the block's sums is taken in float32
            added = [in_lanes(rows_of(8, b)) for b in blocks]
        totals = [t + a for t, a in zip(totals, added, strict=True)]
    return totals


def rows_of(width, block):
    return np.concatenate([block, np.zeros(-len(block) % width, np.float32)]).reshape(-1, width)


def grouped(block):
    r = np.moveaxis(rows_of(64, block).reshape(-1, 8, 8), 1, 0)
    with np.errstate(over="ignore"):
        return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))


def in_lanes(rows):
    lanes = np.zeros(8)
    for row in rows.astype(np.float64):
        lanes = lanes + row
    total = lanes[0]
    for lane in lanes[1:]:
        total = total + lane
    return total


def pack(negative):
    return np.packbits(negative, bitorder="little").tobytes()


def means(v, bounds, numbers):
    """(payload, residual) of onebit (numbers = 2) and efsignsgd (1)."""
    payload = struct.pack("<I", len(bounds) - 1)
    residual = np.empty_like(v)
    zero = np.float32(0)
    for a, b in pairwise(bounds):
        part = v[a:b]
        negative, n = part < 0, b - a
        count = int(negative.sum())
        if numbers == 2:
            low_sum, high_sum = sums(np.where(negative, part, zero), np.where(negative, zero, part))
            low = np.float32(low_sum / count) if count else zero
            high = np.float32(high_sum / (n - count)) if n > count else zero
            payload += struct.pack("<Iff", n, low, high)
        else:
            high = np.float32(sums(np.abs(part))[0] / n) if n else zero
            low = -high
            payload += struct.pack("<If", n, high)
        payload += pack(negative)
        residual[a:b] = part - np.where(negative, low, high)
    return payload, residual


def votes(v, bounds, seed):
    """Payload of signsgd and signum for the decided vector v."""
    payload = struct.pack("<I", len(bounds) - 1)
    for a, b in pairwise(bounds):
        negative = v[a:b] < 0
        words = [oracles.bits64(seed, w) for w in range((b - a + 63) // 64)]
        chance = np.unpackbits(np.array(words, "<u8").view(np.uint8), bitorder="little")[: b - a].astype(bool)
        negative = np.where(v[a:b] == 0, chance, negative)
        payload += struct.pack("<I", b - a) + pack(negative)
    return payload


def momentum(x, m, scale, beta):
    """Signum's m' in float32."""
    old = np.zeros_like(x) if m is None else m
    return x * np.float32(scale * (1 - beta)) + old * np.float32(beta)


def decode(payload, numbers, scale=1.0):
    (m,) = struct.unpack_from("<I", payload)
    at, parts, factor = 4, [], np.float32(scale)
    for _ in range(m):
        n, *given = struct.unpack_from(f"<I{numbers}f", payload, at)
        at += 4 + 4 * numbers
        low, high = given if numbers == 2 else (-given[0], given[0]) if numbers else (-1, 1)
        negative = np.unpackbits(np.frombuffer(payload, np.uint8, (n + 7) // 8, at), count=n, bitorder="little")
        parts.append(np.where(negative, np.float32(low) * factor, np.float32(high) * factor))
        at += (n + 7) // 8
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)
