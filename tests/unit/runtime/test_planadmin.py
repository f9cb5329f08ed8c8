"""What operators are told about planning, and what they are refused."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcproto.agreed import PlanMode, Resumed
from gcproto.records import replace
from gcserver.admin.planning import AdviceRow, Forecast, TimelineJob
from gcserver.admin.source import AdminError, ErrorKind, PlanChange
from gcserver.core.control_events import AnswerRequest
from gcserver.core.events import Member
from gcserver.planner.advice import MOST, Advice, AdvicePlan
from gcserver.planner.advice import AdviceRow as Row
from gcserver.planner.auto import Considered
from gcserver.planner.auto_informed import Terms
from gcserver.planner.auto_why import GroupWhy
from gcserver.planner.live import LiveJob, LiveStep
from gcserver.planner.profile import LinkCost, StepTime, load
from gcserver.runtime.planadmin import PlanAdmin, computed, joined, tunable
from gcserver.runtime.plannerlink import Advise, Advised, Measure, PlannerError, Predict, Predicted, Request
from gcserver.runtime.planstatus import EMPTY_NOTE
from gcserver.runtime.steering import Steered
from gcserver.runtime.steptrace import TracedJob, TracedStep
from tests.unit.planner.live_profiles import costs
from tests.unit.runtime import planned_job
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal

STEP = LiveStep(
    0.3,
    10.0,
    (
        LiveJob("forward", "worker", 0, -1, 0.0, 0.1),
        LiveJob("compute", "worker", 0, 1, 0.1, 0.2),
        LiveJob("send", "link out", 1, 0, 0.2, 0.3),
        LiveJob("add", "lane 0", 1, 0, 0.2, 0.25),
    ),
)
ADVICE = Advice(0.2, (Row(1.25e8, (AdvicePlan("none", "none", 0.3),), False, ""),), 2e6, "don't")


class Service(Daemon):
    """A daemon whose planning process also predicts and advises, and whose lanes trace."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.advice, self.step = ADVICE, STEP
        self.steered = (Steered("ddp", "dc2-da2", 0.1, -1, 0.02, 0.01, 5), Steered("other", "dc2-da2", 1, 2, 0, 0, 0))
        self.steering = SimpleNamespace(describe=lambda job: self.steered, set_controller=self.set_controller)
        self.questions = SimpleNamespace(ask=self.trace)
        self.still = ""
        self.beyond = 0.0
        self.notches = SimpleNamespace(
            still=lambda job, version: self.still, beyond=lambda job, wanted, version: self.beyond
        )
        self.admin = PlanAdmin(self)  # type: ignore[arg-type]
        plain = self.link.ask

        async def ask(request: Request) -> Any:
            if isinstance(request, Measure | Advise | Predict) and (error := self.link.error) is not None:
                self.link.error = None
                raise error
            if isinstance(request, Predict):
                self.link.asked.append(request)
            if isinstance(request, Advise):
                return Advised(self.advice)
            return Predicted(self.step) if isinstance(request, Predict) else await plain(request)

        self.link.ask = ask  # type: ignore[method-assign]

    async def trace(self, question: Callable[[int], Any], patience: float) -> list[TracedStep]:
        asked = question(4)
        assert (asked.request, asked.domain) == (4, self.domain.config.id)
        return [TracedStep(4, asked.domain, 9, (TracedJob("encode", "lane 1", 0, 0.1, 0.2),))]

    async def set_controller(self, job: str, name: str, parameters: dict[str, float], planned: bool) -> AnswerRequest:
        assert planned == (self.admin._mode(self.job, self.planning.course(self.job)) != "static")
        if name != "dc2-da2":
            raise ValueError(f"expected dc2-da2, got {name}")
        return AnswerRequest(1, 3, 44, "takes effect")


def run(folder: Path, test: Callable[[Service], Awaitable[None]]) -> None:
    planned_job.run(folder, test, Service)


async def refused(work: Awaitable[Any], kind: ErrorKind, words: str) -> None:
    with pytest.raises(AdminError, match=words) as caught:
        await work
    assert caught.value.kind is kind


def test_a_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        nothing = await d.admin.plan(d.job, timeline=False)
        assert (nothing.mode, nothing.quality, nothing.planner) == ("auto", "fast", "")
        assert nothing.domains[0].forecast is None
        d.link.proposal = msgspec.structs.replace(
            proposal(),
            alphas=(0.5, 1.0),
            why=(GroupWhy(("b", "w"), 100, "topk", "owner", 0.1, "gains 3 ms"), GroupWhy((), 0, "none", "all", 0, "")),
            considered=(Considered("topk", 0.2, ""), Considered("fp16", 0.3, "slower")),
            groups=(("b",), ("w", "v")),
            caps=(0.5, 3.25),
        )
        await d.look()
        planned = await d.admin.plan(d.job, timeline=False)
        (domain,) = planned.domains
        assert planned.planner == "plan 1 since step 22: topk it is"
        found = domain.forecast
        assert isinstance(found, Forecast)
        assert (found.plan_version, found.expected_seconds, found.dense_seconds, found.compute_seconds) == (
            1,
            0.2,
            0.4,
            0.2,
        )
        assert (found.measured_seconds, found.reason, found.alphas) == (0.0, "topk it is", (0.5, 1.0))
        assert [(g.tensors, g.first_tensor, g.codec, g.reason) for g in found.groups] == [
            (2, "b", "topk", "gains 3 ms"), (0, "", "none", ""),
        ]  # fmt: skip
        assert [(c.codec, c.reason) for c in found.considered] == [("fp16", "slower")], (
            "the winner is not its own rival"
        )
        assert [g.tensors for g in found.proposed_groups] == [("b",), ("w", "v")]
        assert found.bucket_caps_mb == (0.5, 3.25)
        assert [(c.name, c.notch) for c in domain.controllers] == [("dc2-da2", None)]
        assert domain.predicted == domain.measured == ()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.25, 0.01, 9))
        (domain,) = (await d.admin.plan(d.job, timeline=False)).domains
        assert domain.forecast is not None and domain.forecast.measured_seconds == 0.25

    run(tmp_path, test)


def test_what_was_only_proposed_has_not_been_measured(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        d.link.proposal = proposal("none", 0.39)
        await d.look()
        (domain,) = (await d.admin.plan(d.job, timeline=False)).domains
        assert domain.forecast is not None
        assert (domain.forecast.plan_version, domain.forecast.measured_seconds) == (0, 0.0)

    run(tmp_path, test)


def test_another_node_names_the_one_that_plans(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        d.plans_at("b")
        status = await d.admin.plan(d.job, timeline=False)
        assert (status.mode, status.planner) == (
            "auto",
            "node b plans for job 'train': ask its daemon (gcctl --address)",
        )
        with pytest.raises(AdminError, match="b plans") as caught:
            d.admin.set_mode(d.job, "auto", "")
        assert (caught.value.kind, caught.value.field) == (ErrorKind.PRECONDITION, "mode")

    run(tmp_path, test)


@pytest.mark.parametrize("began", ["auto", "static"])
def test_a_plan_that_only_steers_what_a_checkpoint_brought_says_nothing_of_who_plans(
    tmp_path: Path, began: str
) -> None:
    async def test(d: Service) -> None:
        d.plans_at("b")
        d.job.record = msgspec.structs.replace(d.job.record, mode=began)
        for planned in (True, False):
            resumed = Resumed(b"o", 5, (), TOPK, planned=planned)
            d.domain.declared_as = msgspec.structs.replace(d.domain.declared_as, resumed=resumed)
            d.newest(TOPK, planned=planned)
            assert (await d.admin.plan(d.job, timeline=False)).mode == began

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("began", "planned", "mode"),
    [("auto", True, "auto"), ("auto", False, "static"), ("static", True, "auto"), ("static", False, "static")],
)
@pytest.mark.parametrize("said", [False, True], ids=["as it began", "as an operator said"])
def test_another_node_tells_who_plans_by_the_newest_plan(
    tmp_path: Path, said: bool, began: str, planned: bool, mode: str
) -> None:
    async def test(d: Service) -> None:
        d.plans_at("b")
        d.job.record = msgspec.structs.replace(d.job.record, mode="static" if said else began)
        if said or (planned and began == "static"):  # or no planner would have made the plan
            d.job.said = PlanMode(d.job.id, mode if planned else began, "", 0)
            assert (await d.admin.plan(d.job, timeline=False)).mode == d.job.said.mode
        d.newest(TOPK, planned=planned)
        assert (await d.admin.plan(d.job, timeline=False)).mode == mode
        d.still = "fp16"
        if mode == "static":
            await refused(d.admin.set_controller(d.job, "dc2-da2", {}), ErrorKind.PRECONDITION, "would move nothing")
        else:
            assert "until the planner (auto)" in (await d.admin.set_controller(d.job, "dc2-da2", {})).message

    run(tmp_path, test)


def test_a_job_that_ends_while_its_step_is_traced_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        traced = d.questions.ask

        async def ends(question: Callable[[int], Any], patience: float) -> list[TracedStep]:
            d.planning.forget_job(d.job.id)
            return await traced(question, patience)

        d.questions.ask = ends
        assert (await d.admin.plan(d.job, timeline=True)).domains[0].measured
        assert not d.planning._courses

    run(tmp_path, test)


def test_a_step_as_predicted_and_as_measured(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        traced = TimelineJob("encode w", "lane 1", "a", 0.1, 0.2)
        members = (Member(2, "b", 1), *d.domain.config.members)
        d.domain.config = msgspec.structs.replace(d.domain.config, members=members)
        (domain,) = (await d.admin.plan(d.job, timeline=True)).domains
        assert (domain.predicted, domain.measured) == ((), (traced,))
        d.link.proposal = msgspec.structs.replace(proposal(), terms=Terms(0.7, 5e5, 0.25))
        await d.look()
        (domain,) = (await d.admin.plan(d.job, timeline=True)).domains
        assert domain.measured == (traced,)
        assert [(j.what, j.resource, j.node) for j in domain.predicted] == [
            ("forward", "worker", "b"), ("compute t1", "worker", "b"), ("send 0", "out", "a"), ("add 0", "lane 0", "a"),
        ]  # fmt: skip
        priced = [r for r in d.link.asked if isinstance(r, Predict)][-1].profile
        assert (priced.forward, priced.link.bandwidth, priced.interference) == (0.7, 5e5, 0.25), "as it was planned"
        d.step = msgspec.structs.replace(STEP, jobs=STEP.jobs[:2])
        course = d.planning.course(d.job)
        course.drawn = None
        (domain,) = (await d.admin.plan(d.job, timeline=True)).domains
        assert {j.node for j in domain.predicted} == {"each node"}
        # The process that predicts is asked once for each proposal: a page that is watched asks again and again.
        d.link.error = PlannerError("killed")
        (again,) = (await d.admin.plan(d.job, timeline=True)).domains
        assert again.predicted == domain.predicted
        drawn, profile, step = course.drawn or (None, None, None)
        course.drawn = (copy.copy(drawn), profile, step)  # type: ignore[assignment]
        await refused(d.admin.plan(d.job, timeline=True), ErrorKind.UNAVAILABLE, "killed")

    run(tmp_path, test)


def test_lanes_that_end_a_step_apart_are_laid_side_by_side() -> None:
    def lane(step: int, zero: float, *at: float) -> TracedStep:
        return TracedStep(1, (b"j" * 16, 16), step, tuple(TracedJob("push", "push", 1, t, t + 0.1) for t in at), zero)

    found = joined([lane(9, 50.0, 0.4), lane(9, 50.2, 0.1, 0.3), lane(8, 49.0, 0.5)])
    spans = [(j.start, j.end) for j in found]
    assert spans == [pytest.approx(s) for s in ((0.2, 0.3), (0.1, 0.2), (0.3, 0.4))]
    assert joined([]) == []


def test_pushes_tell_what_workers_computed() -> None:
    def job(what: str, key: int, at: float) -> TracedJob:
        return TracedJob(what, what, key, at, at + (what != "push") * 0.1)

    # As lanes say it: each its own pushes; those of one bucket come at once.
    traced = [job("push", 2, 0.5), job("encode", 2, 0.5), job("push", 1, 0.5), job("push", 3, 0.3), job("push", 4, 0.9)]
    found = [(j.resource, j.key, j.start, j.end) for j in computed(traced)]
    assert found == [("worker", 3, 0.0, 0.3), ("worker", 2, 0.3, 0.5), ("worker", 4, 0.5, 0.9)]
    assert computed([job("encode", 2, 0.5)]) == []


def test_one_step_is_traced_at_a_time(tmp_path: Path) -> None:
    """A lane that is asked for another trace drops the one under way."""

    async def test(d: Service) -> None:
        under_way = most = 0
        plain = d.questions.ask

        async def slow(question: Callable[[int], Any], patience: float) -> list[TracedStep]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return await plain(question, patience)

        d.questions.ask = slow
        found = await asyncio.gather(*(d.admin.plan(d.job, timeline=True) for _ in range(3)))
        assert most == 1 and all(plan.domains[0].measured for plan in found)

    run(tmp_path, test)


def test_changes_are_answered_and_refused(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        assert await d.admin.replan(d.job) == PlanChange(1, 22, "plan 1 since step 22: topk it is")
        stays = await d.admin.replan(d.job)
        assert stays.plan_version == 0 and "stays" in stays.message
        assert d.admin.set_mode(d.job, "static", "").plan_version == 0
        await refused(d.admin.replan(d.job), ErrorKind.PRECONDITION, "made by operators")
        d.newest(HAND)
        assert await d.admin.set_controller(d.job, "dc2-da2", {}) == PlanChange(3, 44, "takes effect")
        await refused(d.admin.set_controller(d.job, "pid", {}), ErrorKind.INVALID, "dc2-da2")
        d.beyond = 0.05
        said = (await d.admin.set_controller(d.job, "dc2-da2", {"k_max": 0.02})).message
        assert said == "takes effect; the plan in force allows no ratio below 0.05, which counts instead of k_max"

    run(tmp_path, test)


def test_a_job_of_lossless_models_is_told_so_and_advised(tmp_path: Path) -> None:
    """A script that says `compression="none"` keeps all plans away from its model."""

    async def test(d: Service) -> None:
        d.domain.declared_as = replace(d.domain.declared_as, codec="none")
        why = "every model was declared lossless .*leave compression= out"
        still = d.admin.set_controller(d.job, "dc2-da2", {})
        await refused(still, ErrorKind.PRECONDITION, f"would move nothing: {why}")
        await refused(d.admin.replan(d.job), ErrorKind.PRECONDITION, why)
        assert "every model was declared lossless" in await d.look()
        assert (await d.admin.advise(d.job, ()))[0].verdict == "don't", "whether it should be compressed can be asked"

    run(tmp_path, test)


def test_a_controller_that_would_move_nothing(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        d.still = "fp16"
        found = await d.admin.set_controller(d.job, "dc2-da2", {})
        assert (
            found.message == "takes effect; it moves nothing until the planner (auto) chooses another codec than fp16"
        )
        d.admin.set_mode(d.job, "static", "")
        wanted = r"would move nothing: the plan in force uses fp16, .* one of .*topk.* gcctl set-codec"
        await refused(d.admin.set_controller(d.job, "dc2-da2", {}), ErrorKind.PRECONDITION, wanted)
        await refused(d.admin.set_controller(d.job, "none", {}), ErrorKind.INVALID, "got none")
        d.still = ""
        assert (await d.admin.set_controller(d.job, "dc2-da2", {})).message == "takes effect"

    run(tmp_path, test)


def test_names_of_codecs_with_a_ratio_to_move() -> None:
    assert {"topk", "dgc", "redsync", "gaussiank", "sidco-e"} <= set(tunable())
    assert not {"none", "fp16", "qsgd", "powersgd", "randomk"} & set(tunable())


def test_another_model_is_told_why_it_has_no_plan_of_its_own(tmp_path: Path) -> None:
    """An idle process group, before there is a plan, under one that names its tensors, under one that does not."""

    async def test(d: Service) -> None:
        other = copy.copy(d.domain)
        other.config = msgspec.structs.replace(d.domain.config, domain=d.domain.config.domain + 1, label="ddp.1")
        d.job.domains[other.config.domain] = other

        async def notes() -> list[str]:
            return [domain.note for domain in (await d.admin.plan(d.job, timeline=False)).domains]

        own = "no plan of its own: a plan is the whole job's and its rules go by tensors' names; "
        assert await notes() == ["", f"{own}the first one will be made for the largest model, ddp"]
        await d.look()
        planned, apart = (await d.admin.plan(d.job, timeline=False)).domains
        assert planned.note == "" and planned.forecast is not None and apart.forecast is None
        made = f"{own}it is made for the largest model, ddp, and "
        assert apart.note == f"{made}holds here as far as the names match"
        plan = d.job.plans[d.job.proposal]
        slip = msgspec.structs.replace(plan.rules[0], pattern="wte.*")
        d.job.plans[d.job.proposal] = msgspec.structs.replace(plan, rules=(slip,))
        assert await notes() == ["", f"{made}none of its rules is for a tensor of this one"]
        other.sections = []
        assert await notes() == ["", EMPTY_NOTE]
        other.sections = d.domain.sections
        d.admin.set_mode(d.job, "static", "")
        assert await notes() == ["", ""], "an operator's rules are for whatever they match"

    run(tmp_path, test)


def test_a_profile_is_shown_and_handed_out(tmp_path: Path) -> None:
    async def test(d: Service) -> None:
        d.steps(StepTime(2, 0.4, 0.01, 7), codecs={"fp16": costs()["fp16"]})
        (shown,) = await d.admin.profile(d.job)
        assert load(shown.json.encode(), "shown") == d.seen
        assert (shown.job, shown.domain, shown.nodes, shown.forward_seconds, shown.backward_seconds) == (
            "job", "ddp.0", 2, 0.1, 0.1,
        )  # fmt: skip
        assert [(t.name, t.elements, t.ready_seconds) for t in shown.tensors] == [("t0", 300, 0.0), ("t1", 90_000, 0.1)]
        assert [(c.codec, c.ratio) for c in shown.codecs] == [("fp16", 0.5)]
        assert [(s.plan_version, s.median_seconds, s.steps) for s in shown.steps] == [(2, 0.4, 7)]
        assert json.loads(shown.json)["nodes"] == 2
        d.news = LinkCost(1e-3, 5e6, 0.02, 12)
        (shown,) = await d.admin.profile(d.job)
        assert load(shown.json.encode(), "shown").link == d.news, "also where nobody plans"
        d.seen = None
        await refused(d.admin.profile(d.job), ErrorKind.PRECONDITION, "too little")
        await refused(d.admin.advise(d.job, ()), ErrorKind.PRECONDITION, "too little")

    run(tmp_path, test)


@pytest.mark.parametrize(("stops", "below"), [(2e6, 2e6), (0.0, 0.0), (MOST, None)])
def test_advice(tmp_path: Path, stops: float, below: float | None) -> None:
    async def test(d: Service) -> None:
        assert d.seen is not None
        link = d.seen.link.bandwidth
        rows = (ADVICE.rows[0], msgspec.structs.replace(ADVICE.rows[0], bandwidth=link))
        d.advice = msgspec.structs.replace(ADVICE, rows=rows, stops_paying=stops)
        (found,) = await d.admin.advise(d.job, (1.25e8,))
        assert [r.wish.quality for r in d.link.asked if isinstance(r, Measure)] == ["fast"], (
            "every quality is advised on"
        )
        assert (found.domain, found.verdict, found.compute_seconds, found.pays_below) == ("ddp", "don't", 0.2, below)
        assert found.rows == (
            AdviceRow(1.25e8, False, "none", "none", 0.3), AdviceRow(link, True, "none", "none", 0.3),
        )  # fmt: skip
        d.seen = msgspec.structs.replace(d.seen, link=LinkCost(1e-4, link))
        (guessed,) = await d.admin.advise(d.job, (1.25e8,))
        assert guessed.verdict.startswith("don't; the link has not been measured")
        assert not any(row.measured for row in guessed.rows)
        d.domain.sections = []
        await refused(d.admin.advise(d.job, ()), ErrorKind.PRECONDITION, "too little")

    run(tmp_path, test)
