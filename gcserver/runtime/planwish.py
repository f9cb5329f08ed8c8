"""What is asked of the planner for a domain of a job, in the planner's terms.

What may live here: from a job, a domain and its standing to a wish. What may not: when to ask (`planning.py`), what
becomes of it (`gcserver.planner`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gcproto.modes import AUTO, BALANCED, QUALITIES, STATIC
from gcserver.config_tables import PlanConfig
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.planner.auto import PARTS, Wish
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.course import SURPRISE
from gcserver.planner.in_force import barred, lossy
from gcserver.planner.live_layout import DDP_BUCKETS
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Rules, Standing
from gcserver.runtime.planfacts import newest_planned, newest_rules
from gcserver.runtime.tensors import in_force


def wish(standing: Standing, domain: ControlDomain, plan: PlanConfig, others: Sequence[ControlDomain] = ()) -> Wish:
    """Which parts, within which quality; nothing of what is in force. ``plan``: the daemon's, of which what is left
    out and which codecs are not in question yet counts; what the model leaves out comes with it. ``others``: the job's
    other models, which get the same rules."""
    parts = PARTS if standing.mode in (AUTO, STATIC) else frozenset({standing.mode})
    left_out = (*plan.exclude, *domain.declared_as.exclude)
    return Wish(
        quality(standing, domain, others), parts, exclude=left_out, everywhere=tuple(plan.exclude),
        buckets=buckets(domain), groups=groups(domain),
        made=made(domain), late_after=late_after(standing, domain, plan, others),
        hope=SURPRISE if standing.took else 0.0,  # once what was chosen was measured, what may be better is tried
        refused=standing.refused,
    )  # fmt: skip


def quality(standing: Standing, domain: ControlDomain | None, others: Sequence[ControlDomain] = ()) -> str:
    """What plans for ``domain`` may lose: as an operator has said, else as it was declared, else as the job began; no
    more than any of ``others`` may, whose rules are the same."""
    if standing.chosen or domain is None:
        return standing.quality
    return min((d.declared_as.quality or standing.quality for d in (domain, *others)), key=QUALITIES.index)


def why_not(job: Job, standing: Standing, quality: str, seen: Profile) -> str:
    """Why the job's plan has to go (`in_force.barred`), or a planner's that compresses, where that serves nothing."""
    # Rules of no family are an operator's that came back when a plan was taken back.
    ours = standing.profile is None or standing.family != ""
    planned = newest_planned(job) and ours
    if planned and seen.nodes == 1 and lossy(newest_rules(job)):
        return "what compresses has to go: with one node there is nobody to exchange with"
    return barred(newest_rules(job), quality, seen.tolerant, planned)


def made(domain: ControlDomain) -> int:
    """Steps of a model, those of the run that it was resumed from among them."""
    return domain.config.ahead + domain.settled


def late_after(
    standing: Standing, domain: ControlDomain, plan: PlanConfig, others: Sequence[ControlDomain] = ()
) -> int:
    """How many steps a domain has to make before codecs that send late are in question (`families.first_step`). Quality
    safe never takes them, and whoever says fast wants all at once."""
    return plan.late_after if quality(standing, domain, others) == BALANCED else 0


def informed(plain: Wish, standing: Standing, job: Job, domain: ControlDomain, now: StepTime | None) -> Wish:
    """The same, knowing what families took, and what a step takes ``now`` under which rules."""
    knowing = having_taken(plain, standing)
    if now is None:
        return knowing
    _, plan = in_force(job, domain)
    rules = tuple(PlannedRule(r.pattern, r.codec.spec, r.scheme, r.levels) for r in plan.rules)
    return replace(knowing, rules=rules, step=now.seconds, running=standing.family)


def having_taken(plain: Wish, standing: Standing) -> Wish:
    """The same, knowing what families took under which rules."""
    took = {t.family: t.seconds for t in standing.took}
    agreeing = {t.family: t.agreeing for t in standing.took}
    return replace(plain, took=took, agreeing=agreeing, kept={t.family: as_planned(t.rules) for t in standing.took})


def as_planned(rules: Rules) -> tuple[PlannedRule, ...]:
    """Rules of a plan in the planner's terms."""
    return tuple(PlannedRule(r.pattern, r.spec, r.scheme, r.levels) for r in rules)


def buckets(domain: ControlDomain) -> tuple[int, ...]:
    """Bytes of the buckets in which a worker brings gradients before any were seen; empty if it brings them one by
    one."""
    return DDP_BUCKETS if domain.config.label.startswith("ddp.") else ()


def groups(domain: ControlDomain) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors that a worker brings together; none where no section says where a group begins (one group of
    all cannot be told from none)."""
    if buckets(domain) or not any(section.cuts for section in domain.sections):
        return ()
    return tuple(tuple(t.name for t in group) for section in domain.sections for group in section.groups)
