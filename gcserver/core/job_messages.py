"""Which message of a member is whose business in a job.

What may live here: the dispatch, also of messages that came too early for it. What may not: what the messages do.
"""

from __future__ import annotations

from collections.abc import Mapping

from gcproto import messages
from gcproto.epoch_messages import StepReady
from gcproto.messages import EpochDecided, OfJob
from gcserver.core import admission, declarations, epochs, job_plans
from gcserver.core.control_events import ControlEffect, Log
from gcserver.core.early_messages import EarlyMessages
from gcserver.core.job import Job
from gcserver.core.job_faults import abroad


def take(jobs: Mapping[bytes, Job], node: str, m: OfJob, early: EarlyMessages[OfJob]) -> list[ControlEffect]:
    """A message about a job; one about a job that is not known yet is kept."""
    if (job := jobs.get(m.job)) is not None:
        return on_message(job, node, m, early)
    if not isinstance(m, messages.Fault):
        early.keep(node, m)
    return []


def replay(jobs: Mapping[bytes, Job], early: EarlyMessages[OfJob]) -> list[ControlEffect]:
    """A job or a domain is new: what came before it. What is still too early stays."""
    out: list[ControlEffect] = []
    for node, m in early.take():
        out += take(jobs, node, m, early)
    return out


def on_message(job: Job, node: str, m: OfJob, early: EarlyMessages[OfJob]) -> list[ControlEffect]:
    """A message about a job from one of its members; one of a job that has ended is answered with its end. Nobody else
    has a say in it."""
    if node not in job.others and epochs.departed(job, node):
        job.tell_members(job.record, node)
        return []
    if node not in job.others:
        return [Log("error", f"{node} sent {type(m).__name__} of job {job.record.label}, which is not its business")]
    if isinstance(m, messages.Fault):
        if epochs.stale(job, node, m.epoch):
            return []
        alone = job.commits and m.kind == "PeerLost" and m.missing == (node,)
        return epochs.lose(job, node, m.message) if alone else job.on_fault(m)
    if job.ended is not None:
        job.tell_members(abroad(job.ended, job.record, job.node), node)
        return []
    if isinstance(m, messages.SectionOffer):
        return declarations.on_offer(job, node, m, early)
    if isinstance(m, messages.SectionList):
        return declarations.on_list(job, node, m)
    if isinstance(m, StepReady) and m.domain not in job.domains:
        early.keep(node, m)
        return []
    return epochs.on_message(job, node, m)


def on_record(job: Job, node: str, record: EpochDecided) -> list[ControlEffect]:
    """An epoch was decided; ``node`` said so, or the arbiter (empty). Who came in with it says to each member again
    what that could not take before it was there too."""
    out = epochs.on_record(job, node, record)
    came = {m.node for m in record.arrivals}
    if job.ended is None and record.epoch == job.record.epoch and job.node in came and node and node not in came:
        resend(job, node)
    return out


def on_peer_up(job: Job, node: str, lost_memory: bool) -> list[ControlEffect]:
    """A node is there, or there again as a new process, whose workers have yet to say that they wait."""
    job.applicants.pop(node, None)
    if job.ended is not None:
        job.tell_members(abroad(job.ended, job.record, job.node), node)
    if job.ended is not None or node not in job.others:
        return []
    why = f"{node} came back without its memory (the host was restarted)"
    out = epochs.lose(job, node, why) if lost_memory else []
    resend(job, node)
    return out


def resend(job: Job, node: str) -> None:
    """A member is a new process: say everything again that it may not know."""
    admission.introduce(job, node)
    job.resend(node)
    declarations.resend(job, node)
    job_plans.resend(job, node)
    epochs.resend(job, node)
