"""topk: the k elements of largest magnitude of each segment, exactly, with error feedback.

What may live here: the codec, its layout, and decoding of sparse payloads; ``select`` finds the elements.
k = max(1, floor(ratio * length)) per segment (0 for an empty one), the ratio in millionths. Ties go
to the lowest index. Layout (little-endian): u32 segments; u32 count of each; then all indices, u32, relative
to the partition and strictly ascending; then their values, f32, in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gcserver.codecs.base import F32, I64, U8, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.collect import allocate, room
from gcserver.codecs.jit import (
    as_bytes,
    f32,
    f32_address,
    i64,
    kernel,
    residual_addresses,
    segment_table,
    u8_address,
    u32,
)
from gcserver.codecs.select import FINE_BINS, select

MILLION = 1_000_000


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64, int64, float64, float64)")
def topk_encode(x, r, ro, out, table, m, level, scale, decay):
    """Encode m segments; r and ro are 0 for none. Returns (bytes written, non-finite elements)."""
    bounds = i64(table, m + 1)
    u32(out, 1)[0] = m
    counts = u32(out + 4, m)
    total, candidates = 0, 0
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = min(length, max(1, level * length // MILLION))
        counts[s] = k
        total += k
        candidates = max(candidates, room(length, k))
    scratch = allocate(candidates)
    hist = np.empty(FINE_BINS, np.uint32)
    idx_out = out + 4 + 4 * m
    val_out = idx_out + 4 * total
    bad = 0
    for s in range(m):
        first, n, k = bounds[s], bounds[s + 1] - bounds[s], np.int64(counts[s])
        if n > 0:
            target = 0 if ro == 0 else ro + 4 * first
            source = 0 if r == 0 else r + 4 * first
            at = x + 4 * first
            bad += select(at, source, target, n, k, first, scale, decay, idx_out, val_out, scratch, hist)
        idx_out += 4 * k
        val_out += 4 * k
    return 4 + 4 * m + 8 * total, bad


OK, SHORT, SIZE, ORDER, RANGE = range(5)


@kernel("int64(int64, int64, int64)")
def sparse_check(payload, nbytes, n):
    """OK if the payload is exactly a sparse frame for n elements, else which rule it breaks."""
    if nbytes < 4:
        return SHORT
    m = np.int64(u32(payload, 1)[0])
    if nbytes < 4 + 4 * m:
        return SHORT
    total: Any = 0
    counts = u32(payload + 4, m)
    for s in range(m):
        total += np.int64(counts[s])
    if nbytes != 4 + 4 * m + 8 * total:
        return SIZE
    if total == 0:
        return OK
    index = u32(payload + 4 + 4 * m, total)
    disorder = 0
    for i in range(total - 1):
        disorder |= index[i] >= index[i + 1]
    if disorder:
        return ORDER
    return OK if np.int64(index[total - 1]) < n else RANGE


@kernel("void(int64, int64, int64, int64, float64)")
def sparse_decode(payload, nbytes, out, n, scale):
    """out = decoded*scale for a checked payload."""
    m = np.int64(u32(payload, 1)[0])
    total = (nbytes - 4 - 4 * m) // 8
    index, target = u32(payload + 4 + 4 * m, total), f32(out, n)
    value, factor = f32(payload + 4 + 4 * m + 4 * total, total), np.float32(scale)
    target[:] = np.float32(0.0)
    for i in range(total):
        target[np.uint64(index[i])] = value[i] * factor


@kernel("void(int64, int64, int64, int64)")
def sparse_add(payload, nbytes, acc, n):
    """acc += decoded for a checked payload."""
    m = np.int64(u32(payload, 1)[0])
    total = (nbytes - 4 - 4 * m) // 8
    index, target = u32(payload + 4 + 4 * m, total), f32(acc, n)
    value = f32(payload + 4 + 4 * m + 4 * total, total)
    for i in range(total):
        target[np.uint64(index[i])] += value[i]


_RULES = {
    SHORT: "its segment counts (it is cut short)",
    SIZE: "as many indices and values as its counts say",
    ORDER: "strictly ascending indices",
    RANGE: "indices inside the partition",
}


@register
class TopK(Codec):
    """8 bytes for each of k elements, 4 bytes a segment, 4 a frame; error feedback by default."""

    id, name = 16, "topk"
    params = (Param("ratio", None, 1e-6, 1.0, "share of the elements that is sent, in steps of 1e-6"),)
    keeps_residual = True
    units = "sum"
    conserves = True

    def configure(self, ratio: float = 0.01) -> None:
        #: the ratio in millionths: what the frame header carries
        self.level = round(ratio * MILLION)

    def values(self) -> dict[str, float]:
        return {"ratio": self.level / MILLION}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        if not 1 <= level <= MILLION:
            raise CodecError("level", f"1..{MILLION} for topk (the ratio in millionths)", level)
        return cls(ratio=level / MILLION)

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return 4 + 4 * segments + 8 * min(n, self.level * n // MILLION + segments)

    def encode(
        self,
        x: F32,
        residual_in: F32 | None,
        residual_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Encoded:
        n = x.size
        px, r, ro = residual_addresses(self, x, residual_in, residual_out)
        table, m, alive = segment_table(segments, n)
        target = u8_address("out", out, self.max_bytes(n, m), write=True)
        nbytes, bad = topk_encode(px, r, ro, target, table, m, self.level, float(scale), self.decay)
        del alive
        return Encoded(nbytes, bad)

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        source, nbytes = self._check(payload, out.size)
        target = f32_address("out", out, out.size, write=True)
        sparse_decode(source, nbytes, target, out.size, float(scale))

    def decode_add(self, payload: U8, acc: F32) -> None:
        source, nbytes = self._check(payload, acc.size)
        sparse_add(source, nbytes, f32_address("acc", acc, acc.size, write=True), acc.size)

    def check(self, payload: U8, n: int) -> None:
        self._check(payload, n)

    def _check(self, payload: U8, n: int) -> tuple[int, int]:
        data = as_bytes(payload)
        source = u8_address("payload", data)
        rule = sparse_check(source, data.size, n)
        if rule != OK:
            raise CodecError("payload", f"a topk frame of {n} elements: {_RULES[rule]}", f"{data.size} bytes")
        return source, data.size
