"""What workers declare, and how members agree on it: process groups (domains) and their tensors (sections).

What may live here: what makes a declaration wrong, offers between members, opening an agreed section. What may not:
the memory layout of sections (`gcproto.manifest`), steps.
"""

from __future__ import annotations

from gcproto import messages, modes
from gcproto.manifest import ManifestError, Section, check_section, difference
from gcproto.messages import DeclareDomain, OfJob, SectionAgreed, SectionList, SectionOffer
from gcserver.core import job_plans, resuming, settling
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import ControlEffect, OpenSection, Tell, ToLane
from gcserver.core.early_messages import EarlyMessages
from gcserver.core.job import Job
from gcserver.core.job_faults import NO_SPACE
from gcserver.core.plan import excluded

#: A domain's number has 32 bits in a frame header.
MAX_DOMAIN = 2**32 - 1
#: Where a codec of a checkpoint is not to be had.
ELSEWHERE = "run a release that knows it on every node, or give the model another `compression`"


def declare_domain(job: Job, rank: int, declared: DeclareDomain) -> list[ControlEffect]:
    """A local rank declares a process group; the first to do so opens it on the lanes."""
    known = job.domains.get(declared.domain)
    if known is not None:
        if known.declared_as == declared:
            return []
        return job.fault(
            "TensorMismatch", f"rank {rank} declares process group {declared!r}, another rank {known.declared_as!r}"
        )
    if not 0 <= declared.domain <= MAX_DOMAIN:
        return job.fault(
            "TensorMismatch",
            f"rank {rank} declares process group {declared.label!r} as domain {declared.domain}; domain numbers "
            f"are within 0..{MAX_DOMAIN}",
        )
    bad = [r for r in declared.ranks if not 0 <= r < job.record.world_size]
    if bad or rank not in declared.ranks or len(set(declared.ranks)) != len(declared.ranks):
        return job.fault(
            "TensorMismatch",
            f"rank {rank} declares a process group of ranks {declared.ranks}; "
            f"ranks must be distinct, within 0..{job.record.world_size - 1} and include it",
        )
    try:
        excluded(declared.exclude, job.resolve)
        wrong = modes.unknown("", declared.quality)
    except ValueError as error:
        wrong = f"excludes tensors from compression: {error}"
    if wrong:
        return job.fault("TensorMismatch", f"rank {rank} {wrong}", phase="declare")
    if declared.codec:
        try:
            codec = job.resolve(declared.codec)
        except ValueError as error:
            return job.fault("CodecError", f"rank {rank}: {error}")
        if codec.whole and not declared.whole:
            return job.fault(
                "CodecError",
                f"rank {rank}: {codec.spec} takes whole matrices, and blocks of {declared.label!r} may cut them",
                phase="declare",
                advice=job_plans.DECLARE_WHOLE,
            )
    if why := resuming.why_not(declared, job.resolve, job.no_controller):
        return job.fault(
            "CodecError", f"rank {rank} resumes {declared.label!r}: {why}", phase="declare", advice=ELSEWHERE
        )
    domain = job.add_domain(declared)
    return [job.save(), *settling.catch_up(domain, 0), *job.open_domain(domain, None)]


def declare_section(job: Job, rank: int, message: messages.DeclareSection) -> list[ControlEffect]:
    """A local rank declares tensors; once all local ranks of the domain have, they are offered to the members."""
    domain = job.domains.get(message.domain)
    if domain is None or rank not in domain.ranks:
        return job.fault("TensorMismatch", f"rank {rank} declares tensors of a process group it is not in")
    section, index = message.section, message.section.index
    try:
        check_section(section, domain.config.whole)
    except ManifestError as error:
        return job.fault("TensorMismatch", f"rank {rank}: {error}")
    if index < len(domain.sections):
        if domain.sections[index] != section:
            return _differs(job, domain.sections[index], section, "the agreed section", f"rank {rank}")
        connection = job.workers.get(rank)
        agreed = SectionAgreed(message.domain, index, domain.digest(section))
        return [] if connection is None else [Tell(connection, agreed)]
    declared = domain.declared.setdefault(index, {})
    for other, theirs in declared.items():
        if theirs != section:
            return _differs(job, section, theirs, f"rank {rank}", f"rank {other}")
    if cut := job_plans.cut(job, domain, section, job.proposal):
        return job.fault("CodecError", f"rank {rank}: {cut}", phase="declare", advice=job_plans.DECLARE_WHOLE)
    declared[rank] = section
    domain.declared_for.setdefault(index, {})[rank] = message.step
    if len(declared) < len(domain.ranks):
        return []
    if why := job.no_space(job, domain, section):
        key = domain.declared_as.domain
        return job.fault("OutOfMemory", f"{job.node}: {why}", domain=key, phase="declare", advice=NO_SPACE)
    domain.offered.add(index)
    for member in domain.config.members:
        if member.name != job.node:
            _offer(job, domain, index, member.name)
    return _agree(job, domain, index)


def _differs(job: Job, mine: Section, theirs: Section, who: str, other: str) -> list[ControlEffect]:
    return job.fault(
        "TensorMismatch",
        f"{difference(mine, theirs)} (here = {who}, there = {other})",
        phase="declare",
        advice="every rank must declare the same tensors in the same order",
    )


def _offer(job: Job, domain: ControlDomain, index: int, node: str) -> None:
    section = domain.own(index)
    if section is not None:
        digest = domain.digest(section)
        step = min(domain.declared_for.get(index, {}).values(), default=0)
        job.tell_members(SectionOffer(job.id, domain.declared_as.domain, index, digest, step), node)


def on_offer(job: Job, node: str, offer: SectionOffer, early: EarlyMessages[OfJob]) -> list[ControlEffect]:
    """A member has declared a section; ``early`` keeps what is offered of a domain nobody declared here yet."""
    domain = job.domains.get(offer.domain)
    if offer.index < 0:
        return job.fault("TensorMismatch", f"{node} offers tensors as section {offer.index}; sections start at 0")
    if domain is None:
        early.keep(node, offer)
        return []
    domain.offers.setdefault(offer.index, {})[node] = offer.digest
    domain.offered_for.setdefault(offer.index, {})[node] = offer.step
    if offer.index < len(domain.sections):
        domain.offered.add(offer.index)
    return _agree(job, domain, offer.index)


def _agree(job: Job, domain: ControlDomain, index: int) -> list[ControlEffect]:
    """Open section ``index`` once all members offered the same; on a difference send the whole list."""
    mine = domain.own(index)
    if mine is None or index not in domain.offered:
        return []
    digest = domain.digest(mine)
    offers = domain.offers.get(index, {})
    rank = min(domain.ranks)
    different = [n for n, d in offers.items() if d != digest]
    for node in different:
        job.tell_members(SectionList(job.id, domain.declared_as.domain, domain.declared_as, mine, rank), node)
    if different or index < len(domain.sections) or len(offers) < len(domain.config.members) - 1:
        return []
    if index != len(domain.sections):
        return []
    domain.agreed(index, mine)
    out: list[ControlEffect] = [
        job.save(),
        ToLane(OpenSection(domain.config.id, mine)),
        *job.tell_workers(SectionAgreed(domain.declared_as.domain, index, digest), domain.ranks),
    ]
    # The next section may have been agreed before this one's turn came.
    return out + _agree(job, domain, index + 1)


def agree_again(job: Job) -> list[ControlEffect]:
    """Members are gone: sections that waited for their word alone are agreed."""
    out: list[ControlEffect] = []
    for domain in job.domains.values():
        out.extend(_agree(job, domain, len(domain.sections)))
    return out


def on_list(job: Job, node: str, theirs: SectionList) -> list[ControlEffect]:
    """A member found that our offer differs from what it declared: end the job with the first difference."""
    domain = job.domains.get(theirs.domain)
    try:
        check_section(theirs.section)
    except ManifestError as error:
        return job.fault("TensorMismatch", f"rank {theirs.rank} on {node}: {error}")
    mine = domain.own(theirs.section.index) if domain is not None else None
    if domain is None or mine is None:
        return []
    here, there = f"rank {min(domain.ranks)} on {job.node}", f"rank {theirs.rank} on {node}"
    if domain.declared_as != theirs.declared:
        return job.fault(
            "TensorMismatch",
            f"process groups differ: {domain.declared_as!r} ({here}), {theirs.declared!r} ({there})",
        )
    return _differs(job, mine, theirs.section, here, there)


def resend(job: Job, node: str) -> None:
    """Offer everything again to a peer that is a new process."""
    for domain in job.domains.values():
        for index in domain.offered:
            _offer(job, domain, index, node)
