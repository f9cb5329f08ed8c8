"""Rounds of one domain on one lane: from a worker's push to the average in its output slot.

What may live here: what a contribution, an aggregate, a push or a settlement does to a domain. What may
not: links and queues (`lane.py`), steps' bookkeeping (`steps.py`), I/O.

A round, owner scheme:

    push (all local ranks) -> decide, log -> Encode -> Encoded
        owner:  own contribution parked          others: contribution to the owner
        owner:  in member order Accumulate -> all there: Finalise -> Finalised -> aggregate to all, CommitOutput
        others: aggregate -> Decode -> CommitOutput
    CommitOutput -> Notify; last block of a closed step: LogStep, ReportStep; Settled: Flip.

All scheme: the contribution goes to every member, everyone accumulates in member order and finalises
without encoding again. A contribution for a round that is complete here is how a peer that came back asks
for what it missed: the retained payload of that round is the answer.

Two exchanges (codecs with ``rounds`` 2), always through the owner: Finalise of stage 0 gives a plain sum, which goes to
all; everyone encodes stage 1 from it and contributes that; Finalise of stage 1 gives the result. The owner retains both
aggregates: a member that lost its process redoes both stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gcproto import wire
from gcproto.manifest import ADDRESS_ALIGN, Block, Section
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import plan as plans
from gcserver.core.effects import (
    Accumulate,
    CommitOutput,
    Count,
    Decode,
    Encode,
    Finalise,
    Flip,
    LaneEffect,
    LogDecision,
    LogStep,
    Notify,
    Release,
    ReportClosed,
    ReportFault,
    ReportStep,
    ReportWaiting,
)
from gcserver.core.events import (
    BlockMemory,
    CodecChoice,
    Decision,
    DomainConfig,
    Encoded,
    Finalised,
    Handle,
    Plan,
    Pushed,
    Retained,
    Settled,
    StepRecord,
    Versions,
)
from gcserver.core.rounds import OPERATION, Exchange, Parked, Partition, Round
from gcserver.core.steps import Step, StepBook

#: ``aux`` of a DATA frame from retained memory: an answer, which needs none. In the all scheme two members that
#: are both complete would otherwise answer each other's answers.
ANSWER = 1


@dataclass(slots=True)
class Outward:
    """What a domain needs of its lane: a numbered send, a queued contribution, credit back to a peer."""

    send: Callable[[int, Header, Handle | None, Callable[[], bool]], None]
    queue: Callable[[int, int, int], None]
    #: (peer, bytes, the life of the peer that spent them)
    take: Callable[[int, int, int], None]


@dataclass(slots=True)
class Domain:
    """One domain on one lane. ``out`` collects the effects of the event being handled."""

    config: DomainConfig
    outward: Outward
    lane: int
    incarnation: int
    steps: StepBook
    plans: dict[int, Plan]
    partitions: dict[int, Partition] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    out: list[LaneEffect] = field(default_factory=list)
    gated: dict[int, int] = field(default_factory=dict)
    notices: dict[tuple[int, bool, int | None], list[int]] = field(default_factory=dict)
    finished: dict[int, StepRecord] = field(default_factory=dict)
    #: blocks that peers contributed to, by steps not closed here yet
    remote: dict[int, set[int]] = field(default_factory=dict)
    #: end of the address space as far as its sections are open
    end: int = 0
    faulted: bool = False
    waiting_said: bool = False

    # ------------------------------------------------------------------------------ opening, restart
    def resume(self, finished: tuple[StepRecord, ...]) -> None:
        """Tell the control machine again of finished steps it may not have heard of."""
        self.finished = {r.step: r for r in finished}
        for record in sorted(finished, key=lambda r: r.step):
            if record.step > self.steps.settled:
                self.out.append(
                    ReportStep(self.config.id, record.step, record.nonfinite, record.proposal, record.digest)
                )

    def open_section(
        self, section: Section, blocks: tuple[Block, ...], memory: dict[int, BlockMemory], now: float
    ) -> None:
        """Take up a section's blocks of this lane, with whatever shared memory remembers of them."""
        self.sections.append(section)
        # As AddressSpace counts.
        self.end = -(-(self.end + max(section.nbytes, 1)) // ADDRESS_ALIGN) * ADDRESS_ALIGN
        for block in blocks:
            if block.lane != self.lane:
                continue
            known = memory.get(block.key)
            p = self.partitions[block.key] = Partition.restored(block, section, known)
            if known is not None:
                self._restore(p, known, now)

    def _restore(self, p: Partition, known: BlockMemory, now: float) -> None:
        for versions, owner in ((p.residual, False), (p.owner_residual, True)):
            if versions.settled < versions.written <= p.out_step:
                if versions.written > self.steps.settled:
                    p.unsettled = max(p.unsettled, versions.written)
                else:
                    self._flip(p, versions.written, owner)
        for rank, step in enumerate(known.pushed):
            if step > p.out_step:
                self._join(p, rank, step, known.push_flags, known.grad_scale, now)

    # ---------------------------------------------------------------------------------------- pushes
    def on_push(self, e: Pushed, now: float) -> None:
        if self.faulted:
            return
        if e.step <= 0 or not 0 <= e.rank < self.config.local_ranks:
            self.out.append(Count("pushes_unusable"))
            return
        record = self.finished.get(e.step)
        step = None if record is not None or e.step <= self.steps.settled else self.steps.get(e.step, now)
        for key in e.keys:
            p = self.partitions.get(key)
            if p is None:
                self.fault("TensorMismatch", f"a worker pushed unknown address {key}", e.step, "push")
                return
            late = e.step > p.out_step if step is None else e.rank in step.closed and key not in step.keys[e.rank]
            if late:
                self.fault(
                    "TensorMismatch",
                    f"local rank {e.rank} pushed tensor {p.name!r} in step {e.step} after it had closed that step",
                    e.step,
                    "push",
                )
                return
            if step is not None:
                step.keys[e.rank].add(key)
            if e.step <= p.out_step:
                # The same push again, after a restart of ours: the result is there.
                if step is not None:
                    step.done.add(key)
                    if e.step == p.out_step:
                        step.nonfinite |= p.out_nonfinite
                        step.proposal = max(step.proposal, p.out_proposal)
                self._notify(e.step, p.out_nonfinite, key, e.rank)
            else:
                self._join(p, e.rank, e.step, e.flags, e.grad_scale, now)
        if step is not None and e.close and e.rank not in step.closed:
            self._close(step, e.rank)

    def _close(self, step: Step, rank: int) -> None:
        step.closed.add(rank)
        if not step.is_closed:
            return
        odd = step.close()
        if odd is None:
            odd = min(self.remote.pop(step.number, set()) - step.expected, default=None)
        if odd is not None:
            self._mismatch(step.number, self.partitions[odd].name)
            return
        self._try_finish(step)

    def _mismatch(self, step: int, name: str) -> None:
        self.fault(
            "TensorMismatch",
            f"in step {step} tensor {name!r} was pushed by some ranks and not by others",
            step,
            "push",
            advice="let every rank make the same calls in the same order",
        )

    def _join(self, p: Partition, rank: int, step: int, flags: int, scale: float, now: float) -> None:
        """Local rank ``rank`` has its input of ``step`` in the slot."""
        r = p.round(step)
        if rank in r.local:
            return
        self.steps.get(step, now).keys[rank].add(p.block.key)
        if not self._same_operation(p, r, flags, f"local rank {rank}"):
            return
        r.local.add(rank)
        r.grad_scale = scale
        if len(r.local) == self.config.local_ranks:
            self._ready(p, r, now)

    def _same_operation(self, p: Partition, r: Round, flags: int, who: str) -> bool:
        operation = flags & OPERATION
        if r.flags is None:
            r.flags = operation
        elif r.flags != operation:
            ours, theirs = (("the mean" if f & Flag.AVERAGE else "the sum") for f in (r.flags, operation))
            self.fault(
                "TensorMismatch",
                f"tensor {p.name!r}, step {r.step}: {who} asks for {theirs}, others for {ours}",
                r.step,
                "push",
                advice="give the same `average=` on every rank",
            )
            return False
        return True

    def _same_codec(self, p: Partition, r: Round, codec: int, level: int, who: str) -> bool:
        if r.coding is None:
            r.coding = (codec, level, who)
        elif r.coding[:2] != (codec, level):
            first, me = r.coding, self.config.members[self.config.me].name
            self.fault(
                "CorruptFrame",
                f"tensor {p.name!r}, step {r.step}: {first[2]} uses codec {first[0]} at level {first[1]}, {who} codec "
                f"{codec} at level {level}; a round has one codec",
                r.step,
                "exchange",
                tuple(n for n in (first[2], who) if n != me),
                "run the same release on every node; the step was not averaged",
            )
            return False
        return True

    # -------------------------------------------------------------------------------------- encoding
    def _ready(self, p: Partition, r: Round, now: float) -> None:
        """All local inputs are in. Waits for settlements that the plan or the residuals need."""
        if not self.steps.may_run(r.step):
            self.gated[p.block.key] = r.step
            return
        step = self.steps.get(r.step, now)
        decision = p.logged
        if decision is None or decision.step != r.step:
            codec, _ = self._choose(p, self.steps.plan_version(r.step))
            decision = Decision(
                r.step, self.steps.plan_version(r.step), step.own_proposal, codec.spec, self._seed(p, r, codec)
            )
        if decision.plan not in self.plans:
            self.gated[p.block.key] = r.step
            return
        codec, scheme = self._choose(p, decision.plan)
        if codec.feedback and p.unsettled > self.steps.settled:
            self.gated[p.block.key] = r.step
            return
        self.gated.pop(p.block.key, None)
        if not self._same_codec(p, r, codec.id, codec.level, self.config.members[self.config.me].name):
            return
        r.decision, r.codec, r.everyone, r.encoding = decision, codec, scheme == "all" and codec.rounds == 1, True
        r.proposal = max(r.proposal, decision.proposal)
        if decision != p.logged:
            p.logged = decision
            self.out.append(LogDecision(self.config.id, p.block.key, decision))
        write = 1 - p.residual.current
        if codec.feedback:
            p.residual = replace(p.residual, written=r.step)
        retain = None
        if r.everyone:
            if p.retained and p.retained[0].step == r.step:
                # Encoded before a restart: the same bytes go to the same place, the other one is still needed.
                self._release(p.retained[0].handle)
                p.next_slot = p.retained[0].slot
                p.retained = p.retained[1:]
            # The payload before the last one: whoever contributes to this round has had that.
            self._forget(p, lambda k: k.step == p.retained[0].step)
            retain = r.slot = p.free_slot()
        self.out.append(
            Encode(
                self.config.id,
                p.block.key,
                r.step,
                codec,
                decision.seed,
                p.residual.current,
                write,
                retain,
                r.flags or 0,
                decision.proposal,
            )
        )

    def _choose(self, p: Partition, version: int) -> tuple[CodecChoice, str]:
        if p.choice is None or p.choice[0] != version:
            codec, scheme = plans.choose(
                self.plans[version], p.section, p.block, self.config.min_compress_bytes, len(self.config.members)
            )
            p.choice = (version, codec, scheme)
        return p.choice[1], p.choice[2]

    def _seed(self, p: Partition, r: Round, codec: CodecChoice) -> int:
        """From (job or its seed, step, key, node) and not from the epoch, so that a retry draws the same; where all
        nodes must draw alike, without the node."""
        c = self.config
        origin = c.job if c.seed is None else c.seed.to_bytes(8, "little")
        node = 0 if codec.shared_seed else c.members[c.me].node
        text = origin + b"".join(v.to_bytes(8, "little") for v in (c.domain, r.step, p.block.key, node))
        return wire.digest(text)

    def _middle(self, p: Partition, r: Round, aggregate: Handle | None) -> None:
        """The first exchange is over: on to the second, from its sum."""
        self._end_exchange(p, r)
        if r.codec is None or r.decision is None:
            return
        r.stage, r.encoding = 1, True
        read = p.residual.current
        self.out.append(
            Encode(
                self.config.id,
                p.block.key,
                r.step,
                r.codec,
                r.decision.seed,
                read,
                1 - read,
                None,
                r.flags or 0,
                r.decision.proposal,
                1,
                aggregate,
            )
        )

    def _end_exchange(self, p: Partition, r: Round) -> None:
        """Nobody needs our payload of it any more, nor what others sent."""
        x = r.now
        x.over = True
        own, x.own = x.own, None
        if own is not None and not r.everyone:
            self._release(own.handle)
        self._unpark(x, own)

    def _unpark(self, x: Exchange, own: Parked | None) -> None:
        """Whatever is still parked goes back."""
        for member, parked in sorted(x.parked.items()):
            if parked is not own and member != self.config.me:
                self._release(parked.handle)
                self.outward.take(self.config.members[member].node, parked.nbytes, parked.life)
        x.parked.clear()

    def on_encoded(self, e: Encoded) -> None:
        p = self.partitions[e.key]
        r = p.rounds.get(e.step)
        if r is None or self.faulted or r.codec is None or r.stage != e.stage:
            self._release(e.handle)
            return
        r.encoding = False
        x = r.now
        x.own = Parked(e.handle, e.nbytes, r.codec.id, r.codec.level, e.nonfinite)
        x.own_digest = e.digest
        me, owner = self.config.me, p.block.owner
        if r.everyone:
            flags = (r.flags or 0) | (Flag.NONFINITE if e.nonfinite else 0) | Flag.ALL
            self._retain(
                p,
                Retained(
                    r.step, r.slot, e.handle, e.nbytes, e.digest, r.codec.id, r.codec.level, int(flags), r.proposal
                ),
            )
            for member in range(len(self.config.members)):
                if member != me:
                    self.outward.queue(self.config.members[member].node, r.step, e.key)
        elif owner != me:
            self.outward.queue(self.config.members[owner].node, r.step, e.key)
            return
        elif r.double and r.stage == 0 and (kept := p.kept(r.step)) is not None:
            self._adopt(p, r, kept)
            return
        x.have.add(me)
        x.parked[me] = x.own
        self._advance(p, r, r.stage)

    def _adopt(self, p: Partition, r: Round, kept: Retained) -> None:
        """An earlier life of this owner had the first exchange's sum: others may have it, so it is the one."""
        asked = sorted(r.now.have)
        r.proposal = max(r.proposal, kept.proposal)
        for member in asked:
            self._send_retained(p, kept, self.config.members[member].node)
        if kept.flags & Flag.NONFINITE:
            self._void(p, r)
        else:
            self._middle(p, r, kept.handle)

    def _void(self, p: Partition, r: Round) -> None:
        """The first exchange was not finite: there is no second."""
        codec = r.codec
        if codec is not None:
            flags = (r.flags or 0) | Flag.NONFINITE
            self.out.append(
                Decode(self.config.id, p.block.key, r.step, None, codec.id, codec.level, 1, int(flags), True)
            )
        self._complete(p, r, True)

    def requeue(self, peer: int) -> None:
        """``peer`` is a new process: whatever rounds under way need from us goes to it again."""
        if all(m.node != peer for m in self.config.members):
            return
        for p in self.partitions.values():
            for r in p.rounds.values():
                if r.now.own is not None and (r.everyone or self.config.members[p.block.owner].node == peer):
                    self.outward.queue(peer, r.step, p.block.key)

    def contribution(self, step: int, key: int) -> tuple[Header, Handle | None, Callable[[], bool]] | None:
        """The frame of a queued contribution, or None when nobody needs it any more."""
        p = self.partitions.get(key)
        if self.faulted or p is None:
            return None
        kept = p.kept(step)
        if kept is not None and kept.flags & Flag.ALL:
            # Complete here or not: in the all scheme every member needs it.
            return self._retained_frame(p, kept)
        r = p.rounds.get(step)
        own = None if r is None else r.now.own
        if r is None or own is None or r.decision is None:
            return None
        flags = (r.flags or 0) | (Flag.NONFINITE if own.nonfinite else 0) | (Flag.SECOND if r.stage else 0)
        header = self._header(
            p,
            Phase.CONTRIBUTION,
            step,
            own.codec,
            own.level,
            int(flags),
            own.nbytes,
            r.now.own_digest,
            r.decision.plan,
            r.decision.proposal,
        )
        mine, stage = r, r.stage
        return header, own.handle, lambda: not self.faulted and not mine.complete and mine.stage == stage

    def _header(
        self,
        p: Partition,
        phase: Phase,
        step: int,
        codec: int,
        level: int,
        flags: int,
        nbytes: int,
        digest: int,
        plan: int,
        proposal: int,
        aux: int = 0,
    ) -> Header:
        c = self.config
        return Header(
            FrameType.DATA,
            phase,
            dtype=int(p.block.dtype),
            flags=flags,
            codec=codec,
            level=level,
            job=c.job,
            domain=c.domain,
            epoch=c.epoch,
            step=step,
            key=p.block.key,
            plan=plan,
            proposal=proposal,
            sender=c.members[c.me].node,
            incarnation=self.incarnation,
            elements=p.block.elements,
            payload_bytes=nbytes,
            payload_digest=digest,
            aux=aux,
        )

    # ---------------------------------------------------------------------------- frames from peers
    def on_contribution(self, h: Header, handle: Handle | None, member: int) -> None:
        """One member's contribution to a round: parked, then accumulated in member order."""
        p = self.partitions[h.key]
        stage = 1 if h.flags & Flag.SECOND else 0
        under_way = p.rounds.get(h.step)
        # Of a round under way only an owner's first exchange can be over.
        if h.step <= p.out_step or (under_way is not None and under_way.exchanges[stage].over):
            self._give_back(h, handle)
            kept = p.kept(h.step, stage)
            if kept is None or h.aux == ANSWER:
                self.out.append(Count("frames_stale", h.sender))
            else:
                self._send_retained(p, kept, h.sender)
            return
        step = self.steps.open.get(h.step)
        if step is not None and step.is_closed:
            if h.key not in step.expected:
                self._give_back(h, handle)
                self._mismatch(h.step, p.name)
                return
        else:
            self.remote.setdefault(h.step, set()).add(h.key)
        r = p.round(h.step)
        x = r.exchanges[stage]
        if member in x.have:
            self._give_back(h, handle)
            self.out.append(Count("contributions_duplicate", h.sender))
            return
        who = self.config.members[member].name
        if not (self._same_operation(p, r, h.flags, who) and self._same_codec(p, r, h.codec, h.level, who)):
            self._give_back(h, handle)
            return
        x.have.add(member)
        r.everyone = r.everyone or bool(h.flags & Flag.ALL)
        r.proposal = max(r.proposal, h.proposal)
        nonfinite = bool(h.flags & Flag.NONFINITE)
        x.parked[member] = Parked(handle, h.payload_bytes, h.codec, h.level, nonfinite, h.incarnation)
        self._advance(p, r, stage)

    def _give_back(self, h: Header, handle: Handle | None) -> None:
        self._release(handle)
        self.outward.take(h.sender, h.payload_bytes, h.incarnation)

    def _release(self, handle: Handle | None) -> None:
        if handle is not None:
            self.out.append(Release(handle))

    def _forget(self, p: Partition, but: Callable[[Retained], bool]) -> None:
        """Release what is retained, except where ``but`` says so."""
        for old in p.retained:
            if not but(old):
                self._release(old.handle)
        p.retained = tuple(k for k in p.retained if but(k))

    def _advance(self, p: Partition, r: Round, stage: int) -> None:
        """Accumulate whatever is next in member order; with everyone there, finalise."""
        members = self.config.members
        x = r.exchanges[stage]
        while (parked := x.parked.pop(x.next_member, None)) is not None:
            member = x.next_member
            self.out.append(
                Accumulate(
                    self.config.id,
                    p.block.key,
                    r.step,
                    member,
                    parked.handle,
                    parked.codec,
                    parked.level,
                    member == 0,
                    parked.nonfinite,
                    stage,
                )
            )
            x.nonfinite |= parked.nonfinite
            x.next_member += 1
            if member != self.config.me:
                self._release(parked.handle)
                self.outward.take(members[member].node, parked.nbytes, parked.life)
        if x.next_member < len(members) or x.finalising:
            return
        x.finalising = True
        codec = None if r.everyone else r.codec
        versions = p.residual if r.double else p.owner_residual
        if codec is not None and codec.feedback and not r.double:
            p.owner_residual = replace(p.owner_residual, written=r.step)
        if codec is not None:
            # All contributions are in, so everyone has the aggregates of the round before this one.
            self._forget(p, lambda k: k.step == r.step and k.stage < stage)
            r.slot = p.free_slot()
        seed = r.decision.seed if r.decision is not None else 0
        if codec is not None and not codec.shared_seed:
            seed = wire.digest(seed.to_bytes(8, "little") + b"owner")
        divisor = self.config.divisor if (r.flags or 0) & Flag.AVERAGE else 1
        self.out.append(
            Finalise(
                self.config.id,
                p.block.key,
                r.step,
                codec,
                seed,
                versions.current,
                1 - versions.current,
                r.slot,
                divisor,
                x.nonfinite,
                (r.flags or 0) | (Flag.SECOND if stage else 0),
                r.proposal,
                stage,
            )
        )

    def _retain(self, p: Partition, new: Retained) -> None:
        p.retained = (new, *p.retained)
        p.next_slot = int(new.slot == 0)

    def on_finalised(self, e: Finalised) -> None:
        p = self.partitions[e.key]
        r = p.rounds.get(e.step)
        if r is None or self.faulted or r.codec is None or r.stage != e.stage:
            self._release(e.handle)
            return
        nonfinite = e.nonfinite or r.now.nonfinite
        middle = r.double and e.stage == 0
        if not middle or nonfinite:
            # Committed before it leaves: members that have the aggregate contribute no more to this round, so a
            # restart must find it complete.
            self._complete(p, r, nonfinite)
        if r.everyone:
            return
        flags = (r.flags or 0) | (Flag.NONFINITE if nonfinite else 0) | (Flag.SECOND if e.stage else 0)
        flags |= Flag.SUM_UNITS if r.codec.sum_units else 0
        kept = Retained(r.step, r.slot, e.handle, e.nbytes, e.digest, r.codec.id, r.codec.level, int(flags), r.proposal)
        self._retain(p, kept)
        for member in self.config.members:
            if member.node != self.config.members[self.config.me].node:
                self._send_retained(p, kept, member.node)
        if middle and not nonfinite:
            self._middle(p, r, e.handle)

    def _send_retained(self, p: Partition, kept: Retained, peer: int) -> None:
        header, handle, wanted = self._retained_frame(p, kept, ANSWER)
        self.outward.send(peer, header, handle, wanted)

    def _retained_frame(
        self, p: Partition, kept: Retained, aux: int = 0
    ) -> tuple[Header, Handle | None, Callable[[], bool]]:
        phase = Phase.CONTRIBUTION if kept.flags & Flag.ALL else Phase.AGGREGATE
        plan = p.logged.plan if p.logged is not None else 0
        header = self._header(
            p, phase, kept.step, kept.codec, kept.level, kept.flags, kept.nbytes, kept.digest, plan, kept.proposal, aux
        )
        return header, kept.handle, lambda: not self.faulted and kept in p.retained

    def on_aggregate(self, h: Header, handle: Handle | None, member: int) -> None:
        """The owner's result of a round we contributed to."""
        p = self.partitions[h.key]
        r = p.rounds.get(h.step)
        stage = 1 if h.flags & Flag.SECOND else 0
        if r is None or r.stage != stage or r.now.own is None or member != p.block.owner or h.step <= p.out_step:
            self._release(handle)
            self.out.append(Count("frames_stale" if h.step <= p.out_step else "frames_unexpected", h.sender))
            return
        if not self._same_codec(p, r, h.codec, h.level, self.config.members[member].name):
            self._release(handle)
            return
        nonfinite = bool(h.flags & Flag.NONFINITE)
        divisor = self.config.divisor if h.flags & Flag.AVERAGE and h.flags & Flag.SUM_UNITS else 1
        r.proposal = max(r.proposal, h.proposal)
        if r.double and stage == 0 and not nonfinite:
            self._middle(p, r, handle)
            self._release(handle)
            return
        self.out.append(
            Decode(self.config.id, h.key, h.step, handle, h.codec, h.level, divisor, h.flags, nonfinite, stage)
        )
        self._release(handle)
        self._complete(p, r, nonfinite)

    # ------------------------------------------------------------------------- completion, settling
    def _complete(self, p: Partition, r: Round, nonfinite: bool) -> None:
        key = p.block.key
        self.out.append(CommitOutput(self.config.id, key, r.step, nonfinite, r.proposal))
        r.complete = True
        del p.rounds[r.step]
        p.out_step, p.out_nonfinite, p.out_proposal = r.step, nonfinite, r.proposal
        self._end_exchange(p, r)
        for x in r.exchanges:
            self._unpark(x, None)
        if r.codec is not None and r.codec.feedback:
            p.unsettled = r.step
        self._notify(r.step, nonfinite, key, None)
        step = self.steps.open[r.step]
        step.done.add(key)
        step.nonfinite |= nonfinite
        step.proposal = max(step.proposal, r.proposal)
        self._try_finish(step)

    def _notify(self, step: int, nonfinite: bool, key: int, rank: int | None) -> None:
        self.notices.setdefault((step, nonfinite, rank), []).append(key)

    def take_notices(self) -> list[LaneEffect]:
        """What the event just handled has for workers; they hear of it after everything is logged."""
        notices, self.notices = self.notices, {}
        return [
            Notify(self.config.id, step, tuple(keys), nonfinite, rank)
            for (step, nonfinite, rank), keys in notices.items()
        ]

    def _try_finish(self, step: Step) -> None:
        if step.finished or not step.is_closed or len(step.done) < len(step.expected):
            return
        step.finished = True
        record = StepRecord(step.number, step.nonfinite, step.proposal, step.digest)
        self.finished[step.number] = record
        self.out.append(LogStep(self.config.id, step.number, step.nonfinite, step.proposal, step.digest))
        self.out.append(ReportStep(self.config.id, step.number, step.nonfinite, step.proposal, step.digest))

    def on_settled(self, e: Settled, now: float) -> None:
        """Make the new residuals current (unless the step is void) and run what waited for this."""
        if e.step <= self.steps.settled:
            return
        step = self.steps.open.get(e.step)
        self.steps.settle(e.step, e.void, e.plan)
        self.finished.pop(e.step, None)
        self.remote.pop(e.step, None)
        for key in step.expected if step is not None else list(self.partitions):
            p = self.partitions[key]
            if p.unsettled == e.step:
                for owner in (False, True):
                    self._flip(p, e.step, owner)
        self.run_gated(now)

    def _flip(self, p: Partition, step: int, owner: bool) -> None:
        versions = p.owner_residual if owner else p.residual
        if versions.written != step or versions.settled >= step:
            return
        if step in self.steps.voids:
            new = replace(versions, settled=step)
        else:
            new = Versions(1 - versions.current, step, step)
        if owner:
            p.owner_residual = new
        else:
            p.residual = new
        self.out.append(Flip(self.config.id, p.block.key, step, new.current, owner))

    def run_gated(self, now: float) -> None:
        for key, step in sorted(self.gated.items()):
            p = self.partitions[key]
            r = p.rounds.get(step)
            if r is not None and not r.encoding and r.stage == 0 and r.now.own is None:
                self._ready(p, r, now)

    def close(self) -> list[LaneEffect]:
        """Forget everything: payloads still held are released, credit of parked ones goes back."""
        # Nothing sent earlier is sent again: its payload is gone.
        self.faulted = True
        for p in self.partitions.values():
            for r in p.rounds.values():
                for x in r.exchanges:
                    self._unpark(x, x.own)
                if r.now.own is not None and not r.everyone:
                    self._release(r.now.own.handle)
            for kept in p.retained:
                self._release(kept.handle)
        self.partitions.clear()
        self.notices.clear()
        out, self.out = self.out, []
        return out

    # ---------------------------------------------------------------------------- faults and waiting
    def fault(
        self, kind: str, message: str, step: int, phase: str, missing: tuple[str, ...] = (), advice: str = ""
    ) -> None:
        """The job cannot go on; the control machine tells everyone."""
        if not self.faulted:
            self.faulted = True
            self.out.append(ReportFault(self.config.id, kind, message, step, phase, missing, advice))

    @property
    def oldest_step(self) -> int:
        """The step that is held up when something is wrong with a link."""
        return min((n for n, s in self.steps.open.items() if not s.finished), default=self.steps.settled + 1)

    def report_waiting(self, now: float, after: float) -> None:
        """Say whom the oldest open step waits for, once it is older than ``after`` seconds."""
        step = min(self.steps.open.values(), key=lambda s: s.number, default=None)
        if step is None or now - step.opened < after or step.finished:
            if self.waiting_said:
                self.waiting_said = False
                self.out.append(ReportWaiting(self.config.id, 0, 0.0, "", ()))
            return
        self.waiting_said = True
        if step.is_closed and not step.said_closed:
            # A finished step says what was in it by ReportStep; one that hangs may hang on just that.
            step.said_closed = True
            self.out.append(ReportClosed(self.config.id, step.number, step.digest))
        phase, missing = self._missing(step)
        self.out.append(ReportWaiting(self.config.id, step.number, step.opened, phase, tuple(sorted(missing))))

    def _missing(self, step: Step) -> tuple[str, set[str]]:
        members, me = self.config.members, self.config.me
        absent = {f"local rank {r}" for r in range(self.config.local_ranks) if r not in step.closed}
        away: set[str] = set()
        for p in self.partitions.values():
            r = p.rounds.get(step.number)
            if r is None:
                continue
            if r.stage == 0 and r.now.own is None:
                absent |= {f"local rank {i}" for i in range(self.config.local_ranks) if i not in r.local}
            elif r.everyone or p.block.owner == me:
                away |= {members[i].name for i in range(len(members)) if i not in r.now.have}
            else:
                away.add(members[p.block.owner].name)
        return ("exchange", away) if away else ("push", absent)
