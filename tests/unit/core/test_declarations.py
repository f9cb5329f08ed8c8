"""Wrong declarations, and members that declare differently.

What may live here: tests of `gcserver/core/declarations.py`. What may not: the checks of a section itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto import messages
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault
from tests.unit.core.control_machine import (
    LARGE,
    control_from_b,
    control_sent,
    declared,
    formed,
    formed_with_b,
    said,
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
