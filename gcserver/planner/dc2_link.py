"""Links whose rate changes, and what an exchange over them takes: to try controllers on, the same for all of them.

What may live here: seeded rate profiles, the plain model of an exchange, a run of controllers over it. What may not:
how controllers decide, sockets, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcserver.planner.dc2 import Controller
from gcserver.planner.dc2_monitor import Dc2Error

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RateProfile:
    """A link's rate over time: phases of ``length`` (steps or seconds, as the caller counts) at one of ``levels``.

    ``rate`` is that of level 1, in the caller's unit. No level follows itself, unless there is one only (a static
    link). The same seed is the same profile for ever. Raises :class:`Dc2Error` unless rate, length and levels are
    greater than 0.
    """

    seed: int
    rate: float
    length: float = 100.0
    levels: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1)

    def __post_init__(self) -> None:
        if not self.levels or not all(0.0 < v < float("inf") for v in (self.rate, self.length, *self.levels)):
            raise Dc2Error(
                f"a profile's rate, length and levels must be greater than 0, got {self.rate}, {self.length} and "
                f"{self.levels}"
            )

    def rates(self, until: float) -> tuple[float, ...]:
        """The rate of each phase that begins before ``until``."""
        rng = np.random.default_rng(self.seed)
        n = len(self.levels)
        level = int(rng.integers(n))
        found = []
        for _ in range(max(int(np.ceil(until / self.length)), 1)):
            found.append(self.rate * self.levels[level])
            if n > 1:
                level = (level + int(rng.integers(1, n))) % n
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step's exchange as each node sees it, s.

    ``delay[i]``: from node i's start to the last arrival; ``skew[i]``: the part of it before the last node started.
    """

    delay: tuple[float, ...]
    skew: tuple[float, ...]


def all_gather(payloads: Sequence[int], starts: Sequence[float], rates: Sequence[float], latency: float) -> Exchange:
    """Every node sends its payload (bytes) to every other over its own link of ``rates[i]`` bytes/s in each direction.

    Node i has all when the last payload was sent out by its sender, and when everybody's fit through its own link after
    the last start: max(max_j(start_j + (n-1) p_j / rate_j), max_j start_j + sum_(j != i) p_j / rate_i) + latency.
    """
    others = len(payloads) - 1
    sent = max(s + others * p / r for p, s, r in zip(payloads, starts, rates, strict=True))
    last, total = max(starts), sum(payloads)
    done = [max(sent, last + (total - p) / r) + latency for p, r in zip(payloads, rates, strict=True)]
    return Exchange(tuple(d - s for d, s in zip(done, starts, strict=True)), tuple(last - s for s in starts))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained; ResNet-50 with sparse payloads unless told otherwise.

    ``elements`` of the model; ``element_bytes`` sent for one that is selected (value and index); ``compute`` s before
    each exchange, of which a node takes up to ``skew`` more, relative; ``latency`` s of an exchange; a link is slower
    by up to ``noise``, relative. Skew and noise are drawn for every step.
    """

    elements: int = 25_557_032
    element_bytes: int = 8
    compute: float = 0.1
    skew: float = 0.05
    latency: float = 2e-4
    noise: float = 0.02

    def payload(self, ratio: float) -> int:
        return max(int(ratio * self.elements), 1) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Played:
    """A run, one row per step and one column per node; ``seconds`` it took.

    ``rates``: of the link, bytes/s, without noise; ``ratios``: what was sent; ``delays``: of the network, s.
    """

    rates: Floats
    ratios: Floats
    delays: Floats
    seconds: float


def play(
    nodes: Sequence[Controller | float], profiles: Sequence[RateProfile], steps: int, work: Workload, seed: int
) -> Played:
    """Train for ``steps``: a node's ratio is its controller's, or the number given; its profile counts steps.

    ``seed`` draws every step's slowness of each worker and noise of each link. Raises :class:`Dc2Error` for another
    number of profiles than nodes.
    """
    if len(nodes) != len(profiles) or not nodes:
        raise Dc2Error(f"each of {len(nodes)} nodes needs a profile, got {len(profiles)}")
    rng = np.random.default_rng(seed)
    phases = [profile.rates(steps) for profile in profiles]
    rates, ratios, delays = (np.empty((steps, len(nodes))) for _ in range(3))
    seconds = 0.0
    for step in range(steps):
        clean = [phase[int(step // profile.length)] for phase, profile in zip(phases, profiles, strict=True)]
        rates[step] = clean
        noisy = np.array(clean) / (1.0 + work.noise * rng.random(len(nodes)))
        starts = work.compute * (1.0 + work.skew * rng.random(len(nodes)))
        ratios[step] = [node.ratio if isinstance(node, Controller) else node for node in nodes]
        payloads = [work.payload(ratio) for ratio in ratios[step]]
        exchange = all_gather(payloads, starts.tolist(), noisy.tolist(), work.latency)
        for node, delay, skew, payload in zip(nodes, exchange.delay, exchange.skew, payloads, strict=True):
            if isinstance(node, Controller):
                node.on_step(delay, skew, payload)
        delays[step] = np.subtract(exchange.delay, exchange.skew)
        seconds += max(s + d for s, d in zip(starts.tolist(), exchange.delay, strict=True))
    return Played(rates, ratios, delays, seconds)
