"""How many bytes a codec makes of a part of a tensor, from its spec and its level.

What may live here: exact bytes of the families that planning knows, and an estimate for all others. What may not:
errors, times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gcserver.planner.errors import F64, I64
from gcserver.planner.errors_lowrank import lowrank_bytes
from gcserver.planner.errors_quantised import qsgd_bytes
from gcserver.planner.errors_sparse import sparse_bytes, sparse_counts
from gcserver.planner.families import CASTS, DENSE, SPARSE, Spec
from gcserver.planner.profile import CodecCost

#: Packed indices: gaps go in groups of so many, each as wide as its widest (docs/codecs.md).
GAPS: Final = 32
#: Of as many gaps of a random choice the widest is this many times their mean: the harmonic number of GAPS.
_WIDEST: Final = sum(1 / i for i in range(1, GAPS + 1))
#: Narrow values: groups of so many share four bytes.
VALUES: Final = 128
#: the parameters of a sparsifier that decide how long a payload is
_FORM: Final = frozenset({"ratio", "packed", "values"})


def sparse_payload(spec: Spec, n: int, levels: I64) -> F64:
    """Bytes of a segment of ``n`` elements by a sparsifier at ratios in millionths, float64[C].

    Exact but for packed indices, whose gaps are taken to be those of a random choice; of gradients, whose large
    elements lie together, they are shorter.
    """
    width = spec.width / 8
    index = _index_bytes(levels) if dict(spec.own).get("packed") == "1" else np.full(levels.size, 4.0)
    sent = sparse_bytes(n, levels, width + index)
    return sent if width == 4 else sent + 4.0 * np.ceil(sparse_counts(n, levels) / VALUES)


def _index_bytes(levels: I64) -> F64:
    """Bytes of a packed index: bits of the widest gap of a group, half a bit since they are whole, a byte a group."""
    ratio = np.minimum(levels / 1e6, 1 - 1e-9)
    widest = np.log2(_WIDEST / -np.log1p(-ratio)) + 0.5
    return np.asarray((np.maximum(widest, 0.0) + 8 / GAPS) / 8, np.float64)


def segment_bytes(
    spec: Spec, cost: CodecCost | None, shape: Sequence[int], elements: int, level: int, itemsize: int = 4
) -> float:
    """Bytes of ``elements`` elements of a tensor of this shape; ``level`` 0: the spec's own.

    Exact, but for the four bytes of a payload's head, for what docs/codecs.md gives in closed form; else the measured
    ratio of ``cost``, in proportion to the level.
    """
    level = level or spec.level
    levels = np.array([level], np.int64)
    if spec.name == DENSE:
        return float(elements * itemsize)
    if spec.name in CASTS:
        return 2.0 * elements
    if spec.name in SPARSE and dict(spec.own).keys() <= _FORM:
        return float(sparse_payload(spec, elements, levels)[0])
    if spec.name == "qsgd" and len(spec.own) == 1:
        return float(qsgd_bytes(elements, levels)[0])
    if spec.name == "powersgd":
        return float(lowrank_bytes(shape, levels, spec.width)[0])
    share = level / spec.level if spec.level else 1.0
    return 4.0 * elements * (cost.ratio if cost else 1.0) * share
