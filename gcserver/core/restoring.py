"""Whether what a restarted daemon finds of a job can be what it wrote.

What may live here: that question. What may not: taking the job up (`control.py`, `job.py`), files (`gcserver.runtime`).

A daemon that took up what does not fit together would fail over it, be started again, and fail again.
"""

from __future__ import annotations

from itertools import pairwise

from gcproto.manifest import ManifestError, Section, check_section
from gcproto.messages import DeclareDomain
from gcserver.core.control_domain import LOSSLESS
from gcserver.core.control_events import DomainLedger, JobMemory
from gcserver.core.declarations import MAX_DOMAIN
from gcserver.core.job_records import misfit
from gcserver.core.plan_modes import no_words

#: Steps and plan numbers beyond these are not counted to by any job.
MAX_STEP = 1 << 62


def damage(memory: JobMemory, ledgers: tuple[DomainLedger, ...], node: str) -> str:
    """What of a job's memory cannot be, on ``node``; empty if all of it can."""
    record = memory.record
    if bad := misfit(record):
        return bad[1]
    mine = next((m.ranks for m in record.members if m.node == node), None)
    if mine is None or not set(memory.ranks) <= set(mine):
        return f"ranks {memory.ranks} of {node}, which has {mine}"
    if not (lost := {name for name, _ in memory.lost}) <= {m.node for m in record.members} - {node}:
        return f"the loss of {', '.join(sorted(lost))}, which are not all other members"
    known = {0, *(p.version for p in memory.plans)}
    if memory.proposal not in known or not 0 <= memory.numbered < 1 << 32:
        return f"proposal {memory.proposal} of plans {sorted(known)}, {memory.numbered} ever numbered"
    if why := no_words(memory.said):
        return f"what was said of its plans: {why}"
    # Whoever could settle a step under a plan knew its text, and from then on that number is the least ever given.
    highest = max(memory.numbered, memory.proposal, *known)
    numbers = [declared.domain for declared, _ in memory.domains]
    if len(set(numbers)) != len(numbers) or len(ledgers) != len(numbers):
        return f"process groups {numbers} and {len(ledgers)} ledgers"
    for (declared, sections), ledger in zip(memory.domains, ledgers, strict=True):
        why = _declared(declared, sections, record.world_size, mine) or _ledger(declared, ledger, known, highest)
        if why:
            return f"process group {declared.domain}: {why}"
    return ""


def _declared(declared: DeclareDomain, sections: tuple[Section, ...], world: int, mine: tuple[int, ...]) -> str:
    ranks = set(declared.ranks)
    if not 0 <= declared.domain <= MAX_DOMAIN or len(ranks) != len(declared.ranks) or not ranks & set(mine):
        return f"ranks {declared.ranks}"
    if any(not 0 <= r < world for r in ranks):
        return f"ranks {declared.ranks} of {world}"
    for index, section in enumerate(sections):
        try:
            check_section(section, declared.whole)
        except ManifestError as error:
            return str(error)
        if section.index != index:
            return f"section {section.index} in place of {index}"
    return ""


def _ledger(declared: DeclareDomain, ledger: DomainLedger, known: set[int], highest: int) -> str:
    rising = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(ledger.switches))
    plans = [plan for _, plan in ledger.switches]
    steps = (ledger.settled, ledger.ready, *(first for first, _ in ledger.switches))
    if max(steps) >= MAX_STEP or not rising:
        return f"{ledger.settled} steps settled, plans from steps {ledger.switches}"
    # Of a lossless domain texts may be forgotten, numbers not.
    if (declared.codec != LOSSLESS and not set(plans) <= known) or max(plans, default=0) > highest:
        return f"plans {plans} in its ledger, {sorted(known)} in its memory, {highest} ever numbered"
    return ""
