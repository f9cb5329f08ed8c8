"""Domains that go on from a checkpoint: what they draw from, the plan they begin with, what is saved of them.

What may live here: tests of `gcserver/core/resuming.py` and of what follows from a resumed declaration. What may not:
residuals.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from gcproto import messages, wire
from gcproto.agreed import DeclareDomain, Resumed, Rule
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import DeclareSection, Fault
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core import resuming
from gcserver.core.control import ControlMachine
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from tests.unit.core import lane_machine
from tests.unit.core.control_machine import (
    LARGE,
    control_from_b,
    formed,
    formed_with_b,
    machine,
    register,
    said,
    set_codec,
    told,
)

RULES = (Rule("*", "topk"), Rule("b", "none"))
ORIGIN = b"o" * 16
SECTION = Section(0, (TensorSpec("w", (4,), 0),))


def declared(**more: Any) -> tuple[ControlMachine, list[Any]]:
    """A job of one node; what its worker is told of a domain that is declared so."""
    m = machine(**more.pop("machine", {}))
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    return m, said(m, 1, DeclareDomain("ddp", 0, (0,), True, **more))


def parts(m: ControlMachine) -> tuple[Job, ControlDomain]:
    (job,) = m.jobs.values()
    return job, job.domains[0]


def opened(effects: list[Any]) -> ev.DomainOpened:
    (found,) = [e.event for e in effects if isinstance(e, ce.ToLane) and isinstance(e.event, ev.DomainOpened)]
    return found


def finish(m: ControlMachine, *steps: int, proposal: int = 0) -> list[Any]:
    key = parts(m)[1].config.id
    return [
        e for s in steps for e in m.on(ce.LaneSaid(0, fx.ReportStep(key, s, False, proposal, 1, 1)), 0.0)
    ]  # fmt: skip


def test_a_resumed_domain_draws_counts_and_plans_as_it_would_have_gone_on() -> None:
    m, out = declared(warmup=10, resumed=Resumed(ORIGIN, 7, (99,), RULES))
    o = opened(out)
    assert (o.config.drawn_from, o.config.ahead, o.config.drawn_as, o.config.warmup) == (ORIGIN, 7, 99, 3)
    (plan,) = o.plans
    assert [(r.pattern, r.codec.spec, r.origin) for r in plan.rules] == [
        ("*", "none", "default"), ("*", "topk", "plan"), ("b", "none", "plan"),
    ]  # fmt: skip
    job, domain = parts(m)
    assert opened(job.open_domain(domain, None)).plans == o.plans, "a lane that is restarted hears the same"


def test_numbers_that_are_not_of_these_nodes_are_not_drawn_with() -> None:
    _, out = declared(warmup=3, resumed=Resumed(ORIGIN, 7, (98, 99)))
    config = opened(out).config
    assert (config.drawn_from, config.drawn_as, config.warmup) == (ORIGIN, 0, 0)


def test_a_restarted_daemon_knows_of_it_from_its_memory() -> None:
    m, _ = declared(resumed=Resumed(ORIGIN, 7, (99,), RULES))
    job, domain = parts(m)
    restored = machine()
    restored.on(ce.JobRestored(job.save().memory, (ce.DomainLedger(2, (), ((0, 0),)),)), 0.0)
    again, there = parts(restored)
    assert there.config == domain.config
    assert again.plan(there, 0) == job.plan(domain, 0)
    assert resuming.standing(again, there).steps == 9


def seed(config: dict[str, Any], step: int, shared: bool = False, job: bytes = lane_machine.JOB) -> int:
    """What node a draws with in a step."""
    m = lane_machine.machine()
    members = (ev.Member(lane_machine.A, "a", 1), ev.Member(lane_machine.B, "b", 1))
    codec = ev.CodecChoice("some", 4, 0, False, True, shared_seed=shared)
    c = ev.DomainConfig(job, 0, "ddp", 1, members, 0, 1, 2, 2, 0, **config)
    m.on(ev.DomainOpened(c, (ev.Plan(0, (ev.PlanRule("*", codec),), lane_machine.DENSE),), step - 1), 0.0)
    blocks = AddressSpace(2, 1, 4 << 20).append(lane_machine.SECTION)
    m.on(ev.SectionOpened(c.id, lane_machine.SECTION, blocks, {}), 0.0)
    (decision,) = [e.decision for e in m.on(ev.Pushed(c.id, 0, step, (0,), True), 0.0) if isinstance(e, fx.LogDecision)]
    return decision.seed


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("origin", [{}, {"seed": 5}])
def test_seeds_go_on_in_another_job_on_another_node(origin: dict[str, Any], shared: bool) -> None:
    was = [seed(origin, step, shared) for step in (4, 5)]
    from_ = lane_machine.JOB if not origin else (5).to_bytes(8, "little")
    on = {"drawn_from": from_, "ahead": 3, "drawn_as": lane_machine.A, "seed": 77}
    assert [seed(on, step, shared, b"k" * 16) for step in (1, 2)] == was
    assert len({*was, seed(origin, 1, shared)}) == 3
    # drawn_as is what makes a node's draws its own
    other = seed({**on, "drawn_as": 12345}, 1, shared, b"k" * 16)
    assert (other == was[0]) == shared


@pytest.mark.parametrize(
    ("resumed", "part"),
    [
        (Resumed(ORIGIN, 0, (), (Rule("*", "zip"),)), "rank 0 resumes 'ddp': rule '*': unknown codec 'zip'"),
        (Resumed(ORIGIN, 0, (), (Rule("", "topk"),)), "pattern: expected a glob"),
        (Resumed(ORIGIN, 0, default=(Rule("*", "zip"),)), "unknown codec 'zip'"),
        (Resumed(ORIGIN, 0, (), (), "pid"), "unknown controller 'pid'"),
    ],
)
def test_what_this_node_cannot_run_is_refused(resumed: Resumed, part: str) -> None:
    _, out = declared(resumed=resumed)
    (fault,) = told(out)
    assert isinstance(fault, Fault) and fault.kind == "CodecError" and part in fault.message and fault.advice


@pytest.mark.parametrize("more", [{"rules": RULES}, {"default": RULES[:1]}], ids=["plan", "default"])
def test_a_codec_that_is_gone_after_an_upgrade_ends_the_job_that_resumed_with_it(more: Any) -> None:
    m, _ = declared(resumed=Resumed(ORIGIN, 7, **more))
    memory = parts(m)[0].save().memory
    restored = machine()

    def resolve(spec: str) -> ev.CodecChoice:
        if spec == "topk":
            raise ValueError("unknown codec 'topk'")
        return ev.CodecChoice(spec, 1, 0, False, False)

    restored.resolve = resolve
    restored.on(ce.JobRestored(memory, (ce.DomainLedger(2, (), ((0, 0),)),)), 0.0)
    ended = parts(restored)[0].ended
    assert ended is not None and ended.kind == "CodecError" and "unknown codec 'topk'" in ended.message


def test_ranks_must_resume_alike() -> None:
    m, record = formed_with_b()
    mine, theirs = (DeclareDomain("ddp", 0, (0, 1), True, resumed=Resumed(ORIGIN, n)) for n in (7, 8))
    said(m, 1, mine)
    said(m, 1, DeclareSection(0, SECTION))
    out = m.on(control_from_b(messages.SectionList(record.job, 0, theirs, SECTION, 1), 2), 0.0)
    (fault,) = told(out)
    assert fault.kind == "TensorMismatch" and "process groups differ" in fault.message


# --------------------------------------------------------------------------------------- what is saved
def test_what_is_saved_of_a_job_that_nobody_planned_is_its_default() -> None:
    m = formed()
    job, domain = parts(m)
    finish(m, 1, 2)
    a = wire.node_id("a")
    assert resuming.standing(job, domain) == Resumed(job.id, 2, (a,), (), "none", (Rule("*", "none"),))
    m, _ = declared(codec="topk")
    job, domain = parts(m)
    found = resuming.standing(job, domain)
    assert (found.rules, found.default) == ((), ()), "the domain's own codec is declared again"


def test_what_is_saved_of_a_resumed_domain_goes_on_from_the_same_origin() -> None:
    m, _ = declared(resumed=Resumed(ORIGIN, 7, (99,), RULES, "dc2-da2"))
    job, domain = parts(m)
    finish(m, 1)
    assert resuming.standing(job, domain) == Resumed(ORIGIN, 8, (99,), RULES, "dc2-da2", (Rule("*", "none"),))
    assert job.controller(0) == "dc2-da2"


@pytest.mark.parametrize(
    ("saved", "job_has", "named", "steers"),
    [
        ("none", "dc2-da5", False, "dc2-da5"),
        ("dc2-da2", "dc2-da5", False, "dc2-da2"),
        ("dc2-da2", "none", True, "none"),
        ("dc2-da2", "none", False, "dc2-da2"),
        ("none", "none", False, "none"),
    ],
)
def test_a_workers_controller_comes_before_a_checkpoints_and_that_before_the_daemons(
    saved: str, job_has: str, named: bool, steers: str
) -> None:
    m, _ = declared(resumed=Resumed(ORIGIN, 7, (99,), RULES, saved))
    job, _ = parts(m)
    job.record = structs.replace(job.record, controller=job_has, controller_named=named)
    assert job.controller(0) == steers


@pytest.mark.parametrize("planned", [True, False])
def test_a_controller_before_the_first_plan_says_who_makes_the_plans(planned: bool) -> None:
    m, _ = declared()
    job, _ = parts(m)
    for number, says in ((1, planned), (2, not planned)):
        m.on(ce.SetPlan(number, "", (), False, "dc2-da2", says), 0.0)
        assert (job.plans[number].rules, job.plans[number].planned) == ((), planned), "the second keeps it"


@pytest.mark.parametrize("planned", [True, False])
def test_a_controller_leaves_what_was_resumed_to_who_made_it(planned: bool) -> None:
    """Whoever makes the plans of this job."""
    for says in (True, False):
        m, _ = declared(resumed=Resumed(ORIGIN, 7, (99,), RULES, planned=planned))
        said(m, 1, DeclareSection(0, SECTION))
        m.on(ce.SetPlan(1, "", (), False, "dc2-da2", says), 0.0)
        job, _ = parts(m)
        assert (job.plans[1].rules, job.plans[1].planned) == (RULES, planned)


@pytest.mark.parametrize(("replace", "rules"), [(False, (*RULES[1:], Rule("*", "none"))), (True, (Rule("*", "none"),))])
def test_an_operators_plan_comes_after_what_was_resumed_or_replaces_it(replace: bool, rules: tuple[Rule, ...]) -> None:
    m, _ = declared(resumed=Resumed(ORIGIN, 7, (99,), RULES))
    said(m, 1, DeclareSection(0, SECTION))
    wish = set_codec(1, "", "*", "none")
    m.on(ce.SetPlan(wish.request, wish.job, wish.rules, replace), 0.0)
    job, domain = parts(m)
    assert job.plans[1].rules == rules
    finish(m, 1, proposal=1)
    assert domain.switches[-1] == (3, 1)
    # Decided, and not in force before step 3: a later job has it from its first step.
    assert resuming.standing(job, domain).rules == rules


def test_an_operators_rule_for_one_tensor_leaves_other_models_with_their_own_codec() -> None:
    """What was the default of the job that was saved is no plan: it comes before what a model was declared with."""
    m, _ = declared(machine={"codec": "topk"})
    m, _ = declared(resumed=resuming.standing(*parts(m)))
    said(m, 1, DeclareDomain("ddp.1", 5, (0,), True, codec="matrix", whole=True, resumed=Resumed(ORIGIN, 7)))
    said(m, 1, DeclareSection(0, SECTION))
    wish = set_codec(1, "", "b", "none")
    m.on(ce.SetPlan(wish.request, wish.job, wish.rules, False), 0.0)
    (job,) = m.jobs.values()
    shown = {
        d.declared_as.label: [(r.pattern, r.codec.spec) for r in job.plan(d, 1).rules] for d in job.domains.values()
    }
    assert shown["ddp.1"] == [("*", "none"), ("*", "matrix"), ("b", "none")]
    assert shown["ddp"] == [("*", "topk"), ("b", "none")]


@pytest.mark.parametrize("planned", [True, False])
def test_a_model_that_may_be_cut_goes_on_under_what_a_planner_wanted_for_another(planned: bool) -> None:
    """What a checkpoint has of the plan is the text of all models; one that somebody wrote is refused still, as it is
    in a job that was not saved."""
    m, _ = declared(whole=True)
    said(m, 1, DeclareSection(0, LARGE))
    m.on(ce.SetPlan(1, "", (Rule("*", "matrix"),), True, planned=planned), 0.0)
    finish(m, 1, proposal=1)
    resumed = resuming.standing(*parts(m))
    assert (resumed.rules, resumed.planned) == ((Rule("*", "matrix"),), planned)
    m, _ = declared(whole=True, resumed=resumed)
    said(m, 1, DeclareSection(0, LARGE))
    said(m, 1, DeclareDomain("second", 1, (0,), True, resumed=resumed))
    # And so in the checkpoint after that one, which no text has come before.
    assert resuming.standing(*parts(m)).planned == planned
    (answer,) = told(said(m, 1, DeclareSection(1, LARGE)))
    assert isinstance(answer, messages.SectionAgreed if planned else Fault)
