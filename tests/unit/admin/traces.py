"""A trace of two nodes for tests of what is made of one: three steps of a block that b owns, each on its own clock.

What may live here: making its parts, as a daemon answers them. What may not: assertions.
"""

from __future__ import annotations

from gcproto import wire
from gcproto.spans import Kind, Span, frame_detail
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.admin import convert
from gcserver.admin.spans import (
    TraceClock,
    TraceContext,
    TracedBlock,
    TracedDomain,
    TracedName,
    TracedNode,
    TraceFirst,
    TracePart,
)
from gcserver.admin.traceslices import Trace

JOB = b"j" * 16
A, B = wire.node_id("a"), wire.node_id("b")
#: b's clock is ahead of a's by so much, and is said to be by SAID, give or take ERROR
AHEAD, SAID, ERROR = 700.0, 700.004, 0.005
STEPS = 3
#: a step takes so long, and a frame is so long on its way
LENGTH, WAY = 0.1, 0.002
_NAMES = (TracedName(A, "a"), TracedName(B, "b"))
DOMAIN = TracedDomain(JOB.hex(), 16, "gpt", "ddp.0", (TracedBlock(0, "wte"), TracedBlock(64, "ln")))


def span(kind: Kind, begin: float, end: float, step: int, peer: int = 0, seq: int = 0, detail: int = 0) -> Span:
    return Span(begin, end, JOB, 16, step, 64, peer, seq, 100, 0, kind, detail)


def _frame(phase: Phase, flags: int = 0) -> int:
    return frame_detail(Header(FrameType.DATA, phase, flags=flags))


def spans(step: int) -> tuple[list[Span], list[Span]]:
    """What a and b record of a step, each on its own clock; a's begins at 1000 + step * LENGTH."""
    t = 1000.0 + step * LENGTH
    out, back = _frame(Phase.CONTRIBUTION), _frame(Phase.AGGREGATE)
    of_a = [
        span(Kind.READY, t, t + 0.005, step), span(Kind.PUSH, t + 0.005, t + 0.006, step),
        span(Kind.ENCODE, t + 0.007, t + 0.009, step), span(Kind.SEND, t + 0.009, t + 0.0095, step, B, step, out),
        # decoding follows from the frame's arrival, and ends with it
        span(Kind.DECODE, t + 0.042, t + 0.044, step),
        span(Kind.RECEIVE, t + 0.04, t + 0.044, step, B, step, back), span(Kind.PULL, t + 0.05, t + 0.052, step),
    ]  # fmt: skip
    arrived = t + 0.009 + WAY
    at_b = [
        span(Kind.ADD, arrived, arrived + 0.002, step, A), span(Kind.FINALISE, arrived + 0.002, arrived + 0.004, step),
        span(Kind.RECEIVE, arrived, arrived + 0.005, step, A, step, out),
        span(Kind.SEND, t + 0.04 - WAY, t + 0.041 - WAY, step, A, step, back),
    ]  # fmt: skip
    return of_a, [s._replace(begin=s.begin + AHEAD, end=s.end + AHEAD) for s in at_b]


def resent(s: Span) -> Span:
    return s._replace(detail=s.detail | Flag.RESENT)


def parts(steps: int = 0, first_of_b: int = 1) -> list[TracePart]:
    """All parts; ``steps`` as an operator asked, ``first_of_b`` the first whole step at b."""
    made = [spans(step) for step in range(1, STEPS + 1)]
    ours, theirs = ([s for pair in made for s in pair[i]] for i in (0, 1))
    clocks = (TraceClock(1000.0, SAID, ERROR), TraceClock(1001.0, SAID, ERROR))
    return [
        TraceContext("a", steps, 1.7e9, _NAMES, (DOMAIN,)),
        TracedNode("a", len(ours), 0, (), (TraceFirst(JOB.hex(), 16, 1),)),
        tuple(ours),
        TracedNode("b", len(theirs), 5, clocks, (TraceFirst(JOB.hex(), 16, first_of_b),), ("rank 3 did not answer",)),
        tuple(theirs),
    ]


def settled(made: list[TracePart]) -> Trace:
    """What gcctl makes of these parts."""
    trace = Trace()
    for part in made:
        trace.take(convert.trace_part(part))
    trace.settle()
    return trace
