"""The daemon's numbers for Prometheus, counted.

What may live here: the registry and plain methods that the supervisor calls. What may not: names and labels
(`catalogue.py`), HTTP (`exposition.py`), looking at the supervisor.

Labels are bounded: peers are configured, kinds and outcomes are ours, and a job's series go when the job does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gcserver.admin import catalogue
from gcserver.admin.catalogue import JOB, PEER, Series

#: From a push_pull of a few KiB on loopback to a checkpoint that everybody waits for, seconds.
STEP_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
#: What is counted of more jobs at once is summed under the job OTHER; states of these are not shown.
MAX_JOBS: Final = 256
OTHER: Final = "other"

# Each counter's creation time as a series of its own doubles what is scraped and tells nothing new.
prometheus_client.disable_created_metrics()


class Metrics:
    """All series of one daemon. Every method is cheap and none raises on an unknown job or peer.

    Jobs go by their label. A value that another process counts goes through :meth:`total`.
    """

    def __init__(self, version: str, node: str, protocol: int) -> None:
        self.registry = CollectorRegistry()
        self._reported: dict[tuple[Series, str, frozenset[tuple[str, str]]], float] = {}
        self._jobs: set[str] = set()
        self._waiting: dict[str, set[tuple[str, str]]] = {}
        self._counters = {s: Counter(s.name, s.about, s.labels, registry=self.registry) for s in _of("counter")}
        self._gauges = {s: Gauge(s.name, s.about, s.labels, registry=self.registry) for s in _of("gauge")}
        self._histograms = {
            s: Histogram(s.name, s.about, s.labels, buckets=STEP_BUCKETS, registry=self.registry)
            for s in _of("histogram")
        }
        self.set(catalogue.INFO, 1, version=version, node=node, protocol=str(protocol))
        for kind in catalogue.KINDS:
            self._counters[catalogue.ERRORS].labels(kind)

    # ---------------------------------------------------------------------------------------- counting
    def observe_step(self, job: str, outcome: Literal["settled", "void"], seconds: float | None) -> None:
        """A step is over; ``seconds`` None when its beginning is not known (after a restart)."""
        job = self._job(job)
        self._counters[catalogue.STEPS].labels(job, outcome).inc()
        if seconds is not None:
            self._histograms[catalogue.STEP_SECONDS].labels(job).observe(seconds)

    def audited(self, job: str, error: float) -> None:
        """One more audit: the relative L2 error that it found."""
        self._counters[catalogue.AUDITS].labels(self._job(job)).inc()
        self.set(catalogue.AUDIT_ERROR, error, training_job=job)

    def total(self, series: Series, source: str, value: float, **labels: str) -> None:
        """A counter grows by what ``source`` (such as ``"lane0"``) has counted since its last report. A smaller value
        than before means that the source started anew, and counts in full. KeyError for what is no counter, ValueError
        for other labels."""
        key = (series, source, frozenset(labels.items()))
        before = self._reported.get(key, 0.0)
        grown = value - before if value >= before else value
        if JOB in labels:
            labels[JOB] = self._job(labels[JOB])
        counter = self._counters[series]
        (counter.labels(**labels) if labels else counter).inc(grown)
        self._reported[key] = value

    # ------------------------------------------------------------------------------------------ states
    def set(self, series: Series, value: float, **labels: str) -> None:
        """What a gauge is now. KeyError for what is no gauge, ValueError for other labels."""
        gauge = self._gauges[series]
        if JOB not in labels or self._own(labels[JOB]):
            gauge.labels(**labels).set(value)

    def waiting(self, job: str, waits: Mapping[tuple[str, str], float]) -> None:
        """Whom a job waits for and for what, and for how many seconds; what it no longer waits for disappears."""
        if not self._own(job):
            return
        gauge = self._gauges[catalogue.WAITING]
        for gone in self._waiting.get(job, set()) - waits.keys():
            gauge.remove(job, *gone)
        for (peer, wanted), seconds in waits.items():
            gauge.labels(job, peer, wanted).set(seconds)
        self._waiting[job] = set(waits)

    # --------------------------------------------------------------------------------------- forgetting
    def forget_job(self, job: str) -> None:
        """The job is over: its series go. Nothing happens when there are none."""
        for key in [k for k in self._reported if (JOB, job) in k[2]]:
            del self._reported[key]
        if job not in self._jobs:
            return
        self._jobs.discard(job)
        self._waiting.pop(job, None)
        for series, metric in (*self._counters.items(), *self._gauges.items(), *self._histograms.items()):
            if JOB in series.labels:
                metric.remove_by_labels({JOB: job})

    def forget_peer(self, peer: str) -> None:
        """The peer is shown no longer: its series go. One that is back begins with what its lanes have counted."""
        for key in [k for k in self._reported if (PEER, peer) in k[2]]:
            del self._reported[key]
        for series, metric in (*self._counters.items(), *self._gauges.items()):
            if PEER in series.labels and JOB not in series.labels:
                metric.remove_by_labels({PEER: peer})

    def _job(self, label: str) -> str:
        """The value of a counter's label for a job."""
        return label if self._own(label) else OTHER

    def _own(self, label: str) -> bool:
        """Whether a job has series of its own; it gets them if there is room."""
        if label not in self._jobs and len(self._jobs) < MAX_JOBS:
            self._jobs.add(label)
            for outcome in ("settled", "void"):
                # From the start, as errors are: the first void step is an increase too.
                self._counters[catalogue.STEPS].labels(label, outcome)
        return label in self._jobs


def _of(kind: str) -> list[Series]:
    return [series for series in catalogue.SERIES if series.kind == kind]
