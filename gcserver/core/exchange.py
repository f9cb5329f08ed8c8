"""Payloads between members: contributions to the owner (or to all), accumulated in member order, and what comes back.

What may live here: what an encoded payload, a contribution, a finalised sum or an aggregate does to its round. What
may not: making our own payload (`encoding.py`), headers (`frames.py`), the end of a round (`completion.py`). The
order of all this is in `domain.py`.
"""

from __future__ import annotations

from gcproto import wire
from gcproto.records import replace
from gcproto.wire import Flag, Header
from gcserver.core import completion, encoding, frames, tuning
from gcserver.core.domain import Domain
from gcserver.core.effects import Accumulate, Count, Decode, Finalise
from gcserver.core.events import CodecChoice, Encoded, Finalised, Handle, Retained
from gcserver.core.rounds import Parked, Partition, Round


def on_made(d: Domain, e: Encoded | Finalised) -> None:
    """What an order to encode or to finalise has given."""
    if isinstance(e, Encoded):
        on_encoded(d, e)
    else:
        on_finalised(d, e)


def on_encoded(d: Domain, e: Encoded) -> None:
    """Our payload is there: on its way to the owner or to all, or the first of those accumulated here."""
    p = d.partitions[e.key]
    r = p.rounds.get(e.step)
    if r is None or d.faulted or r.codec is None or r.stage != e.stage:
        d.release(e.handle)
        return
    r.encoding = False
    x = r.now
    x.own = Parked(e.handle, e.nbytes, r.codec.id, r.codec.level, e.nonfinite)
    x.own_digest = e.digest
    me, owner = d.config.me, p.block.owner
    if r.everyone:
        flags = (r.flags or 0) | (Flag.NONFINITE if e.nonfinite else 0) | Flag.ALL
        p.retain(
            Retained(r.step, r.slot, e.handle, e.nbytes, e.digest, r.codec.id, r.codec.level, int(flags), r.proposal),
        )
        for other in d.others:
            d.outward.queue(other, r.step, e.key)
    elif owner != me:
        d.outward.queue(d.config.members[owner].node, r.step, e.key)
        return
    elif r.double and r.stage == 0 and (kept := p.kept(r.step)) is not None:
        _adopt(d, p, r, kept, r.codec)
        return
    x.have |= 1 << me
    x.parked[me] = x.own
    _advance(d, p, r, r.stage)


def _adopt(d: Domain, p: Partition, r: Round, kept: Retained, codec: CodecChoice) -> None:
    """An earlier life of this owner had the first exchange's sum: others may have it, so it is the one."""
    asked = (m.node for i, m in enumerate(d.config.members) if r.now.have >> i & 1)
    r.proposal = max(r.proposal, kept.proposal)
    frames.send_retained(d, p, kept, *asked)
    if kept.flags & Flag.NONFINITE:
        _void(d, p, r, codec)
    else:
        encoding.second_exchange(d, p, r, kept.handle)


def _void(d: Domain, p: Partition, r: Round, codec: CodecChoice) -> None:
    """The first exchange was not finite: there is no second."""
    flags = (r.flags or 0) | Flag.NONFINITE
    d.out.append(Decode(d.id, p.block.key, r.step, None, codec.id, codec.level, 1, int(flags), True))
    completion.complete(d, p, r, True)


def on_contribution(d: Domain, h: Header, handle: Handle | None, member: int) -> None:
    """One member's contribution to a round: parked, then accumulated in member order."""
    p = d.partitions[h.key]
    stage = 1 if h.flags & Flag.SECOND else 0
    under_way = p.rounds.get(h.step)
    # Of a round under way only an owner's first exchange can be over.
    if h.step <= p.out_step or (under_way is not None and under_way.exchange(stage).over):
        d.give_back(h, handle)
        kept = p.kept(h.step, stage)
        if kept is None or h.aux == frames.ANSWER:
            d.out.append(Count("frames_stale", h.sender))
        else:
            frames.send_retained(d, p, kept, h.sender)
        return
    step = d.steps.open.get(h.step)
    if step is not None and step.is_closed:
        if h.key not in step.expected:
            d.give_back(h, handle)
            d.mismatch(h.step, p.name)
            return
    else:
        d.remote.setdefault(h.step, set()).add(h.key)
    r = p.round(h.step)
    x = r.exchange(stage)
    if x.have >> member & 1:
        d.give_back(h, handle)
        d.out.append(Count("contributions_duplicate", h.sender))
        return
    who = d.config.members[member].name
    tunable = None if r.codec is None else r.codec.tunable
    if not (
        d.same_operation(p, r, h.flags, who)
        and d.same_scheme(p, r, bool(h.flags & Flag.ALL), who)
        and d.same_codec(p, r, h.codec, h.level, who, tunable)
    ):
        d.give_back(h, handle)
        return
    x.have |= 1 << member
    r.proposal = max(r.proposal, h.proposal)
    nonfinite = bool(h.flags & Flag.NONFINITE)
    x.parked[member] = Parked(handle, h.payload_bytes, h.codec, h.level, nonfinite, h.incarnation)
    _advance(d, p, r, stage)


def on_new_life(d: Domain, node: int, life: int) -> None:
    """A node is a new process: as a member it is sent again what it needs, and contributes again to all under way.

    What is parked of its earlier lives goes, as if it had been lost on the way: the new life's credit starts from zero,
    and with both an owner would hold more of a member than its credit.
    """
    member = d.index.get(node, -1)
    for p in d.partitions.values():
        for r in p.rounds.values():
            for x in r.exchanges:
                if (parked := x.parked.get(member)) is not None and parked.life != life:
                    d.release(parked.handle)
                    del x.parked[member]
                    x.have &= ~(1 << member)
    frames.requeue(d, node)


def _advance(d: Domain, p: Partition, r: Round, stage: int) -> None:
    """Accumulate whatever is next in member order; with everyone there, finalise."""
    members = d.config.members
    x = r.exchange(stage)
    while (parked := x.parked.pop(x.next_member, None)) is not None:
        member = x.next_member
        d.out.append(
            Accumulate(
                d.id,
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
        x.grade = max(x.grade, parked.level)
        x.next_member += 1
        if member != d.config.me:
            d.release(parked.handle)
            d.outward.take(members[member].node, parked.nbytes, parked.life)
    if x.next_member < len(members) or x.finalising:
        return
    x.finalising = True
    codec, levels = None if r.everyone else r.codec, r.levels
    versions = p.residual if r.double else p.owner_residual
    if codec is not None and codec.feedback and codec.owner_feedback and not r.double:
        p.owner_residual = p.owner_residual.writing(r.step)
    if codec is not None and codec.level != x.grade:
        # Some member sends more than we do: what it says must not be lost on the way back.
        codec = replace(codec, level=x.grade)
    if codec is not None and codec.tunable and r.decision is not None:
        levels = tuning.owners(encoding.choice_of(d, p, r.decision.plan, r.step), x.grade, p.segments)
    if codec is not None:
        # All contributions are in, so everyone has the aggregates of the round before this one.
        d.forget(p, lambda k: k.step == r.step and k.stage < stage)
        r.slot = p.free_slot()
    seed = r.decision.seed if r.decision is not None else 0
    if codec is not None and not codec.shared_seed:
        seed = wire.digest(seed.to_bytes(8, "little") + b"owner")
    divisor = d.config.divisor if (r.flags or 0) & Flag.AVERAGE else 1
    d.out.append(
        Finalise(
            d.id,
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
            levels if codec is not None else (),
        )
    )


def on_finalised(d: Domain, e: Finalised) -> None:
    """All contributions are summed: the result for us, and from an owner the aggregate for all."""
    p = d.partitions[e.key]
    r = p.rounds.get(e.step)
    if r is None or d.faulted or r.codec is None or r.stage != e.stage:
        d.release(e.handle)
        return
    nonfinite = e.nonfinite or r.now.nonfinite
    middle = r.double and e.stage == 0
    if not middle or nonfinite:
        # Committed before it leaves: members that have the aggregate contribute no more to this round, so a
        # restart must find it complete.
        completion.complete(d, p, r, nonfinite)
    if r.everyone:
        return
    flags = (r.flags or 0) | (Flag.NONFINITE if nonfinite else 0) | (Flag.SECOND if e.stage else 0)
    flags |= Flag.SUM_UNITS if r.codec.sum_units else 0
    kept = Retained(r.step, r.slot, e.handle, e.nbytes, e.digest, r.codec.id, r.now.grade, int(flags), r.proposal)
    p.retain(kept)
    frames.send_retained(d, p, kept, *d.others)
    if middle and not nonfinite:
        encoding.second_exchange(d, p, r, e.handle)


def on_aggregate(d: Domain, h: Header, handle: Handle | None, member: int) -> None:
    """The owner's result of a round we contributed to."""
    p = d.partitions[h.key]
    r = p.rounds.get(h.step)
    stage = 1 if h.flags & Flag.SECOND else 0
    if r is None or r.stage != stage or r.now.own is None or member != p.block.owner or h.step <= p.out_step:
        d.release(handle)
        d.out.append(Count("frames_stale" if h.step <= p.out_step else "frames_unexpected", h.sender))
        return
    tunable = r.codec is not None and r.codec.tunable
    if not d.same_codec(p, r, h.codec, h.level, d.config.members[member].name, tunable):
        d.release(handle)
        return
    nonfinite = bool(h.flags & Flag.NONFINITE)
    divisor = d.config.divisor if h.flags & Flag.AVERAGE and h.flags & Flag.SUM_UNITS else 1
    r.proposal = max(r.proposal, h.proposal)
    if r.double and stage == 0 and not nonfinite:
        encoding.second_exchange(d, p, r, handle)
        d.release(handle)
        return
    d.out.append(Decode(d.id, h.key, h.step, handle, h.codec, h.level, divisor, h.flags, nonfinite, stage))
    d.release(handle)
    completion.complete(d, p, r, nonfinite)
