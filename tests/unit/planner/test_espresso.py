"""Espresso on real traces: Algorithm 1's order and Remove, what constraints leave, and that more is never worse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks import traces
from gcserver.planner import espresso_kernels as kernels
from gcserver.planner.baselines import CRIPPLED, SYSTEMS, fp32, plan_time, upper_bound
from gcserver.planner.costs import CostError, clusters, codec_costs
from gcserver.planner.espresso import algorithm1, candidates, prepare, priority, quickest, select
from gcserver.planner.options import Constraints, Device
from gcserver.planner.options_schemes import ALLTOALL_ALLTOALL, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace, TracedTensor


def trace_of(model: str) -> Trace:
    return traces.read([model])[0]


def test_larger_tensors_first_and_the_latest_of_equals() -> None:
    cluster = clusters(2)[2]
    trace = Trace("order", tuple(TracedTensor(str(i), n, float(i)) for i, n in enumerate((5, 9, 5, 9, 7))))
    training = Training(trace, prepare(cluster, codec_costs("dgc", cluster)).table)
    assert priority(training).tolist() == [3, 1, 4, 2, 0]


def test_tensors_before_a_bubble_stay_uncompressed() -> None:
    """Section 4.4.2, property 1: the first tensor is large, but its transfer ends long before the others are ready."""
    cluster = clusters(2)[2]
    codec = codec_costs("randomk", cluster)
    space = prepare(cluster, codec)
    trace = Trace("bubble", tuple(TracedTensor(n, 10**7, t) for n, t in (("a", 0.1), ("b", 5.0), ("c", 5.001))))
    training = Training(trace, space.table)
    plan, _, _ = algorithm1(training, space.compresses, space.main, quickest(training, ~space.compresses))
    assert [bool(space.compresses[c]) for c in plan] == [False, True, True]


def test_a_bubble_that_a_decision_makes_removes_the_tensors_before_it() -> None:
    """The largest, decided first, makes room before the last; the first is not tried any more, and need not be."""
    cluster = clusters(2)[2]
    space = prepare(cluster, codec_costs("randomk", cluster))
    tensors = (("a", 10**7, 0.01), ("b", 10**8, 0.02), ("c", 10**6, 0.3))
    training = Training(Trace("made", tuple(TracedTensor(*t) for t in tensors)), space.table)
    dense = quickest(training, ~space.compresses)
    assert training.bubbles(dense) == []
    length, columns = candidates(training, space.main)
    timelines, plans = [], []
    for sticky in (True, False):
        plans.append(dense.copy())
        rest = length, columns, space.compresses, training.arrays, training.priced, plans[-1]
        timelines.append(kernels.greedy(priority(training), sticky, 1, 1 << 62, *rest)[1])
    assert training.bubbles(plans[0]) == [2] and space.compresses[plans[0]].tolist()[:2] == [False, True]
    assert plans[0].tolist() == plans[1].tolist() and timelines[0] < timelines[1]


@pytest.mark.parametrize(("model", "number"), [*product(["LSTM", "vgg16"], range(4)), ("resnet101", 1)])
def test_no_baseline_is_better(model: str, number: int) -> None:
    cluster, trace = clusters(8)[number], trace_of(model)
    codec = codec_costs("dgc", cluster)
    found = select(trace, prepare(cluster, codec))
    for name, baseline in (SYSTEMS | CRIPPLED).items():
        assert found.seconds <= plan_time(trace, cluster, codec, baseline(trace, cluster, codec)) * (1 + 1e-9), name
    assert upper_bound(trace, cluster, codec, found.options) <= found.seconds


def test_compressing_every_tensor_can_hurt() -> None:
    """The paper's table 1: DGC on LSTM with PCIe is slower than FP32 there; here the same on a faster network."""
    cluster, trace = clusters(2)[0], trace_of("bert")
    codec = codec_costs("dgc", cluster)
    everything = (scheme(ALLTOALL_ALLTOALL[0], Device.GPU),) * len(trace.tensors)
    dense = plan_time(trace, cluster, codec, fp32(trace, cluster, codec))
    assert plan_time(trace, cluster, codec, everything) > 1.2 * dense
    assert select(trace, prepare(cluster, codec)).seconds <= dense


@pytest.mark.parametrize(
    "constraints",
    [Constraints(gpu=False), Constraints(cpu=False), Constraints(max_compressions=1), Constraints(flat=False)],
    ids=str,
)
def test_constraints_hold(constraints: Constraints) -> None:
    cluster, trace = clusters(8)[1], trace_of("LSTM")
    codec = codec_costs("efsignsgd", cluster)
    found = select(trace, prepare(cluster, codec, constraints))
    assert len(found.options) == len(trace.tensors) and any(o.compressions for o in found.options)
    for option in found.options:
        assert constraints.allow(option) and option.devices <= set(constraints.devices)
    assert found.seconds >= select(trace, prepare(cluster, codec)).seconds * (1 - 1e-2)


def test_without_any_device_nothing_is_compressed() -> None:
    cluster, trace = clusters(8)[0], trace_of("LSTM")
    codec = codec_costs("dgc", cluster)
    found = select(trace, prepare(cluster, codec, Constraints(gpu=False, cpu=False)))
    assert all(o.compressions == 0 for o in found.options)
    assert found.seconds <= plan_time(trace, cluster, codec, fp32(trace, cluster, codec)) * (1 + 1e-9)


def test_a_plan_of_the_caller_is_a_lower_limit() -> None:
    cluster, trace = clusters(8)[0], trace_of("LSTM")
    codec = codec_costs("dgc", cluster)
    space = prepare(cluster, codec)
    good = select(trace, space)
    again = select(trace, space, effort=0, plans=[good.options])
    assert again.seconds == pytest.approx(good.seconds, rel=1e-12) and again.options == good.options
    with pytest.raises(CostError, match="not among"):
        select(trace, prepare(cluster, codec, Constraints(gpu=False, cpu=False)), plans=[good.options])


def test_the_same_trace_gives_the_same_strategy() -> None:
    cluster, trace = clusters(8)[1], trace_of("vgg16")
    space = prepare(cluster, codec_costs("randomk", cluster))
    one, other = select(trace, space), select(trace, space)
    assert one.options == other.options and one.steps == other.steps and one.timelines == other.timelines
    assert np.array_equal(one.plan, other.plan)
