"""One job as its node's control machine sees it: its members, workers, domains and memory, and its end.

What may live here: the state of a job, what a restart must know of it, telling members and workers, the fault that
ends it. What may not: workers' sockets (`control.py`), how it forms (`gathering.py`), rounds (`domain.py`), I/O, and
what is decided in it: those are functions over a job, one file a subject: `declarations.py`, `job_plans.py`,
`settling.py`, `waiting.py`; `job_messages.py` says which message is whose. They return effects; messages to other
members go through ``tell_members``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gcproto import messages, wire
from gcproto.epoch_messages import Applicant, DomainFacts, EpochStart
from gcproto.manifest import Section
from gcproto.messages import DeclareDomain, EpochDecided, Fault, JobLeft, PlanRequest, PlanText, Registered, Rule
from gcserver.core import resuming
from gcserver.core.change import Change
from gcserver.core.control_domain import LOSSLESS, ControlDomain
from gcserver.core.control_events import (
    Connection,
    ControlEffect,
    DomainLedger,
    JobMemory,
    Log,
    OpenSection,
    SaveJob,
    Tell,
    ToLane,
)
from gcserver.core.effects import ReportFault
from gcserver.core.events import CodecChoice, DomainClosed, DomainConfig, DomainOpened, Member, Plan
from gcserver.core.job_faults import ADVICE, OUTSIDE, abroad
from gcserver.core.plan import compiled, excluded
from gcserver.core.plan_requests import PlanRequests

#: Settling step t fixes the plan of step t + lag. Calls are a step each, and many may be in flight.
SCOPED_LAG = 2
CALL_LAG = 256


def any_controller(text: str) -> str:
    """Where nothing is steered every controller will do."""
    return ""


def any_plan(job: Job, text: PlanText) -> str:
    """Where no memory is counted every plan will do."""
    return ""


def any_section(job: Job, domain: ControlDomain, section: Section) -> str:
    """And any tensors."""
    return ""


#: Why a node has not the memory for tensors that are declared; empty: it has.
NoSpace = Callable[["Job", ControlDomain, Section], str]


@dataclass(slots=True)
class Job:
    """``record`` is the epoch in force; ``workers[rank]`` a connection, or None while a worker is away.

    ``no_controller`` says why this node cannot run a controller, ``no_room`` why it has not the memory for a plan,
    ``no_space`` why not for tensors that are declared; empty: it can, it has.
    """

    record: EpochDecided
    node: str
    lanes: int
    resolve: Callable[[str], CodecChoice]
    no_controller: Callable[[str], str] = any_controller
    no_room: Callable[[Job, PlanText], str] = any_plan
    no_space: NoSpace = any_section
    workers: dict[int, Connection | None] = field(default_factory=dict)
    away_since: dict[int, float] = field(default_factory=dict)
    domains: dict[int, ControlDomain] = field(default_factory=dict)
    plans: dict[int, PlanText] = field(default_factory=dict)
    proposal: int = 0
    #: the highest plan number ever given; that of a plan a member could not run is never given again
    numbered: int = 0
    #: what an operator said last of who makes its plans; None: nobody did since it began
    said: messages.PlanMode | None = None
    #: first member only: plans being prepared (version -> nodes still to answer), and those that wait
    preparing: dict[int, set[str]] = field(default_factory=dict)
    queue: list[PlanRequest] = field(default_factory=list)
    requests: PlanRequests = field(default_factory=PlanRequests)
    ended: Fault | None = None
    #: nodes whose workers have all left -> {domain: last step settled there}; over when all members are in it
    left: dict[str, dict[int, int]] = field(default_factory=dict)
    outgoing: list[tuple[str, messages.Control]] = field(default_factory=list)
    #: how the next epoch comes about, in a job that outlives its nodes (`epochs.py`)
    change: Change = field(default_factory=Change)
    #: what its workers know each other by
    token: bytes = b""
    #: local ranks that stand at an admission point, and by name who waits to be let in at one (`admission.py`)
    pausing: set[int] = field(default_factory=set)
    applicants: dict[str, Applicant] = field(default_factory=dict)

    @property
    def id(self) -> bytes:
        return self.record.job

    @property
    def commits(self) -> bool:
        """Whether the job goes on without lost nodes, so that members commit steps together."""
        return self.record.on_loss != "fail"

    @property
    def frozen(self) -> bool:
        return self.change.frozen

    @property
    def lost(self) -> dict[str, str]:
        return self.change.lost

    @property
    def pauses(self) -> bool:
        """Whether all workers of this node stand at an admission point."""
        return bool(self.workers) and self.pausing.issuperset(self.workers)

    @property
    def first(self) -> str:
        """Who makes the job's plans."""
        return self.record.eldest.node

    @property
    def newest(self) -> PlanText | None:
        """The text of the newest plan that all members can run; None before the first."""
        return self.plans.get(self.proposal)

    @property
    def others(self) -> list[str]:
        return [m.node for m in self.record.members if m.node != self.node]

    @property
    def training(self) -> list[ControlDomain]:
        """The domains whose steps count as the job's: its models; without one all, where every call is a step.

        A model's job has others as well, for broadcasts and audits, which have made a few steps or many.
        """
        return [d for d in self.domains.values() if d.declared_as.scoped] or list(self.domains.values())

    @property
    def over(self) -> bool:
        """Nobody here and nobody elsewhere needs this node's part of the job any more.

        A member that finished first keeps its lanes' retained payloads until the last one has finished too: a
        frame lost on the way is sent again from them.
        """
        return not self.workers and (self.ended is not None or len(self.left) == len(self.record.members))

    def worker_left(self, rank: int) -> list[ControlEffect]:
        """A local worker left. The last one's leaving is told to the other members."""
        self.workers.pop(rank, None)
        self.away_since.pop(rank, None)
        self.pausing.discard(rank)
        if not self.workers and self.ended is None:
            self.left[self.node] = {}
            self.tell_members(self.leaving())
        return [self.save()]

    def leaving(self) -> JobLeft:
        """This node's workers have all left, and what was settled here."""
        return JobLeft(self.record.label, self.id, steps=tuple((key, d.settled) for key, d in self.domains.items()))

    def on_left(self, node: str, steps: tuple[tuple[int, int], ...]) -> None:
        """All workers of a member have left; said again when a last step settles there after that."""
        if node not in self.others:
            return
        known = self.left.setdefault(node, {})
        for key, step in steps:
            known[key] = max(step, known.get(key, 0))

    def worker_back(self, rank: int, connection: Connection) -> None:
        """A worker is (again) there."""
        self.workers[rank] = connection
        self.away_since.pop(rank, None)

    def tell_members(self, message: messages.Control, *nodes: str) -> None:
        """To ``nodes``, or all other members when none is named."""
        self.outgoing.extend((n, message) for n in (nodes or self.others))

    def tell_workers(self, message: messages.ToWorker, ranks: tuple[int, ...] | None = None) -> list[ControlEffect]:
        chosen = self.workers if ranks is None else {r: self.workers.get(r) for r in ranks}
        return [Tell(c, message) for c in chosen.values() if c is not None]

    def registered(self, domains: tuple[DomainFacts, ...] = ()) -> Registered:
        """What a worker is told of the job; ``domains``: those that it finds there."""
        r = self.record
        lost = tuple(m.node for m in r.origin if m not in r.members)
        return Registered(
            self.id,
            r.epoch,
            self.node,
            r.origin,
            (),
            r.partition_bytes,
            r.deadline,
            r.mode,
            lost=lost,
            commits=self.commits,
            admissions=r.admissions,
            domains=domains,
        )

    # ---------------------------------------------------------------------------------------- memory
    def save(self) -> SaveJob:
        """What a restarted supervisor must know, as it is now."""
        domains = tuple((d.declared_as, tuple(d.sections)) for d in self.domains.values())
        ranks, plans, lost = tuple(sorted(self.workers)), tuple(self.plans.values()), tuple(self.lost.items())
        newest, number = self.proposal, self.numbered
        return SaveJob(
            self.id,
            JobMemory(self.record, ranks, domains, plans, newest, number, self.frozen, self.token, lost, self.said),
        )

    def restore(self, memory: JobMemory, ledgers: tuple[DomainLedger, ...]) -> None:
        """After a restart of the supervisor."""
        self.plans = {p.version: p for p in memory.plans}
        self.proposal = memory.proposal
        self.said = memory.said
        # Wishes that waited have their numbers kept, though they are gone.
        kept = self.said.since if self.said is not None else 0
        self.numbered = max(memory.numbered, memory.proposal, kept, *self.plans)
        self.change = Change(dict(memory.lost), memory.frozen or bool(memory.lost))
        self.token = memory.token
        for (declared, sections), ledger in zip(memory.domains, ledgers, strict=True):
            domain = self.add_domain(declared)
            domain.sections = list(sections)
            domain.offered = set(range(len(sections)))
            domain.settled = max(ledger.settled, domain.settled)
            domain.ready = max(ledger.ready, domain.settled)
            # Its last ones may have been skipped by an epoch that was saved, and not yet logged.
            skipped = {step for s in self.starts(declared.domain) for step in range(s.committed + 1, s.settled + 1)}
            domain.voids = sorted(skipped.union(ledger.voids))[-1024:]
            domain.switches = list(ledger.switches)
        if not memory.ranks:
            self.left[self.node] = {}

    def resend(self, node: str) -> None:
        """A member is a new process: say again which job this is, and whether we have left it."""
        if self.node in self.left:
            self.tell_members(self.leaving(), node)
        self.tell_members(self.record, node)

    def lane_up(self, lane: int) -> list[ControlEffect]:
        """Everything a lane must know of this job."""
        out: list[ControlEffect] = []
        if self.ended is None:
            for domain in self.domains.values():
                # What its earlier life waited for it will say again if it still does.
                domain.waiting.pop(lane, None)
                out.extend(self.open_domain(domain, lane))
                out.extend(ToLane(OpenSection(domain.config.id, s), lane) for s in domain.sections)
        return out

    # --------------------------------------------------------------------------------------- domains
    def add_domain(self, declared: DeclareDomain) -> ControlDomain:
        """Take up a domain as it was declared: who of the members is in it, and how it is laid out."""
        config = self.configure(declared)
        domain = self.domains[declared.domain] = ControlDomain(declared, config, config.ranks)
        # Others may have been ahead with it when an epoch began.
        domain.settled = domain.ready = max((s.settled for s in self.starts(declared.domain)), default=0)
        return domain

    def starts(self, domain: int) -> list[EpochStart]:
        """Where a domain stood at the beginning of each epoch."""
        return [s for s in self.record.starts if s.domain == domain]

    def configure(self, declared: DeclareDomain) -> DomainConfig:
        """A domain in the epoch in force."""
        inside = {m.node: n for m in self.record.origin if (n := sum(r in declared.ranks for r in m.ranks))}
        members = tuple(
            Member(wire.node_id(m.node), m.node, inside[m.node]) for m in self.record.members if m.node in inside
        )
        order, remaining = list(inside), []
        for epoch in range(2, len(self.record.lost) + 2):
            there = self.record.present(epoch)
            remaining.append(tuple(i for i, node in enumerate(order) if node in there))
        starts, mine = self.starts(declared.domain), next(m for m in self.record.members if m.node == self.node)
        return DomainConfig(
            job=self.id,
            domain=declared.domain,
            label=declared.label,
            epoch=self.record.epoch,
            members=members,
            me=next(i for i, m in enumerate(members) if m.name == self.node),
            local_ranks=inside[self.node],
            divisor=sum(m.ranks for m in members),
            lag=SCOPED_LAG if declared.scoped else CALL_LAG,
            min_compress_bytes=self.record.min_compress_bytes,
            ranks=tuple(r for r in mine.ranks if r in declared.ranks),
            partition_bytes=self.record.partition_bytes,
            whole=declared.whole,
            seed=self.record.seed,
            commits=self.commits,
            origin=len(inside),
            remaining=tuple(remaining),
            begins=max((s.committed for s in starts if s.epoch == self.record.epoch), default=0),
            skipped=tuple((s.committed + 1, s.settled) for s in starts if s.settled > s.committed),
            **resuming.continued(declared, list(inside), self.node),
        )

    def plan(self, domain: ControlDomain, version: int) -> Plan:
        """Plan ``version`` as this domain runs it: the job's default, the domain's codec, the text, what it excludes.

        Of a lossless domain the text may be forgotten (`job_plans.py`): it means nothing there.
        """
        text = self.plans[version].rules if version and not domain.lossless else resuming.rules(domain.declared_as)
        return self.compose(domain, version, text)

    def compose(self, domain: ControlDomain, version: int, text: tuple[Rule, ...]) -> Plan:
        """As ``plan``, of a text that need not be one of the job's."""
        declared, default = domain.declared_as, resuming.default(self, domain)
        rules = [compiled(r, self.resolve, "default") for r in default]
        if declared.codec:
            rules.append(compiled(Rule("*", declared.codec), self.resolve, "domain"))
        if not domain.lossless:
            rules.extend(compiled(r, self.resolve, "plan") for r in text)
            rules.extend(excluded(declared.exclude, self.resolve))
        return Plan(version, tuple(rules), self.resolve(LOSSLESS))

    def controller(self, version: int) -> str:
        """What steers the levels of each node under plan ``version``; "none" if nothing does."""
        text = self.plans.get(version)
        return (text.controller if text is not None else resuming.controller(self)) or self.record.controller

    def open_domain(self, domain: ControlDomain, lane: int | None) -> list[ControlEffect]:
        """Tell a lane (None: all of them) of a domain."""
        known = {0, *self.plans, *(version for _, version in domain.switches if domain.lossless)}
        plans = tuple(self.plan(domain, v) for v in sorted(known))
        return [
            ToLane(
                DomainOpened(
                    domain.config, plans, domain.settled, tuple(domain.voids), tuple(domain.switches), (), self.proposal
                ),
                lane,
            )
        ]

    # ------------------------------------------------------------------------------------------ end
    def on_lane_fault(self, report: ReportFault) -> list[ControlEffect]:
        return self.fault(
            report.kind,
            report.message,
            domain=report.domain[1],
            step=report.step,
            phase=report.phase,
            missing=report.missing,
            advice=report.advice,
        )

    def fault(
        self,
        kind: str,
        message: str,
        *,
        domain: int = 0,
        step: int = 0,
        phase: str = "",
        missing: tuple[str, ...] = (),
        elapsed: float = 0.0,
        advice: str = "",
    ) -> list[ControlEffect]:
        """End the job with an error that all members and workers get (G6)."""
        if kind in OUTSIDE and not step and self.domains:
            domain, step, held = self._held_up(OUTSIDE[kind])
            phase = phase or held
        last = self.domains[domain].settled if domain in self.domains else 0
        advice = advice or ADVICE.get(kind, "")
        fault = Fault(self.id, kind, message, domain, step, self.record.epoch, phase, missing, elapsed, last, advice)
        return self.on_fault(fault)

    def _held_up(self, phase: str) -> tuple[int, int, str]:
        """(domain, step, phase) of the work that a fault from outside stops: the oldest wait a lane has told of,
        else the next step of the domain that has come furthest."""
        waits = [(r.since, key, r.step, r.phase) for key, d in self.domains.items() for r in d.waiting.values()]
        if waits:
            _, key, step, held = min(waits)
            return key, step, held or phase
        key = max(self.domains, key=lambda k: self.domains[k].settled)
        return key, self.domains[key].settled + 1, phase

    def on_fault(self, fault: Fault) -> list[ControlEffect]:
        """The job is over. Passed on once by everyone: whoever found out may not reach all."""
        if self.ended is not None:
            return []
        self.ended = fault
        self.tell_members(abroad(fault, self.record, self.node))
        out: list[ControlEffect] = [
            Log("error", f"job {self.record.label} ended: {fault.kind}: {fault.message}"),
            *(ToLane(DomainClosed(d.config.id)) for d in self.domains.values()),
            *self.tell_workers(fault),
        ]
        out.extend(self.requests.give_up(f"the job ended: {fault.message}"))
        return out
