"""L-GreCo on a running job: the level of every tensor at every notch, from measured errors.

What may live here: which tensors and levels of a profile make a table, budgets, the fall-back to one level for all.
What may not: the programme (`lgreco.py`), how errors are measured (`errors*`).

Tensors below 64 Ki elements keep the spec's level (sparsifiers send exactly that share of them): together they are a
thousandth of a model, and each would need a rule of its own. So do all but the `MOST` largest. Errors are taken as the
profile has them; whoever measures adds the owner's (`LevelTable.with_owner`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gcserver.planner.errors import LevelTable
from gcserver.planner.errors_lowrank import lowrank_bytes
from gcserver.planner.errors_sparse import EXACT
from gcserver.planner.families import SPARSE, TWO_EXCHANGES, Spec, error_families, exact_level
from gcserver.planner.lgreco import solve
from gcserver.planner.payload import sparse_payload
from gcserver.planner.profile import LevelErrors, Profile

#: So many tensors get levels of their own: the programme's time and memory grow with the square of their number.
MOST: Final = 1000
#: Of low rank no tensor's rank is more than so many times the spec's, or less than that part of it (L-GreCo, 5.1).
RANGE: Final = 4
#: Levels that lose so much more than they may, as a share, are replaced whatever that costs.
OVERSPENT: Final = 0.1


@dataclass(frozen=True, slots=True)
class Levels:
    """levels: of tensors by index, one a notch, most bytes first. alphas: of the notches; empty: one level for all.

    A tensor that is missing has the level of the spec at every notch.
    """

    levels: dict[int, tuple[int, ...]]
    alphas: tuple[float, ...]
    reason: str

    def last(self, tensor: int) -> int:
        """The level in force unless a controller says otherwise; 0: the spec's own."""
        return self.levels[tensor][-1] if tensor in self.levels else 0


def budgets(alpha_lo: float, notches: int) -> tuple[float, ...]:
    """Budgets from ``alpha_lo`` to 1, evenly."""
    return tuple(float(a) for a in np.linspace(alpha_lo, 1.0, notches)) if notches > 1 else (1.0,)


def choose_levels(
    profile: Profile,
    spec: Spec,
    tensors: Collection[int],
    alphas: Sequence[float],
    exact: Collection[int] = (),
    least: int = 0,
) -> Levels:
    """The levels of ``tensors`` (indices) under budgets of alpha * E_max, E_max being the spec's own level for all.

    exact: tensors that lose nothing at any notch, as far as the family can (sparsifiers). least: no level below it.
    """
    found = _solved(profile, spec, tensors, alphas, least) if alphas else Levels({}, (), "not asked for")
    if spec.name in SPARSE and exact:
        notches = found.alphas or (1.0,)
        kept = {i: (exact_level(spec),) * len(notches) for i in exact}
        return Levels({**found.levels, **kept}, notches, found.reason)
    return found


def overspent(profile: Profile, spec: Spec, tensors: Collection[int], in_force: Mapping[str, int]) -> float:
    """What levels in force lose by the errors of now, over what they may: E_max, the spec's own level for all of
    ``tensors`` (indices). Of these the ones that ``in_force`` does not name lose nothing. 0 where no errors are known.
    """
    rows, common = _known(profile, spec, tensors)
    if not common:
        return 0.0

    def error(row: LevelErrors, level: int) -> float:
        # A level between two counts as the less precise one, but for the spec's own.
        lower = max((known for known in common if known <= level), default=common[0])
        return row.errors[row.levels.index(_default(common, spec) if level == spec.level else lower)]

    allowed = sum(error(row, spec.level) for row in rows)
    lost = sum(error(row, in_force[row.name]) for row in rows if row.name in in_force)
    return lost / allowed if allowed else 0.0


def _known(profile: Profile, spec: Spec, tensors: Collection[int]) -> tuple[tuple[LevelErrors, ...], list[int]]:
    """(errors of the tensors that get levels of their own, the levels they all have); nothing where that is no choice.

    Of a tensor whose gradient was zero when it was looked at nothing is known.
    """
    rows = next((profile.errors[name] for name in error_families(spec) if profile.errors.get(name)), ())
    sizes = {profile.tensors[i].name: profile.tensors[i].elements for i in tensors}
    rows = tuple(row for row in rows if sizes.get(row.name, 0) >= EXACT and any(row.errors))
    if len(rows) > MOST:
        held = {row.name for row in sorted(rows, key=lambda row: -sizes[row.name])[:MOST]}
        rows = tuple(row for row in rows if row.name in held)
    common = sorted(set.intersection(*(set(row.levels) for row in rows))) if rows else []
    return (rows, common) if len(common) > 1 else ((), [])


def _solved(profile: Profile, spec: Spec, tensors: Collection[int], alphas: Sequence[float], least: int) -> Levels:
    if not spec.level:
        return Levels({}, (), f"{spec.name} has no levels")
    index = {profile.tensors[i].name: i for i in tensors}
    rows, common = _known(profile, spec, tensors)
    if not common:
        return Levels({}, (), f"one level for all: no errors of {spec.name} are known")
    common = [level for level in common if level >= least]
    if len(common) < 2:
        return Levels({}, (), f"one level for all: the quality takes none below {least}")
    if spec.name in TWO_EXCHANGES:
        common = [level for level in common if spec.level <= RANGE * level and level <= RANGE * spec.level]
    if len(common) < 2 or common[-1] < spec.level:
        return Levels({}, (), f"one level for all: errors are known of no ranks around {spec.level}")
    default = _default(common, spec)
    table = _table(profile, spec, rows, common, default)
    sets = solve(table, alphas=alphas).sets
    own = (spec.level,) * len(sets)
    levels = dict.fromkeys(index.values(), own)
    for i, row in enumerate(rows):
        levels[index[row.name]] = tuple(s.levels[i] for s in sets)
    saved = 1 - sets[-1].bytes / max(table.default_bytes, 1.0)
    reason = f"levels of {len(rows)} tensors send {saved:.0%} less than {spec.text} at no more error"
    if saved < 0.005:
        reason = f"no levels send less than {spec.text} at no more error"
    return Levels(levels, tuple(s.alpha for s in sets), reason)


def _default(common: Sequence[int], spec: Spec) -> int:
    """The level that stands for the spec's own: of two that it is between the more precise one, so that no budget is
    larger for it."""
    return next((level for level in common if level >= spec.level), common[-1])


def _table(
    profile: Profile, spec: Spec, rows: Sequence[LevelErrors], common: Sequence[int], default: int
) -> LevelTable:
    """Errors are the family's, bytes the spec's own: those of sparsifiers and low rank depend on how they pack."""
    picks = [[row.levels.index(level) for level in common] for row in rows]
    tensors, levels = {t.name: t for t in profile.tensors}, np.array(common, np.int64)
    if spec.name in SPARSE:
        sizes = [sparse_payload(spec, tensors[row.name].elements, levels) for row in rows]
    elif spec.name in TWO_EXCHANGES:
        sizes = [lowrank_bytes(tensors[row.name].shape, levels, spec.width) for row in rows]
    else:
        sizes = [np.array([row.sizes[i] for i in pick]) for row, pick in zip(rows, picks, strict=True)]
    return LevelTable(
        tuple(row.name for row in rows),
        levels,
        np.array(sizes),
        np.array([[row.errors[i] for i in pick] for row, pick in zip(rows, picks, strict=True)]),
        np.full(len(rows), common.index(default), np.int64),
    )
