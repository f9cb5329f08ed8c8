"""One job as its node's control machine sees it: domains, sections, settling, plans, the end.

What may live here: everything that is decided per job. What may not: workers' sockets and gatherings
(`control.py`), rounds (`domain.py`), I/O. Methods return effects; messages to other members go through
``tell_members``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gcproto import messages, wire
from gcproto.manifest import ManifestError, Section, check_section, difference
from gcproto.messages import (
    DeclareDomain,
    EpochDecided,
    Fault,
    JobLeft,
    PlanGo,
    PlanReady,
    PlanRequest,
    PlanText,
    Rule,
    SectionAgreed,
    SectionList,
    SectionOffer,
)
from gcserver.core import plan as planning
from gcserver.core.control_events import (
    AnswerRequest,
    Connection,
    ControlEffect,
    DomainLedger,
    JobMemory,
    Log,
    LogSettled,
    OpenSection,
    SaveJob,
    Tell,
    ToLane,
)
from gcserver.core.effects import ReportFault, ReportStep, ReportWaiting
from gcserver.core.events import (
    CodecChoice,
    DomainClosed,
    DomainConfig,
    DomainOpened,
    Member,
    Plan,
    PlanKnown,
    PlanRule,
    ProposalKnown,
    Settled,
)

#: Settling step t fixes the plan of step t + lag. Calls are a step each, and many may be in flight.
SCOPED_LAG = 2
CALL_LAG = 256
LOSSLESS = "none"
#: What to do where a codec takes whole matrices and blocks may cut them.
DECLARE_WHOLE = "declare the model with gcclient.state(..., whole=True) on every rank"
#: What to do about a fault that says nothing better.
ADVICE = {
    "TensorMismatch": "let every rank declare and push the same tensors in the same order",
    "CodecError": "name a codec that every node knows",
    "WorkerLost": "its own log says why; start the job again",
}
#: A domain's number has 32 bits in a frame header.
MAX_DOMAIN = 2**32 - 1
#: Faults that come from outside the rounds, and the phase they hold up when no lane has said what it waits for.
OUTSIDE = {"PeerLost": "exchange", "WorkerLost": "push"}
#: How many closed steps a node can compare with what its peers say they closed.
RECENT = 256


def declaration_digest(declared: DeclareDomain, section: Section) -> int:
    """What members compare: the section and everything about its domain."""
    return wire.digest(msgspec.msgpack.encode((declared, section)))


@dataclass(slots=True)
class ControlDomain:
    """A domain of a job. ``declared[i][rank]``: section i as local rank declared it; ``offers[i][node]``."""

    declared_as: DeclareDomain
    config: DomainConfig
    ranks: tuple[int, ...]
    sections: list[Section] = field(default_factory=list)
    declared: dict[int, dict[int, Section]] = field(default_factory=dict)
    offers: dict[int, dict[str, int]] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    #: the step a section was declared for, by local rank and by node
    declared_for: dict[int, dict[int, int]] = field(default_factory=dict)
    offered_for: dict[int, dict[str, int]] = field(default_factory=dict)
    settled: int = 0
    voids: list[int] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    reports: dict[int, dict[int, ReportStep]] = field(default_factory=dict)
    closing: dict[int, dict[int, int]] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, ReportWaiting] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """``record`` is the epoch in force; ``workers[rank]`` a connection, or None while a worker is away."""

    record: EpochDecided
    node: str
    lanes: int
    resolve: Callable[[str], CodecChoice]
    workers: dict[int, Connection | None] = field(default_factory=dict)
    away_since: dict[int, float] = field(default_factory=dict)
    domains: dict[int, ControlDomain] = field(default_factory=dict)
    plans: dict[int, PlanText] = field(default_factory=dict)
    proposal: int = 0
    #: the highest plan number ever given; that of a plan a member could not run is never given again
    numbered: int = 0
    #: first member only: plans being prepared (version -> nodes still to answer), and those that wait
    preparing: dict[int, set[str]] = field(default_factory=dict)
    queue: list[PlanRequest] = field(default_factory=list)
    #: operators' requests made here: minus the wish's number, later the plan's version -> who asked
    requests: dict[int, int] = field(default_factory=dict)
    wishes: dict[int, PlanRequest] = field(default_factory=dict)
    ended: Fault | None = None
    #: nodes whose workers have all left -> {domain: last step settled there}; over when all members are in it
    left: dict[str, dict[int, int]] = field(default_factory=dict)
    outgoing: list[tuple[str, messages.Control]] = field(default_factory=list)

    @property
    def id(self) -> bytes:
        return self.record.job

    @property
    def first(self) -> str:
        return self.record.members[0].node

    @property
    def others(self) -> list[str]:
        return [m.node for m in self.record.members if m.node != self.node]

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
        if not self.workers and self.ended is None:
            self.left[self.node] = {}
            self.tell_members(self._leaving())
        return [self.save()]

    def _leaving(self) -> JobLeft:
        steps = tuple((key, domain.settled) for key, domain in self.domains.items())
        return JobLeft(self.record.label, self.id, steps=steps)

    def on_left(self, node: str, steps: tuple[tuple[int, int], ...]) -> None:
        """All workers of a member have left; said again when a last step settles there after that."""
        known = self.left.setdefault(node, {})
        for key, step in steps:
            known[key] = max(step, known.get(key, 0))

    def worker_back(self, rank: int, connection: Connection) -> None:
        """A worker is (again) there."""
        self.workers[rank] = connection
        self.away_since.pop(rank, None)

    def tell_members(self, message: messages.Control, *nodes: str) -> None:
        self.outgoing.extend((n, message) for n in (nodes or self.others))

    def tell_workers(self, message: messages.ToWorker, ranks: tuple[int, ...] | None = None) -> list[ControlEffect]:
        chosen = self.workers if ranks is None else {r: self.workers.get(r) for r in ranks}
        return [Tell(c, message) for c in chosen.values() if c is not None]

    # ---------------------------------------------------------------------------------------- memory
    def save(self) -> SaveJob:
        domains = tuple((d.declared_as, tuple(d.sections)) for d in self.domains.values())
        ranks, plans = tuple(sorted(self.workers)), tuple(self.plans.values())
        return SaveJob(self.id, JobMemory(self.record, ranks, domains, plans, self.proposal, self.numbered))

    def restore(self, memory: JobMemory, ledgers: tuple[DomainLedger, ...]) -> None:
        self.plans = {p.version: p for p in memory.plans}
        self.proposal = memory.proposal
        self.numbered = max(memory.numbered, memory.proposal, *self.plans, 0)
        for (declared, sections), ledger in zip(memory.domains, ledgers, strict=True):
            domain = self._domain(declared)
            domain.sections = list(sections)
            domain.offered = set(range(len(sections)))
            domain.settled = ledger.settled
            domain.voids = list(ledger.voids)
            domain.switches = list(ledger.switches)
        if not memory.ranks:
            self.left[self.node] = {}

    def resend(self, node: str) -> None:
        """A peer is a new process: say everything again that it may not know."""
        if node not in self.others:
            return
        if self.node in self.left:
            self.tell_members(self._leaving(), node)
        self.tell_members(self.record, node)
        for domain in self.domains.values():
            for index in domain.offered:
                self._offer(domain, index, node)
        for version, text in self.plans.items():
            if self.node == self.first:
                self.tell_members(text, node)
                if version <= self.proposal:
                    self.tell_members(PlanGo(self.id, version), node)
            elif node == self.first and version > self.proposal:
                self.tell_members(PlanReady(self.id, version), node)
        if node == self.first:
            for wish in self.wishes.values():
                self.tell_members(wish, node)

    def lane_up(self, lane: int) -> list[ControlEffect]:
        """Everything a lane must know of this job."""
        out: list[ControlEffect] = []
        if self.ended is None:
            for domain in self.domains.values():
                # What its earlier life waited for it will say again if it still does.
                domain.waiting.pop(lane, None)
                out.extend(self._open(domain, lane))
                out.extend(ToLane(OpenSection(domain.config.id, s), lane) for s in domain.sections)
        return out

    # --------------------------------------------------------------------------------------- domains
    def _domain(self, declared: DeclareDomain) -> ControlDomain:
        members = tuple(
            Member(wire.node_id(m.node), m.node, n)
            for m in self.record.members
            if (n := sum(r in declared.ranks for r in m.ranks))
        )
        mine = next(m for m in self.record.members if m.node == self.node)
        ranks = tuple(r for r in mine.ranks if r in declared.ranks)
        me = next(i for i, m in enumerate(members) if m.name == self.node)
        lag = SCOPED_LAG if declared.scoped else CALL_LAG
        config = DomainConfig(
            self.id,
            declared.domain,
            declared.label,
            self.record.epoch,
            members,
            me,
            len(ranks),
            len(declared.ranks),
            lag,
            self.record.min_compress_bytes,
            ranks,
            self.record.partition_bytes,
            declared.whole,
            self.record.seed,
        )
        domain = self.domains[declared.domain] = ControlDomain(declared, config, ranks)
        return domain

    def plan(self, domain: ControlDomain, version: int) -> Plan:
        """Plan ``version`` as this domain runs it: the job's default, the domain's own codec, then the text."""
        return self._plan(domain, version, self.plans[version].rules if version else ())

    def _plan(self, domain: ControlDomain, version: int, text: tuple[Rule, ...]) -> Plan:
        rules = list(self.record.rules)
        if domain.declared_as.codec:
            rules.append(Rule("*", domain.declared_as.codec))
        # A domain declared lossless (broadcasts, plain collectives) stays lossless whatever the plan says.
        if domain.declared_as.codec != LOSSLESS:
            rules.extend(text)
        return Plan(version, tuple(PlanRule(r.pattern, self.resolve(r.spec)) for r in rules), self.resolve("none"))

    def _open(self, domain: ControlDomain, lane: int | None) -> list[ControlEffect]:
        plans = tuple(self.plan(domain, v) for v in (0, *self.plans))
        return [
            ToLane(
                DomainOpened(
                    domain.config, plans, domain.settled, tuple(domain.voids), tuple(domain.switches), (), self.proposal
                ),
                lane,
            )
        ]

    def declare_domain(self, rank: int, declared: DeclareDomain) -> list[ControlEffect]:
        known = self.domains.get(declared.domain)
        if known is not None:
            if known.declared_as == declared:
                return []
            return self.fault(
                "TensorMismatch", f"rank {rank} declares process group {declared!r}, another rank {known.declared_as!r}"
            )
        if not 0 <= declared.domain <= MAX_DOMAIN:
            return self.fault(
                "TensorMismatch",
                f"rank {rank} declares process group {declared.label!r} as domain {declared.domain}; domain numbers "
                f"are within 0..{MAX_DOMAIN}",
            )
        bad = [r for r in declared.ranks if not 0 <= r < self.record.world_size]
        if bad or rank not in declared.ranks or len(set(declared.ranks)) != len(declared.ranks):
            return self.fault(
                "TensorMismatch",
                f"rank {rank} declares a process group of ranks {declared.ranks}; "
                f"ranks must be distinct, within 0..{self.record.world_size - 1} and include it",
            )
        if declared.codec:
            try:
                codec = self.resolve(declared.codec)
            except ValueError as error:
                return self.fault("CodecError", f"rank {rank}: {error}")
            if codec.whole and not declared.whole:
                return self.fault(
                    "CodecError",
                    f"rank {rank}: {codec.spec} takes whole matrices, and blocks of {declared.label!r} may cut them",
                    phase="declare",
                    advice=DECLARE_WHOLE,
                )
        domain = self._domain(declared)
        return [self.save(), *self._open(domain, None)]

    # -------------------------------------------------------------------------------------- sections
    def declare_section(self, rank: int, message: messages.DeclareSection) -> list[ControlEffect]:
        domain = self.domains.get(message.domain)
        if domain is None or rank not in domain.ranks:
            return self.fault("TensorMismatch", f"rank {rank} declares tensors of a process group it is not in")
        section, index = message.section, message.section.index
        try:
            check_section(section, domain.config.whole)
        except ManifestError as error:
            return self.fault("TensorMismatch", f"rank {rank}: {error}")
        if index < len(domain.sections):
            if domain.sections[index] != section:
                return self._differs(domain.sections[index], section, "the agreed section", f"rank {rank}")
            connection = self.workers.get(rank)
            agreed = SectionAgreed(message.domain, index, declaration_digest(domain.declared_as, section))
            return [] if connection is None else [Tell(connection, agreed)]
        declared = domain.declared.setdefault(index, {})
        for other, theirs in declared.items():
            if theirs != section:
                return self._differs(section, theirs, f"rank {rank}", f"rank {other}")
        if cut := self._cut(domain, section, self.proposal):
            return self.fault("CodecError", f"rank {rank}: {cut}", phase="declare", advice=DECLARE_WHOLE)
        declared[rank] = section
        domain.declared_for.setdefault(index, {})[rank] = message.step
        if len(declared) < len(domain.ranks):
            return []
        domain.offered.add(index)
        for member in domain.config.members:
            if member.name != self.node:
                self._offer(domain, index, member.name)
        return self._agree(domain, index)

    def _cut(self, domain: ControlDomain, section: Section, version: int, text: PlanText | None = None) -> str:
        """Why a plan (``text`` if it is not known yet) does not suit a section: it wants matrices whole that blocks may
        cut. Empty if it does.

        Domains of single calls are left out: their matrices go dense, as documented, since nobody declares them whole.
        """
        if domain.config.whole or not domain.declared_as.scoped:
            return ""
        plan = self._plan(domain, version, text.rules) if text is not None else self.plan(domain, version)
        cut = planning.cut_matrix(plan, section, domain.config.min_compress_bytes)
        if cut is None:
            return ""
        return f"{cut[1].spec} takes whole matrices, and blocks of {domain.config.label!r} may cut {cut[0]!r}"

    def _differs(self, mine: Section, theirs: Section, who: str, other: str) -> list[ControlEffect]:
        return self.fault(
            "TensorMismatch",
            f"{difference(mine, theirs)} (here = {who}, there = {other})",
            phase="declare",
            advice="every rank must declare the same tensors in the same order",
        )

    def _offer(self, domain: ControlDomain, index: int, node: str) -> None:
        section = self._own(domain, index)
        if section is not None:
            digest = declaration_digest(domain.declared_as, section)
            step = min(domain.declared_for.get(index, {}).values(), default=0)
            self.tell_members(SectionOffer(self.id, domain.declared_as.domain, index, digest, step), node)

    def _own(self, domain: ControlDomain, index: int) -> Section | None:
        if index < len(domain.sections):
            return domain.sections[index]
        declared = domain.declared.get(index)
        return next(iter(declared.values())) if declared else None

    def on_offer(
        self, node: str, offer: SectionOffer, early: list[tuple[str, messages.Control]]
    ) -> list[ControlEffect]:
        domain = self.domains.get(offer.domain)
        if offer.index < 0:
            return self.fault("TensorMismatch", f"{node} offers tensors as section {offer.index}; sections start at 0")
        if domain is None:
            early.append((node, offer))
            return []
        domain.offers.setdefault(offer.index, {})[node] = offer.digest
        domain.offered_for.setdefault(offer.index, {})[node] = offer.step
        if offer.index < len(domain.sections):
            domain.offered.add(offer.index)
        return self._agree(domain, offer.index)

    def _agree(self, domain: ControlDomain, index: int) -> list[ControlEffect]:
        """Open section ``index`` once all members offered the same; on a difference send the whole list."""
        mine = self._own(domain, index)
        if mine is None or index not in domain.offered:
            return []
        digest = declaration_digest(domain.declared_as, mine)
        offers = domain.offers.get(index, {})
        rank = min(domain.ranks)
        different = [n for n, d in offers.items() if d != digest]
        for node in different:
            self.tell_members(SectionList(self.id, domain.declared_as.domain, domain.declared_as, mine, rank), node)
        if different or index < len(domain.sections) or len(offers) < len(domain.config.members) - 1:
            return []
        if index != len(domain.sections):
            return []
        domain.sections.append(mine)
        domain.declared.pop(index, None)
        domain.offers.pop(index, None)
        domain.declared_for.pop(index, None)
        domain.offered_for.pop(index, None)
        out: list[ControlEffect] = [
            self.save(),
            ToLane(OpenSection(domain.config.id, mine)),
            *self.tell_workers(SectionAgreed(domain.declared_as.domain, index, digest), domain.ranks),
        ]
        # The next section may have been agreed before this one's turn came.
        return out + self._agree(domain, index + 1)

    def on_list(self, node: str, theirs: SectionList) -> list[ControlEffect]:
        domain = self.domains.get(theirs.domain)
        try:
            check_section(theirs.section)
        except ManifestError as error:
            return self.fault("TensorMismatch", f"rank {theirs.rank} on {node}: {error}")
        mine = self._own(domain, theirs.section.index) if domain is not None else None
        if domain is None or mine is None:
            return []
        here, there = f"rank {min(domain.ranks)} on {self.node}", f"rank {theirs.rank} on {node}"
        if domain.declared_as != theirs.declared:
            return self.fault(
                "TensorMismatch",
                f"process groups differ: {domain.declared_as!r} ({here}), {theirs.declared!r} ({there})",
            )
        return self._differs(mine, theirs.section, here, there)

    # -------------------------------------------------------------------------------------- settling
    def on_step(self, lane: int, report: ReportStep) -> list[ControlEffect]:
        domain = self.domains.get(report.domain[1])
        if domain is None or report.step <= domain.settled:
            return []
        domain.reports.setdefault(report.step, {})[lane] = report
        self.on_closed(lane, report.domain[1], report.step, report.digest)
        out: list[ControlEffect] = []
        while len(domain.reports.get(domain.settled + 1, ())) == self.lanes:
            out.extend(self._settle(domain, domain.settled + 1))
        return out

    def _settle(self, domain: ControlDomain, step: int) -> list[ControlEffect]:
        reports = domain.reports.pop(step).values()
        void = any(r.nonfinite for r in reports)
        lag = domain.config.lag
        before = domain.switches[-1][1]
        plan = max(before, *(r.proposal for r in reports))
        domain.settled = step
        for lane in [n for n, r in domain.waiting.items() if r.step <= step]:
            del domain.waiting[lane]
        if self.node in self.left:
            self.tell_members(self._leaving())
        if void:
            domain.voids = [*domain.voids[-1023:], step]
        if plan != before:
            domain.switches.append((step + lag, plan))
            while len(domain.switches) > 1 and domain.switches[1][0] <= step:
                domain.switches.pop(0)
        key = domain.config.id
        out: list[ControlEffect] = [
            LogSettled(key, step, void, plan, lag),
            ToLane(Settled(key, step, void, plan)),
        ]
        if plan != before:
            out.append(
                Log("info", f"job {self.record.label}, {domain.config.label}: plan {plan} from step {step + lag}")
            )
            # A plan holds the rules of those before it: whoever asked for one of them has got it as well.
            for version in sorted(v for v in self.requests if 0 < v <= plan):
                request = self.requests.pop(version)
                out.append(AnswerRequest(request, plan, step + lag, f"takes effect at step {step + lag} on every node"))
        return out

    def on_closed(self, lane: int, key: int, step: int, digest: int) -> None:
        """Remember what was pushed in a step, so that peers' heartbeats can be compared with it."""
        domain = self.domains.get(key)
        if domain is None or step in domain.closed:
            return
        lanes = domain.closing.setdefault(step, {})
        lanes[lane] = digest
        if len(lanes) == self.lanes:
            del domain.closing[step]
            domain.closed[step] = wire.digest(struct.pack(f"<{self.lanes}Q", *(lanes[i] for i in range(self.lanes))))
            domain.closed.pop(step - RECENT, None)

    def closed_steps(self) -> list[tuple[bytes, int, int, int]]:
        out = []
        for key, domain in self.domains.items():
            if domain.closed and self.ended is None:
                step = max(domain.closed)
                out.append((self.id, key, step, domain.closed[step]))
        return out

    def compare_closed(self, node: str, key: int, step: int, digest: int) -> list[ControlEffect]:
        domain = self.domains.get(key)
        mine = domain.closed.get(step) if domain is not None else None
        if domain is None or mine is None or mine == digest:
            return []
        return self.fault(
            "TensorMismatch",
            f"step {step} of {domain.config.label}: {node} pushed other tensors than {self.node}",
            domain=key,
            step=step,
            phase="push",
            advice="let every rank make the same calls in the same order",
        )

    # ----------------------------------------------------------------------------------------- plans
    def set_codec(self, request: int, number: int, pattern: str, spec: str) -> list[ControlEffect]:
        """An operator's wish: goes to the first member, who numbers plans. ``number`` is unique cluster-wide."""
        try:
            self.resolve(spec)
        except ValueError as error:
            return [AnswerRequest(request, error=str(error))]
        self.requests[-number] = request
        wish = PlanRequest(self.id, number, (Rule(pattern, spec),))
        if self.node == self.first:
            return self.on_request(self.node, wish)
        self.wishes[number] = wish
        self.tell_members(wish, self.first)
        return []

    def on_request(self, node: str, wish: PlanRequest) -> list[ControlEffect]:
        if self.node != self.first or any(p.request == wish.request for p in self.plans.values()):
            return []
        self.queue = [q for q in self.queue if q.request != wish.request] + [wish]
        return self._next_plan()

    def _next_plan(self) -> list[ControlEffect]:
        if self.preparing or not self.queue:
            return []
        wish = self.queue.pop(0)
        newest = max(self.plans, default=0)
        rules = (*(self.plans[newest].rules if newest else ()), *wish.rules)
        # A later rule for the same pattern replaces the earlier one.
        kept = tuple(r for i, r in enumerate(rules) if all(r.pattern != s.pattern for s in rules[i + 1 :]))
        self.numbered += 1
        text = PlanText(self.id, self.numbered, wish.request, kept)
        self.preparing[text.version] = {m.node for m in self.record.members}
        self.tell_members(text)
        return [self.save(), *self.on_plan(self.node, text)]

    def on_plan(self, node: str, text: PlanText) -> list[ControlEffect]:
        """Know a plan's text (its codecs are compiled at start), tell the lanes, answer the first member."""
        out: list[ControlEffect] = []
        self.numbered = max(self.numbered, text.version)
        self.wishes.pop(text.request, None)
        if (request := self.requests.pop(-text.request, None)) is not None:
            self.requests[text.version] = request
        if text.version not in self.plans:
            if error := self._unfit(text):
                ready = PlanReady(self.id, text.version, error)
                if self.node == self.first:
                    return self.on_ready(self.node, ready)
                self.tell_members(ready, self.first)
                return []
            self.plans[text.version] = text
            out.append(self.save())
            out.extend(ToLane(PlanKnown(d.config.id, self.plan(d, text.version))) for d in self.domains.values())
        ready = PlanReady(self.id, text.version)
        if self.node == self.first:
            return out + self.on_ready(self.node, ready)
        self.tell_members(ready, self.first)
        return out

    def _unfit(self, text: PlanText) -> str:
        """Why a plan cannot be run here; empty if it can."""
        try:
            for rule in text.rules:
                self.resolve(rule.spec)
        except ValueError as error:
            return str(error)
        for domain in self.domains.values():
            for section in (*domain.sections, *(s for by in domain.declared.values() for s in by.values())):
                if cut := self._cut(domain, section, text.version, text):
                    return f"{cut}; {DECLARE_WHOLE}, or give a pattern that leaves its tensors out"
        return ""

    def on_ready(self, node: str, ready: PlanReady) -> list[ControlEffect]:
        if self.node != self.first:
            return self._plan_dead(ready) if ready.error and node == self.first else []
        if ready.version not in self.preparing:
            return []
        if ready.error:
            del self.preparing[ready.version]
            # To everyone: who asked may be at another node.
            dead = PlanReady(self.id, ready.version, f"{node}: {ready.error}")
            self.tell_members(dead)
            log = Log("error", f"{node} cannot run plan {ready.version}: {ready.error}")
            return [log, *self._plan_dead(dead), *self._next_plan()]
        waiting = self.preparing[ready.version]
        waiting.discard(node)
        if waiting:
            return []
        del self.preparing[ready.version]
        self.tell_members(PlanGo(self.id, ready.version))
        return self.on_go(PlanGo(self.id, ready.version)) + self._next_plan()

    def _plan_dead(self, ready: PlanReady) -> list[ControlEffect]:
        """Some member cannot run the plan: it was never proposed and never will be."""
        if ready.version <= self.proposal:
            return []
        self.plans.pop(ready.version, None)
        out: list[ControlEffect] = [self.save()]
        if (request := self.requests.pop(ready.version, None)) is not None:
            out.append(AnswerRequest(request, error=ready.error))
        return out

    def on_go(self, go: PlanGo) -> list[ControlEffect]:
        if go.version <= self.proposal or go.version not in self.plans:
            return []
        self.proposal = go.version
        return [self.save(), *(ToLane(ProposalKnown(d.config.id, go.version)) for d in self.domains.values())]

    # ----------------------------------------------------------------------------------------- waiting
    def on_waiting(self, lane: int, report: ReportWaiting) -> None:
        domain = self.domains.get(report.domain[1])
        if domain is None:
            return
        if report.step:
            domain.waiting[lane] = report
        else:
            domain.waiting.pop(lane, None)

    def _departed(self, domain: ControlDomain, report: ReportWaiting) -> tuple[str, ...]:
        """Those the report waits for (nodes, "local rank i") whose workers left before that step: it is in vain.

        What a node finished before it left is still sent again from there when it was lost on the way.
        """
        key = domain.declared_as.domain
        local = {f"local rank {i}": r for i, r in enumerate(domain.ranks)}
        return tuple(
            m
            for m in report.missing
            if (m in self.left and self.left[m].get(key, 0) < report.step)
            or (m in local and local[m] not in self.workers)
        )

    def check_order(self) -> list[ControlEffect]:
        """A rank that declares a new tensor for a step in which others push known ones waits in vain."""
        for domain in self.domains.values():
            label = domain.config.label
            for index, nodes in domain.offered_for.items():
                if index < len(domain.sections) or domain.declared.get(index):
                    continue
                for node, step in nodes.items():
                    if step in domain.closed:
                        return self._disorder(
                            domain,
                            step,
                            f"{node} declares a new tensor of {label} for step {step}, "
                            f"in which {self.node} pushes others",
                        )
            for report in domain.waiting.values():
                for ranks in domain.declared_for.values():
                    for rank, step in ranks.items():
                        absent = f"local rank {domain.ranks.index(rank)}" in report.missing
                        if step == report.step and absent and len(ranks) < len(domain.ranks):
                            return self._disorder(
                                domain,
                                step,
                                f"rank {rank} declares a new tensor of {label} for step "
                                f"{step}, in which other ranks on {self.node} push others",
                            )
        return []

    def _disorder(self, domain: ControlDomain, step: int, message: str) -> list[ControlEffect]:
        return self.fault("TensorMismatch", message, domain=domain.config.domain, step=step, phase="declare")

    def check_deadline(self, now: float, patience: float) -> list[ControlEffect]:
        """End the job if a step waits longer than the deadline, or ``patience`` seconds for somebody who left."""
        for key, domain in self.domains.items():
            for report in domain.waiting.values():
                departed = self._departed(domain, report) if now - report.since > patience else ()
                if departed:
                    return self.fault(
                        "WorkerLost",
                        f"{', '.join(departed)} left the job while step {report.step} of {domain.config.label} "
                        "waited for it",
                        domain=key,
                        step=report.step,
                        phase=report.phase,
                        missing=departed,
                        elapsed=now - report.since,
                        advice="let every rank make the same number of steps before shutdown()",
                    )
                if now - report.since > self.record.deadline:
                    return self.fault(
                        "StepTimeout",
                        f"step {report.step} of {domain.config.label} was not finished within the deadline of "
                        f"{self.record.deadline:g} s",
                        domain=key,
                        step=report.step,
                        phase=report.phase,
                        missing=report.missing,
                        elapsed=now - report.since,
                        advice="look at the named peers; raise job.deadline if they are merely slow",
                    )
        return []

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
        self.tell_members(fault)
        out: list[ControlEffect] = [
            Log("error", f"job {self.record.label} ended: {fault.kind}: {fault.message}"),
            *(ToLane(DomainClosed(d.config.id)) for d in self.domains.values()),
            *self.tell_workers(fault),
        ]
        out.extend(AnswerRequest(r, error=f"the job ended: {fault.message}") for r in self.requests.values())
        self.requests.clear()
        return out
