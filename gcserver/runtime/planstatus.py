"""A job's plan as operators see it: what is in force where, by which rule, and why not as the rule says.

What may live here: reading a job. What may not: which rule a block follows (`gcserver.core.plan`), changing plans
(`gcserver.core.job_plans`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

from gcproto.manifest import Section
from gcproto.messages import Rule
from gcproto.patterns import is_glob, unescaped
from gcproto.records import replace
from gcserver.admin.source import DomainPlan, PlanGroup, PlanRule, PlanStatus
from gcserver.core import events as ev
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.core.plan import OWNER, Choice
from gcserver.runtime.tensors import Chosen, chosen, holders, in_force

LOSSLESS_NOTE = "declared lossless: a plan's rules do not apply"
#: Of a wish so many patterns are tried for all tensors, to say which match none.
LOOKED_AT = 64
EMPTY_NOTE = "no tensor has been declared here yet: nothing is exchanged"


def plan_status(job: Job, lanes: int) -> PlanStatus:
    """See ``GetPlan`` in admin.proto. AdminError where a codec of the job is gone."""
    text = job.newest
    rules = tuple(PlanRule(r.pattern, r.spec, r.scheme or OWNER, "plan") for r in (text.rules if text else ()))
    domains = tuple(_domain(job, domain, lanes) for domain in job.domains.values())
    return PlanStatus(job.record.label, job.id.hex(), job.proposal, rules, domains)


def _domain(job: Job, domain: ControlDomain, lanes: int) -> DomainPlan:
    since, plan = in_force(job, domain)
    groups: list[PlanGroup] = []
    for section, found in zip(domain.sections, chosen(domain, plan, lanes), strict=True):
        groups += _groups(section, found)
    return DomainPlan(
        domain.config.domain,
        domain.config.label,
        plan.version,
        since,
        tuple((first, version) for first, version in domain.switches if first > domain.settled + 1),
        tuple(_rule(r) for r in plan.rules),
        tuple(groups),
        LOSSLESS_NOTE if domain.lossless else "" if domain.sections else EMPTY_NOTE,
    )


def _groups(section: Section, found: Chosen) -> list[PlanGroup]:
    """Blocks that use the same for the same reason, together; in the order of the first of each."""
    blocks, choices = found
    together: dict[Choice, list[int]] = {}
    for i, choice in enumerate(choices):
        # Levels are of single segments: blocks that use the same would hardly ever be alike in them.
        together.setdefault(replace(choice, levels=(), grades=()), []).append(i)
    held = holders(section, blocks)
    out = []
    for choice, members in together.items():
        inside = set(members)
        names = [t.name for t, i in zip(section.tensors, held, strict=True) if i in inside]
        out.append(
            PlanGroup(
                section.index,
                len(members),
                len(names),
                names[0] if names else section.tensors[blocks[members[0]].tensor].name,
                sum(blocks[i].nbytes for i in members),
                choice.codec.spec,
                choice.scheme,
                None if choice.rule is None else _rule(choice.rule),
                choice.reason,
            )
        )
    return out


def _rule(r: ev.PlanRule) -> PlanRule:
    return PlanRule(r.pattern, r.codec.spec, r.scheme, r.origin)


def without_tensors(job: Job, rules: Sequence[Rule]) -> list[Rule]:
    """Those that match no tensor declared so far: slips, most likely. Empty where nothing has been declared; of many
    patterns the first `LOOKED_AT` are looked at, since each is tried for every tensor."""
    names = {t.name for d in job.domains.values() if not d.lossless for s in d.sections for t in s.tensors}
    globs = [r for r in rules if is_glob(r.pattern)][:LOOKED_AT]
    tried = {r.pattern: any(map(re.compile(translate(r.pattern)).match, names)) for r in globs}
    return [r for r in rules if names and not tried.get(r.pattern, is_glob(r.pattern) or unescaped(r.pattern) in names)]
