"""Latency and bandwidth from frames and heartbeats.

What may live here: tests of `gcserver/runtime/linkfit.py`. What may not: sockets.
"""

from __future__ import annotations

from itertools import count

import pytest

from gcserver.planner.profile import LinkCost
from gcserver.runtime.linkfit import (
    HELD,
    KEPT,
    LARGE,
    MOST,
    Arrival,
    Arrivals,
    LinkFit,
    Probed,
    Train,
    Trains,
    fit,
    rate,
)

MIB = 1 << 20
GUESS = LinkCost(1e-4, 1e9)


class Link:
    """Frames that follow one another at ``speed`` bytes a second into a `Trains`."""

    def __init__(self, speed: float) -> None:
        self.speed, self.now, self.trains = speed, 100.0, Trains()

    def burst(self, sizes: list[int], peers: int = 1, prompt: bool = True, lane: int = 0) -> None:
        for i, nbytes in enumerate(sizes):
            self.now += nbytes / self.speed
            self.trains.on_arrival(lane, Arrival(self.now, i % peers, nbytes, prompt))

    def estimate(self) -> float:
        return fit([], self.trains.kept, GUESS).bandwidth


def test_only_large_frames_are_told_and_small_ones_ride_with_them() -> None:
    arrivals = Arrivals()
    arrivals.on_frame(1, 100, 1.0, True)
    arrivals.on_frame(1, LARGE, 2.0, False)
    arrivals.on_frame(2, LARGE, 3.0, True)
    assert arrivals.take() == (Arrival(2.0, 1, LARGE + 100, False), Arrival(3.0, 2, LARGE, True))
    assert arrivals.take() == ()


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    arrivals = Arrivals()
    for _ in range(MOST + 5):
        arrivals.on_frame(1, LARGE, 1.0, True)
    assert len(arrivals.take()) == MOST


def test_bursts_with_pauses_between_them_give_the_rate_of_the_bursts() -> None:
    link = Link(12.5e6)
    for _ in range(20):
        link.burst([4 * MIB] * 8)
        link.now += 3.0
    assert link.estimate() == pytest.approx(12.5e6, rel=0.01)


def test_a_frame_that_was_seen_late_counts_with_the_next_prompt_one() -> None:
    link = Link(1e8)
    for _ in range(5):
        link.burst([2 * MIB] * 3)
        # two frames arrive while a kernel runs, and are found together when it is done
        for behind in (0.04, 0.0):
            link.now += 2 * MIB / link.speed
            link.trains.on_arrival(0, Arrival(link.now + behind, 0, 2 * MIB, False))
        link.burst([2 * MIB] * 4)
        link.now += 1.0
    assert link.estimate() == pytest.approx(1e8, rel=0.02)


def test_peers_and_lanes_share_the_card() -> None:
    link = Link(1e8)
    for _ in range(10):
        # all four streams begin together, so their first frames end together
        link.now += 4 * 4 * MIB / link.speed
        for stream in range(4):
            link.trains.on_arrival(stream % 2, Arrival(link.now + stream * 1e-3, stream, 4 * MIB, True))
        for k in range(24):
            link.now += 4 * MIB / link.speed
            link.trains.on_arrival(k % 2, Arrival(link.now, k % 4, 4 * MIB, True))
        link.now += 2.0
    assert link.estimate() == pytest.approx(1e8, rel=0.05)


def test_small_payloads_between_pauses_leave_the_estimate_alone() -> None:
    link = Link(1.25e8)
    for _ in range(5):
        link.burst([8 * MIB] * 8)
        link.now += 0.5
    before = link.estimate()
    pauses = [0.004, 0.011, 0.007, 0.02, 0.005, 0.013]
    for i in range(500):
        link.burst([160 << 10])
        link.now += pauses[i % 6]
    assert link.estimate() == before


@pytest.mark.parametrize("frames", [[600 << 10], [300 << 10, 500 << 10, 400 << 10]])
def test_steps_of_one_length_with_compressed_payloads_leave_the_estimate_alone(frames: list[int]) -> None:
    link = Link(1.25e8)
    for _ in range(5):
        link.burst([8 * MIB] * 8)
        link.now += 0.5
    before = link.estimate()
    for _ in range(300):
        link.burst(frames)
        link.now += 0.35
    assert link.estimate() == before


def test_a_link_that_became_slower_is_noticed() -> None:
    link = Link(1.25e8)
    for _ in range(5):
        link.burst([8 * MIB] * 8)
        link.now += 0.5
    link.speed = 2.5e7
    for _ in range(4):
        link.burst([8 * MIB] * 8)
        link.now += 0.5
    assert link.estimate() == pytest.approx(2.5e7, rel=0.02)


def test_a_link_that_became_faster_is_noticed() -> None:
    link = Link(1.25e7)
    for speed in (1.25e7, 1.25e8):
        link.speed = speed
        for _ in range(KEPT):
            link.burst([8 * MIB] * 8)
            link.now += 0.5
    assert link.estimate() == pytest.approx(1.25e8, rel=0.02)


def test_trains_that_differ_are_a_lower_bound_only() -> None:
    rates = [1e7, 2e7, 4e7, 8e7]
    trains = [Train(float(i), i + 1e7 / r, 10_000_000) for i, r in enumerate(rates)]
    cost = fit([], trains, GUESS)
    assert cost.bandwidth == GUESS.bandwidth
    assert cost.samples == 0 and cost.noise > 0.2
    assert fit([], trains, LinkCost(0.0, 1e6)).bandwidth == 4e7


@pytest.mark.parametrize(
    ("nbytes", "speed", "differ", "known"),
    [
        (40_000_000, 12e6, 0.5, True),  # four nodes with dense gradients at 100 Mbit/s
        (40_000_000, 12e6, 0.9, False),  # some of these had pauses, or were no link's at all
        (10_000_000, 3e6, 0.5, False),  # bursts of a slow worker, as long
        (40_000_000, 120e6, 0.5, False),  # so quick that kernels may have paced them
        (40_000_000, 120e6, 0.1, True),
    ],
)
def test_long_trains_that_take_seconds_may_differ_more(nbytes: int, speed: float, differ: float, known: bool) -> None:
    rates = [speed * (1 - differ * k / 4) for k in range(5)]
    trains = [Train(100.0 * i, 100.0 * i + nbytes / r, nbytes) for i, r in enumerate(rates)]
    cost = fit([], trains, GUESS)
    assert cost.samples == (5 if known else 0)
    assert cost.bandwidth == (pytest.approx(rates[1]) if known else GUESS.bandwidth)


def test_payloads_compressed_from_the_first_step_on_measure_nothing() -> None:
    link = Link(1.25e9)
    for _ in range(300):
        for _ in range(4):
            link.burst([94 << 10])
            link.now += 0.01
        link.now += 0.06
    found = fit([], link.trains.kept, GUESS)
    assert len(link.trains.kept) == 1, "with the pauses in it, of which nothing was known yet"
    assert (found.bandwidth, found.samples) == (GUESS.bandwidth, 0)


def test_what_was_known_counts_until_something_better_is() -> None:
    link, wrong, right = LinkFit(), LinkCost(1e-4, 4.6e6, 0.01, 12), LinkCost(1e-4, 9e8, 0.01, 50)
    assert link.news(wrong, GUESS) is None
    link._trains.kept.extend(Train(float(i), i + 1e7 / r, 10_000_000) for i, r in enumerate((1e7, 2e7, 4e7, 8e7)))
    assert link.news(right, GUESS) is None, "a lower bound says nothing against more"
    assert link.news(LinkCost(1e-4, 3.5e7, 0.01, 12), GUESS) is None, "a burst, of 4e7"
    found = link.news(wrong, GUESS)
    assert found is not None and (found.bandwidth, found.samples) == (GUESS.bandwidth, 0)
    link._trains.kept.clear()
    link._trains.kept.extend(Train(float(i), i + 0.1, 10_000_000) for i in range(5))
    assert link.news(right, GUESS) == LinkCost(1e-4, pytest.approx(1e8), 0.0, 5), "it became slower"


def test_trains_count_by_their_bytes() -> None:
    assert rate([Train(0.0, 1.0, 100), Train(2.0, 2.5, 1), Train(4.0, 4.01, 1)]) == 100.0


def test_without_traffic_there_is_the_guess_and_heartbeats_give_the_latency() -> None:
    link = LinkFit()
    assert link.cost(GUESS) == LinkCost(1e-4, 1e9, 0.0, 0)
    for trip in (4e-3, 2e-3, 9e-3):
        link.on_trip("b", trip)
    link.on_trip("c", 6e-3)
    assert link.cost(GUESS).latency == 3e-3
    assert link.cost(GUESS, ["b"]).latency == 1e-3, "whoever is in no such job has no say"
    assert link.cost(GUESS, ["d"]).latency == GUESS.latency


def test_lanes_are_put_in_order_before_they_count() -> None:
    def tell(link: LinkFit, apart: bool) -> LinkCost:
        times = count(1)
        found = [Arrival(2.0 + 0.08 * next(times), k % 2, 8 * MIB, True) for k in range(40)]
        if apart:
            link.on_arrivals(1, found[1::2], 4.3)
            link.on_arrivals(0, found[0::2], 4.4)
            link.on_arrivals(0, [], 6.0 + HELD)
        else:
            for i, arrival in enumerate(found):
                link.on_arrivals(i % 2, [arrival], arrival.at)
            link.on_arrivals(0, [], 6.0 + HELD)
        return link.cost(GUESS)

    apart = tell(LinkFit(), True)
    assert apart == tell(LinkFit(), False)
    assert apart.samples > 0
    assert apart.bandwidth == pytest.approx(8 * MIB / 0.08, rel=0.01)


def trains(link: LinkFit, start: float, speed: float, count: int = 4) -> float:
    """So many trains from ``start`` on; when they have ended."""
    now = start
    for _ in range(count):
        frames = []
        for _ in range(8):
            now += 4 * MIB / speed
            frames.append(Arrival(now, 1, 4 * MIB, True))
        now += 10.0
        link.on_arrivals(0, frames, now + HELD)
    link.on_arrivals(0, (), now + 2 * HELD)
    return now


def test_probes_count_once_frames_are_silent_and_until_trains_are_newer() -> None:
    link, known = LinkFit(), LinkCost(1e-4, 1e9, 0.0, 20)
    assert link.silent(0.0, 60.0)
    end = trains(link, 100.0, 1e9)
    assert not link.silent(end, 60.0) and link.silent(end + 71.0, 60.0)
    at = end + 100.0
    link.on_probes({"b": Probed(at, 2e7, 0.01, 3, True)}, ["b"])
    found = link.news(known, GUESS)
    assert found == LinkCost(GUESS.latency, 2e7, 0.01, 3)
    trains(link, at + 10, 2.5e7, count=1)
    assert link.news(known, GUESS) == found, "one train after the change is no measurement yet"
    trains(link, at + 100, 2.5e7)
    newest = link.news(known, GUESS)
    assert newest is not None and newest.bandwidth == pytest.approx(2.5e7, rel=0.05)


def test_probes_that_were_over_too_soon_count_only_where_they_beat_what_is_known() -> None:
    link = LinkFit()
    link.on_probes({"b": Probed(10.0, 5e8, 0.1, 3, False)}, ["b"])
    assert link.news(LinkCost(1e-4, 1e9, 0.0, 20), GUESS) is None
    found = link.news(LinkCost(1e-4, 1e7, 0.0, 20), GUESS)
    assert found is not None and (found.bandwidth, found.samples) == (5e8, 3)


def test_trains_of_the_link_before_do_not_come_back() -> None:
    link = LinkFit()
    end = trains(link, 100.0, 1e9, count=10)
    link.on_probes({"b": Probed(end + 100, 2e7, 0.0, 3, True)}, ["b"])
    trains(link, end + 200, 2e7, count=3)
    found = link.news(LinkCost(1e-4, 2e7, 0.0, 3), GUESS)
    assert found is not None and found.bandwidth == pytest.approx(2e7, rel=0.05)


def test_the_slowest_peer_counts_until_it_is_probed_again_and_for_jobs_that_have_it() -> None:
    """With many peers a round has some of them: the link must not be another one with every round."""
    link, everyone, known = LinkFit(), ["b", "c", "d"], LinkCost(1e-4, 1e9, 0.0, 20)
    link.on_probes({"b": Probed(10.0, 1e8, 0.0, 3, True), "c": Probed(11.0, 1e7, 0.0, 3, True)}, everyone)
    link.on_probes({"d": Probed(20.0, 1e8, 0.0, 3, True)}, everyone)

    def rate(*peers: str) -> float:
        found = link.news(known, GUESS, peers or None)
        assert found is not None
        return found.bandwidth

    assert (rate(), rate(*everyone), rate("b", "d")) == (1e7, 1e7, 1e8)
    link.on_probes({"c": Probed(30.0, 9e7, 0.0, 3, True), "b": Probed(31.0, 1e8, 0.0, 3, True)}, everyone)
    assert rate() == 9e7
    link.on_probes({"d": Probed(40.0, 5e6, 0.0, 3, True)}, everyone)
    link.on_probes({"b": Probed(50.0, 1e8, 0.0, 3, True)}, ["b", "c"])
    assert rate() == 9e7, "nobody is interested in d any more"


def test_a_probe_that_trains_were_newer_than_does_not_come_back_with_another_peers() -> None:
    link, everyone, known = LinkFit(), ["b", "c"], LinkCost(1e-4, 1e8, 0.0, 20)
    link.on_probes({"b": Probed(10.0, 1e7, 0.0, 3, True)}, everyone)
    end = trains(link, 100.0, 1e8)
    link.on_probes({"c": Probed(end + 50.0, 1e8, 0.0, 3, True)}, everyone)
    for peers in (None, ["b", "c"], ["b"]):
        found = link.news(known, GUESS, peers)
        assert found is not None and found.bandwidth == pytest.approx(1e8, rel=0.05)


# ------------------------------------------------------------------------------ slower, or something that waits
KNOWN = LinkCost(1e-4, 1.2e8, 0.01, KEPT)


def doubting() -> tuple[LinkFit, float]:
    """A link of 120 MB/s; steps of one length that send 2.5 MiB each make it look like one of 6 MB/s; until when."""
    link = LinkFit(probes=True)
    end = trains(link, 100.0, KNOWN.bandwidth, count=KEPT)
    assert link.news(KNOWN, GUESS) is not None
    for _ in range(20):
        end += 0.4
        link.on_arrivals(0, [Arrival(end, 1, 5 * MIB // 2, True)], end + HELD)
    link.on_arrivals(0, (), end + 2 * HELD)
    assert link.cost(GUESS).bandwidth == pytest.approx(6.5e6, rel=0.02) and link.cost(GUESS).samples >= 12
    return link, end


def test_a_slower_link_is_known_only_when_a_probe_says_so() -> None:
    link, end = doubting()
    assert not link.in_doubt and link.news(KNOWN, GUESS) is None and link.in_doubt
    link.on_probes({"b": Probed(end + 5.0, 6.4e6, 0.1, 3, True)}, ["b"])
    assert not link.in_doubt
    found = link.news(KNOWN, GUESS)
    assert found is not None and found.bandwidth == 6.4e6
    trains(link, end + 10.0, 6.5e6)
    found = link.news(found, GUESS)
    assert found is not None and found.bandwidth == pytest.approx(6.5e6, rel=0.02) and not link.in_doubt


def test_a_probe_that_one_job_asked_for_counts_for_another_that_comes_late() -> None:
    link, end = doubting()
    assert link.news(KNOWN, GUESS) is None
    link.on_probes({"b": Probed(end + 5.0, 6.4e6, 0.1, 3, True)}, ["b"])
    assert link.news(KNOWN, GUESS) is not None
    trains(link, end + 10.0, 6.5e6)
    late = link.news(KNOWN, GUESS)
    assert late is not None and late.bandwidth == pytest.approx(6.5e6, rel=0.02) and not link.in_doubt


def test_an_old_probe_of_a_link_that_recovered_confirms_nothing() -> None:
    link = LinkFit(probes=True)
    link.on_probes({"b": Probed(10.0, 6.4e6, 0.1, 3, True)}, ["b"])
    end = trains(link, 100.0, KNOWN.bandwidth, count=KEPT)
    fast = link.news(LinkCost(1e-4, 6.4e6, 0.0, 3), GUESS)
    assert fast is not None and fast.bandwidth == pytest.approx(KNOWN.bandwidth, rel=0.05)
    trains(link, end + 3600.0, 6.5e6, count=KEPT)
    assert link.news(fast, GUESS) is None and link.in_doubt, "busy cores look like that, too"


@pytest.mark.parametrize("exact", [True, False])
def test_what_a_probe_refutes_is_forgotten_and_doubted_anew(exact: bool) -> None:
    link, end = doubting()
    assert link.news(KNOWN, GUESS) is None
    link.on_probes({"b": Probed(end + 5.0, 1.1e8, 0.1, 3, exact)}, ["b"])
    found = link.news(KNOWN, GUESS)
    assert (found.bandwidth if found is not None else 0.0) == (1.1e8 if exact else 0.0)
    trains(link, end + 10.0, 6.5e6)
    assert not link.in_doubt and link.news(found or KNOWN, GUESS) is None and link.in_doubt


def test_a_probe_too_short_for_the_link_that_refutes_nothing_lets_trains_count() -> None:
    link, end = doubting()
    assert link.news(KNOWN, GUESS) is None
    link.on_probes({"b": Probed(end + 5.0, 5e6, 0.1, 3, False)}, ["b"])
    assert link.news(KNOWN, GUESS) is None and not link.in_doubt
    trains(link, end + 10.0, 6.5e6)
    found = link.news(KNOWN, GUESS)
    assert found is not None and found.bandwidth == pytest.approx(6.5e6, rel=0.02)


def test_a_link_does_not_become_slower_bit_by_bit() -> None:
    link, known, now = LinkFit(probes=True), KNOWN, 100.0
    for speed in (1.2e8, 1.1e8, 1.02e8):
        now = trains(link, now + 100.0, speed, count=KEPT)
        known = link.news(known, GUESS) or known
        assert known.bandwidth == pytest.approx(speed, rel=0.05)
    trains(link, now + 100.0, 0.95e8, count=KEPT)
    assert link.news(known, GUESS) is None and link.in_doubt


def test_trains_of_the_link_as_it_was_end_the_doubt() -> None:
    link, end = doubting()
    assert link.news(KNOWN, GUESS) is None and link.in_doubt
    trains(link, end + 100.0, KNOWN.bandwidth, count=KEPT)
    assert link.news(KNOWN, GUESS) is not None and not link.in_doubt


def test_without_probes_trains_have_the_last_word() -> None:
    link = LinkFit()
    trains(link, 100.0, 6.5e6)
    found = link.news(KNOWN, GUESS)
    assert found is not None and found.bandwidth == pytest.approx(6.5e6, rel=0.02) and not link.in_doubt
