"""One family on a running job: levels, an option for every block, what is forced, and all that as rules.

What may live here: how the parts of auto come together for one spec, which rules it keeps. What may not: which family
wins (`auto.py`), the parts themselves (`auto_levels`, `auto_options`, `auto_rules`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from gcserver.planner.auto_levels import OVERSPENT, Levels, choose_levels, overspent
from gcserver.planner.auto_options import DENSE_COLUMNS, SLACK, select, units
from gcserver.planner.auto_rules import (
    PlannedRule,
    TensorOption,
    applied,
    levels_in_force,
    levels_of,
    rules,
    sent_exactly,
)
from gcserver.planner.errors import F64, I64
from gcserver.planner.families import DENSE, SPARSE, TWO_EXCHANGES, Spec, exact_level, parse
from gcserver.planner.live import ALL, OWNER, BlockOption, Live, cost_of
from gcserver.planner.payload import segment_bytes
from gcserver.planner.profile import ProfileError

#: What predictions have to promise, as a share of the step, for a plan that is not one option with one level for all:
#: by less they do not know better, and it says less of its family.
SURE: Final = 0.03


@dataclass(frozen=True, slots=True, eq=False)
class FamilyPlan:
    """The best plan of one family: options by column and block, prices, the column of each block, what was forced, and
    what each block uses with the bytes it comes to. kept: the rules it had before, if those stay."""

    spec: Spec
    levels: Levels
    options: tuple[tuple[BlockOption, ...], ...]
    table: F64
    columns: I64
    seconds: float
    notes: tuple[str, ...]
    chosen: tuple[BlockOption, ...]
    kept: tuple[PlannedRule, ...] = ()

    @property
    def dense(self) -> bool:
        """Whether no block is compressed: then its steps are dense ones, whatever the family's name."""
        return all(option.spec == DENSE for option in self.chosen)


def family_plan(
    live: Live,
    spec: Spec,
    *,
    espresso: bool = True,
    alphas: Sequence[float] = (),
    exclude: Sequence[str] = (),
    least: int = 0,
) -> FamilyPlan:
    """The best plan of one family for the blocks of ``live``. Raises ProfileError if its cost is not known.

    espresso: pick an option for every block; else all that can be is compressed, over owners. alphas: budgets for
    L-GreCo; none: one level for all. least: no tensor has a level below it. exclude: globs of tensors that travel
    exactly. With Espresso some blocks are dense, or tensors have levels of their own (but for sparsifiers), only where
    that gains `SURE`. A family is compressed even where dense would be shorter: it is another one that stands for dense
    steps.
    """
    tensors, blocks = live.profile.tensors, live.blocks
    out = {i for i, t in enumerate(tensors) if _matches(t.name, exclude)}
    forced = _forced(live, spec, out)
    lossy = {t for b, block in enumerate(blocks) if not forced[b] for t, _ in block.parts} - out
    inside = out & {t for b, block in enumerate(blocks) if not forced[b] for t, _ in block.parts}
    levels = choose_levels(live.profile, spec, sorted(lossy), alphas, sorted(inside), least)
    columns = _columns(live, spec, levels, forced)
    if espresso and levels.alphas and spec.name not in SPARSE:
        # (Kernels of a sparsifier take no longer for them, and controllers move between its levels.)
        plain = choose_levels(live.profile, spec, sorted(lossy), ())
        without = _columns(live, spec, plain, forced)
        own, one = (min(map(live.seconds, given[DENSE_COLUMNS:])) for given in (columns, without))
        if own >= one * (1 - SURE):
            levels, columns = plain, without
    table = live.table(columns)
    uniform = [np.full(len(blocks), k, np.int64) for k in range(len(columns))]
    if espresso:
        found = select(live, table, units(live)).columns
        mixed = [found, _without_spills(live, columns, found)]
        plans = [*mixed, *uniform]
    else:
        mixed, plans = [], [uniform[0 if spec.name == DENSE else DENSE_COLUMNS]]
    done = [(_carried_out(live, levels, columns, plan), plan) for plan in plans]
    steps = [live.seconds(options) for options, _ in done]
    best = _shortest(steps)
    compresses = spec.name != DENSE and not all(forced)
    if mixed and compresses and steps[best] >= min(steps[len(mixed) :]) * (1 - SURE):
        compressed = len(mixed) + DENSE_COLUMNS
        best = compressed + _shortest(steps[compressed:])
    (options, chosen), seconds = done[best], steps[best]
    return FamilyPlan(spec, levels, tuple(columns), table, chosen, seconds, forced, options)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _shortest(steps: Sequence[float]) -> int:
    """The first of those that are no longer than the shortest by more than what is not sure."""
    return next(i for i, seconds in enumerate(steps) if seconds <= min(steps) * (1 + SLACK))


def _columns(live: Live, spec: Spec, levels: Levels, forced: Sequence[str]) -> list[tuple[BlockOption, ...]]:
    """The options of a family for every block: dense over owners and to all, then compressed likewise, if it is."""
    blocks = range(len(live.blocks))
    columns = [tuple(BlockOption(DENSE, scheme) for _ in blocks) for scheme in (OWNER, ALL)]
    if spec.name == DENSE:
        return columns
    owner = tuple(
        BlockOption() if forced[b] else BlockOption(spec.text, OWNER, _nbytes(live, spec, levels, b)) for b in blocks
    )
    everyone = tuple(BlockOption(o.spec, ALL, o.nbytes) for o in owner)
    return [*columns, owner] if spec.name in TWO_EXCHANGES else [*columns, owner, everyone]


def _carried_out(
    live: Live, levels: Levels, columns: Sequence[Sequence[BlockOption]], plan: I64
) -> tuple[BlockOption, ...]:
    """The options of a plan with the bytes they come to.

    What a tensor that leads a dense block has in a compressed one is sent as it is: its rule says dense.
    """
    options = [columns[k][b] for b, k in enumerate(plan.tolist())]
    exact = {block.lead for block, option in zip(live.blocks, options, strict=True) if option.spec == DENSE}
    for b, option in enumerate(options):
        if option.spec != DENSE and any(t in exact for t, _ in live.blocks[b].parts):
            nbytes = _nbytes(live, parse(option.spec), levels, b, exact)
            options[b] = BlockOption(option.spec, option.scheme, nbytes)
    return tuple(options)


def _without_spills(live: Live, columns: Sequence[Sequence[BlockOption]], plan: I64) -> I64:
    """The plan with all blocks compressed whose leading tensor reaches into a compressed block."""
    fixed: I64 = np.array(plan)
    changed = True
    while changed:
        changed = False
        inside = {
            t: int(fixed[b])
            for b, block in enumerate(live.blocks)
            if columns[fixed[b]][b].spec != DENSE
            for t, _ in block.parts
        }
        for b, block in enumerate(live.blocks):
            if block.lead in inside and fixed[b] < DENSE_COLUMNS <= inside[block.lead]:
                fixed[b], changed = inside[block.lead], True
    return fixed


def keeping(
    live: Live, plan: FamilyPlan, before: tuple[PlannedRule, ...], exclude: Sequence[str] = (), least: int = 0
) -> FamilyPlan:
    """The plan of a family that ``before`` are the rules of; its best one, ``plan``, where those are of no use now.

    What was measured was measured under rules. Others, of the same family, may be dense where those compress, and
    predictions do not tell which of two is the shorter as well as steps tell of the one: a family whose rules changed
    with every step that is measured would never be known. They do not stay where they lose more than they may by now,
    have levels below ``least`` or compress what is ``exclude``d.
    """
    names = tuple(t.name for t in live.profile.tensors)
    try:
        options = applied(live, before)
    except ProfileError:
        return plan
    inside = {names[t] for t in _compressed(live, options)}
    own = levels_of(before, names)
    left_out = [name for name in inside if _matches(name, exclude)]
    if (
        any(note and option.spec != DENSE for note, option in zip(plan.notes, options, strict=True))
        or not sent_exactly(before, left_out)
        or any(level < least for given in own.values() for level in given)
        or _spent(live, plan, before, options, exclude) > 1 + OVERSPENT
    ):
        return plan
    alphas = plan.levels.alphas
    # Budgets of which other errors make fewer notches are not known any more.
    known = alphas if all(len(given) == len(alphas) for given in own.values()) and own else ()
    levels = Levels(own, known, "levels are those under which it was measured")
    columns = np.array([_column(plan, b, option) for b, option in enumerate(options)], np.int64)
    # What each block has stands in its column, with the bytes of its own levels.
    given = tuple(
        tuple(options[b] if columns[b] == k else option for b, option in enumerate(column))
        for k, column in enumerate(plan.options)
    )
    return replace(
        plan, levels=levels, options=given, table=live.table(given), columns=columns, seconds=live.seconds(options),
        chosen=options, kept=before,
    )  # fmt: skip


def spent(live: Live, plan: FamilyPlan, before: tuple[PlannedRule, ...], exclude: Sequence[str]) -> float:
    """What ``before``, rules of the plan's family, lose by the errors of now, over what they may; 0 where no errors are
    known or the rules have no levels. What is in dense blocks loses nothing, ``exclude``d tensors may lose nothing."""
    try:
        return _spent(live, plan, before, applied(live, before), exclude)
    except ProfileError:
        return 0.0


def _spent(
    live: Live,
    plan: FamilyPlan,
    before: tuple[PlannedRule, ...],
    options: Sequence[BlockOption],
    exclude: Sequence[str],
) -> float:
    """The same, knowing what blocks use under these rules."""
    names = tuple(t.name for t in live.profile.tensors)
    levels = levels_in_force(names, before, plan.spec)
    if not levels:
        return 0.0
    may = {t for block, note in zip(live.blocks, plan.notes, strict=True) if not note for t, _ in block.parts}
    may -= {t for t in may if _matches(names[t], exclude)}
    lossy = {names[t] for t in _compressed(live, options) & may}
    return overspent(live.profile, plan.spec, sorted(may), {n: level for n, level in levels.items() if n in lossy})


def _compressed(live: Live, options: Sequence[BlockOption]) -> set[int]:
    """The tensors that have a part in compressed blocks."""
    used = zip(live.blocks, options, strict=True)
    return {t for block, option in used if option.spec != DENSE for t, _ in block.parts}


def _column(plan: FamilyPlan, block: int, option: BlockOption) -> int:
    """Where an option stands among a plan's; levels of other rules may come to other bytes."""
    alike = ((o[block].spec == DENSE, o[block].scheme) == (option.spec == DENSE, option.scheme) for o in plan.options)
    return next((k for k, same in enumerate(alike) if same), 0)


def planned_rules(live: Live, plan: FamilyPlan, exactly: Sequence[str] = ()) -> tuple[PlannedRule, ...]:
    """A family's plan as rules: what each leading tensor uses, and the levels of all tensors in compressed blocks.

    exactly: globs of names that travel exactly in whatever else these rules hold for.
    """
    if plan.kept:
        return plan.kept
    tensors, levels = live.profile.tensors, plan.levels
    used = list(zip(live.blocks, plan.chosen, strict=True))
    text = _with_room(plan)
    led = {block.lead: option for block, option in used}
    wanted: dict[str, TensorOption] = {}
    compressed = [option for option in led.values() if option.spec != DENSE]
    # What leads no block has no say in the scheme: the one most have takes the fewest rules.
    scheme = ALL if 2 * sum(option.scheme == ALL for option in compressed) > len(compressed) else OWNER
    inside = _compressed(live, plan.chosen)
    exact = exact_level(plan.spec) if plan.spec.name in SPARSE else 0
    for t, tensor in enumerate(tensors):
        given = levels.levels.get(t, ())
        if t in led:
            option = led[t]
            dense = option.spec == DENSE
            wanted[tensor.name] = TensorOption(DENSE if dense else text, option.scheme, () if dense else given)
        elif t in inside and not (set(given) == {exact} and _matches(tensor.name, exactly)):
            # without a rule for this codec it would be sent as it is
            wanted[tensor.name] = TensorOption(text, scheme, given)
    return rules([t.name for t in tensors], wanted, exactly)


def _with_room(plan: FamilyPlan) -> str:
    """The spec for a plan's rules: a codec of ranks takes no level above its own, so it gets the highest that is given.

    What it keeps of a tensor is sized by that rank; what it sends follows the levels.
    """
    most = max((max(given) for given in plan.levels.levels.values()), default=0)
    if plan.spec.name not in TWO_EXCHANGES or most <= plan.spec.level:
        return plan.spec.text
    return re.sub(r"rank=\d+", f"rank={most}", plan.spec.text)


def _forced(live: Live, spec: Spec, out: set[int]) -> tuple[str, ...]:
    """For each block why it must stay dense under a family, or nothing."""
    if spec.name == DENSE:
        return ("",) * len(live.blocks)
    why = []
    # A sparsifier sends all of a segment at its highest level, and exactly unless it rounds values; but a tensor that
    # leads a block has a rule for that.
    inexact = out & {b.lead for b in live.blocks} if spec.name in SPARSE and spec.width == 32 else out
    for index, block in enumerate(live.blocks):
        text = live.usable(index, spec.text)
        if not text and block.lead in out:
            text = "excluded"
        elif not text:
            held = [live.profile.tensors[t].name for t, _ in block.parts if t in inexact]
            text = f"holds {held[0]}, which is excluded" if held else ""
        why.append(text)
    # One rule holds for all blocks that a tensor leads.
    by_lead = {b.lead: text for b, text in zip(live.blocks, why, strict=True) if text}
    return tuple(text or by_lead.get(b.lead, "") for b, text in zip(live.blocks, why, strict=True))


def _nbytes(live: Live, spec: Spec, levels: Levels, block: int, exact: Collection[int] = ()) -> float:
    """Bytes of a block's contribution; exact: tensors that are sent as they are."""
    b, cost = live.blocks[block], cost_of(live.profile, spec.text)
    total = 0.0
    for t, n in b.parts:
        level = exact_level(spec) if t in exact else levels.last(t)
        total += segment_bytes(spec, cost, live.profile.tensors[t].shape, n, level, b.dtype.itemsize)
    return total
