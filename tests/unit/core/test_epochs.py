"""A job goes on without a node: freezing, asking for the next epoch, beginning it.

What may live here: tests of `gcserver/core/epochs.py` and `commits.py`. What may not: what lanes do with a new epoch
(`test_opening.py`), whole clusters (`tests/simulation`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from gcproto import messages, packed
from gcproto.epoch_messages import DomainState, EpochStart, Frozen, StepReady
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault, SectionOffer
from gcserver.core import control_events as ce
from gcserver.core import epochs, waiting
from gcserver.core.control import ControlMachine
from gcserver.core.effects import Count, ReportStep, ReportWaiting, Send
from gcserver.core.events import DomainOpened, PeerAdded, Settled, Tick
from gcserver.core.job_records import MAX_EPOCH
from tests.unit.core.control_machine import (
    B,
    control_from_b,
    control_sent,
    domain_of,
    hello_from,
    machine,
    register,
    said,
    told,
)

WEIGHTS = Section(0, (TensorSpec("w", (4,), 0),))


def pair(on_loss: str = "shrink", **more: Any) -> tuple[ControlMachine, messages.EpochDecided]:
    """Nodes a (rank 0) and b (rank 1) with a domain whose section is agreed; b has sent three control frames."""
    m = machine(arbiter=True, **more)
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, msgspec.structs.replace(register(0, 2), on_loss=on_loss))
    out = m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (1,)), 5), 1), 0.0)
    (asked,) = arbitrated(out)
    m.on(ce.EpochWon(asked.record), 0.0)
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    (offer,) = [x for x in control_sent(said(m, 1, DeclareSection(0, WEIGHTS, 1))) if isinstance(x, SectionOffer)]
    m.on(control_from_b(offer, 2), 0.0)
    return m, asked.record


def arbitrated(effects: list[Any]) -> list[ce.Arbitrate]:
    return [e for e in effects if isinstance(e, ce.Arbitrate)]


def finish(m: ControlMachine, step: int, epoch: int = 1) -> list[Any]:
    return m.on(ce.LaneSaid(0, ReportStep(domain_of(m), step, False, 0, 0, epoch)), 1.0)


def settled(effects: list[Any]) -> list[tuple[int, bool]]:
    return [(e.step, e.void) for e in effects if isinstance(e, ce.LogSettled)]


def opened(effects: list[Any]) -> DomainOpened:
    (found,) = [e.event for e in effects if isinstance(e, ce.ToLane) and isinstance(e.event, DomainOpened)]
    return found


def b_is_ready(m: ControlMachine, step: int, seq: int, epoch: int = 1) -> list[Any]:
    return m.on(control_from_b(StepReady(domain_of(m)[0], epoch, 0, step), seq), 1.0)


def test_a_step_commits_when_all_are_ready_for_it() -> None:
    m, record = pair()
    out = finish(m, 1)
    assert [type(e) for e in out if isinstance(e, ce.LogReady | ce.LogSettled)] == [ce.LogReady]
    assert control_sent(out) == [StepReady(record.job, 1, 0, 1)], "logged, then said"
    assert settled(b_is_ready(m, 1, 3)) == [(1, False)]
    assert settled(b_is_ready(m, 2, 4)) == []
    assert settled(finish(m, 2)) == [(2, False)]


def test_a_loss_freezes_and_asks_for_the_next_epoch() -> None:
    m, _ = pair()
    finish(m, 1)
    b_is_ready(m, 1, 3)
    finish(m, 2)
    out = m.on(Tick(), 40.0)
    assert not [f for f in told(out) if isinstance(f, Fault)], "the job goes on"
    saves = [e.memory.frozen for e in out if isinstance(e, ce.SaveJob)]
    assert saves == [True], "frozen is saved before it is said"
    (asked,) = arbitrated(out)
    assert (asked.expected, asked.record.epoch) == (1, 2)
    assert [x.node for x in asked.record.members] == ["a"] and [x.node for x in asked.record.lost[0]] == ["b"]
    assert asked.record.starts == (EpochStart(2, 0, 2, 2),), "all that are left are ready for step 2: it counts"
    assert [x.node for x in asked.record.origin] == ["a", "b"]


@pytest.mark.parametrize(("on_loss", "ends"), [("shrink", 0), ("skip", 1)])
def test_a_step_that_is_not_ready_runs_again_or_is_skipped(on_loss: str, ends: int) -> None:
    m, _ = pair(on_loss)
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 1, 1.0, "exchange", ("b",), ("aggregate",), 1)), 2.0)
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    assert asked.record.starts == (EpochStart(2, 0, 0, ends),)
    out = m.on(ce.EpochWon(asked.record), 41.0)
    assert settled(out) == ([(1, True)] if ends else [])
    e = opened(out)
    assert (e.config.epoch, e.config.divisor, e.config.origin, e.config.remaining) == (2, 1, 2, ((0,),))
    assert (e.settled, e.config.begins, e.config.skips(1)) == (ends, 0, bool(ends))
    assert messages.EpochChanged(2, asked.record.members) in told(out) and Count("nodes_lost") in out
    assert finish(m, ends + 1, epoch=1) == [], "a report of the epoch before"
    assert settled(finish(m, ends + 1, epoch=2)) == [(ends + 1, False)], "alone, ready is committed"


def test_a_skipped_step_is_settled_only_once_it_is_saved_why() -> None:
    m, _ = pair("skip")
    finish(m, 1)
    b_is_ready(m, 1, 3)
    finish(m, 2)
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 3, 1.0, "exchange", ("b",), ("aggregate",), 3)), 2.0)
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    assert asked.record.starts == (EpochStart(2, 0, 2, 3),)
    out = m.on(ce.EpochWon(asked.record), 41.0)
    logged = [e for e in out if isinstance(e, ce.LogReady | ce.LogSettled | ce.SaveJob)]
    assert [type(e).__name__ for e in logged] == ["LogSettled", "LogReady", "SaveJob", "LogSettled"]
    assert settled(out) == [(2, False), (3, True)] and logged[1] == ce.LogReady(domain_of(m), 2)
    # Killed before the last of them.
    (saved,) = [e.memory for e in logged if isinstance(e, ce.SaveJob)]
    again = machine(arbiter=True)
    out = again.on(ce.JobRestored(saved, (ce.DomainLedger(2, (), ((0, 0),), 2),)), 50.0)
    assert settled(out) == [(3, True)], "the ledger has no hole"
    e = opened(again.on(ce.LaneUp(0), 50.0))
    assert (e.config.epoch, e.settled, e.voids, e.config.skips(3)) == (2, 3, (3,), True)
    assert settled(finish(again, 4, epoch=2)) == [(4, False)]


def test_what_was_skipped_of_a_group_before_this_node_knew_it_is_logged_when_it_does() -> None:
    m, _ = pair("skip")
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    record = msgspec.structs.replace(asked.record, starts=(*asked.record.starts, EpochStart(2, 1, 0, 2)))
    m.on(ce.EpochWon(record), 41.0)
    out = said(m, 1, DeclareDomain("tp", 1, (0, 1), True))
    assert settled(out) == [(1, True), (2, True)]
    assert opened(out).settled == 2
    (saved,) = [e.memory for e in out if isinstance(e, ce.SaveJob)]
    ledgers = ce.DomainLedger(0, (), ((0, 0),), 0), ce.DomainLedger(1, (1,), ((0, 0),), 0)
    again = machine(arbiter=True).on(ce.JobRestored(saved, ledgers), 50.0)
    assert settled(again) == [(2, True)], "killed between the two"


def test_who_is_frozen_becomes_ready_no_further() -> None:
    m, record = pair()
    finish(m, 1)
    out = m.on(control_from_b(Frozen(record.job, 1, (DomainState(0, 1, 1, ("a", "b")),), ("c",)), 3), 1.0)
    (mine,) = [x for x in control_sent(out) if isinstance(x, Frozen)]
    assert mine.domains == (DomainState(0, 1, 1, ("a", "b")),) and not arbitrated(out), "nobody is lost here"
    assert control_sent(finish(m, 2)) == []
    assert settled(b_is_ready(m, 1, 4)) == [(1, False)], "what was ready before may still commit"


def test_a_restarted_supervisor_stays_frozen_and_ready() -> None:
    m, record = pair()
    finish(m, 1)
    saved = [e.memory for e in m.on(Tick(), 40.0) if isinstance(e, ce.SaveJob)][-1]
    again = machine(arbiter=True)
    again.on(ce.JobRestored(saved, (ce.DomainLedger(0, (), ((0, 0),), 1),)), 50.0)
    again.on(PeerAdded(B, "b"), 50.0)
    again.on(hello_from("b", 7, to=100), 50.0)
    (said_again,) = [x for x in control_sent(again.on(Tick(), 51.0)) if isinstance(x, Frozen)]
    assert said_again.domains == (DomainState(0, 1, 1, ("a", "b")),) and said_again.epoch == record.epoch
    following = msgspec.structs.replace(record, epoch=2, lost=((),), starts=(EpochStart(2, 0, 1, 1),))
    assert settled(again.on(control_from_b(following, 1), 52.0)) == [], "lanes have to report step 1 once more"
    assert settled(finish(again, 1)) == [(1, False)] and next(iter(again.jobs.values())).record == following


def test_a_restarted_supervisor_asks_again_without_whom_it_was_to_go_on() -> None:
    """All that asked may be started again between the arbiter's decision and hearing of it: nobody else asks then."""
    m, record = pair()
    out = m.on(Tick(), 40.0)
    order = [type(e) for e in out if isinstance(e, ce.SaveJob | ce.Arbitrate)]
    assert order == [ce.SaveJob, ce.Arbitrate], "saved before it asks"
    (saved,) = [e.memory for e in out if isinstance(e, ce.SaveJob)]
    again = machine(arbiter=True)
    again.on(ce.JobRestored(saved, (ce.DomainLedger(0, (), ((0, 0),), 0),)), 50.0)
    again.on(PeerAdded(B, "b"), 50.0)
    again.on(hello_from("b", 8, to=100), 50.0)
    (asked,) = arbitrated(again.on(Tick(), 51.0))
    assert asked.record.lost == ((record.members[1],),), "though it is there again"
    decided = msgspec.structs.replace(asked.record, members=record.members[1:], nonces=(5,), lost=(record.members[:1],))
    again.on(ce.WorkerSaid(1, messages.Reattach(record.job, 0, 1234)), 51.5)
    (fault,) = told(again.on(ce.EpochWon(decided), 52.0))
    assert fault.kind == "StepIndeterminate" and "decided without a" in fault.message


def test_a_loss_of_who_is_frozen_already_is_saved() -> None:
    m, record = pair()
    m.on(control_from_b(Frozen(record.job, 1, (), ("c",)), 3), 1.0)
    (saved,) = [e.memory for e in m.on(Tick(), 40.0) if isinstance(e, ce.SaveJob)]
    assert saved.frozen and [name for name, _ in saved.lost] == ["b"]


def test_an_epoch_that_begins_with_another_loss_is_frozen_after_a_restart_too() -> None:
    """Saved as the epoch begins, killed before it is saved that this node froze in it."""
    m, _ = pair()
    (saved,) = [e.memory for e in m.on(Tick(), 40.0) if isinstance(e, ce.SaveJob)]
    again = machine(arbiter=True)
    saved = dataclasses.replace(saved, frozen=False)
    again.on(ce.JobRestored(saved, (ce.DomainLedger(0, (), ((0, 0),), 0),)), 50.0)
    assert len(arbitrated(again.on(Tick(), 51.0))) == 1


def test_who_is_left_out_ends_and_the_others_do_not() -> None:
    m, record = pair()
    without = msgspec.structs.replace(
        record, epoch=2, members=record.members[1:], nonces=(5,), lost=(record.members[:1],)
    )
    out = m.on(control_from_b(without, 3), 1.0)
    (fault,) = told(out)
    assert fault.kind == "StepIndeterminate" and "without a" in fault.message and fault.advice
    (passed,) = [x for x in control_sent(out) if isinstance(x, Fault)]
    assert (passed.kind, passed.missing) == ("PeerLost", ("a",))


def test_a_member_that_ends_alone_is_lost_for_the_others() -> None:
    m, record = pair()
    out = m.on(control_from_b(Fault(record.job, "PeerLost", "rank 1 went away", missing=("b",)), 3), 1.0)
    assert not told(out) and [e.record.epoch for e in arbitrated(out)] == [2]
    m, record = pair("fail")
    assert told(m.on(control_from_b(Fault(record.job, "PeerLost", "rank 1 went away", missing=("b",)), 3), 1.0))


def test_an_arbiter_that_does_not_answer_is_asked_again_until_the_deadline() -> None:
    m, _ = pair()
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    assert arbitrated(m.on(Tick(), 41.0)) == [], "one question at a time"
    m.on(ce.ArbiterSilent(asked.record, "no route to etcd"), 42.0)
    assert arbitrated(m.on(Tick(), 43.0)) == [asked]
    m.on(ce.ArbiterSilent(asked.record, "no route to etcd"), 99.0)
    (fault,) = told(m.on(Tick(), 101.5))
    assert fault.kind == "StepIndeterminate" and "no route to etcd" in fault.message and fault.missing == ("b",)


def test_an_epoch_that_cannot_be_or_that_a_stranger_decided_is_refused() -> None:
    m, record = pair()
    twice = msgspec.structs.replace(record, epoch=2, lost=(record.members[1:],))
    out = m.on(control_from_b(twice, 3), 1.0)
    assert [f.kind for f in control_sent(out) if isinstance(f, Fault)] == ["JoinRefused"] and not told(out)
    alone = msgspec.structs.replace(record, members=record.members[:1], nonces=(9,), lost=(record.members[1:],))
    job = next(iter(m.jobs.values()))
    (said_of_it,) = epochs.on_record(job, "c", msgspec.structs.replace(alone, epoch=2))
    assert isinstance(said_of_it, ce.Log) and "not its business" in said_of_it.text
    m, record = pair("fail")
    assert told(m.on(control_from_b(msgspec.structs.replace(record, epoch=2, lost=((),)), 3), 1.0)) == []
    assert next(iter(m.jobs.values())).record == record, "a job that ends with its first loss has one epoch"


def test_whom_another_node_lost_is_named_where_no_epoch_comes_of_it() -> None:
    m, record = pair(lease=1000.0)
    (job,) = m.jobs.values()
    epochs.on_frozen(job, "b", Frozen(record.job, 1, (), ("c",)))
    m.on(Tick(), 1.0)
    assert job.frozen and not job.lost and job.change.missed == ["c"]
    (fault,) = told(m.on(Tick(), 2.0 + record.deadline))
    assert fault.kind == "StepIndeterminate" and "without c is not decided" in fault.message


def test_it_is_said_for_whom_a_commit_or_an_epoch_waits() -> None:
    m, record = pair(lease=1000.0)
    job = next(iter(m.jobs.values()))
    finish(m, 1)
    m.on(Tick(), 2.0)
    (wait,) = waiting.waits(job)
    assert (wait.who, wait.wanted, wait.phase, wait.since, wait.step) == ("b", "commit", "commit", 2.0, 1)
    b_is_ready(m, 1, 3)
    m.on(Tick(), 3.0)
    assert list(waiting.waits(job)) == []
    epochs.on_frozen(job, "c", Frozen(record.job, 1, (), ("d",)))
    m.on(Tick(), 4.0)
    assert [(w.who, w.wanted, w.since) for w in waiting.waits(job)] == [("b", "epoch", 4.0)]


def test_what_is_said_of_a_later_epoch_waits_for_it() -> None:
    m, record = pair()
    finish(m, 1)
    b_is_ready(m, 1, 3)
    assert settled(b_is_ready(m, 2, 4, epoch=2)) == []
    following = msgspec.structs.replace(record, epoch=2, lost=((),), starts=(EpochStart(2, 0, 1, 1),))
    m.on(control_from_b(following, 5), 1.0)
    assert settled(finish(m, 2, epoch=2)) == [(2, False)]


@pytest.mark.parametrize("epoch", [2, 4])
def test_an_epoch_leaves_out_the_numbers_of_plans_that_a_lost_node_may_have_given(epoch: int) -> None:
    """Also where nothing was heard of those in between; and what was heard of counts, however many there were."""
    m, record = pair()
    (job,) = m.jobs.values()
    job.numbered = 5 * epochs.NUMBERS
    m.on(control_from_b(msgspec.structs.replace(record, epoch=epoch, lost=((),) * (epoch - 1)), 3), 1.0)
    assert (job.record.epoch, job.numbered) == (epoch, (4 + epoch) * epochs.NUMBERS)


def test_the_last_epoch_there_can_be_leaves_as_many_numbers_as_all_before_left_out() -> None:
    assert epochs.NUMBERS * MAX_EPOCH <= 1 << 31
    text = messages.PlanText(b"j" * 16, epochs.NUMBERS * MAX_EPOCH, 1, ())
    assert packed.Decoder[messages.PlanText](messages.PlanText)(packed.encode(text)) == text


def test_who_speaks_of_an_epoch_that_is_over_hears_of_the_next() -> None:
    m, record = pair()
    following = msgspec.structs.replace(record, epoch=2, lost=((),))
    m.on(control_from_b(following, 3), 1.0)
    assert control_sent(b_is_ready(m, 1, 4)) == [following]
    assert control_sent(m.on(control_from_b(record, 5), 1.0)) == [following]


def test_settled_steps_are_told_before_the_domain_is_opened_anew() -> None:
    m, _ = pair()
    finish(m, 1)
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    out = m.on(ce.EpochWon(asked.record), 41.0)
    lanes = [type(e.event) for e in out if isinstance(e, ce.ToLane)]
    assert lanes.index(Settled) < lanes.index(DomainOpened)
    order = [type(e) for e in out if isinstance(e, ce.LogReady | ce.SaveJob)]
    assert order == [ce.LogReady, ce.SaveJob], "an epoch is saved once nothing of the one before is left"


def test_a_policy_needs_an_arbiter() -> None:
    m = machine()
    (fault,) = told(said(m, 1, msgspec.structs.replace(register(0, 1), on_loss="shrink")))
    assert fault.kind == "JoinRefused" and "cluster.etcd" in fault.message
    m = machine(arbiter=True)
    (asked,) = arbitrated(said(m, 1, msgspec.structs.replace(register(0, 1), on_loss="skip")))
    (fault,) = told(m.on(ce.ArbiterSilent(asked.record, "no route to etcd"), 1.0))
    assert fault.kind == "JoinRefused" and "no route to etcd" in fault.message and "etcd" in fault.advice


def test_who_gathers_for_a_job_that_was_formed_without_them_is_told() -> None:
    m = machine(arbiter=True)
    (asked,) = arbitrated(said(m, 1, msgspec.structs.replace(register(0, 1), on_loss="skip")))
    before = msgspec.structs.replace(asked.record, nonces=(1,))
    (fault,) = told(m.on(ce.EpochWon(before), 1.0))
    assert fault.kind == "JoinRefused" and "formed before a daemon was restarted" in fault.message


def test_a_job_that_ends_with_its_first_loss_pays_nothing_for_commits() -> None:
    """Its steps settle with the report of this node's lanes: no message to anybody, nothing more in the ledger."""
    m, _ = pair("fail")
    for step in range(1, 6):
        out = finish(m, step)
        kinds = [type(e) for e in out]
        assert kinds == [ce.LogSettled, ce.ToLane] and settled(out) == [(step, False)]
    m, _ = pair("shrink")
    out = finish(m, 1)
    assert [type(e) for e in out] == [ce.LogReady, Send] and settled(out) == []
    assert [type(x) for x in control_sent(out)] == [StepReady]


def test_a_job_that_ends_with_its_first_loss_says_nothing_of_readiness() -> None:
    m, _ = pair("fail")
    finish(m, 1)
    m.on(hello_from("b", 9, to=100), 2.0)
    assert not [x for x in control_sent(m.on(Tick(), 3.0)) if isinstance(x, StepReady | Frozen)]
    saved = next(iter(m.jobs.values())).save().memory
    again = machine(arbiter=True)
    again.on(ce.JobRestored(saved, (ce.DomainLedger(1, (), ((0, 0),)),)), 4.0)
    again.on(PeerAdded(B, "b"), 4.0)
    assert not [x for x in control_sent(again.on(hello_from("b", 9, to=100), 4.0)) if isinstance(x, StepReady)]
