"""What a measured step says of machine and link: tests of `gcserver/planner/auto_informed.py`."""

from __future__ import annotations

import msgspec
import pytest

from gcserver.planner.auto import Wish, compose
from gcserver.planner.auto_informed import Terms, beyond, informed, interference, slowness, under, waiting
from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.live import Live
from tests.unit.planner.live_profiles import GBIT1, GBIT10, MBIT100, gpt


def test_what_a_step_takes_beyond_its_prediction_is_laid_at_the_cpu_that_lanes_take() -> None:
    profile = gpt(2, GBIT10)
    live = Live(profile)
    rules = (PlannedRule("*", "none"),)
    dense = live.seconds(applied(live, rules))
    cpu = live.cpu(applied(live, rules))
    assert interference(beyond(live, rules, dense)) == 0.0
    assert interference(beyond(live, rules, dense - 1)) == 0.0
    assert interference(beyond(live, rules, dense + cpu / 2)) == pytest.approx(0.5)
    assert interference(beyond(live, rules, dense + 5)) == 1.0
    # It is what makes compression pay where the link does not: it computes less than moving all of it does.
    plain, crowded = (compose(profile, Wish(rules=rules, step=s)) for s in (dense, dense + cpu))
    assert crowded.dense > plain.dense
    assert crowded.expected / crowded.dense < plain.expected / plain.dense


def test_what_became_slower_is_computing_under_every_plan_and_the_exchange_of_what_is_sent() -> None:
    profile = gpt(2, GBIT1)
    live = Live(profile)
    rules = (PlannedRule("*", "none"),)
    dense, cpu = live.seconds(applied(live, rules)), live.cpu(applied(live, rules))
    measured = dense + cpu + 0.1
    assert slowness(profile, beyond(live, rules, dense + cpu / 2)) == 0.0
    assert slowness(profile, beyond(live, rules, measured)) == pytest.approx(0.1)
    assert slowness(profile, beyond(live, rules, 1e3)) == profile.compute
    guessed = msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, samples=0))
    assert slowness(guessed, beyond(Live(guessed), rules, measured)) == 0.0, "the link may be what is slower"
    crowded, slower = (compose(profile, Wish(rules=rules, step=s)) for s in (dense + cpu, measured))
    assert slower.compute == crowded.compute == profile.compute
    assert slower.dense - crowded.dense == pytest.approx(0.1, rel=0.05)
    pairs = zip(slower.considered, crowded.considered, strict=True)
    more = {a.spec: a.expected - b.expected for a, b in pairs if b.expected}
    seconds = profile.elements * 4 / profile.link.bandwidth
    share = profile.compute / (profile.compute + seconds)
    assert all(0.1 * share * 0.98 < extra <= 0.1 for extra in more.values())
    assert more["none"] > more["fp16"] > more["qsgd(bits=8)"] > more["sidco-e(ratio=0.01)"] < 0.1 * share * 1.1


@pytest.mark.parametrize("busy", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("spec", ["none", "fp16", "qsgd(bits=4)"])
def test_kernels_that_wait_for_cores_make_workers_wait_for_them(busy: float, spec: str) -> None:
    profile = msgspec.structs.replace(gpt(2, GBIT10), busy=busy)
    rules = (PlannedRule("*", spec),)
    live = Live(profile)
    options = applied(live, rules)
    predicted, cpu = live.seconds(options), live.cpu(options)
    for measured in (predicted, predicted + cpu * waiting(busy) / 2, predicted - 0.1):
        found = informed(profile, Wish(rules=rules, step=measured))
        assert 1.0 <= found.busy < busy
        assert found.interference == pytest.approx(waiting(found.busy))
        again = Live(found, live.brought).seconds(options)
        assert again == pytest.approx(max(measured, predicted), rel=2e-3), "as long as it was without"
    # What is more than that is the interference's, with kernels as they were measured.
    crowded = informed(profile, Wish(rules=rules, step=predicted + cpu * (waiting(busy) + 1) / 2))
    assert (crowded.busy, crowded.interference) == (busy, pytest.approx((waiting(busy) + 1) / 2))
    slower = informed(profile, Wish(rules=rules, step=predicted + cpu + 0.1))
    assert (slower.busy, slower.interference) == (busy, 1.0)
    assert slower.forward > profile.forward


@pytest.mark.parametrize("busy", [2.5, 3.0])
@pytest.mark.parametrize("spec", ["qsgd(bits=4)", "sidco-e(ratio=0.05,packed=1)", "sidco-e(ratio=0.01,packed=1)"])
def test_cores_that_are_busy_are_no_reason_to_move_more(busy: float, spec: str) -> None:
    """A step that takes as long as it would if computing waited for no kernel."""
    profile = msgspec.structs.replace(gpt(2, GBIT10, whole=True), busy=busy)
    live = Live(profile)
    quantised, alone = (PlannedRule("*", "qsgd(bits=4)"),), applied(live, (PlannedRule("*", spec),))
    wish = Wish(rules=quantised, step=live.seconds(applied(live, quantised)), measure=spec)
    assert compose(profile, wish).bytes == pytest.approx(sum(live.sent(b, o) for b, o in enumerate(alone)), rel=0.02)


def test_rules_in_force_that_auto_has_no_cost_of_do_not_keep_it_from_planning() -> None:
    """A job that began with a codec that is on no ladder, such as state(compression="onebit")."""
    profile = gpt(2, MBIT100)
    rules = (PlannedRule("*", "none"), PlannedRule("*.weight", "onebit"))
    assert interference(beyond(Live(profile), rules, 5.0)) == 0.0
    assert compose(profile, Wish(rules=rules, step=5.0)) == compose(profile)


def test_a_proposal_says_by_what_it_was_priced() -> None:
    """Drawn over the profile as it was measured, a step would end before it is expected to."""
    profile = gpt(2, GBIT1)
    rules = (PlannedRule("*", "none"),)
    live = Live(profile)
    dense, cpu = live.seconds(applied(live, rules)), live.cpu(applied(live, rules))
    wish = Wish(rules=rules, step=dense + cpu + 0.1)
    found = compose(profile, wish)
    assert under(profile, found.terms) == informed(profile, wish) != profile
    drawn = Live(under(profile, found.terms))
    step = drawn.step(applied(drawn, found.rules))
    assert step.seconds == max(j.end for j in step.jobs) == pytest.approx(found.expected)
    waits = [j for j in step.jobs if j.what == "wait for cores"]
    assert [(j.resource, j.node) for j in waits] == [("worker", 0), ("worker", 1)]
    assert all(j.end - j.start == pytest.approx(drawn.cpu(applied(drawn, found.rules))) for j in waits)
    crowded = msgspec.structs.replace(profile, busy=2.0)
    assert under(crowded, compose(crowded, wish).terms) == informed(crowded, wish)
    assert under(crowded, Terms(0.1, 1e8, 0.2)).busy == 2.0, "terms of an older daemon"
    assert under(profile, None) == profile, "a proposal of one that had none"
