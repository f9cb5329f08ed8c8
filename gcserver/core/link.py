"""One link between two lives of two processes: nothing lost silently, nothing counted twice.

What may live here: link sequences, acknowledgements, asking again, incarnations, credit. What may not:
rounds, steps, sockets. Both the lane machine and the control machine speak through it.

Theory. ZeroMQ keeps order inside a connection but loses and replays frames around a reconnect, and a
process that comes back knows nothing of what it had sent. So:

* A link exists between one *incarnation* of ours and one of theirs. Incarnations only grow. A frame from
  an older life is refused; one from a newer life makes us say HELLO, and their HELLO starts a new link:
  sequences and credit from zero, a fresh socket, so that nothing of the old link is left in a queue.
* DATA, CONTROL and FILLER frames are numbered. The sender keeps each until the peer's ``ack`` passes it; the
  receiver accepts every number once, in any order.
* A gap shows when a higher number arrives or a heartbeat names one. It is answered with NACK, again at
  each later heartbeat that still shows it. There are no blind timers.
* A connection on which nothing arrives any more is made anew (`arrivals.py`).
* A frame whose content is no longer wanted (its round is complete) is sent again as an empty FILLER.
* A contribution costs credit, which returns when the receiver is done with the payload. The total returned
  so far travels in headers and heartbeats: saying it twice changes nothing. Every domain has credit of its own:
  what waits at a receiver for one domain's turn must not hold up another, whose turn may be what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from gcproto import messages, packed, wire
from gcproto.records import Record, replace
from gcproto.wire import CONTRIBUTION, Flag, FrameType, Header
from gcserver.core.accounts import Accounts
from gcserver.core.arrivals import Arrivals
from gcserver.core.clocks import Clocks
from gcserver.core.effects import Count, Reconnect, ReportLink, Send
from gcserver.core.events import DomainKey, Handle
from gcserver.core.probe import Probe

#: Credit of one sender towards one receiver in one domain, bytes of contribution payload.
DEFAULT_CREDIT = 32 << 20
#: A receiver that has returned this share of the credit without saying so says so at once.
CREDIT_NOTICE = 4
#: Numbers further ahead than this are not believed.
MAX_AHEAD = 1 << 20
#: So many frames with damaged headers in a row, and none good between them, fault what the link serves.
MAX_BLIND = 8
#: Weight of a new round trip in the smoothed one (RFC 6298).
SMOOTHING = 0.125
#: At most one HELLO in answer to a burst of frames of a wrong life, seconds.
HELLO_PAUSE = 0.05

LinkEffect = Send | Reconnect | Count | ReportLink
#: Where a method puts effects in passing
Sink = Callable[[LinkEffect], None]

_beat = packed.Decoder[messages.Beat](messages.Beat)
_nack = packed.Decoder[messages.Nack](messages.Nack)


class Sent(Record, frozen=True, gc=True):
    """A numbered frame the peer has not acknowledged. ``wanted`` says whether its content still matters."""

    header: Header
    handle: Handle | None
    body: bytes
    wanted: Callable[[], bool]


def _always() -> bool:
    return True


@dataclass(slots=True)
class Link:
    """State of the link to one peer. ``node``/``incarnation`` are ours, ``peer``/``theirs`` the other side."""

    node: int
    incarnation: int
    peer: int
    name: str
    credit: int = DEFAULT_CREDIT
    theirs: int = 0
    refused: str = ""
    heard: float = 0.0
    quiet: bool = False
    knows_us: bool = False
    hello_at: float = -1.0
    next_seq: int = 1
    unacked: dict[int, Sent] = field(default_factory=dict)
    #: the highest number the peer acknowledged
    acked: int = 0
    received: int = 0
    ahead: set[int] = field(default_factory=set)
    highest: int = 0
    damaged: dict[int, int] = field(default_factory=dict)
    #: frames with damaged headers since the last good frame
    blind: int = 0
    accounts: Accounts = field(default_factory=Accounts)
    #: the peer's clock as its last heartbeat said it, and ours when that came
    their_clock: float = 0.0
    their_clock_at: float = 0.0
    #: smoothed round trip of heartbeats, seconds; None before the first
    rtt: float | None = None
    clocks: Clocks = field(default_factory=Clocks)
    #: our clock when the newest probe (a padded heartbeat) left, its bytes, and its round trip once that is known, s
    probe: Probe | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def up(self) -> bool:
        return self.theirs != 0 and not self.refused

    # ------------------------------------------------------------------------------------ sending
    def _unnumbered(self, kind: FrameType, body: bytes) -> Send:
        header = Header(
            kind,
            sender=self.node,
            incarnation=self.incarnation,
            to_incarnation=self.theirs,
            ack=self.received,
            payload_bytes=len(body),
            payload_digest=wire.digest(body),
        )
        return Send(self.peer, header, body=body)

    def hello(self, message: messages.Hello) -> Send:
        return self._unnumbered(FrameType.HELLO, packed.encode(message))

    def refuse(self, reason: str) -> Send:
        return self._unnumbered(FrameType.REFUSE, packed.encode(messages.Refuse(reason)))

    def heartbeat(
        self, closed: tuple[tuple[bytes, int, int, int], ...] = (), now: float = 0.0, pad: bytes = b""
    ) -> Send:
        """``now``: with it the heartbeat takes part in measuring the round trip. ``pad``: it is a probe of the link."""
        clock = now
        if pad:
            self.probe = Probe(now, len(pad))
        elif self.probe is not None and self.probe.awaited(now):
            # The peer echoes the newest clock it heard, which has to be the probe's until that is back.
            clock = 0.0
        credits = self.accounts.told()
        held = now - self.their_clock_at if now and self.their_clock else 0.0
        echo, silent = (self.their_clock, now - self.heard) if now else (0.0, 0.0)
        beat = messages.Beat(self.next_seq - 1, closed, credits, clock, echo, held, pad, silent)
        return self._unnumbered(FrameType.HEARTBEAT, packed.encode(beat))

    def send(
        self, header: Header, handle: Handle | None = None, body: bytes = b"", wanted: Callable[[], bool] = _always
    ) -> Send:
        """Number a frame and remember it until acknowledged. Contributions spend credit."""
        account = self.accounts[header.job, header.domain]
        if header.phase is CONTRIBUTION:
            account.spent += header.payload_bytes
        account.untold, seq = 0, self.next_seq
        header = header.on_link(link_seq=seq, ack=self.received, credit=account.taken, to_incarnation=self.theirs)
        self.unacked[seq] = Sent(header, handle, body, wanted)
        self.next_seq = seq + 1
        return Send(self.peer, header, handle, body)

    def outstanding(self, domain: DomainKey) -> int:
        """Contribution bytes of a domain that were sent and have not come back."""
        account = self.accounts.get(domain)
        return 0 if account is None else account.spent - account.returned

    def may_spend(self, domain: DomainKey, nbytes: int, first: bool) -> bool:
        """Whether a contribution of ``nbytes`` fits the credit; ``first``: it is of the first step not over here.
        Half is that step's alone, for which later ones may wait; one frame of it goes whatever its size beside them."""
        out, half = self.outstanding(domain), self.credit // 2
        return out + nbytes <= (self.credit if first else half) or (first and out <= half)

    def take(self, domain: DomainKey, nbytes: int) -> list[LinkEffect]:
        """A contribution payload of the peer was used or dropped: its credit goes back."""
        if self.accounts.full(domain):
            return [Count("credit_refused", self.peer)]
        account = self.accounts[domain]
        account.taken += nbytes
        account.untold += nbytes
        if self.up and account.untold * CREDIT_NOTICE >= self.credit:
            return [self.heartbeat()]
        return []

    def taken(self, domain: DomainKey) -> int:
        """Contribution bytes of a domain that came from the peer and are done with."""
        account = self.accounts.get(domain)
        return 0 if account is None else account.taken

    def forget(self, domain: DomainKey) -> None:
        """The domain is closed here: whoever still spends in it gets nothing back, and needs nothing."""
        self.accounts.pop(domain, None)

    def _resend(self, seqs: list[int]) -> list[LinkEffect]:
        out: list[LinkEffect] = []
        for seq in seqs:
            sent = self.unacked.get(seq)
            if sent is None:
                continue
            if sent.wanted():
                credit = self.taken((sent.header.job, sent.header.domain))
                again = replace(sent.header, flags=sent.header.flags | Flag.RESENT, ack=self.received, credit=credit)
                out.append(Send(self.peer, again, sent.handle, sent.body))
                out.append(Count("frames_resent", self.peer))
            else:
                header = self._filler(seq, sent.header)
                self.unacked[seq] = Sent(header, None, b"", _always)
                out.append(Send(self.peer, header))
        return out

    def _filler(self, seq: int, instead_of: Header) -> Header:
        """``aux`` carries the credit the lost contribution had cost, so that it comes back."""
        lost = instead_of.payload_bytes if instead_of.phase is CONTRIBUTION else 0
        return Header(
            FrameType.FILLER,
            job=instead_of.job,
            domain=instead_of.domain,
            sender=self.node,
            incarnation=self.incarnation,
            to_incarnation=self.theirs,
            link_seq=seq,
            ack=self.received,
            credit=self.taken((instead_of.job, instead_of.domain)),
            aux=lost,
        )

    # ---------------------------------------------------------------------------------- receiving
    def missing(self) -> tuple[int, ...]:
        gap = (s for s in range(self.received + 1, self.highest + 1) if s not in self.ahead)
        return tuple(islice(gap, messages.MAX_NACK))

    def nack(self) -> list[LinkEffect]:
        missing = self.missing()
        if not missing:
            return []
        return [
            self._unnumbered(FrameType.NACK, packed.encode(messages.Nack(missing))),
            Count("nacks_sent", self.peer),
        ]

    def adopt(self, incarnation: int, now: float) -> list[LinkEffect]:
        """A new life of the peer: everything about the link starts over."""
        first = self.theirs == 0
        self.theirs = incarnation
        self.refused, self.heard = "", now
        self.quiet = self.knows_us = False
        self.next_seq, self.acked = 1, 0
        self.unacked.clear()
        self.received = self.highest = 0
        self.ahead.clear()
        self.damaged.clear()
        self.blind = 0
        self.their_clock, self.rtt, self.probe = 0.0, None, None
        self.arrivals, self.clocks = Arrivals(now), Clocks()
        self.accounts.clear()
        out: list[LinkEffect] = [] if first else [Reconnect(self.peer)]
        out.append(ReportLink(self.peer, "up"))
        return out

    def fresh(self, h: Header, now: float, hello: messages.Hello, out: Sink) -> bool:
        """Whether ``h`` belongs to this link (both lives right). Anything but HELLO passes through here."""
        if h.incarnation < self.theirs:
            out(Count("frames_stale", self.peer))
            return False
        if h.incarnation > self.theirs or h.to_incarnation != self.incarnation:
            # Either we missed their HELLO or they missed ours; say HELLO (once for a burst), theirs will follow.
            out(Count("frames_stale", self.peer))
            if h.incarnation > self.theirs:
                self.knows_us = False
            if now - self.hello_at >= HELLO_PAUSE:
                self.hello_at = now
                out(self.hello(hello))
            return False
        self.heard = now
        self.blind = 0
        self.knows_us = True
        if self.quiet:
            self.quiet = False
            out(ReportLink(self.peer, "up"))
        self._acknowledge(h, now)
        return True

    def _acknowledge(self, h: Header, now: float) -> None:
        if h.credit:
            self.accounts.returned((h.job, h.domain), h.credit)
        if h.ack > self.acked and self.unacked:
            self.arrivals.seen(now)
        # By number: a step of many blocks leaves many, and looking for the first of a dict takes as long as what was
        # deleted before it.
        while self.acked < h.ack and self.acked + 1 < self.next_seq:
            self.acked += 1
            self.unacked.pop(self.acked, None)

    def accept(self, h: Header, out: Sink) -> bool:
        """Number bookkeeping of a fresh sequenced frame; False if it came before. Asks for what is missing."""
        seq = h.link_seq
        if seq == self.highest + 1 and self.highest == self.received:
            # The next one of a link that lacks nothing, as nearly all are.
            self.received = self.highest = seq
            return True
        if seq <= self.received or seq in self.ahead:
            out(Count("frames_duplicate", self.peer))
            return False
        if seq > self.highest + MAX_AHEAD:
            out(Count("frames_refused", self.peer))
            return False
        gap_before = self.highest
        self.highest = max(self.highest, seq)
        self.ahead.add(seq)
        self.damaged.pop(seq, None)
        while self.received + 1 in self.ahead:
            self.received += 1
            self.ahead.discard(self.received)
        if seq > gap_before + 1:
            for effect in self.nack():
                out(effect)
        return True

    def on_beat(self, body: bytes, now: float, out: Sink) -> messages.Beat:
        beat = _beat(body)
        self._round_trip(beat, now)
        self.arrivals.dated(beat.silent, now)
        for job, domain, total in beat.credits:
            self.accounts.returned((job, domain), total)
        self.highest = max(self.highest, min(beat.highest, self.highest + MAX_AHEAD))
        for effect in self.nack():
            out(effect)
        return beat

    def _round_trip(self, beat: messages.Beat, now: float) -> None:
        if beat.sent:
            self.their_clock, self.their_clock_at = beat.sent, now
        self.arrivals.echo(beat.echo, now)
        trip = now - beat.echo - beat.held
        # What an earlier life of ours said, or rubbish, gives no time that can have passed.
        if not (beat.echo and 0.0 <= trip <= now - beat.echo):
            return
        if self.probe is not None and beat.echo == self.probe.sent:
            if self.probe.trip is None:
                self.probe = Probe(self.probe.sent, self.probe.nbytes, trip)
        else:
            self.rtt = trip if self.rtt is None else self.rtt + SMOOTHING * (trip - self.rtt)
            if beat.sent:
                self.clocks.add(beat.sent, trip, now)

    def on_nack(self, body: bytes) -> list[LinkEffect]:
        # Each once, however often it is named.
        return self._resend(list(dict.fromkeys(_nack(body).missing)))

    def on_damaged(self, h: Header | None, out: Sink) -> bool:
        """A frame of this link failed its digest. Asks again; True when the same frame failed a second time.

        With a damaged header nobody knows which frame it was, or whether it is needed at all: the next heartbeat
        shows. Only a link on which nothing else arrives any more is given up.
        """
        out(Count("frames_corrupt", self.peer))
        if h is None:
            self.blind += 1
            for effect in self.nack():
                out(effect)
            return self.blind >= MAX_BLIND
        if h.incarnation != self.theirs or h.to_incarnation != self.incarnation or h.type not in wire.SEQUENCED:
            return False
        seq = h.link_seq
        if seq <= self.received or seq in self.ahead or seq > self.highest + MAX_AHEAD:
            return False
        self.highest = max(self.highest, seq)
        self.damaged[seq] = self.damaged.get(seq, 0) + 1
        for effect in self.nack():
            out(effect)
        return self.damaged[seq] >= 2

    # --------------------------------------------------------------------------------------- time
    def _stalled(self, now: float) -> bool:
        """Whether nothing arrives any more. A peer that never spoke may not be there yet, or our first HELLO to it be
        stuck: that costs a connection now and then, less often the longer it lasts."""
        if not self.arrivals.impatient(now):
            return False
        padding = self.probe.nbytes if self.probe is not None and self.probe.awaited(now) else 0
        return self.arrivals.stalled(now, padding + sum(s.header.payload_bytes for s in self.unacked.values()))

    def tick(
        self,
        now: float,
        hello: messages.Hello,
        quiet_after: float,
        closed: tuple[tuple[bytes, int, int, int], ...] = (),
    ) -> list[LinkEffect]:
        """Say HELLO until the peer is known, then heartbeat; report a peer that went quiet. Gives a connection up on
        which nothing arrives any more."""
        if self.refused:
            return [self.hello(hello)]
        out: list[LinkEffect] = []
        if self._stalled(now):
            out.append(Reconnect(self.peer))
            if self.up:  # One that is yet to come is nothing to be counted.
                out.append(Count("connections_stalled", self.peer))
        out.append(self.heartbeat(closed, now) if self.up and self.knows_us else self.hello(hello))
        if self.up and not self.quiet and now - self.heard > quiet_after:
            self.quiet = True
            out.append(ReportLink(self.peer, "quiet"))
        return out
