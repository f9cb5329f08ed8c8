"""New plans: operators' requests, plans that a member cannot run.

What may live here: tests of `gcserver/core/job_plans.py` and `plan_requests.py`. What may not: what a plan means for a
block (`test_plan.py`).
"""

from __future__ import annotations

from dataclasses import replace as dc_replace

from gcproto import messages
from gcserver.core import control_events as ce
from gcserver.core.effects import ReportStep
from tests.unit.core.control_machine import (
    answers,
    control_from_b,
    control_sent,
    declared,
    domain_of,
    follower,
    formed,
    formed_with_b,
    machine,
    said,
)


def test_set_codec_answers_every_request_once() -> None:
    m = formed()
    (no_job,) = m.on(ce.SetCodec(1, "other", "*", "none"), 0.0)
    assert no_job == ce.AnswerRequest(1, error="no such job: 'other'; jobs here: train")
    (no_codec,) = m.on(ce.SetCodec(2, "train", "*", "zip"), 0.0)
    assert no_codec == ce.AnswerRequest(2, error="unknown codec 'zip'")
    assert not [e for e in m.on(ce.SetCodec(3, "train", "w*", "topk"), 0.0) if isinstance(e, ce.AnswerRequest)]
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    out = m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 1, 0)), 0.0)
    (answer,) = [e for e in out if isinstance(e, ce.AnswerRequest)]
    assert (answer.request, answer.plan, answer.step, answer.error) == (3, 1, 3, "")


def test_a_plan_of_whole_matrices_is_refused_where_blocks_may_cut_them() -> None:
    m, _ = declared(whole=False)
    (answer,) = answers(m.on(ce.SetCodec(1, "train", "w*", "matrix"), 0.0))
    assert "a: matrix takes whole matrices, and blocks of 'ddp' may cut 'w'" in answer.error
    assert "whole=True" in answer.error
    assert not answers(m.on(ce.SetCodec(2, "train", "other*", "matrix"), 0.0)), "no tensor is meant"
    for m, _ in (declared(whole=True), declared(whole=False, scoped=False)):
        assert not answers(m.on(ce.SetCodec(1, "train", "*", "matrix"), 0.0)), "the latter go dense"


def test_the_number_of_a_plan_that_cannot_run_is_dead() -> None:
    m, record = formed_with_b()
    m.on(ce.SetCodec(1, "train", "*", "topk"), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "no topk here"), 2), 0.0)
    assert answers(out) == [ce.AnswerRequest(1, error="b: no topk here")]
    assert messages.PlanReady(record.job, 1, "b: no topk here") in control_sent(out), "all hear of it"
    out = m.on(ce.SetCodec(2, "train", "*", "none"), 0.0)
    (text,) = [x for x in control_sent(out) if isinstance(x, messages.PlanText)]
    assert text.version == 2
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(dc_replace(memory, plans=()), ()), 0.0)
    assert again.jobs[record.job].numbered == 2


def test_who_asked_at_another_node_hears_that_a_plan_cannot_run() -> None:
    m, record = follower()
    out = m.on(ce.SetCodec(4, "train", "*", "topk"), 0.0)
    (wish,) = control_sent(out)
    m.on(control_from_b(messages.PlanText(record.job, 1, wish.request, wish.rules), 3), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "b: no topk here"), 4), 0.0)
    assert answers(out) == [ce.AnswerRequest(4, error="b: no topk here")]
    assert 1 not in m.jobs[record.job].plans


def test_a_plan_answers_all_who_asked_for_it_or_one_before() -> None:
    m = formed()
    m.on(ce.SetCodec(1, "train", "w", "topk"), 0.0)
    m.on(ce.SetCodec(2, "train", "v", "topk"), 0.0)
    out = m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 2, 0)), 0.0)
    assert [(a.request, a.plan, a.error) for a in answers(out)] == [(1, 2, ""), (2, 2, "")]


def test_an_orderly_end_answers_what_is_open() -> None:
    m = formed()
    m.on(ce.SetCodec(1, "train", "*", "topk"), 0.0)
    (answer,) = answers(said(m, 1, messages.Unregister()))
    assert answer.request == 1 and "ended" in answer.error
