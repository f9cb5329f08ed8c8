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
from gcserver.admin.catalogue import JOB, Series

#: From a push_pull of a few KiB on loopback to a checkpoint that everybody waits for, seconds.
STEP_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
#: Series beyond this many jobs at once are summed under the job "other".
MAX_JOBS: Final = 256

Direction = Literal["in", "out"]

# Each counter's creation time as a series of its own doubles what is scraped and tells nothing new.
prometheus_client.disable_created_metrics()


class Metrics:
    """All series of one daemon. Every method is cheap and none raises on an unknown job or peer.

    Jobs go by their label. A value that another process counts goes through :meth:`total`.
    """

    def __init__(self, version: str, node: str, protocol: int) -> None:
        self.registry = CollectorRegistry()
        self._reported: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        self._jobs: set[str] = set()
        self._waiting: dict[str, set[tuple[str, str]]] = {}

        def counter(series: Series) -> Counter:
            return Counter(series.name, series.about, series.labels, registry=self.registry)

        def gauge(series: Series) -> Gauge:
            return Gauge(series.name, series.about, series.labels, registry=self.registry)

        self._bytes = counter(catalogue.BYTES)
        self._frames = counter(catalogue.FRAMES)
        self._rounds = counter(catalogue.ROUNDS)
        self._steps = counter(catalogue.STEPS)
        self._errors = counter(catalogue.ERRORS)
        self._lane_restarts = counter(catalogue.LANE_RESTARTS)
        self._step_seconds = Histogram(
            catalogue.STEP_SECONDS.name, catalogue.STEP_SECONDS.about, catalogue.STEP_SECONDS.labels,
            buckets=STEP_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._residual = gauge(catalogue.RESIDUAL_NORM)
        self._waiting_seconds = gauge(catalogue.WAITING)
        self._plan_version = gauge(catalogue.PLAN_VERSION)
        self._peer_up = gauge(catalogue.PEER_UP)
        self._peer_rtt = gauge(catalogue.PEER_RTT)
        self._lane_ready = gauge(catalogue.LANE_READY)
        self._arena = gauge(catalogue.ARENA)
        self._audit_error = gauge(catalogue.AUDIT_ERROR)
        self._audits = counter(catalogue.AUDITS)
        self._expires = gauge(catalogue.EXPIRES)
        self._info = gauge(catalogue.INFO)
        self._info.labels(version, node, str(protocol)).set(1)
        for kind in catalogue.KINDS:
            self._errors.labels(kind)
        #: the counters :meth:`total` knows by name
        self._totals: dict[str, Counter] = {
            "bytes": self._bytes,
            "frames": self._frames,
            "rounds": self._rounds,
            "steps": self._steps,
            "errors": self._errors,
            "lane_restarts": self._lane_restarts,
        }

    # ---------------------------------------------------------------------------------------- counting
    def count_bytes(self, direction: Direction, kind: Literal["raw", "wire"], peer: str, value: int) -> None:
        """``value`` more bytes from or to a peer."""
        self._bytes.labels(direction, kind, peer).inc(value)

    def count_frames(self, direction: Direction, peer: str, value: int = 1) -> None:
        self._frames.labels(direction, peer).inc(value)

    def count_rounds(self, job: str, value: int = 1) -> None:
        self._rounds.labels(self._job(job)).inc(value)

    def count(self, kind: str, value: int = 1) -> None:
        """``value`` more errors of a kind (``bad_digest``, ``deadline``, ...)."""
        self._errors.labels(kind).inc(value)

    def lane_restarted(self) -> None:
        self._lane_restarts.inc()

    def observe_step(self, job: str, outcome: Literal["settled", "void"], seconds: float | None) -> None:
        """A step is over; ``seconds`` None when its beginning is not known (after a restart)."""
        job = self._job(job)
        self._steps.labels(job, outcome).inc()
        if seconds is not None:
            self._step_seconds.labels(job).observe(seconds)

    def total(self, name: str, source: str, value: float, **labels: str) -> None:
        """Counter ``name`` (``bytes``, ``frames``, ``rounds``, ``steps``, ``errors``, ``lane_restarts``) grows by what
        ``source`` (such as ``"lane0"``) has counted since its last report. A smaller value than before means that the
        source started anew, and counts in full. KeyError for another name, ValueError for other labels."""
        if JOB in labels:
            labels[JOB] = self._job(labels[JOB])
        key = (name, source, tuple(sorted(labels.items())))
        before = self._reported.get(key, 0.0)
        grown = value - before if value >= before else value
        self._reported[key] = value
        counter = self._totals[name]
        (counter.labels(**labels) if labels else counter).inc(grown)

    # ------------------------------------------------------------------------------------------ states
    def peer_up(self, peer: str, up: bool) -> None:
        self._peer_up.labels(peer).set(up)

    def peer_rtt(self, peer: str, seconds: float) -> None:
        self._peer_rtt.labels(peer).set(seconds)

    def lane_ready(self, lane: int, ready: bool) -> None:
        self._lane_ready.labels(str(lane)).set(ready)

    def plan_version(self, job: str, version: int) -> None:
        self._plan_version.labels(self._job(job)).set(version)

    def residual_norm(self, job: str, norm: float) -> None:
        self._residual.labels(self._job(job)).set(norm)

    def audited(self, job: str, error: float) -> None:
        """One more audit: the relative L2 error that it found."""
        self._audits.labels(self._job(job)).inc()
        self._audit_error.labels(self._job(job)).set(error)

    def arena_bytes(self, job: str, value: int) -> None:
        self._arena.labels(self._job(job)).set(value)

    def certificate_expires(self, certificate: Literal["node", "ca"], timestamp: float) -> None:
        """When it ends, in seconds of Unix time; of several CAs the one that ends first."""
        self._expires.labels(certificate).set(timestamp)

    def waiting(self, job: str, waits: Mapping[tuple[str, str], float]) -> None:
        """Whom a job waits for and for what, and for how many seconds; what it no longer waits for disappears."""
        job = self._job(job)
        for gone in self._waiting.get(job, set()) - waits.keys():
            self._waiting_seconds.remove(job, *gone)
        for (peer, wanted), seconds in waits.items():
            self._waiting_seconds.labels(job, peer, wanted).set(seconds)
        self._waiting[job] = set(waits)

    # --------------------------------------------------------------------------------------- forgetting
    def forget_job(self, job: str) -> None:
        """The job is over: its series go. Nothing happens when there are none."""
        if job not in self._jobs:
            return
        self.waiting(job, {})
        self._jobs.discard(job)
        self._waiting.pop(job, None)
        of_jobs = (
            self._rounds,
            self._steps,
            self._step_seconds,
            self._residual,
            self._plan_version,
            self._arena,
            self._audit_error,
            self._audits,
        )
        for metric in of_jobs:
            metric.remove_by_labels({JOB: job})
        for key in [k for k in self._reported if (JOB, job) in k[2]]:
            del self._reported[key]

    def _job(self, label: str) -> str:
        if label not in self._jobs:
            if len(self._jobs) >= MAX_JOBS:
                return "other"
            self._jobs.add(label)
            for outcome in ("settled", "void"):
                # From the start, as errors are: the first void step is an increase too.
                self._steps.labels(label, outcome)
        return label
