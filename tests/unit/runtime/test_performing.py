"""Of which job the core's lines for the log are; which steps steer a controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.messages import PlanText
from gcproto.records import replace
from gcserver.core import control_events as cx
from gcserver.runtime.performing import perform
from gcserver.runtime.steering import Course
from tests.unit.core.control_machine import declared


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("job gpt formed, 2 ranks (a: 0; b: 1)", "gpt"),
        ("job gpt 2: b is back", "gpt 2"),
        ("job gpt, world: plan 2 from step 7", "gpt"),
        ("job gpts ended: PeerLost: b is gone", None),
        ("peer gpt is up", None),
        ("b cannot run plan 3: no such codec", None),
    ],
)
def test_a_line_that_begins_with_a_jobs_name_is_of_that_job(
    text: str, job: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = {label: SimpleNamespace(record=SimpleNamespace(label=label)) for label in ("gpt", "gpt 2")}
    supervisor: Any = SimpleNamespace(machine=SimpleNamespace(jobs=jobs))
    with caplog.at_level("WARNING"):
        perform(supervisor, cx.Log("warning", text))
    (record,) = caplog.records
    assert (record.message, record.levelname, record.job) == (text, "WARNING", job)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step", "void", "moves", "idle"),
    [(5, False, True, False), (5, True, True, True), (4, False, True, True), (5, False, False, True)],
)
def test_steps_whose_ratio_is_nobodys_do_not_steer(step: int, void: bool, moves: bool, idle: bool) -> None:
    """Void ones, those of a model's warm-up, and those under a plan of which nothing can be moved."""
    (job,) = declared(whole=False)[0].jobs.values()
    (domain,) = job.domains.values()
    domain.config = replace(domain.config, warmup=4)
    domain.switches = [(1, 0), (6, 1)]
    job.plans[1] = PlanText(job.id, 1, 1, (), "dc2-da2")
    asked: list[int] = []

    def told(job: Any, domain: Any, version: int) -> bool:
        asked.append(version)
        return moves

    said: list[Any] = []
    supervisor: Any = SimpleNamespace(
        machine=SimpleNamespace(jobs={job.id: job}),
        store=SimpleNamespace(ledger=lambda domain: SimpleNamespace(settle=lambda *step: None)),
        status=SimpleNamespace(on_settled=lambda e: None),
        profiler=SimpleNamespace(on_settled=lambda e: None),
        audits=SimpleNamespace(on_settled=lambda e: None),
        notches=SimpleNamespace(ratios=lambda job, domain, version: (), moves=told),
        steering=SimpleNamespace(settled=lambda *what: said.append(what)),
    )
    perform(supervisor, cx.LogSettled(domain.config.id, step, void, 1, 2))
    if step == 4:
        job.plans.clear()
        assert not asked and said[0][3].text == "none", "the next step is under plan 0, which nobody steers"
    else:
        assert said == [(domain.config.id, step, idle, Course("ddp", "dc2-da2"))]
        assert asked == ([] if void else [0]), "of the step that was made, not of the next one"
