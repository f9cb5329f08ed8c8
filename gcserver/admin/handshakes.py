"""TLS connections that came to nothing, counted.

What may live here: that count. What may not: TLS.

gRPC tells a server of a connection that begins, and of calls; not of one that it turned away because there was no
certificate, an expired one or one of another CA. So what began and led to no call is counted.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

#: A connection that has led to no call for so long counts as refused, seconds.
SETTLED: Final = 10.0
#: Of so many connections it is remembered that they began; a flood of more is not counted whole.
MAX_BEGUN: Final = 1 << 16
#: Of so many peers it is remembered that their connection led to a call.
MAX_PEERS: Final = 1024


class Handshakes:
    """Each that begins is matched by the first call of a new peer, or counted by ``refused`` once it is too old."""

    def __init__(self, refused: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._refused = refused
        self._clock = clock
        self._began: deque[float] = deque(maxlen=MAX_BEGUN)
        self._met: OrderedDict[str, None] = OrderedDict()

    def began(self) -> None:
        """From any thread."""
        self._began.append(self._clock())

    def called(self, peer: str) -> None:
        """A call has come from ``peer``, an address that names one connection."""
        if peer in self._met:
            self._met.move_to_end(peer)
            return
        self._met[peer] = None
        if len(self._met) > MAX_PEERS:
            self._met.popitem(last=False)
        if self._began:
            self._began.popleft()

    def settle(self) -> None:
        """Count those that are too old."""
        while self._began and self._clock() - self._began[0] >= SETTLED:
            self._began.popleft()
            self._refused()
