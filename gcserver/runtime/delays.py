"""What DC2 steers by, measured on one lane: how long the exchanges of a step took, how much of that was waiting for
members that began late, and how much this node sent.

What may live here: taking times and bytes of the events that pass through a lane. What may not: what follows from them
(`steering.py`), reading clocks.

    delay   from our first payload of the step, encoded and ready to leave, to the arrival of the last payload
    skew    the part of it before the last member had begun to send

A member has begun when the first byte of its first contribution left; what arrives is that contribution's end. The time
in between is taken from what else that member sent in the step: so many bytes took so long. Of a member whose
first contribution is all it sends nothing can be told: its lateness counts as the network's. The same goes for members
that send us no contribution on this lane, since we own none of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gcproto.wire import FrameType, Header, Phase
from gcserver.core.events import DomainKey, Encoded, Finalised, FrameReceived, LaneEvent
from gcserver.core.lane import LaneMachine

#: Steps of one domain that are measured at once. More are never under way; what a stray frame began is pushed out.
STEPS: Final = 512


@dataclass(slots=True)
class Stream:
    """What one member sent us in a step: when the first contribution had arrived, its bytes, and when and how much in
    all. Times in seconds of the loop's clock."""

    first: float
    head: int
    last: float
    total: int

    @property
    def began(self) -> float | None:
        """When its first contribution's first byte left, at the rate at which the rest came; None without a rest."""
        rest = self.total - self.head
        return self.first - self.head * (self.last - self.first) / rest if rest > 0 else None


@dataclass(slots=True)
class Measured:
    """One step of a domain on this lane, while it lasts. ``began`` None: nothing of ours was ready yet."""

    began: float | None = None
    arrived: float | None = None
    sent: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)

    def result(self) -> tuple[float, float, int] | None:
        """(delay, skew, bytes), s and s with skew <= delay; None where nothing was exchanged."""
        if self.began is None or self.arrived is None:
            return None
        delay = max(0.0, self.arrived - self.began)
        latest = max((b for s in self.streams.values() if (b := s.began) is not None), default=self.began)
        return delay, min(max(0.0, latest - self.began), delay), self.sent


class Delays:
    """All steps under way on one lane."""

    def __init__(self, machine: LaneMachine) -> None:
        self._machine = machine
        self._steps: dict[DomainKey, dict[int, Measured]] = {}

    def on(self, event: LaneEvent, now: float) -> None:
        """Before the machine sees an event: what it says of the step it belongs to."""
        if isinstance(event, FrameReceived):
            if event.header.type is FrameType.DATA:
                self._arrived(event.header, now)
        elif isinstance(event, Encoded):
            self._encoded(event, now)
        elif isinstance(event, Finalised):
            self._finalised(event)

    def _arrived(self, h: Header, now: float) -> None:
        key = (h.job, h.domain)
        if key not in self._machine.domains:
            return
        step = self._step(key, h.step)
        step.arrived = now
        stream = step.streams.get(h.sender)
        if stream is not None:
            stream.last = now
            stream.total += h.payload_bytes
        elif h.phase is Phase.CONTRIBUTION:
            step.streams[h.sender] = Stream(now, h.payload_bytes, now, h.payload_bytes)

    def _encoded(self, e: Encoded, now: float) -> None:
        domain = self._machine.domains.get(e.domain)
        p = domain.partitions.get(e.key) if domain is not None else None
        r = p.rounds.get(e.step) if p is not None else None
        if domain is None or p is None or r is None:
            return
        step = self._step(e.domain, e.step)
        if step.began is None:
            step.began = now
        if r.everyone:
            step.sent += e.nbytes * (len(domain.config.members) - 1)
        elif p.block.owner != domain.config.me:
            step.sent += e.nbytes

    def _finalised(self, e: Finalised) -> None:
        domain = self._machine.domains.get(e.domain)
        if domain is not None and e.nbytes:
            self._step(e.domain, e.step).sent += e.nbytes * (len(domain.config.members) - 1)

    def _step(self, key: DomainKey, number: int) -> Measured:
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = {}
        step = steps.get(number)
        if step is None:
            if len(steps) == STEPS:
                del steps[next(iter(steps))]
            step = steps[number] = Measured()
        return step

    def take(self, domain: DomainKey, step: int) -> tuple[float, float, int] | None:
        """(delay, skew, bytes) of a finished step, once; None where nothing was exchanged."""
        measured = self._steps.get(domain, {}).pop(step, None)
        return None if measured is None else measured.result()

    def forget(self, domain: DomainKey) -> None:
        self._steps.pop(domain, None)
