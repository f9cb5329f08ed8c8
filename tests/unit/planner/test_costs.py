"""Links, collectives, curves and payloads: the alpha-beta forms and what is refused."""

from __future__ import annotations

import pytest

from gcserver.planner.costs import (
    WIRE,
    Cluster,
    CodecCosts,
    CostError,
    Link,
    RisingCurve,
    clusters,
    codec_costs,
    cores,
    line,
    shape,
)
from gcserver.planner.options import Device, Routine


@pytest.mark.parametrize(
    ("routine", "steps", "volume"),
    [
        (Routine.ALLREDUCE, 14, 2 * 7 / 8),
        (Routine.REDUCE_SCATTER, 7, 7 / 8),
        (Routine.ALLTOALL, 7, 7 / 8),
        (Routine.ALLGATHER, 7, 7),
        (Routine.GATHER, 7, 7),
        (Routine.REDUCE, 3, 1),
        (Routine.BROADCAST, 3, 1),
    ],
)
def test_collectives_among_eight(routine: Routine, steps: int, volume: float) -> None:
    assert shape(routine, 8) == (steps, pytest.approx(volume))
    assert shape(routine, 1) == (0, 0.0)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6)])
def test_trees_take_the_logarithm_rounded_up(ranks: int, steps: int) -> None:
    assert shape(Routine.BROADCAST, ranks)[0] == steps


def test_reduce_scatter_and_allgather_are_an_allreduce() -> None:
    """The second step holds a share of what the first held."""
    p = 6
    (s1, v1), (s2, v2), whole = (shape(r, p) for r in (Routine.REDUCE_SCATTER, Routine.ALLGATHER, Routine.ALLREDUCE))
    assert (s1 + s2, v1 + v2 / p) == (whole[0], pytest.approx(whole[1]))


def test_a_curve_is_linear_between_its_points() -> None:
    curve = RisingCurve(((100, 1.0), (200, 3.0), (400, 4.0)))
    assert [curve(x) for x in (0, 100, 150, 200, 300, 400, 600)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert RisingCurve(((5, 2.0),))(10**9) == 2.0
    assert line(1.0, 0.5)(8) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "points", [(), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((0, -1.0),), ((0, 2.0), (1, 1.0)), ((0, float("nan")),)]
)
def test_what_is_no_curve(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(CostError, match="curve"):
        RisingCurve(points)


def test_what_is_no_link_and_no_cluster() -> None:
    with pytest.raises(CostError, match="expected >= 0 and > 0"):
        Link(1e-6, 0)
    with pytest.raises(CostError, match="0 nodes of 8"):
        Cluster("none", 0, 8, Link(0, 1), Link(0, 1))
    link = Link.gbit(15, 100)
    assert (link.latency, link.bandwidth) == (pytest.approx(15e-6), 12.5e9)


def test_payloads() -> None:
    codec = CodecCosts("sparse", 0.08, 8.0, 4.0, None, None)
    assert codec.wire(1000) == 84.0 and codec.wire(1) == 12.0


def test_a_device_without_figures_is_named() -> None:
    cpu_only = codec_costs("dgc", clusters(2)[2])
    assert cpu_only.on(Device.CPU).encode(1 << 20) > 0
    with pytest.raises(CostError, match="dgc has no figures for GPU"):
        cpu_only.on(Device.GPU)
    with pytest.raises(CostError, match="expected one of"):
        codec_costs("zip", clusters(2)[0])


@pytest.mark.parametrize("codec", sorted(WIRE))
def test_free_codecs_send_the_same_bytes(codec: str) -> None:
    costs = codec_costs(codec, clusters(8)[0])
    free = costs.free()
    assert free.wire(12345) == costs.wire(12345)
    assert free.on(Device.GPU).encode(1e9) == free.on(Device.CPU).decode(1e9) == 0.0


def test_copies_bound_many_cores() -> None:
    """Sixteen cores compress faster than memory moves: the copies decide, and fewer cores cannot be faster."""
    many, one = cores("dgc", 16, copy=10e9), cores("dgc", 1)
    assert many.encode(1e9) == pytest.approx(0.4, rel=1e-3) and one.encode(1e9) > many.encode(1e9)
