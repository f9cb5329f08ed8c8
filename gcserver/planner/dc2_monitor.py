"""DC2's delay monitor: what the network does to this node's exchanges, from one measured delay a step.

What may live here: the monitored series and their state. What may not: measuring, clocks, what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

#: No clock sees less than a nanosecond, s.
_CLOCK: Final = 1e-9


class Dc2Error(ValueError):
    """A parameter, measurement, state or link DC2 cannot work with: names it, what is accepted and what came."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What the paper's controllers read at iteration j, in seconds.

    ``last``: d_j, 0 if the step says nothing of the network: its whole delay was skew. Such steps count in nothing
    else. ``least``: m_j, 0 if no delay was above zero yet. ``mean``: a_j, of d_j to d_(j-w). ``rise``: r_j, the
    mean of the w + 1 differences that end at d_j. Before there are as many samples: over those there are.
    ``samples``: the steps kept that say something.
    """

    last: float
    least: float
    mean: float
    rise: float
    samples: int


class MonitorState(msgspec.Struct, frozen=True):
    """All a monitor knows: its newest delays (s) and payloads (bytes), the oldest first, and how many it has seen."""

    delays: tuple[float, ...] = ()
    payloads: tuple[int, ...] = ()
    samples: int = 0


class DelayMonitor:
    """Keeps the series of section IV of the paper.

    ``window`` is w. ``age``: m_j is the least of the last ``age`` delays (the paper's never ages, so that one change of
    path leaves it wrong for ever). ``by_payload``: a small payload's delay says little of what a large one should take;
    with it m_j is at least what this payload takes at the best rate seen, so that d / m does not grow with k alone.
    """

    def __init__(self, window: int, age: int, by_payload: bool, state: MonitorState | None = None) -> None:
        state = state or MonitorState()
        kept = max(age, window + 2)
        if len(state.delays) != len(state.payloads) or len(state.delays) != min(state.samples, kept):
            raise Dc2Error(
                f"the state of a monitor that keeps {kept} samples and saw {state.samples} has "
                f"{min(state.samples, kept)} delays and payloads, got {len(state.delays)} and {len(state.payloads)}"
            )
        self._window, self._age, self._by_payload, self._kept = window, age, by_payload, kept
        self._delays, self._payloads, self._samples = list(state.delays), list(state.payloads), state.samples

    @property
    def state(self) -> MonitorState:
        return MonitorState(tuple(self._delays), tuple(self._payloads), self._samples)

    def add(self, delay: float, skew: float, payload: int) -> Delays:
        """One step's exchange: ``delay`` s from this node's send to the last arrival, ``payload`` bytes sent.

        ``skew`` s of the delay passed before the last member had begun to send: what a slow worker takes, not the
        network, is subtracted. Raises :class:`Dc2Error` for negative or infinite values.
        """
        for name, value in (("delay", delay), ("skew", skew), ("payload", payload)):
            if not 0.0 <= value < float("inf"):
                raise Dc2Error(f"{name} must be from 0 on and finite, got {value}")
        self._samples += 1
        network = delay - skew
        self._delays = [*self._delays[-self._kept + 1 :], network if network >= _CLOCK else 0.0]
        self._payloads = [*self._payloads[-self._kept + 1 :], payload]
        last = self._delays[-1]
        recent = [d for d in self._delays[-self._window - 1 :] if d]
        before = [d for d in self._delays[-self._window - 2 :] if d]
        steps = len(before) - 1
        return Delays(
            last=last,
            least=self._least(payload),
            mean=sum(recent) / len(recent) if recent else 0.0,
            rise=(last - before[0]) / steps if steps > 0 else 0.0,  # differences telescope: only the ends count
            samples=sum(map(bool, self._delays)),
        )

    def _least(self, payload: int) -> float:
        """m_j."""
        delays = self._delays[-self._age :]
        least = min(filter(None, delays), default=0.0)
        if not self._by_payload:
            return least
        sizes = self._payloads[-self._age :]
        # Never above d_j: the last sample's own rate is among those.
        return max(least, payload * min((d / p for d, p in zip(delays, sizes, strict=True) if d and p), default=0.0))
