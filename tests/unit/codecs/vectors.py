"""Input vectors that have broken codecs before, shared by the tests of all families."""

from __future__ import annotations

import numpy as np

SIZES = [0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 100, 1023, 1024, 1025, 4095, 4096, 4097, 10_001]


def normal(n, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def shapes(n, seed=0):
    """(name, float32[n]) of awkward distributions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    yield "normal", x
    yield "zeros", np.zeros(n, np.float32)
    yield "negative zeros", np.full(n, -0.0, np.float32)
    yield "all equal", np.full(n, 0.25, np.float32)
    yield "equal but for sign", np.where(x < 0, np.float32(-3), np.float32(3)).astype(np.float32)
    tiny = rng.integers(0, 900, n).astype(np.uint32) | (rng.integers(0, 2, n).astype(np.uint32) << 31)
    yield "denormal", tiny.view(np.float32)
    yield "huge", x * np.float32(1e37)
    yield "sparse", np.where(rng.random(n) < 0.02, x, np.float32(0)).astype(np.float32)
    yield "few values", rng.integers(-3, 4, n).astype(np.float32)
    yield "heavy tail", (x / np.maximum(np.abs(rng.standard_normal(n)), 1e-6) ** 3).astype(np.float32)
    yield "ascending", np.arange(n, dtype=np.float32)
    half = x * np.float32(1e-6)
    half[: max(1, n // 20)] = x[: max(1, n // 20)]
    yield "hot start", half


def with_some(n, value):
    """(float32[n], count): normal elements, count of which are ``value``: one, half and all."""
    for count in (1, n // 2, n):
        x = normal(n, seed=3)
        x[np.random.default_rng(0).permutation(n)[:count]] = value
        yield x, count


def segment_tables(n):
    yield np.array([0, n], np.int64)
    yield np.array([0, n // 3, n // 3, n // 2, n], np.int64)
    if n > 40:
        yield np.array([0, 1, 8, 17, 40, n], np.int64)


def cases(n, seed=0):
    """(name, float32[n], boundaries): a normal vector with every table, every other shape with one of them in turn.

    Which one depends on n too: over ``SIZES`` every shape meets every table.
    """
    tables = list(segment_tables(n))
    for i, (name, x) in enumerate(shapes(n, seed)):
        for bounds in tables if i == 0 else [tables[(i + n) % len(tables)]]:
            yield name, x, bounds


def unaligned(array, offset=1):
    """A read-only copy of ``array`` whose memory starts at an odd address."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = (-raw.ctypes.data) % 64 + offset
    view = raw[start : start + array.nbytes].view(array.dtype)
    view[:] = array
    view.flags.writeable = False
    return view


def guarded(nbytes, fill=0xA5, margin=64):
    """(uint8[nbytes], check): the array between guard zones; check() fails if anything wrote outside."""
    raw = np.full(nbytes + 2 * margin, fill, np.uint8)
    zone = bytes([fill]) * margin  # comparing bytes is quicker than comparing arrays, and done a million times

    def check():
        assert raw[:margin].tobytes() == zone == raw[margin + nbytes :].tobytes()

    return raw[margin : margin + nbytes], check
