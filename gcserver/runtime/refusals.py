"""What a worker hears before the daemon closes its connection: by supervisor and lane alike.

What may live here: such messages, and sending them. What may not: refusals of a job (`gcserver.core`).

A connection that is closed without a word looks like a daemon that restarts: the worker would connect again.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import Fault
from gcproto.packed import MessageError
from gcserver.core.job_faults import AGAIN
from gcserver.runtime import shortage


def unreadable(error: MessageError, joined: bool) -> Fault:
    """``joined``: the worker was part of a job."""
    return Fault(
        b"",
        "NotRegistered" if joined else "JoinRefused",
        f"the daemon cannot read what this worker sent ({error}) and closed its connection",
        phase="attach" if joined else "join",
        advice="install the same version of gradcomm for the daemon and its workers; if it is the same, report this",
    )


def no_ticket(job: bytes, rank: int) -> Fault:
    """To whoever names a job and rank without having registered as that."""
    return Fault(
        job,
        "NotAuthorised",
        f"this process did not register as rank {rank} of the job it names",
        phase="attach",
        advice=f"call gcclient.init() first; if this worker did, the daemon has lost its memory: {AGAIN}",
    )


def out_of_order(job: bytes, what: str) -> Fault:
    """To a worker that says what cannot come from a gcclient."""
    return Fault(
        job,
        "NotRegistered",
        f"the daemon closed this worker's connection: {what}",
        phase="attach",
        advice="install the same version of gradcomm for the daemon and its workers; if it is the same, report this",
    )


def stranger(uid: int) -> Fault:
    """To a worker of another user, should the socket's permissions have let it in."""
    return Fault(
        b"",
        "NotAuthorised",
        f"only workers of uid {os.getuid()} and root may connect to this daemon, this one is of uid {uid}",
        phase="join",
        advice="run the worker as the daemon's user, or start a daemon as this one and set GC_NODE_SOCKET",
    )


def full(error: OSError) -> Fault:
    """To a worker whose connection can only be accepted to be closed: this process may open nothing more."""
    kind, advice = shortage.kind_of(error)
    why = f"the daemon cannot serve another worker: {shortage.text_of(error)}"
    return Fault(b"", kind, why, phase="attach", advice=advice)


def unadmitted(node: str, why: str) -> Fault:
    """To a worker of a job with nodes whose keys are not admitted here."""
    return Fault(
        b"",
        "NotAuthorised",
        f"the daemon of {node} does not admit all nodes of this job: {why}",
        phase="join",
        advice="run all daemons with keys or none, and give all the same up to date security.peers; private daemons: "
        "the same GC_JOB_SECRET on all machines",
    )


def tell(channel: Channel[Any], why: Fault) -> None:
    """Say ``why``, as far as the socket takes it now; whoever calls closes it next."""
    with contextlib.suppress(ChannelClosed):
        channel.send(why)
