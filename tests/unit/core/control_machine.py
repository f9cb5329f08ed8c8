"""Control machines for tests, and what is said to them and by them.

What may live here: setting one up, reading its effects. What may not: tests.
"""

from __future__ import annotations

from typing import Any

from gcproto import messages, packed, wire
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Register, Registered
from gcproto.wire import FrameType, Header
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.control_config import ControlConfig
from gcserver.core.effects import Send
from gcserver.core.events import CodecChoice, FrameReceived, PeerAdded

B = wire.node_id("b")
LARGE = Section(0, (TensorSpec("b", (300,), 0), TensorSpec("w", (300, 300), 0)))


def resolve(spec: str) -> CodecChoice:
    if spec not in ("none", "topk", "matrix"):
        raise ValueError(f"unknown codec {spec!r}")
    return CodecChoice(spec, 1, 0, spec == "topk", spec == "topk", whole=spec == "matrix")


def no_controller(text: str) -> str:
    return "" if text in ("none", "dc2-da2", "dc2-da5") else f"unknown controller {text!r}"


def machine(lanes: int = 1, codec: str = "none", **more: Any) -> ControlMachine:
    hello = messages.Hello("a", "tcp://a:7000", lanes, 0, 1, "test")
    rules = (messages.Rule("*", codec),)
    return ControlMachine(
        ControlConfig(hello, 100, rules, 4 << 20, 64 << 10, 60.0, "fail", **more), resolve, no_controller
    )


def register(rank: int = 0, world: int = 1, local: int = 0, size: int = 1, label: str = "train") -> Register:
    return Register(label, rank, world, local, size, 1234, b"j" * 16 if rank == 0 else b"")


def said(m: ControlMachine, connection: int, message: Any, now: float = 0.0) -> list[Any]:
    return m.on(ce.WorkerSaid(connection, message), now)


def told(effects: list[Any], connection: int = 1) -> list[Any]:
    return [e.message for e in effects if isinstance(e, ce.Tell) and e.connection == connection]


def formed(lanes: int = 1, scoped: bool = True) -> ControlMachine:
    """One node, one rank, one domain, its section agreed."""
    m = machine(lanes)
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    out = m.on(ce.EpochWon(arbitrate.record), 0.0)
    assert isinstance(told(out)[0], Registered)
    said(m, 1, DeclareDomain("ddp", 0, (0,), scoped))
    out = said(m, 1, DeclareSection(0, Section(0, (TensorSpec("w", (4,), 0),))))
    assert isinstance(told(out)[0], messages.SectionAgreed)
    return m


def hello_from(node: str, incarnation: int, lanes: int = 1, to: int = 0) -> FrameReceived:
    body = packed.encode(messages.Hello(node, f"tcp://{node}:7000", lanes, 0, 1, "test"))
    sender = wire.node_id(node)
    return FrameReceived(Header(FrameType.HELLO, sender=sender, incarnation=incarnation, to_incarnation=to), body=body)


def control_from_b(message: packed.Message, seq: int) -> FrameReceived:
    body = packed.encode(message)
    return FrameReceived(
        Header(FrameType.CONTROL, sender=B, incarnation=7, to_incarnation=100, link_seq=seq), body=body
    )


def control_sent(effects: list[Any]) -> list[Any]:
    decode = packed.Decoder[Any](messages.Control)
    return [decode(e.body) for e in effects if isinstance(e, Send) and e.header.type is FrameType.CONTROL]


def formed_with_b() -> tuple[ControlMachine, messages.EpochDecided]:
    """Nodes a (rank 0) and b (rank 1), the job formed, no domain yet."""
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 2))
    out = m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (1,)), 5), 1), 0.0)
    (arbitrate,) = [e for e in out if isinstance(e, ce.Arbitrate)]
    out = m.on(ce.EpochWon(arbitrate.record), 0.0)
    assert control_sent(out) == [arbitrate.record]
    return m, arbitrate.record


def declared(whole: bool, scoped: bool = True, rules: str = "none") -> tuple[ControlMachine, list[Any]]:
    """One node, one rank, one domain with a large matrix; what the machine said to its section."""
    m = machine(codec=rules)
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    said(m, 1, DeclareDomain("ddp", 0, (0,), scoped, "", whole))
    return m, said(m, 1, DeclareSection(0, LARGE))


def set_codec(request: int, job: str, pattern: str, spec: str) -> ce.SetPlan:
    """What `gcctl set-codec` asks for."""
    return ce.SetPlan(request, job, (messages.Rule(pattern, spec),))


def domain_of(m: ControlMachine) -> tuple[bytes, int]:
    ((job, key),) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    return job, key


def answers(effects: list[Any]) -> list[ce.AnswerRequest]:
    return [e for e in effects if isinstance(e, ce.AnswerRequest)]


def gathered() -> tuple[ControlMachine, int, messages.EpochDecided]:
    """Node a with rank 1, which waits for b; the nonce of its gathering; the record b would send."""
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    (join,) = control_sent(said(m, 1, register(1, 2)))
    members = (messages.MemberInfo("b", "tcp://b:7000", (0,)), join.member)
    rules = (messages.Rule("*", "none"),)
    return m, join.nonce, messages.EpochDecided("train", b"j" * 16, 1, 2, members, (5, join.nonce), rules)


def follower() -> tuple[ControlMachine, messages.EpochDecided]:
    m, _, record = gathered()
    assert isinstance(told(m.on(control_from_b(record, 1), 0.0))[0], Registered)
    return m, record
