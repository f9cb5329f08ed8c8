"""Lane machines for tests, and what is said to them and by them.

What may live here: setting one up, frames, reading its effects. What may not: tests.
"""

from __future__ import annotations

from typing import Any

from gcproto import messages, packed, wire
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig

A, B = wire.node_id("a"), wire.node_id("b")
JOB = b"j" * 16
ID = (JOB, 0)
DENSE = ev.CodecChoice("none", 1, 0, False, False)
SECTION = Section(0, (TensorSpec("w", (8192,), 0), TensorSpec("v", (8192,), 0)))
TWICE = ev.CodecChoice("twice", 3, 8, True, True, rounds=2)
SECOND = int(Flag.SECOND)


def machine(credit: int = 1000) -> LaneMachine:
    m = LaneMachine(LaneConfig(messages.Hello("a", "tcp://a:1", 1, 0, 1, "test"), 11, credit))
    m.on(ev.PeerAdded(B, "b"), 0.0)
    m.on(hello(22), 0.0)
    return m


def hello(incarnation: int, lanes: int = 1) -> ev.FrameReceived:
    body = packed.encode(messages.Hello("b", "tcp://b:1", lanes, 0, 1, "test"))
    header = Header(FrameType.HELLO, sender=B, incarnation=incarnation, to_incarnation=11)
    return ev.FrameReceived(header, body=body)


def open_domain(m: LaneMachine, section: bool = True, codec: ev.CodecChoice = DENSE) -> None:
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), codec),)), 0.0)
    if section:
        m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)


def contribution(seq: int = 1, **change: Any) -> ev.FrameReceived:
    header = Header(
        FrameType.DATA, Phase.CONTRIBUTION, job=JOB, epoch=1, step=1, sender=B, incarnation=22, to_incarnation=11,
        link_seq=seq, elements=16384, payload_bytes=128, codec=1,
    )  # fmt: skip
    return ev.FrameReceived(replace(header, **change), handle=77)


def kinds(effects: list[Any]) -> list[str]:
    return [getattr(e, "name", type(e).__name__) for e in effects]


def faults(effects: list[Any]) -> list[fx.ReportFault]:
    return [e for e in effects if isinstance(e, fx.ReportFault)]


def two(me: int, memory: dict[int, ev.BlockMemory] | None = None) -> LaneMachine:
    """A domain of a (owner of the only block) and b whose codec takes two exchanges; this is a (0) or b (1)."""
    names = ("a", "b")
    m = LaneMachine(LaneConfig(messages.Hello(names[me], "tcp://x:1", 1, 0, 1, "test"), 11, 1000))
    m.on(ev.PeerAdded((B, A)[me], names[1 - me]), 0.0)
    body = packed.encode(messages.Hello(names[1 - me], "tcp://y:1", 1, 0, 1, "test"))
    m.on(ev.FrameReceived(Header(FrameType.HELLO, sender=(B, A)[me], incarnation=22, to_incarnation=11), body=body), 0)
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, me, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (ev.PlanRule("*", TWICE, "all"),), DENSE),)), 0.0)
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), memory or {}), 0.0)
    return m


def frame(seq: int, stage: int, phase: Phase = Phase.CONTRIBUTION, **change: Any) -> ev.FrameReceived:
    """What the other member sends."""
    flags = change.pop("flags", 0) | (SECOND if stage else 0) | (int(Flag.SUM_UNITS) if phase is Phase.AGGREGATE else 0)
    sender = A if phase is Phase.AGGREGATE else B
    return contribution(seq, phase=phase, sender=sender, codec=3, level=8, flags=flags, **change)


def data(effects: list[Any]) -> list[tuple[Phase, int, int | None]]:
    """(phase, exchange, handle) of the frames that go out."""
    sent = [e for e in effects if isinstance(e, fx.Send) and e.header.type is FrameType.DATA]
    return [(e.header.phase, 1 if e.header.flags & SECOND else 0, e.handle) for e in sent]


def retained(stage: int, flags: int = 0, step: int = 1, slot: int = 0) -> ev.Retained:
    flags |= int(Flag.SUM_UNITS) | (SECOND if stage else 0)
    return ev.Retained(step, slot, 60 + stage, 128, 9, 3, 8, flags, 4)


def restarted(*kept: ev.Retained, out_step: int = 0) -> LaneMachine:
    decision = ev.Decision(1, 0, 0, "twice", 99)
    return two(0, {0: ev.BlockMemory((1,), 0, out_step, 0, 0, decision, retained=kept)})
