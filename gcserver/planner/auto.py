"""`plan = "auto"`: Espresso, MergeComp, L-GreCo, SIDCo and DC2 composed by fixed rules into one proposal for a job.

What may live here: the wish, the proposal, the order of the rules, which family wins, whether a switch pays. What may
not: the rules of the parts (`auto_levels`, `auto_groups`, `auto_options`, `auto_rules`), what a measured step says
(`auto_informed`), prices (`live`), measuring.

The rules, in order:

1. Families that the quality takes (`families.ladder`) and whose cost was measured are tried, each by itself; where the
   quality is balanced lower ranks and sparsifiers not in a model's first steps, and sparsifiers only with optimizers
   that stand late gradients.
2. L-GreCo gives each tensor its levels at every notch; the rest is priced at alpha = 1, and error that a block left
   dense does not use is not spent again. Quantisers and low rank keep one level unless levels gain `SURE`.
3. Espresso picks an option for every block by the live timeline; all are compressed alike unless that gains `SURE`. A
   family that was measured keeps the rules it had then.
4. A family is in question if it gains `margin` of its kind over the best of less lossy kinds: casts, quantisers, low
   rank, sparsifiers, in this order. Dense is an answer. Of what is in question the shortest step wins; of those within
   `TIE` of it the least lossy. Errors of families are never compared.
   A family that would compress no block is dense. Low rank or a sparsifier in force that turns out to bring less gives
   way. Once the steps of what was chosen were measured, kinds that were not yet in force count as `hope` faster than
   predicted, but no faster than computing: what is that close is tried, one after the other, and measured steps decide.
5. MergeComp cuts groups for the family that won. The proposal says what they would bring: they come into force when
   the model is declared with them, and are planned for then.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from gcproto.rates import say_rate
from gcserver.planner.auto_family import FamilyPlan, family_plan, keeping, planned_rules, spent
from gcserver.planner.auto_groups import Groups, regroup
from gcserver.planner.auto_informed import Terms, informed, sent, terms
from gcserver.planner.auto_levels import budgets
from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.auto_why import GroupWhy, explain
from gcserver.planner.errors import TableError
from gcserver.planner.families import (
    DENSE,
    KINDS,
    SPARSE,
    TWO_EXCHANGES,
    Spec,
    candidates,
    first_step,
    kind,
    ladder,
    least_level,
    parse,
    refused,
    tolerated,
)
from gcserver.planner.live import Live
from gcserver.planner.live_layout import DDP_BUCKETS, portions
from gcserver.planner.profile import Profile
from gcserver.planner.worth import margin, of_means, uncertainty

PARTS: Final = frozenset({"lgreco", "mergecomp", "espresso"})
#: Steps that differ by less, as a share, are equally long: the less lossy family wins.
TIE: Final = 0.02


class AutoError(ValueError):
    """A wish that cannot be met: says what was expected, what came and what to do."""


class Wish(msgspec.Struct, frozen=True):
    """What a job wants of its plan.

    quality: safe, balanced or fast. parts: of lgreco, mergecomp and espresso; without espresso everything that can be
    compressed is, through owners. family: a spec to keep to, empty for any. exclude: globs of tensors that travel
    exactly; everywhere: those of them that hold for tensors of the job's other models, too. buckets: bytes of the
    worker's buckets (DDP's) where the profile does not have them, empty if it brings tensors one by one. groups: names
    of those it brings together, where it was told to. alpha_lo, notches: the budgets of L-GreCo. rules, step: those in
    force and the seconds that a step takes under them, as measured (0: not yet); running: the family that a planner
    made them of, empty if they are nobody's. took: seconds of a step under families that were in force, which count
    instead of predictions; agreeing: of how many measurements each is the mean. made, late_after: steps of the model,
    and after how many lower ranks and sparsifiers are in question (`families.first_step`); 0: at once. hope: the share
    by which the steps of families that were never in force may be shorter than predicted, so that they are tried.
    kept: rules under which families took that. refused: families that are not in question, and why. measure: a family
    to be put in force to see what its steps take; empty if none is.
    """

    quality: str = "balanced"
    parts: frozenset[str] = PARTS
    family: str = ""
    exclude: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    buckets: tuple[int, ...] = DDP_BUCKETS
    groups: tuple[tuple[str, ...], ...] = ()
    alpha_lo: float = 0.6
    notches: int = 5
    rules: tuple[PlannedRule, ...] = ()
    step: float = 0.0
    running: str = ""
    took: dict[str, float] = {}
    agreeing: dict[str, int] = {}
    kept: dict[str, tuple[PlannedRule, ...]] = {}
    made: int = 0
    late_after: int = 0
    hope: float = 0.0
    refused: dict[str, str] = {}
    measure: str = ""


class Considered(msgspec.Struct, frozen=True):
    """A family that was looked at; ``expected``: seconds of a step, 0: not known; ``why_not``: empty for the winner."""

    spec: str
    expected: float
    why_not: str


class Proposal(msgspec.Struct, frozen=True):
    """A plan and what is expected of it. Times are seconds of a step.

    rules: as a plan takes them. alphas: of the notches of rules with levels, ascending. groups: tensors in the order of
    readiness. caps: DDP's buckets for these groups, MiB; empty if they are what the worker has. expected: with the
    rules, as long as the worker has the groups of now. dense: without compression. compute: without exchange. bytes:
    that the mean node sends. why: by group. considered: families, the least lossy first. reason: one sentence.
    overspent: what the levels in force lose, if they are this family's, over what they may by the errors of now. hope:
    the share by which steps may be shorter than expected, where that is why the family is tried. terms: what was
    learned of the profile, by which all is priced. tolerant: as the profile has it.
    """

    family: str
    rules: tuple[PlannedRule, ...]
    alphas: tuple[float, ...]
    groups: tuple[tuple[str, ...], ...]
    caps: tuple[float, ...]
    expected: float
    dense: float
    compute: float
    bytes: float
    why: tuple[GroupWhy, ...]
    considered: tuple[Considered, ...]
    reason: str
    overspent: float = 0.0
    hope: float = 0.0
    terms: Terms | None = None
    tolerant: bool = False

    @property
    def hoped(self) -> float:
        """Seconds of a step if it is as much shorter than expected as it may be."""
        return self.expected * (1.0 - self.hope)


def compose(profile: Profile, wish: Wish | None = None) -> Proposal:
    """The proposal for a job. The same profile and wish give the same proposal.

    Raises AutoError for a wish that cannot be met, ProfileError for a profile that cannot be used.
    """
    wish = wish or Wish()
    _check(wish)
    if profile.nodes == 1:  # whatever steps take, nothing is exchanged that could be shorter
        wish = msgspec.structs.replace(wish, took={}, kept={}, hope=0.0, measure="")
    compute, profile = profile.compute, informed(profile, wish)
    live = Live(profile, portions(profile, wish.buckets, wish.groups))
    plans, unknown = _tried(live, wish)
    off = _off(plans, wish.took)
    dense = _corrected(wish, plans[0].spec, plans[0].seconds, off)
    corrected = [dense if p.dense else _corrected(wish, p.spec, p.seconds, off) for p in plans]
    plans = [dataclasses.replace(p, seconds=seconds) for p, seconds in zip(plans, corrected, strict=True)]
    noise = uncertainty(profile.steps[-1]) if profile.steps else 0.0
    hoped = [dataclasses.replace(p, seconds=_hoped(wish, p, profile)) for p in plans]
    winner, losers, reason = _winner(hoped, noise, profile.tolerant, wish.agreeing)
    hope = next(1.0 - winner.seconds / p.seconds for p in plans if p.spec == winner.spec) if winner.seconds else 0.0
    if wish.family:
        winner, reason = plans[-1], f"{wish.family} was asked for"
        losers, hope = {DENSE: reason}, 0.0
    elif measured := next((p for p in plans if p.spec.text == wish.measure and (p is plans[0] or not p.dense)), None):
        winner, reason, hope = measured, f"{wish.measure}, to be measured beside others", 0.0
        losers = {p.spec.text: f"{wish.measure} is measured first" for p in plans if p is not measured}
    elif idle := _idle(profile, plans):
        reason = idle
    elif not profile.link.samples:
        reason += f"; the link was not measured, {say_rate(profile.link.bandwidth)} is a guess"
    groups = Groups(live.brought, (), winner.seconds, False, "")
    if "mergecomp" in wish.parts:
        groups = regroup(live, winner.spec.text, winner.chosen)
        if groups.changed:
            reason += f"; {groups.reason}"
    if hope:
        reason += f"; tried, since steps may be up to {hope:.0%} shorter than predicted"
    if winner.levels.alphas:
        reason += f"; {winner.levels.reason}"
    found = planned_rules(live, winner, wish.everywhere)
    options = applied(live, found)
    expected = _corrected(wish, winner.spec, live.seconds(options), off)
    considered = [
        Considered(p.spec.text, expected, "")
        if p.spec == winner.spec
        else Considered(p.spec.text, p.seconds, losers[p.spec.text])
        for p in plans
    ]
    names = tuple(t.name for t in profile.tensors)
    # Rules of a family of ranks name the highest rank that is given, not the family's own.
    alike = any(parse(rule.spec).key == winner.spec.key for rule in wish.rules)
    own = winner.spec.text == wish.running if wish.running else alike
    return Proposal(
        winner.spec.text,
        found,
        winner.levels.alphas,
        tuple(tuple(names[t] for t in group) for group in groups.portions) if "mergecomp" in wish.parts else (),
        groups.caps,
        expected,
        expected if winner.spec.name == DENSE else plans[0].seconds,
        compute,
        sent(live, options),
        explain(live, winner.table, winner.columns, winner.options, groups.portions, winner.notes),
        (*considered, *unknown),
        reason,
        spent(live, winner, wish.rules, wish.exclude) if own else 0.0,
        hope,
        terms(profile),
        profile.tolerant,
    )


def _off(plans: Sequence[FamilyPlan], took: dict[str, float]) -> dict[int, float]:
    """By kind, how many times as long as predicted the steps of its families were."""
    found: dict[int, list[float]] = {}
    for p in plans:
        if p.spec.text in took and p.seconds > 0:
            found.setdefault(kind(p.spec.text), []).append(took[p.spec.text] / p.seconds)
    return {which: statistics.mean(ratios) for which, ratios in found.items()}


def _corrected(wish: Wish, spec: Spec, predicted: float, off: dict[int, float]) -> float:
    """A family's step as it was measured, else as predicted and off as those of its kind were."""
    return wish.took.get(spec.text, predicted * off.get(kind(spec.text), 1.0))


def _hoped(wish: Wish, plan: FamilyPlan, profile: Profile) -> float:
    """Seconds of a family's step if it is as much shorter than predicted as it may be, but no shorter than computing.

    Not shorter where one of its kind was measured, and of dense steps and what is in force, by which predictions are
    set right.
    """
    known = {0, *map(kind, wish.took), *(kind(rule.spec) for rule in wish.rules)}
    if plan.dense or kind(plan.spec.text) in known:
        return plan.seconds
    return max(plan.seconds * (1.0 - wish.hope), min(plan.seconds, profile.compute))


def _check(wish: Wish) -> None:
    try:
        ladder(wish.quality)
        spec = parse(wish.family) if wish.family else None
    except TableError as error:
        raise AutoError(str(error)) from error
    if unknown := wish.parts - PARTS:
        raise AutoError(f"parts: expected some of {', '.join(sorted(PARTS))}, got {', '.join(sorted(unknown))}")
    if not (0.0 < wish.alpha_lo <= 1.0 and 1 <= wish.notches <= 64):
        got = f"{wish.alpha_lo}, {wish.notches}"
        raise AutoError(f"budgets: expected alpha_lo in (0, 1] and 1 to 64 notches, got {got}")
    if any(cap < 1 for cap in wish.buckets):
        raise AutoError(f"buckets: expected sizes of 1 byte at least, got {wish.buckets}")
    if spec is not None and not spec.level and spec.name in SPARSE | TWO_EXCHANGES | {"qsgd"}:
        raise AutoError(f"family: expected a spec with its ratio, rank or bits, got {wish.family!r}")


def _planned(live: Live, wish: Wish, spec: Spec) -> FamilyPlan:
    alphas = budgets(wish.alpha_lo, wish.notches) if "lgreco" in wish.parts else ()
    least = least_level(spec, wish.quality)
    plan = family_plan(live, spec, espresso="espresso" in wish.parts, alphas=alphas, exclude=wish.exclude, least=least)
    before = wish.kept.get(spec.text)
    return keeping(live, plan, before, wish.exclude, least) if before else plan


def _tried(live: Live, wish: Wish) -> tuple[list[FamilyPlan], list[Considered]]:
    """(plans, the least lossy first, none always among them, what could not be tried)."""
    profile = live.profile
    if wish.family:
        spec = parse(wish.family)
        if spec.name in TWO_EXCHANGES and not live.layout.whole:
            raise AutoError(f"{wish.family}: {_WHOLE}")
        dense = [] if spec.name == DENSE else [_planned(live, wish, parse(DENSE))]
        return [*dense, _planned(live, wish, spec)], []
    specs = candidates({DENSE, *profile.codecs}, wish.quality)
    measured = {s.key for s in specs}
    wanted = [s for s in ladder(wish.quality) if parse(s).key not in measured]
    unknown = [Considered(s, 0.0, "its cost was not measured") for s in wanted]
    unknown += [Considered(t, 0.0, why) for t in sorted(profile.codecs) if (why := refused(parse(t), wish.quality))]
    plans = []
    for spec in specs:
        if spec.name in TWO_EXCHANGES and not live.layout.whole:
            unknown.append(Considered(spec.text, 0.0, _WHOLE))
        elif not tolerated(spec, wish.quality, profile.tolerant):
            unknown.append(Considered(spec.text, 0.0, INTOLERANT))
        elif wish.made < (first := first_step(spec, wish.late_after, profile.tolerant)):
            unknown.append(Considered(spec.text, 0.0, f"in question from step {first} on"))
        elif spec.name != DENSE and spec.text in wish.refused:
            unknown.append(Considered(spec.text, 0.0, wish.refused[spec.text]))
        else:
            plans.append(_planned(live, wish, spec))
    return plans, unknown


INTOLERANT: Final = "the optimizer is not known to stand late gradients (SGD without momentum and Adafactor are)"
_WHOLE: Final = "blocks may cut matrices; make the state with whole=True for codecs of matrices"


def _winner(
    plans: Sequence[FamilyPlan], noise: float, tolerant: bool, agreeing: dict[str, int]
) -> tuple[FamilyPlan, dict[str, str], str]:
    """(the plan that wins, why each other does not, the sentence of the proposal); plans: the least lossy first, noise:
    of one measurement, agreeing: see `Wish`."""
    none = plans[0]
    in_question = [none]
    for i, names in enumerate(KINDS):
        before = _fastest(in_question)
        for p in [p for p in plans[1:] if p.spec.name in names]:
            unsure = of_means(noise, *(agreeing.get(each.spec.text, 1) for each in (p, before)))
            if _pays(p, before, margin(unsure, kind(before.spec.text), i, tolerant)):
                in_question.append(p)
    winner = _fastest(in_question)
    if winner is none:
        best = min(plans, key=lambda p: p.seconds)
        gain = 1 - best.seconds / none.seconds if none.seconds else 0.0
        wanted = margin(noise, 0, kind(best.spec.text), tolerant)
        reason = f"dense: compression would gain {gain:.1%}, a switch must bring {wanted:.1%}"
    else:
        reason = f"{winner.spec.text}: {1 - winner.seconds / none.seconds:.1%} less than dense"
    losers = {p.spec.text: _lost(p, winner, plans.index(p) > plans.index(winner)) for p in plans if p is not winner}
    return winner, losers, reason


def _idle(profile: Profile, plans: Sequence[FamilyPlan]) -> str:
    """Why nothing was compared with dense at all; empty where something was."""
    if profile.nodes == 1:
        return "dense: with one node there is nobody to exchange with"
    if not profile.elements:
        return "dense: no tensor has an element"
    return "" if len(plans) > 1 else "dense: of no other codec in question the cost was measured"


def _pays(plan: FamilyPlan, against: FamilyPlan, wanted: float) -> bool:
    return plan.seconds < against.seconds * (1 - wanted)


def _lost(plan: FamilyPlan, winner: FamilyPlan, lossier: bool) -> str:
    """Why a family did not win."""
    if plan.dense and plan.spec.name != DENSE:
        return "no block would be compressed"
    name, times = winner.spec.text, plan.seconds / winner.seconds if winner.seconds else 1.0
    if times >= 2:
        return f"{times:.1f} times the step of {name}"
    if times > 1 + TIE:
        return f"{times - 1:.1%} slower than {name}"
    if lossier:
        return f"lossier than {name}, and not faster by what that must bring"
    return "gains too little over what is less lossy" if times < 1 else f"{times - 1:.1%} slower than {name}"


def _fastest(plans: Sequence[FamilyPlan]) -> FamilyPlan:
    """The first, which is the least lossy, of those within a tie of the fastest."""
    least = min(p.seconds for p in plans)
    return next(p for p in plans if p.seconds <= least * (1 + TIE))
