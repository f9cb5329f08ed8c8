"""MergeComp on a model of the step: the timeline by hand, Algorithm 2's ways to stop, the nine traces."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from benchmarks import mergecomp as cases
from benchmarks import traces
from gcserver.planner.fit import AffineCost
from gcserver.planner.mergecomp import (
    MergeModel,
    best_by_count,
    merge,
    merge_model,
    step_time,
    timeline,
    two_group_times,
)
from gcserver.planner.mergecomp_groups import Grouping, GroupingError, layer_wise, naive, whole_model
from gcserver.planner.trace import Trace, TracedTensor
from tests.unit.planner import mergecomp_oracle

TRACES = {trace.model: trace for trace in traces.read()}
#: three tensors of 10, 20 and 30 elements, ready after 10, 20 and 30 s
SMALL = MergeModel((10, 20, 30), (10.0, 20.0, 30.0), AffineCost(1.0, 0.1), AffineCost(2.0, 0.5))


def test_on_one_device_encoding_delays_what_comes_after_it() -> None:
    first, second = timeline(SMALL, Grouping((1, 3)))
    # computed 10, encoded in 2; exchanged in 7, all of it while tensors 1 and 2 are computed and encoded
    assert (first.encoded, first.sent, first.exchanged, first.overlap) == pytest.approx((12, 12, 19, 7))
    # computed at 30, delayed by 2, encoded in 6, exchanged in 27 with nothing beside it
    assert (second.encoded, second.sent, second.exchanged, second.overlap) == pytest.approx((38, 38, 65, 0))


def test_cores_of_its_own_encode_beside_computing() -> None:
    model = MergeModel(SMALL.elements, SMALL.ready, SMALL.encode, AffineCost(2.0, 1.0), own_cores=True)
    first, second = timeline(model, Grouping((2, 3)))
    assert (first.encoded, first.sent, first.exchanged) == pytest.approx((24, 24, 56))
    assert first.overlap == pytest.approx(34 - 24)  # the last group is encoded at 34
    assert (second.encoded, second.sent, second.exchanged, second.overlap) == pytest.approx((34, 56, 88, 0))


def test_a_traced_step_begins_with_its_forward_pass() -> None:
    trace = Trace("m", (TracedTensor("b", 5, 1.0), TracedTensor("a", 6, 2.0)), forward=4.0)
    model = merge_model(trace, AffineCost(0, 0), AffineCost(1.0, 0))
    assert model.ready == (5.0, 6.0) and step_time(model, whole_model(2)) == 7.0


def test_one_group_stays_where_a_second_costs_more_than_it_hides() -> None:
    chosen = merge(MergeModel((8, 8), (1.0, 1.1), AffineCost(5.0, 0.0), AffineCost(1.0, 0.0)))
    assert chosen.grouping == whole_model(2) and chosen.reason == "groups: 1; one more is no faster"


def test_at_a_tie_the_fewer_groups_stay() -> None:
    model = MergeModel((1, 1), (1.0, 2.0), AffineCost(0.0, 0.0), AffineCost(1.0, 0.0))
    assert step_time(model, layer_wise(2)) == step_time(model, whole_model(2))
    assert merge(model).grouping == whole_model(2)


def test_a_small_gain_is_taken_and_ends_the_search() -> None:
    model = MergeModel((10,) * 10, tuple(float(i) for i in range(1, 11)), AffineCost(0.001, 0), AffineCost(0.1, 0.05))
    times = [m.seconds for m in best_by_count(model, 4)]
    gain = (times[0] - times[1]) / times[0]
    chosen = merge(model, alpha=gain * 1.01)
    assert len(chosen.grouping) == 2 and "the last gained under" in chosen.reason
    assert len(merge(model, alpha=gain * 0.99).grouping) > 2
    assert merge(model, most=3, alpha=0.0).reason == "groups: 3; as many as were asked for"
    assert merge(model, most=1).grouping == whole_model(10)


def test_more_groups_than_tensors_are_not_tried() -> None:
    assert [len(m.grouping) for m in best_by_count(SMALL, 9)] == [1, 2, 3]
    assert two_group_times(SMALL).tolist() == pytest.approx([65.0, step_time(SMALL, Grouping((2, 3)))])


@pytest.mark.parametrize("own_cores", [False, True])
@pytest.mark.parametrize("model", TRACES)
def test_kernels_cut_traces_as_the_plain_recurrence_does(model: str, own_cores: bool) -> None:
    for encode, exchange in (((5e-4, 1e-9), (2e-4, 5e-9)), ((1e-5, 1e-10), (1e-3, 1e-8)), ((0.0, 0.0), (1e-4, 1e-9))):
        case = merge_model(TRACES[model], AffineCost(*encode), AffineCost(*exchange), own_cores)
        expected = [g.ends for g in mergecomp_oracle.best_groupings(case, 8)]
        assert [m.grouping.ends for m in best_by_count(case, 8)] == expected


def test_thousands_of_tensors_need_no_table_of_all_pairs() -> None:
    n = 4000
    elements = tuple((256, 4096, 70_000)[i % 3] for i in range(n))
    model = MergeModel(
        elements, tuple(i * 1e-5 for i in range(n)), AffineCost(5e-4, 1e-9), AffineCost(2e-4, 1e-8), own_cores=True
    )
    tracemalloc.start()
    try:
        merged = merge(model)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20  # a table of all pairs: 128 MB
    finally:
        tracemalloc.stop()
    assert len(merged.grouping) > 1 and merged.seconds < step_time(model, whole_model(n))


@pytest.mark.parametrize("own_cores", [False, True])
@pytest.mark.parametrize("codec", ["fp16", "dgc", "onebit"])
@pytest.mark.parametrize("model", TRACES)
def test_the_best_cut_of_a_trace_is_that_of_trying_all(model: str, codec: str, own_cores: bool) -> None:
    step = merge_model(TRACES[model], *cases.costs(codec, 4), own_cores)
    one, two, three = best_by_count(step, 3)
    n = len(step.elements)
    assert two.seconds == pytest.approx(two_group_times(step).min(), rel=1e-12)
    assert one.seconds == step_time(step, whole_model(n)) and two.seconds <= step_time(step, naive(n, 2))
    assert three.seconds <= step_time(step, naive(n, 3))
    # as far as one group more pays, Algorithm 2 and the best of all counts agree
    assert merge(step, most=2, alpha=0.0).seconds == min(one.seconds, two.seconds)


def test_two_groups_are_not_always_enough() -> None:
    """The paper's Y = 2: layer-wise fp16 beats no cut into two where computing is slow, and more groups beat both."""
    model = merge_model(TRACES["gpt2"], AffineCost(26e-6, 0.0), AffineCost(300e-6, 2 * 2 * 0.4e-9))
    two, auto = merge(model, most=2), merge(model, most=16)
    assert step_time(model, layer_wise(148)) < 0.97 * two.seconds
    assert auto.seconds < step_time(model, layer_wise(148)) and len(auto.grouping) > 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"elements": ()}, "one tensor at least"),
        ({"elements": (1, 0)}, "one element at least"),
        ({"ready": (1.0,)}, "each of 2 tensors needs a time, got 1"),
        ({"ready": (2.0, 1.0)}, "must rise"),
        ({"ready": (-1.0, 1.0)}, "must rise"),
        ({"ready": (1.0, float("nan"))}, "must rise"),
    ],
)
def test_a_step_that_cannot_be_is_refused(change: dict[str, tuple[float, ...]], said: str) -> None:
    good = {"elements": (1, 2), "ready": (1.0, 2.0)}
    with pytest.raises(GroupingError, match=said):
        MergeModel(**{**good, **change}, encode=AffineCost(0, 0), exchange=AffineCost(0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "alpha", "said"), [(0, 0.1, "Y"), (2, 1.0, "alpha"), (2, -0.1, "alpha")])
def test_limits_are_checked(most: int, alpha: float, said: str) -> None:
    with pytest.raises(GroupingError, match=said):
        merge(SMALL, most, alpha)


def test_times_are_plain_numbers() -> None:
    assert type(merge(SMALL).seconds) is float and two_group_times(SMALL).dtype == np.float64
