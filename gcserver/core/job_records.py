"""Whether the record of a job, the arbiter's decision on an epoch, can be followed.

What may live here: what is wrong with a record, in itself or for one node. What may not: how one comes about
(`gathering.py`, `epochs.py`), what else a node remembers of a job (`restoring.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from gcproto import modes, wire
from gcproto.manifest import MAX_TENSORS, PAGE
from gcproto.messages import MAX_RANKS, EpochDecided, Fault
from gcserver.core.control_config import ControlConfig
from gcserver.core.events import CodecChoice
from gcserver.core.job_faults import AGAIN
from gcserver.core.plan import unusable

JOB_BYTES = len(wire.NO_JOB)
#: So many epochs, of which one begins with a loss or a return, leave numbers for plans (`epochs.NUMBERS`).
MAX_EPOCH = 1 << 19
#: A partition travels in one frame.
MAX_PARTITION = 1 << 31
#: An epoch skips no more steps of a domain than one can have begun: a call on every tensor is one each.
MAX_SKIPPED = MAX_TENSORS


def unknown_job(m: EpochDecided, node: str) -> Fault:
    """What a peer is told whose record names a job that ``node`` should know and does not."""
    return Fault(
        m.job,
        "PeerLost",
        f"{node} does not know job {m.label!r}: it ended there, or its daemon restarted while the job was being formed",
        epoch=m.epoch,
        missing=(node,),
        advice=AGAIN,
    )


def misfit(m: EpochDecided) -> tuple[str, str] | None:
    """(kind, why) a job's record is none that any node can have decided, or None."""
    if m.world_size > MAX_RANKS:
        return "JoinRefused", f"the record of job {m.label!r} has {m.world_size} ranks; a job has at most {MAX_RANKS}"
    everyone = {(x.node, x.ranks) for members in (m.members, *m.lost) for x in members}
    ranks = [r for _, brought in everyone for r in brought]
    whole = sorted(ranks) == list(range(m.world_size)) if m.world_size == len(ranks) else False
    alike = len(everyone) == len({node for node, _ in everyone})
    if len(m.members) != len(m.nonces) or not whole or not alike or not all(r for _, r in everyone):
        return "JoinRefused", (
            f"the record of job {m.label!r} does not fit together: {len(m.members)} members, {len(m.nonces)} "
            f"nonces, {len(ranks)} ranks of {m.world_size}"
        )
    if len(m.job) != JOB_BYTES or not 0 < m.partition_bytes <= MAX_PARTITION or m.partition_bytes % PAGE:
        return "JoinRefused", (
            f"the record of job {m.label!r} has a number of {len(m.job)} bytes and partitions of "
            f"{m.partition_bytes}; expected {JOB_BYTES} and a positive multiple of {PAGE} up to {MAX_PARTITION}"
        )
    if not 0 < m.epoch <= MAX_EPOCH or m.min_compress_bytes < 0 or not 0 < m.deadline < inf:
        return "JoinRefused", (
            f"the record of job {m.label!r} has epoch {m.epoch}, min_compress_bytes {m.min_compress_bytes} and "
            f"deadline {m.deadline}; expected 1..{MAX_EPOCH}, 0 or more bytes and a time"
        )
    odd = [s for s in m.starts if not 0 <= s.committed <= s.settled <= s.committed + MAX_SKIPPED or s.epoch > m.epoch]
    if odd:
        return "JoinRefused", (
            f"the record of job {m.label!r}, epoch {m.epoch}, has an epoch begin where none can: {odd[0]}; expected "
            f"0 <= committed <= settled, at most {MAX_SKIPPED} steps apart"
        )
    why = "" if _one_after_another(m) else "a node is in it twice at a time, or before it came"
    if m.epoch != len(m.lost) + 1:
        why = f"of epoch {m.epoch} it says who left at the beginning of {len(m.lost)} after the first"
    return ("JoinRefused", f"the record of job {m.label!r} does not fit together: {why}") if why else None


def _one_after_another(m: EpochDecided) -> bool:
    """Whether every node was in the job once at a time, from an epoch on that there was."""
    here: dict[str, int] = {}
    for until, gone in enumerate((*m.lost, m.members), 2):
        for member in gone:
            if not max(here.get(member.node, 1), 1) <= member.since < until:
                return False
            here[member.node] = until
    return True


def why_unusable(
    m: EpochDecided, config: ControlConfig, resolve: Callable[[str], CodecChoice], no_controller: Callable[[str], str]
) -> tuple[str, str] | None:
    """(kind, why) a peer's record cannot be followed on this node, or None."""
    node = config.hello.node
    if wrong := misfit(m):
        return wrong
    if all(member.node != node for member in m.members):
        return None
    if m.on_loss == "fail" and m.epoch > 1:
        return "JoinRefused", f"the record of job {m.label!r} is of epoch {m.epoch}, and the first loss ends that job"
    if bad := unusable(m.rules, resolve):
        return "CodecError", f"{node} cannot run the rules of job {m.label!r}: {bad[1]}"
    if why := no_controller(m.controller) or modes.unknown(m.mode, m.quality):
        return "JoinRefused", f"{node} cannot steer job {m.label!r} as it should be: {why}"
    if why := config.no_policy(m.on_loss):
        return "JoinRefused", f"{node} cannot run job {m.label!r}: {why}"
    return None
