"""DATA frames of a domain: contributions that wait to leave, retained payloads that are asked for.

What may live here: headers, and whether a payload is still wanted. What may not: when something is sent
(`exchange.py`), link numbers and credit (`link.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from gcproto.wire import AGGREGATE, CONTRIBUTION, DATA, Flag, Header, Phase
from gcserver.core.domain import Domain
from gcserver.core.events import Handle, Retained
from gcserver.core.rounds import Partition

#: ``aux`` of a DATA frame from retained memory: an answer, which needs none. In the all scheme two members that
#: are both complete would otherwise answer each other's answers.
ANSWER = 1

#: header, payload, whether it is still wanted when it has to be sent again
Frame = tuple[Header, Handle | None, Callable[[], bool]]


def requeue(d: Domain, peer: int) -> None:
    """``peer`` is a new process: whatever rounds under way need from us goes to it again."""
    if all(m.node != peer for m in d.config.members):
        return
    for p in d.partitions.values():
        for r in p.rounds.values():
            if r.now.own is not None and (r.everyone or d.config.members[p.block.owner].node == peer):
                d.outward.queue(peer, r.step, p.block.key)


def contribution(d: Domain, step: int, key: int) -> Frame | None:
    """The frame of a queued contribution, or None when nobody needs it any more."""
    p = d.partitions.get(key)
    if d.faulted or p is None:
        return None
    kept = p.kept(step)
    if kept is not None and kept.flags & Flag.ALL:
        # Complete here or not: in the all scheme every member needs it.
        return retained_frame(d, p, kept)
    r = p.rounds.get(step)
    own = None if r is None else r.now.own
    if r is None or own is None or r.decision is None:
        return None
    flags = (r.flags or 0) | (Flag.NONFINITE if own.nonfinite else 0) | (Flag.SECOND if r.stage else 0)
    header = data_header(
        d,
        p,
        CONTRIBUTION,
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
    return header, own.handle, lambda: not d.faulted and not mine.complete and mine.stage == stage


def data_header(
    d: Domain,
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
    """Header of a block's payload from this node, not numbered yet."""
    c = d.config
    return Header(
        DATA,
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
        incarnation=d.incarnation,
        elements=p.block.elements,
        payload_bytes=nbytes,
        payload_digest=digest,
        aux=aux,
    )


def send_retained(d: Domain, p: Partition, kept: Retained, *peers: int) -> None:
    """Answer a peer with a retained payload, or send an owner's aggregate to all for the first time."""
    header, handle, wanted = retained_frame(d, p, kept, ANSWER)
    for peer in peers:
        d.outward.send(peer, header, handle, wanted)


def retained_frame(d: Domain, p: Partition, kept: Retained, aux: int = 0) -> Frame:
    """The frame of a retained payload; it is wanted as long as it is retained."""
    phase = CONTRIBUTION if kept.flags & Flag.ALL else AGGREGATE
    plan = p.logged.plan if p.logged is not None else 0
    header = data_header(
        d, p, phase, kept.step, kept.codec, kept.level, kept.flags, kept.nbytes, kept.digest, plan, kept.proposal, aux
    )
    return header, kept.handle, lambda: not d.faulted and kept in p.retained
