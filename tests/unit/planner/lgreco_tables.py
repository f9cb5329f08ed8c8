"""Tables of levels drawn for tests of L-GreCo, and the exact optimum to compare with.

What may live here: these. What may not: tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gcserver.planner.errors import LevelTable

F64 = npt.NDArray[np.float64]


def make_table(sizes: list[list[float]], errors: list[list[float]], default: int | list[int] = 0) -> LevelTable:
    """A table of levels 1, 2, ...; default: an index, one for all layers or one each."""
    layers, count = len(sizes), len(sizes[0]) if sizes else 1
    shape = (layers, count)
    return LevelTable(
        tuple(f"layer{i}" for i in range(layers)),
        np.arange(1, count + 1),
        np.array(sizes, np.float64).reshape(shape),
        np.array(errors, np.float64).reshape(shape),
        np.array([default] * layers if isinstance(default, int) else default, np.int64),
    )


def drawn_table(seed: int, layers: int, count: int, default: int) -> LevelTable:
    """Layers of a thousand to a million elements whose errors fall with the level, each at its own rate."""
    rng = np.random.default_rng(seed)
    n = np.floor(np.exp(rng.uniform(np.log(1e3), np.log(1e6), layers)))
    levels = np.arange(1, count + 1)
    rates = rng.uniform(0.1, 0.9, layers)
    errors = rng.lognormal(0.0, 1.0, layers)[:, None] * np.exp(-rates[:, None] * (levels - 1.0)[None, :])
    names = tuple(f"layer{i}" for i in range(layers))
    return LevelTable(names, levels, n[:, None] * levels[None, :], errors, np.full(layers, default))


def spectra_table(seed: int, layers: int, levels: list[int], default: int, *, norms: F64 | None = None) -> LevelTable:
    """Matrices whose singular values fall as powers of their index, each at its own rate, at ranks.

    norms: float64[layers], of the matrices; drawn where None.
    """
    rng = np.random.default_rng(seed)
    rows, cols = (2 ** rng.integers(7, 12, layers) for _ in range(2))
    drawn = rng.lognormal(0.0, 0.5, layers)
    decay = rng.uniform(0.3, 1.2, layers)
    ranks = np.array(levels)
    errors = np.zeros((layers, ranks.size))
    for i in range(layers):
        squares = np.arange(1, min(rows[i], cols[i]) + 1) ** (-2.0 * decay[i])
        tails = np.concatenate((np.cumsum(squares[::-1])[::-1], np.zeros(1)))
        errors[i] = np.sqrt(tails[np.minimum(ranks, squares.size)] / tails[0])
    errors *= (drawn if norms is None else norms)[:, None]
    sizes = 4.0 * (rows + cols)[:, None] * ranks[None, :]
    where = np.full(layers, levels.index(default))
    return LevelTable(tuple(f"layer{i}" for i in range(layers)), ranks, sizes, errors, where)


def pareto_front(table: LevelTable, limit: float) -> tuple[F64, F64]:
    """(costs, errors) of all choices that no other beats in both, by merging layer after layer; exact.

    Left out are those whose error exceeds ``limit``. Costs ascend, errors descend.
    """
    costs, errors = np.zeros(1), np.zeros(1)
    for own_costs, own_errors in zip(table.sizes, table.errors, strict=True):
        both = (costs[:, None] + own_costs[None, :]).ravel(), (errors[:, None] + own_errors[None, :]).ravel()
        kept = both[1] <= limit
        c, e = both[0][kept], both[1][kept]
        order = np.lexsort((e, c))
        c, e = c[order], e[order]
        first = np.ones(c.size, np.bool_)
        first[1:] = e[1:] < np.minimum.accumulate(e)[:-1]
        costs, errors = c[first], e[first]
    return costs, errors


def exact_optimum(table: LevelTable, budget: float) -> float:
    """The least cost with errors that add up to at most ``budget``; infinite where there is none."""
    costs, errors = pareto_front(table, budget * (1 + 1e-12))
    fitting = costs[errors <= budget]
    return float(fitting.min()) if fitting.size else np.inf
