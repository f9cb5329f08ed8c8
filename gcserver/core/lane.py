"""The lane machine: events in, effects out.

What may live here: which part of the machine an event concerns (links, domains, queues), and the order of
effects. What may not: what a round does (`domain.py` says where), link arithmetic (`link.py`), I/O, clocks:
``now`` is a parameter, seconds on any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gcproto import messages, packed
from gcproto.wire import AGGREGATE, CONTRIBUTION, DATA, FILLER, HEARTBEAT, HELLO, NACK, REFUSE, Flag, Header
from gcserver.core import completion, encoding, exchange, frames, opening, pushes
from gcserver.core.domain import Domain, Outward
from gcserver.core.early import Early
from gcserver.core.effects import Count, LaneEffect, Release, ReportLink
from gcserver.core.events import (
    DomainClosed,
    DomainKey,
    DomainOpened,
    Encoded,
    Finalised,
    FrameDamaged,
    FrameReceived,
    Handle,
    LaneEvent,
    PeerAdded,
    PeerReset,
    PlanKnown,
    ProposalKnown,
    Pushed,
    SectionOpened,
    Settled,
    StatesTaken,
    Tick,
    Tuned,
    Unusable,
)
from gcserver.core.lane_config import LaneConfig
from gcserver.core.link import Link
from gcserver.core.lives import LAST_LIFE, doubt
from gcserver.core.outbox import Outboxes

_hello = packed.Decoder[messages.Hello](messages.Hello)
_refuse = packed.Decoder[messages.Refuse](messages.Refuse)


@dataclass(slots=True)
class LaneMachine:
    """One lane of one daemon. ``on(event, now)`` returns the effects, to be carried out in order."""

    config: LaneConfig
    links: dict[int, Link] = field(default_factory=dict)
    outboxes: Outboxes = field(default_factory=Outboxes)
    #: the order in which peers were added
    turns: dict[int, int] = field(default_factory=dict)
    domains: dict[DomainKey, Domain] = field(default_factory=dict)
    early: Early = field(default_factory=Early)
    #: jobs that ended here; their late frames are dropped at once
    ended: dict[bytes, None] = field(default_factory=dict)
    #: the highest number that a peer's life can have by now
    latest: int = LAST_LIFE
    out: list[LaneEffect] = field(default_factory=list)

    def on(self, event: LaneEvent, now: float) -> list[LaneEffect]:
        _HANDLERS[type(event)](self, event, now)
        self._said()
        if self.outboxes:
            self._pump()
        out, self.out = self.out, []
        # Workers hear last: whatever they do next finds everything logged.
        for domain in self.domains.values():
            if domain.notices:
                out += domain.take_notices()
        return out

    # ----------------------------------------------------------------------------------------- links
    def _on_peer_added(self, e: PeerAdded, now: float) -> None:
        if e.node in self.links:
            return
        link = Link(self.config.node, self.config.incarnation, e.node, e.name, self.config.credit, heard=now)
        self.links[e.node] = link
        self.turns[e.node] = len(self.turns)
        self.out.append(link.hello(self.config.hello))

    def _on_peer_reset(self, e: PeerReset, now: float) -> None:
        link = self.links.get(e.peer)
        if link is not None and link.up:
            # Whatever the connection lost shows when the peer compares this with what it has.
            self.out.append(link.heartbeat())

    def _on_tick(self, e: Tick, now: float) -> None:
        self.latest = e.latest
        for link in self.links.values():
            self.out.extend(link.tick(now, self.config.hello, self.config.quiet_after))
        for domain in self.domains.values():
            domain.report_waiting(now, self.config.waiting_after)
        for frame in self.early.expired(now, self.config.early_for):
            self._drop(frame)

    def _on_hello(self, link: Link, h: Header, body: bytes, now: float) -> None:
        hello = _hello(body)
        if h.incarnation < link.theirs:
            self.out.append(Count("frames_stale", link.peer))
            return
        if reason := doubt(link.name, h.incarnation, self.latest):  # the control link says so in the log
            self.out += (Count("lives_refused", link.peer), link.refuse(reason))
            return
        if hello.lanes != self.config.hello.lanes or hello.lane != self.config.hello.lane:
            reason = (
                f"{hello.node} has {hello.lanes} lanes and {self.config.hello.node} has {self.config.hello.lanes}; "
                "set node.lanes to the same number everywhere"
            )
            if link.refused != reason:
                link.refused = reason
                self.out.append(ReportLink(link.peer, "refused", reason))
            self.out.append(link.refuse(reason))
            return
        if h.incarnation > link.theirs or link.refused:
            self.out.extend(link.adopt(h.incarnation, now))
            self.outboxes.pop(link.peer, None)
            for domain in self.domains.values():
                exchange.on_new_life(domain, link.peer, h.incarnation)
            self.out.append(link.hello(self.config.hello))
        elif h.to_incarnation != self.config.incarnation:
            self.out.append(link.hello(self.config.hello))
        link.heard = now
        if h.to_incarnation == self.config.incarnation:
            link.knows_us = True

    # ---------------------------------------------------------------------------------------- frames
    def _on_received(self, e: FrameReceived, now: float) -> None:
        try:
            self._on_frame(e, now)
        except packed.MessageError:
            # Its digests hold: a faulty or foreign sender. Nothing of it was used.
            self.out.append(Count("frames_unusable", e.header.sender))

    def _on_frame(self, e: FrameReceived, now: float) -> None:
        h = e.header
        kind = h.type
        link = self.links.get(h.sender)
        if link is None:
            self._drop(e, known=False)
            # A peer that heard of this node before this node heard of it; it says hello again until it is answered.
            if kind is not HELLO:
                self.out.append(Count("frames_unknown_sender"))
            return
        if kind is HELLO:
            self._on_hello(link, h, e.body, now)
            return
        if kind is REFUSE:
            link.refused = _refuse(e.body).reason
            self.out.append(ReportLink(link.peer, "refused", link.refused))
            return
        if not link.fresh(h, now, self.config.hello, self.out.append):
            self._drop(e, known=False)
            return
        if kind is HEARTBEAT:
            link.on_beat(e.body, now, self.out.append)
        elif kind is NACK:
            self.out.extend(link.on_nack(e.body))
        elif kind is DATA and self._too_early(h):
            # Not taken, so that it is sent again: what nobody here knows of must not fill memory.
            self._drop(e, known=False)
            self.out.append(Count("frames_refused", link.peer))
        elif not link.accept(h, self.out.append):
            self._drop(e, known=False)
        elif kind is FILLER:
            self._take((h.job, h.domain), h.sender, h.aux, h.incarnation)
        elif kind is DATA:
            self._on_data(e, now)
        else:
            self._drop(e)
            self.out.append(Count("frames_unexpected", link.peer))

    def _too_early(self, h: Header) -> bool:
        return h.job not in self.ended and self.early.refuses(h, self.domains.get((h.job, h.domain)))

    def _drop(self, e: FrameReceived, known: bool = True) -> None:
        """Release a frame's payload; ``known``: it was accepted on its link, so its credit goes back."""
        if e.handle is not None:
            self.out.append(Release(e.handle))
        if known:
            self._give_back(e.header)

    def _on_data(self, e: FrameReceived, now: float) -> None:
        h = e.header
        key = (h.job, h.domain)
        domain = self.domains.get(key)
        if h.job in self.ended or (domain is not None and domain.faulted):
            self._drop(e)
            self.out.append(Count("frames_stale", h.sender))
            return
        if domain is None or domain.early(h):
            self.early.keep_frame(key, e, now)
            return
        member = domain.index.get(h.sender)
        if member is None or h.epoch != domain.config.epoch:
            self._drop(e)
            self.out.append(Count("frames_stale", h.sender))
            return
        block = domain.partitions[h.key].block
        if h.elements != block.elements or h.dtype != block.dtype:
            self._drop(e)
            domain.fault(
                "TensorMismatch",
                f"{domain.config.members[member].name} sent {h.elements} elements of dtype {h.dtype} for tensor "
                f"{domain.partitions[h.key].name!r}, expected {block.elements} of {int(block.dtype)}",
                h.step,
                "exchange",
            )
            return
        if h.phase is AGGREGATE:
            exchange.on_aggregate(domain, h, e.handle, member)
        elif h.flags & Flag.ALL or block.owner == domain.config.me:
            exchange.on_contribution(domain, h, e.handle, member)
        else:
            self._drop(e)
            self.out.append(Count("frames_unexpected", h.sender))

    def _on_damaged(self, e: FrameDamaged, now: float) -> None:
        peer = e.header.sender if e.header is not None else e.peer
        link = self.links.get(peer) if peer is not None else None
        if link is None:
            self.out.append(Count("frames_corrupt"))
            return
        if link.on_damaged(e.header, self.out.append):
            self._fault_peer(link, e.header, "CorruptFrame", f"a frame from {link.name} was damaged twice ({e.reason})")

    def _on_unusable(self, e: Unusable, now: float) -> None:
        link = self.links.get(e.header.sender)
        if link is None or not link.fresh(e.header, now, self.config.hello, self.out.append):
            return
        self.out.append(Count("frames_unusable", link.peer))
        if link.accept(e.header, self.out.append):
            self._give_back(e.header)
            self._fault_peer(link, e.header, "CorruptFrame", f"a payload from {link.name} does not decode: {e.reason}")

    def _fault_peer(self, link: Link, h: Header | None, kind: str, message: str) -> None:
        """Fault the domain the frame belongs to, or every domain shared with the peer if that is unknown."""
        for domain in self.domains.values():
            shared = any(m.node == link.peer for m in domain.config.members)
            if shared and (h is None or h.type is not DATA or domain.id == (h.job, h.domain)):
                domain.fault(
                    kind,
                    message,
                    h.step if h is not None and h.step else domain.oldest_step,
                    "exchange",
                    (link.name,),
                    "check the network and memory of that machine; the step was not averaged",
                )

    # --------------------------------------------------------------------------------------- domains
    def _on_domain_opened(self, e: DomainOpened, now: float) -> None:
        c, key = e.config, e.config.id
        before = self.domains.get(key)
        if before is not None:
            if c.epoch <= before.config.epoch:
                return
            self.out.extend(opening.close(before))
            for outbox in self.outboxes.values():
                outbox.heaps.pop(key, None)
        outward = Outward(
            send=self._send,
            queue=lambda peer, step, block: self.outboxes[peer].add(key, step, block),
            take=lambda peer, nbytes, life: self._take(key, peer, nbytes, life),
        )
        self.domains[key] = opening.open_domain(e, outward, self.config.hello.lane, self.config.incarnation)
        self.ended.pop(c.job, None)
        if before is not None:
            opening.carry_over(self.domains[key], before, now)

    def _send(self, peer: int, h: Header, handle: Handle | None, wanted: Callable[[], bool]) -> None:
        link = self.links.get(peer)
        if link is not None and link.up:
            # A contribution sent from here is a retained one: it was asked for, credit does not hold it up.
            self._said()
            self.out.append(link.send(h, handle, wanted=wanted))

    def _said(self) -> None:
        """What domains have said so far comes before a frame that depends on it."""
        for domain in self.domains.values():
            if domain.out:
                self.out += domain.out
                domain.out.clear()

    def _give_back(self, h: Header) -> None:
        """What a frame had cost that came in order and was not used."""
        if h.phase is CONTRIBUTION:
            self._take((h.job, h.domain), h.sender, h.payload_bytes, h.incarnation)

    def _take(self, domain: DomainKey, peer: int, nbytes: int, life: int) -> None:
        """Credit goes back to the life that spent it; a newer one started from zero."""
        link = self.links.get(peer)
        if link is not None and link.theirs == life and domain[0] not in self.ended:
            self.out.extend(link.take(domain, nbytes))

    def _pump(self) -> None:
        """Send waiting contributions as far as credit allows; to peers in the order in which they were added."""
        peers = list(self.outboxes)
        if len(peers) > 1:
            peers.sort(key=self.turns.__getitem__)
        for peer in peers:
            link, outbox = self.links[peer], self.outboxes[peer]
            blocked: set[DomainKey] = set()
            while link.up and (head := outbox.peek(blocked)) is not None:
                key, step, block = head
                domain = self.domains.get(key)
                frame = frames.contribution(domain, step, block) if domain is not None else None
                if domain is None or frame is None:
                    outbox.pop(key)
                    continue
                header, handle, wanted = frame
                if not link.may_spend(key, header.payload_bytes, step <= domain.front):
                    blocked.add(key)
                    continue
                outbox.pop(key)
                self.out.append(link.send(header, handle, wanted=wanted))
            if not outbox.heaps:
                del self.outboxes[peer]

    def _on_section(self, e: SectionOpened, now: float) -> None:
        domain = self.domains.get(e.domain)
        if domain is None or e.section.index < len(domain.sections):
            return
        opening.open_section(domain, e.section, e.blocks, dict(e.memory), now)
        self._bring(domain, now)
        for push in self.early.take_pushes(e.domain):
            self._on_pushed(push, now)

    def _bring(self, domain: Domain, now: float) -> None:
        """What came too early and no longer is, except of lives that are over: those after them say it again."""
        for frame in self.early.take_frames(domain.id, domain):
            if self.links[frame.header.sender].theirs == frame.header.incarnation:
                self._on_data(frame, now)
            else:
                self._drop(frame)

    def _on_domain_closed(self, e: DomainClosed, now: float) -> None:
        domain = self.domains.pop(e.domain, None)
        if domain is not None:
            self.out.extend(opening.close(domain))
        self.ended[e.domain[0]] = None
        while len(self.ended) > 1024:
            self.ended.pop(next(iter(self.ended)))
        for frame in self.early.take_frames(e.domain):
            self._drop(frame)
        self.early.take_pushes(e.domain)
        for link in self.links.values():
            link.forget(e.domain)

    def _on_told(self, e: PlanKnown | ProposalKnown | Tuned | StatesTaken, now: float) -> None:
        if (domain := self.domains.get(e.domain)) is not None:
            encoding.told(domain, e, now)

    def _on_pushed(self, e: Pushed, now: float) -> None:
        if e.domain[0] in self.ended:
            return
        domain = self.domains.get(e.domain)
        early = domain is None or e.domain in self.early.pushes or any(k >= domain.end for k in e.keys)
        if domain is None or early:
            # After a restart workers may ring before the control machine has told us of their job. What they
            # ring after that waits too: a close must not overtake the keys it closes.
            self.early.keep_push(e)
        else:
            pushes.on_push(domain, e, now)

    def _on_made(self, e: Encoded | Finalised, now: float) -> None:
        if (domain := self.domains.get(e.domain)) is not None:
            exchange.on_made(domain, e)
        elif e.handle is not None:
            self.out.append(Release(e.handle))

    def _on_settled(self, e: Settled, now: float) -> None:
        if (domain := self.domains.get(e.domain)) is not None and completion.settle(domain, e):
            encoding.run_gated(domain, now)
            self._bring(domain, now)


_HANDLERS: dict[type, Callable[[LaneMachine, Any, float], None]] = {
    PeerAdded: LaneMachine._on_peer_added,
    PeerReset: LaneMachine._on_peer_reset,
    FrameReceived: LaneMachine._on_received,
    FrameDamaged: LaneMachine._on_damaged,
    Unusable: LaneMachine._on_unusable,
    DomainOpened: LaneMachine._on_domain_opened,
    SectionOpened: LaneMachine._on_section,
    DomainClosed: LaneMachine._on_domain_closed,
    **dict.fromkeys((PlanKnown, ProposalKnown, Tuned, StatesTaken), LaneMachine._on_told),
    Pushed: LaneMachine._on_pushed,
    Encoded: LaneMachine._on_made,
    Finalised: LaneMachine._on_made,
    Settled: LaneMachine._on_settled,
    Tick: LaneMachine._on_tick,
}
