"""Domains that go on from what an earlier job saved: what they draw from, which plan they begin with.

What may live here: questions about `Resumed`. What may not: residuals (a lane's, `gcserver.runtime.checkpoints`), what
a worker does with a checkpoint (`gcclient`).

A resumed domain is declared as such, so members compare it as they compare everything about a domain, and whatever is
told of a declaration (to a restarted daemon, to a node that comes in later) tells this too. Its plan 0 says what the
plan said that was in force when it was saved; an operator's plan comes after it, or replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gcproto import wire
from gcproto.agreed import DeclareDomain, Resumed, Rule
from gcserver.core.control_domain import LOSSLESS, ControlDomain
from gcserver.core.events import CodecChoice
from gcserver.core.plan import unusable

if TYPE_CHECKING:
    from gcserver.core.job import Job


def continued(declared: DeclareDomain, nodes: list[str], me: str) -> dict[str, Any]:
    """What of a `DomainConfig` a resumption decides. ``nodes``: those of the first epoch, in member order."""
    r = declared.resumed
    if r is None:
        return {"warmup": declared.warmup}
    number = r.nodes[nodes.index(me)] if len(r.nodes) == len(nodes) else 0
    warmup = max(0, declared.warmup - r.steps)
    return {"warmup": warmup, "drawn_from": r.origin, "ahead": r.steps, "drawn_as": number}


def default(job: Job, domain: ControlDomain) -> tuple[Rule, ...]:
    """The job's default in a domain; of one that was resumed that of the job that was saved."""
    resumed = domain.declared_as.resumed
    return (resumed.default if resumed is not None else ()) or job.record.rules


def rules(declared: DeclareDomain) -> tuple[Rule, ...]:
    """What plan 0 says in a domain beside its own codec and the job's default."""
    return declared.resumed.rules if declared.resumed is not None else ()


def planned(declared: DeclareDomain) -> bool:
    """Whether a planner made what plan 0 says."""
    return declared.resumed is not None and declared.resumed.planned


def _first(domains: Mapping[int, ControlDomain]) -> DeclareDomain | None:
    """The first domain of a job, by number, that was resumed with a plan; None if none was."""
    return next((d.declared_as for _, d in sorted(domains.items()) if rules(d.declared_as)), None)


def base(domains: Mapping[int, ControlDomain]) -> tuple[Rule, ...]:
    """What a job's first plan comes after: that of the first domain which was resumed with one."""
    return rules(found) if (found := _first(domains)) is not None else ()


def base_planned(domains: Mapping[int, ControlDomain], otherwise: bool = False) -> bool:
    """Whether a planner made that; ``otherwise`` where there is none."""
    return planned(found) if (found := _first(domains)) is not None else otherwise


def controller(job: Job) -> str:
    """What steers a job's levels before its first plan, as its first domain was resumed that had a controller; empty
    without one, and where a worker named one, whose word comes first. That nothing steered a job says nothing of one
    that is to be steered."""
    if job.record.controller_named:
        return ""
    resumed = (d.declared_as.resumed for _, d in sorted(job.domains.items()))
    return next((r.controller for r in resumed if r is not None and r.controller not in ("", "none")), "")


def why_not(declared: DeclareDomain, resolve: Callable[[str], CodecChoice], no_controller: Callable[[str], str]) -> str:
    """Why this node cannot run what a domain is to go on with; empty if it can."""
    if (r := declared.resumed) is None:
        return ""
    if bad := unusable((*r.default, *r.rules), resolve):
        return bad[1]
    return no_controller(r.controller) if r.controller else ""


def standing(job: Job, domain: ControlDomain) -> Resumed:
    """What a later job needs to go on from the last settled step of a domain.

    Of a plan that is decided and not in force yet the new one: it takes hold some steps early.
    """
    declared, config, record = domain.declared_as, domain.config, job.record
    version = domain.switches[-1][1]
    text = job.plans.get(version)
    said = text.rules if text is not None else rules(declared)
    made = text.planned if text is not None else planned(declared)
    # The domain's own codec comes between the job's default and a text; where it has one, the default says nothing.
    first = () if declared.codec else default(job, domain) or (Rule("*", LOSSLESS),)
    inside = [m.node for m in record.origin if set(m.ranks) & set(declared.ranks)]
    numbers = tuple(map(wire.node_id, inside))
    if declared.resumed is not None and len(declared.resumed.nodes) == len(inside):
        numbers = declared.resumed.nodes
    drawn = job.id if config.seed is None else config.seed.to_bytes(8, "little")
    origin, steps = config.drawn_from or drawn, config.ahead + domain.settled
    return Resumed(origin, steps, numbers, said, job.controller(version), first, made)
