"""A job's plan as operators see it.

What may live here: tests of `gcserver/runtime/planstatus.py`. What may not: the rules themselves
(`tests/unit/core/test_plan.py`), how answers look (`tests/unit/admin`).
"""

from __future__ import annotations

from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Rule
from gcserver.admin.source import PlanGroup, PlanRule
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.effects import ReportStep
from gcserver.core.job import Job
from gcserver.runtime.planstatus import EMPTY_NOTE, LOOKED_AT, LOSSLESS_NOTE, plan_status, without_tensors
from tests.unit.core.control_machine import LARGE, declared, domain_of, said

DEFAULT = PlanRule("*", "none", "owner", "default")


def job_of(m: ControlMachine) -> Job:
    (job,) = m.jobs.values()
    return job


def test_the_defaults() -> None:
    m, _ = declared(whole=False)
    status = plan_status(job_of(m), 1)
    assert (status.job, status.job_id, status.proposed_version, status.rules) == ("train", (b"j" * 16).hex(), 0, ())
    (domain,) = status.domains
    assert (domain.label, domain.plan_version, domain.since_step, domain.switches) == ("ddp", 0, 0, ())
    assert domain.rules == (DEFAULT,)
    # One node: there is nobody to send to, and nothing need be retained.
    assert domain.groups == (PlanGroup(0, 1, 2, "b", 361_200, "none", "owner", DEFAULT, ""),)


def test_rules_that_match_no_tensor() -> None:
    m, _ = declared(whole=False)
    job, (star, here, slip) = job_of(m), (Rule("*", "topk"), Rule("[bw]", "topk"), Rule("wte*", "topk"))
    assert without_tensors(job, (star, here, slip)) == [slip]
    name, other = Rule("[[]w]", "topk"), Rule("w", "topk")
    assert without_tensors(job, (name, other)) == [name], "a name is written with its glob characters escaped"
    many = tuple(Rule(f"x{i}*", "topk") for i in range(LOOKED_AT + 9))
    assert without_tensors(job, many) == list(many[:LOOKED_AT]), "trying each for all tensors takes too long"
    job.domains.clear()
    assert without_tensors(job, (star, slip)) == [], "whatever is declared later may match"


def test_blocks_that_use_the_same_are_one_group() -> None:
    m, _ = declared(whole=True)
    mib = [TensorSpec(name, (n << 18,), 0) for name, n in [("a", 6), ("v.0", 6), ("v.1", 1), ("c", 6)]]
    said(m, 1, DeclareSection(0, Section(1, tuple(mib))))
    said(m, 1, DeclareSection(0, Section(2, (TensorSpec("count", (8,), int(DType.I64)),))))
    job = job_of(m)
    m.on(ce.SetPlan(1, "train", (Rule("[ac]", "topk"), Rule("count", "topk"))), 0.0)
    (domain,) = job.domains.values()
    domain.switches = [(1, 1)]
    (shown,) = plan_status(job, 1).domains
    found = [(g.section, g.blocks, g.tensors, g.first_tensor, g.bytes >> 20, g.codec) for g in shown.groups]
    assert found == [
        (0, 1, 2, "b", 0, "none"), (1, 2, 2, "a", 12, "topk"), (1, 2, 2, "v.0", 7, "none"),
        (2, 1, 1, "count", 0, "none"),
    ]  # fmt: skip
    assert shown.groups[-1].reason == "integers travel as they are"


def test_a_plan_is_proposed_then_settled_then_in_force() -> None:
    m, _ = declared(whole=False)
    key, rule = domain_of(m), PlanRule("w", "topk", "all", "plan")
    m.on(ce.SetPlan(1, "train", (Rule("w", "topk", "all"),)), 0.0)
    status = plan_status(job_of(m), 1)
    assert (status.proposed_version, status.rules, status.domains[0].plan_version) == (1, (rule,), 0)
    assert status.domains[0].switches == ()
    m.on(ce.LaneSaid(0, ReportStep(key, 1, False, 1, 0)), 0.0)
    (domain,) = plan_status(job_of(m), 1).domains
    assert (domain.plan_version, domain.switches) == (0, ((3, 1),))
    m.on(ce.LaneSaid(0, ReportStep(key, 2, False, 1, 0)), 0.0)
    (domain,) = plan_status(job_of(m), 1).domains
    assert (domain.plan_version, domain.since_step, domain.switches) == (1, 3, ())
    assert domain.rules == (DEFAULT, rule)
    assert [(g.codec, g.scheme, g.rule, g.reason, g.tensors) for g in domain.groups] == [
        ("topk", "all", rule, "", 2),
    ]  # fmt: skip


def test_each_domain_has_its_own_rules() -> None:
    m, _ = declared(whole=False, rules="topk")
    said(m, 1, DeclareDomain("broadcasts", 1, (0,), False, "none"))
    said(m, 1, DeclareSection(1, LARGE))
    m.on(ce.SetPlan(1, "train", (Rule("*", "topk"),)), 0.0)
    said(m, 1, DeclareDomain("calls", 2, (0,), False, "topk"))
    job = job_of(m)
    for domain in job.domains.values():
        domain.switches = [(0, 0), (1, job.proposal)]
    _, broadcasts, calls = plan_status(job, 1).domains
    assert [(r.codec, r.origin) for r in broadcasts.rules] == [("topk", "default"), ("none", "domain")]
    assert [(r.codec, r.origin) for r in calls.rules] == [("topk", "default"), ("topk", "domain"), ("topk", "plan")]
    assert {g.codec for g in broadcasts.groups} == {"none"} and calls.groups == ()
    assert (broadcasts.note, calls.note) == (LOSSLESS_NOTE, EMPTY_NOTE)
