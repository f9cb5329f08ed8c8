"""Properties of auto: no family is worse than uniform, rules come to what was priced, and bounds."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.planner.auto import TIE, Proposal, Wish, compose
from gcserver.planner.auto_family import SURE, family_plan
from gcserver.planner.auto_options import SLACK
from gcserver.planner.auto_rules import applied
from gcserver.planner.families import GAINS, candidates, parse
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import LinkCost, Profile, ProfiledTensor
from tests.unit.planner.live_profiles import costs, with_errors

sizes = st.sampled_from([1, 700, 20_000, 70_000, 300_000]) | st.integers(1, 3_000_000)
parts = st.frozensets(st.sampled_from(["lgreco", "mergecomp"])).map(lambda some: some | {"espresso"})


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 7))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001]) | st.floats(0, 0.2), min_size=count, max_size=count))
    ready = np.cumsum(gaps).tolist()
    tensors = tuple(
        ProfiledTensor(f"layer[{i}].w{draw(st.integers(0, 3))}.{i}", (n,), n, "float32", ready[i])
        for i, n in enumerate(draw(st.lists(sizes, min_size=count, max_size=count)))
    )
    link = LinkCost(draw(st.sampled_from([0.0, 1e-4, 5e-3])), draw(st.sampled_from([1e6, 1e7, 1.2e8, 1e9, 1e11])))
    profile = Profile(
        "job", "ddp.0", draw(st.sampled_from([1, 2, 3, 4, 12])), 1, draw(st.integers(1, 2)), draw(st.floats(0, 0.3)),
        tensors, link, 1 << 20, 1 << 16, busy=draw(st.sampled_from([1.0, 2.5])), codecs=costs(),
        tolerant=draw(st.booleans()),
    )  # fmt: skip
    return with_errors(profile, "topk", "qsgd") if draw(st.booleans()) else profile


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), quality=st.sampled_from(["safe", "balanced", "fast"]))
def test_no_family_is_worse_than_one_option_for_all_or_mixed_for_little(profile: Profile, quality: str) -> None:
    live = Live(profile)
    blocks = len(live.blocks)
    dense = live.seconds([BlockOption()] * blocks)
    for spec in candidates(profile.codecs, quality):
        if spec.name == "powersgd":
            continue
        plan = family_plan(live, spec)
        owner, everyone = (live.seconds([BlockOption(spec.text, s)] * blocks) for s in ("owner", "all"))
        assert plan.seconds <= min(owner, everyone) * (1 + 2 * SLACK)
        if not plan.dense and len(set(plan.columns.tolist())) > 1:
            assert plan.seconds < min(dense, owner, everyone) * (1 - SURE)
        assert plan.seconds == live.seconds(plan.chosen)


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), quality=st.sampled_from(["safe", "balanced", "fast"]), some=parts, singly=st.booleans())
def test_what_is_proposed(profile: Profile, quality: str, some: frozenset[str], singly: bool) -> None:
    wish = Wish(quality=quality, parts=some, buckets=() if singly else (1 << 20, 25 << 20))
    found = compose(profile, wish)
    live = Live(profile, portions(profile, wish.buckets))
    assert live.seconds(applied(live, found.rules)) == found.expected
    # a segment whose tensor leads a dense block has the spec's level, not its own, which the choice did not know
    assert found.expected <= found.dense * (1 + (0.05 if found.alphas else SLACK))
    tried = [c for c in found.considered if c.expected]
    least = min(c.expected for c in tried)
    # what beats the proposal by more than a tie does not gain what a switch must bring over what is less lossy
    bound = least * (1 + TIE) / math.prod(1 - gain for gain in GAINS[1:])
    assert found.expected <= bound * (1.05 if found.alphas else 1.0)
    assert sum(not c.why_not for c in found.considered) == 1
    assert sorted(t for row in found.why for t in row.tensors) == sorted(t.name for t in profile.tensors)
    assert len({rule.pattern for rule in found.rules}) == len(found.rules)
    assert all(parse(rule.spec).name in ("none", parse(found.family).name, "topk") for rule in found.rules)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Proposal) == found == compose(profile, wish)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), profile=profiles())
def test_a_timeline_keeps_the_bounds_of_its_resources(data: st.DataObject, profile: Profile) -> None:
    live = Live(profile)
    specs = st.sampled_from(["none", "fp16", "qsgd(bits=8)", "topk(ratio=0.01)"])
    options = [BlockOption(data.draw(specs), data.draw(st.sampled_from(["owner", "all"]))) for _ in live.blocks]
    step = live.step(options)
    assert step.seconds >= profile.compute
    work: dict[tuple[int, str], float] = {}
    for job in step.jobs:
        if job.what not in ("forward", "compute", "send", "receive"):
            work[job.node, job.resource] = work.get((job.node, job.resource), 0.0) + job.end - job.start
    link = step.bytes / profile.link.bandwidth
    assert step.seconds >= profile.forward + max(*work.values(), link) * (1 - 1e-9)
    trips = 8 * profile.link.latency * len(live.blocks)
    assert step.seconds <= profile.compute + sum(work.values()) + 2 * profile.nodes * link + trips + 1e-9
