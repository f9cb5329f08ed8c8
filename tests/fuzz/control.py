"""Target: frames to a supervisor, in the course of a job of two nodes.

An input is who of the two is first, and a list of (before which genuine frame, header, payload). Each meets two new
supervisors. Whatever comes of hostile frames is counted, logged or a fault of a documented kind, never the end of the
daemon; the next job, with a new life of the peer, runs to its end in any case.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import lru_cache
from typing import Any, Final

import msgspec

from gcclient import errors
from gcproto import messages, packed, wire
from gcproto.messages import MemberInfo, Rule
from gcproto.spans import RECORD_BYTES, AskSpans, SpansPart, TraceOrder
from gcproto.wire import FrameType, Header
from tests.fuzz import mutate, supervisors
from tests.fuzz.lanes import LATEST, NODES, Frame
from tests.fuzz.supervisors import SECTION, TOKEN, Node, Pair

JOB: Final = b"j" * 16
NEXT_JOB: Final = b"k" * 16
_MEMBERS: Final = (MemberInfo("a", "tcp://127.0.0.1:7470", (0,)), MemberInfo("b", "tcp://127.0.0.2:7470", (1,)))
_RULES: Final = (Rule("*", "topk(ratio=0.01)", "owner", (100, 50)), Rule("b", "none"))
#: one of each, whether or not a job of two nodes needs it
MESSAGES: Final[tuple[packed.Message, ...]] = (
    messages.JobJoin("train", 2, _MEMBERS[1], 300, TOKEN), messages.JoinRefusal("train", (("a", 101), ("b", 1)), "no"),
    messages.EpochDecided("train", JOB, 1, 2, _MEMBERS, (101, 300), _RULES, 4096, 0, 60.0, "fail", 5, "dc2-da2"),
    messages.EpochDecided("other", b"o" * 16, 1, 2, _MEMBERS, (101, 300)),
    messages.SectionOffer(JOB, 0, 0, 12345, 1),
    messages.SectionList(JOB, 0, messages.DeclareDomain("ddp", 0, (0, 1), True), SECTION, 1),
    messages.PlanRequest(JOB, 77, _RULES, True, "none"), messages.PlanText(JOB, 1, 77, _RULES, "dc2-da1"),
    messages.PlanReady(JOB, 1), messages.PlanReady(JOB, 1, "no"), messages.PlanGo(JOB, 1),
    messages.PlanMode(JOB, "auto", "safe", 1), messages.PlanMode(JOB, "", "\0"),
    messages.Fault(JOB, "PeerLost", "gone", 0, 1, 1, "push", ("b",), 1.0, 0, "start again"),
    messages.JobLeft("train", JOB, 0, ((0, 3),)), messages.JobLeft("train", b"", 300),
    TraceOrder(7, JOB, 3, 60.0), TraceOrder(7, b"", 0, 0.5), AskSpans(7, 0), AskSpans(7, 1 << 20),
    SpansPart(7, 0, 2 * RECORD_BYTES, 1, bytes(2 * RECORD_BYTES), ((JOB, 0, 1),), ("lane 0",)),
)  # fmt: skip
_UNNUMBERED: Final = (
    (FrameType.HELLO, messages.Hello("b", "tcp://127.0.0.2:7470", 1, 1, 1, "fuzz")),
    (FrameType.HELLO, messages.Hello("c", "tcp://127.0.0.3:7470", 1, 1, 1, "fuzz")),
    (FrameType.REFUSE, messages.Refuse("no")),
    (FrameType.NACK, messages.Nack((1, 2, 3))),
    (FrameType.HEARTBEAT, messages.Beat(9, ((JOB, 0, 1, 5),), ((JOB, 0, 4096),), 1.0, 2.0, 0.5)),
)  # fmt: skip
#: the exceptions that workers know by name, and whatever else ends a job must be one of them
KINDS: Final = frozenset(name for name in dir(errors) if isinstance(getattr(errors, name), type))


class Quiet(logging.Handler):
    """Makes each line, as a daemon's handler would, and keeps what was raised last."""

    raised: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        if record.exc_info:
            Quiet.raised = record.exc_info[1]


def quiet() -> None:
    """Let the daemon's log go nowhere."""
    log = logging.getLogger("gcserver")
    log.propagate = False
    log.handlers[:] = [Quiet()]
    Quiet.raised = None


def sound(node: Node) -> None:
    """A supervisor has met no defect. Raises what it met."""
    raised, Quiet.raised = Quiet.raised, None
    if raised is not None:
        raise raised
    assert not node.failure, node.failure
    assert not node.broken, node.broken[0]


@lru_cache(maxsize=2)
def genuine(first: int) -> tuple[tuple[Frame, ...], tuple[Any, ...]]:
    """What a job is made of that nobody disturbs."""
    quiet()
    return asyncio.run(supervisors.undisturbed(first))


def hostile(rng: random.Random, frames: tuple[Frame, ...]) -> Frame:
    """One frame of a peer gone wrong, or of somebody who says to be it."""
    raw, payload = rng.choice(frames)
    body = payload or b""
    kind = rng.randrange(12)
    if kind == 0:
        return mutate.spoil(rng, raw, rng.choice(frames)[0]), payload
    if kind == 1:
        return raw, mutate.spoil(rng, body, rng.choice(frames)[1] or b"")
    if kind == 2:
        return raw, payload
    header = wire.parse(raw)
    if kind == 3:
        return mutate.sealed(mutate.header(rng, header), body, rng)
    if kind < 6:
        which, message = rng.choice(_UNNUMBERED)
        body = packed.encode(message)
        sender = wire.node_id("c") if b"127.0.0.3" in body else NODES[1]
        header = Header(which, sender=sender, incarnation=rng.choice((200, 200, 7)), to_incarnation=100)
    else:
        body = packed.encode(rng.choice(MESSAGES)) if kind < 10 or header.type is not FrameType.CONTROL else body
        header = Header(
            FrameType.CONTROL, sender=NODES[1], incarnation=200, to_incarnation=100, link_seq=rng.randrange(1, 30)
        )
    if rng.random() < 0.15:
        header = mutate.header(rng, header)
    return mutate.sealed(header, mutate.packed(rng, body) if rng.random() < 0.85 else body, rng)


class SupervisorTarget:
    """A target that disturbs one of two supervisors, made for each input: what there is before the first, and after
    all."""

    def __init__(self) -> None:
        quiet()
        for first in (0, 1):
            genuine(first)

    def close(self) -> None:
        pass


class Control(SupervisorTarget):
    """Two supervisors, one of which is fed."""

    name = "control"

    def draw(self, rng: random.Random) -> bytes:
        first = rng.randrange(2)
        frames = genuine(first)[0]
        some = [(rng.randrange(len(frames)), *hostile(rng, frames)) for _ in range(rng.choice((1, 1, 2, 4)))]
        return msgspec.msgpack.encode((first, some))

    def feed(self, data: bytes) -> str:
        first, some = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[int, bytes, bytes | None]]])
        return asyncio.run(_play(first, some))


async def _play(first: int, some: list[tuple[int, bytes, bytes | None]]) -> str:
    pair = Pair(first)

    def before(number: int) -> None:
        for at, header, payload in [s for s in some if s[0] == number]:
            some.remove((at, header, payload))
            pair.a.take((header, payload))

    try:
        pair.before = before
        missed = await pair.play("train", JOB)
        pair.before = lambda number: None
        for _, header, payload in some:
            pair.a.take((header, payload))
        await pair.tick()
        outcome = said(pair, missed)
        await pair.end()
        await serves(pair)
        return outcome
    finally:
        pair.close()


def said(pair: Pair, missed: str) -> str:
    """What node a's worker heard of a disturbed job, in a word."""
    faults = pair.faults()
    # Of another kind than workers know it becomes the base of all errors, with its name in the text.
    raised = [type(errors.from_fault(f, "train")).__name__ for f in faults]
    return raised[0] if raised else missed or "a whole job"


async def serves(pair: Pair) -> None:
    """A new life of the peer, and a new job with it."""
    sound(pair.a)
    theirs = pair.a.machine.links[NODES[1]].theirs
    assert theirs <= LATEST, "a life that can have no successor"
    pair.latest += 1
    await pair.tick()
    pair.again(1, max(theirs, 200) + 1)
    missed = await pair.play("next", NEXT_JOB, brief=True)
    sound(pair.a)
    assert not missed, f"the next job: {missed}, {[m for w in pair.workers for m in w.told][-3:]}"
