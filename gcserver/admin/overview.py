"""What the dashboard shows of a daemon at a glance, as plain JSON: node, links, jobs, faults.

What may live here: pure functions from two looks at a daemon to that. What may not: looking (`dashboard.py`), what
takes asking lanes (`details.py`), how it is drawn (`page/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from gcserver.admin.catalogue import KINDS
from gcserver.admin.source import JobStatus, NodeStatus, PeerStatus, WaitingFor

#: Looks that lie further apart, seconds, say nothing of what happens now.
STALE: Final = 15.0
#: of a job's members; a page with more tells nobody anything
MOST_MEMBERS: Final = 256

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """What a daemon said at one moment. ``at`` on a clock that only goes on; ``date``: Unix time."""

    at: float
    date: float
    node: NodeStatus
    peers: tuple[PeerStatus, ...]
    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened between two looks. ``bad``: it should not happen."""

    date: float
    bad: bool
    text: str


def recent(before: Look | None, now: Look) -> Look | None:
    """``before``, unless nobody has watched since: what happened in between is then not what happens now."""
    return before if before is not None and now.at - before.at <= STALE else None


def overview(now: Look, before: Look | None, changes: Iterable[Change]) -> JSON:
    """One look, with rates since ``before``; None where there are none (nothing came before, a counter began anew)."""
    seconds = now.at - before.at if before is not None else 0.0
    peers_before = {p.name: p for p in before.peers} if before else {}
    jobs_before = {j.id: j for j in before.jobs if j.id} if before else {}
    return {
        "date": now.date,
        "node": _node(now.node),
        "links": [_link(p, peers_before.get(p.name), seconds) for p in now.peers],
        "jobs": [_job(j, jobs_before.get(j.id), seconds) for j in now.jobs],
        "faults": {
            "counts": [
                {"kind": kind, "count": count, "about": KINDS.get(kind, "").replace("`", "")}
                for kind, count in sorted(now.node.errors.items())
                if count
            ],
            "changes": [{"date": c.date, "bad": c.bad, "text": c.text} for c in changes],
        },
    }


def changes(before: Look, now: Look) -> list[Change]:
    """What happened in between, as lines for a person."""
    return [Change(now.date, bad, text) for bad, text in _happened(before, now)]


def _happened(before: Look, now: Look) -> Iterator[tuple[bool, str]]:
    if before.node.state != now.node.state:
        reason = f": {now.node.reason}" if now.node.reason else ""
        yield now.node.state.value in ("degraded", "stopping"), f"this node is {now.node.state.value}{reason}"
    lanes = {lane.index: lane for lane in before.node.lanes}
    for lane in now.node.lanes:
        was = lanes.get(lane.index)
        if was is not None and lane.restarts > was.restarts:
            yield True, f"lane {lane.index} died and was started again"
        elif was is not None and lane.state != was.state:
            yield lane.state != "ready", f"lane {lane.index} is {lane.state}"
    peers = {p.name: p for p in before.peers}
    for peer in now.peers:
        old = peers.get(peer.name)
        if old is None or old.state != peer.state:
            reason = f": {peer.reason}" if peer.reason else ""
            yield peer.state.value not in ("up", "connecting"), f"link to {peer.name} is {peer.state.value}{reason}"
    for kind, count in sorted(now.node.errors.items()):
        grown = count - before.node.errors.get(kind, 0)
        if grown > 0:
            yield True, f"{kind}: {grown} more"
    jobs = {j.id: j for j in before.jobs if j.id}
    for job in now.jobs:
        yield from _of_job(jobs.pop(job.id, None), job)
    for gone in jobs.values():
        yield False, f"job {gone.label} has left"


def _of_job(before: JobStatus | None, now: JobStatus) -> Iterator[tuple[bool, str]]:
    if not now.id:
        return
    if before is None:
        yield False, f"job {now.label} has begun, with {now.world_size} ranks"
        return
    if before.state != now.state:
        reason = f": {now.reason}" if now.reason else ""
        yield now.state.value in ("failed", "recovering"), f"job {now.label} is {now.state.value}{reason}"
    if before.epoch != now.epoch:
        yield True, f"job {now.label} is in epoch {now.epoch}: its members changed"
    if before.plan_version != now.plan_version:
        yield False, f"job {now.label} has plan {now.plan_version}"
    void = sum(d.steps_void for d in now.domains) - sum(d.steps_void for d in before.domains)
    if void > 0:
        yield True, f"job {now.label}: {void} void steps, gradients were not finite"


def _node(n: NodeStatus) -> JSON:
    return {
        "name": n.node,
        "state": n.state.value,
        "reason": n.reason,
        "version": n.version,
        "protocol": n.protocol_version,
        "uptime": n.uptime,
        "listen": n.listen,
        "arena_bytes": n.arena_bytes,
        "lanes": [
            {"index": lane.index, "state": lane.state, "cores": list(lane.cores), "restarts": lane.restarts}
            for lane in n.lanes
        ],
    }


def _link(p: PeerStatus, before: PeerStatus | None, seconds: float) -> JSON:
    return {
        "peer": p.name,
        "address": p.address,
        "state": p.state.value,
        "reason": p.reason,
        "since": p.since,
        "lanes": [
            {"lane": lane.lane, "state": lane.state.value, "reason": lane.reason, "since": lane.since}
            for lane in p.lanes
        ],
        "heard": p.last_heard,
        "rtt": p.rtt,
        "bytes_in": p.bytes_in,
        "bytes_out": p.bytes_out,
        "rate_in": _rate(p.bytes_in, before.bytes_in if before else None, seconds),
        "rate_out": _rate(p.bytes_out, before.bytes_out if before else None, seconds),
        "resent": p.frames_resent,
        "corrupt": p.frames_corrupt,
        "encrypted": p.encrypted,
    }


def _job(j: JobStatus, before: JobStatus | None, seconds: float) -> JSON:
    return {
        "id": j.id,
        "label": j.label,
        "state": j.state.value,
        "reason": j.reason,
        "epoch": j.epoch,
        "ranks": j.world_size,
        "members": [{"node": m.node, "ranks": len(m.ranks)} for m in j.members[:MOST_MEMBERS]],
        "step": j.step,
        "steps_rate": _rate(j.step, before.step if before else None, seconds),
        "plan": j.plan_version,
        "on_loss": j.on_loss,
        "domains": [
            {
                "label": d.label,
                "settled": d.steps_settled,
                "void": d.steps_void,
                "tensors": d.tensors,
                "elements": d.elements,
                "codec": d.codec,
            }
            for d in j.domains
        ],
        "waits": [
            *(_wait(w, "") for w in j.waiting_for),
            *(_wait(w, d.label) for d in j.domains for w in d.waiting_for),
        ],
    }


def _wait(w: WaitingFor, domain: str) -> JSON:
    return {"for": w.node, "wanted": w.wanted, "step": w.step, "seconds": w.since, "domain": domain}


def _rate(now: int, before: int | None, seconds: float) -> float | None:
    return (now - before) / seconds if before is not None and seconds > 0 and now >= before else None
