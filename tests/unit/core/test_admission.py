"""A node that was lost comes back: who waits, the epoch that lets it in, what it takes up.

What may live here: tests of `gcserver/core/admission.py` and `entering.py`. What may not: losses (`test_epochs.py`),
whole clusters (`tests/simulation`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from gcproto import messages
from gcproto.epoch_messages import Admit, DomainFacts, EpochStart, Frozen, JobState, NodesWait, StepReady
from gcproto.messages import (
    DeclareDomain,
    DeclareSection,
    EpochChanged,
    EpochDecided,
    Fault,
    JobJoin,
    JobLeft,
    MemberInfo,
    PlanText,
    Registered,
    SectionAgreed,
)
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.effects import Count
from gcserver.core.events import PeerAdded, Tick
from gcserver.core.job_records import misfit
from tests.unit.core.control_machine import B, control_from_b, control_sent, hello_from, machine, register, said, told
from tests.unit.core.test_epochs import WEIGHTS, arbitrated, b_is_ready, finish, opened, pair, settled

BACK = MemberInfo("b", "tcp://b:7000", (1,))
DDP = DeclareDomain("ddp", 0, (0, 1), True)


def without_b() -> ControlMachine:
    """Node a in epoch 2, alone, step 1 settled; node b has sent three control frames."""
    m, _ = pair()
    finish(m, 1)
    b_is_ready(m, 1, 3)
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    m.on(ce.EpochWon(asked.record), 41.0)
    return m


def b_joins(m: ControlMachine, seq: int, nonce: int = 6, member: MemberInfo = BACK, **more: Any) -> list[Any]:
    return m.on(control_from_b(JobJoin("train", 2, member, nonce, **more), seq), 42.0)


def test_who_waits_is_let_in_at_an_admission_point() -> None:
    m = without_b()
    assert told(b_joins(m, 4)) == [NodesWait(("b",))]
    (asked,) = arbitrated(said(m, 1, Admit(1), 43.0))
    record = asked.record
    assert (asked.expected, record.epoch, record.admissions) == (2, 3, 1)
    assert [(x.node, x.since) for x in record.members] == [("a", 1), ("b", 3)] and record.nonces[1] == 6
    assert record.starts[-1] == EpochStart(3, 0, 1, 1) and misfit(record) is None
    out = m.on(ce.EpochWon(record), 44.0)
    state, decided = control_sent(out)[:2]
    assert decided == record and isinstance(state, JobState)
    assert state.domains == (DomainFacts(DDP, (WEIGHTS,), 1, ((0, 0),)),)
    assert told(out)[-1] == EpochChanged(3, record.members, 1) and Count("nodes_admitted") in out
    e = opened(out)
    assert (e.config.epoch, e.config.divisor, e.config.remaining) == (3, 2, ((0,), (0, 1)))
    assert settled(finish(m, 2, epoch=3)) == [] and settled(b_is_ready(m, 2, 5, epoch=3)) == [(2, False)]


def test_an_admission_point_waits_for_all_workers_and_members() -> None:
    m, record = pair()
    out = said(m, 1, Admit(1), 1.0)
    (frozen,) = [x for x in control_sent(out) if isinstance(x, Frozen)]
    assert frozen.applicants == () and not arbitrated(out), "b has not said how far it is"
    states = tuple(msgspec.structs.replace(s, nodes=("a", "b")) for s in frozen.domains)
    (asked,) = arbitrated(m.on(control_from_b(Frozen(record.job, 1, states), 3), 1.0))
    assert asked.record.members == record.members and asked.record.admissions == 1, "nobody came; all go on"
    assert told(m.on(ce.EpochWon(asked.record), 2.0)) == [EpochChanged(2, record.members, 1)]
    assert told(said(m, 1, Admit(1), 3.0)) == [EpochChanged(2, record.members, 1)], "asked again after a restart"


def test_a_loss_at_an_admission_point_comes_first() -> None:
    m, _ = pair()
    said(m, 1, Admit(1), 1.0)
    (asked,) = arbitrated(m.on(Tick(), 40.0))
    assert asked.record.admissions == 0 and [x.node for x in asked.record.members] == ["a"]
    (again,) = arbitrated(m.on(ce.EpochWon(asked.record), 41.0))
    assert (again.expected, again.record.admissions) == (2, 1)


def test_who_does_not_wait_any_more_or_is_not_who_was_lost_is_not_let_in() -> None:
    m = without_b()
    b_joins(m, 4)
    m.on(control_from_b(JobLeft("train", b"", 6), 5), 42.0)
    assert told(b_joins(m, 6, 7, MemberInfo("b", "tcp://b:7000", (0,)))) == []
    assert told(b_joins(m, 7, 8, token=b"other")) == []
    assert told(m.on(control_from_b(JobJoin("train", 3, BACK, 9), 8), 42.0)) == []
    (asked,) = arbitrated(said(m, 1, Admit(1), 43.0))
    assert [x.node for x in asked.record.members] == ["a"]


def test_who_waited_and_died_is_not_waited_for() -> None:
    m = without_b()
    b_joins(m, 4)
    m.on(hello_from("b", 9, to=100), 43.0)
    (asked,) = arbitrated(said(m, 1, Admit(1), 44.0))
    assert [x.node for x in asked.record.members] == ["a"]


def test_a_member_that_is_not_known_to_be_lost_waits_until_it_is() -> None:
    m, record = pair()
    assert told(b_joins(m, 3)) == [], "it is a member still"
    (asked,) = arbitrated(m.on(control_from_b(Fault(record.job, "PeerLost", "gone", missing=("b",)), 4), 43.0))
    assert NodesWait(("b",)) in told(m.on(ce.EpochWon(asked.record), 44.0))


def test_what_was_said_of_an_earlier_time_in_the_job_does_not_lose_it_again() -> None:
    m = without_b()
    b_joins(m, 4)
    (asked,) = arbitrated(said(m, 1, Admit(1), 43.0))
    m.on(ce.EpochWon(asked.record), 44.0)
    fault = Fault(asked.record.job, "PeerLost", "gone", epoch=1, missing=("b",))
    assert arbitrated(m.on(control_from_b(fault, 5), 45.0)) == [] and not next(iter(m.jobs.values())).lost
    assert next(iter(m.jobs.values())).first == "a"


# ------------------------------------------------------------------------------------- who comes back in
def comes_back() -> tuple[ControlMachine, EpochDecided, JobState]:
    """Node a with rank 1 waits for a job that node b (rank 0) runs; the record that lets it in, and its state."""
    m = machine(arbiter=True)
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    join = msgspec.structs.replace(register(1, 2), on_loss="shrink")
    (said_to_b,) = [x for x in control_sent(said(m, 1, join)) if isinstance(x, JobJoin)]
    me, other = MemberInfo("a", "tcp://a:7000", (1,), 3), MemberInfo("b", "tcp://b:7000", (0,))
    before = (msgspec.structs.replace(me, since=1),)
    starts = (EpochStart(2, 0, 8, 8), EpochStart(3, 0, 9, 9))
    rules = (messages.Rule("*", "none"),)
    job = b"j" * 16
    record = EpochDecided(
        "train", job, 3, 2, (other, me), (5, said_to_b.nonce), rules, on_loss="shrink", lost=(before, ()),
        starts=starts, admissions=1,
    )  # fmt: skip
    plan = PlanText(job, 4, 77, (messages.Rule("*", "topk"),))
    facts = DomainFacts(DDP, (WEIGHTS,), 9, ((0, 0), (10, 4)))
    return m, record, JobState(job, 3, (0,), (facts,), (plan,), 4, 4)


def test_who_comes_in_takes_up_what_members_say() -> None:
    m, record, state = comes_back()
    assert m.on(control_from_b(state, 1), 1.0) == []
    out = m.on(control_from_b(record, 2), 1.0)
    (registered,) = told(out)
    assert isinstance(registered, Registered) and registered.domains == state.domains
    assert (registered.epoch, registered.admissions, registered.lost) == (3, 1, ())
    order = [type(e) for e in out if isinstance(e, ce.SaveJob | ce.TakeUp | ce.ToLane)]
    assert order == [ce.SaveJob, ce.TakeUp, ce.ToLane, ce.ToLane]
    e = opened(out)
    assert (e.settled, e.switches, e.proposal) == (9, ((0, 0), (10, 4)), 4)
    assert [p.version for p in e.plans] == [0, 4]
    said(m, 1, DDP)
    assert isinstance(told(said(m, 1, DeclareSection(0, WEIGHTS)))[0], SectionAgreed), "it is agreed already"
    out = finish(m, 10, epoch=3)
    assert control_sent(out) == [StepReady(record.job, 3, 0, 10)]
    assert settled(m.on(control_from_b(StepReady(record.job, 3, 0, 10), 3), 2.0)) == [(10, False)]


def test_who_came_in_says_again_what_a_member_could_not_take_before() -> None:
    m, record, state = comes_back()
    m.on(control_from_b(state, 1), 1.0)
    m.on(control_from_b(record, 2), 1.0)
    finish(m, 10, epoch=3)
    again = control_sent(m.on(control_from_b(record, 3), 2.0))
    assert StepReady(record.job, 3, 0, 10) in again and [x for x in again if isinstance(x, messages.SectionOffer)]


def test_a_record_that_comes_before_the_state_waits_for_it() -> None:
    m, record, state = comes_back()
    assert m.on(control_from_b(record, 1), 1.0) == []
    assert isinstance(told(m.on(control_from_b(state, 2), 1.0))[0], Registered)


def test_members_together_say_what_groups_there_are_or_the_node_is_lost_again() -> None:
    m, record, state = comes_back()
    m.on(control_from_b(msgspec.structs.replace(state, known=(1,), domains=()), 1), 1.0)
    assert m.on(control_from_b(record, 2), 1.0) == []
    for now in (2.0, 20.0):
        assert not [x for x in control_sent(m.on(Tick(), now)) if isinstance(x, Fault)]
    (fault,) = [x for x in control_sent(m.on(Tick(), 33.0)) if isinstance(x, Fault)]
    assert (fault.kind, fault.missing, fault.epoch) == ("PeerLost", ("a",), 3) and m.gatherings
    m, record, state = comes_back()
    m.on(control_from_b(msgspec.structs.replace(state, known=(1,), domains=()), 1), 1.0)
    m.on(control_from_b(record, 2), 1.0)
    assert isinstance(told(m.on(control_from_b(state, 3), 2.0))[0], Registered)


def test_a_restart_remembers_where_it_came_in() -> None:
    m, record, state = comes_back()
    m.on(control_from_b(state, 1), 1.0)
    saved = [e.memory for e in m.on(control_from_b(record, 2), 1.0) if isinstance(e, ce.SaveJob)][-1]
    again = machine(arbiter=True)
    out = again.on(ce.JobRestored(saved, (ce.DomainLedger(9, (), ((0, 0), (10, 4))),)), 2.0)
    assert not [e for e in out if isinstance(e, ce.ForgetJob)]
    job = next(iter(again.jobs.values()))
    assert (job.domains[0].settled, job.domains[0].switches, job.record.epoch) == (9, [(0, 0), (10, 4)], 3)


def test_who_was_let_in_too_late_says_so_and_waits_on() -> None:
    m, record, _ = comes_back()
    late = msgspec.structs.replace(record, nonces=(5, 1))
    out = m.on(control_from_b(late, 1), 1.0)
    (fault,) = control_sent(out)
    assert (fault.kind, fault.missing, fault.epoch) == ("PeerLost", ("a",), 3) and not told(out)
    assert m.gatherings


def test_who_cannot_do_its_part_is_lost_again_and_nobody_else() -> None:
    m, record, state = comes_back()
    odd = msgspec.structs.replace(state.plans[0], rules=(messages.Rule("*", "unknown"),))
    m.on(control_from_b(msgspec.structs.replace(state, plans=(odd,)), 1), 1.0)
    out = m.on(control_from_b(record, 2), 1.0)
    (passed,) = control_sent(out)
    assert (passed.kind, passed.missing) == ("PeerLost", ("a",))
    (refused,) = told(out)
    assert refused.kind == "JoinRefused" and "unknown" in refused.message and not m.jobs


def test_what_is_here_of_an_earlier_time_makes_room() -> None:
    m, record, state = comes_back()
    m.on(control_from_b(state, 1), 1.0)
    saved = [e.memory for e in m.on(control_from_b(record, 2), 1.0) if isinstance(e, ce.SaveJob)][-1]
    me, other = (msgspec.structs.replace(x, since=1) for x in reversed(record.members))
    first = msgspec.structs.replace(record, epoch=1, members=(other, me), lost=(), starts=(), admissions=0)
    m, record, state = comes_back()
    m.on(ce.JobRestored(replace(saved, record=first), (ce.DomainLedger(5, (), ((0, 0),)),)), 1.5)
    m.on(control_from_b(state, 1), 2.0)
    out = m.on(control_from_b(record, 2), 2.0)
    kinds = [type(e) for e in out if isinstance(e, ce.ForgetJob | ce.SaveJob)]
    assert kinds == [ce.ForgetJob, ce.SaveJob] and not [x for x in control_sent(out) if isinstance(x, Fault)]
    assert next(iter(m.jobs.values())).record == record and isinstance(told(out)[-1], Registered)


def test_workers_that_start_again_do_not_wait_for_those_before_them() -> None:
    m, record, state = comes_back()
    m.on(control_from_b(state, 1), 1.0)
    saved = [e.memory for e in m.on(control_from_b(record, 2), 1.0) if isinstance(e, ce.SaveJob)][-1]
    again = machine(arbiter=True)
    again.on(ce.JobRestored(saved, (ce.DomainLedger(9, (), ((0, 0), (10, 4))),)), 2.0)
    again.on(PeerAdded(B, "b"), 2.0)
    again.on(hello_from("b", 7, to=100), 2.0)
    out = said(again, 1, msgspec.structs.replace(register(1, 2), on_loss="shrink"), 3.0)
    join, passed = (x for x in control_sent(out) if isinstance(x, Fault | JobJoin))
    assert (passed.kind, passed.missing) == ("PeerLost", ("a",)) and isinstance(join, JobJoin)
    assert [e for e in out if isinstance(e, ce.ForgetJob)] and not again.jobs


def test_a_record_in_which_a_node_is_there_twice_is_none() -> None:
    _, record, _ = comes_back()
    (gone,), _ = record.lost
    assert misfit(record) is None
    for odd in (
        {"lost": ((gone,), (gone,))},
        {"lost": ((msgspec.structs.replace(gone, since=2),), ())},
        {"lost": ((msgspec.structs.replace(gone, ranks=(0,)),), ())},
        {"members": (record.members[0], msgspec.structs.replace(record.members[1], since=4))},
        {"members": (record.members[0], msgspec.structs.replace(record.members[1], since=1))},
    ):
        assert misfit(msgspec.structs.replace(record, **odd)) is not None, odd
