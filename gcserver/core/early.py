"""What reaches a lane before the domain or section it is for.

What may live here: keeping it in order, for how long. What may not: what it means (`lane.py`).

After a restart peers send and workers ring before the control machine has told the lane of their job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.wire import Header
from gcserver.core.domain import Domain
from gcserver.core.events import DomainKey, FrameReceived, Pushed

#: So many frames, or bytes of payload, are kept of domains, sections and epochs that nobody has opened here. What
#: members send before that is bounded by their credit; this is for those that do not keep to it.
MAX_FRAMES = 1 << 16
MAX_BYTES = 1 << 30


@dataclass(slots=True)
class Early:
    """Frames with the time they came at, and pushes, by domain."""

    frames: dict[DomainKey, list[tuple[float, FrameReceived]]] = field(default_factory=dict)
    pushes: dict[DomainKey, list[Pushed]] = field(default_factory=dict)
    count: int = 0
    nbytes: int = 0

    @property
    def full(self) -> bool:
        return self.count >= MAX_FRAMES or self.nbytes >= MAX_BYTES

    def refuses(self, h: Header, domain: Domain | None) -> bool:
        """Whether there is no room for a DATA frame yet, or will be none before its step is nearer."""
        return self.full if domain is None else domain.far(h) or (self.full and domain.early(h))

    def keep_frame(self, domain: DomainKey, e: FrameReceived, now: float) -> None:
        self.frames.setdefault(domain, []).append((now, e))
        self._counted(e, 1)

    def _counted(self, e: FrameReceived, times: int) -> None:
        self.count += times
        self.nbytes += times * e.header.payload_bytes

    def keep_push(self, e: Pushed) -> None:
        self.pushes.setdefault(e.domain, []).append(e)

    def take_frames(self, key: DomainKey, domain: Domain | None = None) -> list[FrameReceived]:
        """Takes out the frames of a domain; those that ``domain`` is not open or not near enough for stay."""
        taken: list[FrameReceived] = []
        for at, frame in self.frames.pop(key, []):
            if domain is not None and (domain.early(frame.header) or domain.far(frame.header)):
                self.frames.setdefault(key, []).append((at, frame))
            else:
                self._counted(frame, -1)
                taken.append(frame)
        return taken

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
        for frame in out:
            self._counted(frame, -1)
        return out
