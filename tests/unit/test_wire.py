"""The frame header: golden bytes, round trips, and an error that names the field for everything wrong.

What may live here: tests of `proto/wire.py`. What may not: what frames mean (`tests/simulation`).
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from gcproto import wire
from gcproto.wire import Flag, FrameError, FrameType, Header, Phase

GOLDEN_HEADER = Header(
    FrameType.DATA,
    Phase.CONTRIBUTION,
    dtype=0,
    flags=int(Flag.AVERAGE | Flag.SUM_UNITS),
    codec=3,
    level=0x01020304,
    job=bytes(range(16)),
    domain=7,
    epoch=1,
    step=42,
    key=4096,
    plan=2,
    proposal=3,
    sender=wire.node_id("node0"),
    incarnation=1_700_000_000_000_001,
    to_incarnation=1_700_000_000_000_002,
    link_seq=5,
    ack=4,
    credit=65536,
    elements=1024,
    payload_bytes=4,
    payload_digest=wire.digest(b"abcd"),
)
#: The bytes of protocol version 1. Another implementation must produce the same; they never change.
GOLDEN = bytes.fromhex(
    "47434631" "01" "10" "01" "00" "0600" "0300" "04030201"
    "000102030405060708090a0b0c0d0e0f" "07000000" "01000000" "2a00000000000000" "0010000000000000"
    "02000000" "03000000" "77d4f6b38332be71" "01401e18240a0600" "02401e18240a0600" "0500000000000000"
    "0400000000000000" "0000010000000000" "0004000000000000" "0400000000000000" "9098a8536fa99764"
    "0000000000000000" "268dfef4cecc59e0"
)  # fmt: skip
#: byte offset of each field, as docs/wire.md has them
OFFSETS = {
    "magic": 0, "version": 4, "type": 5, "phase": 6, "dtype": 7, "flags": 8, "codec": 10, "level": 12, "job": 16,
    "domain": 32, "epoch": 36, "step": 40, "key": 48, "plan": 56, "proposal": 60, "sender": 64, "incarnation": 72,
    "to_incarnation": 80, "link_seq": 88, "ack": 96, "credit": 104, "elements": 112, "payload_bytes": 120,
    "payload_digest": 128, "aux": 136, "digest": 144,
}  # fmt: skip

U8, U16, U32, U64 = (st.integers(0, 2**n - 1) for n in (8, 16, 32, 64))
LIFE = st.integers(1, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(FrameType))
    data = kind is FrameType.DATA
    return Header(
        kind,
        draw(st.sampled_from([Phase.CONTRIBUTION, Phase.AGGREGATE])) if data else Phase.NONE,
        draw(U8),
        draw(st.integers(0, 31)),
        draw(U16),
        draw(U32),
        draw(st.binary(min_size=16, max_size=16)),
        draw(U32),
        draw(U32),
        draw(U64),
        draw(U64),
        draw(U32),
        draw(U32),
        draw(LIFE),
        draw(LIFE),
        draw(U64),
        draw(LIFE) if kind in wire.SEQUENCED else 0,
        draw(U64),
        draw(U64),
        draw(st.integers(0, wire.MAX_ELEMENTS)),
        draw(st.integers(0, wire.MAX_PAYLOAD_BYTES)),
        draw(U64),
        draw(U64),
    )


def raw(header: Header) -> bytearray:
    return bytearray(wire.pack(header))


def sealed(data: bytearray) -> bytes:
    """``data`` with a digest that holds."""
    data[144:152] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:144])))
    return bytes(data)


def test_golden_bytes() -> None:
    assert wire.pack(GOLDEN_HEADER) == GOLDEN
    assert wire.parse(GOLDEN) == GOLDEN_HEADER
    assert wire.HEADER_BYTES == 152


def test_numbers_on_the_wire_are_fixed() -> None:
    assert {t.name: t.value for t in FrameType} == {
        "HELLO": 1, "REFUSE": 2, "HEARTBEAT": 3, "NACK": 4, "DATA": 16, "CONTROL": 17, "FILLER": 18,
    }  # fmt: skip
    assert {p.name: p.value for p in Phase} == {"NONE": 0, "CONTRIBUTION": 1, "AGGREGATE": 2}
    assert {name: value for name, value in vars(Flag).items() if name.isupper()} == {
        "NONE": 0, "NONFINITE": 1, "AVERAGE": 2, "SUM_UNITS": 4, "RESENT": 8, "ALL": 16, "SECOND": 32,
    }  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Header) if f.name != "version"])
def test_each_field_lives_at_its_offset(name: str) -> None:
    """Changing one field changes bytes from its offset up to the next one's, and the digest."""
    value = getattr(GOLDEN_HEADER, name)
    other: Any = {
        "type": FrameType.FILLER, "phase": Phase.AGGREGATE, "job": bytes(16),
    }.get(name, int(value) + 1 if not isinstance(value, bytes) else value)  # fmt: skip
    changed = wire.pack(replace(GOLDEN_HEADER, **{name: other}))
    ordered = sorted(OFFSETS.values())
    end = ordered[ordered.index(OFFSETS[name]) + 1]
    different = [i for i in range(144) if changed[i] != GOLDEN[i]]
    assert different and OFFSETS[name] <= different[0] and different[-1] < end
    assert changed[144:] != GOLDEN[144:]


@given(headers())
def test_round_trip(header: Header) -> None:
    packed = wire.pack(header)
    assert len(packed) == wire.HEADER_BYTES
    assert wire.parse(packed) == header
    assert wire.parse(memoryview(packed)) == header


@given(headers(), st.integers(0, wire.HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_never_passes(header: Header, bit: int) -> None:
    data = raw(header)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        wire.parse(bytes(data))


@given(st.binary(max_size=400))
def test_noise_never_passes(data: bytes) -> None:
    with pytest.raises(FrameError):
        wire.parse(data)


@given(st.binary(min_size=144, max_size=144))
def test_noise_with_a_good_digest_is_valid_or_names_a_field(body: bytes) -> None:
    """Whoever can compute the digest still cannot get past validation, nor make it fail in another way."""
    data = bytearray(wire.MAGIC + bytes([wire.PROTOCOL_VERSION]) + body[5:] + bytes(8))
    failed = ""
    try:
        wire.validate(wire.parse(sealed(data)))
    except FrameError as error:
        failed = error.field
    assert failed in {"", *OFFSETS}


@pytest.mark.parametrize("length", [0, 1, 151, 153, 1 << 16])
def test_wrong_length(length: int) -> None:
    with pytest.raises(FrameError) as caught:
        wire.parse(bytes(length))
    assert caught.value.field == "length"
    assert "152" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("type", {"type": 99}),
        ("phase", {"phase": 9}),
        ("phase", {"phase": Phase.NONE}),
        ("phase", {"type": FrameType.CONTROL}),
        ("flags", {"flags": 1 << 6}),
        ("sender", {"sender": 0}),
        ("incarnation", {"incarnation": 0}),
        ("link_seq", {"link_seq": 0}),
        ("link_seq", {"type": FrameType.HEARTBEAT, "phase": Phase.NONE}),
        ("payload_bytes", {"payload_bytes": wire.MAX_PAYLOAD_BYTES + 1}),
        ("elements", {"elements": wire.MAX_ELEMENTS + 1}),
    ],
)
def test_every_error_names_its_field(field: str, change: dict[str, Any]) -> None:
    data = raw(replace(GOLDEN_HEADER, **change))
    with pytest.raises(FrameError) as caught:
        wire.parse(sealed(data))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_stranger_and_another_version_are_named_before_the_digest() -> None:
    for at, value, field, advice in (
        (0, ord("X"), "magic", "not a gradcomm daemon"),
        (4, 9, "version", "upgrade the older daemon"),
    ):
        data = raw(GOLDEN_HEADER)
        data[at] = value
        with pytest.raises(FrameError, match=advice) as caught:
            wire.parse(bytes(data))
        assert caught.value.field == field


def test_a_damaged_header_says_so() -> None:
    data = raw(GOLDEN_HEADER)
    data[100] ^= 1
    with pytest.raises(FrameError, match="damaged on the way") as caught:
        wire.parse(bytes(data))
    assert caught.value.field == "digest"


def test_payload_is_checked_against_its_header() -> None:
    wire.check_payload(GOLDEN_HEADER, b"abcd")
    wire.check_payload(GOLDEN_HEADER, memoryview(bytearray(b"abcd")))
    for payload, field in ((b"abc", "payload_bytes"), (None, "payload_bytes"), (b"abce", "payload_digest")):
        with pytest.raises(FrameError) as caught:
            wire.check_payload(GOLDEN_HEADER, payload)
        assert caught.value.field == field


def test_an_empty_payload_has_digest_zero() -> None:
    assert wire.digest(b"") == wire.digest(None) == 0
    wire.check_payload(replace(GOLDEN_HEADER, payload_bytes=0, payload_digest=0), None)


def test_on_link_changes_only_what_a_link_says() -> None:
    moved = GOLDEN_HEADER.on_link(link_seq=9, ack=8, credit=7, to_incarnation=6)
    assert (moved.link_seq, moved.ack, moved.credit, moved.to_incarnation) == (9, 8, 7, 6)
    assert replace(moved, link_seq=5, ack=4, credit=65536, to_incarnation=GOLDEN_HEADER.to_incarnation) == GOLDEN_HEADER


@given(st.text(max_size=40))
def test_node_ids_are_never_zero(name: str) -> None:
    assert 0 < wire.node_id(name) < 2**64


def test_node_id_is_fixed() -> None:
    assert wire.node_id("node0") == 0x71BE3283B3F6D477
