"""The k-means heuristic of CGX (Markov et al. 2022): layers in groups alike in size and error, a level a group.

What may live here: that, as a baseline. What may not: L-GreCo, which it is compared with.

L-GreCo, section 5.3, says: layers are points (size, L2 error); clusters (6) get predefined parameters. No code of it is
public, so three things are decisions of this project: sizes and errors enter as logarithms with equal spread, since
they range over decades; clusters are ordered by error less size, so that the larger and less sensitive come first; and
the levels given to them in that order are spread evenly (by ratio) over the range, the lowest for the first.
"""

from __future__ import annotations

import numpy as np

from gcserver.planner.errors import F64, I64, LevelTable, TableError

CLUSTERS = 6
ROUNDS = 100


def kmeans_levels(table: LevelTable, *, clusters: int = CLUSTERS, seed: int = 0) -> tuple[int, ...]:
    """A level of the table for each layer. No budget is kept: that is the heuristic's weakness.

    The points are the layers' bytes at the highest level and their errors at the default. seed: of the starting
    centres. Layers whose error is unknown get their default. Raises TableError.
    """
    if clusters < 1:
        raise TableError("clusters", "at least 1", clusters)
    layers = len(table.names)
    chosen = table.default.copy()
    errors = table.errors[np.arange(layers), table.default]
    known = np.flatnonzero(np.isfinite(errors))
    if known.size:
        points = np.stack((_spread(table.sizes[known, -1]), _spread(errors[known])), axis=1)
        groups, centres = _lloyd(points, min(clusters, known.size), seed)
        used = np.unique(groups)  # of equal points some clusters get none
        order = used[np.argsort(centres[used, 1] - centres[used, 0], kind="stable")]
        rank = np.zeros(centres.shape[0], np.int64)
        rank[order] = np.arange(order.size)
        chosen[known] = _steps(table.levels, order.size)[rank[groups]]
    return tuple(int(v) for v in table.levels[chosen])


def _spread(values: F64) -> F64:
    """Logarithms with mean 0 and deviation 1; all 0 where they are equal. What is 0 counts as the least that is not."""
    positive = values[values > 0]
    logs = np.log(np.maximum(values, positive.min())) if positive.size else np.zeros(values.size)
    deviation = float(logs.std())
    return np.asarray((logs - logs.mean()) / deviation if deviation > 1e-9 else np.zeros(values.size), np.float64)


def _steps(levels: I64, count: int) -> I64:
    """Indices of ``count`` levels from the lowest to the highest, at equal ratios as nearly as there are levels."""
    if count == 1:
        return np.array([(levels.size - 1) // 2], np.int64)
    wanted = np.geomspace(levels[0], levels[-1], count)
    distance = np.abs(np.log(levels)[None, :] - np.log(wanted)[:, None])
    return np.asarray(distance.argmin(axis=1), np.int64)


def _lloyd(points: F64, count: int, seed: int) -> tuple[I64, F64]:
    """(each point's cluster, int64[N]; centres float64[count, 2]), from k-means++ starting centres."""
    rng = np.random.default_rng(seed)
    centres = points[rng.integers(points.shape[0])][None, :]
    while centres.shape[0] < count:
        nearest = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).min(axis=1)
        total = float(nearest.sum())
        pick = rng.choice(points.shape[0], p=nearest / total) if total > 0 else 0
        centres = np.concatenate((centres, points[pick][None, :]))
    groups = np.zeros(points.shape[0], np.int64)
    for turn in range(ROUNDS):
        before, groups = groups, ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        if turn and np.array_equal(before, groups):
            break
        for k in range(count):
            if (groups == k).any():  # a cluster that lost its points stays where it is
                centres[k] = points[groups == k].mean(axis=0)
    return groups.astype(np.int64), centres
