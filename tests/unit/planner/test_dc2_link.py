"""Seeded rate profiles, an exchange by hand, runs that repeat."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gcserver.planner.dc2 import Controller
from gcserver.planner.dc2_link import RateProfile, Workload, all_gather, play
from gcserver.planner.dc2_monitor import Dc2Error


def test_a_profile_is_its_seed() -> None:
    profile = RateProfile(7, 1000.0, length=10.0)
    assert (
        profile.rates(500) == RateProfile(7, 1000.0, length=10.0).rates(500) != RateProfile(8, 1000.0, 10.0).rates(500)
    )
    assert profile.rates(100) == profile.rates(500)[:10] and len(profile.rates(101)) == 11


def test_every_phase_is_another_level() -> None:
    rates = RateProfile(1, 1000.0, length=1.0).rates(400)
    assert set(rates) == {1000.0, 500.0, 200.0, 100.0}
    assert all(a != b for a, b in pairwise(rates))
    assert set(RateProfile(1, 1000.0, levels=(0.5,)).rates(1000)) == {500.0}


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"length": -1.0}, {"levels": ()}, {"levels": (1.0, 0.0)}])
def test_a_profile_needs_rates(bad: dict[str, float]) -> None:
    with pytest.raises(Dc2Error, match="greater than 0"):
        RateProfile(**{"seed": 1, "rate": 1.0, **bad})  # type: ignore[arg-type]


def test_an_exchange_waits_for_the_slowest_sender_and_for_ones_own_link() -> None:
    # node 0 sends 2 x 10 bytes by 4, node 1 starts at 2 and sends by 4, node 2's slow link sends by 20
    exchange = all_gather([10, 10, 10], [0.0, 2.0, 0.0], [5.0, 10.0, 1.0], latency=0.5)
    assert exchange.skew == (2.0, 0.0, 2.0)
    # node 2 cannot take in 20 bytes before 2 + 20
    assert exchange.delay == pytest.approx((20.5, 18.5, 22.5))


def test_a_run_repeats_and_a_slow_worker_adds_no_delay() -> None:
    links = [RateProfile(1, 1e8)] * 3
    runs = [play([Controller("DA5") for _ in links], links, 150, Workload(), seed) for seed in (4, 4, 5)]
    assert (runs[0].ratios == runs[1].ratios).all() and runs[0].seconds == runs[1].seconds != runs[2].seconds
    fixed = play([0.1] * 3, links, 150, Workload(skew=5.0, noise=0.0), 4)
    phase = 2 * Workload().payload(0.1) / fixed.rates + Workload().latency
    # never more than the exchange itself: those who start early hide a part of it behind the wait
    assert (fixed.delays <= phase + 1e-9).all() and (fixed.delays > 0).all()
    assert fixed.rates.shape == fixed.ratios.shape == fixed.delays.shape == (150, 3) and (fixed.ratios == 0.1).all()


def test_nodes_with_links_of_their_own_come_to_ratios_of_their_own() -> None:
    links = [RateProfile(seed, 1e8) for seed in range(3)]
    played = play([Controller("DA5") for _ in links], links, 300, Workload(), 0)
    assert np.ptp(played.ratios[-1]) > 0.0


def test_every_node_has_a_link() -> None:
    with pytest.raises(Dc2Error, match="each of 2 nodes needs a profile, got 1"):
        play([0.1, 0.1], [RateProfile(1, 1.0)], 1, Workload(), 0)
