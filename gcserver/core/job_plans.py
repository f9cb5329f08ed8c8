"""How the members of a job come to a new plan.

What may live here: whose word counts, wishes, numbering, whether a plan can be run here, proposing it. What may not:
what a plan means for a block (`plan.py`), the step from which it holds (`settling.py`, `steps.py`).

    PlanRequest (any member -> the first) -> PlanText (the first -> all) -> PlanReady (each -> the first)
    -> all can: PlanGo (the first -> all), contributions propose it; one cannot: PlanReady with the error, to all.
"""

from __future__ import annotations

from collections.abc import Collection

from gcproto.manifest import Section
from gcproto.messages import OfPlans, PlanGo, PlanMode, PlanReady, PlanRequest, PlanText, Rule
from gcproto.patterns import last_of_each
from gcserver.core import plan as planning
from gcserver.core import plan_modes, resuming
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import AnswerRequest, ControlEffect, Log, SetPlan, ToLane
from gcserver.core.events import PlanKnown, ProposalKnown
from gcserver.core.job import Job

#: So many wishes wait for the one that is being prepared.
MAX_WISHES = 64
#: What to do where a codec takes whole matrices and blocks may cut them.
DECLARE_WHOLE = "declare the model with gcclient.state(..., whole=True) on every rank"
#: Of a plan that is not there any more, after a restart.
GIVEN_UP = "the plan was given up, and this daemon was started again before it said why; ask again"


def on_message(job: Job, node: str, m: OfPlans) -> list[ControlEffect]:
    """What a member says of plans. Texts come from the first member alone: two that number them would have nodes run
    different ones under one number.

    Who was lost may be the first here still, and not at a member that is in the next epoch already. No epoch begins
    before all its members have frozen in the one before, so what does not suit the first of now waits, in who is
    frozen, for the epoch that it may be of.
    """
    if isinstance(m, PlanMode):
        return plan_modes.on_said(job, m)  # whoever passes it on
    to_first, of_first = isinstance(m, PlanRequest | PlanReady), not isinstance(m, PlanRequest)
    if not ((to_first and job.node == job.first) or (of_first and node == job.first)):
        if job.frozen:
            job.change.later.keep(node, m)
            return []
        if to_first:
            return []
        return [Log("error", f"{node} sent {type(m).__name__} of job {job.record.label}, which is not its business")]
    if isinstance(m, PlanRequest):
        return on_request(job, m)
    if isinstance(m, PlanText):
        return on_plan(job, m)
    return on_ready(job, node, m) if isinstance(m, PlanReady) else on_go(job, m)


def asked(jobs: Collection[Job], number: int, wish: SetPlan) -> list[ControlEffect]:
    """An operator's wish for one of these jobs, by its label or number; the only one there is where it says neither."""
    running = [j for j in jobs if j.ended is None]
    matching = [j for j in running if wish.job in ("", j.record.label, j.id.hex())]
    if len(matching) == 1:
        return set_plan(matching[0], number, wish)
    have = ", ".join(sorted(j.record.label for j in running)) or "none"
    what = "no such job" if not matching else "more than one job matches"
    return [AnswerRequest(wish.request, error=f"{what}: {wish.job!r}; jobs here: {have}")]


def set_plan(job: Job, number: int, asked: SetPlan) -> list[ControlEffect]:
    """An operator's wish: goes to the first member, who numbers plans. ``number`` is unique cluster-wide."""
    if why := _unusable(job, asked.rules, asked.controller):
        return [AnswerRequest(asked.request, error=why)]
    job.requests.ask(number, asked.request)
    wish = PlanRequest(job.id, number, asked.rules, asked.replace, asked.controller, asked.planned)
    if job.node == job.first:
        return on_request(job, wish)
    job.requests.wishes[number] = wish
    job.tell_members(wish, job.first)
    return []


def on_request(job: Job, wish: PlanRequest) -> list[ControlEffect]:
    """At the first member: some member wishes for rules. One plan is prepared at a time."""
    if job.node != job.first or any(p.request == wish.request for p in job.plans.values()):
        return []
    others = [q for q in job.queue if q.request != wish.request]
    if len(others) >= MAX_WISHES:
        return _refuse(job, wish, f"{len(others)} plans wait to be made already; ask again when those are in force")
    job.queue = [*others, wish]
    return _next_plan(job)


def _refuse(job: Job, wish: PlanRequest, why: str) -> list[ControlEffect]:
    """A wish becomes no plan: it gets a number all the same, by which whoever asked, at whatever node, is answered."""
    job.numbered += 1
    text = PlanText(job.id, job.numbered, wish.request, (), wish.controller)
    dead = PlanReady(job.id, text.version, f"{job.node}: {why}")
    job.tell_members(text)
    job.tell_members(dead)
    job.requests.numbered(text)
    return [job.save(), *job.requests.refused(text.version, dead.error)]


def _next_plan(job: Job) -> list[ControlEffect]:
    if job.preparing or not job.queue:
        return []
    wish = job.queue.pop(0)
    newest = max(job.plans, default=0)
    before = () if wish.replace else job.plans[newest].rules if newest else resuming.base(job.domains)
    kept = last_of_each((*before, *wish.rules))
    job.numbered += 1
    controller = wish.controller or job.controller(newest)
    given = wish.replace or bool(wish.rules)
    text = PlanText(job.id, job.numbered, wish.request, kept, controller, _planned(job, newest, wish), given)
    job.preparing[text.version] = {m.node for m in job.record.members}
    if not given:
        plan_modes.as_old(job, newest, text.version)
    job.tell_members(text)
    return [job.save(), *on_plan(job, text)]


def _planned(job: Job, newest: int, wish: PlanRequest) -> bool:
    """Whether a planner made the rules that a wish comes to after plan ``newest``: with another controller alone they
    are still whose they were."""
    if wish.replace or wish.rules:
        return wish.planned
    if newest:
        return job.plans[newest].planned
    return resuming.base_planned(job.domains, wish.planned)


def on_plan(job: Job, text: PlanText) -> list[ControlEffect]:
    """Know a plan's text (its codecs are compiled at start), tell the lanes, answer the first member."""
    out: list[ControlEffect] = []
    job.numbered = max(job.numbered, text.version)
    job.requests.numbered(text)
    if text.version not in job.plans:
        if error := _unfit(job, text):
            ready = PlanReady(job.id, text.version, error)
            if job.node == job.first:
                return on_ready(job, job.node, ready)
            job.tell_members(ready, job.first)
            # Whoever asked here need not wait for the first member to say so: it may be killed over it.
            return [*job.requests.refused(text.version, f"{job.node}: {error}")]
        job.plans[text.version] = text
        out.append(job.save())
        out.extend(ToLane(PlanKnown(d.config.id, job.plan(d, text.version))) for d in job.domains.values())
    ready = PlanReady(job.id, text.version)
    if job.node == job.first:
        return out + on_ready(job, job.node, ready)
    job.tell_members(ready, job.first)
    return out


def unresolved(job: Job) -> str:
    """Why a job that is taken up again cannot run here any more (a codec is gone after an upgrade); empty if it can."""
    declared = tuple(Rule("*", d.declared_as.codec) for d in job.domains.values() if d.declared_as.codec)
    # Each plan by itself: another one may have another number of notches.
    wanted = [((*job.record.rules, *declared), job.record.controller)]
    wanted += [(text.rules, text.controller) for text in job.plans.values()]
    resumed = [d.declared_as.resumed for d in job.domains.values() if d.declared_as.resumed is not None]
    wanted += [((*r.default, *r.rules), r.controller) for r in resumed]
    why = next(filter(None, (_unusable(job, rules, controller) for rules, controller in wanted)), "")
    return f"{job.node} came back and cannot run this job any more: {why}" if why else ""


def _unusable(job: Job, rules: tuple[Rule, ...], controller: str) -> str:
    """Why no plan of this node can have these rules or be steered so; empty if one can."""
    if bad := planning.unusable(rules, job.resolve):
        return bad[1]
    return job.no_controller(controller) if controller else ""


def _unfit(job: Job, text: PlanText) -> str:
    """Why a plan cannot be run here; empty if it can."""
    if why := _unusable(job, text.rules, text.controller):
        return why
    for domain in job.domains.values():
        for section in (*domain.sections, *(s for by in domain.declared.values() for s in by.values())):
            if why := cut(job, domain, section, text.version, text):
                return f"{why}; {DECLARE_WHOLE}, or give a pattern that leaves its tensors out"
    return job.no_room(job, text)


def cut(job: Job, domain: ControlDomain, section: Section, version: int, text: PlanText | None = None) -> str:
    """Why a plan (``text`` if it is not known yet) does not suit a section: it wants matrices whole that blocks may
    cut. Empty if it does.

    Domains of single calls are left out: their matrices go dense, as documented, since nobody declares them whole. So
    do those of any domain under the rules of a planner, which wants them for another model of the job: every node
    finds the same by the domain and the text.
    """
    if domain.config.whole or not domain.declared_as.scoped:
        return ""
    plan = job.compose(domain, version, text.rules) if text is not None else job.plan(domain, version)
    text = text or job.plans.get(version)
    planned = text.planned if text is not None else resuming.planned(domain.declared_as)
    cut = planning.cut_matrix(plan, section, domain.config.min_compress_bytes, planned)
    if cut is None:
        return ""
    return f"{cut[1].spec} takes whole matrices, and blocks of {domain.config.label!r} may cut {cut[0]!r}"


def on_ready(job: Job, node: str, ready: PlanReady) -> list[ControlEffect]:
    """A member can or cannot run a plan; when all can, it is proposed."""
    if job.node != job.first:
        return _plan_dead(job, ready) if ready.error and node == job.first else []
    if ready.version not in job.preparing:
        # A text that was accepted is forgotten only once a newer one is proposed. So this plan was given up, which is
        # saved before it is said, and this node killed in between; or the first member before it was lost with it.
        if not ready.error and ready.version > job.proposal and ready.version not in job.plans:
            job.tell_members(PlanReady(job.id, ready.version, f"{job.node}: {GIVEN_UP}"), node)
        return []
    if ready.error:
        del job.preparing[ready.version]
        # To everyone: who asked may be at another node.
        dead = PlanReady(job.id, ready.version, f"{node}: {ready.error}")
        job.tell_members(dead)
        log = Log("error", f"{node} cannot run plan {ready.version}: {ready.error}")
        return [log, *_plan_dead(job, dead), *_next_plan(job)]
    waiting = job.preparing[ready.version]
    waiting.discard(node)
    if waiting:
        return []
    del job.preparing[ready.version]
    job.tell_members(PlanGo(job.id, ready.version))
    return on_go(job, PlanGo(job.id, ready.version)) + _next_plan(job)


def resume(job: Job) -> list[ControlEffect]:
    """After a restart: a plan whose members had not all answered is prepared further. They answer again when they see
    this node's new life."""
    if job.node != job.first:
        return []
    out: list[ControlEffect] = []
    for version in sorted(v for v in job.plans if v > job.proposal):
        job.preparing[version] = {m.node for m in job.record.members}
        out.extend(on_ready(job, job.node, PlanReady(job.id, version)))
    return out


def without(job: Job, gone: list[str], first: str) -> list[ControlEffect]:
    """Members are gone, ``first`` was the first one until now: plans that waited for them go on or are given up."""
    out: list[ControlEffect] = []
    if first in gone:
        plan_modes.pass_on(job)  # it may not have reached all
        out.extend(job.requests.lost(f"{first}, which makes this job's plans, was lost"))
        job.queue.clear()
        job.requests.wishes.clear()
        for version in [v for v in job.plans if v > job.proposal]:
            if job.node == job.first:
                job.tell_members(job.plans[version])
        return [*out, *resume(job)]
    for version in list(job.preparing):
        for node in gone:
            out.extend(on_ready(job, node, PlanReady(job.id, version)))
    return out


def include(job: Job, nodes: list[str]) -> None:
    """Nodes came in: plans that are being prepared wait for them too, and they hear of those they may not know."""
    for node in nodes:
        for waiting in job.preparing.values():
            waiting.add(node)
        if node in job.others:
            resend(job, node)


def _plan_dead(job: Job, ready: PlanReady) -> list[ControlEffect]:
    """Some member cannot run the plan: it was never proposed and never will be."""
    if ready.version <= job.proposal:
        return []
    job.plans.pop(ready.version, None)
    return [job.save(), *job.requests.refused(ready.version, ready.error)]


def on_go(job: Job, go: PlanGo) -> list[ControlEffect]:
    """All members can run the plan: contributions propose it from now on."""
    if go.version <= job.proposal or go.version not in job.plans:
        return []
    job.proposal = go.version
    _forget(job)
    return [job.save(), *(ToLane(ProposalKnown(d.config.id, go.version)) for d in job.domains.values())]


def _forget(job: Job) -> None:
    """Texts that no step will run under any more: all that are older than the newest proposal, and than what is in
    force wherever texts mean something. A domain yet to be declared begins with the newest proposal."""
    needed = min((d.switches[0][1] for d in job.domains.values() if not d.lossless), default=job.proposal)
    job.plans = {v: text for v, text in job.plans.items() if v >= min(needed, job.proposal)}


def resend(job: Job, node: str) -> None:
    """Say what a peer that is a new process may not know: to members who makes the plans, and those, to the first one
    answers and wishes."""
    plan_modes.pass_on(job, node)
    for version, text in job.plans.items():
        if job.node == job.first:
            job.tell_members(text, node)
            if version <= job.proposal:
                job.tell_members(PlanGo(job.id, version), node)
        elif node == job.first and version > job.proposal:
            job.tell_members(PlanReady(job.id, version), node)
    if node == job.first:
        for wish in job.requests.wishes.values():
            job.tell_members(wish, node)
