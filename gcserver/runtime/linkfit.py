"""Latency and bandwidth of this node's link, from the frames and heartbeats of the jobs themselves.

What may live here: when frames arrived, the trains they make, and the fit of both to a `LinkCost`. What may not:
sockets, sending anything to measure with.

A lane sees whole frames, never the bytes of one arriving, and only when its loop comes round to them. So time counts
between *prompt* frames only, for which the loop was waiting; a frame found after a kernel counts with its bytes, at the
next prompt one. A train is a run of frames that came one behind the other without a pause. Its rate is the bytes of all
frames but the first over the time from the first to the last. Frames of several peers and lanes share the card and make
one train.

Nothing makes frames faster than the link, but much makes them slower: a lane that waits for a core, workers that
compute. So trains by themselves may raise what is known of the link. Where they say that it is slower, a probe
(`linkprobe.py`) has the last word.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gcserver.planner.profile import LinkCost

#: Frames of fewer bytes count, but begin and end no train: how soon the loop wakes would matter more than their time.
#: And compressed blocks are smaller: they leave when the worker has computed them, whose pace would pass for a link's.
LARGE: Final = 256 << 10
#: bytes after which a train ends and the next one begins, so that a long transfer is many samples
LONG: Final = 16 << 20
#: trains of fewer bytes or frames say nothing
SHORT: Final = 1 << 20
FEWEST: Final = 3
#: a gap so many times as long as what arrived in it needs had a pause in it
SLACK: Final = 1.5
#: arrivals a lane remembers until it tells them, and seconds after which all lanes have told theirs
MOST: Final = 2000
HELD: Final = 2.5
#: trains that are remembered
KEPT: Final = 50
#: The link is slower than it was if so many gaps in a row, of so many bytes, agree on one rate within this scatter.
#: A pause is as long as somebody computed; only a link makes every frame wait, one right after the other. Steps of one
#: length with payloads of one length look the same, but compressed payloads are not that long.
AGREEING: Final = 12
AGREEING_BYTES: Final = 2 << 20
SCATTER: Final = 0.12
#: the share of trains that are slower than the estimate: pauses too short to be seen make trains slow, nothing makes
#: one of many frames fast
QUANTILE: Final = 0.75
#: Trains that differ by more than this were paced by kernels or by the workers, not by the link: a lower bound of it.
DIFFERING: Final = 0.2
#: Long trains of so many seconds, in the median, were paced by no kernel and by nobody who waited for a core: only more
#: than the second share makes them a lower bound. Peers whose links carry frames to several send each of them now more
#: and now less: trains of four nodes at 100 Mbit/s differ by 12 to 35 %, and their quartile is the link.
LASTING: Final = 1.0
LASTING_DIFFERING: Final = 0.5
#: Fewer trains are a lower bound too: the first ones are cut before any rate is known, pauses and all, and where little
#: is sent a step no more come after them.
TRUSTED: Final = 3
#: A link that is so many times as fast or as slow is another one.
CHANGED: Final = 1.2
#: observations of a peer's round trip of which the lowest counts
TRIPS: Final = 30


@dataclass(frozen=True, slots=True)
class Arrival:
    """A large frame of a peer that a lane came to ``at``, seconds of CLOCK_MONOTONIC; prompt: it waited for it.

    nbytes: with the small ones that the lane received since the large one before.
    """

    at: float
    peer: int
    nbytes: int
    prompt: bool


class Arrivals:
    """The frames of one lane, until somebody asks for them."""

    def __init__(self) -> None:
        self._seen: deque[Arrival] = deque(maxlen=MOST)
        self._small = 0

    def on_frame(self, peer: int, nbytes: int, now: float, prompt: bool) -> None:
        """A frame of ``nbytes`` from ``peer`` at ``now``; prompt: the loop was waiting for it."""
        self._small += nbytes
        if nbytes >= LARGE:
            self._seen.append(Arrival(now, peer, self._small, prompt))
            self._small = 0

    def take(self) -> tuple[Arrival, ...]:
        """Those since the last call."""
        seen = tuple(self._seen)
        self._seen.clear()
        return seen


@dataclass(frozen=True, slots=True)
class Train:
    """``nbytes`` arrived from ``start`` to ``end``, seconds."""

    start: float
    end: float
    nbytes: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / (self.end - self.start)


class Trains:
    """Finds trains in the arrivals of all lanes of a node; ``kept``: the newest of them."""

    def __init__(self) -> None:
        self.kept: deque[Train] = deque(maxlen=KEPT)
        #: bytes of each stream's (lane's and peer's) newest frame in this train: as much may be on its way
        self._streams: dict[tuple[int, int], int] = {}
        self._start = self._last = -1.0
        #: bytes and prompt frames of the train, and bytes since the last prompt frame, all that came and what counts
        self._bytes = self._count = self._came = self._counts = 0
        #: whether the train began after a pause
        self._afresh = True
        #: the best rate of this train so far: what a gap is compared with before there is a train
        self._best = 0.0
        #: gaps that looked like pauses
        self._slow: deque[Train] = deque(maxlen=AGREEING)

    def on_arrival(self, lane: int, arrival: Arrival) -> None:
        """The next one in order of time."""
        stream = (lane, arrival.peer)
        self._came += arrival.nbytes
        # After a pause all streams begin at once: the first frame of each was under way before the train's first
        # arrival. Elsewhere what was under way at the start makes up for what is at the end.
        if stream in self._streams or not self._afresh:
            self._counts += arrival.nbytes
        self._streams[stream] = arrival.nbytes
        if not arrival.prompt or arrival.at <= self._last:
            return
        if self._start < 0.0:
            self._begin(arrival.at, afresh=True)
            self._streams = {stream: arrival.nbytes}
            return
        gap, needed = arrival.at - self._last, max(self._came, sum(self._streams.values()))
        if gap * (rate(self.kept) if self.kept else self._best) > SLACK * needed:
            self._pause(Train(self._last, arrival.at, self._came))
            self._streams = {stream: arrival.nbytes}
            return
        self._slow.clear()
        self._bytes += self._counts
        self._count += 1
        self._came = self._counts = 0
        self._last = arrival.at
        if self._bytes >= SHORT:
            self._best = max(self._best, self._bytes / (self._last - self._start))
        if self._bytes >= LONG and self._count >= FEWEST * len(self._streams):
            self._record()
            self._begin(arrival.at, afresh=False)

    def _begin(self, at: float, afresh: bool) -> None:
        self._start = self._last = at
        self._bytes = self._count = self._came = self._counts = 0
        self._afresh = afresh
        self._best = 0.0

    def _pause(self, gap: Train) -> None:
        """A gap in which nothing was sent for a while, or one of a link that became slower."""
        self._record()
        if gap.nbytes >= AGREEING_BYTES:
            self._slow.append(gap)
        if len(self._slow) == AGREEING and scatter([g.rate for g in self._slow]) <= SCATTER:
            self.kept.clear()
            self.kept.extend(self._slow)
            self._slow.clear()
        self._begin(gap.end, afresh=True)

    def _record(self) -> None:
        if self._bytes >= SHORT and self._count >= FEWEST:
            self.kept.append(Train(self._start, self._last, self._bytes))
            self._slow.clear()


@dataclass(frozen=True, slots=True)
class Probed:
    """Probes of a peer that ended ``at``: the link's ``rate``, bytes a second, and the scatter of its
    ``samples``. Not ``exact``: they were over too soon, the link is at least that fast."""

    at: float
    rate: float
    noise: float
    samples: int
    exact: bool


class LinkFit:
    """The link of this node as its lanes and heartbeats see it; probes: whether there are any to ask in doubt."""

    def __init__(self, probes: bool = False) -> None:
        self._probes = probes
        self._trains = Trains()
        self._held: list[tuple[float, int, Arrival]] = []
        self._trips: dict[str, deque[float]] = {}
        self._probed: Probed | None = None
        #: by peer, the newest of those that are probed
        self._by_peer: dict[str, Probed] = {}
        #: bytes a second that the link has carried for certain, since it was last probed
        self._carried = 0.0
        #: when trains began to say that it is slower than that
        self._doubted: float | None = None

    def on_arrivals(self, lane: int, arrivals: Iterable[Arrival], now: float) -> None:
        """What a lane received since it last told; they count once the other lanes have told as well."""
        self._held += [(arrival.at, lane, arrival) for arrival in arrivals]
        self._held.sort(key=lambda held: held[:2])
        while self._held and self._held[0][0] <= now - HELD:
            _, where, arrival = self._held.pop(0)
            self._trains.on_arrival(where, arrival)

    def on_trip(self, peer: str, seconds: float) -> None:
        """A round trip of heartbeats to a peer, as smoothed by the link."""
        self._trips.setdefault(peer, deque(maxlen=TRIPS)).append(seconds)

    def trip(self, peer: str) -> float:
        """The least round trip to a peer that is remembered, s; 0: none."""
        return min(self._trips.get(peer, ()), default=0.0)

    def silent(self, now: float, seconds: float) -> bool:
        """Whether the jobs' own frames have told nothing of the link for so many seconds."""
        kept = self._trains.kept
        return not kept or kept[-1].end < now - seconds

    def on_probes(self, round_: Mapping[str, Probed], probed: Collection[str]) -> None:
        """What a round of probes came to by peer (`linkprobe.py`), of all that are ``probed`` in turn."""
        kept = self._trains.kept
        # What is older than enough trains was told by these since.
        since = kept[-TRUSTED].end if len(kept) >= TRUSTED else -math.inf
        known = self._by_peer | dict(round_)
        self._by_peer = {p: f for p, f in known.items() if p in round_ or (p in probed and f.at >= since)}
        found = self._slowest(None)
        assert found is not None
        self._probed = found
        if kept and (found.exact or found.rate > rate(kept)) and not 1 / CHANGED < found.rate / rate(kept) < CHANGED:
            kept.clear()  # they were of another link than there is now, or waited for something else
            self._doubted = None
        if found.exact:
            self._carried = found.rate

    def _slowest(self, peers: Collection[str] | None) -> Probed | None:
        """The slowest link to ``peers`` (None: to all) by the newest probes of each, as of the newest of these."""
        known = [found for peer, found in self._by_peer.items() if peers is None or peer in peers]
        if not known:
            return None
        return replace(min(known, key=lambda found: found.rate), at=max(found.at for found in known))

    @property
    def in_doubt(self) -> bool:
        """Whether frames say that the link has become slower, and no probe has confirmed or refuted it yet."""
        return self._doubted is not None and (self._probed is None or self._probed.at < self._doubted)

    def cost(self, guess: LinkCost, peers: Collection[str] | None = None) -> LinkCost:
        """The link to ``peers`` (None: all that were heard); what has not been seen yet is ``guess``'s."""
        trips = [min(trips) for peer, trips in self._trips.items() if peers is None or peer in peers]
        return fit(trips, self._trains.kept, guess)

    def news(self, known: LinkCost, guess: LinkCost, peers: Collection[str] | None = None) -> LinkCost | None:
        """What is to count for ``peers`` instead of ``known``; None if that still does.

        A measurement, and a lower bound that ``known`` is far below (links let bursts pass): then it was wrong, and the
        link is a guess again.
        Probes count until enough trains are newer; where they were too short for the link, if they beat what is known.
        Trains of a slower link count once a probe that came after them does not refute it.
        """
        found, probed, kept = self.cost(guess, peers), self._slowest(peers), self._trains.kept
        if probed is not None and (len(kept) < TRUSTED or kept[-TRUSTED].end < probed.at):
            if probed.exact or probed.rate > CHANGED * known.bandwidth:
                return LinkCost(found.latency, probed.rate, probed.noise, probed.samples)
            return None
        if not found.samples:
            return found if kept and rate(kept) > CHANGED * known.bandwidth else None
        # A probe may have said so already, when another job's link was doubted.
        confirmed = probed is not None and probed.exact and 1 / CHANGED < found.bandwidth / probed.rate < CHANGED
        slower = found.bandwidth * CHANGED < max(self._carried, known.bandwidth if known.samples else 0.0)
        if self._probes and slower and not confirmed:
            self._doubted = self._doubted or kept[-1].end
            if self.in_doubt:
                return None
        if slower:
            self._carried = 0.0
        self._doubted = None
        self._carried = max(self._carried, found.bandwidth)
        # A slower link that was probed is no more: what looks like it later is doubted anew.
        self._by_peer = {p: f for p, f in self._by_peer.items() if f.rate * CHANGED >= found.bandwidth}
        return found


def fit(trips: Sequence[float], trains: Iterable[Train], guess: LinkCost) -> LinkCost:
    """Round trips of the peers (seconds each, without load) and trains as a `LinkCost`.

    latency: half the longest of the trips, since a step waits for the farthest peer. bandwidth: payload bytes a second;
    ``samples`` counts trains, 0 where they are too few or differ too much to be more than a lower bound. What is not
    known, or only that it is more than this, is taken from ``guess``.
    """
    latency = max(trips) / 2 if trips else guess.latency
    seen = list(trains)
    if not seen:
        return LinkCost(latency, guess.bandwidth, guess.noise, 0)
    found, noise = rate(seen), scatter([t.rate for t in seen])
    if noise > (LASTING_DIFFERING if lasting(seen) else DIFFERING) or len(seen) < TRUSTED:
        return LinkCost(latency, max(found, guess.bandwidth), noise, 0)
    return LinkCost(latency, found, noise, len(seen))


def lasting(trains: Sequence[Train]) -> bool:
    """Whether they took so long, for so many bytes, that nothing but a link can have paced them; at least one."""
    seconds = statistics.median(train.end - train.start for train in trains)
    return seconds >= LASTING and statistics.median(train.nbytes for train in trains) >= LONG


def rate(trains: Iterable[Train]) -> float:
    """A high quantile of the rates of at least one train, bytes a second; each counts by its bytes."""
    ordered = sorted(trains, key=lambda t: t.rate)
    wanted = QUANTILE * sum(t.nbytes for t in ordered)
    total = 0
    for train in ordered:
        total += train.nbytes
        if total >= wanted:
            return train.rate
    return ordered[-1].rate


def scatter(rates: Sequence[float]) -> float:
    """Standard deviation over median, from the median of distances so that a few wild samples do not count; of at
    least one rate."""
    middle = statistics.median(rates)
    return 1.4826 * statistics.median(abs(r - middle) for r in rates) / middle
