"""Who knocks at a socket that workers connect to: at the supervisor's and the lanes' alike.

What may live here: accepting connections, and who is let in. What may not: what workers say on them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from gcproto.channel import Channel
from gcproto.messages import Fault
from gcserver.runtime import refusals

#: Descriptors may become free again: for so long whoever knocks waits, then it is told that none are left, seconds.
FULL_FOR: Final = 2.0


class Door:
    """Accepts at one listening socket. ``welcome`` gets each connection; a stranger is told why and closed, and
    ``refused`` hears of it.

    One descriptor is held back: without it nobody could be told that there are no others.
    """

    def __init__(
        self,
        listener: socket.socket,
        decode: Callable[[Any], Any],
        welcome: Callable[[Channel[Any]], None],
        refused: Callable[[Fault], None],
    ) -> None:
        self._listener, self._decode, self._welcome, self._refused = listener, decode, welcome, refused
        self._spare: int | None = _reserve()
        #: since when no connection could be accepted
        self._full_since: float | None = None

    def admit(self) -> OSError | None:
        """Let in everybody who waits.

        Returns why no more can be accepted for now (no descriptors are left): ask again in a moment.
        """
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                self._full_since = None
                return None
            except OSError as error:
                return self._full(error)
            # Workers have none to send: the system closes those that come all the same.
            channel: Channel[Any] = Channel(sock, self._decode, descriptors=0)
            if channel.peer_uid() in (os.getuid(), 0):
                self._full_since = None
                self._welcome(channel)
            else:
                self._turn_away(channel, refusals.stranger(channel.peer_uid()))

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _turn_away(self, channel: Channel[Any], why: Fault) -> None:
        self._refused(why)
        refusals.tell(channel, why)
        channel.close()

    def _full(self, error: OSError) -> OSError:
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
        if now - self._full_since >= FULL_FOR:
            self._refuse_all(error)
        return error

    def _refuse_all(self, error: OSError) -> None:
        """Tell those who wait, one after the other, over the descriptor held back."""
        while True:
            if self._spare is not None:
                os.close(self._spare)
                self._spare = None
            try:
                sock, _ = self._listener.accept()
            except OSError:
                break
            self._turn_away(Channel(sock, self._decode, descriptors=0), refusals.full(error))
            self._spare = _reserve()
        if self._spare is None:
            self._spare = _reserve()


def _reserve() -> int | None:
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None
