"""Of which job the core's lines for the log are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.core import control_events as cx
from gcserver.runtime.performing import perform


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
