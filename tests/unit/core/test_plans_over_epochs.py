"""Plans while members are in different epochs, and so do not agree yet on who makes them.

What may live here: tests of `job_plans.on_message` and of what `epochs.py` keeps of plans. What may not: plans within
one epoch (`test_job_plans.py`), how epochs come about (`test_epochs.py`, `test_admission.py`).
"""

from __future__ import annotations

import msgspec
import pytest

from gcproto.epoch_messages import DomainState, Frozen
from gcproto.messages import MemberInfo, PlanGo, PlanReady, PlanRequest, PlanText, Rule
from gcserver.core import admission
from gcserver.core import control_events as ce
from gcserver.core.early_messages import MAX_EARLY
from gcserver.core.job import Job
from tests.unit.core.control_machine import resolve
from tests.unit.core.members import JOB, Members


def plans_go_on(w: Members, at: str, first: str) -> None:
    """Whoever asks now has a plan that all members run."""
    assert not w[first].preparing and not w[first].queue
    before = w[first].proposal
    w.ask(at, 9)
    w.deliver()
    assert len({job.proposal for job in w.jobs.values()}) == 1 and w[at].proposal > before
    assert not w[first].preparing


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("heard", [True, False], ids=["with the text", "without it"])
def test_a_plan_that_a_lost_first_member_was_preparing_waits_for_nobody_who_hears_late_of_its_loss(
    heard: bool, times: int
) -> None:
    w = Members("abcd")
    w.ask("a", 1)
    w.deliver("ab", *(["ac"] if heard else []))
    w.die("a")
    record = w.decided("d")
    w.hear("d", record)
    w.hear("b", record, "d")
    assert w["b"].preparing == {1: {"c", "d"}} and w["c"].first == "a"
    w.deliver("bc", times=times)
    assert not [e for e in w.out["c"] if isinstance(e, ce.Log) and "business" in e.text]
    w.deliver(times=times)
    assert [job.proposal for job in w.jobs.values()] == [1, 1, 1]
    plans_go_on(w, "c", "b")


@pytest.mark.parametrize("again", ["", "b", "c"])
def test_a_plan_waits_for_nobody_whose_lanes_have_to_report_before_it_enters(again: str) -> None:
    """c is a new process when it hears of the epoch. Then ``again`` is one."""
    w = Members("abc")
    w.declare()
    w.ask("a", 1)
    w.deliver("ab", "ac")
    for name in "abc":
        w.finish(name, 1)
    w.die("a")
    record = w.decided("b")
    assert [s.committed for s in record.starts] == [1]
    w.restart("c")
    w.hear("b", record)
    w.deliver("bc")
    assert w["c"].change.pending == record and w["b"].preparing == {1: {"c"}}
    if again:
        w.restart(again)
        w.deliver("bc", "cb")
    w.finish("c", 1)
    w.deliver()
    assert w["c"].record == record and [job.proposal for job in w.jobs.values()] == [1, 1]
    plans_go_on(w, "c", "b")


def test_what_the_next_first_member_says_of_a_plan_that_is_dead_waits_too() -> None:
    w = Members("abcd")
    w["d"].resolve = lambda spec: resolve("zip" if spec == "topk" else spec)
    w.ask("a", 1)
    w.deliver("ab", "ac")
    w.die("a")
    record = w.decided("d")
    w.hear("d", record)
    w.hear("b", record, "d")
    w.deliver("bd", "db", "bc")
    assert not w["b"].plans and 1 in w["c"].plans
    w.deliver()
    assert not w["c"].plans, "it would be prepared once more were c the first"


@pytest.mark.parametrize("again", ["", "b", "c"])
def test_a_wish_reaches_a_first_member_that_does_not_know_yet_that_it_is(again: str) -> None:
    w = Members("abcd")
    w.declare()
    w.die("a")
    record = w.decided("d")
    w.hear("d", record)
    w.hear("c", record, "d")
    w.ask("c", 5)
    w.deliver("cb")
    assert w["b"].first == "a" and not w["b"].queue
    if again:
        w.restart(again)
    w.deliver()
    version = w["b"].proposal
    assert version and [job.proposal for job in w.jobs.values()] == [version] * 3
    if again != "c":
        for name in "bcd":
            w.finish(name, 1, version, epoch=2)
        w.deliver()
        assert w.answers("c") == [(5, version, "")]
    plans_go_on(w, "c", "b")


def test_who_comes_in_asks_a_first_member_that_does_not_know_it_yet() -> None:
    w = Members("abc")
    w.die("c")
    w.hear("a", w.decided("a"))
    w.deliver()
    before = w["a"].record
    back = MemberInfo("c", "tcp://c:7000", (2,), 3)
    record = msgspec.structs.replace(
        before,
        epoch=3,
        members=(*before.members, back),
        nonces=(*before.nonces, 7),
        lost=(*before.lost, ()),
        admissions=1,
    )
    for name in "ab":
        w[name].change.frozen = True
    w.hear("b", record)
    job = w.jobs["c"] = Job(record, "c", 1, resolve)
    admission.fill(job, admission.state_for(w["b"], back))
    w.ask("c", 5)
    w.deliver("ca", "bc")
    assert w["a"].record == before and not w["a"].queue
    w.deliver("ba")
    w.deliver()
    assert w["a"].record == record and [j.proposal for j in w.jobs.values()] == [w["a"].numbered] * 3
    plans_go_on(w, "c", "a")


def test_what_is_kept_for_the_next_epoch_is_bounded_and_no_more_right_than_it_was() -> None:
    w = Members("abcd")
    w.die("a")
    job, text = w["c"], PlanText(JOB, 1, 9, (Rule("*", "topk"),))
    assert job.frozen
    for m in (text, PlanGo(JOB, 1), PlanReady(JOB, 1), PlanRequest(JOB, 9, ())):
        w.say("d", "c", m)
    assert len(job.change.later) == 4 and not job.plans
    for i in range(2 * MAX_EARLY):
        w.say("b", "c", Frozen(JOB, 2 + i, (DomainState(0, 1, 1, ("b", "c")),)))
    assert len(job.change.later) == 4 + MAX_EARLY
    w.hear("c", w.decided("b"))
    assert not job.plans and not job.queue and job.proposal == 0
    wrong = [e.text for e in w.out["c"] if isinstance(e, ce.Log) and "not its business" in e.text]
    assert [text.split()[2] for text in wrong] == ["PlanText", "PlanGo"]
