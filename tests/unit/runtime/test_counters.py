"""What a lane counts of its peers, and of strangers.

What may live here: tests of `gcserver/runtime/counters.py`. What may not: metrics (`admin/test_metrics.py`).
"""

from __future__ import annotations

from gcproto import wire
from gcproto.dtypes import DType
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.runtime.counters import Counters
from gcserver.runtime.lanelink import PeerTraffic

PEER, STRANGER = 7, 8


def data(flags: int = 0) -> Header:
    return Header(
        FrameType.DATA, Phase.CONTRIBUTION, flags=flags, dtype=int(DType.F16), elements=100, payload_bytes=30,
        sender=PEER, incarnation=1, link_seq=1,
    )  # fmt: skip


def test_a_second_exchange_is_traffic_but_no_further_gradient() -> None:
    counters = Counters()
    counters.names[PEER] = "b"
    counters.measure(data(), PEER, 0)
    counters.measure(data(int(Flag.SECOND)), PEER, 0)
    counters.measure(data(), PEER, 1)
    counters.measure(data(), STRANGER, 0)
    frame = wire.HEADER_BYTES + 30
    assert counters.stats(1, 2, {}).peers == (PeerTraffic(PEER, 2 * frame, frame, 2, 1, 200, 200),)


def test_strangers_share_one_number() -> None:
    counters = Counters()
    counters.names[PEER] = "b"
    for peer in (PEER, STRANGER, STRANGER + 1):
        counters.count("frames_refused", peer)
    counters.count("frames_refused", PEER, 3)
    assert set(counters.stats(0, 0, {}).counts) == {("frames_refused", PEER, 4), ("frames_refused", 0, 2)}
