"""Finished steps on their way from a lane to the supervisor.

What may live here: reporting several together, how long each and its exchanges took. What may not: when a step is
finished (`gcserver.core`), measuring exchanges (`delays.py`), settling a step (the supervisor's machine).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gcserver.core.effects import ReportStep
from gcserver.core.events import DomainKey
from gcserver.core.job import SCOPED_LAG
from gcserver.core.lane import LaneMachine
from gcserver.runtime.delays import Delays
from gcserver.runtime.lanelink import StepDelays, StepTimes

#: Finished steps of domains with many in flight are reported together: at most so many, so many seconds late.
REPORTS: Final = 32
REPORT_WITHIN: Final = 0.01


class StepReports:
    """Reports of one lane. ``send_up`` takes messages for the supervisor that go in one write."""

    def __init__(self, machine: LaneMachine, delays: Delays, send_up: Callable[..., None]) -> None:
        self._machine, self._delays, self._send_up = machine, delays, send_up
        self.waiting: list[ReportStep] = []
        #: when ``flush`` is due, on the monotonic clock; 0: nothing waits
        self.by = 0.0
        #: when each step's first push came
        self.began: dict[tuple[DomainKey, int], float] = {}

    def gated(self) -> bool:
        """Whether a push waits for a settlement, so that reports must not."""
        return any(domain.gated for domain in self._machine.domains.values())

    def add(self, e: ReportStep) -> None:
        """Where many steps are in flight, their settling is in no hurry: the supervisor is woken for several."""
        self.waiting.append(e)
        config = self._machine.domains[e.domain].config
        if config.lag <= SCOPED_LAG or config.commits or len(self.waiting) >= REPORTS:
            self.flush()
        elif self.by == 0.0:
            self.by = time.monotonic() + REPORT_WITHIN

    def flush(self) -> None:
        """Tell the supervisor of all, first how long each and its exchanges took."""
        self.by = 0.0
        reports, self.waiting = self.waiting, []
        now = time.monotonic()
        times: dict[DomainKey, list[tuple[int, float]]] = {}
        delays: dict[DomainKey, list[tuple[int, float, float, int]]] = {}
        for report in reports:
            began = self.began.pop((report.domain, report.step), None)
            if began is not None:
                times.setdefault(report.domain, []).append((report.step, now - began))
            measured = self._delays.take(report.domain, report.step)
            if measured is not None:
                delays.setdefault(report.domain, []).append((report.step, *measured))
        self._send_up(
            *(StepTimes(domain, tuple(steps)) for domain, steps in times.items()),
            *(StepDelays(domain, tuple(steps)) for domain, steps in delays.items()),
            *reports,
        )

    def forget(self, domain: DomainKey) -> None:
        for key in [k for k in self.began if k[0] == domain]:
            del self.began[key]
        self._delays.forget(domain)
        self.waiting = [report for report in self.waiting if report.domain != domain]
        if not self.waiting:
            self.by = 0.0
