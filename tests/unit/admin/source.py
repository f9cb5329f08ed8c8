"""A source with fixed answers, for the service, the tables and gcctl. It is the other side of an interface, not a mock:
what it refuses, it refuses as the supervisor does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from fnmatch import fnmatchcase

from gcserver.admin.planning import (
    Advice,
    AdviceRow,
    CodecProfile,
    Considered,
    ControllerState,
    DomainProfile,
    Forecast,
    GroupForecast,
    StepProfile,
    TensorGroup,
    TensorProfile,
    TimelineJob,
)
from gcserver.admin.source import (
    AdminError,
    Applicant,
    DomainPlan,
    DomainStatus,
    DrainResult,
    ErrorKind,
    JobState,
    JobStatus,
    LaneStatus,
    Member,
    NodeState,
    NodeStatus,
    PeerLane,
    PeerState,
    PeerStatus,
    PlanChange,
    PlanGroup,
    PlanRule,
    PlanStatus,
    TensorStatus,
    WaitingFor,
)
from gcserver.admin.spans import TracedNode, TracePart, TraceStarted, TraceStopped
from gcserver.codecs import CodecError, parse
from tests.unit.admin import traces

BIG = (1 << 60) + 1  # does not fit a double: JSON must not lose its last digit

NODE = NodeStatus(
    node="a", incarnation=BIG, state=NodeState.SERVING, version="0.1.0", protocol_version=1, uptime=7500.0,
    listen="tcp://0.0.0.0:7470", advertise="tcp://10.0.0.1:7470", arena_bytes=3 << 20, errors={"frames_corrupt": 2},
    lanes=(LaneStatus(0, "ready", 411, 9, (0, 1), 1, 5 << 20, 6 << 20, 77),),
    applicants=(Applicant("c", "gpt", 12.0, "not there yet: b (restarting)"),), planning={"start": 2.5, "errors": 4.0},
)  # fmt: skip
PEERS = [
    PeerStatus(
        "b",
        "tcp://10.0.0.2:7470",
        PeerState.UP,
        "",
        5,
        0.25,
        0.0012,
        1 << 20,
        2 << 20,
        3,
        4,
        True,
        7200.0,
        (PeerLane(0, PeerState.UP, 7199.0),),
    ),
    PeerStatus("c", "tcp://10.0.0.3:7470", PeerState.REFUSED, "2 lanes, not 1", since=180.0),
]
JOB = JobStatus(
    label="gpt", id="0123456789abcdef" * 2, state=JobState.RUNNING, epoch=1, world_size=3,
    members=(Member("a", (0, 1)), Member("b", (2,))), step=41, plan_version=2, deadline=1800.0,
    domains=(
        DomainStatus(0, "world", 41, 1, 2, 1064, "fp16", (WaitingFor("b", 3.5, 42, "exchange", "aggregate"),)),
    ),
)  # fmt: skip
TENSORS = [
    TensorStatus("wte.weight", "world", "float32", (64, 16), 0, "fp16", 4096, 2048, 0.0),
    TensorStatus("ln.bias", "world", "float32", (40,), 4096, "none", 160, 0, 0.125),
]


DEFAULT_RULE = PlanRule("*", "fp16", "owner", "default")
OWN_RULE = PlanRule("wte*", "topk(ratio=0.01)", "all", "plan")
PLAN = PlanStatus(
    "gpt", "0123456789abcdef" * 2, 2, (OWN_RULE,),
    (
        DomainPlan(
            0, "world", 1, 12, ((44, 2),), (DEFAULT_RULE, OWN_RULE),
            (
                PlanGroup(0, 12, 7, "wte.weight", 3 << 20, "topk(ratio=0.01)", "all", OWN_RULE),
                PlanGroup(1, 1, 1, "ln.bias", 160, "none", "all", None, "no rule matches; small: to everyone at once"),
            ),
            "",
            Forecast(
                1, 0.25, 1.5, 0.2, "6 times as fast as dense", 0.26,
                (
                    GroupForecast(
                        7, "wte.weight", 3 << 20, "topk(ratio=0.01)", "all", 0.03, "the link is the bottleneck"
                    ),
                ),
                (Considered("powersgd(rank=4)", 0.3, "slower by 20 %"),), (0.5, 1.0),
                (TensorGroup(("ln.bias",)), TensorGroup(("wte.weight", "wpe.weight"))), (0.5, 3.25),
            ),
            (ControllerState("dc2-da2", 0.015, 1, 0.03, 0.001, 55),),
        ),
        DomainPlan(1, "calls", note="declared lossless: a plan's rules do not apply"),
    ),
    "auto", "fast", "measures the link",
)  # fmt: skip
DRAWN = (
    TimelineJob("compute", "compute", "a", 0.0, 0.2), TimelineJob("wte.weight", "out", "a", 0.1, 0.15),
    TimelineJob("wte.weight", "in", "b", 0.15, 0.25),
)  # fmt: skip
PROFILE = DomainProfile(
    "gpt", "world", 2, 0.1, 0.1, 1e-4, 12.5e6, 0.02, 40, 1.25, (TensorProfile("wte.weight", 1024, 0.1),),
    (CodecProfile("fp16", 1e-3, 2e-3, 3e-3, 0.5),), (StepProfile(1, 0.26, 0.03, 31),), '{"form": 1}',
)  # fmt: skip
ADVICE = Advice(
    "world", "compress: 6 times as fast", 0.2, 1.25e9,
    (AdviceRow(12.5e6, True, "none", "none", 1.5), AdviceRow(12.5e6, True, "fast", "topk(ratio=0.01)", 0.25)),
)  # fmt: skip


class FixedSource:
    """One job, two peers, two tensors. ``state``, ``jobs_here``, ``defect``, ``tensors_fail`` can be set by a test."""

    def __init__(self) -> None:
        self.state = NodeState.SERVING
        self.jobs_here = [JOB]
        self.defect = False
        self.tensors_fail = False
        self.asked: list[tuple[object, ...]] = []

    def node(self) -> NodeStatus:
        if self.defect:
            raise ZeroDivisionError("of all things")
        return replace(NODE, state=self.state, reason="drained by hand" if self.state is NodeState.DRAINING else "")

    def peers(self) -> list[PeerStatus]:
        return PEERS

    def jobs(self) -> list[JobStatus]:
        return self.jobs_here

    def _job(self, job: str) -> JobStatus:
        found = [j for j in self.jobs_here if job in ("", j.label, j.id)]
        have = ", ".join(j.label for j in self.jobs_here)
        if not found:
            raise AdminError(ErrorKind.NOT_FOUND, f"no job {job!r} here; jobs: {have}", "job")
        if len(found) > 1:
            raise AdminError(ErrorKind.PRECONDITION, f"several jobs match {job!r}; name one of: {have}", "job")
        return found[0]

    async def tensors(self, job: str, domain: str, pattern: str) -> list[TensorStatus]:
        self._job(job)
        if self.tensors_fail:
            raise AdminError(ErrorKind.UNAVAILABLE, "lane 0 does not answer")
        return [t for t in TENSORS if domain in ("", t.domain) and fnmatchcase(t.name, pattern or "*")]

    async def set_codec(self, job: str, pattern: str, spec: str) -> PlanChange:
        self.asked.append(("set_codec", job, pattern, spec))
        self._job(job)
        if spec == "later":
            raise AdminError(ErrorKind.UNAVAILABLE, "peer b does not answer")
        try:
            parse(spec)
        except CodecError as error:
            raise AdminError(ErrorKind.INVALID, str(error), "codec") from None
        return PlanChange(3, 44, "takes effect at step 44 on every node")

    async def set_plan(self, job: str, rules: tuple[PlanRule, ...], replace: bool) -> PlanChange:
        self.asked.append(("set_plan", job, rules, replace))
        self._job(job)
        for i, rule in enumerate(rules):
            try:
                parse(rule.codec)
            except CodecError as error:
                raise AdminError(
                    ErrorKind.INVALID, f"rules[{i}]: rule {rule.pattern!r}: {error}", f"rules[{i}]"
                ) from None
        return PlanChange(4, 46, "takes effect at step 46 on every node")

    async def set_mode(self, job: str, mode: str, quality: str) -> PlanChange:
        self.asked.append(("set_mode", job, mode, quality))
        self._job(job)
        return PlanChange(0, 0, f"plans are made by {mode or 'auto'} from now on")

    async def plan(self, job: str, timeline: bool) -> PlanStatus:
        self._job(job)
        if not timeline:
            return PLAN
        first, *others = PLAN.domains
        return replace(PLAN, domains=(replace(first, predicted=DRAWN, measured=DRAWN[:2]), *others))

    async def replan(self, job: str) -> PlanChange:
        self._job(job)
        return PlanChange(0, 0, "the plan in force stays: 2 % faster is within the noise")

    async def set_controller(self, job: str, controller: str, parameters: dict[str, float]) -> PlanChange:
        self.asked.append(("set_controller", job, controller, parameters))
        self._job(job)
        return PlanChange(5, 48, "plan 5, made after plan 4, takes effect at step 48 on every node")

    async def profile(self, job: str) -> tuple[DomainProfile, ...]:
        self._job(job)
        return (PROFILE,)

    async def advise(self, job: str, bandwidths: tuple[float, ...]) -> tuple[Advice, ...]:
        self.asked.append(("advise", job, bandwidths))
        self._job(job)
        return (ADVICE,)

    async def start_trace(self, job: str, steps: int, seconds: float, nodes: tuple[str, ...]) -> TraceStarted:
        self.asked.append(("start_trace", job, steps, seconds, nodes))
        return TraceStarted(("a", "b"), "recording steps of all jobs on 2 node(s), for 60 s at most")

    async def stop_trace(self) -> TraceStopped:
        self.asked.append(("stop_trace",))
        found = tuple(part for part in traces.parts() if isinstance(part, TracedNode))
        return TraceStopped(
            (*found, TracedNode("c", reason="it does not answer")), "37 spans of 2 node(s); nothing of 1"
        )

    async def trace(self) -> AsyncIterator[TracePart]:
        if not self.asked:
            raise AdminError(ErrorKind.PRECONDITION, "the trace is still being recorded; end it first, by `trace stop`")
        for part in traces.parts():
            yield part

    async def drain(self, timeout: float, reason: str) -> DrainResult:
        self.asked.append(("drain", timeout, reason))
        self.state = NodeState.DRAINING
        return DrainResult("stops when the last job has left", len(self.jobs_here))
