"""When links are probed, with how much, and what probes come to.

What may live here: tests of `gcserver/runtime/linkprobe.py` over a link that is simulated. What may not: sockets.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcserver.core.control_events import ProbeLink
from gcserver.core.probe import PROBE_PATIENCE, Probe
from gcserver.planner.standing import Standing
from gcserver.runtime.linkfit import Probed
from gcserver.runtime.linkprobe import LARGEST, MOST, PEERS, QUIET, SOONER, TIMES, LinkProbes, Prober, padding

TICK = 0.5
EVERY = 120.0


class Network:
    """Peers by the bytes a second that reach them; ``usual``: a plain heartbeat's round trip, s."""

    def __init__(self, usual: float = 5e-4, **rates: float) -> None:
        self.rates, self.usual, self.now = rates, usual, 0.0
        self.prober = Prober(EVERY)
        self.asked: list[tuple[float, str, int]] = []
        self.found: list[Probed] = []
        #: seconds that other traffic or slow processes add to each probe, in turn
        self.late: list[float] = []

    def run(self, seconds: float, sooner: bool = False, answered: bool = True) -> None:
        until = self.now + seconds
        while self.now < until:
            asked = self.prober.ask(self.now, list(self.rates), sooner)
            if asked is not None:
                self.asked.append((self.now, *asked))
                if answered:
                    self.echo(*asked)
            self.now += TICK

    def echo(self, peer: str, nbytes: int) -> None:
        trip = self.usual + nbytes / self.rates[peer] + (self.late.pop(0) if self.late else 0.0)
        found = self.prober.on_echo(peer, nbytes, trip, self.usual, self.now + trip)
        if found is not None:
            assert set(found) <= set(self.prober.peers) == set(self.rates)
            self.found.append(min(found.values(), key=lambda probed: probed.rate))

    @property
    def busy(self) -> float:
        """Seconds that the probes held the link."""
        return sum(nbytes / self.rates[peer] for _, peer, nbytes in self.asked)


@pytest.mark.parametrize("rate", [1.2e6, 1.2e7, 1.2e8])
def test_a_link_is_measured_as_it_is(rate: float) -> None:
    network = Network(b=rate)
    network.run(EVERY)
    (found,) = network.found
    assert found.exact and found.samples == TIMES and found.rate == pytest.approx(rate, rel=1e-3)
    assert found.noise == pytest.approx(0.0, abs=1e-3)


def test_a_fast_link_is_known_to_be_at_least_that_fast() -> None:
    network = Network(b=1.2e9)
    network.run(EVERY)
    (found,) = network.found
    assert not found.exact and 0.5 * 1.2e9 < found.rate <= 1.2e9
    assert max(nbytes for _, _, nbytes in network.asked) == LARGEST


def test_a_long_way_is_not_taken_for_a_slow_link() -> None:
    network = Network(usual=0.08, b=1.2e8)
    network.run(EVERY)
    (found,) = network.found
    assert not found.exact, "4 MiB are over in half a round trip"


def test_traffic_beside_it_makes_single_probes_slow_not_the_link() -> None:
    network = Network(b=1.2e7)
    network.late = [0.0, 0.3, 0.0, 0.4]  # the first one is too short to count
    network.run(EVERY)
    (found,) = network.found
    assert found.rate == pytest.approx(1.2e7, rel=1e-3) and found.noise > 5 and found.samples > TIMES


def test_there_are_more_probes_while_each_is_faster_and_an_end_of_them() -> None:
    network = Network(b=1.2e7)
    network.late = [0.0, 0.5, 0.4, 0.3, 0.2, 0.1]
    network.run(EVERY)
    assert network.found[0].rate == pytest.approx(1.2e7, rel=1e-3) and network.found[0].samples == 5 + TIMES
    network = Network(b=1.2e7)
    network.late = [0.0, *(100 * 0.9**i for i in range(100))]
    network.run(EVERY)
    assert network.found[0].samples == MOST


def test_a_doubt_does_not_wait_for_its_time_but_for_the_links_share() -> None:
    network = Network(b=1.2e7)
    peers = ["b"]
    assert network.prober.ask(1000.0, peers) is None, "the first frames may tell"
    asked = network.prober.ask(1000.5, peers, doubt=True)
    assert asked is not None
    while asked is not None:
        network.echo(*asked)
        asked = network.prober.ask(1001.0, peers, doubt=True)
    assert network.found and network.prober.ask(1002.0, peers, doubt=True) is None
    assert network.prober.ask(1002.0 + QUIET, peers, doubt=True) is not None


def test_of_several_peers_the_slowest_counts() -> None:
    network = Network(b=1.2e8, c=1.2e7, d=1.2e8)
    network.run(EVERY)
    (found,) = network.found
    assert found.exact and found.rate == pytest.approx(1.2e7, rel=1e-3)


def test_with_many_peers_each_has_its_turn() -> None:
    rates = {f"n{i}": 1.2e8 for i in range(2 * PEERS + 1)}
    network = Network(**rates)
    network.run(4000.0)
    assert {peer for _, peer, _ in network.asked} == set(rates)
    first = {peer for at, peer, _ in network.asked if at < 60.0}
    assert len(first) == PEERS


@pytest.mark.parametrize("sooner", [False, True])
@pytest.mark.parametrize("rate", [1.2e5, 1.2e6, 1.2e7, 1.2e8, 1.2e9])
def test_probes_take_a_thousandth_of_the_link(rate: float, sooner: bool) -> None:
    network = Network(b=rate)
    network.run(100_000.0, sooner)
    rounds = len(network.found)
    assert rounds > 1
    # what one round takes is paid for by the quiet after it
    assert network.busy * (rounds - 1) / rounds <= network.now / QUIET * 1.01


def test_rounds_come_sooner_where_steps_have_changed() -> None:
    calm, hasty = Network(b=1.2e9), Network(b=1.2e9)
    calm.run(3600.0)
    hasty.run(3600.0, sooner=True)
    assert len(calm.found) == pytest.approx(3600 / EVERY, abs=1)
    assert len(hasty.found) == pytest.approx(3600 / max(EVERY / SOONER, QUIET * hasty.busy / len(hasty.found)), rel=0.1)


def test_a_peer_that_does_not_answer_ends_the_round() -> None:
    network = Network(b=1.2e7)
    network.run(PROBE_PATIENCE, answered=False)
    assert len(network.asked) == 1, "one at a time"
    peer, nbytes = network.asked[0][1:]
    network.run(EVERY, answered=False)
    assert network.prober.on_echo(peer, nbytes, 1.0, 0.0, network.now) is None, "too late"
    network.run(PROBE_PATIENCE)
    assert len(network.found) == 1, "a peer that was away for a moment does not leave its link unknown for hours"


def test_a_peer_that_stays_silent_is_probed_less_and_less_often() -> None:
    """What the probes of a link cost that has become so slow that none comes back is little all the same."""
    network = Network(b=1.2e7)
    network.run(40 * EVERY, answered=False)
    begun = [now for now, _, _ in network.asked]
    pauses = [later - now for now, later in itertools.pairwise(begun)]
    assert len(pauses) > 3 and pauses == pytest.approx(
        [PROBE_PATIENCE + EVERY * 2**i for i in range(len(pauses))], abs=2 * TICK
    )
    network.run(QUIET * PROBE_PATIENCE + EVERY)
    assert len(network.found) > 1, "and as usual once it has answered"
    assert network.found[-1].at - network.found[-2].at == pytest.approx(EVERY, abs=5 * TICK)


class Daemon:
    """As much of a supervisor as probes use: one job of two nodes that is planned here."""

    def __init__(self, mode: str = "auto", first: str = "a", settled: int = 50, every: float = EVERY) -> None:
        self.link = SimpleNamespace(probe=None)
        job = SimpleNamespace(id=b"j", node="a", first=first, ended=None, others=("b",))
        self.machine = SimpleNamespace(jobs={b"j": job}, links={wire.node_id("b"): self.link})
        self.peers = SimpleNamespace(addresses={"b": "tcp://b:1"})
        domain = SimpleNamespace(settled=settled, config=SimpleNamespace(domain=16))
        course = SimpleNamespace(standing=Standing(mode, "fast"))
        self.planning = SimpleNamespace(facts=SimpleNamespace(model=lambda job: domain), course=lambda job: course)
        self.profiler = SimpleNamespace(
            departed=lambda job, domain: self.change, knows_link=lambda job, domain: self.known
        )
        self.change, self.known = 0.0, False
        self.config = SimpleNamespace(plan=SimpleNamespace(warmup_steps=10, probe_every=every))
        self.told: list[Probed] = []
        self.quiet = True
        self.lanes = SimpleNamespace(
            link=SimpleNamespace(
                silent=lambda now, seconds: self.quiet,
                trip=lambda peer: 1e-3,
                on_probes=lambda found, peers: self.told.append(found["b"]),
                in_doubt=False,
            )
        )
        self.fed: list[ProbeLink] = []
        self.probes = LinkProbes(self)  # type: ignore[arg-type]

    def feed(self, event: Any) -> None:
        self.fed.append(event)
        nbytes = len(event.pad)
        self.link.probe = Probe(float(len(self.fed)), nbytes, 1e-3 + nbytes / 1.2e7)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_planned_jobs_peers_are_probed_until_the_link_is_known(now: list[float]) -> None:
    d = Daemon()
    d.probes.tick()
    assert not d.fed, "its first frames may tell"
    now[0] += EVERY / SOONER
    for _ in range(20):
        d.probes.tick()
    assert [e.peer for e in d.fed] == ["b"] * 4 and d.fed[1].pad == padding()[: 256 << 10]
    (found,) = d.told
    assert found.exact and found.rate == pytest.approx(1.2e7, rel=1e-3)


@pytest.mark.parametrize("daemon", [Daemon("static"), Daemon(first="b"), Daemon(settled=3), Daemon(every=0.0)])
def test_no_probe_leaves_where_nothing_is_planned_or_probes_are_off(daemon: Daemon, now: list[float]) -> None:
    for _ in range(2):
        daemon.probes.tick()
        now[0] += EVERY
    assert not daemon.fed


def test_a_link_that_was_measured_before_has_time(now: list[float]) -> None:
    d = Daemon()
    d.known = True
    d.probes.tick()
    now[0] += EVERY / SOONER
    d.probes.tick()
    assert not d.fed
    d.change = 0.5  # steps take another time than they did
    d.probes.tick()
    assert len(d.fed) == 1


def test_no_probe_leaves_while_frames_measure_the_link(now: list[float]) -> None:
    d = Daemon()
    d.quiet = False
    d.probes.tick()
    now[0] += EVERY
    d.probes.tick()
    assert not d.fed
    d.quiet = True
    d.probes.tick()
    now[0] += EVERY
    d.probes.tick()
    assert len(d.fed) == 1


@pytest.mark.parametrize(("mode", "first"), [("auto", "a"), ("static", "a"), ("auto", "b")])
def test_a_doubt_is_settled_at_once_whoever_plans(mode: str, first: str, now: list[float]) -> None:
    d = Daemon(mode, first)
    d.quiet = False
    d.probes.tick()
    assert not d.fed
    d.lanes.link.in_doubt = True
    d.probes.tick()
    assert len(d.fed) == 1


def test_the_next_job_has_time_as_well(now: list[float]) -> None:
    d = Daemon()
    d.known = True
    jobs, d.machine.jobs = d.machine.jobs, {}
    d.probes.tick()
    now[0] += 10 * EVERY
    d.machine.jobs = jobs
    d.probes.tick()
    now[0] += EVERY - 1
    d.probes.tick()
    assert not d.fed
    d.machine.jobs = {}
    d.probes.tick()
    d.machine.jobs = jobs
    now[0] += 1
    d.probes.tick()
    assert not d.fed, "it is another one"
    now[0] += EVERY
    d.probes.tick()
    assert len(d.fed) == 1
