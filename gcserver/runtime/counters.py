"""What a lane counts since it started: traffic with each peer, rounds of each job, what should not happen.

What may live here: the numbers and their message to the supervisor. What may not: what operators see of them
(`status.py`, `observe.py`).
"""

from __future__ import annotations

from typing import Final

from gcproto import wire
from gcproto.dtypes import DType
from gcproto.wire import Flag, FrameType, Header
from gcserver.core.events import DomainKey
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.lanelink import LaneStats, PeerTraffic
from gcserver.runtime.linkfit import Arrival

ITEMSIZE: Final = {int(d): d.itemsize for d in DType}


class Counters:
    """Numbers of one lane. ``names``: the peers it was told of; strangers get no numbers of their own."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.counts: dict[tuple[str, int], int] = {}
        #: per peer: bytes in, out, frames in, out, uncompressed bytes in, out
        self.traffic: dict[int, list[int]] = {}
        self.rounds: dict[bytes, int] = {}

    def measure(self, h: Header, peer: int, direction: int) -> None:
        """One frame from (direction 0) or to (1) a peer."""
        if peer not in self.names:
            return
        counted = self.traffic.get(peer)
        if counted is None:
            counted = self.traffic[peer] = [0] * 6
        counted[direction] += wire.HEADER_BYTES + h.payload_bytes
        counted[2 + direction] += 1
        if h.type is FrameType.DATA and not h.flags & Flag.SECOND:
            counted[4 + direction] += h.elements * ITEMSIZE.get(h.dtype, 0)

    def count(self, name: str, peer: int, value: int = 1) -> None:
        """Something that should not happen; of a peer that is not known it is counted as nobody's."""
        if peer not in self.names:
            peer = 0
        self.counts[name, peer] = self.counts.get((name, peer), 0) + value

    def stats(
        self, bytes_in: int, bytes_out: int, domains: dict[DomainKey, DomainMemory], arrivals: tuple[Arrival, ...] = ()
    ) -> LaneStats:
        arenas: dict[bytes, int] = {}
        for key, memory in domains.items():
            arenas[key[0]] = arenas.get(key[0], 0) + memory.nbytes
        counts = tuple((name, peer, value) for (name, peer), value in self.counts.items())
        peers = tuple(PeerTraffic(peer, *numbers) for peer, numbers in self.traffic.items())
        return LaneStats(
            bytes_in, bytes_out, tuple(self.rounds.items()), tuple(arenas.items()), counts, peers, arrivals
        )
