"""Workers' questions for advice: which domain is meant, answers, and refusals that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.advice import AdviceRow, Advised, AskAdvice
from gcserver.planner.advice import MOST, Advice, AdvicePlan
from gcserver.planner.advice import AdviceRow as Row
from gcserver.runtime.advising import MOST_WAITING, Advising
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.unplannable import TOO_SOON, NotPlannable

JOB = b"j" * 16
LINK = 12.5e6
FOUND = Advice(
    0.2,
    (Row(LINK, (AdvicePlan("none", "none", 2.0), AdvicePlan("fast", "topk", 0.5)), True, "use it"),
     Row(125e6, (AdvicePlan("none", "none", 0.3),), False, "don't")),
    5e8,
    "use it",
)  # fmt: skip


class Planning:
    """Answers with ``advice``, or raises it."""

    def __init__(self, advice: Advice | Exception) -> None:
        self.advice_given = advice
        self.asked: list[tuple[Any, Any, tuple[float, ...]]] = []
        self.facts = self.study = self
        self.standing = object()

    def course(self, job: Any) -> Any:
        return self

    def model(self, job: Any, lossless: bool = False) -> Any:
        return job.domains.get(16)

    async def advise(self, job: Any, standing: Any, domain: Any, bandwidths: tuple[float, ...]) -> tuple[Advice, float]:
        assert standing is self.standing
        self.asked.append((job, domain, bandwidths))
        await asyncio.sleep(0)
        if isinstance(self.advice_given, Exception):
            raise self.advice_given
        return self.advice_given, LINK


def domain(scoped: bool) -> Any:
    return SimpleNamespace(declared_as=SimpleNamespace(scoped=scoped))


def answers(
    *questions: AskAdvice, advice: Advice | Exception = FOUND, worker: Any = (JOB, 1), empty: bool = False
) -> tuple[list[Advised], Planning]:
    planning = Planning(advice)
    job = SimpleNamespace(domains={} if empty else {16: domain(True), 0: domain(False), 17: domain(True)})
    told: list[Advised] = []

    async def run() -> None:
        supervisor: Any = SimpleNamespace(
            loop=asyncio.get_running_loop(), planning=planning, machine=SimpleNamespace(jobs={JOB: job})
        )
        advising = Advising(supervisor)
        for question in questions:
            advising.asked(worker, question, told.append)
        while len(told) < len(questions):
            await asyncio.sleep(0)
        advising.close()

    work: Coroutine[Any, Any, None] = run()
    asyncio.run(work)
    return told, planning


def test_the_answer_has_every_plan_on_every_link() -> None:
    (answer,), planning = answers(AskAdvice(7, -1, (125e6,)))
    assert answer == Advised(
        7, "use it", 0.2, 5e8,
        (AdviceRow(LINK, True, "none", "none", 2.0), AdviceRow(LINK, True, "fast", "topk", 0.5),
         AdviceRow(125e6, False, "none", "none", 0.3)),
    )  # fmt: skip
    assert [(job.domains[16] is asked, b) for job, asked, b in planning.asked] == [(True, (125e6,))]
    endless = Advice(0.2, FOUND.rows, MOST, "use it")
    assert answers(AskAdvice(7), advice=endless)[0][0].stops_paying is None


def test_a_domain_may_be_named() -> None:
    _, planning = answers(AskAdvice(1, 17))
    ((job, asked, _),) = planning.asked
    assert asked is job.domains[17]


@pytest.mark.parametrize("number", [0, 99])
def test_what_is_no_model_has_nothing_measured(number: int) -> None:
    assert answers(AskAdvice(1, number))[0][0].error == TOO_SOON
    assert answers(AskAdvice(1), empty=True)[0][0].error == TOO_SOON


@pytest.mark.parametrize(
    ("advice", "error", "what"),
    [
        (NotPlannable(TOO_SOON), TOO_SOON, "more steps"),
        (PlannerError("no answer"), "the planner failed: no answer", "log"),
        (RuntimeError("odd"), "a defect in the daemon", "traceback"),
    ],
)
def test_a_refusal_says_what_to_do(advice: Exception, error: str, what: str) -> None:
    (answer,), _ = answers(AskAdvice(3), advice=advice)
    assert (answer.request, answer.error, answer.rows) == (3, error, ()) and what in answer.advice


def test_strangers_and_odd_bandwidths_are_refused() -> None:
    assert "init()" in answers(AskAdvice(1), worker=None)[0][0].advice
    assert "init()" in answers(AskAdvice(1), worker=(b"k" * 16, 0))[0][0].advice
    for odd in (0.0, -1.0, 1e-302, 1e300, float("nan"), float("inf")):
        assert "expected bytes a second from 1 to 1e+15" in answers(AskAdvice(1, -1, (odd,)))[0][0].error


def test_only_so_many_questions_wait() -> None:
    told, planning = answers(*(AskAdvice(i) for i in range(MOST_WAITING + 1)))
    assert told[0] == Advised(MOST_WAITING, error=f"{MOST_WAITING} questions wait already", advice="ask again later")
    assert len(planning.asked) == MOST_WAITING and {a.request for a in told} == set(range(MOST_WAITING + 1))
