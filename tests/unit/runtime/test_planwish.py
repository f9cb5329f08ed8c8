"""What is asked of the planner for a domain: how its worker brings gradients, what it may lose, and from when on."""

from __future__ import annotations

import pytest

from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.records import replace
from gcserver.config_tables import PlanConfig
from gcserver.core.control_domain import ControlDomain
from gcserver.planner.auto import Wish
from gcserver.planner.course import SURPRISE
from gcserver.planner.live_layout import DDP_BUCKETS
from gcserver.planner.profile import StepTime
from gcserver.planner.standing import Standing
from gcserver.planner.turns import Took
from gcserver.runtime import planwish
from gcserver.runtime.tensors import in_force
from tests.unit.core.control_machine import declared


def domain(label: str, *sections: Section) -> ControlDomain:
    (job,) = declared(whole=False)[0].jobs.values()
    (found,) = job.domains.values()
    found.config = replace(found.config, label=label)
    found.sections = list(sections)
    return found


def section(index: int, names: str, *cuts: int) -> Section:
    return Section(index, tuple(TensorSpec(name, (8,), int(DType.F32)) for name in names), cuts)


@pytest.mark.parametrize(
    ("label", "cuts", "buckets", "groups"),
    [
        ("ddp.0", (), DDP_BUCKETS, ()),
        ("optimizer.0", (), (), ()),
        ("optimizer.0", (1, 3), (), (("a",), ("b", "c"), ("d",), ("x",))),
    ],
)
def test_how_gradients_are_brought(
    label: str, cuts: tuple[int, ...], buckets: tuple[int, ...], groups: tuple[tuple[str, ...], ...]
) -> None:
    found = domain(label, section(0, "abcd", *cuts), section(1, "x"))
    assert (planwish.buckets(found), planwish.groups(found)) == (buckets, groups)


@pytest.mark.parametrize(
    ("declared", "job", "chosen", "found"),
    [
        (("", ""), "balanced", False, "balanced"),
        (("", "safe"), "balanced", False, "safe"),
        (("fast", "fast"), "safe", False, "fast"),
        (("fast", ""), "balanced", False, "balanced"),
        (("fast", "safe"), "balanced", True, "balanced"),
    ],
)
def test_rules_lose_no_more_than_any_model_of_the_job_may(
    declared: tuple[str, str], job: str, chosen: bool, found: str
) -> None:
    """The rules made for the largest hold for the others as well; an operator's quality for all of them."""
    largest, other = (domain(f"ddp.{i}", section(0, "abcd")) for i in range(2))
    for each, quality in zip((largest, other), declared, strict=True):
        each.declared_as = replace(each.declared_as, quality=quality)
    standing = Standing("auto", job, chosen=chosen)
    assert planwish.quality(standing, largest, (other,)) == found
    plan = PlanConfig("auto", "safe", 10, 100, ("b",), "none", 120.0, None)
    wish = planwish.wish(standing, largest, plan, (other,))
    assert (wish.quality, wish.everywhere, wish.late_after) == (found, ("b",), 100 if found == "balanced" else 0)


@pytest.mark.parametrize(("quality", "late_after"), [("balanced", 100), ("fast", 0), ("safe", 0)])
def test_late_codecs_wait_for_a_models_first_steps(quality: str, late_after: int) -> None:
    plan = PlanConfig("auto", "safe", 10, 100, ("b",), "none", 120.0, None)
    found = domain("ddp.0", section(0, "abcd"))
    found.settled = 99
    wish = planwish.wish(Standing("auto", quality), found, plan)
    assert (wish.quality, wish.exclude, wish.hope) == (quality, ("b",), 0.0)
    assert (wish.made, wish.late_after) == (99, late_after)
    found.settled, found.config = 0, replace(found.config, ahead=99)
    assert planwish.wish(Standing("auto", quality), found, plan) == wish, "steps before it was resumed are its own"
    measured = Standing("auto", quality, took=(Took("fp16", 0.3, 0.3),))
    assert planwish.wish(measured, found, plan).hope == SURPRISE


def test_rules_in_force_are_told_with_the_family_that_they_are_of() -> None:
    """Their own texts are those of codecs, with what the model was declared with among them."""
    (job,) = declared(whole=False)[0].jobs.values()
    (found,) = job.domains.values()
    standing = Standing("auto", "balanced", running="powersgd(rank=4)")
    wish = planwish.informed(Wish(), standing, job, found, StepTime(0, 0.4, 0.01, 9))
    assert (wish.running, wish.step) == ("powersgd(rank=4)", 0.4)
    assert [rule.pattern for rule in wish.rules] == [rule.pattern for rule in in_force(job, found)[1].rules]
    assert planwish.informed(Wish(), standing, job, found, None) == Wish()
