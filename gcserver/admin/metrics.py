"""The daemon's numbers for Prometheus: what is counted, under which names and labels.

What may live here: the registry and plain methods that the supervisor calls. What may not: HTTP (`exposition.py`),
looking at the supervisor.

Labels are bounded: peers are configured, kinds and outcomes are ours, and a job's series go when the job does. Names
follow Prometheus' conventions (base units, ``_total`` for counters), which a test lets promtool judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"gradcomm_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"gradcomm_{name}", about, labels, registry=self.registry)

        self._bytes = counter(
            "bytes",
            "Gradient bytes from (in) and to (out) peers: on the wire, and raw, had they been uncompressed.",
            "direction", "kind", "peer",
        )  # fmt: skip
        self._frames = counter("frames", "Frames from (in) and to (out) peers.", "direction", "peer")
        self._rounds = counter("rounds", "Rounds (one partition in one step) finished on this node.", "job")
        self._steps = counter(
            "steps",
            "Steps of models (without one: calls) that settled, and steps whose inputs were discarded (void).",
            "job", "outcome",
        )  # fmt: skip
        self._errors = counter("errors", "What should not happen, by kind.", "kind")
        self._lane_restarts = counter("lane_restarts", "Lane processes started again after they died.")
        self._step_seconds = Histogram(
            "gradcomm_step_seconds", "From a step's first push to its settling.", ("job",),
            buckets=STEP_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._residual = gauge("residual_norm", "L2 norm of this node's residuals.", "job")
        self._waiting_seconds = gauge(
            "waiting_seconds", "For how long a peer has been waited for, and for what.", "job", "peer", "wanted"
        )
        self._peer_up = gauge("peer_up", "1 while heartbeats of the peer arrive.", "peer")
        self._arena = gauge("arena_bytes", "Shared memory held for gradients and averages.", "job")
        self._audit_error = gauge(
            "audit_error",
            "Relative L2 error of what the last audited step delivered, against the exact average.",
            "job",
        )
        self._audits = counter("audit", "Steps audited, as this node's workers reported them.", "job")
        self._expires = gauge(
            "certificate_expires_timestamp_seconds",
            "When the certificate by which operators know this node ends, and its CA.",
            "certificate",
        )
        self._info = gauge("build_info", "1; what runs is in the labels.", "version", "node", "protocol")
        self._info.labels(version, node, str(protocol)).set(1)
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
        if "job" in labels:
            labels["job"] = self._job(labels["job"])
        key = (name, source, tuple(sorted(labels.items())))
        before = self._reported.get(key, 0.0)
        grown = value - before if value >= before else value
        self._reported[key] = value
        counter = self._totals[name]
        (counter.labels(**labels) if labels else counter).inc(grown)

    # ------------------------------------------------------------------------------------------ states
    def peer_up(self, peer: str, up: bool) -> None:
        self._peer_up.labels(peer).set(up)

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
            self._arena,
            self._audit_error,
            self._audits,
        )
        for metric in of_jobs:
            metric.remove_by_labels({"job": job})
        for key in [k for k in self._reported if ("job", job) in k[2]]:
            del self._reported[key]

    def _job(self, label: str) -> str:
        if label not in self._jobs:
            if len(self._jobs) >= MAX_JOBS:
                return "other"
            self._jobs.add(label)
        return label
