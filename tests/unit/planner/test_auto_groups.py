"""MergeComp on a profile: the costs it is given, when its cut replaces the worker's portions, DDP's buckets."""

from __future__ import annotations

import msgspec
import pytest

from gcserver.planner import auto_groups
from gcserver.planner.auto_groups import RUNS, costs, regroup
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.live_layout import portions
from gcserver.planner.mergecomp import Merged, MergeModel, merge
from gcserver.planner.profile import CodecCost, Curve
from tests.unit.planner.live_profiles import GBIT1, GBIT10, MBIT100, gpt, plain

MILLION = 1_000_000


def test_costs_are_those_of_a_node() -> None:
    line = Curve(((0, 0.0), (MILLION, 1.0)))
    codec = {"topk(ratio=0.0125)": CodecCost(line, line, Curve(((0, 0.0),)), 0.025)}
    profile = plain([MILLION], [0.0], nodes=4, codecs=codec, round_seconds=0.5, latency=0.1, busy=2.0)
    encode, exchange = costs(Live(profile), "topk(ratio=0.0125)")
    # a node encodes all, a quarter of the aggregates, and decodes; at half speed
    assert encode(0) == pytest.approx(0.5, rel=1e-3)
    assert encode(MILLION) == pytest.approx(0.5 + 2 * (1.25 + 1), rel=1e-3)
    assert exchange(0) == pytest.approx(0.2)
    assert exchange(MILLION) == pytest.approx(0.2 + 2 * 0.75 * (4 + 8 * 12_500) / 4e6)


def test_costs_of_two_exchanges() -> None:
    """Twice the trips, and a turn more on the lane; sums travel as they are, so no owner encodes again."""
    line = Curve(((0, 0.0), (MILLION, 1.0)))
    codec = {"powersgd(rank=4)": CodecCost(line, line, Curve(((0, 0.0),)), 0.1)}
    profile = plain([MILLION], [0.0], nodes=4, codecs=codec, round_seconds=0.5, latency=0.1, busy=2.0, whole=True)
    encode, exchange = costs(Live(profile), "powersgd(rank=4)")
    assert encode(0) == pytest.approx(0.75, rel=1e-3)
    assert encode(MILLION) == pytest.approx(0.75 + 2 * (1 + 1), rel=1e-3)
    assert exchange(0) == pytest.approx(0.4)


def test_one_late_bucket_is_cut_and_the_caps_are_torchs() -> None:
    """A dense model on a fast link, all in one bucket: nothing overlaps. Groups do."""
    profile = gpt(4, GBIT10)
    live = Live(profile, portions(profile, (1 << 40,)))
    options = [BlockOption()] * len(live.blocks)
    found = regroup(live, "none", options)
    assert found.changed
    assert found.seconds == Live(profile, found.portions).seconds(options) < live.seconds(options)
    assert [t for group in found.portions for t in group] == list(range(len(profile.tensors)))
    assert len(found.caps) == len(found.portions) > 1
    assert portions(profile, tuple(round(cap * (1 << 20)) for cap in found.caps)) == found.portions
    assert "off the step" in found.reason


def test_what_would_gain_nothing_stays_as_it_is() -> None:
    profile = gpt(2, MBIT100)
    live = Live(profile)
    found = regroup(live, "none", [BlockOption()] * len(live.blocks))
    if found.changed:
        assert found.seconds < live.seconds([BlockOption()] * len(live.blocks)) * 0.999
    alone = Live(plain([MILLION], [0.0]))
    found = regroup(alone, "none", [BlockOption()])
    assert not found.changed
    assert (found.portions, found.caps) == (alone.brought, ())


def test_empty_tensors_are_in_no_group() -> None:
    profile = gpt(4, GBIT1)
    empty = msgspec.structs.replace(profile.tensors[0], name="empty", shape=(0,), elements=0, ready=0.0)
    profile = msgspec.structs.replace(profile, tensors=(empty, *profile.tensors))
    live = Live(profile, portions(profile, (1 << 40,)))
    found = regroup(live, "none", [BlockOption()] * len(live.blocks))
    assert found.changed
    assert 0 not in {t for group in found.portions for t in group}


def test_a_model_without_elements_has_no_groups() -> None:
    profile = gpt(4, GBIT1)
    empty = msgspec.structs.replace(profile.tensors[0], shape=(0,), elements=0, ready=0.0)
    for tensors in ((), (empty,)):
        live = Live(msgspec.structs.replace(profile, tensors=tensors, blocks=()))
        found = regroup(live, "none", [])
        assert (found.changed, found.portions, found.caps) == (False, live.brought, ())


def test_of_thousands_of_tensors_neighbours_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def merged(model: MergeModel) -> Merged:
        asked.append(model)
        return merge(model)

    monkeypatch.setattr(auto_groups, "merge", merged)
    tensors = 2 * RUNS + 345
    profile = plain([500] * tensors, [i * 1e-3 for i in range(tensors)], nodes=2, latency=1e-4)
    live = Live(profile, (tuple(range(tensors)),))
    found = regroup(live, "none", [BlockOption()] * len(live.blocks))
    (model,) = asked
    assert len(model.elements) == RUNS and sum(model.elements) == 500 * tensors
    assert model.ready[-1] == profile.tensors[-1].ready and set(model.elements) == {1000, 1500}
    assert found.changed and [t for group in found.portions for t in group] == list(range(tensors))
    assert sum(found.caps) * (1 << 20) == pytest.approx(4 * 500 * tensors)
