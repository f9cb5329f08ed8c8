"""Wrong declarations, and members that declare differently.

What may live here: tests of `gcserver/core/declarations.py`. What may not: the checks of a section itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto import messages
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.plan import explain
from tests.unit.core.control_machine import (
    LARGE,
    answers,
    control_from_b,
    control_sent,
    declared,
    formed,
    formed_with_b,
    said,
    set_codec,
    told,
)


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (DeclareDomain("ddp", 0, (0,), False), "declares process group"),
        (DeclareDomain("tp", 1, (0, 1)), "within 0..0"),
        (DeclareDomain("tp", 1, (0,), codec="zip"), "unknown codec 'zip'"),
        (DeclareDomain("ddp", 0, (0,), True, whole=True), "declares process group"),
        (DeclareDomain("tp", 1, (0,), codec="matrix"), "matrix takes whole matrices, and blocks of 'tp' may cut them"),
        (DeclareDomain("tp", 1, (0,), exclude=("*.bias", "")), "rank 0 excludes tensors from compression: pattern:"),
        (DeclareDomain("tp", 1, (0,), quality="best"), "rank 0 quality='best': expected one of safe, balanced, fast"),
        (DeclareSection(9, Section(0, (TensorSpec("w", (4,), 0),))), "not in"),
        (DeclareSection(0, Section(1, ())), "holds 1 to"),
        (DeclareSection(0, Section(0, (TensorSpec("w", (5,), 0),))), "shape of tensor 0 differs"),
        (DeclareSection(0, Section(1, LARGE.tensors, (2,))), "rising, within 1..1, got [2]"),
    ],
)
def test_wrong_declarations_end_the_job_with_a_reason(message: Any, part: str) -> None:
    (fault,) = told(said(formed(), 1, message))
    assert isinstance(fault, Fault) and part in fault.message and fault.advice


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_domain_number_fits_the_frame_header(number: int) -> None:
    (fault,) = told(said(formed(), 1, DeclareDomain("tp", number, (0,))))
    assert f"0..{2**32 - 1}" in fault.message


def test_a_section_that_the_plan_in_force_would_cut_is_refused() -> None:
    _, out = declared(whole=False, rules="matrix")
    (fault,) = told(out)
    assert isinstance(fault, Fault) and fault.kind == "CodecError"
    assert "rank 0: matrix takes whole matrices, and blocks of 'ddp' may cut 'b'" in fault.message
    assert "whole=True" in fault.advice
    for _, out in (declared(whole=True, rules="matrix"), declared(whole=False, scoped=False, rules="matrix")):
        assert isinstance(told(out)[0], messages.SectionAgreed)


def with_a_plan_for_matrices(planned: bool) -> ControlMachine:
    """One node, a whole domain with a large matrix, and in force a plan that gives it a codec of whole matrices."""
    m, _ = declared(whole=True)
    m.on(ce.SetPlan(1, "train", (messages.Rule("*", "matrix"),), True, planned=planned), 0.0)
    (job,) = m.jobs.values()
    assert job.newest is not None and job.newest.planned == planned
    return m


def test_what_a_planner_wants_for_one_model_leaves_another_that_may_be_cut_dense() -> None:
    m = with_a_plan_for_matrices(planned=True)
    said(m, 1, DeclareDomain("second", 1, (0,), True))
    out = said(m, 1, DeclareSection(1, LARGE))
    assert isinstance(told(out)[0], messages.SectionAgreed)
    (job,) = m.jobs.values()
    for key, spec, why in ((0, "matrix", ""), (1, "none", "matrices may be cut: dense")):
        domain = job.domains[key]
        plan = job.plan(domain, job.proposal)
        for block in domain.config.space(1).append(LARGE):
            choice = explain(plan, LARGE, block, domain.config.min_compress_bytes, 1)
            assert (choice.codec.spec, choice.levels, choice.reason) == (spec, (), why)
    # So it may go on to plan, and a controller may come: what is asked for by hand is refused still.
    assert not answers(m.on(ce.SetPlan(2, "train", (messages.Rule("w", "matrix"),), True, planned=True), 0.0))
    assert not answers(m.on(ce.SetPlan(3, "train", (), controller="dc2-da2"), 0.0))
    assert job.proposal == 3
    (answer,) = answers(m.on(set_codec(4, "train", "*", "matrix"), 0.0))
    assert "blocks of 'second' may cut 'b'" in answer.error


def test_what_somebody_wants_for_all_models_is_refused_where_one_may_be_cut() -> None:
    m = with_a_plan_for_matrices(planned=False)
    said(m, 1, DeclareDomain("second", 1, (0,), True))
    (fault,) = told(said(m, 1, DeclareSection(1, LARGE)))
    assert isinstance(fault, Fault) and fault.kind == "CodecError"
    assert "rank 0: matrix takes whole matrices, and blocks of 'second' may cut 'b'" in fault.message


def test_a_script_s_own_rule_is_refused_beside_a_planner_s() -> None:
    """The planner's leaves those tensors out."""
    m, _ = declared(whole=True, rules="matrix")
    m.on(ce.SetPlan(1, "train", (messages.Rule("other", "matrix"),), True, planned=True), 0.0)
    said(m, 1, DeclareDomain("second", 1, (0,), True))
    (fault,) = told(said(m, 1, DeclareSection(1, LARGE)))
    assert isinstance(fault, Fault) and "blocks of 'second' may cut 'b'" in fault.message


def test_tensors_are_agreed_once_all_members_have_offered_them() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    out = said(m, 1, DeclareSection(0, LARGE))
    (offer,) = control_sent(out)
    assert isinstance(offer, messages.SectionOffer) and told(out) == []
    (agreed,) = told(m.on(control_from_b(offer, 2), 0.0))
    assert agreed == messages.SectionAgreed(0, 0, offer.digest)


def test_members_agree_on_what_is_whole() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    theirs = messages.SectionList(record.job, 0, DeclareDomain("ddp", 0, (0, 1), True, "", True), LARGE, 1)
    said(m, 1, DeclareSection(0, LARGE))
    (fault,) = told(m.on(control_from_b(theirs, 2), 0.0))
    assert "process groups differ" in fault.message and "whole=True" in fault.message


def test_members_agree_on_groups() -> None:
    m, record = formed_with_b()
    domain = DeclareDomain("ddp", 0, (0, 1), True)
    said(m, 1, domain)
    said(m, 1, DeclareSection(0, LARGE))
    theirs = messages.SectionList(record.job, 0, domain, Section(0, LARGE.tensors, (1,)), 1)
    (fault,) = told(m.on(control_from_b(theirs, 2), 0.0))
    assert "groups differ (1 here, 2 there): tensor 1, 'w'" in fault.message


def test_a_peers_impossible_section_ends_the_job() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    (fault,) = told(m.on(control_from_b(messages.SectionOffer(record.job, 0, -1, 5), 2), 0.0))
    assert "sections start at 0" in fault.message
    m, record = formed_with_b()
    declared = DeclareDomain("ddp", 0, (0, 1), True)
    said(m, 1, declared)
    theirs = messages.SectionList(record.job, 0, declared, Section(0, (TensorSpec("w", (4,), 250),)), 1)
    (fault,) = told(m.on(control_from_b(theirs, 2), 0.0))
    assert "unknown dtype code 250" in fault.message


def test_tensors_that_a_node_has_no_memory_for_end_the_job_before_they_are_offered() -> None:
    m, _ = formed_with_b()
    (job,) = m.jobs.values()
    asked = []

    def no_space(*about: object) -> str:
        asked.append(about)
        return "'w' would take 7 GiB"

    job.no_space = no_space
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    out = said(m, 1, DeclareSection(0, LARGE))
    (fault,) = told(out)
    assert (fault.kind, fault.phase, fault.message) == ("OutOfMemory", "declare", "a: 'w' would take 7 GiB")
    assert "doctor --params" in fault.advice and asked == [(job, job.domains[0], LARGE)]
    assert [type(x) for x in control_sent(out)] == [messages.Fault]
