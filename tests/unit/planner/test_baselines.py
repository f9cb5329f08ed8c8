"""What each baseline decides: thresholds, devices, schemes, and HiPress's cost model."""

from __future__ import annotations

import pytest

from gcserver.planner.baselines import (
    CRIPPLED,
    SYSTEMS,
    all_compress,
    alltoall_alltoall,
    byteps_compress,
    cpu_only,
    fp32,
    gpu_only,
    hipress,
    hitopkcomm,
    inter_allgather,
    inter_alltoall,
    myopic,
    plan_time,
)
from gcserver.planner.costs import clusters, codec_costs
from gcserver.planner.options import Device
from gcserver.planner.options_cost import compile_table
from gcserver.planner.options_schemes import ALLTOALL_ALLTOALL, HITOPKCOMM, INTER_ALLGATHER, INTER_ALLTOALL, scheme
from gcserver.planner.trace import Trace, TracedTensor

NVLINK = clusters(8)[0]
DGC = codec_costs("dgc", NVLINK)
SIZES = (100, 1 << 15, 1 << 20, 1 << 26)
TRACE = Trace("small", tuple(TracedTensor(str(n), n, 0.001 * (i + 1)) for i, n in enumerate(SIZES)))


def compressed(plan) -> list[bool]:
    return [o.compressions > 0 for o in plan]


def test_thresholds() -> None:
    assert compressed(fp32(TRACE, NVLINK, DGC)) == [False] * 4
    assert compressed(hitopkcomm(TRACE, NVLINK, DGC)) == [False, True, True, True]
    assert compressed(byteps_compress(TRACE, NVLINK, DGC)) == [False, False, True, True]
    resnet = Trace("resnet101", TRACE.tensors)
    assert compressed(byteps_compress(resnet, NVLINK, DGC)) == [False, True, True, True]
    assert compressed(all_compress(TRACE, NVLINK, DGC)) == [True] * 4


def test_schemes_and_devices() -> None:
    assert hitopkcomm(TRACE, NVLINK, DGC)[3] == scheme(HITOPKCOMM, Device.GPU)
    assert byteps_compress(TRACE, NVLINK, DGC)[3] == scheme(INTER_ALLTOALL, Device.CPU)
    assert all(o.devices <= {Device.GPU} for o in gpu_only(TRACE, NVLINK, DGC))
    assert all(o.devices <= {Device.CPU} for o in cpu_only(TRACE, NVLINK, DGC))
    either = {scheme(INTER_ALLGATHER, d) for d in Device}
    assert all(not o.compressions or o in either for o in inter_allgather(TRACE, NVLINK, DGC))


def test_hipress_compresses_what_its_model_says() -> None:
    assert compressed(hipress(TRACE, NVLINK, DGC)) == [False, False, False, True]
    slow = clusters(8)[3]
    assert compressed(hipress(TRACE, slow, codec_costs("dgc", slow))) == [False, True, True, True]
    assert not any(compressed(hipress(TRACE, clusters(1)[0], DGC)))


@pytest.mark.parametrize(
    ("baseline", "texts"),
    [
        (inter_allgather, [INTER_ALLGATHER]),
        (inter_alltoall, [INTER_ALLTOALL]),
        (alltoall_alltoall, ALLTOALL_ALLTOALL),
    ],
)
@pytest.mark.parametrize("cluster", clusters(8), ids=lambda c: c.name)
def test_variants_of_one_scheme_compress_by_it_alone_where_that_is_shorter(cluster, baseline, texts) -> None:
    dgc = codec_costs("dgc", cluster)
    chosen = baseline(TRACE, cluster, dgc)
    by = {scheme(text, device) for text in texts for device in Device}
    assert {o for o in chosen if o.compressions} <= by
    assert any(compressed(chosen)), "the largest tensor has most of the traffic"
    dense = plan_time(TRACE, cluster, dgc, fp32(TRACE, cluster, dgc))
    assert plan_time(TRACE, cluster, dgc, chosen) < dense


def test_myopic_takes_the_quickest_option_of_the_whole_tree() -> None:
    plan = myopic(TRACE, NVLINK, DGC)
    for tensor, option in zip(TRACE.tensors, plan, strict=True):
        chosen = [option, *(p[0] for p in (fp32(TRACE, NVLINK, DGC), hitopkcomm(TRACE, NVLINK, DGC)))]
        alone = compile_table(NVLINK, DGC, chosen).price([tensor.elements]).work[0, :, 4]
        assert alone[0] == alone.min()


@pytest.mark.parametrize("cluster", clusters(4), ids=lambda c: c.name)
def test_every_baseline_has_a_time_everywhere(cluster) -> None:
    codec = codec_costs("efsignsgd", cluster)
    for name, baseline in (SYSTEMS | CRIPPLED).items():
        plan = baseline(TRACE, cluster, codec)
        assert len(plan) == len(TRACE.tensors), name
        assert TRACE.backward < plan_time(TRACE, cluster, codec, plan) < 60, name
