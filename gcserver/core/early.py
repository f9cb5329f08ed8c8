"""What reaches a lane before the domain or section it is for.

What may live here: keeping it in order, for how long. What may not: what it means (`lane.py`).

After a restart peers send and workers ring before the control machine has told the lane of their job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcserver.core.events import DomainKey, FrameReceived, Pushed


@dataclass(slots=True)
class Early:
    """Frames with the time they came at, and pushes, by domain."""

    frames: dict[DomainKey, list[tuple[float, FrameReceived]]] = field(default_factory=dict)
    pushes: dict[DomainKey, list[Pushed]] = field(default_factory=dict)

    def keep_frame(self, domain: DomainKey, e: FrameReceived, now: float) -> None:
        self.frames.setdefault(domain, []).append((now, e))

    def keep_push(self, e: Pushed) -> None:
        self.pushes.setdefault(e.domain, []).append(e)

    def take_frames(self, domain: DomainKey) -> list[FrameReceived]:
        return [frame for _, frame in self.frames.pop(domain, [])]

    def take_pushes(self, domain: DomainKey) -> list[Pushed]:
        return self.pushes.pop(domain, [])

    def expired(self, now: float, after: float) -> list[FrameReceived]:
        """Takes out the frames that have been here for ``after`` seconds."""
        out: list[FrameReceived] = []
        for domain, frames in list(self.frames.items()):
            out.extend(frame for at, frame in frames if now - at >= after)
            keep = [(at, frame) for at, frame in frames if now - at < after]
            if keep:
                self.frames[domain] = keep
            else:
                del self.frames[domain]
        return out
