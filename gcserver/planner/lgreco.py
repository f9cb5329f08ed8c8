"""L-GreCo: the level of each layer that sends the least at no more error than the defaults (algorithm 1).

What may live here: budgets, the choice, its fallbacks and the reason for it. What may not: how errors are measured
(`errors*`), the recurrence (`lgreco_dp`), where weights come from (`lgreco_weights`).

Minimise the sum over layers of size * weight, subject to the sum of errors <= alpha * E_max, E_max being the error of
the default levels. One programme serves every alpha: errors are discretised by E_max / D, and a budget of alpha ends at
alpha * D of the same last row.

Rounding every error up loses half a bucket a layer on average, and can make even the defaults look too large. So the
row goes on for one bucket a layer beyond D, and whether a way through it keeps the budget is decided by the errors
themselves, never by their buckets. The defaults, and the most precise levels, stand by where no way does. What the best
way leaves of the budget is then given to single layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcserver.planner.errors import F64, I64, LevelTable, TableError
from gcserver.planner.lgreco_dp import FORWARD, TRACE

#: D of the paper
BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class LevelSet:
    """The levels of all layers for one budget.

    alpha: the budget in units of E_max. levels: of each layer, as codecs take them. cost: sum of size * weight. bytes:
    sum of sizes. error: sum of L2 errors, pinned layers left out. reason: dp, default or precise, what it came from.
    """

    alpha: float
    levels: tuple[int, ...]
    cost: float
    bytes: float
    error: float
    reason: str


@dataclass(frozen=True, slots=True)
class LevelSets:
    """Sets for ascending budgets, from one decision.

    e_max: the error of the defaults. pinned: layers kept at their default because its error is unknown (a gradient that
    was not finite). sets: at least one, ascending in alpha, descending in cost; the last is for the largest budget.
    """

    names: tuple[str, ...]
    e_max: float
    pinned: tuple[str, ...]
    sets: tuple[LevelSet, ...]

    @property
    def full(self) -> LevelSet:
        """The set of the largest budget: the cheapest."""
        return self.sets[-1]

    def at(self, alpha: float) -> LevelSet:
        """The cheapest set whose budget is at most ``alpha``; the most precise one where there is none."""
        fitting = [s for s in self.sets if s.alpha <= alpha]
        return fitting[-1] if fitting else self.sets[0]


def solve(
    table: LevelTable, *, alphas: Sequence[float] = (1.0,), weights: F64 | None = None, buckets: int = BUCKETS
) -> LevelSets:
    """The cheapest levels for budgets of alpha * E_max.

    alphas: budgets in (0, 1]. weights: float64[L], seconds or anything else a byte of each layer costs (None: 1).
    buckets: D, how finely errors are told apart.

    Every set has levels of the table only, and none costs more than one of a smaller alpha. With alpha = 1 there is
    always a set, its error is at most E_max and its cost at most the defaults'. A smaller alpha that even the most
    precise levels exceed gets those, with the budget they keep (rounded up) as its alpha. The same table gives the same
    sets, whatever is equal in it. Raises TableError.
    """
    budgets = sorted({float(a) for a in alphas})
    if not budgets or not all(0.0 < a <= 1.0 for a in budgets):
        raise TableError("alphas", "budgets above 0, at most 1", budgets)
    if buckets < 1:
        raise TableError("buckets", "at least 1", buckets)
    problem = _Problem(table, weights, buckets)
    sets: list[LevelSet] = []
    for alpha in budgets:
        found = problem.at(alpha)
        if not sets or (found.cost, found.error) < (sets[-1].cost, sets[-1].error):
            sets.append(found)
        else:
            # What a smaller budget allowed, this one allows too.
            last = sets[-1]
            sets.append(LevelSet(max(alpha, last.alpha), last.levels, last.cost, last.bytes, last.error, last.reason))
    unique = {s.alpha: s for s in sets}
    pinned = tuple(name for name, free in zip(table.names, problem.free, strict=True) if not free)
    return LevelSets(table.names, problem.e_max, pinned, tuple(unique[a] for a in sorted(unique)))


class _Problem:
    """One table with its weights, its programme run once, ready to be asked for any budget."""

    def __init__(self, table: LevelTable, weights: F64 | None, buckets: int) -> None:
        layers, levels = table.errors.shape
        if weights is not None and (
            weights.shape != (layers,) or not bool((np.isfinite(weights) & (weights > 0)).all())
        ):
            raise TableError("weights", f"a positive number for each of {layers} layers", weights.tolist())
        self.table, self.buckets = table, buckets
        self.costs = table.sizes * (np.ones(layers) if weights is None else weights)[:, None]
        self.rows = np.arange(layers)
        errors = np.where(np.isfinite(table.errors), table.errors, np.inf)
        default = errors[self.rows, table.default]
        self.free = np.isfinite(default)
        # A pinned layer has one choice. Its error, the same in every set, counts for nothing.
        others = np.arange(levels)[None, :] != table.default[:, None]
        self.errors = np.where(self.free[:, None], errors, np.where(others, np.inf, 0.0))
        self.e_max = self.error(table.default)
        self.order, self.counts = _undominated(self.costs, self.errors, self.e_max)
        units = np.zeros(self.order.shape)
        if self.e_max > 0:
            units = np.ceil(np.take_along_axis(self.errors, self.order, 1) * buckets / self.e_max)
        # Beyond the row, whatever it is: such a choice is too much for any budget.
        self.units = np.minimum(units, 2.0 * buckets + layers).astype(np.int64)
        width = buckets + layers + 1
        self.best, self.picks = FORWARD(self.units, np.take_along_axis(self.costs, self.order, 1), self.counts, width)

    def error(self, chosen: I64) -> float:
        """Sum of errors, exact to its last bit and so independent of order."""
        return math.fsum(self.errors[self.rows, chosen].tolist())

    def cost(self, chosen: I64) -> float:
        return math.fsum(self.costs[self.rows, chosen].tolist())

    def at(self, alpha: float) -> LevelSet:
        """The best set for a budget of alpha * E_max."""
        budget = alpha * self.e_max
        candidates = []
        way = self._through(alpha, budget)
        if way is not None:
            candidates.append(("dp", way))
        if self.error(self.table.default) <= budget:
            candidates.append(("default", self.table.default))
        if not candidates:
            precise = self._precise()
            error = self.error(precise)
            if error > budget:
                # math.nextafter: the product must not come out below the error
                alpha = min(1.0, math.nextafter(error / self.e_max, 2.0))
                return self._set(alpha, precise, "precise")
            candidates.append(("precise", precise))
        refined = [(reason, self._refined(chosen, budget)) for reason, chosen in candidates]
        reason, chosen = min(refined, key=lambda r: (self.cost(r[1]), self.error(r[1]), tuple(r[1])))
        return self._set(alpha, chosen, reason)

    def _through(self, alpha: float, budget: float) -> I64 | None:
        """The cheapest way through the programme that keeps the budget; None if none does."""
        ends = min(int(alpha * self.buckets) + self.rows.size, self.best.size - 1) + 1
        row = self.best[:ends]
        for end in np.argsort(row, kind="stable"):
            if not np.isfinite(row[end]):
                break
            way = TRACE(self.units, self.picks, end)
            chosen = self.order[self.rows, way]
            if self.error(chosen) <= budget:
                return np.asarray(chosen, np.int64)
        return None

    def _precise(self) -> I64:
        """Each layer's level of least error, of equals the cheapest, then the lowest."""
        best = np.lexsort((self.costs, self.errors), axis=1)
        return np.asarray(best[:, 0], np.int64)

    def _refined(self, chosen: I64, budget: float) -> I64:
        """With what is left of the budget spent on one layer after the other, the largest saving first."""
        chosen = chosen.copy()
        while True:
            left = budget - self.error(chosen)
            saving = self.costs[self.rows, chosen][:, None] - self.costs
            more = self.errors - self.errors[self.rows, chosen][:, None]
            gains = np.where((saving > 0) & (more <= left), saving, 0.0)
            for at in np.argsort(-gains, axis=None, kind="stable"):
                layer, level = divmod(int(at), gains.shape[1])
                if gains[layer, level] <= 0:
                    return chosen
                trial = chosen.copy()
                trial[layer] = level
                if self.error(trial) <= budget:  # rounding may have said that it would
                    chosen = trial
                    break
            else:
                return chosen

    def _set(self, alpha: float, chosen: I64, reason: str) -> LevelSet:
        size = math.fsum(self.table.sizes[self.rows, chosen].tolist())
        levels = tuple(int(v) for v in self.table.levels[chosen])
        return LevelSet(alpha, levels, self.cost(chosen), size, self.error(chosen), reason)


def _undominated(costs: F64, errors: F64, e_max: float) -> tuple[I64, I64]:
    """(indices int64[L, C] of the choices worth having, the cheapest first, counts int64[L]).

    Left out is what costs no less than another choice of no larger error, and what exceeds E_max by itself. Of choices
    alike in both the lowest level stays. Columns beyond a count hold anything.
    """
    order = np.lexsort((errors, costs), axis=1)
    sorted_errors = np.take_along_axis(errors, order, 1)
    least = np.minimum.accumulate(sorted_errors, axis=1)
    before = np.concatenate((np.full((errors.shape[0], 1), np.inf), least[:, :-1]), axis=1)
    kept = (sorted_errors < before) & (sorted_errors <= e_max)
    front = np.argsort(~kept, axis=1, kind="stable")
    return np.take_along_axis(order, front, 1).astype(np.int64), kept.sum(axis=1).astype(np.int64)
