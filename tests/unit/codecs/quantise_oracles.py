"""Plain numpy statements of the quantisers: slow, obvious, and their tests' truth.

Only numpy here, nothing of gcserver: an oracle that shared code with its kernel would share its bugs.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

from tests.unit.codecs.oracles import bits64, lanes_sum

LIMIT, TINY = 2.0**126, 2.0**-117
U, F = np.uint32, np.float32


def words(seed, first, n):
    """uint32[n]: the words of elements first, first + 1, ..."""
    z = bits64(seed, 0)
    h = (np.arange(first, first + n, dtype=np.uint64) * 0x9E3779B9 + (z & 0xFFFFFFFF)).astype(U)
    h = (h ^ (h >> U(16))) * U(0x7FEB352D)
    h = h ^ (h >> U(15)) ^ U(z >> 32)
    return h * U(0x846CA68B)


def pack(codes, bits):
    """Codes of so many bits as a little-endian bit stream."""
    each = np.unpackbits(codes.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(each.ravel(), bitorder="little").tobytes()


def unpack(stream, bits, n):
    each = np.unpackbits(stream, count=n * bits, bitorder="little").reshape(n, bits)
    return np.packbits(each, axis=1, bitorder="little").ravel() if n else np.zeros(0, np.uint8)


def squares(v):
    """Sum of squares in float64: 16 lanes in blocks of 1024, lanes in order, then blocks in order."""
    with np.errstate(all="ignore"):
        return lanes_sum(v.astype(np.float64) ** 2, 1024)


def scale_of(v, bits, steps, kind, clip):
    """(minimum, step, inverse) of a bucket, float32 each."""
    if kind == "maxmin":
        low, high = max(float(v.min()), -LIMIT) + 0.0, min(float(v.max()), LIMIT)
        span, levels = high - low, 2**bits - 1
    else:
        low, levels = 0.0, steps
        span = float(np.abs(v).max()) if kind == "max" else float(np.sqrt(squares(v)))
        if clip:
            span = min(span, clip * float(np.sqrt(squares(v) / len(v))))
        span = min(span, LIMIT)
    if span < TINY:
        return F(low), F(0), F(0)
    return F(low), F(span / levels), F(levels / span)


def rounded(v, low, inverse, least, most, chance):
    """Level numbers (float32): (v - low)*inverse, up or down at random."""
    with np.errstate(over="ignore"):
        y = np.minimum(np.maximum((v - low) * inverse, F(least)), F(most))
    whole = np.floor(y)
    drawn = ((chance >> U(9)) | U(0x3F800000)).view(F)
    return whole + (drawn < (y - whole) + F(1)).astype(F)


def uniform(v, bounds, choices, seed, kind="maxmin", bucket=0, clip=0.0):
    """(payload, residual); choices: (bits, steps) of each segment, steps = 0 for maxmin."""
    payload = struct.pack("<I", len(bounds) - 1)
    parts, residual = b"", np.empty_like(v)
    for (a, b), (bits, steps) in zip(pairwise(bounds), choices, strict=True):
        payload += struct.pack("<II", b - a, bits | (steps | 128 * (kind == "max")) << 8 | (bucket // 64) << 16)
        if a == b:
            continue
        size = bucket or b - a
        scales = [scale_of(v[start : min(b, start + size)], bits, steps, kind, clip) for start in range(a, b, size)]
        low, step, inverse = np.array(scales, F).T
        params = step if steps else np.stack([low, step], axis=1)
        low, step, inverse = (np.repeat(each, size)[: b - a] for each in (low, step, inverse))
        q = rounded(v[a:b], low, inverse, -steps, steps or 2**bits - 1, words(seed, a, b - a))
        residual[a:b] = v[a:b] - (q * step + low)
        parts += params.astype("<f4").tobytes() + pack((q + F(steps)).astype(np.uint8), bits)
    return payload + parts, residual


def uniform_decode(payload, scale=1.0):
    (m,) = struct.unpack_from("<I", payload)
    at, out = 4 + 8 * m, []
    for s in range(m):
        n, word = struct.unpack_from("<II", payload, 4 + 8 * s)
        bits, steps, bucket = word & 255, (word >> 8) & 127, (word >> 16) * 64 or max(1, n)
        count = -(-n // bucket)
        params = np.frombuffer(payload, "<f4", count * (1 if steps else 2), at)
        at += params.nbytes
        low, step = (np.zeros(count, F), params) if steps else (params[::2], params[1::2])
        size = (n * bits + 7) // 8
        codes = unpack(np.frombuffer(payload, np.uint8, size, at), bits, n)
        at += size
        of = np.arange(n) // bucket
        with np.errstate(all="ignore"):
            out.append(((codes.astype(F) - F(steps)) * step[of] + low[of]) * F(scale))
    assert at == len(payload)
    return np.concatenate(out) if out else np.zeros(0, F)


def natural_codes(v, bits, chance):
    """(codes, decoded values)."""
    magnitude = np.abs(v)
    r = chance >> U(9)
    if bits == 9:
        code = np.minimum((magnitude.view(U) + r) >> U(23), U(254))
        return code.astype(np.uint8), np.copysign((code << U(23)).view(F), v)
    smallest = F(2.0**-86)
    small = magnitude < smallest
    shifted = np.where(small, magnitude + smallest, magnitude)
    code = ((shifted.view(U) + r) >> U(23)).astype(np.int64) - 40 - small
    code = np.where(magnitude > F(2.0**40), 127, code)
    value = np.where(code == 0, F(0), np.exp2(code - 87.0).astype(F))
    return (code | np.where(v < 0, 128, 0)).astype(np.uint8), np.copysign(value, v).astype(F)


def natural(v, bounds, bits, seed):
    """(payload, residual); bits: of each segment."""
    payload = struct.pack("<I", len(bounds) - 1)
    parts, residual = b"", np.empty_like(v)
    for (a, b), width in zip(pairwise(bounds), bits, strict=True):
        payload += struct.pack("<II", b - a, width)
        codes, decoded = natural_codes(v[a:b], width, words(seed, a, b - a))
        parts += codes.tobytes()
        if width == 9:
            parts += np.packbits(v[a:b] < 0, bitorder="little").tobytes()
        residual[a:b] = v[a:b] - decoded
    return payload + parts, residual


def natural_decode(payload, scale=1.0):
    (m,) = struct.unpack_from("<I", payload)
    at, out = 4 + 8 * m, []
    for s in range(m):
        n, bits = struct.unpack_from("<II", payload, 4 + 8 * s)
        codes = np.frombuffer(payload, np.uint8, n, at).astype(np.int64)
        at += n
        if bits == 8:
            negative, codes = codes >= 128, codes & 127
            value = np.where(codes == 0, 0, np.exp2(codes - 87.0))
        else:
            signs = np.frombuffer(payload, np.uint8, (n + 7) // 8, at)
            at += signs.size
            negative = np.unpackbits(signs, count=n, bitorder="little").astype(bool)
            value = (codes.astype(U) << U(23)).view(F)
        out.append(np.where(negative, -value, value).astype(F) * F(scale))
    assert at == len(payload)
    return np.concatenate(out) if out else np.zeros(0, F)
