"""Faults planted in the core, to show that the simulation would notice them.

What may live here: one small patch a fault, each of which turns a rule of the protocol off. What may not: changes
to the checks or the world; they must catch these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec

from gcproto.messages import PlanMode
from gcproto.records import replace
from gcproto.wire import Flag, Header, Phase
from gcserver.core import completion, encoding, exchange, frames, job_plans, plan_modes, settling, tuning
from gcserver.core import effects as fx
from gcserver.core.domain import Domain
from gcserver.core.job import Job
from gcserver.core.lane import LaneMachine
from gcserver.core.link import Link
from gcserver.core.rounds import Partition
from gcserver.core.steps import StepBook

Patch = Callable[[Any], Any]
#: name -> class or module, method or function, patch, the faults of the world that bring it out (none: any mix)
PLANTED: dict[str, tuple[type | ModuleType, str, Patch, tuple[str, ...]]] = {}


def plant(owner: type | ModuleType, method: str, *faults: str) -> Callable[[Patch], Patch]:
    """Register a fault: the decorated function gets the original of a method or function and returns the faulty one."""

    def register(patch: Patch) -> Patch:
        PLANTED[patch.__name__] = (owner, method, patch, faults)
        return patch

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The core with one fault in it."""
    owner, method, patch, _ = PLANTED[name]
    original = owner.__dict__[method]
    setattr(owner, method, patch(original))
    try:
        yield
    finally:
        setattr(owner, method, original)


@plant(exchange, "on_contribution", "crash_lane", "crash_node", "reset", "lose")
def double_count(original: Any) -> Any:
    """A contribution that comes twice is added twice."""

    def on_contribution(d: Domain, h: Header, handle: int | None, member: int) -> None:
        r = d.partitions[h.key].rounds.get(h.step)
        stage = 1 if h.flags & Flag.SECOND else 0
        if r is not None and r.exchange(stage).have >> member & 1 and not r.exchange(stage).finalising:
            again = fx.Accumulate(d.config.id, h.key, h.step, member, handle, h.codec, h.level, False, False, stage)
            d.out.append(again)
        original(d, h, handle, member)

    return on_contribution


@plant(exchange, "on_contribution")
def stale_round_accepted(original: Any) -> Any:
    """A contribution to a round that is complete is taken as one to a new round."""

    def on_contribution(d: Domain, h: Header, handle: int | None, member: int) -> None:
        p = d.partitions[h.key]
        out_step = p.out_step
        p.out_step = min(out_step, h.step - 1)
        original(d, h, handle, member)
        p.out_step = max(out_step, p.out_step)

    return on_contribution


@plant(Link, "on_nack")
def lost_frame_never_resent(original: Any) -> Any:
    """A peer that asks again is not heard."""
    return lambda self, body: []


@plant(LaneMachine, "_on_data", "old_epoch")
def old_epoch_accepted(original: Any) -> Any:
    """A frame of another epoch counts as one of this epoch."""

    def on_data(self: LaneMachine, e: Any, now: float) -> None:
        domain = self.domains.get((e.header.job, e.header.domain))
        if domain is not None:
            e = replace(e, header=replace(e.header, epoch=domain.config.epoch))
        original(self, e, now)

    return on_data


@plant(completion, "complete")
def flip_before_settle(original: Any) -> Any:
    """Residual versions flip as soon as the round is complete."""

    def complete(d: Domain, p: Partition, r: Any, nonfinite: bool) -> None:
        original(d, p, r, nonfinite)
        completion.flip(d, p, r.step, False)

    return complete


@plant(Link, "take")
def credit_returned_twice(original: Any) -> Any:
    return lambda self, domain, nbytes: original(self, domain, 2 * nbytes)


@plant(Partition, "restored", "crash_lane", "crash_node")
def retained_forgotten(original: Any) -> Any:
    """A restarted owner does not take up the aggregates it retained."""

    def restored(cls: type[Partition], block: Any, section: Any, memory: Any) -> Partition:
        part: Partition = original.__func__(cls, block, section, memory)
        part.retained = ()
        return part

    return classmethod(restored)


@plant(exchange, "on_finalised")
def not_retained(original: Any) -> Any:
    """The owner does not remember an aggregate once it is sent."""

    def on_finalised(d: Domain, e: Any) -> None:
        original(d, e)
        p = d.partitions.get(e.key)
        if p is not None and p.retained and p.retained[0].step == e.step and not d.faulted:
            for kept in p.retained:
                d.release(kept.handle)
            p.retained = ()

    return on_finalised


@plant(exchange, "on_finalised", "crash_lane", "crash_node")
def first_sum_not_kept(original: Any) -> Any:
    """An owner forgets the sum of the first exchange once it has that of the second."""

    def on_finalised(d: Domain, e: Any) -> None:
        original(d, e)
        p = d.partitions.get(e.key)
        if p is not None and e.stage and not d.faulted:
            d.forget(p, lambda k: k.step == e.step and k.stage == 1)

    return on_finalised


@plant(exchange, "on_encoded", "crash_lane", "crash_node")
def first_sum_not_adopted(original: Any) -> Any:
    """A restarted owner waits for the first exchange's contributions, though members may have had its sum."""

    def on_encoded(d: Domain, e: Any) -> None:
        p = d.partitions[e.key]
        r = p.rounds.get(e.step)
        if r is not None and r.double and e.stage == 0:
            d.forget(p, lambda k: k.step != e.step)
        original(d, e)

    return on_encoded


@plant(encoding, "ready", "set_codec", "crash_lane")
def decision_not_reused(original: Any) -> Any:
    """A retry decides anew instead of reading the ledger: another seed, perhaps another plan."""

    def ready(d: Domain, p: Partition, r: Any, now: float) -> None:
        if p.logged is not None and p.logged.step == r.step and p.logged.plan == 0 and len(d.plans) > 1:
            p.logged = None
            d.steps.switches = [(0, max(d.plans))]
        original(d, p, r, now)

    return ready


@plant(exchange, "_advance")
def encoded_from_another_state(original: Any) -> Any:
    """The owner's second error feedback reads the version it is about to write."""

    def advance(d: Domain, p: Partition, r: Any, stage: int) -> None:
        before = len(d.out)
        original(d, p, r, stage)
        for i, e in enumerate(d.out[before:], before):
            if isinstance(e, fx.Finalise) and e.codec is not None and e.codec.feedback and p.owner_residual.settled:
                d.out[i] = replace(e, read=1 - e.read, write=1 - e.write)

    return advance


@plant(settling, "on_step")
def settled_out_of_order(original: Any) -> Any:
    """A step settles as soon as it is finished here, whatever came before it."""

    def on_step(job: Job, lane: int, report: Any) -> Any:
        domain = job.domains.get(report.domain[1])
        out = original(job, lane, report)
        if domain is not None and len(domain.reports.get(report.step, ())) == job.lanes:
            out = out + settling.settle(job, domain, report.step)
        return out

    return on_step


@plant(settling, "on_step")
def settled_by_one_lane(original: Any) -> Any:
    """The control machine does not wait for the other lanes."""

    def on_step(job: Job, lane: int, report: Any) -> Any:
        lanes, job.lanes = job.lanes, 1
        try:
            return original(job, lane, report)
        finally:
            job.lanes = lanes

    return on_step


@plant(Link, "fresh", "replay", "crash_lane", "crash_node")
def incarnation_ignored(original: Any) -> Any:
    """Frames of earlier lives pass as frames of this one."""

    def fresh(self: Link, h: Header, now: float, hello: Any, out: Any) -> bool:
        if self.theirs:
            h = replace(h, incarnation=self.theirs, to_incarnation=self.incarnation)
        return bool(original(self, h, now, hello, out))

    return fresh


@plant(Link, "accept")
def duplicates_accepted(original: Any) -> Any:
    """Every sequence number is new."""

    def accept(self: Link, h: Header, out: Any) -> bool:
        original(self, h, out)
        return True

    return accept


@plant(StepBook, "may_run", "set_codec", "pause_supervisor")
def plan_not_awaited(original: Any) -> Any:
    """A step is encoded before its plan is fixed."""
    return lambda self, number: True


@plant(frames, "requeue", "crash_lane")
def not_sent_to_a_new_life(original: Any) -> Any:
    """A peer that restarted gets nothing of the rounds under way."""
    return lambda d, peer: None


@plant(completion, "settle")
def void_step_flips(original: Any) -> Any:
    """A void step makes its residuals current like any other."""
    return lambda d, e: original(d, replace(e, void=False))


@plant(frames, "data_header", "set_codec")
def proposals_differ(original: Any) -> Any:
    """Contributions claim a proposal nobody made."""

    def header(d: Domain, p: Any, phase: Phase, step: int, *rest: Any) -> Header:
        h: Header = original(d, p, phase, step, *rest)
        return replace(h, proposal=h.proposal + (d.config.me if len(d.plans) > 2 else 0))

    return header


@plant(encoding, "choice_of", "set_codec")
def scheme_not_followed(original: Any) -> Any:
    """One member sends everything through owners, whatever the plan says."""

    def choice_of(d: Domain, p: Partition, version: int) -> Any:
        choice = original(d, p, version)
        return choice if d.config.me else replace(choice, scheme="owner")

    return choice_of


@plant(encoding, "ready", "tune", "set_codec", "crash_lane")
def tuned_anew(original: Any) -> Any:
    """A retry encodes at the notch or level in force now, not at the one in the ledger."""

    def ready(d: Domain, p: Partition, r: Any, now: float) -> None:
        if p.logged is not None and p.logged.step == r.step and p.logged.plan in d.plans:
            notch, level = tuning.decided(encoding.choice_of(d, p, p.logged.plan), d.tuned)
            p.logged = replace(p.logged, notch=notch, level=level)
        original(d, p, r, now)

    return ready


@plant(tuning, "owners", "tune", "set_codec")
def owner_at_the_plans_levels(original: Any) -> Any:
    """An owner encodes the sum at the plan's last notch, whatever its contributors sent at."""
    return lambda choice, grade, segments: choice.levels[-1] if choice.levels else ()


@plant(tuning, "own", "tune", "set_codec")
def tuned_but_not_said(original: Any) -> Any:
    """A tuned node's frames say the codec's level."""
    return lambda choice, decision, segments: (original(choice, decision, segments)[0], choice.codec.level)


@plant(Partition, "held", "set_codec")
def taken_up_before_settled(original: Any) -> Any:
    """A dense contribution takes up the residual of a step that is not settled."""
    return property(lambda self: False)


@plant(completion, "complete", "set_codec")
def taken_up_twice(original: Any) -> Any:
    """What a dense contribution has taken up is not marked as waiting for its settlement."""

    def complete(d: Domain, p: Partition, r: Any, nonfinite: bool) -> None:
        r.flush = 0
        original(d, p, r, nonfinite)

    return complete


@plant(job_plans, "on_request", "set_codec")
def not_replaced(original: Any) -> Any:
    """A wish to replace all rules only adds its own."""
    return lambda job, wish: original(job, msgspec.structs.replace(wish, replace=False))


@plant(plan_modes, "on_said", "modes", "crash_supervisor", "cut_off")
def old_mode_is_news(original: Any) -> Any:
    """Whatever a member says of the mode is kept, be it older than what is known."""

    def on_said(job: Job, said: PlanMode) -> Any:
        job.said = None
        return original(job, said)

    return on_said
