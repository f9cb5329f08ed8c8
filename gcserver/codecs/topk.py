"""topk: the k elements of largest magnitude of each segment, exactly, with error feedback.

What may live here: the codec and its encode kernel; `select` finds the elements, `sparse` is the payload.
k = max(1, floor(ratio * length)) per segment (0 for an empty one), the ratio in millionths. Ties go to the lowest
index.
"""

from __future__ import annotations

import numpy as np

from gcserver.codecs.base import register
from gcserver.codecs.jit import element, i64, kernel, u32
from gcserver.codecs.momentum import accumulated
from gcserver.codecs.sparse import finish, room, select, workspace
from gcserver.codecs.sparsifier import COMMON, FORM, RATIO, Job, Sparsifier, level_of, wanted


@kernel(f"UniTuple(int64, 2)({COMMON})")
def topk_encode(x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov):
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`."""
    bounds, counts = i64(table, m + 1), u32(out + 4, m)
    slots, largest = np.int64(0), np.int64(0)
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = wanted(length, level_of(levels, level, s))
        counts[s] = k
        slots += k
        largest = max(largest, room(length, k))
    work = workspace(slots + largest)
    x, r, kept, scale, decay = accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    total, bad = np.int64(0), np.int64(0)
    for s in range(m):
        first, k = bounds[s], np.int64(counts[s])
        if k > 0:
            length, where = bounds[s + 1] - first, (element(x, first), element(r, first), element(kept, first))
            bad += select(*where, length, k, first, scale, decay, total, work)
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
