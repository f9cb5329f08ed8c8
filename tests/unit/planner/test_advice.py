"""Advice: a verdict for each link, the bandwidth above which compression stops paying, profiles made from shapes."""

from __future__ import annotations

import msgspec
import pytest

from gcproto.rates import say_rate
from gcserver.planner import advice
from gcserver.planner.advice import MOST, Advice, advise, profile_of
from gcserver.planner.auto import AutoError, Wish, compose
from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.live import Live
from gcserver.planner.live_layout import lay_out
from gcserver.planner.profile import CodecCost, Curve, LinkCost, ProfileError
from gcserver.planner.worth import worth
from tests.unit.planner.live_profiles import GBIT1, GBIT10, MBIT100, costs, gpt, gpt_shapes


def test_plans_over_links() -> None:
    found = advise(gpt(2, MBIT100), (GBIT1, GBIT10, 1e11))
    assert [row.bandwidth for row in found.rows] == [MBIT100, GBIT1, GBIT10, 1e11]
    for row in found.rows:
        seconds = {plan.name: plan.seconds for plan in row.plans}
        assert set(seconds) == {"none", "fp16", "safe", "balanced", "fast"}
        assert seconds["fast"] <= seconds["balanced"] * 1.02 and seconds["balanced"] <= seconds["safe"] * 1.02
        assert all(s >= found.compute for s in seconds.values())
    assert [row.pays for row in found.rows][::3] == [True, False]
    assert found.rows[0].verdict.startswith("at 96 Mbit/s use sidco-e(ratio=0.01,packed=1,values=16)")
    assert found.rows[-1].verdict.startswith("at 800 Gbit/s don't: a gain of")
    assert found.verdict.startswith(found.rows[0].verdict) and "stops paying above about" in found.verdict
    assert msgspec.json.decode(msgspec.json.encode(found), type=Advice) == found


def test_where_it_stops_paying() -> None:
    profile = gpt(2, GBIT1, layers=3)
    stops = advise(profile).stops_paying
    assert GBIT1 < stops < 1e11

    def pays(bandwidth: float) -> bool:
        link = msgspec.structs.replace(profile.link, bandwidth=bandwidth)
        found = compose(msgspec.structs.replace(profile, link=link), Wish(parts=frozenset({"espresso"})))
        return worth(found.dense, found)[0]

    assert pays(stops * 0.97)
    assert not pays(stops * 1.03)


@pytest.mark.parametrize(("factor", "bandwidth"), [(0.5, MBIT100), (2.0, MBIT100), (0.5, 1e11), (2.0, 1e11)])
def test_where_it_stops_paying_does_not_gainsay_the_row(
    monkeypatch: pytest.MonkeyPatch, factor: float, bandwidth: float
) -> None:
    """It is looked for without levels, which rows have."""
    monkeypatch.setattr(advice, "_stops_paying", lambda *_: factor * bandwidth)
    found = advise(gpt(2, bandwidth, layers=3))
    assert found.stops_paying == (max if found.rows[0].pays else min)(factor, 1.0) * bandwidth


def test_a_job_that_computes_for_long_need_not_compress_anywhere() -> None:
    found = advise(gpt(2, GBIT1, compute=10_000.0, layers=3))
    assert found.stops_paying == 0
    assert "don't" in found.verdict and "would not pay on any link" in found.verdict


def test_a_job_whose_cores_are_the_bottleneck_may_always_gain() -> None:
    """Dense costs cores as well; where it costs more than compressing, no link helps."""
    profile = gpt(4, GBIT1, compute=0.01, layers=3)
    cost = profile.codecs["none"]
    slow = [Curve(tuple((n, 40 * s) for n, s in c.points)) for c in (cost.encode, cost.decode, cost.decode_add)]
    worse = msgspec.structs.replace(profile, codecs={**profile.codecs, "none": CodecCost(*slow, ratio=1.0)})
    assert advise(worse).stops_paying == MOST


def test_a_profile_from_shapes() -> None:
    profile = profile_of(gpt_shapes(), 0.3, LinkCost(1e-4, GBIT1), 4, costs())
    assert profile.compute == pytest.approx(0.3)
    assert profile.tensors[0].name == "h.7.down.bias" and profile.tensors[0].ready == 0.0
    assert profile.tensors[-1].name == "wte.weight"
    assert 0.1 < profile.backward <= 0.2
    ready = [t.ready for t in profile.tensors]
    assert ready == sorted(ready)
    assert sum(n for _, n, _, _ in profile.blocks) == profile.elements
    assert not lay_out(profile).whole
    assert lay_out(profile_of(gpt_shapes(), 0.3, LinkCost(1e-4, GBIT1), 4, costs(), whole=True)).whole


def test_advice_is_for_the_jobs_own_buckets_and_excluded_tensors() -> None:
    """What is expected of a quality is what a plan of that quality would come to."""
    profile = gpt(2, MBIT100, layers=3)
    wish = Wish(quality="fast", exclude=("h.1.*", "wte.*"), buckets=())
    rows = {plan.name: plan for plan in advise(profile, quality="balanced", now=wish).rows[0].plans}
    for quality in ("balanced", "fast"):
        alone = compose(
            profile, msgspec.structs.replace(wish, quality=quality, parts=frozenset({"lgreco", "espresso"}))
        )
        assert (rows[quality].spec, rows[quality].seconds) == (alone.family, alone.expected)
    plain = {plan.name: plan for plan in advise(profile, quality="balanced").rows[0].plans}
    assert rows["balanced"].seconds > plain["balanced"].seconds


def test_what_cannot_be_advised_on() -> None:
    with pytest.raises(ProfileError, match="shapes"):
        profile_of({}, 0.3, LinkCost(1e-4, GBIT1), 4, costs())
    with pytest.raises(ProfileError, match="bandwidths: expected bytes a second from 1 to"):
        advise(gpt(), (0.0,))
    with pytest.raises(AutoError, match="quality"):
        advise(gpt(), quality="best")


def test_only_what_was_measured_is_advised() -> None:
    bare = msgspec.structs.replace(gpt(2, GBIT1), codecs={})
    assert {plan.name for plan in advise(bare).rows[0].plans} == {"none", "safe", "balanced", "fast"}


def test_what_lanes_take_from_the_workers_counts_on_every_link() -> None:
    """A step of 10 Gbit/s that takes much longer than it should: cores are shared, so what takes them is dearer."""
    profile = gpt(2, GBIT10)
    rules = (PlannedRule("*", "none"),)
    dense = Live(profile).seconds(applied(Live(profile), rules))
    plain = advise(profile, (GBIT1,))
    shared = advise(profile, (GBIT1,), now=Wish(rules=rules, step=dense + 0.03))
    assert shared.compute == plain.compute
    for before, after in zip(plain.rows, shared.rows, strict=True):
        seconds = {p.name: p.seconds for p in before.plans}
        assert all(p.seconds > seconds[p.name] for p in after.plans)
    # the family may take another scheme than the rules in force
    assert shared.rows[0].plans[0].seconds == pytest.approx(dense + 0.03, rel=0.01)
    assert advise(profile, (GBIT1,), now=Wish(rules=rules)) == plain, "no step is known"


def test_a_link_is_named_as_it_was_measured_however_slow_steps_are_over_it() -> None:
    profile = gpt(2, GBIT1)
    link = profile.link.bandwidth
    rules = (PlannedRule("*", "none"),)
    live = Live(profile)
    step = live.seconds(applied(live, rules)) + live.cpu(applied(live, rules)) + 0.1
    found = advise(profile, (10 * link, link), now=Wish(rules=rules, step=step))
    assert [row.bandwidth for row in found.rows] == [link, 10 * link], "one row a link"
    assert [measured for _, measured, *_ in found.steps(link)] == [True] * len(found.rows[0].plans) + [False] * len(
        found.rows[1].plans
    )
    assert found.rows[0].plans[0].seconds == pytest.approx(step, rel=0.03), "about what dense steps take now"
    assert f"at {say_rate(link)} " in found.verdict
    faster = advise(msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, bandwidth=10 * link)))
    assert found.rows[1].plans[0].seconds > faster.rows[0].plans[0].seconds, "slower than measured on every link"
