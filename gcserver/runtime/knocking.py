"""Who knocks at a socket that workers connect to: at the supervisor's and the lanes' alike.

What may live here: accepting connections, and who is let in. What may not: what workers say on them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from gcproto.channel import Channel
from gcproto.messages import Fault
from gcserver.runtime import refusals


def admit(
    listener: socket.socket,
    decode: Callable[[Any], Any],
    welcome: Callable[[Channel[Any]], None],
    refused: Callable[[Fault], None],
) -> OSError | None:
    """Hand every connection that waits to ``welcome``; a stranger is told why, which ``refused`` hears, and closed.

    Returns why no more can be accepted for now (no descriptors are left): whoever knocks then is served when there
    are some again.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            return error
        channel: Channel[Any] = Channel(sock, decode, 0)
        if channel.peer_uid() in (os.getuid(), 0):
            welcome(channel)
            continue
        why = refusals.stranger(channel.peer_uid())
        refused(why)
        refusals.tell(channel, why)
        channel.close()
