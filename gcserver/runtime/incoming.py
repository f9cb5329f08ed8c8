"""Frames that arrive at a lane: looked at before its machine sees them.

What may live here: from what a socket gave to an event, and what is counted or said of frames that are none. What may
not: what a frame means (`gcserver.core`), sockets (`transport.py`), payloads' arithmetic (`executor.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gcproto import wire
from gcproto.packed import MessageError
from gcproto.wire import FrameError, FrameType
from gcserver.codecs import CodecError
from gcserver.core import events as ev

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess


def receive(lane: LaneProcess, prompt: bool) -> None:
    """Feed the lane what has arrived. ``prompt``: it waited for the first frame, which did not wait for it."""
    for raw, payload in lane.transport.receive():
        try:
            header = wire.parse(raw)
        except FrameError as error:
            if error.field in ("magic", "version", "length"):
                lane.counters.count("frames_refused", 0)
            if error.field == "version":
                lane.trouble_once(f"a peer speaks another protocol version: {error}")
                said = f"it speaks another protocol version: {error}"
                lane.links.foreign(wire.sender_hint(raw), said, time.monotonic())
            elif error.field == "digest":
                lane.feed(ev.FrameDamaged(None, wire.sender_hint(raw), str(error)))
            continue
        lane.counters.measure(header, header.sender, 0)
        lane.arrivals.on_frame(header.sender, header.payload_bytes, time.monotonic(), prompt)
        prompt = False
        try:
            wire.check_payload(header, payload)
        except FrameError as error:
            lane.feed(ev.FrameDamaged(header, header.sender, str(error)))
            continue
        if header.type is not FrameType.DATA:
            try:
                lane.feed(ev.FrameReceived(header, None, bytes(payload) if payload is not None else b""))
            except MessageError as error:
                lane.counters.count("frames_refused", header.sender)
                lane.trouble_once(f"from {lane.counters.names.get(header.sender, hex(header.sender))}: {error}")
            continue
        try:
            lane.executor.check(header, payload)
        except (CodecError, ValueError) as error:
            lane.feed(ev.Unusable(header, str(error)))
            continue
        except Exception as error:  # a third party's code
            lane.feed(ev.Unusable(header, f"checking it failed: {type(error).__name__}: {error}"))
            continue
        handle = lane.executor.handles.add(payload) if payload is not None and len(payload) else None
        lane.feed(ev.FrameReceived(header, handle))
