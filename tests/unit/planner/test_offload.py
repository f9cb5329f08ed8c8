"""Algorithm 2: groups, all combinations of prefixes, one group at a time beyond the limit, and where Lemma 1 ends."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks import traces
from gcserver.planner.costs import clusters, codec_costs
from gcserver.planner.espresso import Space, algorithm1, prepare, quickest
from gcserver.planner.offload import LIMIT, offload_to_cpu
from gcserver.planner.options import Device
from gcserver.planner.options_schemes import INTER_ALLGATHER, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace, TracedTensor
from tests.unit.planner.timeline_oracle import iteration

CLUSTER = clusters(8)[0]


def space() -> Space:
    """Prepared once, and not at import: its kernels may have to be compiled."""
    return prepare(CLUSTER, codec_costs("dgc", CLUSTER))


def on_gpu() -> int:
    return space().table.index(scheme(INTER_ALLGATHER, Device.GPU))


def on_cpu() -> int:
    return int(space().to_cpu[on_gpu()])


def training(*tensors: tuple[int, float]) -> Training:
    return Training(Trace("t", tuple(TracedTensor(str(i), n, t) for i, (n, t) in enumerate(tensors))), space().table)


def test_all_combinations_of_prefixes() -> None:
    job = training((1 << 23, 0.001), (1 << 20, 0.002), (1 << 23, 0.003), (1 << 20, 0.004), (1 << 23, 0.02))
    start = np.full(5, on_gpu())
    found = offload_to_cpu(job, space().to_cpu, start)
    assert (found.groups, found.combinations) == (2, 4 * 3)
    ends = {}
    for large, small in product(range(4), range(3)):
        plan = start.copy()
        plan[[0, 2, 4][:large] + [1, 3][:small]] = on_cpu()
        ends[large, small] = job.time(plan)
    assert found.seconds == pytest.approx(min(ends.values())) == pytest.approx(job.time(found.plan))
    assert found.seconds < ends[0, 0]  # something is worth moving here
    assert (start == on_gpu()).all()


def test_of_a_large_model_one_group_after_the_other_is_as_good() -> None:
    """1536 combinations of ResNet101 on PCIe: what `LIMIT` leaves out."""
    (trace,), cluster = traces.read(["resnet101"]), clusters(64)[1]
    prepared = prepare(cluster, codec_costs("dgc", cluster))
    job = Training(trace, prepared.table)
    dense = quickest(job, ~prepared.compresses)
    plan, before, _ = algorithm1(job, prepared.compresses, prepared.main, dense)
    every = offload_to_cpu(job, prepared.to_cpu, plan, limit=1 << 20)
    some = offload_to_cpu(job, prepared.to_cpu, plan)
    assert every.combinations > LIMIT and some.timelines < every.timelines / 4
    assert every.seconds <= some.seconds <= every.seconds * 1.001 < before


def test_beyond_the_limit_one_group_after_the_other() -> None:
    job = training(*((1 << (20 + i % 3), 0.001 * i) for i in range(9)))
    start = np.full(9, on_gpu())
    whole = offload_to_cpu(job, space().to_cpu, start)
    part = offload_to_cpu(job, space().to_cpu, start, limit=10)
    assert whole.combinations == part.combinations == 4**3
    assert whole.seconds <= part.seconds <= job.time(start)
    assert part.seconds == pytest.approx(job.time(part.plan))


def test_what_is_not_compressed_or_already_there_stays() -> None:
    job = training((1 << 23, 0.001), (1 << 23, 0.002))
    found = offload_to_cpu(job, space().to_cpu, np.array([0, on_cpu()]))
    assert found.plan.tolist() == [0, on_cpu()] and (found.groups, found.combinations) == (0, 1)


def test_lemma_1_fails_where_the_link_is_the_bottleneck() -> None:
    """One of two equal tensors has to leave the GPU: the later one, since the link can then start at once."""
    gpu, cpu, link = [(0, 1.0), (3, 10.0)], [(1, 4.0), (3, 10.0)], [1.0, 1.0]
    earliest, latest = iteration(link, [cpu, gpu])[0], iteration(link, [gpu, cpu])[0]
    assert latest == 22.0 < earliest == 23.0
