"""Whether this node has the shared memory that new tensors take, and that the codecs of a new plan keep.

What may live here: what a job would need beyond what it has, beside what is free. What may not: the formula
(`memory.py`), taking memory (`blocks.py`), how members come to a plan (`gcserver.core.job_plans`).

Residuals and retained payloads are taken with the first step that needs them, where a shortage can only end the job. So
a plan that would take more than there is is refused before anybody uses it, and tensors when they are declared, with
all that they will come to need under the plan in force.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from gcproto.manifest import PAGE, Block, Section
from gcproto.messages import PlanText
from gcproto.wire import Flag
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.core.plan import ALL, explain
from gcserver.runtime import memory
from gcserver.runtime.blocks import place, states_bytes
from gcserver.runtime.memory_parts import SHARED, listed, total
from gcserver.runtime.records import KEPT, KEPT_HEAD, RECORD, WORD
from gcserver.runtime.tensors import chosen
from gcserver.values import human_size

log = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
#: At most what two versions of a state of two float32 an element, at both ends, and two payloads take of an element.
_STATES_AN_ELEMENT = 2 * 2 * 8 + 2 * 8


@dataclass(frozen=True, slots=True)
class Places:
    """What a block has of its heap: float32 in a version of its states and of its owner's, bytes in the places of its
    retained payloads. ``both``: the aggregates of two exchanges of a round may be in them."""

    floats: int
    owners: int
    kept: tuple[int, ...]
    both: bool


NOTHING = Places(0, 0, (0,) * KEPT, False)


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
    try:
        parts = memory.of_domain([memory.Laid(alone, laid_out, choices)], memory.Share(members, c.me, ranks), lanes)
    except Exception:  # of a third party's codec: the lane that runs it ends the job, and says which it was
        log.exception("what %s takes cannot be counted, since a codec of its plan fails", c.label)
        return ""
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

    Counts states and retained payloads that blocks of the job's process groups, as far as they are declared, have no
    place for yet or too small a one.
    """
    folder = state / "jobs" / job.id.hex()
    try:
        need = sum(memory.heap_bytes(_needed(folder, lanes, job, domain, text)) for domain in job.domains.values())
    except Exception as error:
        # A third party's code may fail for sizes that resolving a plan does not ask about, and must not stop a daemon.
        log.exception("what plan %d keeps cannot be counted", text.version)
        return f"a codec of it fails to say how much it keeps: {type(error).__name__}: {error}"
    if not need or need <= (free := free_bytes(state)):
        return ""
    return (
        f"its codecs keep {-(-need >> 20)} MiB of shared memory more, and {free >> 20} MiB are free in {state}; make "
        "that file system larger, or let fewer tensors be compressed with error feedback or sent to everyone"
    )


def _needed(folder: Path, lanes: int, job: Job, domain: ControlDomain, text: PlanText) -> list[int]:
    """Sizes of what blocks of a domain come to ask their heaps for under plan ``text``, beyond what they have."""
    if domain.lossless:
        return []
    plan, me = job.compose(domain, text.version, text.rules), domain.config.me
    steered = (text.controller or job.record.controller) != "none"
    sizes: list[int] = []
    for section, (blocks, choices) in zip(domain.sections, chosen(domain, plan, lanes), strict=True):
        wanted = []
        for block, choice in zip(blocks, choices, strict=True):
            everyone = choice.scheme == ALL
            # Nobody averages for others what goes to everyone.
            owned = block.owner == me and not everyone
            theirs = memory.floats_of(choice.codec, section, block, False)
            owners = memory.floats_of(choice.codec, section, block, True) if owned else 0
            payloads = memory.retained_of(choice, section, block, me, steered)
            if theirs or payloads:
                wanted.append((block.key, theirs, owners, payloads, everyone))
        have = _places(folder, lanes, domain, section.index, blocks) if wanted else {}
        for key, theirs, owners, payloads, everyone in wanted:
            there = have.get(key, NOTHING)
            # What is too small is left where it is: nothing takes the old place (`DomainMemory.state`, `make_kept`).
            sizes += [states_bytes(n) for n, has in ((theirs, there.floats), (owners, there.owners)) if has < n]
            sizes += [KEPT_HEAD + max(n, 2 * has) for n, has in _matched(payloads, there, everyone) if has < n]
    return sizes


def _matched(payloads: tuple[int, ...], there: Places, everyone: bool) -> list[tuple[int, int]]:
    """(bytes of a payload, bytes of the place that it comes to).

    Two places are used in turn. Which of them has which of two exchanges depends on the steps before: the larger the
    larger. The first payload for ``everyone`` comes beside both aggregates of two exchanges, to a third place.
    """
    first, second, third = there.kept
    found = list(zip(sorted(payloads), sorted((first, second)), strict=False))
    return [*found, (payloads[0], third)] if everyone and there.both else found


def _places(
    folder: Path, lanes: int, domain: ControlDomain, section: int, blocks: tuple[Block, ...]
) -> dict[int, Places]:
    """What blocks of a section have, by key, as far as lanes have opened it."""
    found = {}
    for lane in range(lanes):
        stem = f"{domain.config.domain:08x}.{lane}"
        try:
            content = (folder / f"{stem}.records{section}").read_bytes()
        except FileNotFoundError:
            continue  # opened by no lane yet
        count = sum(b.lane == lane for b in blocks)
        if len(content) < count * RECORD.itemsize:
            continue  # a lane is about to make it, or was ended while it did
        records = np.frombuffer(content, RECORD, count)
        words = np.column_stack([records["residual_at"], records["owner_at"], records["kept_at"]])
        sizes = _sizes(folder / stem, {int(word) for word in words.flat})
        second = np.any((records["kept_step"] > 0) & (records["kept_flags"] & int(Flag.SECOND) > 0), axis=1)
        for key, row, both in zip(records["key"].tolist(), words.tolist(), second.tolist(), strict=True):
            floats, owners, *kept = (sizes.get(word, 0) for word in row)
            found[key] = Places(floats, owners, tuple(kept), both)
    return found


def _sizes(heap: Path, words: set[int]) -> dict[int, int]:
    """What is said at the head of the places that words stand for: float32 of states, bytes of payloads."""
    found: dict[int, int] = {}
    for chunk, theirs in groupby(sorted(words), lambda word: place(word)[0]):
        try:
            with open(f"{heap}.heap{chunk}", "rb") as file:
                heads = [(word, os.pread(file.fileno(), WORD.size, place(word)[1])) for word in theirs]
        except OSError:
            continue  # there is no such file: a block without a place, or a record that is damaged
        found.update((word, WORD.unpack(head)[0]) for word, head in heads if len(head) == WORD.size)
    return found
