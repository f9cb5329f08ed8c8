"""Target: what workers say to a lane, as bytes and descriptors on its socket.

An input is the job's shape and a list of (chunk of bytes, how many descriptors come with it). It arrives between two
steps of a job; whoever cannot be read is told why and closed. No descriptor stays open.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import select
import socket
import stat
from typing import Any, Final

import msgspec

from gcproto import lane_messages, packed, states
from gcproto.channel import Channel
from gcserver.core import effects as fx
from gcserver.runtime.laneworkers import LaneWorkers, Worker, _decode_worker
from tests.fuzz import frames, lanes
from tests.fuzz.frames import expected
from tests.fuzz.lanes import JOB, KINDS, Pair, Shape
from tests.fuzz.registration import framed, stream
from tests.fuzz.tickets import ticket

_SAID: Final[tuple[packed.Message, ...]] = (
    lane_messages.Attach(JOB, 0, ticket(JOB, 0)), lane_messages.Attach(b"x" * 16, 1, ticket(b"x" * 16, 1)),
    lane_messages.Attach(JOB, 1, ticket(JOB, 0)), lane_messages.MapSection(0, 0, 0),
    lane_messages.Push(0, 1, (0,), False, 2), lane_messages.Push(0, 2, (0, 4096), True, 2),
    lane_messages.Push(0, 3, (0, 4096), True, 2),
    states.AskStates(0, 0, False, 0, 2), states.AskStates(0, 0, True, 0, 2), states.AskStates(0, 4096, False, 3, 9),
    states.GiveStates(0, 0, False, 0, 1024, 3, True, bytes(4096)),
    states.GiveStates(0, 8192, True, 8, 9, 3, True, bytes(4)),
)  # fmt: skip


def descriptors() -> int:
    """How many sockets are open, which is what comes with the bytes; mapped files close when they are freed."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    return found


class Doorbells(frames.LaneTarget):
    """Two lanes, and a worker of one that is fed."""

    name = "doorbells"

    def draw(self, rng: random.Random) -> bytes:
        # Once attached a connection is that worker's: another Attach ends it, and what follows is not looked at.
        attached = rng.random() < 0.8
        data = framed(packed.encode(_SAID[0])) if attached else b""
        data += stream(rng, _SAID[2:] if attached else _SAID)
        chunks: list[tuple[bytes, int]] = []
        while data:
            cut = rng.choice((len(data), len(data), rng.randrange(1, len(data) + 1)))
            chunks.append((data[:cut], rng.choice((0, 0, 0, 1, 64))))
            data = data[cut:]
        return msgspec.msgpack.encode((rng.randrange(len(KINDS)), chunks))

    def feed(self, data: bytes) -> str:
        kind, chunks = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[bytes, int]]])
        before = descriptors()
        outcome = _play(kind, chunks)
        assert descriptors() == before, "descriptors stay open"
        return outcome


def _play(kind: int, chunks: list[tuple[bytes, int]]) -> str:
    shape, pair = Shape(*KINDS[kind]), Pair()
    ours, theirs = socket.socketpair()
    try:
        pair.play(JOB, shape)
        process = pair.a.process
        workers = process.workers
        channel: Channel[Any] = Channel(theirs, _decode_worker, 0)
        workers._welcome(channel)
        worker = workers.connections[channel.fileno()]
        for chunk, count in chunks:
            if worker.channel.fileno() < 0:
                break
            _give(ours, chunk, count)
            workers.serve(worker, select.EPOLLIN)
        outcome = _outcome(pair, workers, worker)
        ours.close()
        if worker.channel.fileno() >= 0:
            workers.serve(worker, select.EPOLLIN)
        pair.end(JOB)
        workers.housekeeping()
        assert not workers.connections and not workers.waiting_maps and not workers.waiting_pushes
        assert pair.next(shape) == (expected(kind).next_outputs,) * 2
        return outcome
    finally:
        ours.close()
        theirs.close()
        pair.close()


def _give(sock: socket.socket, chunk: bytes, count: int) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()] * count))] if count else []
    # Longer than a socket takes at once: the rest would come with the next chunk, which is another input.
    sock.sendmsg([chunk[: 1 << 16]], ancillary)


def _outcome(pair: Pair, workers: LaneWorkers, worker: Worker) -> str:
    faults = pair.a.faults(JOB)
    assert set(faults) <= lanes.FAULTS, faults
    if faults:
        return faults[0]
    if worker.channel.fileno() < 0:
        return "closed"
    if workers.waiting_maps or workers.waiting_pushes:
        return "waits"
    return "pushed" if len(pair.a.heard(fx.ReportStep, JOB)) > lanes.STEPS else "taken"
