"""Whether this node has the shared memory that new tensors take, and that the codecs of a new plan keep.

What may live here: what a job would need beyond what it has, beside what is free. What may not: the formula
(`memory.py`), taking memory (`blocks.py`), how members come to a plan (`gcserver.core.job_plans`).

Residuals are taken with the first step that needs them, where a shortage can only end the job. So a plan that would
take more than there is is refused before anybody uses it, and tensors when they are declared, with all that they will
come to need under the plan in force.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np

from gcproto.manifest import PAGE, Block, Section
from gcproto.messages import PlanText
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.core.plan import explain
from gcserver.runtime import memory
from gcserver.runtime.memory_parts import SHARED, listed, total
from gcserver.runtime.records import RECORD
from gcserver.runtime.tensors import chosen
from gcserver.values import human_size

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
#: At most what two versions of a state of two float32 an element, at both ends, and two payloads take of an element.
_STATES_AN_ELEMENT = 2 * 2 * 8 + 2 * 8


def no_space(state: Path, lanes: int, job: Job, domain: ControlDomain, section: Section) -> str:
    """Why the memory under ``state`` does not suffice for tensors that are declared; empty if it does."""
    free = free_bytes(state)
    ranks, members = domain.config.local_ranks, len(domain.config.members)
    # Counting many small blocks takes seconds; they are at most so many, and each takes at most so much.
    blocks = len(section.cuts) + 2 * members + section.nbytes // (256 << 10) + 1
    most = (ranks + 1) * section.nbytes + _STATES_AN_ELEMENT * section.elements + blocks * (ranks + 8) * PAGE
    if most + lanes * (2 << 20) <= free:
        return ""
    c = domain.config
    alone = msgspec.structs.replace(section, index=0)
    laid_out = c.space(lanes).append(alone)
    plan = job.plan(domain, job.proposal)
    choices = [explain(plan, alone, b, c.min_compress_bytes, members) for b in laid_out]
    parts = memory.of_domain([memory.Laid(alone, laid_out, choices)], memory.Share(members, c.me, ranks), lanes)
    need = total(parts)
    if need <= free:
        return ""
    names = section.tensors[0].describe() + (f" and {len(section.tensors) - 1} more" if section.tensors[1:] else "")
    return (
        f"{names} of {c.label} would take {human_size(need)} of shared memory ({listed(parts, SHARED)}), "
        f"and {human_size(free)} are free in {state}"
    )


def free_bytes(state: Path) -> int:
    """What can still be had in the file system of ``state``: its free space, or the memory behind it if less."""
    return min(shutil.disk_usage(state).free, available())


def available() -> int:
    """Bytes of memory that processes here may still take, by the machine and by the control group (version 2)."""
    found = []
    try:
        facts = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        found.append(sum(int(facts.get(name, "0 kB").split()[0]) for name in ("MemAvailable", "SwapFree")) << 10)
    except (OSError, ValueError):
        pass
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        found.append(max(0, limit - used + int(counts.get("inactive_file", 0))))
    except (OSError, ValueError):
        pass  # no limit ("max"), or no such file
    return min(found, default=1 << 62)


def no_room(state: Path, lanes: int, job: Job, text: PlanText) -> str:
    """Why the memory under ``state`` does not suffice for plan ``text``; empty if it does.

    Counts the states of blocks that have none yet, in the job's process groups as far as they are declared.
    """
    folder = state / "jobs" / job.id.hex()
    need = sum(memory.heap_bytes(_needed(folder, lanes, job, domain, text)) for domain in job.domains.values())
    if not need or need <= (free := free_bytes(state)):
        return ""
    return (
        f"its codecs keep {-(-need >> 20)} MiB of shared memory more, and {free >> 20} MiB are free in {state}; make "
        "that file system larger, or let fewer tensors be compressed with error feedback"
    )


def _needed(folder: Path, lanes: int, job: Job, domain: ControlDomain, text: PlanText) -> list[int]:
    """Sizes of the states that blocks of a domain come to have under plan ``text`` and do not have yet."""
    if domain.lossless:
        return []
    plan = job.compose(domain, text.version, text.rules)
    sizes = []
    for section, (blocks, choices) in zip(domain.sections, chosen(domain, plan, lanes), strict=True):
        if not any(c.codec.feedback or c.codec.owner_feedback for c in choices):
            continue
        have = _states(folder, lanes, domain, section.index, blocks)
        for block, choice in zip(blocks, choices, strict=True):
            theirs, owners = have[block.key]
            if not theirs:
                sizes.append(memory.states_of(choice.codec, section, block, False))
            if block.owner == domain.config.me and not owners:
                sizes.append(memory.states_of(choice.codec, section, block, True))
    return sizes


def _states(
    folder: Path, lanes: int, domain: ControlDomain, section: int, blocks: tuple[Block, ...]
) -> dict[int, tuple[bool, bool]]:
    """By key whether a block has states of its contributions, and of what it averages as an owner."""
    found = {block.key: (False, False) for block in blocks}
    for lane in range(lanes):
        try:
            content = (folder / f"{domain.config.domain:08x}.{lane}.records{section}").read_bytes()
        except FileNotFoundError:
            continue  # opened by no lane yet
        count = sum(b.lane == lane for b in blocks)
        if len(content) < count * RECORD.itemsize:
            continue  # a lane is about to make it, or was ended while it did
        for r in np.frombuffer(content, RECORD, count):
            found[int(r["key"])] = bool(r["residual_at"]), bool(r["owner_at"])
    return found
