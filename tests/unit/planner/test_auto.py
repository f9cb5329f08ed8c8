"""plan = "auto": families by quality, dense as an answer, levels, groups, exclusions, reasons, and when to switch."""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from gcserver.planner.auto import AutoError, Proposal, Wish, compose
from gcserver.planner.auto_family import SURE
from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.families import ladder, parse, refused
from gcserver.planner.live import Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.worth import margin, worth
from tests.unit.planner.live_profiles import GBIT1, GBIT10, MBIT100, gpt, plain, with_errors

CLUSTERS = [(2, MBIT100), (2, GBIT10), (4, MBIT100), (4, GBIT1)]


def names(profile: Profile) -> list[str]:
    return [t.name for t in profile.tensors]


@pytest.mark.parametrize(("nodes", "bandwidth"), CLUSTERS)
@pytest.mark.parametrize("quality", ["safe", "balanced", "fast"])
def test_a_proposal_is_what_its_rules_come_to(nodes: int, bandwidth: float, quality: str) -> None:
    profile = with_errors(gpt(nodes, bandwidth, layers=3), "topk", "qsgd")
    found = compose(profile, Wish(quality=quality))
    live = Live(profile)
    options = applied(live, found.rules)
    assert live.seconds(options) == found.expected
    assert sum(live.sent(b, o) for b, o in enumerate(options)) == pytest.approx(found.bytes)
    assert found.expected <= found.dense
    assert found.compute == profile.compute <= found.expected
    assert sorted(t for row in found.why for t in row.tensors) == sorted(names(profile))
    assert [t for group in found.groups for t in group] == names(profile)
    assert all(row.why and row.seconds > 0 and row.bytes > 0 for row in found.why)
    assert all(len(rule.levels) in (0, len(found.alphas)) for rule in found.rules)
    assert compose(profile, Wish(quality=quality)) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Proposal) == found
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Proposal) == found


def test_a_quality_bounds_the_family_and_a_lower_one_is_no_faster() -> None:
    profile = gpt(4, MBIT100)
    found = {q: compose(profile, Wish(quality=q)) for q in ("safe", "balanced", "fast")}
    assert found["safe"].family == "qsgd(bits=8)"
    assert found["balanced"].family.startswith("sidco-e(ratio=0.01")
    assert found["fast"].family == "sidco-e(ratio=0.001)"
    assert found["safe"].expected > found["balanced"].expected > found["fast"].expected
    assert all("sign" not in c.spec and "onebit" not in c.spec for f in found.values() for c in f.considered)


def test_every_family_is_listed_with_why_it_lost() -> None:
    found = compose(gpt(2, GBIT1), Wish(quality="safe"))
    listed = {c.spec: c for c in found.considered}
    assert [c.spec for c in found.considered if not c.why_not] == [found.family]
    assert listed["none"].expected == found.dense
    assert listed[found.family].expected == found.expected
    assert "slower" in listed["fp16"].why_not
    assert "too lossy for quality safe" in listed["topk(ratio=0.01)"].why_not
    assert len(listed) == len(found.considered)
    few = msgspec.structs.replace(gpt(2, GBIT1), codecs={})
    found = compose(few)
    assert found.family == "none"
    assert {c.why_not for c in found.considered if c.spec != "none"} == {"its cost was not measured"}


def test_errors_of_two_families_are_never_compared() -> None:
    """What a family's errors come to beside another's changes nothing, only what they are among themselves."""
    profile = with_errors(gpt(2, GBIT1, layers=3), "topk", "qsgd", "powersgd")
    found = compose(profile)
    for family, rows in profile.errors.items():
        for factor in (2.0**-20, 2.0**20):
            other = tuple(replace(row, errors=tuple(factor * e for e in row.errors)) for row in rows)
            assert compose(replace(profile, errors={**profile.errors, family: other})) == found, (family, factor)


def test_of_two_as_fast_the_less_lossy_wins() -> None:
    """On this link 5 and 1 % hide alike: they are within a tie, and more is sent."""
    found = compose(gpt(2, 0.7 * GBIT1), Wish(quality="fast"))
    fastest = min(c.expected for c in found.considered if c.expected)
    assert found.expected <= fastest * 1.02
    lossier = [c for c in found.considered if "lossier than" in c.why_not]
    assert lossier
    assert all(c.expected >= found.expected / 1.02 for c in lossier)


@pytest.mark.parametrize(("gain", "kind"), [(0.01, "qsgd"), (0.025, "qsgd"), (0.04, "sidco-e")])
def test_a_lossier_kind_has_to_be_worth_it(gain: float, kind: str) -> None:
    """A sparsifier that is hardly faster than a quantiser is not taken, however much both gain over dense."""
    _check_lossier(gpt(2, MBIT100), "balanced", gain, kind)


@pytest.mark.parametrize(("gain", "kind"), [(0.05, "qsgd"), (0.07, "sidco-e")])
def test_a_lossier_kind_has_to_be_worth_more_where_training_may_suffer(gain: float, kind: str) -> None:
    profile = msgspec.structs.replace(gpt(2, MBIT100), tolerant=False)
    _check_lossier(profile, "fast", gain, kind)


def test_what_was_measured_often_needs_to_gain_less_where_steps_vary() -> None:
    """Of eight steps that vary by an eighth, which may be off by 11 %: a sparsifier gains 9."""
    profile = msgspec.structs.replace(gpt(2, MBIT100), steps=(StepTime(1, 0.2, 0.125, 8),))
    took = dict.fromkeys((*ladder("balanced"), *profile.codecs), 1.0) | {"qsgd(bits=4)": 0.2}
    took |= {spec: 0.182 for spec in took if spec.startswith("sidco-e")}
    assert compose(profile, Wish(took=took)).family == "qsgd(bits=4)"
    assert compose(profile, Wish(took=took, agreeing=dict.fromkeys(took, 2))).family.startswith("sidco-e")


def _check_lossier(profile: Profile, quality: str, gain: float, kind: str) -> None:
    took = dict.fromkeys((*ladder(quality), *profile.codecs), 1.0) | {"qsgd(bits=4)": 0.2}
    took |= {spec: 0.2 * (1 - gain) for spec in took if spec.startswith("sidco-e")}
    found = compose(profile, Wish(quality=quality, took=took))
    assert found.family.startswith(kind)


@pytest.mark.parametrize("quality", ["balanced", "fast"])
@pytest.mark.parametrize(
    ("made", "family", "waits"),
    [(99, "qsgd", {"powersgd": 100, "sidco-e": 1000}), (100, "powersgd", {"sidco-e": 1000}), (1000, "sidco-e", {})],
)
def test_late_codecs_are_not_in_question_in_first_steps(
    quality: str, made: int, family: str, waits: dict[str, int]
) -> None:
    """Low rank and then sparsifiers are listed, with the step from which they are; the rest competes as ever."""
    profile = gpt(2, MBIT100, whole=True)
    found = compose(profile, Wish(quality=quality, made=made, late_after=100))
    assert found.family.startswith(family)
    for name in ("powersgd", "sidco-e"):
        listed = [c for c in found.considered if parse(c.spec).name == name and not refused(parse(c.spec), quality)]
        listed = [c for c in listed if c.why_not != "its cost was not measured"]
        waiting = f"in question from step {waits[name]} on" if name in waits else ""
        assert listed and all((c.why_not == waiting and not c.expected) is bool(waiting) for c in listed)
    asked = compose(profile, Wish(quality=quality, late_after=100, family="topk(ratio=0.01)"))
    assert asked.family == "topk(ratio=0.01)"


@pytest.mark.parametrize(("made", "rank"), [(0, 16), (999, 16), (1000, 4)])
def test_an_optimizer_that_may_not_stand_late_gradients_has_the_higher_rank_first(made: int, rank: int) -> None:
    profile = replace(gpt(2, MBIT100, whole=True), tolerant=False)
    rank4 = profile.codecs["powersgd(rank=4)"]
    wide = {"powersgd(rank=16,values=16)": replace(rank4, ratio=2 * rank4.ratio)}
    found = compose(replace(profile, codecs=profile.codecs | wide), Wish(made=made, late_after=100))
    assert parse(found.family).name == "powersgd" and parse(found.family).level == rank
    why = {c.spec: c.why_not for c in found.considered}
    assert (why.get("powersgd(rank=4)") == "in question from step 1000 on") is (made < 1000)


def test_what_was_refused_is_listed_with_the_reason_and_not_proposed() -> None:
    refused = {"qsgd(bits=4)": "b: no such codec", "none": "cannot be refused"}
    found = compose(gpt(2, MBIT100), Wish(quality="balanced", late_after=100, refused=refused))
    assert found.family not in refused
    why = {c.spec: c.why_not for c in found.considered}
    assert why["qsgd(bits=4)"] == "b: no such codec" and "refused" not in why["none"]


def test_what_may_be_shorter_than_predicted_is_tried_until_one_of_its_kind_was_measured() -> None:
    profile = gpt(2, MBIT100)
    known = compose(profile)
    spec = known.family
    assert spec.startswith("sidco-e")
    rivals = {
        c.spec: c.expected for c in known.considered if c.spec in ("fp16", "bf16", "qsgd(bits=8)", "qsgd(bits=4)")
    }
    # what is in force turned out as slow as the quantisers may be fast
    wish = Wish(took={spec: rivals["qsgd(bits=4)"] * 0.98}, rules=known.rules, hope=0.15)
    found = compose(profile, wish)
    assert (found.family, found.hope) == ("qsgd(bits=4)", pytest.approx(0.15))
    assert "up to 15% shorter than predicted" in found.reason
    assert found.expected == pytest.approx(rivals["qsgd(bits=4)"])
    assert found.hoped == pytest.approx(found.expected * 0.85)
    assert {c.spec: c.expected for c in found.considered if c.spec in rivals} == pytest.approx(rivals)
    assert worth(wish.took[spec], found, before=4)[0] and not worth(found.hoped, found)[0]
    # as long as predicted: then what is faster by its margin is what counts, and nothing else comes close
    took = {**wish.took, "qsgd(bits=4)": found.expected}
    last = compose(profile, msgspec.structs.replace(wish, took=took))
    assert (last.family, last.hope, last.expected) == ("qsgd(bits=4)", 0.0, found.expected)
    assert compose(profile, msgspec.structs.replace(wish, family="fp16")).hope == 0.0


def test_no_step_is_hoped_to_be_shorter_than_computing() -> None:
    profile = gpt(2, 100 * GBIT10)
    dense = compose(profile)
    assert dense.family == "none" and dense.expected < 1.1 * dense.compute
    tried = compose(profile, Wish(took={"none": 1.04 * dense.compute}, hope=0.15))
    assert (tried.family, tried.hope) == ("none", 0.0), "nothing is left to be gained"
    slow = compose(gpt(2, GBIT10), Wish(took={"none": 1.2 * dense.compute}, hope=0.15))
    assert slow.family == "fp16" and slow.hoped == pytest.approx(dense.compute)
    alone = compose(gpt(1, MBIT100), Wish(took={"none": 2 * dense.compute}, hope=0.15))
    assert (alone.family, alone.hope) == ("none", 0.0), "one node exchanges nothing"


def test_a_family_that_would_compress_no_block_is_dense() -> None:
    """Dense steps that turned out long say nothing for what would be the same steps under another name."""
    profile, wish = gpt(2, GBIT1), Wish(exclude=("h.*", "w?e.weight"))
    plain = compose(profile, wish)
    same = {c.spec for c in plain.considered if c.why_not == "no block would be compressed"}
    assert same > {"fp16", "qsgd(bits=4)"}
    found = compose(profile, replace(wish, took={"none": 1.5 * plain.expected}, hope=0.15))
    assert found.family not in same
    assert {c.expected for c in found.considered if c.spec in same} == {1.5 * plain.expected}


def test_families_of_one_kind_are_as_far_off_as_those_that_were_measured() -> None:
    profile = gpt(2, MBIT100)
    plain = {c.spec: c.expected for c in compose(profile).considered}
    took = {
        "sidco-e(ratio=0.01)": plain["sidco-e(ratio=0.01)"] * 1.2,
        "topk(ratio=0.01)": plain["topk(ratio=0.01)"] * 1.4,
    }
    found = {c.spec: c.expected for c in compose(profile, Wish(took=took)).considered}
    sparse = "sidco-e(ratio=0.05,packed=1,values=16)"
    assert found[sparse] == pytest.approx(plain[sparse] * 1.3)
    assert {s: found[s] for s in took} == took and found["qsgd(bits=4)"] == plain["qsgd(bits=4)"]


def test_dense_is_an_answer() -> None:
    found = compose(gpt(2, 1e11), Wish(quality="fast"))
    assert found.family == "none"
    assert {rule.spec for rule in found.rules} == {"none"}
    assert "dense" in found.reason and "5.0%" in found.reason
    assert found.expected == found.dense
    assert not worth(found.dense, found)[0]


def test_where_nothing_was_compared_the_reason_says_why() -> None:
    """No gain of so many per cent: there was nothing to gain, or nothing to choose from."""
    assert compose(gpt(1)).reason == "dense: with one node there is nobody to exchange with"
    assert compose(plain([0, 0], [0.0, 0.1])).reason == "dense: no tensor has an element"
    few = msgspec.structs.replace(gpt(2, GBIT1), codecs={})
    assert compose(few).reason.startswith("dense: of no other codec in question the cost was measured")
    assert all(row.why.startswith("dense, as the whole plan is") for row in compose(few).why)


def test_a_link_that_is_a_guess_is_said_to_be_one() -> None:
    profile = gpt(2, 125e6)
    guessed = msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, samples=0))
    found, told = compose(guessed, Wish(parts=frozenset())), compose(profile, Wish(parts=frozenset()))
    assert found.reason == f"{told.reason}; the link was not measured, 1 Gbit/s is a guess"
    asked = compose(guessed, Wish(parts=frozenset(), family="fp16"))
    assert asked.reason == "fp16 was asked for"


def test_noise_asks_for_more() -> None:
    profile = gpt(4, GBIT10)
    found = compose(profile)
    gain = 1 - min(c.expected for c in found.considered if c.expected) / found.dense
    assert 0.05 < gain < 0.5
    noisy = msgspec.structs.replace(profile, steps=(StepTime(1, 0.3, gain, 5),))
    assert found.family != "none"
    assert compose(noisy).family == "none"


def test_a_switch_has_to_be_worth_it() -> None:
    found = compose(gpt(2, GBIT1), Wish(family="qsgd(bits=4)"))
    assert (margin(0.0), margin(0.02), margin(0.1)) == (0.05, 0.05, 0.2)
    assert [margin(0.0, before=2, then=then) for then in (3, 4)] == [0.06, 0.06] and margin(0.1, 2, 4) == 0.2
    assert [margin(0.0, 2, then, tolerant=True) for then in (0, 1, 2, 3, 4)] == [0.05, 0.05, 0.05, 0.03, 0.03]
    assert [margin(0.0, 1, then, tolerant=True) for then in (0, 1, 2, 3, 4)] == [0.05, 0.05, 0.03, 0.03, 0.03]
    assert [margin(0.0, 0, then, tolerant=True) for then in (0, 1, 2, 3, 4)] == [0.05, 0.05, 0.05, 0.06, 0.06]
    assert [margin(0.0, 4, then, tolerant=True) for then in (0, 1, 2, 3, 4)] == [-0.06, -0.03, -0.03, -0.03, 0.05]
    assert margin(0.1, 2, 4, tolerant=True) == 0.2
    assert [margin(0.0, before, then) for before, then in ((4, 2), (3, 0), (4, 3))] == [-0.06] * 3
    assert [margin(0.0, before, then) for before, then in ((4, 4), (2, 1), (1, 0))] == [0.05] * 3
    assert worth(found.expected / 0.94, found)[0]
    assert not worth(found.expected / 0.96, found)[0]
    assert not worth(found.expected / 0.94, found, noise=0.05)[0]
    assert not worth(StepTime(1, found.expected / 0.94, 0.05, 3), found)[0]
    assert worth(StepTime(1, found.expected / 0.94, 0.05, 50), found)[0], "the median of many steps is known well"
    yes, why = worth(StepTime(1, found.expected / 0.5, 0.05, 20), found)
    assert yes and "50.0% less" in why
    no, why = worth(found.expected / 4, found)
    assert not no and "is more than the" in why and "%" not in why
    assert worth(0.0, found) == (False, "no step was measured yet")


def test_levels_come_from_errors() -> None:
    known = compose(with_errors(gpt(4, MBIT100), "topk"))
    assert known.alphas[-1] == 1.0 and len(known.alphas) > 1
    assert len({r.levels for r in known.rules}) > 2
    blind = compose(gpt(4, MBIT100))
    assert blind.alphas == ()
    assert known.bytes < blind.bytes


def test_one_option_for_everything_is_one_rule() -> None:
    found = compose(gpt(2, MBIT100), Wish(quality="safe"))
    assert found.rules == (PlannedRule("*", "qsgd(bits=8)", found.rules[0].scheme),)


def test_parts_alone() -> None:
    profile = with_errors(gpt(4, GBIT1), "topk")
    only = {p: compose(profile, Wish(parts=frozenset({p}))) for p in ("lgreco", "mergecomp", "espresso")}
    assert only["lgreco"].alphas and not only["lgreco"].groups
    assert {r.scheme for r in only["lgreco"].rules} == {"owner"}
    assert not only["mergecomp"].alphas and only["mergecomp"].groups
    assert len(only["mergecomp"].rules) == 1
    assert not only["espresso"].alphas and not only["espresso"].groups
    static = compose(profile, Wish(parts=frozenset(), family="topk(ratio=0.01)"))
    assert static.rules == (PlannedRule("*", "topk(ratio=0.01)"),)
    assert only["espresso"].expected <= compose(profile, Wish(parts=frozenset())).expected * 1.0001


def test_a_family_that_was_asked_for_stays() -> None:
    found = compose(gpt(2, 1e11), Wish(family="topk(ratio=0.05)", parts=frozenset({"lgreco"})))
    assert found.family == "topk(ratio=0.05)" and found.rules[0].spec == "topk(ratio=0.05)"
    assert [(c.spec, c.why_not) for c in found.considered] == [
        ("none", "topk(ratio=0.05) was asked for"), ("topk(ratio=0.05)", ""),
    ]  # fmt: skip
    dense = compose(gpt(2, MBIT100), Wish(family="none"))
    assert {rule.spec for rule in dense.rules} == {"none"}
    assert dense.expected == dense.dense


def test_matrices_need_a_whole_domain() -> None:
    cut, whole = compose(gpt(4, MBIT100)), compose(gpt(4, MBIT100, whole=True))
    assert "whole=True" in next(c.why_not for c in cut.considered if c.spec == "powersgd(rank=4)")
    assert next(c.expected for c in whole.considered if c.spec == "powersgd(rank=4)") > 0
    kept = compose(gpt(4, MBIT100, whole=True), Wish(family="powersgd(rank=4)"))
    # blocks of biases alone travel as they are in any case
    assert kept.rules[0] == PlannedRule("*", "powersgd(rank=4)")
    assert {r.spec for r in kept.rules[1:]} <= {"none"}
    with pytest.raises(AutoError, match="whole=True"):
        compose(gpt(4, MBIT100), Wish(family="powersgd(rank=4)"))


def test_what_is_excluded_travels_exactly() -> None:
    """A tensor that leads blocks has them dense; the rest of a sparsifier's blocks sends all of its elements."""
    profile = with_errors(gpt(4, MBIT100), "topk")
    wish = Wish(exclude=("*.bias", "wte.*"))
    found = compose(profile, wish)
    live = Live(profile)
    options = applied(live, found.rules)
    by_name = {t.name: i for i, t in enumerate(profile.tensors)}
    for block, option in zip(live.blocks, options, strict=True):
        if by_name["wte.weight"] in {t for t, _ in block.parts}:
            assert option.spec == "none"
    biases = {t for b, o in zip(live.blocks, options, strict=True) if o.spec != "none" for t, _ in b.parts}
    biases = {t for t in biases if profile.tensors[t].name.endswith("bias")}
    assert biases
    for t in biases:
        rule = next(r for r in reversed(found.rules) if fnmatchcase(profile.tensors[t].name, r.pattern))
        assert (rule.spec, set(rule.levels)) == (found.family, {1_000_000})
    assert any("excluded" in row.why for row in found.why)


@pytest.mark.parametrize("family", ["", "qsgd(bits=4)", "none"])
def test_what_is_excluded_everywhere_has_rules_for_other_models_too(family: str) -> None:
    profile = with_errors(gpt(4, MBIT100), "topk")
    globs = ("head.*", "*.bias")
    plain = compose(profile, Wish(family=family, exclude=globs))
    found = compose(profile, Wish(family=family, exclude=globs, everywhere=globs))
    assert (found.family, found.expected, found.bytes) == (plain.family, plain.expected, plain.bytes)
    assert len(found.rules) <= len(plain.rules) + len(globs)
    for name in ("head.weight", "encoder.layers.3.bias"):  # of no tensor of this model
        last = next(rule for rule in reversed(found.rules) if fnmatchcase(name, rule.pattern))
        assert last.spec == "none"


def test_what_is_excluded_keeps_a_quantisers_whole_block_dense() -> None:
    found = compose(gpt(4, MBIT100), Wish(family="qsgd(bits=8)", exclude=("h.0.up.bias",)))
    live = Live(gpt(4, MBIT100))
    at = next(i for i, t in enumerate(live.profile.tensors) if t.name == "h.0.up.bias")
    for block, option in zip(live.blocks, applied(live, found.rules), strict=True):
        if at in {t for t, _ in block.parts}:
            assert option.spec == "none"
    assert any("h.0.up.bias, which is excluded" in row.why for row in found.why)
    everything = compose(gpt(4, MBIT100), Wish(exclude=("*",)))
    assert {rule.spec for rule in everything.rules} == {"none"}


def test_groups_that_are_declared_anew_are_planned_for() -> None:
    """A job that starts again with the buckets that a plan proposed."""
    profile = gpt(4, GBIT10)
    told = compose(profile, Wish(quality="safe", buckets=(1 << 40,)))
    assert len(told.groups) > 1 and told.caps != ()
    assert "declared anew" in told.reason
    buckets = tuple(round(c * (1 << 20)) for c in told.caps)
    brought = tuple(tuple(names(profile).index(t) for t in group) for group in told.groups)
    assert brought == portions(profile, buckets)
    done = compose(profile, Wish(quality="safe", buckets=buckets))
    assert done.expected < told.expected
    assert Live(profile, brought).seconds(applied(Live(profile, brought), done.rules)) == pytest.approx(done.expected)


def test_one_by_one_in_gradcomms_own_wrapper() -> None:
    found = compose(gpt(2, GBIT1), Wish(buckets=()))
    assert found.expected <= compose(gpt(2, GBIT1)).expected * 1.001


@pytest.mark.parametrize("wish", [
    Wish(quality="best"), Wish(parts=frozenset({"magic"})), Wish(alpha_lo=0.0), Wish(notches=0), Wish(buckets=(0,)),
    Wish(family="topk("), Wish(family="topk"), Wish(family="qsgd"),
])  # fmt: skip
def test_wishes_that_cannot_be_met(wish: Wish) -> None:
    with pytest.raises(AutoError, match="expected"):
        compose(gpt(), wish)


def test_one_node_has_nothing_to_exchange() -> None:
    found = compose(gpt(1, GBIT1))
    assert found.family == "none"
    assert found.bytes == 0


def test_reasons_say_what_another_option_would_change() -> None:
    found = compose(gpt(4, GBIT1))
    text = " ".join(row.why for row in found.why)
    assert "dense would make the step" in text
    assert np.isfinite([row.seconds for row in found.why]).all()


def test_what_a_family_took_counts_instead_of_its_prediction() -> None:
    profile = gpt(2, MBIT100)
    first = compose(profile)
    slow = {first.family: first.dense}
    second = compose(profile, Wish(took=slow))
    assert second.family != first.family and second.expected < first.dense
    assert next(c.expected for c in second.considered if c.spec == first.family) == first.dense
    quick = compose(profile, Wish(took={first.family: first.expected / 2}))
    assert (quick.family, quick.expected) == (first.family, first.expected / 2)


def test_a_family_in_force_again_has_the_rules_it_was_measured_with() -> None:
    profile, spec = gpt(4, GBIT1), "qsgd(bits=4)"
    live, first = Live(profile, portions(profile, Wish().buckets)), compose(profile, Wish(measure=spec))
    rules = (PlannedRule("*", spec), PlannedRule("wte.weight", "none"))
    assert first.family == spec and first.rules != rules
    assert live.seconds(applied(live, rules)) > live.seconds(applied(live, first.rules))
    again = compose(profile, Wish(measure=spec, took={spec: 0.3}, kept={spec: rules}))
    assert (again.rules, again.expected) == (rules, 0.3)
    assert {(row.codec.split("+")[0], row.scheme) for row in again.why} == {(spec, "owner"), ("none", "owner")}


def test_a_family_compresses_all_alike_unless_more_is_gained_than_prices_tell() -> None:
    """Also where dense is a little shorter, so that its steps, once measured, are those of the family."""
    mixed = 0
    for bandwidth in (MBIT100, GBIT1, GBIT10, 4 * GBIT10, 100 * GBIT10):
        profile = gpt(4, bandwidth)
        live = Live(profile, portions(profile, Wish().buckets))
        for spec in ("fp16", "qsgd(bits=4)", "sidco-e(ratio=0.01,packed=1)"):
            rules = compose(profile, Wish(measure=spec)).rules
            uniform = [(PlannedRule("*", text, scheme),) for text in ("none", spec) for scheme in ("owner", "all")]
            steps = [live.seconds(applied(live, plan)) for plan in uniform]
            if len(rules) > 1:
                mixed += 1
                assert live.seconds(applied(live, rules)) < min(steps) * (1 - SURE)
            else:
                assert rules[0].spec == spec
    assert 0 < mixed < 15


def test_levels_are_given_where_they_shorten_the_step() -> None:
    for bandwidth, given in ((MBIT100, True), (10 * GBIT10, False)):
        found = compose(with_errors(gpt(4, bandwidth, whole=True), "powersgd"), Wish(measure="powersgd(rank=4)"))
        assert (found.family, any(rule.levels for rule in found.rules)) == ("powersgd(rank=4)", given)
    fast = with_errors(gpt(4, 10 * GBIT10, whole=True), "powersgd")
    alone = compose(fast, Wish(parts=frozenset({"lgreco"}), family="powersgd(rank=4)"))
    sparse = compose(with_errors(gpt(4, 10 * GBIT10), "topk"), Wish(measure="sidco-e(ratio=0.01,packed=1)"))
    assert any(rule.levels for rule in sparse.rules), "controllers move between them"
    assert any(rule.levels for rule in alone.rules), "who asks for L-GreCo alone gets its levels"


@pytest.mark.parametrize(("quality", "spec", "least"), [("safe", 8, 8), ("balanced", 4, 4), ("balanced", 8, 4)])
def test_no_tensor_has_fewer_bits_than_the_quality_takes(quality: str, spec: int, least: int) -> None:
    """A quantiser has no error feedback that would bring back what it loses."""
    profile, family = with_errors(gpt(4, MBIT100), "qsgd"), f"qsgd(bits={spec})"
    found = compose(profile, Wish(quality=quality, parts=frozenset({"lgreco"}), family=family))
    levels = [level for rule in found.rules for level in rule.levels]
    assert found.family == family and all(level >= least for level in levels)
    assert bool(levels) is (quality == "balanced")
    if levels:
        before = tuple(msgspec.structs.replace(r, levels=(3,) * len(r.levels)) for r in found.rules)
        again = compose(
            profile, Wish(quality=quality, parts=frozenset({"lgreco"}), family=family, kept={family: before})
        )
        assert again.rules == found.rules, "rules of another quality do not stay"


def test_levels_that_lose_too_much_by_now_are_seen_whatever_rank_their_rules_name() -> None:
    """Rules of a family of ranks name the highest rank that any of its tensors has."""
    profile, family = with_errors(gpt(2, MBIT100, whole=True), "powersgd"), "powersgd(rank=4)"
    wish = Wish(parts=frozenset({"lgreco"}), family=family)
    rules = compose(profile, wish).rules
    assert {rule.spec for rule in rules} - {"none"} == {"powersgd(rank=16)"}
    # Those in force are written as codecs are named, after what the model was declared with.
    in_force = (PlannedRule("*", "none"), *(replace(r, spec=r.spec + "+ef") if r.spec != "none" else r for r in rules))
    wish = replace(wish, rules=in_force, running=family, took={family: 0.3}, kept={family: rules})
    assert 0.9 < compose(profile, wish).overspent <= 1.0 + 1e-9
    rows = tuple(
        replace(
            row, errors=tuple(e * (1 if level >= 4 else 9) for level, e in zip(row.levels, row.errors, strict=True))
        )
        for row in profile.errors["powersgd"]
    )
    grown = compose(replace(profile, errors={"powersgd": rows}), wish)
    assert grown.overspent > 1.1 and grown.rules != rules
    assert compose(profile, replace(wish, family="powersgd(rank=8)")).overspent == 0.0, "they are of another family"
