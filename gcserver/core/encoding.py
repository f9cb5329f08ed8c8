"""This node's payload of a round: what it waits for, how it is made, and that the decision is logged first.

What may live here: codec, scheme and seed of a round, and the order to encode. What may not: which codec a plan
gives (`plan.py`), what becomes of the payload (`exchange.py`).
"""

from __future__ import annotations

import struct

from gcproto import wire
from gcproto.records import replace
from gcserver.core import completion, tuning
from gcserver.core import plan as plans
from gcserver.core.domain import Domain
from gcserver.core.effects import Encode, LogDecision
from gcserver.core.events import CodecChoice, Decision, Handle, PlanKnown, ProposalKnown, StatesTaken, Tuned
from gcserver.core.rounds import Partition, Round

#: what a seed is drawn from beside its origin: domain, step, key, node
_DRAWN = struct.Struct("<QQQQ")


def ready(d: Domain, p: Partition, r: Round, now: float) -> None:
    """All local inputs are in. Waits for settlements that the plan or the residuals need."""
    if not d.steps.may_run(r.step):
        d.gated[p.block.key] = r.step
        return
    step = d.steps.get(r.step, now)
    decision = p.logged
    if decision is None or decision.step != r.step:
        version = d.steps.plan_version(r.step)
        choice = choice_of(d, p, version, r.step)
        seed, (notch, level) = _seed(d, p, r, choice.codec), tuning.decided(choice, d.tuned)
        decision = Decision(r.step, version, step.own_proposal, choice.codec.spec, seed, notch, level)
    if decision.plan not in d.plans:
        d.gated[p.block.key] = r.step
        return
    choice = choice_of(d, p, decision.plan, r.step)
    codec = choice.codec
    if (codec.feedback or (codec.drains and p.held)) and p.unsettled > d.steps.settled:
        d.gated[p.block.key] = r.step
        return
    d.gated.pop(p.block.key, None)
    r.levels, grade = tuning.own(choice, decision, p.segments)
    me, everyone = d.config.members[d.config.me].name, choice.scheme == plans.ALL and codec.rounds == 1
    if not (d.same_scheme(p, r, everyone, me) and d.same_codec(p, r, codec.id, grade, me, codec.tunable)):
        return
    if r.apart and not d.same_codec(p, r, codec.id, *r.apart, codec.tunable):
        return
    if codec.level != grade:
        codec = replace(codec, level=grade)
    r.decision, r.codec, r.encoding = decision, codec, True
    r.proposal = max(r.proposal, decision.proposal)
    if decision != p.logged:
        p.logged = decision
        d.out.append(LogDecision(d.id, p.block.key, decision))
    if codec.drains:
        r.flush = p.residual.holds | p.owner_residual.holds << 1
    if codec.feedback or r.flush & 1:
        p.residual = p.residual.writing(r.step, zeros=not codec.feedback)
    if r.flush & 2:
        p.owner_residual = p.owner_residual.writing(r.step, zeros=True)
    retain = None
    if r.everyone:
        if p.retained and p.retained[0].step == r.step:
            # Encoded before a restart: the same bytes go to the same place, the other one is still needed.
            d.release(p.retained[0].handle)
            p.next_slot = p.retained[0].slot
            p.retained = p.retained[1:]
        # The payload before the last one: whoever contributes to this round has had that.
        d.forget(p, lambda k: k.step == p.retained[0].step)
        retain = r.slot = p.free_slot()
    d.out.append(
        Encode(
            d.id,
            p.block.key,
            r.step,
            codec,
            decision.seed,
            p.residual.current,
            1 - p.residual.current,
            retain,
            r.flags or 0,
            decision.proposal,
            levels=r.levels,
            flush=r.flush,
            owner_read=p.owner_residual.current,
        )
    )


def choice_of(d: Domain, p: Partition, version: int, step: int) -> plans.Choice:
    """What plan ``version`` gives a block in a step."""
    c = d.config
    key = version, step <= c.warmup
    if p.choice is None or p.choice[0] != key:
        plan = plans.warming(d.plans[version]) if step <= c.warmup else d.plans[version]
        p.choice = key, plans.explain(plan, p.section, p.block, c.min_compress_bytes, len(c.members))
    return p.choice[1]


def _seed(d: Domain, p: Partition, r: Round, codec: CodecChoice) -> int:
    """From (job or its seed, step, key, node) and not from the epoch, so that a retry draws the same; where all
    nodes must draw alike, without the node. A resumed domain draws as it would have gone on drawing."""
    c = d.config
    origin = c.job if c.seed is None else c.seed.to_bytes(8, "little")
    node = 0 if codec.shared_seed else c.members[c.me].node
    if c.drawn_from:
        origin = c.drawn_from
    if node and c.drawn_as:
        node = c.drawn_as
    return wire.digest(origin + _DRAWN.pack(c.domain, c.ahead + r.step, p.block.key, node))


def second_exchange(d: Domain, p: Partition, r: Round, aggregate: Handle | None) -> None:
    """The first exchange is over: on to the second, from its sum."""
    completion.end_exchange(d, r)
    if r.codec is None or r.decision is None:
        return
    r.exchange(1)
    r.stage, r.encoding = 1, True
    read = p.residual.current
    d.out.append(
        Encode(
            d.id,
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
            r.levels,
        )
    )


def told(d: Domain, e: PlanKnown | ProposalKnown | Tuned | StatesTaken, now: float) -> None:
    """What this node is told of plans, and what is brought to it of states."""
    if isinstance(e, StatesTaken):
        d.partitions[e.key].take_states(e.owner)
    elif isinstance(e, Tuned):
        d.tuned = e.notch, e.level
    elif isinstance(e, ProposalKnown):
        d.steps.known_proposal = max(d.steps.known_proposal, e.version)
    else:
        d.plans[e.plan.version] = e.plan
        run_gated(d, now)


def run_gated(d: Domain, now: float) -> None:
    """A settlement or a plan has come: encode what waited for it."""
    for key, step in sorted(d.gated.items()):
        p = d.partitions[key]
        r = p.rounds.get(step)
        if r is not None and not r.encoding and r.stage == 0 and r.now.own is None:
            ready(d, p, r, now)
