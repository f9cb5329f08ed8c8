"""randomk: k elements that chance picks, the same on all nodes, so that only values cross the wire.

What may live here: the choice, the codec, its kernels and its layout (a frame of another form than `sparse`'s: it has
a seed in place of indices). ``seed`` must be the same on all nodes for one step and key.

Choice in a segment of length L, k = max(1, floor(ratio * L)): the segment, rotated by an offset that chance picks, is
cut into k strata, and one element is picked of each. Every element is sent with probability k/L, elements close
to each other rarely together. With `chance.draw(seed, counter, limit)`: offset = draw(seed, 0, L); stratum j
covers [j*L//k, (j+1)*L//k) and its element is that start + draw(seed, j + 1, its length); the element's
place in the segment is (offset + that) mod L. All segments draw from the same numbers.

Payload (little-endian): u32 segments + form << 24; u64 seed; u32 length and u32 count of each segment; the values of
each segment's elements in ascending order of their places, as in `sparse`. form: 8 + twice the width of values.

With unbiased = 1 values are multiplied by L/k (rounded to float32), so that what is decoded is v on average; nothing
is kept back then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcproto.layouts import EIGHT, EXACT, MILLION, MOST_SEGMENTS, SEEDED
from gcserver.codecs.base import CodecError, Param, register
from gcserver.codecs.chance import draw
from gcserver.codecs.collect import BLOCK, workspace
from gcserver.codecs.framed import CHECK, OK
from gcserver.codecs.jit import element, f32, i64, kernel, place, u32, u64
from gcserver.codecs.momentum import accumulated
from gcserver.codecs.packing import pack_values, unpack_values, valid_headers, value_bytes, value_groups
from gcserver.codecs.select import values_block
from gcserver.codecs.sparse import FORM, HEADER, RULES, SHORT, SIZE, scatter
from gcserver.codecs.sparsifier import COMMON, RATIO, WIDTH, Job, Sparsifier, level_of, wanted

HEAD = 12  #: bytes before the table of segments


@njit(nogil=True)
def pick(seed, length, k, first, idx):
    """The k places of one segment, plus ``first``, ascending, into idx[:k]."""
    offset = draw(seed, 0, length)
    # Places beyond the end come round to the beginning: they are the last strata's, and the lowest. The stratum that
    # the end falls into may have its element on either side of it.
    wrapped = min(k, (length - offset) * k // length + 1)
    low = (wrapped - 1) * length // k
    if offset + low + draw(seed, wrapped, wrapped * length // k - low) >= length:
        wrapped -= 1
    slot = 0
    for turn in range(2):
        start, stop = (wrapped, k) if turn == 0 else (0, wrapped)
        shift = first + offset - (length if turn == 0 else 0)
        low = start * length // k
        for j in range(start, stop):
            high = (j + 1) * length // k
            idx[slot] = np.uint32(shift + low + draw(seed, j + 1, high - low))
            low = high
            slot += 1


@njit(nogil=True)
def take(x, r, ro, n, first, scale, decay, factor, at, count, work):
    """Take a segment's picked elements, times factor, into work's values; v without what is sent goes to ro.

    Returns the non-finite elements of v, sent or not.
    """
    idx, val, zeros, sink = work[0], work[1], work[2], work[3]
    c, last = at, at + count
    bad = np.int64(0)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        pr = place(zeros) if r == 0 else r + 4 * start
        pro = place(sink) if ro == 0 else ro + 4 * start
        bad += values_block((x + 4 * start, pr, pro), size, (scale, decay))[0]
        residual, before = f32(pro, size), first + start
        while c < last and np.int64(idx[c]) < before + size:
            local = np.int64(idx[c]) - before
            value = np.float32(residual[local] * factor)
            val[c] = value
            residual[local] = residual[local] - value
            c += 1
    return bad


@kernel(f"UniTuple(int64, 2)({COMMON}, boolean, int64)")
def randomk_encode(
    x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov, unbiased, seed
):
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`."""
    bounds, heads = i64(table, m + 1), u32(out + HEAD, 2 * m)
    u32(out, 1)[0] = m | (form << 24)
    u64(out + 4, 1)[0] = np.uint64(seed)
    total = np.int64(0)
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = wanted(length, level_of(levels, level, s))
        heads[2 * s], heads[2 * s + 1] = length, k
        total += k
    work = workspace(total)
    counts = np.empty(m, np.uint32)
    x, r, kept, scale, decay = accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    at = np.int64(0)
    bad = np.int64(0)
    for s in range(m):
        first, length, k = bounds[s], bounds[s + 1] - bounds[s], np.int64(heads[2 * s + 1])
        counts[s] = k
        if length > 0:
            pick(seed, length, k, first, work[0][at : at + k])
            factor = np.float32(length / k) if unbiased else np.float32(1.0)
            where = element(x, first), element(r, first), element(kept, first)
            bad += take(*where, length, first, scale, decay, factor, at, k, work)
            at += k
    end, width, val = out + HEAD + 8 * m, (form >> 1) & 3, work[1]
    if width == EXACT:
        f32(end, total)[:] = val[:total]
        val[:total] = np.float32(0.0)
        end += 4 * total
    else:
        end += pack_values(val, counts, m, total, width, end)
    if ro != 0 and (uo != 0 or width != EXACT):
        residual = f32(ro, n)
        for i in range(total):
            residual[np.int64(work[0][i])] = val[i]
    if uo != 0:
        velocity = f32(uo, n)
        for i in range(total):
            velocity[np.int64(work[0][i])] = 0.0
    return end - out, bad


LENGTHS = 7


@kernel("int64(int64, int64, int64, int64, float64, int64)")
def randomk_apply(payload, nbytes, out, n, scale, mode):
    """As `sparse.sparse_apply`, for payloads with a seed."""
    if nbytes < HEAD:
        return SHORT
    word = np.int64(u32(payload, 1)[0])
    m, form = word & MOST_SEGMENTS, word >> 24
    width = (form >> 1) & 3
    if form != SEEDED | (width << 1) or width > EIGHT:
        return FORM
    seed, heads = np.int64(u64(payload + 4, 1)[0]), u32(payload + HEAD, 2 * m)
    at, left = payload + HEAD + 8 * m, nbytes - HEAD - 8 * m
    if left < 0:
        return SHORT
    counts = np.empty(m, np.uint32)
    total = np.int64(0)
    covered = np.int64(0)
    excess = np.int64(0)
    for s in range(m):
        counts[s] = heads[2 * s + 1]
        total += np.int64(counts[s])
        covered += np.int64(heads[2 * s])
        excess |= heads[2 * s + 1] > heads[2 * s]
    if covered != n or excess != 0:
        return LENGTHS
    groups = 0 if width == EXACT else value_groups(counts, m)
    if value_bytes(total, groups, width) != left:
        return SIZE
    if width != EXACT and not valid_headers(at, groups, width):
        return HEADER
    if mode == CHECK:
        return OK
    where = np.empty(total, np.uint32)
    decoded = np.empty(total if width != EXACT else 0, np.float32)
    first = np.int64(0)
    done = np.int64(0)
    for s in range(m):
        count = np.int64(counts[s])
        if count > 0:
            pick(seed, np.int64(heads[2 * s]), count, first, where[done : done + count])
        first += np.int64(heads[2 * s])
        done += count
    if width != EXACT:
        unpack_values(at, counts, m, total, width, decoded)
    value = place(decoded) if width != EXACT else at
    scatter(place(where), value, total, out, n, np.float32(scale), mode, (where, decoded))
    return OK


@register
class RandomK(Sparsifier):
    """k elements that chance picks, values only: 4 bytes for each, 8 a segment, 12 a frame."""

    id, name = 17, "randomk"
    params = (
        RATIO,
        Param("unbiased", 0.0, 0.0, 1.0, "1 for values times length/k, and no error feedback", integer=True),
        WIDTH,
    )
    # All nodes draw the same elements, and so the same number of them.
    tunable = False
    #: the caller gives all nodes the same seed for a step and key
    shared_seed = True
    rules = RULES | {
        FORM: "the form of randomk's payloads",
        LENGTHS: "segment lengths that add up to the partition, and no more elements than those",
    }

    def __init__(
        self, *, decay: float | None = None, momentum: float | None = None, unbiased: float = 0.0, **more: Any
    ) -> None:
        if unbiased:
            if decay:
                hint = "nothing is missing on average, so that nothing must be kept back: leave +ef out"
                raise CodecError("randomk.unbiased", "0 with error feedback", int(unbiased), hint)
            if momentum or more.get("values", WIDTH.default) != WIDTH.default:
                raise CodecError("randomk.unbiased", "0 with momentum or rounded values", int(unbiased))
            decay = 0.0
        super().__init__(decay=decay, momentum=momentum, unbiased=unbiased, **more)

    def setup(self, ratio: float = 0.01, unbiased: float = 0.0) -> None:
        super().setup(ratio)
        self.form |= SEEDED
        self._unbiased = int(unbiased)

    def own(self) -> dict[str, float]:
        return {**super().own(), "unbiased": self._unbiased}

    def at_owner(self) -> RandomK:
        # The sum has only the elements all nodes picked, scaled already: the same seed sends it as it is.
        if self._unbiased:
            return RandomK(decay=0.0, ratio=self.level / MILLION)
        return super().at_owner()

    def bound(self, n: int, segments: int, total: int) -> int:
        # Eight more bytes for the seed, and four a segment for its length; no indices.
        return super().bound(n, segments, total) + 8 + 4 * segments - 4 * total

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        nbytes, bad = randomk_encode(*job, bool(self._unbiased), seed)
        return nbytes, bad

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        return int(randomk_apply(payload, nbytes, out, n, scale, mode))
