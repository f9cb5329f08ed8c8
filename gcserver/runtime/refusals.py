"""What a worker hears before the daemon closes its connection: by supervisor and lane alike.

What may live here: such messages, and sending them. What may not: refusals of a job (`gcserver.core`).

A connection that is closed without a word looks like a daemon that restarts: the worker would connect again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import Fault, MessageError


def unreadable(error: MessageError, joined: bool) -> Fault:
    """``joined``: the worker was part of a job."""
    return Fault(
        b"",
        "NotRegistered" if joined else "JoinRefused",
        f"the daemon cannot read what this worker sent ({error}) and closed its connection",
        phase="attach" if joined else "join",
        advice="install the same version of gradcomm for the daemon and its workers; if it is the same, report this",
    )


def tell(channel: Channel[Any], why: Fault) -> None:
    """Say ``why``, as far as the socket takes it now; whoever calls closes it next."""
    with contextlib.suppress(ChannelClosed):
        channel.send(why)
