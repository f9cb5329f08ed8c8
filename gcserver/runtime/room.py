"""Whether this node has the shared memory that the codecs of a new plan keep.

What may live here: what blocks would need beyond what they have, beside what is free. What may not: taking memory
(`blocks.py`), how members come to a plan (`gcserver.core.job_plans`).

Residuals are taken with the first step that needs them, where a shortage can only end the job. So a plan that would
take more than there is is refused before anybody uses it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from gcproto.manifest import Block
from gcproto.messages import PlanText
from gcserver.codecs import parse
from gcserver.core.control_domain import ControlDomain
from gcserver.core.events import CodecChoice
from gcserver.core.job import Job
from gcserver.runtime.blocks import align
from gcserver.runtime.records import RECORD, STATES
from gcserver.runtime.tensors import chosen


def no_room(state: Path, lanes: int, job: Job, text: PlanText) -> str:
    """Why the memory under ``state`` does not suffice for plan ``text``; empty if it does.

    Counts the states of blocks that have none yet, in the job's process groups as far as they are declared.
    """
    folder = state / "jobs" / job.id.hex()
    need = sum(_needed(folder, lanes, job, domain, text) for domain in job.domains.values())
    if not need or need <= (free := shutil.disk_usage(state).free):
        return ""
    return (
        f"its codecs keep {-(-need >> 20)} MiB of shared memory more, and {free >> 20} MiB are free in {state}; make "
        "that file system larger, or let fewer tensors be compressed with error feedback"
    )


def _needed(folder: Path, lanes: int, job: Job, domain: ControlDomain, text: PlanText) -> int:
    if domain.lossless:
        return 0
    plan = job.compose(domain, text.version, text.rules)
    total = 0
    for section, (blocks, choices) in zip(domain.sections, chosen(domain, plan, lanes), strict=True):
        if not any(c.codec.feedback or c.codec.owner_feedback for c in choices):
            continue
        have = _states(folder, lanes, domain, section.index, blocks)
        for block, choice in zip(blocks, choices, strict=True):
            theirs, owners = have[block.key]
            if choice.codec.feedback and not theirs:
                total += _state_bytes(choice.codec, block)
            if choice.codec.owner_feedback and block.owner == domain.config.me and not owners:
                total += _state_bytes(choice.codec, block)
    return total


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
        for r in np.frombuffer(content, RECORD, sum(b.lane == lane for b in blocks)):
            found[int(r["key"])] = bool(r["residual_at"]), bool(r["owner_at"])
    return found


def _state_bytes(choice: CodecChoice, block: Block) -> int:
    """Two versions of what a codec keeps of a block; of a codec of matrices its residual, by far the most of it."""
    floats = block.elements if choice.whole else parse(choice.spec).state_floats(block.elements, len(block.bounds) - 1)
    return align(STATES.itemsize) + 2 * align(4 * max(floats, block.elements))
