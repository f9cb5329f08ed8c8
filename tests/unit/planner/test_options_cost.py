"""What options cost: payloads that stay stacked, shared cards and cores, and which options others beat."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.costs import Cluster, CodecCosts, CostError, DeviceCosts, Link, clusters, codec_costs, line
from gcserver.planner.options import ANY, Constraints, Device, Option, options
from gcserver.planner.options_cost import CPU, GPU, INTER, INTRA, compile_table, table, walk
from gcserver.planner.options_schemes import HITOPKCOMM, INTER_ALLTOALL, scheme

N, K = 4, 8
CLUSTER = Cluster("c", N, K, Link(1.0, 1.0), Link(100.0, 1.0))
CODEC = CodecCosts(
    "half",
    2.0,
    0.0,
    0.0,
    DeviceCosts(line(0.0, 1.0), line(0.0, 10.0), line(0.0, 100.0)),
    DeviceCosts(line(0.0, 3.0), line(0.0, 30.0), line(0.0, 300.0)),
)
SIZE = 3200.0


def jobs(text: str, device: Device = Device.GPU, cluster: Cluster = CLUSTER) -> list[tuple[int, float]]:
    """(resource, seconds) of the option that ``text`` spells, for SIZE elements."""
    prices = compile_table(cluster, CODEC, [scheme(text, device)]).price([SIZE])
    return [
        (int(r), pytest.approx(float(s))) for r, s in zip(prices.resource[0, 0], prices.seconds[0, 0], strict=True)
    ][: prices.count[0, 0]]


def test_dense_hierarchical() -> None:
    assert jobs("intra-reduce-scatter > inter-allreduce > intra-allgather") == [
        (INTRA, 7 + 7 / 8 * 4 * SIZE),
        (INTER, 600 + 2 * 3 / 4 * 4 * SIZE),  # eight ranks with an eighth each share the card
        (INTRA, 7 + 7 / 8 * 4 * SIZE),
    ]


def test_one_rank_of_a_node_after_reduce() -> None:
    assert jobs("intra-reduce > inter-allreduce > intra-broadcast") == [
        (INTRA, 3 + 4 * SIZE),
        (INTER, 600 + 2 * 3 / 4 * 4 * SIZE),
        (INTRA, 3 + 4 * SIZE),
    ]


def test_what_no_one_aggregated_stays_stacked() -> None:
    """HiTopKComm: four nodes' payloads of every shard go round the node and are decoded at the end."""
    share = SIZE / K
    assert jobs(HITOPKCOMM) == [
        (INTRA, 7 + 7 / 8 * 4 * SIZE),
        (GPU, 1.0 * share),
        (INTER, 300 + 3 * K * 2 * share),
        (INTRA, 7 + 7 * N * 2 * share),
        (GPU, 10 * SIZE + 100 * 3 * SIZE),
    ]


def test_a_first_step_without_decompression_is_no_bargain() -> None:
    """Comm1* > Comm2* (footnote 2): the second step carries all copies that the first brought together."""
    text = "intra-reduce-scatter > comp[DEV] > inter-alltoall* > inter-allgather* > decomp[DEV] > intra-allgather"
    share, piece = SIZE / K, SIZE / K / N
    stacked = jobs(text)
    assert stacked[2] == (INTER, 300 + 3 / 4 * K * 2 * share + 300 + 3 * K * N * 2 * piece)
    assert stacked[3] == (GPU, 10 * share + 100 * 3 * share)
    decoded = jobs(INTER_ALLTOALL)
    assert decoded[3] == (GPU, 10 * piece + 100 * 3 * piece + 1 * piece)  # decoding and encoding: one job
    assert decoded[4] == (INTER, 300 + 3 * K * 2 * piece) and decoded[5] == (GPU, 10 * share)


def test_the_ranks_of_a_node_share_its_cores() -> None:
    on_cpu = jobs(INTER_ALLTOALL, Device.CPU)
    assert on_cpu[1] == (CPU, 3 * SIZE) and on_cpu[5] == (CPU, 30 * SIZE)


def test_flat_collectives_take_the_slower_link() -> None:
    p = N * K
    assert jobs("flat-allreduce") == [(INTER, 200 * (p - 1) + 2 * (p - 1) / p * 4 * SIZE)]
    two = jobs("comp[DEV] > flat-alltoall* > decomp[DEV] > flat-allgather")
    assert two[1] == (INTER, 100 * (p - 1) + K * (N - 1) / N * 2 * SIZE)
    assert two[2] == (GPU, (10 + 100 * (p - 1)) * SIZE / p)
    # A ring passes both links once, the ranks of a node together send most of an all-to-all through its card.
    inside = Cluster("c", N, K, Link(1.0, 1.0), Link(100.0, 1.5))
    assert jobs("flat-allreduce", cluster=inside) == [(INTRA, 200 * (p - 1) + 2 * (p - 1) / p * 4 * SIZE)]
    assert jobs("comp[DEV] > flat-alltoall* > decomp[DEV] > flat-allgather", cluster=inside)[1] == (
        INTER, 100 * (p - 1) + K * (N - 1) / N * 2 * SIZE / 1.5,
    )  # fmt: skip


def test_nothing_takes_no_time() -> None:
    """With one rank a node, steps within nodes are no jobs; hierarchical and flat options become equal."""
    single = Cluster("c", N, 1, Link(1.0, 1.0), Link(1.0, 1.0))
    price = compile_table(single, CODEC, [scheme(HITOPKCOMM, Device.GPU)]).price([SIZE])
    assert price.resource[0, 0, : price.count[0, 0]].tolist() == [GPU, INTER, GPU]


def test_every_option_ends_with_the_whole_tensor_everywhere() -> None:
    for option in options():
        costs = walk(option, CLUSTER)
        assert len(costs) == len(option.tasks)
        assert all(c.latency >= 0 and c.share > 0 and c.further >= 0 for c in costs)
        last = [c for c, t in zip(costs, option.tasks, strict=True) if t.device is not None]
        if last and option.tasks[-1].device is Device.GPU:
            assert last[-1].share == pytest.approx(1.0)


@pytest.mark.parametrize("cluster", clusters(8)[:2], ids=lambda c: c.name)
def test_left_out_options_are_beaten_at_every_size(cluster: Cluster) -> None:
    codec = codec_costs("dgc", cluster)
    gpu = Constraints(cpu=False)
    kept, whole = table(cluster, codec, gpu), compile_table(cluster, codec, options(gpu))
    assert len(kept.options) < len(whole.options) / 1.5 and set(kept.options) <= set(whole.options)
    sizes = np.unique(np.geomspace(1, 3e8, 57).astype(np.int64)).astype(np.float64)
    few, all_ = kept.price(sizes).work[..., :5], whole.price(sizes).work[..., :5]
    for o, option in enumerate(whole.options):
        if option in kept.options:
            continue
        beaten = (few <= all_[:, [o], :] * (1 + 1e-9)).all(axis=2)  # [sizes, kept]
        assert beaten.all(axis=0).any(), option


def test_constraints_and_missing_devices_prune_the_table() -> None:
    nvlink, cpu = clusters(8)[0], clusters(8)[2]
    codec = codec_costs("dgc", nvlink)
    one = table(nvlink, codec, Constraints(max_compressions=1, flat=False))
    assert all(o.compressions <= 1 and not o.flat for o in one.options)
    assert all(o.devices <= {Device.CPU} for o in table(cpu, codec_costs("dgc", cpu), ANY).options)
    with pytest.raises(CostError, match="no figures for GPU"):
        compile_table(nvlink, codec_costs("dgc", cpu), [scheme(HITOPKCOMM, Device.GPU)])


def test_index_names_what_is_missing() -> None:
    small = compile_table(CLUSTER, CODEC, options(Constraints(gpu=False, cpu=False)))
    assert small.index(small.options[3]) == 3
    other: Option = scheme(HITOPKCOMM, Device.CPU)
    with pytest.raises(CostError, match="not among the 9 options"):
        small.index(other)
