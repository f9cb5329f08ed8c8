"""As much of a supervisor as planning uses, over real jobs, with a planning process that answers as it is told.

What may live here: setting that up, what tests change of it. What may not: tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from gcproto.messages import MemberInfo, PlanText, Rule
from gcproto.patterns import last_of_each
from gcserver.core import plan_modes
from gcserver.core.control_events import AnswerRequest, SaveJob, SayMode
from gcserver.core.job import Job
from gcserver.planner.auto import Proposal
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.profile import LinkCost, Profile, StepTime
from gcserver.runtime.ledger import JobStore
from gcserver.runtime.plannerlink import Answer, Measure, Measured, Plan, Planned, Request
from gcserver.runtime.planning import Planning
from tests.unit.core.control_machine import declared
from tests.unit.planner.live_profiles import plain

PROFILE = plain([300, 90_000], [0.0, 0.1], forward=0.1)
TOPK = (Rule("*", "topk", "owner"),)
HAND = (Rule("*", "matrix"),)


def proposal(spec: str = "topk", expected: float = 0.2) -> Proposal:
    rules = (PlannedRule("*", spec),)
    return Proposal(spec, rules, (), (), (), expected, 0.4, 0.2, 1.0, (), (), f"{spec} it is")


class Link:
    """A planning process. ``gate``: until it is set, Plan is not answered; ``error`` is raised once."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.proposal = proposal()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def ask(self, request: Request) -> Answer:
        self.asked.append(request)
        if isinstance(request, Measure):
            return Measured({}, None)
        await self.gate.wait()
        if (error := self.error) is not None:
            self.error = None
            raise error
        return Planned(self.proposal)

    def plans(self) -> list[Plan]:
        return [r for r in self.asked if isinstance(r, Plan)]

    async def ended(self) -> None:
        self.asked.clear()


class Daemon:
    """One daemon with one job of one model; time passes when tests say so. Make it inside a running loop."""

    def __init__(self, folder: Path, mode: str = "auto") -> None:
        self.machine = declared(whole=False)[0]
        (self.job,) = self.machine.jobs.values()
        (self.domain,) = self.job.domains.values()
        self.domain.settled = 20
        self.node, self.state = "a", folder
        self.store = JobStore(folder)
        for job in self.machine.jobs:
            self.store.directory(job).mkdir(parents=True, exist_ok=True)
        self.job.record = msgspec.structs.replace(self.job.record, mode=mode, quality="fast")
        plan = SimpleNamespace(warmup_steps=10, late_after=100, exclude=("b",), profiles=None)
        self.config = SimpleNamespace(plan=plan, node=SimpleNamespace(lanes=1))
        #: what the lanes say of the link
        self.news: LinkCost | None = None
        link = SimpleNamespace(news=lambda known, guess, peers: self.news, in_doubt=False)
        self.lanes = SimpleNamespace(table=[None], link=link)
        self.profiler = SimpleNamespace(profile=self.profile, measure_again=lambda job, domain: self.again_measured())
        self.loop = asyncio.get_running_loop()
        self.seen: Profile | None = msgspec.structs.replace(PROFILE, steps=(StepTime(0, 0.4, 0.01, 7),))
        self.given: list[tuple[Rule, ...]] = []
        self.refuse = ""
        #: called when a plan was asked for, before it is one
        self.meanwhile: Callable[[], None] = lambda: None
        self.warnings: list[str] = []
        self.link = Link()
        self.planning = Planning(self, self.link)  # type: ignore[arg-type]

    def profile(self, job: bytes, domain: int, **given: Any) -> Profile | None:
        link = given.get("link")
        return self.seen if self.seen is None or link is None else msgspec.structs.replace(self.seen, link=link)

    def again_measured(self) -> None:
        """Steps are measured anew: none has been yet."""
        assert self.seen is not None
        self.seen = msgspec.structs.replace(self.seen, steps=())

    def warn_once(self, text: str) -> None:
        self.warnings.append(text)

    async def set_plan(
        self, job: str, rules: tuple[Rule, ...], replace: bool, controller: str = "", planned: bool = False
    ) -> AnswerRequest:
        assert planned and not controller and job == self.job.id.hex() and replace
        self.given.append(rules)
        self.meanwhile()
        await asyncio.sleep(0)
        if self.refuse:
            return AnswerRequest(1, error=self.refuse)
        version = self.newest(rules, planned=True)
        return AnswerRequest(1, version, self.domain.settled + 2)

    def feed(self, event: SayMode) -> None:
        for effect in plan_modes.on_say_mode(self.machine.jobs, event):
            assert isinstance(effect, SaveJob)

    def newest(self, rules: tuple[Rule, ...], planned: bool = False) -> int:
        """The members come to a plan with these rules, which is in force from the next step on."""
        version = self.job.numbered = self.job.numbered + 1
        self.job.plans[version] = PlanText(self.job.id, version, version, last_of_each(rules), planned=planned)
        self.job.proposal = version
        self.domain.switches.append((self.domain.settled + 1, version))
        return version

    def steps(self, *steps: StepTime, **changes: Any) -> None:
        """What is measured from now on."""
        self.seen = msgspec.structs.replace(PROFILE, steps=steps, **changes)

    def plans_at(self, node: str) -> None:
        """The job's first rank is another node's."""
        later = (msgspec.structs.replace(m, ranks=tuple(r + 1 for r in m.ranks)) for m in self.job.record.members)
        members = (MemberInfo(node, f"tcp://{node}:7000", (0,)), *later)
        self.job.record = msgspec.structs.replace(self.job.record, members=members)

    async def look(self) -> str:
        """Time passes until planning looks again and has done what it wants to; what it says then."""
        self.course.looked = 0.0
        self.planning.tick()
        await self.idle()
        return self.course.says

    async def until_plans(self) -> None:
        """Planning looks, and waits for the planner until ``link.gate`` is set."""
        self.link.gate.clear()
        self.planning.tick()
        await asyncio.sleep(0)

    async def idle(self) -> None:
        while (task := self.course.task) is not None:
            await asyncio.wait({task})

    def again(self) -> None:
        """The daemon is a new process."""
        self.planning = Planning(self, self.link)  # type: ignore[arg-type]

    @property
    def course(self) -> Any:
        return self.planning.course(self.job)


def run(
    folder: Path, test: Callable[[Any], Awaitable[None]], make: Callable[..., Daemon] = Daemon, **more: Any
) -> None:
    """A test over a daemon of its own, in a loop of its own."""

    async def all_of_it() -> None:
        await test(make(folder, **more))

    asyncio.run(all_of_it())


def second_job(daemon: Daemon) -> Job:
    """Another job of the same daemon, without a domain."""
    record = msgspec.structs.replace(daemon.job.record, job=b"k" * 16, label="other")
    job = Job(record, "a", 1, daemon.job.resolve)
    daemon.machine.jobs[job.id] = job
    daemon.store.directory(job.id).mkdir(parents=True)
    return job
