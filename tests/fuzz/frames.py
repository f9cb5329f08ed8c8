"""Target: frames to a lane, in the middle of a job of two nodes.

An input is a list of (before which genuine frame, header, payload), the job's shape first. Each meets two new lanes.
Whatever comes of the hostile frames is a counted refusal or a fault of a documented kind; outputs that are delivered
are exact unless a frame with a true digest was among them, which a member may send; the next job, with a new life of
the peer, is exact in any case.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

import msgspec

from gcproto import messages, packed, wire
from gcproto.records import replace
from gcproto.wire import FrameError, FrameType, Header
from tests.fuzz import lanes, mutate
from tests.fuzz.lanes import JOB, KINDS, NEXT_JOB, NODES, Pair, Shape

LAST: Final = 2**64 - 1
_UNNUMBERED: Final = (
    messages.Hello("b", "tcp://b:1", 1, 0, 1, "fuzz"), messages.Refuse("no"), messages.Nack((1, 2, 3)),
    messages.Beat(3, ((JOB, 0, 1, 5),), ((JOB, 0, 4096),), 1.0, 2.0, 0.5),
)  # fmt: skip
_TYPES: Final = (FrameType.HELLO, FrameType.REFUSE, FrameType.NACK, FrameType.HEARTBEAT)


@lru_cache(maxsize=len(KINDS))
def expected(kind: int) -> lanes.Undisturbed:
    """How the job of this kind goes undisturbed."""
    return lanes.undisturbed(Shape(*KINDS[kind]))


def hostile(rng: random.Random, genuine: tuple[lanes.Frame, ...]) -> lanes.Frame:
    """One frame of a peer gone wrong, or of somebody who says to be it."""
    raw, payload = rng.choice(genuine)
    body = payload or b""
    kind = rng.randrange(12)
    if kind == 0:
        return mutate.spoil(rng, raw, rng.choice(genuine)[0]), payload
    if kind == 1:
        return raw, mutate.spoil(rng, body, rng.choice(genuine)[1] or b"")
    if kind == 2:
        return raw, rng.choice(genuine)[1]
    if kind == 3:
        return raw, payload
    header = wire.parse(raw)
    if kind == 4:
        which = rng.randrange(len(_TYPES))
        body = packed.encode(_UNNUMBERED[which])
        header = Header(_TYPES[which], sender=NODES[1], incarnation=200, to_incarnation=100)
        return mutate.sealed(mutate.header(rng, header) if rng.random() < 0.3 else header, mutate.packed(rng, body))
    if kind < 8:
        header = mutate.header(rng, header)
        if header.type is not FrameType.DATA and body and rng.random() < 0.5:
            body = mutate.packed(rng, body)
        return mutate.sealed(header, body, rng)
    # As it would come next on the link.
    header = replace(header, link_seq=header.link_seq and rng.randrange(1, 12))
    if kind == 8:
        return mutate.sealed(mutate.header(rng, header), rng.choice(genuine)[1] or b"", rng)
    if header.type is FrameType.DATA:
        body = mutate.spoil(rng, body, rng.choice(genuine)[1] or b"")
    return mutate.sealed(header if rng.random() < 0.5 else mutate.header(rng, header), body, rng)


class LaneTarget:
    """A target that disturbs one of two lanes, made for each input: what there is before the first, and after all."""

    def __init__(self) -> None:
        for kind in range(len(KINDS)):
            expected(kind)

    def close(self) -> None:
        pass


class Frames(LaneTarget):
    """Two lanes, one of which is fed."""

    name = "frames"

    def draw(self, rng: random.Random) -> bytes:
        kind = rng.randrange(len(KINDS))
        genuine = expected(kind).frames
        some = [(rng.randrange(len(genuine)), *hostile(rng, genuine)) for _ in range(rng.choice((1, 1, 2, 4)))]
        return msgspec.msgpack.encode((kind, some))

    def feed(self, data: bytes) -> str:
        kind, some = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[int, bytes, bytes | None]]])
        return self.play(kind, some)

    def play(self, kind: int, some: list[tuple[int, bytes, bytes | None]]) -> str:
        shape, wanted = Shape(*KINDS[kind]), expected(kind)

        def before(number: int) -> None:
            for at, header, payload in [s for s in some if s[0] == number]:
                some.remove((at, header, payload))
                pair.give((header, payload))

        pair = Pair(before)
        try:
            forged = any(_true(header, payload) for _, header, payload in some)
            pair.play(JOB, shape)
            pair.before = lambda number: None
            for _, header, payload in some:
                pair.give((header, payload))
            pair.tick()
            outcome = self._outcome(pair, wanted.outputs, forged)
            pair.end(JOB)
            left = sum(e.handle is not None for kept in pair.a.process.machine.early.frames.values() for _, e in kept)
            assert len(pair.a.process.executor.handles.table) == left, "payloads of an ended job are held on to"
            self._next(pair, shape, wanted.next_outputs)
            return outcome
        finally:
            pair.close()

    def _outcome(self, pair: Pair, outputs: bytes, forged: bool) -> str:
        faults = pair.a.faults(JOB)
        assert set(faults) <= lanes.FAULTS, faults
        found = pair.a.outputs(JOB)
        if not forged and found is not None:
            assert found == outputs, "what was delivered is not the sum"
        return faults[0] if faults else "stuck" if found is None else "exact" if found == outputs else "other sums"

    def _next(self, pair: Pair, shape: Shape, outputs: bytes) -> None:
        """A new life of the peer, and a new job with it."""
        link = pair.a.process.machine.links[NODES[1]]
        if link.theirs == LAST:
            # No life can come after that one: only a restart of this lane helps.
            pair.again(0, 101)
        pair.again(1, min(max(link.theirs, 200) + 1, LAST))
        pair.tick()
        pair.play(NEXT_JOB, shape)
        found = pair.a.outputs(NEXT_JOB), pair.b.outputs(NEXT_JOB)
        assert found == (outputs, outputs), f"the next job is not served: {pair.a.faults(NEXT_JOB)}"


def _true(header: bytes, payload: bytes | None) -> bool:
    """Whether digests and bounds of a frame hold: then it is a member's word."""
    try:
        wire.check_payload(wire.parse(header), payload)
    except FrameError:
        return False
    return True
