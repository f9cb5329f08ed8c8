"""New plans: operators' requests, plans that a member cannot run.

What may live here: tests of `gcserver/core/job_plans.py` and `plan_requests.py`. What may not: what a plan means for a
block (`test_plan.py`).
"""

from __future__ import annotations

from dataclasses import replace as dc_replace

import pytest

from gcproto import messages
from gcserver.core import control_events as ce
from gcserver.core import job_plans
from gcserver.core.control import ControlMachine
from gcserver.core.effects import Count, ReportStep
from gcserver.core.events import CodecChoice, DomainOpened, PeerAdded, PlanKnown, Settled
from gcserver.core.job_plans import MAX_WISHES
from gcserver.core.plan_requests import PlanRequests
from tests.unit.core.control_machine import (
    B,
    answers,
    control_from_b,
    control_sent,
    declared,
    domain_of,
    follower,
    formed,
    formed_with_b,
    hello_from,
    machine,
    register,
    resolve,
    said,
    set_codec,
    told,
)
from tests.unit.core.members import JOB, Members


def test_set_codec_answers_every_request_once() -> None:
    m = formed()
    (no_job,) = m.on(set_codec(1, "other", "*", "none"), 0.0)
    assert no_job == ce.AnswerRequest(1, error="no such job: 'other'; jobs here: train")
    (no_codec,) = m.on(set_codec(2, "train", "*", "zip"), 0.0)
    assert no_codec == ce.AnswerRequest(2, error="rule '*': unknown codec 'zip'")
    assert not [e for e in m.on(set_codec(3, "train", "w*", "topk"), 0.0) if isinstance(e, ce.AnswerRequest)]
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    out = m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 1, 0)), 0.0)
    (answer,) = [e for e in out if isinstance(e, ce.AnswerRequest)]
    assert (answer.request, answer.plan, answer.step, answer.error) == (3, 1, 3, "")


def test_a_plan_of_whole_matrices_is_refused_where_blocks_may_cut_them() -> None:
    m, _ = declared(whole=False)
    (answer,) = answers(m.on(set_codec(1, "train", "w*", "matrix"), 0.0))
    assert "a: matrix takes whole matrices, and blocks of 'ddp' may cut 'w'" in answer.error
    assert "whole=True" in answer.error
    assert not answers(m.on(set_codec(2, "train", "other*", "matrix"), 0.0)), "no tensor is meant"
    for m, _ in (declared(whole=True), declared(whole=False, scoped=False)):
        assert not answers(m.on(set_codec(1, "train", "*", "matrix"), 0.0)), "the latter go dense"


def test_the_number_of_a_plan_that_cannot_run_is_dead() -> None:
    m, record = formed_with_b()
    m.on(set_codec(1, "train", "*", "topk"), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "no topk here"), 2), 0.0)
    assert answers(out) == [ce.AnswerRequest(1, error="b: no topk here")]
    assert messages.PlanReady(record.job, 1, "b: no topk here") in control_sent(out), "all hear of it"
    out = m.on(set_codec(2, "train", "*", "none"), 0.0)
    (text,) = [x for x in control_sent(out) if isinstance(x, messages.PlanText)]
    assert text.version == 2
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(dc_replace(memory, plans=()), ()), 0.0)
    assert again.jobs[record.job].numbered == 2


def test_who_asked_at_another_node_hears_that_a_plan_cannot_run() -> None:
    m, record = follower()
    out = m.on(set_codec(4, "train", "*", "topk"), 0.0)
    (wish,) = control_sent(out)
    m.on(control_from_b(messages.PlanText(record.job, 1, wish.request, wish.rules), 3), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "b: no topk here"), 4), 0.0)
    assert answers(out) == [ce.AnswerRequest(4, error="b: no topk here")]
    assert 1 not in m.jobs[record.job].plans


def test_a_plan_says_whether_the_planner_made_it_and_a_controller_changes_nothing_of_that() -> None:
    m, record = formed_with_b()
    job = m.jobs[record.job]

    def planned(asked: ce.SetPlan) -> bool:
        m.on(asked, 0.0)
        m.on(control_from_b(messages.PlanReady(record.job, job.numbered), job.numbered + 1), 0.0)
        return job.plans[job.numbered].planned

    topk = (messages.Rule("*", "topk"),)
    assert planned(ce.SetPlan(1, "train", topk, True, planned=True))
    assert planned(ce.SetPlan(2, "train", (), False, "dc2-da5"))
    assert not planned(ce.SetPlan(3, "train", (messages.Rule("w", "none"),)))
    assert not planned(ce.SetPlan(4, "train", (), False, "none"))


def test_a_plan_answers_all_who_asked_for_it_or_one_before() -> None:
    m = formed()
    m.on(set_codec(1, "train", "w", "topk"), 0.0)
    m.on(set_codec(2, "train", "v", "topk"), 0.0)
    out = m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 2, 0)), 0.0)
    assert [(a.request, a.plan, a.error) for a in answers(out)] == [(1, 2, ""), (2, 2, "")]
    assert [a.message for a in answers(out)] == [
        "plan 2, made after plan 1, takes effect at step 3 on every node",
        "takes effect at step 3 on every node",
    ]


def test_the_step_that_is_told_is_one_of_the_models() -> None:
    """Calls of a whole job, such as broadcasts, count their own steps."""
    m = formed()
    said(m, 1, messages.DeclareDomain("calls", 7, (0,), codec="none"))
    m.on(set_codec(1, "train", "w", "topk"), 0.0)
    (job,) = m.jobs.values()
    assert not answers(m.on(ce.LaneSaid(0, ReportStep((job.id, 7), 1, False, 1, 0)), 0.0))
    (answer,) = answers(m.on(ce.LaneSaid(0, ReportStep((job.id, 0), 1, False, 1, 0)), 0.0))
    assert (answer.plan, answer.step) == (1, 3)


def test_a_lost_first_member_leaves_plans_that_may_come_into_force_yet() -> None:
    requests = PlanRequests()
    for number in (10, 20):
        requests.ask(number, number + 1)
    requests.numbered(messages.PlanText(b"j" * 16, 4, 10, ()))
    found = {a.request: a.error for a in requests.lost("a was lost")}
    assert found[21] == "a was lost; ask again"
    assert found[11].startswith("a was lost before plan 4 was in force: it may come into force yet")
    assert not requests.asked and not requests.in_force(4, 9), "each is answered once"


def text_of(m: ControlMachine, version: int) -> list[tuple[str, str, str]]:
    (job,) = m.jobs.values()
    return [(r.pattern, r.spec, r.scheme) for r in job.plans[version].rules]


def test_rules_of_one_wish_are_one_plan() -> None:
    m = formed()
    rules = (messages.Rule("w*", "topk", "all"), messages.Rule("v", "none"), messages.Rule("w*", "none", "owner"))
    out = m.on(ce.SetPlan(1, "train", rules), 0.0)
    (known,) = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, PlanKnown)]
    found = [(r.pattern, r.codec.spec, r.scheme, r.origin) for r in known.plan.rules]
    assert found == [
        ("*", "none", "owner", "default"), ("v", "none", "owner", "plan"), ("w*", "none", "owner", "plan"),
    ]  # fmt: skip


def test_a_plan_adds_to_the_one_before_or_replaces_it() -> None:
    m = formed()
    m.on(ce.SetPlan(1, "train", (messages.Rule("w", "topk"), messages.Rule("v", "none"))), 0.0)
    m.on(ce.SetPlan(2, "train", (messages.Rule("w", "topk", "all"),)), 0.0)
    assert text_of(m, 2) == [("v", "none", ""), ("w", "topk", "all")], "what comes last wins"
    m.on(ce.SetPlan(3, "train", (messages.Rule("u", "topk"),), True), 0.0)
    assert text_of(m, 3) == [("u", "topk", "")]
    m.on(ce.SetPlan(4, "train", (), True), 0.0)
    assert text_of(m, 4) == []
    m.on(ce.SetPlan(5, "train", (messages.Rule("w", "topk"),)), 0.0)
    assert text_of(m, 5) == [("w", "topk", "")], "nothing of what was replaced comes back"


def test_another_node_asks_the_first_to_replace() -> None:
    m, _ = follower()
    (wish,) = control_sent(m.on(ce.SetPlan(4, "train", (messages.Rule("w", "topk", "all"),), True), 0.0))
    assert (wish.rules, wish.replace) == ((messages.Rule("w", "topk", "all"),), True)


def test_a_rule_that_cannot_be_is_refused_where_it_is_asked_for() -> None:
    m = formed()
    for rule, why in [
        (messages.Rule("w", "topk", "ring"), "rule 'w': scheme: expected one of owner, all"),
        (messages.Rule("w", "zip"), "rule 'w': unknown codec 'zip'"),
        (messages.Rule("", "topk"), "rule '': pattern: expected a glob"),
    ]:
        (answer,) = answers(m.on(ce.SetPlan(1, "train", (messages.Rule("v", "topk"), rule)), 0.0))
        assert answer.error.startswith(why)
    assert not next(iter(m.jobs.values())).plans


def test_a_peer_refuses_a_plan_with_an_unknown_scheme() -> None:
    m, record = follower()
    out = m.on(control_from_b(messages.PlanText(record.job, 1, 9, (messages.Rule("w", "topk", "ring"),)), 3), 0.0)
    (ready,) = [x for x in control_sent(out) if isinstance(x, messages.PlanReady)]
    assert ready.version == 1 and "scheme: expected one of owner, all" in ready.error and "'ring'" in ready.error
    assert not m.jobs[record.job].plans


def test_a_job_whose_codec_is_gone_after_a_restart_ends_and_says_why() -> None:
    m = formed()
    out = m.on(set_codec(1, "train", "w*", "topk"), 0.0)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    (text,) = memory.plans
    lost = dc_replace(memory, plans=(messages.PlanText(text.job, 1, text.request, (messages.Rule("w*", "zip"),)),))
    again = machine()
    said_now = again.on(ce.JobRestored(lost, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    assert any(isinstance(e, ce.Log) and e.level == "error" for e in said_now)
    job = again.jobs[text.job]
    assert job.ended is not None and (job.ended.kind, job.ended.missing) == ("CodecError", ("a",))
    assert job.ended.message == "a came back and cannot run this job any more: rule 'w*': unknown codec 'zip'"
    assert not [e for e in again.on(ce.LaneUp(0), 0.0) if isinstance(e, ce.ToLane)], "no lane hears of the job"
    (fault,) = [x for x in told(said(again, 5, messages.Reattach(text.job, 0, 77)), 5) if isinstance(x, messages.Fault)]
    assert fault == job.ended
    said(again, 7, register(label="next"))
    assert again.gatherings or any(j.record.label == "next" for j in again.jobs.values()), "others are served"


def test_a_job_with_plans_of_several_numbers_of_notches_is_taken_up_again() -> None:
    def graded(spec: str) -> CodecChoice:
        return CodecChoice(spec, 1, 0, True, True, levels=(1, 10)) if spec == "topk" else resolve(spec)

    m = formed()
    m.resolve = next(iter(m.jobs.values())).resolve = graded
    for request, levels in ((1, (5,)), (2, (7, 3))):
        asked = ce.SetPlan(request, "train", (messages.Rule("w", "topk", "", levels),), True)
        out = m.on(asked, 0.0)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    assert [len(text.rules[0].levels) for text in memory.plans] == [1, 2]
    again = machine()
    again.resolve = graded
    again.on(ce.JobRestored(memory, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    assert [job.ended for job in again.jobs.values()] == [None]


def test_a_first_member_that_restarts_goes_on_with_the_plan_it_was_preparing() -> None:
    m, record = formed_with_b()
    out = m.on(set_codec(1, "train", "*", "topk"), 0.0)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    assert [text.version for text in memory.plans] == [1] and memory.proposal == 0
    again = machine()
    again.on(PeerAdded(B, "b"), 0.0)
    assert not control_sent(again.on(ce.JobRestored(memory, ()), 0.0))
    out = again.on(hello_from("b", 7, to=100), 0.0)
    assert [x.version for x in control_sent(out) if isinstance(x, messages.PlanText)] == [1]
    out = again.on(control_from_b(messages.PlanReady(record.job, 1), 1), 0.0)
    assert messages.PlanGo(record.job, 1) in control_sent(out)
    assert again.jobs[record.job].proposal == 1


def test_a_job_of_one_node_has_the_plan_that_its_restart_interrupted() -> None:
    m = formed()
    saved = [e.memory for e in m.on(set_codec(1, "train", "*", "topk"), 0.0) if isinstance(e, ce.SaveJob)]
    interrupted = next(memory for memory in saved if memory.plans and not memory.proposal)
    again = machine()
    again.on(ce.JobRestored(interrupted, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    assert [job.proposal for job in again.jobs.values()] == [1]


def test_a_plan_that_no_step_will_run_under_any_more_is_forgotten() -> None:
    m = formed()
    id, step = domain_of(m), 0
    job = m.jobs[id[0]]
    said(m, 1, messages.DeclareDomain("exact", 7, (0,), codec="none"))
    for version in range(1, 6):
        m.on(set_codec(version, "train", "*", "topk" if version % 2 else "none"), 0.0)
        for _ in range(3):
            step += 1
            out = m.on(ce.LaneSaid(0, ReportStep(id, step, False, version, 0)), 0.0)
    assert sorted(job.plans) == [3, 4, 5] and job.proposal == 5
    assert job.plan(job.domains[0], 5).rules[-1].codec.spec == "topk"
    out = m.on(ce.LaneUp(0), 0.0)
    opened = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, DomainOpened)]
    assert [[p.version for p in e.plans] for e in opened] == [[0, 3, 4, 5], [0, 3, 4, 5]]
    # A step that was open all the while proposed a plan of long ago; the lane has forgotten it with its process.
    out = m.on(ce.LaneSaid(0, ReportStep((job.id, 7), 1, False, 2, 0)), 0.0)
    lanes = [e.event for e in out if isinstance(e, ce.ToLane)]
    assert lanes == [PlanKnown((job.id, 7), job.plan(job.domains[7], 2)), Settled((job.id, 7), 1, False, 2)]
    out = m.on(ce.LaneUp(0), 0.0)
    opened = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, DomainOpened)]
    assert [[p.version for p in e.plans] for e in opened] == [[0, 3, 4, 5], [0, 2, 3, 4, 5]]


def test_a_domain_that_makes_no_steps_keeps_the_plans_it_may_come_to() -> None:
    m = formed()
    for version in (1, 2, 3):
        m.on(set_codec(version, "train", "*", "topk"), 0.0)
    (job,) = m.jobs.values()
    assert sorted(job.plans) == [1, 2, 3]


def test_an_orderly_end_answers_what_is_open() -> None:
    m = formed()
    m.on(set_codec(1, "train", "*", "topk"), 0.0)
    (answer,) = answers(said(m, 1, messages.Unregister()))
    assert answer.request == 1 and "ended" in answer.error


def controller_of(m: ControlMachine, version: int) -> str:
    (job,) = m.jobs.values()
    return job.controller(version)


def test_a_controller_comes_with_a_plan_and_stays_until_another_comes() -> None:
    m = formed()
    assert controller_of(m, 0) == "none"
    m.on(set_codec(1, "train", "w", "topk"), 0.0)
    m.on(ce.SetPlan(2, "train", (), controller="dc2-da2"), 0.0)
    assert text_of(m, 2) == [("w", "topk", "")], "its rules are those of the plan before"
    m.on(ce.SetPlan(3, "train", (messages.Rule("v", "topk"),), True), 0.0)
    m.on(ce.SetPlan(4, "train", (), controller="none"), 0.0)
    m.on(ce.SetPlan(5, "train", (), True), 0.0)
    (job,) = m.jobs.values()
    assert [job.plans[v].given for v in range(1, 6)] == [True, False, True, False, True], "whether rules were asked for"
    assert [controller_of(m, v) for v in range(5)] == ["none", "none", "dc2-da2", "dc2-da2", "none"]


def test_what_the_job_began_with_steers_it_until_a_plan_says_otherwise() -> None:
    m = machine(controller="dc2-da5")
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    assert arbitrate.record.controller == "dc2-da5"
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    m.on(set_codec(1, "train", "w", "topk"), 0.0)
    out = m.on(ce.SetPlan(2, "train", (), controller="dc2-da2"), 0.0)
    assert [controller_of(m, v) for v in range(3)] == ["dc2-da5", "dc2-da5", "dc2-da2"]
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(memory, ()), 0.0)
    assert [controller_of(again, v) for v in range(3)] == ["dc2-da5", "dc2-da5", "dc2-da2"]


def test_a_controller_set_at_one_node_reaches_all() -> None:
    m, record = follower()
    (wish,) = control_sent(m.on(ce.SetPlan(4, "train", (), controller="dc2-da2"), 0.0))
    assert isinstance(wish, messages.PlanRequest) and (wish.rules, wish.controller) == ((), "dc2-da2")
    out = m.on(control_from_b(messages.PlanText(record.job, 1, wish.request, (), wish.controller), 3), 0.0)
    assert control_sent(out) == [messages.PlanReady(record.job, 1)] and controller_of(m, 1) == "dc2-da2"
    first, record = formed_with_b()
    out = first.on(control_from_b(messages.PlanRequest(record.job, 9, (), False, "dc2-da5"), 2), 0.0)
    assert messages.PlanText(record.job, 1, 9, (), "dc2-da5") in control_sent(out)


def test_a_controller_that_a_node_does_not_know_is_refused_wherever_it_comes_from() -> None:
    m = formed()
    (answer,) = answers(m.on(ce.SetPlan(1, "train", (), controller="pid"), 0.0))
    assert answer.error == "unknown controller 'pid'" and not next(iter(m.jobs.values())).plans
    m, record = follower()
    out = m.on(control_from_b(messages.PlanText(record.job, 1, 9, (), "pid"), 3), 0.0)
    assert control_sent(out) == [messages.PlanReady(record.job, 1, "unknown controller 'pid'")]


def test_a_job_whose_controller_is_gone_after_a_restart_ends_and_says_why() -> None:
    m = formed()
    out = m.on(ce.SetPlan(1, "train", (), controller="dc2-da2"), 0.0)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    (text,) = memory.plans
    lost = dc_replace(memory, plans=(messages.PlanText(text.job, 1, text.request, (), "pid"),))
    again = machine()
    again.on(ce.JobRestored(lost, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    ended = again.jobs[text.job].ended
    assert ended is not None
    assert ended.message == "a came back and cannot run this job any more: unknown controller 'pid'"


def test_a_plan_that_a_member_has_no_memory_for_is_refused_before_anybody_uses_it() -> None:
    m, record = follower()
    m.jobs[record.job].no_room = lambda job, text: f"no room for {text.version}"
    out = m.on(control_from_b(messages.PlanText(record.job, 1, 9, (messages.Rule("w", "topk"),)), 3), 0.0)
    assert control_sent(out) == [messages.PlanReady(record.job, 1, "no room for 1")]
    assert not m.jobs[record.job].plans
    first = formed()
    next(iter(first.jobs.values())).no_room = lambda job, text: "no room"
    (answer,) = answers(first.on(set_codec(1, "train", "w", "topk"), 0.0))
    assert answer.error == "a: no room"


def test_plans_come_from_the_first_member_alone() -> None:
    m, record = formed_with_b()
    text = messages.PlanText(record.job, 1, 9, (messages.Rule("w", "topk"),))
    for seq, message in enumerate((text, messages.PlanGo(record.job, 1)), 2):
        (log,) = [e for e in m.on(control_from_b(message, seq), 0.0) if isinstance(e, ce.Log)]
        assert log.level == "error" and "b sent Plan" in log.text
    job = m.jobs[record.job]
    assert not job.plans and job.proposal == 0


def test_who_is_no_member_of_a_job_has_no_say_in_it() -> None:
    m = formed()
    (job,) = m.jobs.values()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    for seq, message in enumerate((messages.PlanRequest(job.id, 9, ()), messages.Fault(job.id, "PeerLost", "so")), 1):
        (log,) = [e for e in m.on(control_from_b(message, seq), 0.0) if isinstance(e, ce.Log)]
        assert "not its business" in log.text
    assert job.ended is None and not job.plans


def test_a_plan_has_a_number_that_frames_can_say() -> None:
    m, record = follower()
    for seq, version in enumerate((0, -1, 1 << 32), 3):
        out = m.on(control_from_b(messages.PlanText(record.job, version, 9, ()), seq), 0.0)
        assert "frames_unusable" in [e.name for e in out if isinstance(e, Count)]
    assert not m.jobs[record.job].plans


def test_what_a_model_excludes_stays_so_whatever_a_plan_says() -> None:
    m = machine(codec="topk")
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    said(m, 1, messages.DeclareDomain("ddp", 0, (0,), True, exclude=("*.bias", "head.*")))
    out = m.on(set_codec(1, "", "head.bias", "topk"), 0.0)
    assert any(isinstance(e, ce.ToLane) for e in out)
    (job,) = m.jobs.values()
    plan = job.plan(job.domains[0], job.proposal)
    assert [(r.pattern, r.codec.spec, r.origin) for r in plan.rules] == [
        ("*", "topk", "default"),
        ("head.bias", "topk", "plan"),
        ("*.bias", "none", "exclude"),
        ("head.*", "none", "exclude"),
    ]


def test_wishes_that_wait_are_bounded_and_who_asked_hears_so() -> None:
    m, record = formed_with_b()
    rule = messages.Rule("w", "topk")
    for i in range(MAX_WISHES + 1):  # the first is being prepared
        m.on(control_from_b(messages.PlanRequest(record.job, 100 + i, (rule,)), 2 + i), 0.0)
    (job,) = m.jobs.values()
    assert len(job.queue) == MAX_WISHES
    seq = 3 + MAX_WISHES
    refused = control_sent(m.on(control_from_b(messages.PlanRequest(record.job, 900, (rule,)), seq), 0.0))
    text, dead = refused
    assert isinstance(text, messages.PlanText) and text.request == 900
    assert isinstance(dead, messages.PlanReady) and dead.version == text.version
    assert dead.error == f"a: {MAX_WISHES} plans wait to be made already; ask again when those are in force"
    assert len(job.queue) == MAX_WISHES
    m.on(control_from_b(messages.PlanRequest(record.job, 101, (rule,)), seq + 1), 0.0)
    assert len(job.queue) == MAX_WISHES, "asked again by a node that was restarted: it waits already"
    (answer,) = answers(m.on(set_codec(1, "train", "w", "topk"), 0.0))
    assert (answer.request, answer.error) == (1, dead.error)


def test_who_asked_at_another_node_hears_that_too_many_wait() -> None:
    m, record = follower()
    m.on(set_codec(1, "train", "w", "topk"), 0.0)
    (job,) = m.jobs.values()
    (number,) = job.requests.wishes
    m.on(control_from_b(messages.PlanText(record.job, 9, number, ()), 2), 0.0)
    (answer,) = answers(m.on(control_from_b(messages.PlanReady(record.job, 9, "b: 64 plans wait"), 3), 0.0))
    assert (answer.request, answer.error) == (1, "b: 64 plans wait")
    assert 9 not in job.plans


# --------------------------------------------------------------- a first member that dies over a plan's refusal
def refused_and_killed(by: str, *, asks: str = "b") -> Members:
    """``asks`` wants a plan that ``by`` cannot run; a, the first, saves that and is killed before it says so."""
    w = Members("abc", "fail")
    w.declare()
    w[by].no_room = lambda job, text: "no room" if any(r.spec == "topk" for r in text.rules) else ""
    w.ask(asks, 1)
    w.deliver(f"{asks}a")
    w.deliver("ab", "ac")
    w.deliver(f"{by}a")
    assert w["a"].numbered == 1 and not w["a"].plans and 1 in w["c" if by == "b" else "b"].plans
    w.restart("a")
    return w


@pytest.mark.parametrize("asks", ["b", "c"])
def test_who_asked_hears_that_a_plan_was_given_up_though_the_first_member_was_killed_over_it(asks: str) -> None:
    w = refused_and_killed("c", asks=asks)
    w.deliver()
    ((request, _, error),) = w.answers(asks)
    assert request == 1
    assert error == "c: no room" if asks == "c" else error.startswith("a: the plan was given up")
    assert not any(job.plans or job.requests.asked for job in w.jobs.values()), "no text of it is left"
    w.ask(asks, 2, "none")
    w.deliver()
    for name in "abc":
        w.finish(name, 1, 2)
    assert w.answers(asks)[1:] == [(2, 2, "")], "and is not told that a later one is what became of it"


def test_who_asks_for_what_it_cannot_run_is_told_by_itself() -> None:
    w = refused_and_killed("b")
    assert w.answers("b") == [(1, 0, "b: no room")]
    w.deliver()
    assert len(w.answers("b")) == 1 and not w["c"].plans


def test_a_plan_that_was_accepted_and_replaced_is_not_said_to_be_given_up() -> None:
    w = Members("abc", "fail")
    w.declare()
    for version in range(1, 6):
        w.ask("b", version, "topk" if version % 2 else "none")
        w.deliver()
        for step in range(3 * version - 2, 3 * version + 1):
            for name in "abc":
                w.finish(name, step, version)
    assert sorted(w["a"].plans) == [3, 4, 5] and w["a"].proposal == 5
    for version in range(1, 6):
        assert job_plans.on_ready(w["a"], "b", messages.PlanReady(JOB, version)) == []
    assert not w["a"].outgoing
