"""What a measured step says of machine and link: tests of `gcserver/planner/auto_informed.py`."""

from __future__ import annotations

import msgspec
import pytest

from gcserver.planner.auto import Wish, compose
from gcserver.planner.auto_informed import Terms, beyond, informed, interference, least_interference, slowness, under
from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.live import Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import CodecCost, Curve
from tests.unit.planner.live_profiles import GBIT1, GBIT10, MBIT100, gpt, plain


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


# A block is ready ten seconds before the last gradient; encoding it takes 1 s alone, no step waits for that. Rounds,
# bytes and decoding cost nothing: the mean node computes for 1.5 s, as one of the two, the owner, encodes twice.
@pytest.mark.parametrize(("busy", "more", "found", "share"), [
    (1.0, 0.3, 1.0, 0.2),         # alone on their cores: 0.3 of 1.5 s
    (2.0, 0.0, 1.0, 0.0),         # no room for kernels that workers wait for: these took no longer than alone
    (2.0, 0.75, 1.5, 1 / 3),      # kernels took 2.25 s and waited for 0.75 of them, and so did the workers
    (2.0, 1.5, 2.0, 0.5),         # as long as kernels had a core
    (2.0, 2.4, 2.0, 0.8),         # more than they had one, of 3 s
    (4.0, 0.75, 1.5, 1 / 3),
    (4.0, 1.2, 1.8, 0.8 / 1.8),
    (4.0, 1.8, 4.0, 0.3),         # kernels that waited for neighbours have no core for longer than that: 1.8 of 6 s
    (4.0, -3.0, 1.0, 0.0),        # the link may be what was faster
])  # fmt: skip
def test_kernels_that_wait_for_cores_make_workers_wait_for_them(
    busy: float, more: float, found: float, share: float
) -> None:
    free, second = Curve(((0, 0.0),)), Curve(((0, 0.0), (1_000_000, 1.0)))
    codecs = {"qsgd(bits=4)": CodecCost(second, free, free, 0.125)}
    profile = plain([1_000_000, 10], [0.0, 10.0], owners=[0, 1], bandwidth=1e15, codecs=codecs, busy=busy)
    rules = (PlannedRule("*", "qsgd(bits=4)"),)
    known = informed(profile, Wish(rules=rules, step=10.0 + more, buckets=()))
    assert (known.busy, known.interference) == (pytest.approx(found, abs=5e-3), pytest.approx(share, abs=5e-3))
    live = Live(known, portions(known, ()))
    assert live.seconds(applied(live, rules)) == pytest.approx(10.0 + max(more, 0.0), abs=0.01)


def test_what_kernels_make_workers_wait_is_no_longer_than_they_have_cores() -> None:
    found = [least_interference(busy) for busy in (1.0, 1.5, 2.0, 4.0)]
    assert found == pytest.approx([0.0, 1 / 3, 1 / 2, 1 / 4])


@pytest.mark.parametrize(("busy", "spec"), [
    (2.5, "sidco-e(ratio=0.05,packed=1)"), (3.0, "sidco-e(ratio=0.05,packed=1)"), (3.0, "sidco-e(ratio=0.01,packed=1)")
])  # fmt: skip
def test_cores_that_are_busy_are_no_reason_to_move_more(busy: float, spec: str) -> None:
    """A step that takes as long as it would if computing waited for no kernel."""
    profile = msgspec.structs.replace(gpt(2, GBIT10, whole=True), busy=busy)
    live = Live(profile)
    quantised, alone = (PlannedRule("*", "qsgd(bits=4)"),), applied(live, (PlannedRule("*", spec),))
    wish = Wish(rules=quantised, step=live.seconds(applied(live, quantised)), measure=spec)
    found, stretched = compose(profile, wish), compose(profile, Wish(measure=spec))
    assert found.bytes == pytest.approx(sum(live.sent(b, o) for b, o in enumerate(alone)), rel=0.02)
    assert stretched.bytes > 10 * found.bytes, "what kernels alone that are stretched would have moved"


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
    live = Live(crowded)
    wish = Wish(rules=rules, step=live.seconds(applied(live, rules)))
    known = informed(crowded, wish)
    assert under(crowded, compose(crowded, wish).terms) == known
    assert 1.0 <= known.busy < 2.0
    assert under(crowded, Terms(0.1, 1e8, 0.2)).busy == 2.0, "terms of an older daemon"
    assert under(profile, None) == profile, "a proposal of one that had none"
