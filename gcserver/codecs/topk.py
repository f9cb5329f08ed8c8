"""topk: the k elements of largest magnitude of each segment, exactly, with error feedback.

What may live here: the codec and its encode kernel; `select` finds the elements, `sparse` is the payload.
k = max(1, floor(ratio * length)) per segment (0 for an empty one), the ratio in millionths. Ties go to the lowest
index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gcserver.codecs.base import register
from gcserver.codecs.jit import i64, kernel, u32
from gcserver.codecs.momentum import correct
from gcserver.codecs.sparse import finish, room, select, workspace
from gcserver.codecs.sparsifier import COMMON, FORM, RATIO, Job, Sparsifier, wanted


@kernel(f"UniTuple(int64, 2)({COMMON})")
def topk_encode(x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov):
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`."""
    bounds, counts, each = i64(table, m + 1), u32(out + 4, m), u32(levels, m)
    slots: Any = 0
    largest: Any = 0
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = wanted(length, level if levels == 0 else np.int64(each[s]))
        counts[s] = k
        slots += k
        largest = max(largest, room(length, k))
    work = workspace(slots + largest)
    kept = ro
    if uo != 0:
        correct(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
        x, r, kept, scale, decay = ro, 0, 0, 1.0, 0.0
    total: Any = 0
    bad: Any = 0
    for s in range(m):
        first, k = bounds[s], np.int64(counts[s])
        if k > 0:
            source = 0 if r == 0 else r + 4 * first
            target = 0 if kept == 0 else kept + 4 * first
            bad += select(x + 4 * first, source, target, bounds[s + 1] - first, k, first, scale, decay, total, work)
        total += k
    return finish(out, m, total, form, ro, uo, work), bad


@register
class TopK(Sparsifier):
    """k elements and their indices; exactly those of largest magnitude."""

    id, name = 16, "topk"
    params = (RATIO, *FORM)

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        nbytes, bad = topk_encode(*job)
        return nbytes, bad
