"""Every message survives its encoding, and nothing else decodes.

What may live here: tests of `proto/messages.py` and `proto/lane_messages.py`. What may not: what messages do.
"""

from __future__ import annotations

import math
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcproto import advice, epoch_messages, lane_messages, messages, packed, states
from gcproto.agreed import Resumed
from gcproto.audits import AuditAnswer, AuditReport, TensorError
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import MemberInfo, Rule
from gcproto.packed import Decoder, MessageError
from gcproto.spans import RECORD_BYTES, AskSpans, EndTrace, SpansPart, TraceOrder, WorkerSpans
from gcproto.timings import TensorTimes

UNIONS: dict[str, typing.Any] = {
    **{name: getattr(messages, name) for name in ("Control", "Link", "FromWorker", "ToWorker")},
    **{name: getattr(lane_messages, name) for name in ("FromLaneWorker", "ToLaneWorker")},
}
SECTION = Section(0, (TensorSpec("w", (3, 4), 0), TensorSpec("b", (4,), 0)), (1,))
DOMAIN = messages.DeclareDomain("ddp", 0, (0, 1), True, "topk(ratio=0.01)", True)
RESUMED = Resumed(b"o" * 16, 7, ((1 << 64) - 1, 2), (Rule("*", "topk", "all", (1, 2)),), "dc2-da2", planned=True)
FACTS = epoch_messages.DomainFacts(DOMAIN, (SECTION,), 7, ((0, 0), (9, 1)))
SAMPLES: list[packed.Message] = [
    messages.Hello("a", "tcp://a:1", 2, 1, 5, "0.1"),
    messages.Refuse("no"),
    messages.Beat(7, ((b"j" * 16, 0, 3, 2**64 - 1),), ((b"j" * 16, 0, 4096),)),
    messages.Nack((1, 5)),
    messages.JobJoin("train", 4, MemberInfo("a", "tcp://a:1", (0, 1)), 9, b"t" * 32),
    messages.JoinRefusal("train", (("a", 9), ("b", 4)), "another token", "NotAuthorised"),
    messages.EpochDecided(
        "train",
        b"j" * 16,
        1,
        2,
        (MemberInfo("a", "tcp://a:1", (0, 1)),),
        (9,),
        (Rule("*", "none"),),
        lost=((MemberInfo("b", "tcp://b:1", (2,)),),),
        starts=(epoch_messages.EpochStart(2, 0, 7, 8),),
    ),
    DOMAIN,
    messages.SectionOffer(b"j" * 16, 0, 1, 2**63),
    messages.SectionList(b"j" * 16, 0, DOMAIN, SECTION, 1),
    messages.PlanRequest(b"j" * 16, 7, (Rule("*.bias", "none", "all"),), True, "dc2-da2"),
    messages.PlanText(b"j" * 16, 1, 7, (Rule("*.bias", "none"),), "dc2-da5(k_max=0.2)"),
    messages.PlanReady(b"j" * 16, 1, "cannot"),
    messages.PlanGo(b"j" * 16, 1),
    messages.PlanMode(b"j" * 16, "auto", "safe", 7),
    messages.Fault(b"j" * 16, "StepTimeout", "late", 0, 3, 1, "exchange", ("b",), 61.5, 2, "look"),
    messages.JobLeft("train", b"j" * 16, 1),
    epoch_messages.StepReady(b"j" * 16, 2, 0, 7),
    epoch_messages.Frozen(
        b"j" * 16,
        1,
        (epoch_messages.DomainState(0, 7, 8, ("a", "b")),),
        ("b",),
        (epoch_messages.Applicant(MemberInfo("c", "tcp://c:1", (2,)), 11),),
    ),
    epoch_messages.JobState(b"j" * 16, 3, (0, 1), (FACTS,), (messages.PlanText(b"j" * 16, 1, 7, ()),), 1, 1 << 20),
    epoch_messages.JobState(b"j" * 16, 3, (), (), (), 0, 0, messages.PlanMode(b"j" * 16, "static")),
    epoch_messages.Admit(2),
    epoch_messages.NodesWait(("c",)),
    messages.EpochChanged(2, (MemberInfo("a", "tcp://a:1", (0,)),)),
    messages.Register(
        "train",
        0,
        2,
        0,
        1,
        77,
        b"j" * 16,
        30.0,
        "fail",
        (("b", "tcp://b:1"),),
        "1",
        7,
        "auto",
        "fast",
        (("b", "k"),),
        b"t" * 32,
    ),
    messages.Reattach(b"j" * 16, 0, 77),
    messages.Registered(b"j" * 16, 1, "a", (MemberInfo("a", "tcp://a:1", (0,)),), ("ipc://x",), 4096, 30.0, "auto"),
    messages.Registered(b"j" * 16, 3, "a", (), (), 4096, 30.0, admissions=1, domains=(FACTS,)),
    messages.WhoAreYou(),
    messages.IAm("a", "tcp://a:1", 2, "k"),
    messages.DeclareSection(0, SECTION),
    messages.SectionAgreed(0, 0, 123),
    messages.Unregister(),
    TraceOrder(1 << 62, b"j" * 16, 3, 60.0),
    EndTrace(1 << 62),
    WorkerSpans(1 << 62, 5, ((b"j" * 16, 0, 3),), bytes(RECORD_BYTES)),
    AskSpans(1 << 62, 1 << 20),
    SpansPart(1 << 62, 0, RECORD_BYTES, 5, bytes(RECORD_BYTES), ((b"j" * 16, 0, 3),), ("rank 0 did not answer",)),
    SpansPart(1 << 62, 0, 0, 0, b"", error="it knows nothing of this trace"),
    TensorTimes(0, 5, (0, 1500, -1), 20_000, 90_000, 88_000, 4096, 12, (1024, 3072), True),
    AuditReport(16, 100, 0.9, 0.4, 0.4, (TensorError("w", math.inf, -1.0, 0.0),), 1, 0, 0.5, True),
    AuditAnswer(16, 2, 104),
    advice.AskAdvice(3, 16, (12.5e6,)),
    advice.Advised(3, "don't", 0.2, None, (advice.AdviceRow(12.5e6, True, "fast", "fp16", 0.3),), "no", "wait"),
    messages.Waiting("ranks [1]"),
    lane_messages.Attach(b"j" * 16, 0),
    lane_messages.MapSection(0, 0, 1),
    lane_messages.Mapped(0, 0, 0, (1 << 20,)),
    lane_messages.Push(0, 5, (0, 4096), True, 2),
    lane_messages.Done(0, 5, (0, 4096), True),
    messages.DeclareDomain("ddp.0", 16, (0, 1), True, resumed=RESUMED),
    states.AskStanding(16),
    states.Standing(16, 7, RESUMED),
    states.AskStates(16, 4096, True, 1 << 18, 7),
    states.BlockStates(16, 4096, True, 1 << 18, (1 << 18) + 1, (1 << 64) - 1, True, b"abcd"),
    states.GiveStates(16, 4096, True, 1 << 18, (1 << 18) + 1, (1 << 64) - 1, True, b"abcd"),
    states.StatesKept(16, 4096, True, 1 << 18),
]


def test_every_message_has_a_sample() -> None:
    members = {m for union in UNIONS.values() for m in typing.get_args(union)}
    assert members == {type(s) for s in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_round_trip(sample: packed.Message) -> None:
    unions = [u for u in UNIONS.values() if type(sample) in typing.get_args(u)]
    assert unions
    for union in unions:
        assert Decoder[typing.Any](union)(packed.encode(sample)) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_message_of_another_union_does_not_decode(sample: packed.Message) -> None:
    for union in UNIONS.values():
        if type(sample) not in typing.get_args(union):
            with pytest.raises(MessageError):
                Decoder[typing.Any](union)(packed.encode(sample))


@pytest.mark.parametrize("name", sorted(UNIONS))
@given(data=st.binary(max_size=200))
def test_noise_is_a_message_error_or_a_message(name: str, data: bytes) -> None:
    try:
        decoded = Decoder[typing.Any](UNIONS[name])(data)
    except MessageError:
        return
    assert isinstance(decoded, typing.get_args(UNIONS[name]))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400), flip=st.integers(0, 8 * 400 - 1))
def test_damaged_messages_never_raise_anything_else(sample: packed.Message, cut: int, flip: int) -> None:
    data = bytearray(packed.encode(sample))
    data[flip // 8 % len(data)] ^= 1 << flip % 8
    union = next(u for u in UNIONS.values() if type(sample) in typing.get_args(u))
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        try:
            Decoder[typing.Any](union)(damaged)
        except MessageError:
            pass


def test_a_message_has_a_largest_size() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return packed.MAX_MESSAGE_BYTES + 1

    with pytest.raises(MessageError, match="at most"):
        Decoder[messages.Nack](messages.Nack)(Huge())


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_what_is_nested_too_deep_is_a_message_error(opening: bytes) -> None:
    decode = Decoder[typing.Any](messages.FromWorker)
    # In a field that nobody knows, which is passed over.
    data = b"\x82\xa1t\xa3who\xa1x" + opening * 5000 + b"\x01"
    with pytest.raises(MessageError):
        decode(data)


def test_a_section_without_cuts_is_read() -> None:
    """As kept by a daemon that knew none."""
    kept = msgspec.msgpack.encode((0, (("w", (3, 4), 0),)))
    assert msgspec.msgpack.decode(kept, type=Section) == Section(0, (TensorSpec("w", (3, 4), 0),))


def test_a_rule_without_a_scheme_is_read() -> None:
    """As kept by a daemon that knew none."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(("*", "none")), type=Rule) == Rule("*", "none", "")
