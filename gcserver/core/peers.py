"""The control machine's links to its peers.

What may live here: who is known, hellos, which frames count, what a frame carries. What may not: what is done about
it (`control.py`), numbers and acknowledgements (`link.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gcproto import messages, packed, wire
from gcproto.spans import AskSpans, SpansPart, TraceOrder
from gcproto.wire import FrameType, Header
from gcserver.core.control_config import ControlConfig
from gcserver.core.control_events import ControlEffect, KnowPeer, Log, PeerSaid, ProbeLink
from gcserver.core.effects import Count, ReportLink
from gcserver.core.events import FrameDamaged, FrameReceived, PeerAdded, PeerReset
from gcserver.core.link import Link
from gcserver.core.lives import LAST_LIFE, doubt

_hello = packed.Decoder[messages.Hello](messages.Hello)
_refuse = packed.Decoder[messages.Refuse](messages.Refuse)
_control = packed.Decoder[messages.Control](messages.Control)


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer is there, or there again as a new process; ``lost_memory``: its shared memory is another one."""

    lost_memory: bool


#: Connections are opened to at most so many nodes on nothing but their own word.
MAX_STRANGERS = 1024

#: What a frame has for the rest of the machine.
Heard = PeerUp | messages.Beat | messages.OfJobs


@dataclass(slots=True)
class Peers:
    """The links by node, and nodes by name. ``out`` is the machine's list of effects."""

    config: ControlConfig
    out: list[ControlEffect]
    links: dict[int, Link] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    #: which shared memory a node had when it was last up
    generations: dict[str, int] = field(default_factory=dict)
    #: nodes that only their own hello told us of; each costs sockets
    strangers: set[str] = field(default_factory=set)
    #: the last life of each that was not believed
    doubted: dict[str, int] = field(default_factory=dict)
    #: the highest number that a peer's life can have by now
    latest: int = LAST_LIFE

    def on_added(self, e: PeerAdded, now: float) -> None:
        """There is a socket to a node: say hello."""
        if e.node not in self.links and e.node != self.config.node:
            link = Link(self.config.node, self.config.incarnation, e.node, e.name, heard=now)
            self.links[e.node] = link
            self.names[e.name] = e.node
            self.out.append(link.hello(self.config.hello))

    def on_reset(self, e: PeerReset) -> None:
        """A connection was lost: whatever it lost shows when the peer compares our heartbeat with what it has."""
        link = self.links.get(e.peer)
        if link is not None and link.up:
            self.out.append(link.heartbeat())

    def on_probe(self, e: ProbeLink, now: float) -> None:
        """Measure the link to a peer by what a padded heartbeat takes; nothing while the peer is away."""
        link = self.link(e.peer)
        if link is not None and link.up and link.knows_us:
            self.out.append(link.heartbeat((), now, e.pad))

    def send(self, node: str, message: messages.Control) -> None:
        """One control message. Lost if the link is down: what matters is said again when it comes up."""
        link = self.link(node)
        if link is not None and link.up:
            body = packed.encode(message)
            header = Header(
                FrameType.CONTROL,
                sender=self.config.node,
                incarnation=self.config.incarnation,
                payload_bytes=len(body),
                payload_digest=wire.digest(body),
            )
            self.out.append(link.send(header, body=body))

    def receive(self, e: FrameReceived, now: float) -> tuple[str, Heard] | None:
        """(peer's name, what it says) of a frame that counts and that is not for the link itself."""
        try:
            return self._on_frame(e, now)
        except packed.MessageError as error:
            # Its digests hold: a faulty or foreign sender. Nothing of it was used.
            self.out.append(Count("frames_unusable", e.header.sender))
            self.out.append(Log("error", f"a {e.header.type.name} frame cannot be read: {error}"))
            return None

    def _on_frame(self, e: FrameReceived, now: float) -> tuple[str, Heard] | None:
        h = e.header
        if h.sender == self.config.node:
            if h.incarnation != self.config.incarnation:
                self.out.append(
                    Log("error", f"another daemon uses the name {self.config.hello.node!r}; names must differ")
                )
            return None
        link = self.links.get(h.sender)
        if h.type is FrameType.HELLO:
            return self._on_hello(link, h, e.body, now)
        if link is None:
            self.out.append(Count("frames_unknown_sender"))
            return None
        if h.type is FrameType.REFUSE:
            reason = _refuse(e.body).reason
            if link.refused != reason:
                self.out.append(Log("error", f"peer {link.name} refuses this node: {reason}"))
            link.refused = reason
            return None
        if not link.fresh(h, now, self.config.hello, self.out.append):
            return None
        if h.type is FrameType.HEARTBEAT:
            return link.name, link.on_beat(e.body, now, self.out.append)
        if h.type is FrameType.NACK:
            self.out.extend(link.on_nack(e.body))
        elif link.accept(h, self.out.append) and h.type is FrameType.CONTROL:
            message = _control(e.body)
            if not isinstance(message, TraceOrder | AskSpans | SpansPart):
                return link.name, message
            self.out.append(PeerSaid(link.name, message))
        return None

    def _on_hello(self, link: Link | None, h: Header, body: bytes, now: float) -> tuple[str, PeerUp] | None:
        hello = _hello(body)
        if link is None:
            # A peer that knows us and that nobody told us of: answer at the address it gives.
            if wire.node_id(hello.node) != h.sender:
                return None
            if len(self.strangers) >= MAX_STRANGERS and hello.node not in self.strangers:
                self.out.append(Count("peers_refused"))
                return None
            self.strangers.add(hello.node)
            self.out.append(KnowPeer(hello.node, hello.address))
            return None
        if h.incarnation < link.theirs:
            self.out.append(Count("frames_stale", link.peer))
            return None
        if reason := doubt(link.name, h.incarnation, self.latest):
            # What the peer has been until now stays: this may be nobody's next life.
            self.out.append(Count("lives_refused", link.peer))
            if self.doubted.get(link.name) != h.incarnation:
                self.doubted[link.name] = h.incarnation
                self.out.append(Log("error", f"refusing {link.name}: {reason}"))
            self.out.append(link.refuse(reason))
            return None
        if hello.node != link.name:
            reason = f"the peer at {link.name}'s address calls itself {hello.node}"
        elif hello.lanes != self.config.hello.lanes:
            reason = (
                f"{hello.node} has {hello.lanes} lanes and {self.config.hello.node} has "
                f"{self.config.hello.lanes}; set node.lanes to the same number everywhere"
            )
        if reason:
            if link.refused != reason:
                self.out.append(Log("error", f"refusing {link.name}: {reason}"))
                link.refused = reason
            self.out.append(link.refuse(reason))
            return None
        lost = self.generations.get(link.name, hello.generation) != hello.generation
        self.generations[link.name] = hello.generation
        new = h.incarnation > link.theirs or bool(link.refused)
        if new:
            again = link.theirs != 0
            self.out.extend(e for e in link.adopt(h.incarnation, now) if not isinstance(e, ReportLink))
            self.out.append(link.hello(self.config.hello))
            ours = self.config.hello.version
            other = f" with release {hello.version}; this is {ours}" if hello.version != ours else ""
            self.out.append(Log("info", f"peer {link.name} is {'back' if again else 'up'}{other}"))
        elif h.to_incarnation != self.config.incarnation:
            self.out.append(link.hello(self.config.hello))
        link.heard = now
        if h.to_incarnation == self.config.incarnation:
            link.knows_us = True
        return (link.name, PeerUp(lost)) if new else None

    def on_damaged(self, e: FrameDamaged) -> None:
        """A frame failed its digest: the link asks again."""
        peer = e.header.sender if e.header is not None else e.peer
        link = self.links.get(peer) if peer is not None else None
        if link is None:
            self.out.append(Count("frames_corrupt"))
        elif link.on_damaged(e.header, self.out.append):
            self.out.append(Log("warning", f"control frames from {link.name} are damaged again and again: {e.reason}"))

    def link(self, name: str) -> Link | None:
        return self.links.get(self.names.get(name, 0))

    def heard(self, name: str) -> float | None:
        """When a peer was last heard of; None of one that is not known."""
        link = self.link(name)
        return None if link is None else link.heard

    def meet(self, nodes: Iterable[tuple[str, str]]) -> None:
        """Ask for links to nodes, by (name, address), to which there are none."""
        for name, address in nodes:
            if name != self.config.hello.node and name not in self.names:
                self.out.append(KnowPeer(name, address))

    def tell_all(self, message: messages.Control) -> None:
        for name in self.names:
            self.send(name, message)

    def tick(self, now: float, closed: tuple[tuple[bytes, int, int, int], ...]) -> None:
        """Hellos or heartbeats, which carry ``closed``: (job, domain, step, digest of what was pushed in it)."""
        for link in self.links.values():
            quiet = link.tick(now, self.config.hello, self.config.quiet_after, closed)
            self.out.extend(x for x in quiet if not isinstance(x, ReportLink))
            if any(isinstance(x, ReportLink) for x in quiet):
                self.out.append(Log("warning", f"nothing heard from {link.name} for {self.config.quiet_after:g} s"))
