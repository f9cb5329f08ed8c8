"""DC2: the compression ratio of each node follows the delay its exchanges see.

What may live here: the five controllers, their parameters and state. What may not: measuring delays (the lane), the
monitored series (`dc2_monitor.py`), links to try it on (`dc2_link.py`).

The paper's Algorithm 1 with its misprints put right:

* DA1 subtracts (d - a) / (d - m), of order 1, from a ratio of at most 0.3, which leaves only the two bounds; here the
  ratio is multiplied by 1 - gain * that.
* DA2 and DA3 print (a - d) / (d - m) *<* dvar for the increase, so that the ratio rises inside the band and stays when
  delays are far below average; *>* is meant, and gives the order of mean ratios the paper measured.
* d = m at the first sample and at every new least delay: denominators are at least ``floor`` * m, and the first
  sample holds the ratio. No delay above zero yet (m = 0) holds it, too.
* DA4 and DA5 can turn negative where delays rise fast: that is k_min, not a change of sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from gcserver.planner.dc2_monitor import Dc2Error, DelayMonitor, Delays, MonitorState

Law = Literal["DA1", "DA2", "DA3", "DA4", "DA5"]
LAWS: Final[tuple[Law, ...]] = get_args(Law)


@dataclass(frozen=True, slots=True)
class Dc2Config:
    """Table I, and what the paper leaves open.

    ``dvar``: allowed deviation from the mean delay, relative to d - m. ``k_inc``, ``k_dec``: additive steps. ``k_min``,
    ``k_max``: bounds of the ratio. ``alpha``: slack on the least and the mean delay (DA5). ``beta``: strength of
    multiplicative decrease (DA4, DA5). ``window``: w. Not in the paper: ``start``, the first ratio (its moderate
    uniform one); ``gain`` of DA1; ``age`` and ``by_payload`` of the least delay (see ``DelayMonitor``); ``floor`` of
    d - m, relative to m. Raises :class:`Dc2Error` for values out of range.
    """

    dvar: float = 0.05
    k_inc: float = 0.005
    k_dec: float = 0.005
    k_max: float = 0.3
    k_min: float = 0.005
    alpha: float = 1.25
    beta: float = 0.8
    window: int = 50
    start: float = 0.1
    gain: float = 1.0
    age: int = 500
    by_payload: bool = False
    floor: float = 0.01

    def __post_init__(self) -> None:
        accepted = {
            "dvar": (self.dvar >= 0.0, "at least 0"),
            "k_inc": (0.0 < self.k_inc <= 1.0, "in (0, 1]"),
            "k_dec": (0.0 < self.k_dec <= 1.0, "in (0, 1]"),
            "k_min": (0.0 < self.k_min <= 1.0, "in (0, 1]"),
            "k_max": (self.k_min <= self.k_max <= 1.0, f"in [k_min = {self.k_min}, 1]"),
            "start": (self.k_min <= self.start <= self.k_max, f"in [k_min, k_max] = [{self.k_min}, {self.k_max}]"),
            "alpha": (1.0 <= self.alpha < float("inf"), "at least 1"),
            "beta": (0.0 < self.beta < float("inf"), "greater than 0"),
            "window": (self.window >= 1, "at least 1"),
            "gain": (0.0 < self.gain < float("inf"), "greater than 0"),
            "age": (
                self.age >= self.window + 1,
                f"at least window + 1 = {self.window + 1}, so that no mean is below m",
            ),
            "floor": (0.0 < self.floor < float("inf"), "greater than 0"),
        }
        for name, (good, what) in accepted.items():
            if not good:
                raise Dc2Error(f"{name} must be {what}, got {getattr(self, name)}")


class ControllerState(msgspec.Struct, frozen=True):
    """A controller between two steps; `msgspec.msgpack` writes and reads it."""

    law: Law
    ratio: float
    monitor: MonitorState


class Controller:
    """One node's controller: ``on_step`` once a step, the ratio of the next step back. Deterministic.

    ``law`` is one of DA1 to DA5; ``state`` goes on where another controller of that law was. Nodes decide apart, so
    their ratios may differ. Raises :class:`Dc2Error` for an unknown law or a state that does not fit.
    """

    def __init__(self, law: Law, config: Dc2Config | None = None, state: ControllerState | None = None) -> None:
        if law not in LAWS:
            raise Dc2Error(f"a law is one of {', '.join(LAWS)}, got {law!r}")
        self.config = config or Dc2Config()
        self.law: Law = law
        c = self.config
        if state is not None and (state.law != law or not c.k_min <= state.ratio <= c.k_max):
            raise Dc2Error(
                f"the state of {law} with a ratio in [{c.k_min}, {c.k_max}] was expected, got that of {state.law} with "
                f"{state.ratio}"
            )
        self.ratio = c.start if state is None else state.ratio
        self._monitor = DelayMonitor(c.window, c.age, c.by_payload, None if state is None else state.monitor)

    @property
    def state(self) -> ControllerState:
        return ControllerState(self.law, self.ratio, self._monitor.state)

    def on_step(self, delay: float, skew: float, payload: int) -> float:
        """The ratio for the next step, in [k_min, k_max]; arguments and errors are ``DelayMonitor.add``'s."""
        self.ratio = next_ratio(self.law, self.ratio, self._monitor.add(delay, skew, payload), self.config)
        return self.ratio


def next_ratio(law: Law, k: float, delays: Delays, config: Dc2Config) -> float:
    """k_(j+1) from k_j (Algorithm 1, corrected as this page says), in [k_min, k_max]; k_j after a step that says
    nothing of the network."""
    if delays.samples < 2 or delays.last <= 0.0:
        return k
    c = config
    spread = max(delays.last - delays.least, c.floor * delays.least)
    above = (delays.last - delays.mean) / spread
    if law == "DA1":
        new = k * (1.0 - c.gain * above)
    elif law == "DA4":
        new = _by_gradient(k, delays, c)
    elif law == "DA5":
        if delays.last < c.alpha * delays.least:
            new = k + c.k_inc
        elif delays.last > c.alpha * delays.mean:
            over = delays.last - c.alpha * delays.mean
            new = k * (1.0 - c.beta * over / max(delays.last - c.alpha * delays.least, c.floor * delays.least))
        else:
            new = _by_gradient(k, delays, c)
    elif above > c.dvar:
        new = k / 2.0 if law == "DA2" else k - c.k_dec
    else:
        new = k + c.k_inc if -above > c.dvar else k
    return min(max(new, c.k_min), c.k_max)


def _by_gradient(k: float, delays: Delays, c: Dc2Config) -> float:
    """DA4: up while delays fall, else down by their rise relative to the least."""
    return k + c.k_inc if delays.rise < 0.0 else k * (1.0 - c.beta * delays.rise / delays.least)
