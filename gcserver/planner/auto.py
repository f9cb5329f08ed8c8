"""`plan = "auto"`: Espresso, MergeComp, L-GreCo, SIDCo and DC2 composed by fixed rules into one proposal for a job.

What may live here: the wish, the proposal, the order of the rules, which family wins, whether a switch pays. What may
not: the rules of the parts (`auto_levels`, `auto_groups`, `auto_options`, `auto_rules`), prices (`live`), measuring.

The rules, in order:

1. Families that the quality takes (`families.ladder`) and whose cost was measured are tried, each by itself.
2. L-GreCo gives each tensor its levels at every notch; the rest is priced at alpha = 1, and error that a block left
   dense does not use is not spent again.
3. Espresso picks an option for every block by the live timeline.
4. A family is in question if it gains `margin` over the best of less lossy kinds: casts over none, quantisers over
   casts, low rank and sparsifiers over quantisers. Dense is an answer. Of what is in question the shortest step wins;
   of those within `TIE` of it the least lossy. Errors of families are never compared.
5. MergeComp cuts groups for the family that won. Where groups come into force with the plan (``Wish.regroup``) options
   are picked once more under them; else the proposal only says what they would bring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from gcproto.rates import say_rate
from gcserver.planner.auto_family import FamilyPlan, family_plan, planned_rules
from gcserver.planner.auto_groups import Groups, regroup
from gcserver.planner.auto_levels import budgets, overspent
from gcserver.planner.auto_rules import PlannedRule, applied, levels_in_force
from gcserver.planner.auto_why import GroupWhy, explain
from gcserver.planner.errors import TableError
from gcserver.planner.families import (
    DENSE,
    KINDS,
    SPARSE,
    TWO_EXCHANGES,
    Spec,
    candidates,
    ladder,
    parse,
    refused,
)
from gcserver.planner.live import Live
from gcserver.planner.live_layout import DDP_BUCKETS, portions
from gcserver.planner.profile import Profile, ProfileError, StepTime
from gcserver.values import human_duration

PARTS: Final = frozenset({"lgreco", "mergecomp", "espresso"})
#: Steps that differ by less, as a share, are equally long: the less lossy family wins.
TIE: Final = 0.02
#: The least gain, as a share, for which a plan is switched.
GAIN: Final = 0.05


class AutoError(ValueError):
    """A wish that cannot be met: says what was expected, what came and what to do."""


class Wish(msgspec.Struct, frozen=True):
    """What a job wants of its plan.

    quality: safe, balanced or fast. parts: of lgreco, mergecomp and espresso; without espresso everything that can be
    compressed is, through owners. family: a spec to keep to, empty for any. exclude: globs of tensors that travel
    exactly. buckets: bytes of the worker's buckets (DDP's), empty if it brings tensors one by one. groups: names of
    those it brings together, where it was told to. regroup: whether the proposal's groups come into force together with
    it. alpha_lo, notches: the budgets of L-GreCo. rules, step: those in force and the seconds that a step takes under
    them, as measured (0: not yet). took: seconds of a step under families that were in force, which count instead of
    predictions.
    """

    quality: str = "balanced"
    parts: frozenset[str] = PARTS
    family: str = ""
    exclude: tuple[str, ...] = ()
    buckets: tuple[int, ...] = DDP_BUCKETS
    groups: tuple[tuple[str, ...], ...] = ()
    regroup: bool = False
    alpha_lo: float = 0.6
    notches: int = 5
    rules: tuple[PlannedRule, ...] = ()
    step: float = 0.0
    took: dict[str, float] = {}


class Considered(msgspec.Struct, frozen=True):
    """A family that was looked at; ``expected``: seconds of a step, 0: not known; ``why_not``: empty for the winner."""

    spec: str
    expected: float
    why_not: str


class Proposal(msgspec.Struct, frozen=True):
    """A plan and what is expected of it. Times are seconds of a step.

    rules: as a plan takes them. alphas: of the notches of rules with levels, ascending. groups: tensors in the order of
    readiness. caps: DDP's buckets for these groups, MiB; empty if they are what the worker has. expected: with the
    rules, and with the groups if the wish was to regroup. dense: without compression. compute: without exchange. bytes:
    that the mean node sends. why: by group. considered: families, the least lossy first. reason: one sentence.
    overspent: what the levels in force lose, if they are this family's, over what they may by the errors of now.
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


def margin(noise: float) -> float:
    """The gain, as a share, that a switch must bring where steps vary by ``noise`` (standard deviation over mean)."""
    return max(GAIN, 2.0 * noise)


def uncertainty(step: StepTime) -> float:
    """Standard deviation of a measured median over the median: of normal noise, 1.25 that of a step over the root of
    the steps."""
    return 1.25 * step.noise / math.sqrt(max(step.steps, 1))


def interference(live: Live, rules: Sequence[PlannedRule], measured: float) -> float:
    """Seconds by which a step grows for each second of CPU time outside the workers, in [0, 1].

    What a step under ``rules`` takes beyond its prediction (``live`` without interference) is laid at the door of what
    lanes and network compute meanwhile: workers that share their cores with them wait. More than all of that cannot be.
    0 under rules whose codecs have no cost here (an operator's, the model's own): of their steps nothing can be told.
    """
    unexplained, cpu = _unexplained(live, rules, measured)
    return min(max(unexplained / cpu, 0.0), 1.0) if cpu > 0 else 0.0


def slowness(live: Live, rules: Sequence[PlannedRule], measured: float) -> float:
    """Seconds of a step under ``rules`` that not even an interference of 1 explains: the machine is slower than it was
    when the profile was measured, and would be so under every plan. At most as much as computing takes. 0 where the
    link is a guess, which may be what is wrong."""
    unexplained, cpu = _unexplained(live, rules, measured)
    return min(max(unexplained - cpu, 0.0), live.profile.compute) if live.profile.link.samples else 0.0


def informed(profile: Profile, wish: Wish) -> Profile:
    """The profile with the interference and the slowness that the step of the wish's rules gives away; as it is where
    no step is known."""
    if wish.step <= 0:
        return profile
    live = Live(profile, portions(profile, wish.buckets, wish.groups))
    learned, slower = interference(live, wish.rules, wish.step), slowness(live, wish.rules, wish.step)
    return msgspec.structs.replace(profile, interference=learned, forward=profile.forward + slower)


def _unexplained(live: Live, rules: Sequence[PlannedRule], measured: float) -> tuple[float, float]:
    """(seconds beyond the prediction, CPU time of lanes and network), both 0 where nothing can be told."""
    try:
        options = applied(live, rules)
    except ProfileError:
        return 0.0, 0.0
    return measured - live.seconds(options), live.cpu(options)


def worth(now: StepTime | float, proposal: Proposal, noise: float = 0.0) -> tuple[bool, str]:
    """(whether to switch, why) from a step that takes ``now``, measured or predicted, to what ``proposal`` expects."""
    seconds = now.seconds if isinstance(now, StepTime) else now
    noise = max(noise, uncertainty(now) if isinstance(now, StepTime) else 0.0)
    if seconds <= 0:
        return False, "no step was measured yet"
    gain, wanted = 1.0 - proposal.expected / seconds, margin(noise)
    if gain > wanted:
        return True, f"{human_duration(proposal.expected)} a step instead of {human_duration(seconds)}: {gain:.1%} less"
    if gain < 0:
        return False, f"{human_duration(proposal.expected)} a step is more than the {human_duration(seconds)} of now"
    return False, f"a gain of {gain:.1%} is not above the {wanted:.1%} that a switch must bring"


def compose(profile: Profile, wish: Wish | None = None) -> Proposal:
    """The proposal for a job. The same profile and wish give the same proposal.

    Raises AutoError for a wish that cannot be met, ProfileError for a profile that cannot be used.
    """
    wish = wish or Wish()
    _check(wish)
    compute, profile = profile.compute, informed(profile, wish)
    live = Live(profile, portions(profile, wish.buckets, wish.groups))
    plans, unknown = _tried(live, wish)
    plans = [dataclasses.replace(p, seconds=wish.took.get(p.spec.text, p.seconds)) for p in plans]
    noise = uncertainty(profile.steps[-1]) if profile.steps else 0.0
    winner, losers, reason = _winner(plans, noise)
    if wish.family:
        winner, reason = plans[-1], f"{wish.family} was asked for"
        losers = {DENSE: reason}
    elif idle := _idle(profile, plans):
        reason = idle
    elif not profile.link.samples:
        reason += f"; the link was not measured, {say_rate(profile.link.bandwidth)} is a guess"
    now = live.brought
    groups = Groups(now, (), winner.seconds, False, "")
    if "mergecomp" in wish.parts:
        groups = regroup(live, winner.spec.text, winner.chosen)
        if groups.changed:
            reason += f"; {groups.reason}"
        if groups.changed and wish.regroup:
            live = Live(profile, groups.portions)
            winner = _planned(live, wish, winner.spec)
    if winner.levels.alphas:
        reason += f"; {winner.levels.reason}"
    found = planned_rules(live, winner)
    options = applied(live, found)
    expected = wish.took.get(winner.spec.text, live.seconds(options))
    considered = [
        Considered(p.spec.text, expected, "")
        if p.spec == winner.spec
        else Considered(p.spec.text, p.seconds, losers[p.spec.text])
        for p in plans
    ]
    names = tuple(t.name for t in profile.tensors)
    in_force = levels_in_force(names, wish.rules, winner.spec.text)
    return Proposal(
        winner.spec.text,
        found,
        winner.levels.alphas,
        tuple(tuple(names[t] for t in group) for group in groups.portions) if "mergecomp" in wish.parts else (),
        groups.caps,
        expected,
        expected if winner.spec.name == DENSE else plans[0].seconds,
        compute,
        sum(live.sent(b, option) for b, option in enumerate(options)),
        explain(live, winner.table, winner.columns, winner.options, groups.portions, winner.notes),
        (*considered, *unknown),
        reason,
        overspent(profile, winner.spec, in_force) if in_force else 0.0,
    )


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
    return family_plan(live, spec, espresso="espresso" in wish.parts, alphas=alphas, exclude=wish.exclude)


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
        else:
            plans.append(_planned(live, wish, spec))
    return plans, unknown


_WHOLE: Final = "blocks may cut matrices; make the state with whole=True for codecs of matrices"


def _winner(plans: Sequence[FamilyPlan], noise: float) -> tuple[FamilyPlan, dict[str, str], str]:
    """(the plan that wins, why each other does not, the sentence of the proposal); plans: the least lossy first."""
    wanted = margin(noise)
    none = plans[0]
    in_question = [none]
    for kind in KINDS:
        before = _fastest(in_question)
        in_question += [p for p in plans[1:] if p.spec.name in kind and _pays(p, before, wanted)]
    winner = _fastest(in_question)
    if winner is none:
        gain = 1 - min(p.seconds for p in plans) / none.seconds if none.seconds else 0.0
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
