"""One family on a job: what is forced dense, columns by family, levels in prices, rules of what leads nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec
import pytest

from gcserver.planner.auto_family import FamilyPlan, family_plan, keeping, planned_rules
from gcserver.planner.auto_levels import budgets
from gcserver.planner.auto_rules import PlannedRule, applied, levels_of
from gcserver.planner.families import parse
from gcserver.planner.live import Live
from gcserver.planner.profile import CodecCost
from tests.unit.planner.live_profiles import GBIT1, MBIT100, gpt, line, with_errors


def planned(bandwidth: float = MBIT100, spec: str = "sidco-e(ratio=0.01)", **more: object) -> tuple[Live, FamilyPlan]:
    live = Live(with_errors(gpt(4, bandwidth), "topk", "qsgd"))
    return live, family_plan(live, parse(spec), **more)  # type: ignore[arg-type]


def test_columns_of_a_family() -> None:
    assert [c[0].scheme for c in planned(spec="none")[1].options] == ["owner", "all"]
    assert len(planned()[1].options) == 4
    live = Live(gpt(4, whole=True))
    plan = family_plan(live, parse("powersgd(rank=4)"))
    assert [c[0].spec for c in plan.options] == ["none", "none", "powersgd(rank=4)"]


def test_without_espresso_everything_is_compressed_over_owners() -> None:
    live, plan = planned(bandwidth=1e12, espresso=False)
    assert {(o.spec, o.scheme) for o in plan.chosen} == {("sidco-e(ratio=0.01)", "owner")}
    assert plan.seconds == live.seconds(plan.chosen)
    assert {o.spec for o in planned(spec="none", espresso=False)[1].chosen} == {"none"}


def test_levels_are_priced_at_the_full_budget() -> None:
    live, uniform = planned(espresso=False)
    _, plan = planned(espresso=False, alphas=budgets(0.6, 5))
    assert plan.levels.alphas[-1] == 1.0
    sent = [sum(live.sent(b, o) for b, o in enumerate(p.chosen)) for p in (plan, uniform)]
    assert sent[0] < sent[1]
    tight = planned(espresso=False, alphas=(0.6,))[1]
    assert sum(o.nbytes for o in tight.chosen) > sum(o.nbytes for o in plan.chosen)


def test_error_that_dense_blocks_do_not_use_is_not_spent_again() -> None:
    """DESIGN section 7, rule 3: levels are those of a plan that compresses everything, whatever goes dense."""
    spec, alphas = "sidco-e(ratio=0.01)", budgets(0.6, 3)
    slow = CodecCost(line(0.1), line(45.0), line(130.0), 0.02)
    profile = with_errors(gpt(4, bandwidth=1e8), "topk")
    live = Live(msgspec.structs.replace(profile, codecs=profile.codecs | {spec: slow}))
    mixed, whole = (family_plan(live, parse(spec), alphas=alphas, espresso=espresso) for espresso in (True, False))
    assert {o.spec for o in mixed.chosen} == {"none", spec} and {o.spec for o in whole.chosen} == {spec}
    assert mixed.levels.levels == whole.levels.levels and len(mixed.levels.levels) == len(live.profile.tensors)
    in_force = levels_of(planned_rules(live, mixed), [t.name for t in live.profile.tensors])
    used = zip(live.blocks, mixed.chosen, strict=True)
    inside = {tensor for block, option in used if option.spec == spec for tensor, _ in block.parts} & set(in_force)
    assert inside and all(in_force[tensor] == whole.levels.levels[tensor] for tensor in inside)


def test_excluded_leaders_force_all_their_blocks() -> None:
    live, plan = planned(exclude=("wte.weight",))
    wte = next(i for i, t in enumerate(live.profile.tensors) if t.name == "wte.weight")
    forced = [b for b, block in enumerate(live.blocks) if block.lead == wte]
    assert forced
    assert all(plan.notes[b] == "excluded" and plan.chosen[b].spec == "none" for b in forced)
    leads = {live.blocks[b].lead for b in range(len(live.blocks)) if plan.notes[b]}
    assert all(plan.notes[b] for b, block in enumerate(live.blocks) if block.lead in leads)


def test_only_exact_values_may_carry_what_is_excluded() -> None:
    """With rounded values a block that holds something excluded travels dense, as with any other family."""
    biases = ("*.bias",)
    _, exact = planned(spec="sidco-e(ratio=0.01,packed=1)", exclude=biases, espresso=False)
    live, rounded = planned(spec="sidco-e(ratio=0.01,packed=1,values=16)", exclude=biases, espresso=False)
    names = [t.name for t in live.profile.tensors]
    held = [b for b, block in enumerate(live.blocks) if any(names[t].endswith("bias") for t, _ in block.parts)]
    assert held and {exact.chosen[b].spec for b in held} == {"sidco-e(ratio=0.01,packed=1)"}
    assert {rounded.chosen[b].spec for b in held} == {"none"}
    assert all("which is excluded" in rounded.notes[b] or rounded.notes[b] == "excluded" for b in held)


def test_tensors_that_lead_nothing_take_the_scheme_of_most() -> None:
    live, plan = planned(bandwidth=GBIT1, alphas=budgets(0.6, 3))
    found = planned_rules(live, plan)
    led = {block.lead for block in live.blocks}
    for i, t in enumerate(live.profile.tensors):
        rule = next(r for r in reversed(found) if fnmatchcase(t.name, r.pattern))
        if i in led:
            assert {(o.spec, o.scheme) for b, o in zip(live.blocks, plan.chosen, strict=True) if b.lead == i} == {
                (rule.spec, rule.scheme)
            }
        elif rule.levels:
            assert rule.levels == plan.levels.levels[i]
    assert {r.scheme for r in found} == {o.scheme for o in plan.chosen}


def test_a_dense_tensor_that_reaches_into_a_compressed_block_is_priced_as_it_is_sent() -> None:
    live, plan = planned(espresso=False)
    reaching = next(
        (b, next(t for t, _ in block.parts if t != block.lead and t in {other.lead for other in live.blocks}))
        for b, block in enumerate(live.blocks)
        if any(t != block.lead and t in {other.lead for other in live.blocks} for t, _ in block.parts)
    )
    at, tensor = reaching
    rules = [
        *planned_rules(live, plan),
        PlannedRule(live.profile.tensors[tensor].name, "none"),
    ]
    n = dict(live.blocks[at].parts)[tensor]
    more = applied(live, rules)[at].nbytes - plan.chosen[at].nbytes
    assert more == 8 * (n - max(1, n // 100))


def test_what_is_chosen_is_what_the_rules_come_to() -> None:
    for bandwidth in (MBIT100, GBIT1, 1.2e9):
        for spec in ("sidco-e(ratio=0.05)", "qsgd(bits=4)", "fp16"):
            live, plan = planned(bandwidth=bandwidth, spec=spec, alphas=budgets(0.6, 3))
            options = [live.settled(b, o) for b, o in enumerate(applied(live, planned_rules(live, plan)))]
            assert options == [live.settled(b, o) for b, o in enumerate(plan.chosen)]


def test_ranks_above_the_families_own_are_given_room() -> None:
    live = Live(with_errors(gpt(2, MBIT100, whole=True), "powersgd"))
    plan = family_plan(live, parse("powersgd(rank=4)"), alphas=(0.6, 1.0))
    given = max(level for rule in planned_rules(live, plan) for level in rule.levels)
    assert given > 4
    assert {rule.spec for rule in planned_rules(live, plan)} <= {f"powersgd(rank={given})", "none"}
    # Priced as the nearest that was measured; what is sent follows the levels.
    assert live.seconds(applied(live, planned_rules(live, plan))) == pytest.approx(plan.seconds, rel=0.05)


QSGD = "qsgd(bits=4)"
EVERYWHERE = (PlannedRule("*", QSGD),)
DENSE_WTE = (*EVERYWHERE, PlannedRule("wte.weight", "none"))


@pytest.mark.parametrize("rules", [EVERYWHERE, DENSE_WTE, (PlannedRule("*", QSGD, "all"),)])
def test_rules_stay(rules: tuple[PlannedRule, ...]) -> None:
    live, plan = planned(spec=QSGD)
    found = keeping(live, plan, rules)
    assert (found.kept, found.seconds) == (rules, live.seconds(applied(live, rules)))
    assert planned_rules(live, found) == rules and found.chosen == applied(live, rules)
    assert [found.options[k][b] for b, k in enumerate(found.columns)] == list(found.chosen)
    assert live.run(found.table, found.columns)[0] == pytest.approx(found.seconds)


def test_rules_with_levels_stay_with_these() -> None:
    live, plan = planned(spec=QSGD, alphas=budgets(0.6, 3))
    rules, notches = planned_rules(live, plan), len(plan.levels.alphas)
    assert notches == 2 and max(len(rule.levels) for rule in rules) == notches
    given = {t: plan.levels.last(t) for t in plan.levels.levels}
    for alphas in (budgets(0.8, 3), (1.0,)):
        _, now = planned(spec=QSGD, alphas=alphas)
        found = keeping(live, now, rules)
        assert planned_rules(live, found) == rules and found.chosen == plan.chosen
        assert {t: found.levels.last(t) for t in given} == given
        assert found.levels.alphas == (now.levels.alphas if len(now.levels.alphas) == notches else ())


def test_rules_do_not_stay_that_lose_more_than_they_may_or_compress_what_is_excluded() -> None:
    live, plan = planned(spec=QSGD, alphas=(1.0,))
    low = (PlannedRule("*", QSGD, levels=(2,)),)
    assert not keeping(live, plan, low).kept
    sparse = "sidco-e(ratio=0.01,packed=1)"
    for spec, glob in ((QSGD, "wte.weight"), (QSGD, "*.bias"), (sparse, "wte.weight"), (sparse, "*.bias")):
        live, plan = planned(spec=spec, exclude=(glob,))
        found = keeping(live, plan, (PlannedRule("*", spec),), exclude=(glob,))
        assert not found.kept
        assert keeping(live, plan, planned_rules(live, plan), exclude=(glob,)).kept


def test_rules_whose_cost_is_not_known_do_not_stay() -> None:
    live, plan = planned(spec=QSGD)
    assert keeping(live, plan, (PlannedRule("*", "signsgd"),)) is plan
