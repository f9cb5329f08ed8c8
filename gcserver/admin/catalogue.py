"""Every series and every kind of error that a daemon has for Prometheus: the one list of names, units and labels.

What may live here: that list, and what each means in one line; `docs/metrics.md` is made of it. What may not: counting
(`metrics.py`), imports that cost anything.

Names follow Prometheus' conventions: base units, ``_total`` for counters. A run's label is ``training_job``: Prometheus
gives ``job`` to every target itself, and would push a label of that name aside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: what every name begins with
PREFIX: Final = "gradcomm_"
#: the label of a training run
JOB: Final = "training_job"
#: the label of another node
PEER: Final = "peer"


@dataclass(frozen=True, slots=True)
class Series:
    """``name`` is complete but for the endings of a histogram's parts; ``unit``: what a value is a number of."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    about: str

    @property
    def samples(self) -> tuple[str, ...]:
        """Names under which Prometheus stores it."""
        if self.kind == "histogram":
            return tuple(self.name + ending for ending in ("_bucket", "_sum", "_count"))
        return (self.name,)


def _counter(name: str, unit: str, about: str, *labels: str) -> Series:
    return Series(f"{PREFIX}{name}_total", "counter", unit, labels, about)


def _gauge(name: str, unit: str, about: str, *labels: str) -> Series:
    return Series(f"{PREFIX}{name}", "gauge", unit, labels, about)


BYTES: Final = _counter(
    "bytes", "bytes",
    "Gradient bytes from (in) and to (out) peers: on the wire, and raw, had they been uncompressed.",
    "direction", "kind", PEER,
)  # fmt: skip
FRAMES: Final = _counter("frames", "frames", "Frames from (in) and to (out) peers.", "direction", PEER)
ROUNDS: Final = _counter("rounds", "rounds", "Rounds (one partition in one step) finished on this node.", JOB)
STEPS: Final = _counter(
    "steps", "steps",
    "Steps of models (without one: calls) that settled, and steps whose inputs were discarded (void).",
    JOB, "outcome",
)  # fmt: skip
STEP_SECONDS: Final = Series(
    f"{PREFIX}step_seconds", "histogram", "seconds", (JOB,), "From a step's first push to its settling."
)
RESIDUAL_NORM: Final = _gauge("residual_norm", "L2 norm", "L2 norm of this node's residuals.", JOB)
WAITING: Final = _gauge(
    "waiting_seconds", "seconds", "For how long a peer or rank has been waited for, and for what; absent otherwise.",
    JOB, PEER, "wanted",
)  # fmt: skip
PLAN_VERSION: Final = _gauge("plan_version", "version", "Newest plan of a job; 0: the defaults hold.", JOB)
PLANNING: Final = _counter(
    "planning_cpu_seconds", "seconds",
    "CPU time of the planning process, by what for: start, codecs, errors, plans, studies.", "part",
)  # fmt: skip
ARENA: Final = _gauge("arena_bytes", "bytes", "Shared memory held for gradients and averages.", JOB)
AUDIT_ERROR: Final = _gauge(
    "audit_error", "ratio", "Relative L2 error of what the last audited step delivered, against the exact average.", JOB
)
AUDITS: Final = _counter("audit", "steps", "Steps audited, as this node's workers reported them.", JOB)
PEER_UP: Final = _gauge("peer_up", "0 or 1", "1 while heartbeats of the peer arrive, those of all its lanes too.", PEER)
PEER_LANE_UP: Final = _gauge(
    "peer_lane_up",
    "0 or 1",
    "1 while this lane hears the same lane of the peer; absent while it starts.",
    PEER,
    "lane",
)
PEER_RTT: Final = _gauge(
    "peer_rtt_seconds", "seconds", "Round trip of the newest heartbeat; absent before the first.", PEER
)
LANE_READY: Final = _gauge(
    "lane_ready", "0 or 1", "1 while the lane serves; 0: it starts, restarts or is silent.", "lane"
)
LANE_RESTARTS: Final = _counter("lane_restarts", "restarts", "Lane processes started again after they died.")
ERRORS: Final = _counter(
    "errors", "events", "What should not happen, by kind; every kind is there from the start.", "kind"
)
EXPIRES: Final = _gauge(
    "certificate_expires_timestamp_seconds", "Unix time, seconds",
    "When the certificate by which operators know this node ends, and its CA; absent without certificates.",
    "certificate",
)  # fmt: skip
INFO: Final = _gauge("build_info", "1", "1; what runs is in the labels.", "version", "node", "protocol")

#: in the order of `docs/metrics.md`
SERIES: Final[tuple[Series, ...]] = (
    BYTES, FRAMES, ROUNDS, STEPS, STEP_SECONDS, RESIDUAL_NORM, WAITING, PLAN_VERSION, PLANNING, ARENA, AUDIT_ERROR,
    AUDITS, PEER_UP, PEER_LANE_UP, PEER_RTT, LANE_READY, LANE_RESTARTS, ERRORS, EXPIRES, INFO,
)  # fmt: skip

#: Values of ``kind`` of errors. All are there, as 0, from the start: of a series that begins at 1 Prometheus sees no
#: increase.
KINDS: Final[dict[str, str]] = {
    "admin_denied": "calls to `node.admin` without the role they need",
    "admin_handshake_failed": "TLS connections to `node.admin` that led to no call",
    "audit_log_lost": "lines of the audit log that could not be written",
    "certificates_unusable": "changed certificates that could not be used",
    "connections_stalled": "connections to peers given up and made anew, since nothing arrived on them",
    "contributions_duplicate": "contributions that had been accumulated before",
    "credit_refused": "contributions for which a link had no account left",
    "frames_corrupt": "frames that were damaged on their way, and asked for again",
    "frames_duplicate": "frames that had come before",
    "frames_forged": "frames in the name of another node",
    "frames_refused": "frames beyond what is kept for domains that are not open here yet",
    "frames_resent": "frames sent again, because they were asked for or a peer restarted",
    "frames_stale": "frames of an earlier life, epoch or step",
    "frames_unexpected": "frames of which nothing here was waited for",
    "frames_unknown_sender": "frames of nodes that are not known here",
    "frames_unroutable": "frames that no connection would take",
    "frames_unusable": "frames that are whole and make no sense",
    "handshakes_failed": "connections to `node.listen` that showed no key, or ended before they did",
    "joins_refused": "joins of jobs beyond what is kept of jobs that form",
    "key_lists_unusable": "changes of `security.peers` that could not be used",
    "keys_refused": "keys that are not in `security.peers`",
    "lives_refused": "numbers of lives that are too far ahead of this clock",
    "metrics_denied": "requests to `node.metrics` without the role they need, or by way of somebody else's page",
    "metrics_handshake_failed": "TLS connections to `node.metrics` that failed",
    "nacks_sent": "times frames were asked for again",
    "nodes_admitted": "nodes that came back into a job that had lost them",
    "nodes_expelled": "nodes a job lost because their key was removed",
    "nodes_lost": "nodes a job went on without",
    "payloads_unusable": "payloads that could not be decoded",
    "peers_refused": "nodes nobody but their own hello told of, beyond what is kept",
    "pushes_unusable": "pushes of workers that make no sense",
    "tokens_refused": "workers with a job's name and not its token",
    "workers_refused": "workers that a lane or the supervisor sent away",
}
