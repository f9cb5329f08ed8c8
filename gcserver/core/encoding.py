"""This node's payload of a round: what it waits for, how it is made, and that the decision is logged first.

What may live here: codec, scheme and seed of a round, and the order to encode. What may not: which codec a plan
gives (`plan.py`), what becomes of the payload (`exchange.py`).
"""

from __future__ import annotations

from gcproto import wire
from gcproto.records import replace
from gcserver.core import completion
from gcserver.core import plan as plans
from gcserver.core.domain import Domain
from gcserver.core.effects import Encode, LogDecision
from gcserver.core.events import CodecChoice, Decision, Handle
from gcserver.core.rounds import Partition, Round


def ready(d: Domain, p: Partition, r: Round, now: float) -> None:
    """All local inputs are in. Waits for settlements that the plan or the residuals need."""
    if not d.steps.may_run(r.step):
        d.gated[p.block.key] = r.step
        return
    step = d.steps.get(r.step, now)
    decision = p.logged
    if decision is None or decision.step != r.step:
        codec, _ = _choose(d, p, d.steps.plan_version(r.step))
        decision = Decision(r.step, d.steps.plan_version(r.step), step.own_proposal, codec.spec, _seed(d, p, r, codec))
    if decision.plan not in d.plans:
        d.gated[p.block.key] = r.step
        return
    codec, scheme = _choose(d, p, decision.plan)
    if codec.feedback and p.unsettled > d.steps.settled:
        d.gated[p.block.key] = r.step
        return
    d.gated.pop(p.block.key, None)
    if not d.same_codec(p, r, codec.id, codec.level, d.config.members[d.config.me].name):
        return
    r.decision, r.codec, r.everyone, r.encoding = decision, codec, scheme == "all" and codec.rounds == 1, True
    r.proposal = max(r.proposal, decision.proposal)
    if decision != p.logged:
        p.logged = decision
        d.out.append(LogDecision(d.config.id, p.block.key, decision))
    write = 1 - p.residual.current
    if codec.feedback:
        p.residual = replace(p.residual, written=r.step)
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
            d.config.id,
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


def _choose(d: Domain, p: Partition, version: int) -> tuple[CodecChoice, str]:
    if p.choice is None or p.choice[0] != version:
        codec, scheme = plans.choose(
            d.plans[version], p.section, p.block, d.config.min_compress_bytes, len(d.config.members)
        )
        p.choice = (version, codec, scheme)
    return p.choice[1], p.choice[2]


def _seed(d: Domain, p: Partition, r: Round, codec: CodecChoice) -> int:
    """From (job or its seed, step, key, node) and not from the epoch, so that a retry draws the same; where all
    nodes must draw alike, without the node."""
    c = d.config
    origin = c.job if c.seed is None else c.seed.to_bytes(8, "little")
    node = 0 if codec.shared_seed else c.members[c.me].node
    text = origin + b"".join(v.to_bytes(8, "little") for v in (c.domain, r.step, p.block.key, node))
    return wire.digest(text)


def second_exchange(d: Domain, p: Partition, r: Round, aggregate: Handle | None) -> None:
    """The first exchange is over: on to the second, from its sum."""
    completion.end_exchange(d, r)
    if r.codec is None or r.decision is None:
        return
    r.stage, r.encoding = 1, True
    read = p.residual.current
    d.out.append(
        Encode(
            d.config.id,
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


def run_gated(d: Domain, now: float) -> None:
    """A settlement or a plan has come: encode what waited for it."""
    for key, step in sorted(d.gated.items()):
        p = d.partitions[key]
        r = p.rounds.get(step)
        if r is not None and not r.encoding and r.stage == 0 and r.now.own is None:
            ready(d, p, r, now)
