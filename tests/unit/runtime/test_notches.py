"""What the notches of a plan take, from its text.

What may live here: tests of `gcserver/runtime/notches.py`. What may not: levels of segments (`test_plan.py`).
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gcproto.agreed import Resumed
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareSection, PlanText, Rule
from gcserver.codecs import parse
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.planner.controllers import controlled
from gcserver.runtime.notches import Notches, least
from gcserver.runtime.resolve import resolve
from tests.unit.core.control_machine import declared, said

TOPK = "topk(ratio=0.01)"


def job_with(*rules: Rule) -> tuple[Job, ControlDomain]:
    """Plan 1 of a job with a bias of 300 and a matrix of 90000 elements, one block."""
    m, _ = declared(whole=False)
    (job,) = m.jobs.values()
    job.resolve = resolve
    job.plans[1] = PlanText(job.id, 1, 1, rules)
    (domain,) = job.domains.values()
    return job, domain


def test_a_notch_takes_what_its_levels_select() -> None:
    job, domain = job_with(Rule("*", TOPK, "", (100_000, 10_000, 1_000)))
    assert Notches(1).ratios(job, domain, 1) == pytest.approx((0.2, 0.02, 0.002), rel=0.05)


def test_what_a_rule_excludes_is_in_every_notch() -> None:
    job, domain = job_with(Rule("*", TOPK, "", (100_000, 1_000)), Rule("w", "none"))
    assert Notches(1).ratios(job, domain, 1) == (1.0, 1.0), "the block is dense, as its largest tensor"


def test_codecs_that_cannot_be_moved_stay_at_the_last_notch() -> None:
    job, domain = job_with(Rule("*", "qsgd", "", (8, 4)))
    first, last = Notches(1).ratios(job, domain, 1)
    assert first == last < 0.2


@pytest.mark.parametrize(
    ("rules", "moves"),
    [
        ((Rule("*", TOPK),), True),
        ((Rule("*", TOPK, "", (100_000, 10_000)),), True),
        ((Rule("*", TOPK, "", (100_000,)),), False),
        ((Rule("*", "fp16"),), False),
        ((Rule("*", TOPK), Rule("w", "none")), False),
    ],
)
def test_what_a_controller_can_move(rules: tuple[Rule, ...], moves: bool) -> None:
    job, domain = job_with(*rules)
    notches = Notches(1)
    assert notches.moves(job, domain, 1) is moves and (notches.still(job, 1) == "") is moves
    assert not notches.moves(job, domain, 0), "no plan, another answer"
    notches.forget(job.id)
    assert notches.moves(job, domain, 1) is moves


def test_a_codec_that_fails_to_say_a_size_moves_nothing_and_stops_no_daemon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def needed(*_: object) -> int:
        raise ZeroDivisionError("no such size")

    monkeypatch.setattr(type(parse(TOPK)), "needed", needed)
    job, domain = job_with(Rule("*", TOPK, "", (100_000, 1_000)))
    notches = Notches(1)
    assert notches.ratios(job, domain, 1) == notches.ratios(job, domain, 1) == (1.0, 1.0)
    assert caplog.text.count("what the notches of plan 1 take of ddp cannot be said") == 1


def test_without_notches_there_are_no_ratios() -> None:
    job, domain = job_with(Rule("*", TOPK))
    notches = Notches(1)
    assert notches.ratios(job, domain, 1) == () == notches.ratios(job, domain, 0)
    job, domain = job_with(Rule("*", TOPK, "", (100_000, 10_000)))
    domain.sections.clear()
    assert notches.ratios(job, domain, 1) == (), "nothing was declared yet"


def test_ratios_follow_plans_and_sections() -> None:
    m, _ = declared(whole=False)
    (job,) = m.jobs.values()
    job.resolve = resolve
    (domain,) = job.domains.values()
    notches = Notches(1)
    job.plans = {
        v: PlanText(job.id, v, v, (Rule("w", TOPK, "", (level, 1_000)),)) for v, level in ((1, 50_000), (2, 9_000))
    }
    first, again, second = (notches.ratios(job, domain, v) for v in (1, 1, 2))
    bias = 300 * 8 / 361_200  # no rule is for it: sent as it is, value and index
    assert first is again
    assert (first[0], second[0]) == pytest.approx((0.1 + bias, 0.018 + bias), rel=0.01)
    said(m, 1, DeclareSection(0, Section(1, (TensorSpec("other", (90_000,), 0),))))
    assert notches.ratios(job, domain, 2)[0] > 0.5, "half of the domain is dense now"
    notches.forget(job.id)
    assert not notches._known


@pytest.mark.parametrize(
    ("rules", "still"),
    [
        ((Rule("*", TOPK),), ""),
        ((Rule("*", TOPK, "", (100_000, 1_000)),), ""),
        ((Rule("*", "fp16"),), "fp16"),
        ((Rule("*", "qsgd(bits=8)", "", (8, 4)),), "qsgd(bits=8)"),
        # the block's largest tensor decides, and where a plan has notches nothing else is moved
        ((Rule("*", TOPK), Rule("w", "none")), "none"),
        ((Rule("*", TOPK), Rule("b", "qsgd(bits=8)", "", (8, 4))), TOPK),
    ],
)
def test_what_no_controller_can_move(rules: tuple[Rule, ...], still: str) -> None:
    job, domain = job_with(*rules)
    assert Notches(1).still(job, 1) == (still and resolve(still).spec)
    domain.sections.clear()
    assert Notches(1).still(job, 1) == "", "who knows what will be declared"


def test_tensors_that_are_sent_as_they_are_make_no_notch() -> None:
    """As a planner leaves out what is to be excluded, where it has no levels for the others."""
    job, domain = job_with(Rule("*", TOPK), Rule("b", TOPK, "", (1_000_000,)))
    notches = Notches(1)
    assert notches.ratios(job, domain, 1) == () and notches.moves(job, domain, 1)
    job, domain = job_with(Rule("*", TOPK), Rule("*", TOPK, "", (1_000_000,)))
    assert Notches(1).still(job, 1) == resolve(TOPK).spec, "nothing else is left"
    job, domain = job_with(Rule("*", TOPK), Rule("w", TOPK, "", (5_000,)))
    notches = Notches(1)
    assert len(notches.ratios(job, domain, 1)) == 1 and not notches.moves(job, domain, 1), "levels of its own"


def test_what_moves_once_is_not_looked_for_again_with_every_section(monkeypatch: pytest.MonkeyPatch) -> None:
    job, domain = job_with(Rule("*", TOPK))
    notches = Notches(1)
    assert notches.moves(job, domain, 1)
    domain.sections.append(domain.sections[0])
    monkeypatch.setattr(notches, "_movable", None)
    assert notches.moves(job, domain, 1)


def test_a_resumed_plan_has_its_notches_and_its_planner_its_least_ratio() -> None:
    job, domain = job_with()
    rules = (Rule("*", TOPK, "", (100_000, 20_000)),)
    resumed = Resumed(b"o", 5, (), rules)
    domain.declared_as = replace(domain.declared_as, resumed=resumed)
    assert Notches(1).ratios(job, domain, 0) == pytest.approx((0.2, 0.04), rel=0.05)
    job.record = replace(job.record, mode="auto")
    assert least(job, domain, 0) == 0.0, "an operator made the plan, whoever makes those of this job"
    domain.declared_as = replace(domain.declared_as, resumed=replace(resumed, planned=True))
    job.record = replace(job.record, mode="static")
    assert least(job, domain, 0) == pytest.approx(0.01)


def test_a_planners_plan_bounds_a_controller_by_its_own_ratio() -> None:
    job, domain = job_with(Rule("*", "fp16"))
    rules = (Rule("*", "sidco-e(ratio=0.01,packed=1)"), Rule("w", "topk(ratio=0.05)"), Rule("b", "none"))
    job.plans = {1: PlanText(job.id, 1, 1, rules, planned=True), 2: PlanText(job.id, 2, 2, rules)}
    job.plans[3] = PlanText(job.id, 3, 3, (Rule("*", "qsgd(bits=4)"),), planned=True)
    assert [least(job, domain, version) for version in range(4)] == [0.0, pytest.approx(0.01), 0.0, 0.0]


def test_a_bound_below_what_a_plan_allows_is_told_apart() -> None:
    """A controller's ratio stays between a plan's notches, and not below a planner's own ratio."""
    job, _ = job_with(Rule("*", TOPK, "", (100_000, 50_000)))
    notches, low = Notches(1), controlled("dc2-da2", {"k_max": 0.02})
    assert notches.beyond(job, low, 1) == pytest.approx(0.1, rel=0.05)
    assert notches.beyond(job, controlled("dc2-da2", {"k_max": 0.15}), 1) == 0.0
    assert notches.beyond(job, controlled("dc2-da2"), 1) == 0.0, "nobody has said otherwise"
    for planned in (True, False):
        job.plans[2] = PlanText(job.id, 2, 1, (Rule("*", "sidco-e(ratio=0.05)"),), planned=planned)
        assert notches.beyond(job, low, 2) == (0.05 if planned else 0.0)
