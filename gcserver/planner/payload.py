"""How many bytes a codec makes of a part of a tensor, from its spec and its level.

What may live here: exact bytes of the families that planning knows, and an estimate for all others. What may not:
errors, times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcserver.planner.errors_lowrank import lowrank_bytes
from gcserver.planner.errors_quantised import qsgd_bytes
from gcserver.planner.errors_sparse import sparse_bytes
from gcserver.planner.families import CASTS, DENSE, SPARSE, Spec
from gcserver.planner.profile import CodecCost


def segment_bytes(
    spec: Spec, cost: CodecCost | None, shape: Sequence[int], elements: int, level: int, itemsize: int = 4
) -> float:
    """Bytes of ``elements`` elements of a tensor of this shape; ``level`` 0: the spec's own.

    Exact for what docs/codecs.md gives in closed form; else the measured ratio of ``cost``, in proportion to the level.
    """
    level = level or spec.level
    levels = np.array([level], np.int64)
    if spec.name == DENSE:
        return float(elements * itemsize)
    if spec.name in CASTS:
        return 2.0 * elements
    if spec.name in SPARSE and len(spec.own) == 1:
        return float(sparse_bytes(elements, levels)[0])
    if spec.name == "qsgd" and len(spec.own) == 1:
        return float(qsgd_bytes(elements, levels)[0])
    if spec.name == "powersgd":
        return float(lowrank_bytes(shape, levels)[0])
    share = level / spec.level if spec.level else 1.0
    return 4.0 * elements * (cost.ratio if cost else 1.0) * share
