"""Whom jobs wait for, as operators see it.

What may live here: tests of `gcserver/runtime/waiters.py`. What may not: what is a wait (`core/test_waiting.py`).
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from gcproto.messages import DeclareDomain
from gcserver.admin.metrics import Metrics
from gcserver.core import control_events as ce
from gcserver.core.effects import ReportWaiting
from gcserver.runtime import waiters
from gcserver.runtime.observe import Observer
from gcserver.runtime.status import Status
from tests.unit.core.control_machine import domain_of, formed_with_b, machine, register, said


def supervisor(m: Any) -> Any:
    node = SimpleNamespace(advertise=SimpleNamespace(host="a"), metrics=None)
    return SimpleNamespace(machine=m, node="a", lanes=SimpleNamespace(table=[None]), config=SimpleNamespace(node=node))


def test_the_longest_wait_comes_first_and_who_is_in_time_is_not_shown() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    now = time.monotonic()
    (job,) = m.jobs.values()
    for step, ago, lane in ((7, 30.0, 0), (7, 0.2, 1)):
        waiting = ReportWaiting(domain_of(m), step, now - ago, "exchange", ("b",), ("aggregate",))
        m.on(ce.LaneSaid(lane, waiting), now)
    job.away_since[0] = now - 60.0
    found = waiters.of_job(job)
    assert [(w.node, w.wanted, w.reason, w.step, w.domain) for w in found] == [
        ("rank 0", "connection", "attach", 0, 0),
        ("b", "aggregate", "exchange", 7, 3),
    ]
    assert 60 <= found[0].since < 90 and 30 <= found[1].since < 60
    (shown,) = Status(supervisor(m)).jobs()
    assert [w.node for w in shown.waiting_for] == ["rank 0"]
    assert [w.node for w in shown.domains[0].waiting_for] == ["b"]


def test_the_next_epoch_is_waited_for_by_the_whole_job() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    (job,) = m.jobs.values()
    job.change.frozen, job.change.since = True, time.monotonic() - 5.0
    (shown,) = Status(supervisor(m)).jobs()
    assert [(w.node, w.wanted) for w in shown.waiting_for] == [("b", "epoch")]
    assert shown.domains[0].waiting_for == (), "no process group by itself, not the first one either"


def test_a_job_that_has_yet_to_form_says_which_ranks_it_lacks_also_in_the_metrics() -> None:
    m = machine()
    said(m, 1, register(0, 3), now=time.monotonic() - 5.0)
    (shown,) = Status(supervisor(m)).jobs()
    assert [(w.node, w.wanted, w.reason) for w in shown.waiting_for] == [
        ("rank 1", "worker", "join"),
        ("rank 2", "worker", "join"),
    ]
    assert shown.deadline == 60.0 and shown.waiting_for[0].since >= 5.0
    observer = Observer(supervisor(m), Any)
    observer._waiting()

    def waited(rank: int) -> float | None:
        labels = {"training_job": "train", "peer": f"rank {rank}", "wanted": "worker"}
        metrics: Metrics = observer._metrics
        return metrics.registry.get_sample_value("gradcomm_waiting_seconds", labels)

    assert (waited(1) or 0.0) >= 5.0 and (waited(2) or 0.0) >= 5.0
    m.gatherings.clear()
    observer._waiting()
    assert waited(1) is None and waited(2) is None and not observer._metrics._jobs


def test_a_lane_that_says_nothing_for_a_while_is_silent() -> None:
    now = time.monotonic()
    lane: Any = SimpleNamespace(ready=True, heard=now - waiters.LANE_SILENT_AFTER - 1.0)
    assert waiters.silent(lane) >= waiters.LANE_SILENT_AFTER
    lane.heard = now
    assert waiters.silent(lane) == 0.0
    lane.heard, lane.ready = 0.0, False
    assert waiters.silent(lane) == 0.0, "it is starting"
