"""The live timeline: cases done by hand, what each scheme costs, how it answers to links and cores, all it reports."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from gcserver.core import plan as core
from gcserver.planner.live import (
    ALL,
    OWNER,
    SMALL_BYTES,
    SMALL_MEMBERS,
    BlockOption,
    Live,
    LiveStep,
    cost_of,
)
from gcserver.planner.profile import CodecCost, Curve, ProfileError
from tests.unit.planner import live_oracle
from tests.unit.planner.live_profiles import GBIT1, costs, gpt, plain

MILLION = 1_000_000


def flat(seconds: float) -> Curve:
    return Curve(((0, seconds),))


#: a codec that packs 4 bytes an element and takes a second to encode and to decode, half a second to add
SLOW = {"topk(ratio=0.5)": CodecCost(flat(1.0), flat(1.0), flat(0.5), 1.0)}
SPEC = "topk(ratio=0.5)"
#: a codec that costs nothing and packs a tenth
FREE = {"topk(ratio=0.0125)": CodecCost(flat(0.0), flat(0.0), flat(0.0), 0.025)}


def test_the_constants_of_small_blocks_are_the_daemons() -> None:
    assert (SMALL_MEMBERS, SMALL_BYTES, OWNER, ALL) == (core.SMALL_MEMBERS, core.SMALL_BYTES, core.OWNER, core.ALL)


# A block of 4 MB takes a second on a link in either direction.
@pytest.mark.parametrize(("nodes", "scheme", "seconds"), [
    (2, OWNER, 2.0),   # to the owner, and back
    (2, ALL, 1.0),     # both at once
    (4, OWNER, 6.0),   # three arrive one after the other at the owner, and three leave it
    (4, ALL, 3.0),     # everyone sends three, and takes three
    (1, OWNER, 0.0),   # nobody to exchange with
])  # fmt: skip
def test_one_dense_block(nodes: int, scheme: str, seconds: float) -> None:
    profile = plain([MILLION], [0.0], nodes=nodes)
    assert Live(profile).step([BlockOption("none", scheme)]).seconds == pytest.approx(seconds, abs=1e-6)


def test_owners_share_the_work() -> None:
    """Two blocks of two owners: while one is on its way to node 0 the other goes the other way."""
    both = plain([MILLION, MILLION], [0.0, 0.0], owners=[0, 1])
    one = plain([MILLION, MILLION], [0.0, 0.0], owners=[0, 0])
    assert Live(both).seconds([BlockOption()] * 2) == pytest.approx(2.0)
    assert Live(one).seconds([BlockOption()] * 2) == pytest.approx(3.0)


def test_a_latency_a_trip() -> None:
    fast = plain([MILLION], [0.0], latency=0.5, bandwidth=1e15)
    assert Live(fast).seconds([BlockOption()]) == pytest.approx(1.0)
    assert Live(fast).seconds([BlockOption("none", ALL)]) == pytest.approx(0.5)


def test_small_dense_blocks_go_to_everyone() -> None:
    profile = plain([8192], [0.0], latency=0.5, bandwidth=1e15)
    assert Live(profile).seconds([BlockOption()]) == pytest.approx(0.5)
    assert Live(plain([8193], [0.0], latency=0.5, bandwidth=1e15)).seconds([BlockOption()]) == pytest.approx(1.0)


def test_cores_that_are_the_bottleneck() -> None:
    """Two blocks, each encoded everywhere; its owner decodes one contribution (1), adds the other (1/2), encodes and
    decodes the aggregate (2). On one core: encode, encode, then that, then decode the other's aggregate."""
    profile = plain([MILLION, MILLION], [0.0, 0.0], owners=[0, 1], bandwidth=1e15, codecs=SLOW)
    options = [BlockOption(SPEC, OWNER, 0.0)] * 2
    assert Live(profile).seconds(options) == pytest.approx(2 + 3.5 + 1)
    lanes = msgspec.structs.replace(profile, lanes=2, blocks=((0, MILLION, 0, 0), (MILLION, MILLION, 1, 1)))
    # one lane encodes, then waits for the other node's lane, which is the owner there
    assert Live(lanes).seconds(options) == pytest.approx(1 + 3.5 + 1)
    busy = msgspec.structs.replace(lanes, busy=2.0)
    assert Live(busy).seconds(options) == pytest.approx(2 * (1 + 3.5 + 1))


def test_everyone_adds_everything() -> None:
    """To all: encode, then decode one contribution and add the other."""
    profile = plain([MILLION], [0.0], bandwidth=1e15, codecs=SLOW)
    assert Live(profile).seconds([BlockOption(SPEC, ALL, 0.0)]) == pytest.approx(1 + 1 + 0.5)


#: a codec of two exchanges: 2 s to encode in both together, 1 s to decode, 1/2 s to add both
RANK = {"powersgd(rank=4)": CodecCost(flat(2.0), flat(1.0), flat(0.5), 0.1)}


def test_two_exchanges() -> None:
    """Half of each payload and of encoding at a time; the second encoding waits for the first sum, and takes a turn of
    its own on every lane. By hand, a turn being 0.1 s and a trip 0.05 s before its half second:

    owner       encode 1.1, own added 1.35               other   encode 1.1
    other sends 1.1, it is there at 1.65, added 1.9      owner   sends the sum 1.9, there at 2.45
    owner       encode again 3.0, own added 3.25         other   encode again 3.55, sends, there at 4.1
    owner       added 4.35, its result 5.45              other   has the sum at 6.0, its result 7.1
    """
    profile = plain([MILLION], [0.0], latency=0.05, codecs=RANK, round_seconds=0.2)
    profile = msgspec.structs.replace(profile, whole=True)
    live = Live(profile)
    assert live.layout.whole
    option = BlockOption("powersgd(rank=4)", ALL, 4e6)
    assert live.settled(0, option).scheme == OWNER
    assert live.seconds([option]) == pytest.approx(7.1, abs=1e-5)
    assert Live(plain([10_000], [0.0], codecs=RANK)).usable(0, option.spec), "one block could be of either layout"
    # The mean of ten nodes: 0.9 of every trip and of what is added from others, a tenth of what an owner does alone.
    many = Live(msgspec.structs.replace(profile, nodes=10, blocks=((0, MILLION, 3, 0),)))
    assert many.nodes == 1
    trip, add = 0.05 + 0.45, 0.25 / 10 + 0.25 * 0.9
    by_hand = (1.1 + trip + add + trip) + (1.1 + trip + add + 1.0 / 10 + trip) + (1.0 * 0.9 + 0.1)
    assert many.seconds([option]) == pytest.approx(by_hand, abs=1e-5)


def test_two_exchanges_take_three_turns_of_a_lane_and_one_takes_two() -> None:
    """What the lanes compute besides bytes, which `auto.interference` multiplies."""
    profile = msgspec.structs.replace(plain([MILLION], [0.0], codecs=RANK | FREE), whole=True)
    turns = Live(msgspec.structs.replace(profile, round_seconds=0.2))
    for spec, seconds in (("powersgd(rank=4)", 0.3), (next(iter(FREE)), 0.2), ("none", 0.2)):
        grown = turns.cpu([BlockOption(spec)]) - Live(profile).cpu([BlockOption(spec)])
        assert grown == pytest.approx(seconds), spec


@pytest.mark.parametrize("spec", ["none", next(iter(FREE))])
def test_who_shares_cores_has_kernels_and_the_network_stack_take_longer(spec: str) -> None:
    """Alike: were it kernels alone, dense blocks would look the better the busier the cores are."""
    profile = plain([MILLION], [0.0], codecs=FREE, round_seconds=0.2)
    alone, shared = (Live(msgspec.structs.replace(profile, busy=b)).cpu([BlockOption(spec)]) for b in (1.0, 3.0))
    assert alone > 0.2 and shared - 0.2 == pytest.approx(3.0 * (alone - 0.2)), "a turn's seconds are of the running job"


@pytest.mark.parametrize("nodes", [2, 3])
def test_what_is_added_in_both_exchanges_costs_cpu_time_in_both(nodes: int) -> None:
    """Half of a contribution in each, of every node, at the owner."""
    (spec, cost), found = next(iter(RANK.items())), []
    for codec in (cost, msgspec.structs.replace(cost, decode_add=flat(0.0))):
        profile = plain([MILLION], [0.0], nodes=nodes, codecs={spec: codec})
        found.append(Live(msgspec.structs.replace(profile, whole=True)).cpu([BlockOption(spec)]))
    assert found[0] - found[1] == pytest.approx(cost.decode_add(MILLION))


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_is_what_the_plain_timeline_says(seed: int) -> None:
    """Two nodes, blocks of every scheme on two lanes, random prices: the same to rounding."""
    rng = np.random.default_rng(seed)
    codecs = {
        spec: CodecCost(*(flat(float(rng.uniform(0, 0.2))) for _ in range(3)), 0.1)
        for spec in ("none", "powersgd(rank=4)", SPEC)
    }
    count = int(rng.integers(1, 9))
    ready = np.cumsum(rng.uniform(0, 0.4, count)).tolist()
    profile = plain(
        rng.integers(20_000, MILLION, count).tolist(), ready, owners=rng.integers(0, 2, count).tolist(), lanes=2,
        latency=float(rng.uniform(0, 0.1)), codecs=codecs, copy=float(rng.uniform(1e7, 1e8)),
        round_seconds=float(rng.uniform(0, 0.1)), whole=True,
    )  # fmt: skip
    # tensors by themselves, or all that come in two portions
    cut = int(rng.integers(0, count + 1))
    brought = (tuple(range(cut)), tuple(range(cut, count)))
    live = Live(profile, tuple((i,) for i in range(count)) if seed % 2 else tuple(filter(None, brought)))
    made = (BlockOption(), BlockOption("none", ALL), BlockOption(SPEC), BlockOption(SPEC, ALL))
    given = (*made, BlockOption("powersgd(rank=4)", nbytes=float(rng.uniform(1e4, 1e6))))
    options = [given[int(rng.integers(len(given)))] for _ in live.blocks]
    options[0] = given[-1]
    end, _ = live.run(live.table([options]), np.zeros(count, np.int64))
    assert end == pytest.approx(max(live_oracle.step(live, options), ready[-1]), rel=1e-9)


def test_a_block_waits_for_the_last_of_its_tensors_and_computing_hides_it() -> None:
    profile = plain([MILLION, MILLION], [0.0, 5.0], owners=[0, 1], forward=1.0)
    singly = Live(profile, ((0,), (1,)))
    together = Live(profile, ((0, 1),))
    assert singly.seconds([BlockOption()] * 2) == pytest.approx(1 + 5 + 2)
    _, spans = singly.run(singly.table([[BlockOption()] * 2]), np.zeros(2, np.int64))
    assert spans.ravel().tolist() == pytest.approx([0, 2, 5, 7], abs=1e-6)
    _, spans = together.run(together.table([[BlockOption()] * 2]), np.zeros(2, np.int64))
    assert spans[:, 0].tolist() == pytest.approx([5, 5])


def test_copies_and_turns() -> None:
    """A copy in of a second, half a turn, a trip, half a turn, a copy out."""
    profile = plain([MILLION], [0.0], bandwidth=1e15, copy=4e6, round_seconds=0.25)
    assert Live(profile).seconds([BlockOption("none", ALL)]) == pytest.approx(1 + 0.125 + 0.125 + 1)


def test_local_ranks_are_summed_first() -> None:
    profile = plain([MILLION], [0.0], bandwidth=1e15, codecs={"none": CodecCost(flat(9.0), flat(0.0), flat(1.0), 1.0)})
    three = msgspec.structs.replace(profile, local_ranks=3)
    assert Live(three).seconds([BlockOption()]) - Live(profile).seconds([BlockOption()]) == pytest.approx(2.0)


def test_connections_share_a_link_in_turns() -> None:
    """Node 0 sends 40 MB to each of two owners: both arrive within a turn of one another, not one after the other."""
    profile = plain([10 * MILLION] * 2, [0.0] * 2, nodes=3, owners=[1, 2], bandwidth=4e7)
    step = Live(profile).step([BlockOption()] * 2)
    sent = [j for j in step.jobs if j.what == "send" and j.node == 0]
    assert [round(j.end, 1) for j in sent] == [2.0, 2.0]
    assert all(j.start < 0.1 for j in sent)
    # node 0 sends and takes 80 MB; nodes 1 and 2 exchange their own blocks with less
    assert step.seconds == pytest.approx(4.0, rel=0.03)


def test_messages_of_one_connection_keep_their_order() -> None:
    profile = plain([MILLION] * 3, [0.0] * 3, owners=[1, 1, 1])
    step = Live(profile, ((0, 1, 2),)).step([BlockOption()] * 3)
    sent = [j for j in step.jobs if j.what == "send" and j.node == 0]
    assert [(j.index, round(j.start, 3), round(j.end, 3)) for j in sent] == [(2, 0, 1), (1, 1, 2), (0, 2, 3)]


def test_bytes_sent() -> None:
    profile = plain([MILLION], [0.0], nodes=4, codecs=FREE)
    live, spec = Live(profile), next(iter(FREE))
    assert live.sent(0, BlockOption()) == pytest.approx(4e6 * 2 * 3 / 4)
    assert live.sent(0, BlockOption("none", ALL)) == pytest.approx(4e6 * 3)
    assert live.sent(0, BlockOption(spec)) == pytest.approx((4 + 8 * 12_500) * 1.5)
    assert live.step([BlockOption(spec)]).bytes == pytest.approx((4 + 8 * 12_500) * 1.5)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 32])
def test_more_bandwidth_is_never_slower(nodes: int) -> None:
    base = gpt(nodes)
    for spec in ("none", "fp16", "sidco-e(ratio=0.01)"):
        for scheme in (OWNER, ALL):
            steps = []
            for bandwidth in np.geomspace(1e6, 1e11, 26):
                link = msgspec.structs.replace(base.link, bandwidth=float(bandwidth))
                live = Live(msgspec.structs.replace(base, link=link))
                steps.append(live.seconds([BlockOption(spec, scheme)] * len(live.blocks)))
            # a list schedule may lose a little when an arrival overtakes another
            slack = 1.01 if scheme == OWNER else 1.05
            assert all(b <= a * slack for a, b in pairwise(steps)), (spec, scheme)
            assert min(steps) >= base.compute


def test_the_mean_node_of_many_is_like_the_nodes_of_few() -> None:
    """Eight nodes one by one, and nine by one that stands for all: the same model within a few per cent."""
    for spec in ("none", "qsgd(bits=8)"):
        few, many = Live(gpt(8)), Live(gpt(9))
        a, b = (live.seconds([BlockOption(spec)] * len(live.blocks)) for live in (few, many))
        assert b == pytest.approx(a * (8 / 9) / (7 / 8), rel=0.25)
    assert (few.nodes, many.nodes) == (8, 1)
    assert Live(plain([MILLION] * 65, [0.0] * 65, nodes=8)).nodes == 1


def test_everything_that_happens_is_reported() -> None:
    profile = gpt(4)
    options = [BlockOption("sidco-e(ratio=0.01)", (OWNER, ALL)[i % 2]) for i in range(len(Live(profile).blocks))]
    step = Live(profile).step(options)
    assert step.seconds == Live(profile).seconds(options) == max(job.end for job in step.jobs)
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for job in step.jobs:
        assert job.end >= job.start >= 0
        if job.what not in ("forward", "compute"):
            lanes[job.node, job.resource].append((job.start, job.end))
    assert {resource for _, resource in lanes} == {"worker", "link out", "link in", "lane 0"}
    for (_, resource), spans in lanes.items():
        ordered = sorted(spans)
        # messages to several nodes share a link
        if not resource.startswith("link"):
            assert all(b[0] >= a[1] - 1e-12 for a, b in pairwise(ordered))
    assert {j.what for j in step.jobs} == {
        "forward", "compute", "copy in", "encode", "send", "receive", "add", "finish", "decode", "copy out",
    }  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(step), type=LiveStep) == step


def test_casts_and_matrices_where_they_cannot_be() -> None:
    live = Live(gpt())
    assert "matrices" in live.usable(0, "powersgd(rank=4)")
    assert live.settled(0, BlockOption("powersgd(rank=4)")).spec == "none"
    assert not Live(gpt(whole=True)).usable(0, "powersgd(rank=4)")
    half = msgspec.structs.replace(gpt(), blocks=())
    half = msgspec.structs.replace(
        half, tensors=tuple(msgspec.structs.replace(t, dtype="bfloat16") for t in half.tensors)
    )
    assert "bfloat16" in Live(half).usable(0, "fp16")
    assert not Live(half).usable(0, "topk(ratio=0.01)")
    tiny = msgspec.structs.replace(gpt(), min_compress_bytes=1 << 40)
    assert "min_compress_bytes" in Live(tiny).usable(0, "topk(ratio=0.01)")


def test_what_is_not_known_is_refused() -> None:
    profile = gpt()
    with pytest.raises(ProfileError, match=r"natural.*measured: bf16"):
        cost_of(profile, "natural")
    with pytest.raises(ProfileError, match="an option for each of"):
        Live(profile).step([BlockOption()])
    with pytest.raises(ProfileError, match="above 0"):
        Live(msgspec.structs.replace(profile, copy=0.0))


@pytest.mark.parametrize(
    "written", ["topk(ratio=0.010)+ef", "topk(ratio=0.01)", "qsgd(bits=8,bucket=1024,kind=maxmin)"]
)
def test_a_cost_is_found_however_the_spec_is_written(written: str) -> None:
    assert cost_of(gpt(), written) in costs().values()


def test_a_rank_that_nobody_measured_costs_what_its_family_does() -> None:
    """Levels of a plan raise the rank that its rules name, not what tensors have on average."""
    known = ("powersgd(rank=4)", "powersgd(rank=8)", "powersgd(rank=16,values=16)")
    each = {spec: msgspec.structs.replace(costs()["powersgd(rank=4)"], ratio=i + 1.0) for i, spec in enumerate(known)}
    profile = msgspec.structs.replace(gpt(), codecs=costs() | each)
    for spec, measured in (
        ("powersgd(rank=6)", 1), ("powersgd(rank=10)", 1), ("powersgd(rank=2)", 0),
        ("powersgd(rank=28,values=16)", 2), ("powersgd(rank=8,values=16)+ef", 2),
    ):  # fmt: skip
        assert cost_of(profile, spec).ratio == measured + 1.0
    alone = msgspec.structs.replace(profile, codecs={known[2]: each[known[2]]})
    assert cost_of(alone, "powersgd(rank=4)") == each[known[2]]


def test_dense_costs_are_a_copy_where_nobody_measured() -> None:
    profile = msgspec.structs.replace(gpt(), codecs={})
    assert cost_of(profile, "none").decode(MILLION) == pytest.approx(4e6 / profile.copy)


def test_a_timeline_is_the_same_every_time() -> None:
    live = Live(gpt(4, GBIT1))
    options = [BlockOption("sidco-e(ratio=0.01)")] * len(live.blocks)
    table, plan = live.table([options]), np.zeros(len(live.blocks), np.int64)
    assert len({live.run(table, plan)[0] for _ in range(20)}) == 1
