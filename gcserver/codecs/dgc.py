"""dgc: Deep Gradient Compression (Lin et al. 2018): sampled threshold, momentum correction, warm-up of the ratio.

What may live here: the sampled threshold, the warm-up schedule, the codec. Momentum correction and factor masking are
`momentum`'s, on here unless the spec says ``+momentum(m=0)``. Gradient clipping belongs to the client, which has
the whole gradient.

k is topk's. A sample of the segment (runs of 32 elements at places chance picks from ``seed``) says which magnitude
some k of n reach; what reaches it is sent. If that is more than 4k/3, exactly the k largest of it (the paper's
hierarchical selection); if it is less than 2k/3, the threshold falls by 0.7 and the pass is repeated, ten times
at most (as public code does). Short segments take the exact k.

Warm-up: for the first ``warmup`` steps the ratio is at least 0.25, 0.0625, 0.015625, 0.00390625, a quarter of the
steps each (section 3.3, with steps for epochs). The state's last float counts the steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcserver.codecs.base import CodecError, Param, register
from gcserver.codecs.chance import bits64
from gcserver.codecs.collect import collect
from gcserver.codecs.jit import element, f32, hold, i64, kernel, place, u32
from gcserver.codecs.momentum import accumulated
from gcserver.codecs.select import LINE, kth, magnitudes_block, settle
from gcserver.codecs.sparse import finish, nonfinite, room, select, workspace
from gcserver.codecs.sparsifier import COMMON, FORM, RATIO, Job, Sparsifier, level_of, wanted
from gcserver.codecs.vector import INFINITE

SMALL = 1 << 14  #: segments shorter than this take the exact k
TRIES = 10  #: times a threshold that is too high is lowered
STAGES = (250_000, 62_500, 15_625, 3_906)  #: ratios of the warm-up, in millionths


@njit(nogil=True)
def warm(level, step, warmup):
    """The ratio in millionths at a step of the warm-up."""
    if step >= warmup:
        return level
    return max(level, STAGES[4 * step // warmup])


@njit(nogil=True)
def sampled(x, r, n, k, scale, decay, size, seed, work, sample):
    """Bits of the magnitude that some k of the segment's n reach, from ``size`` elements in runs of LINE."""
    zeros = work[2]
    runs = size // LINE
    stride = n // runs
    for j in range(runs):
        # One run in each stride, at any place of it: the whole segment is looked at, and no period of it hides.
        start = j * stride + np.int64((bits64(seed, j) >> np.uint64(33)) % np.uint64(stride - LINE + 1))
        pr = place(zeros) if r == 0 else r + 4 * start
        magnitudes_block((x + 4 * start, pr, place(sample) + 4 * LINE * j), LINE, (scale, decay))
    rank = max(1, (runs * LINE * k + n // 2) // n)
    threshold, _ = kth(place(sample), runs * LINE, rank, np.int64(0), np.int64(INFINITE), work[6])
    return threshold


@njit(nogil=True)
def send(x, r, ro, n, k, first, scale, decay, share, seed, at, work, sample):
    """Append what one segment sends to ``work`` from slot ``at``: (count, non-finite)."""
    count, bad = np.int64(-1), np.int64(0)
    if n >= SMALL and 4 * k <= n:
        count, bad = above_sampled(x, r, ro, n, k, first, scale, decay, share, seed, at, work, sample)
    if count < 0:
        return k, select(x, r, ro, n, k, first, scale, decay, at, work)
    return count, bad


@njit(nogil=True)
def above_sampled(x, r, ro, n, k, first, scale, decay, share, seed, at, work, sample):
    """Append what reaches a sampled threshold: (count, non-finite), or (-1, 0) where the exact k must be found."""
    size = min(n // 2, max(1 << 13, np.int64(share * n)))
    threshold = sampled(x, r, n, k, scale, decay, size, seed, work, sample)
    for _ in range(TRIES + 1):
        below = max(0, threshold - 1)
        found = collect(x, r, ro, n, first, scale, decay, below, at, room(n, k), work)
        if found < 0 or threshold >= INFINITE:
            return -1, 0
        if 3 * found > 4 * k:
            return k, settle(found, k, below + 1, np.int64(INFINITE), ro, first, at, work)
        if 3 * found >= 2 * k or below == 0:
            break
        lower = np.empty(1, np.float32)
        word = u32(place(lower), 1)
        word[0] = np.uint32(threshold)
        lower[0] = np.float32(np.float32(0.7) * lower[0])
        threshold = np.int64(word[0])
        hold(lower)
    return found, nonfinite(found, at, work)


@kernel(f"UniTuple(int64, 2)({COMMON}, int64, int64, int64, float64, int64)")
def dgc_encode(
    x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov,
    steps, steps_out, warmup, share, seed,
):  # fmt: skip
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`, then:

    steps, steps_out: addresses of the old and new count of steps, float32, or 0; share: of the elements sampled.
    """
    bounds, counts = i64(table, m + 1), u32(out + 4, m)
    step = np.int64(0)
    if steps != 0:
        # It may come out of a checkpoint: no place before the first stage.
        step = max(np.int64(0), np.int64(f32(steps, 1)[0]))
    if steps_out != 0:
        f32(steps_out, 1)[0] = np.float32(min(step + 1, warmup))
    slots, largest, longest = np.int64(0), np.int64(0), np.int64(0)
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = wanted(length, warm(level_of(levels, level, s), step, warmup))
        counts[s] = k
        slots += k + k // 3 + 1
        largest, longest = max(largest, room(length, k)), max(longest, length)
    work = workspace(slots + largest)
    most: Any = max(1 << 13, np.int64(share * longest))
    sample = np.empty(most + LINE if longest >= SMALL else 0, np.uint32)
    x, r, kept, scale, decay = accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    total, bad = np.int64(0), np.int64(0)
    for s in range(m):
        first, k = bounds[s], np.int64(counts[s])
        if k > 0:
            length, where = bounds[s + 1] - first, (element(x, first), element(r, first), element(kept, first))
            count, wrong = send(*where, length, k, first, scale, decay, share, seed, total, work, sample)
            counts[s] = count
            total += count
            bad += wrong
    return finish(out, m, total, form, ro, uo, work), bad


@register
class DGC(Sparsifier):
    """About k elements, with momentum correction; up to a third more."""

    id, name = 18, "dgc"
    params = (
        RATIO,
        Param("warmup", 0.0, 0.0, 1e7, "steps over which the ratio falls from 0.25 to its value", integer=True),
        Param("sample", 0.01, 0.0001, 0.5, "share of a segment's elements sampled, 8192 at least"),
        *FORM,
    )
    default_momentum = 0.9

    def setup(self, ratio: float = 0.01, warmup: float = 0.0, sample: float = 0.01) -> None:
        super().setup(ratio)
        self._warmup, self._sample = int(warmup), sample
        if self._warmup and not self.error_feedback:
            raise CodecError("dgc.warmup", "0 without error feedback (nothing counts the steps)", self._warmup)

    def own(self) -> dict[str, float]:
        return {**super().own(), "warmup": self._warmup, "sample": self._sample}

    def most(self, n: int, segments: int, level: int) -> int:
        highest = max(level, STAGES[0]) if self._warmup else level
        # 4k/3 and one: what the sample's threshold may let through before exactly k are taken.
        return min(n, super().most(n, segments, highest) * 4 // 3 + segments)

    def state_floats(self, n: int, segments: int = 1) -> int:
        return super().state_floats(n, segments) + (self._warmup > 0)

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        counter = 4 * job.n * (2 if self.momentum else 1)
        steps, steps_out = (a + counter if a and self._warmup else 0 for a in (job.r, job.ro))
        nbytes, bad = dgc_encode(*job, steps, steps_out, self._warmup, self._sample, seed)
        return nbytes, bad
