"""Spec strings: what parses, what it prints as, and what a refusal says."""

import pickle

import pytest

from gcserver.codecs import CodecError, by_id, names, parse, register
from gcserver.codecs.casts import Cast


def test_names_in_order_of_their_ids():
    assert names() == ["none", "fp16", "bf16", "topk", "onebit"]


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("none", "none"),
        (" fp16 ", "fp16"),
        ("bf16()", "bf16"),
        ("topk(ratio=0.01)", "topk(ratio=0.01)+ef"),
        ("topk( ratio = 1e-2 ) + ef( decay = 1.0 )", "topk(ratio=0.01)+ef"),
        ("topk(ratio=0.010)+ef(decay=0.90)", "topk(ratio=0.01)+ef(decay=0.9)"),
        ("topk(ratio=1)+ef(decay=0)", "topk(ratio=1)+ef(decay=0)"),
        ("topk(ratio=0.000001)", "topk(ratio=1e-06)+ef"),
        ("onebit", "onebit+ef"),
        ("onebit+ef", "onebit+ef"),
        ("onebit+ef(decay=0.5)", "onebit+ef(decay=0.5)"),
    ],
)
def test_canonical_form(spec, canonical):
    codec = parse(spec)
    assert codec.spec == canonical
    assert parse(canonical).spec == canonical
    assert parse(canonical).level == codec.level


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gzip", "none, fp16, bf16, topk, onebit"),
        ("", "name"),
        ("topk", r"write topk\(ratio=...\)"),
        ("topk(0.01)", "key=value"),
        ("topk(ratio=0.01,ratio=0.02)", "once"),
        ("topk(k=10)", "one of ratio"),
        ("topk(ratio=2)", r"\[1e-06, 1\]"),
        ("topk(ratio=0)", r"\[1e-06, 1\]"),
        ("topk(ratio=nan)", r"\[1e-06, 1\]"),
        ("topk(ratio=ten)", "a number"),
        ("topk(ratio=0.1", "name, or name"),
        ("topk(ratio=0.1)+ef+ef", "at most one"),
        ("topk(ratio=0.1)+momentum", "at most one ef"),
        ("topk(ratio=0.1)+ef(decay=1.5)", r"\[0, 1\]"),
        ("topk(ratio=0.1)+ef(half=1)", "one of decay"),
        ("fp16+ef", "ef applies to topk, onebit"),
        ("fp16(x=1)", "one of none"),
    ],
)
def test_refusals_say_what_is_accepted(spec, says):
    with pytest.raises(CodecError, match=says):
        parse(spec)


def test_by_id_is_enough_to_decode():
    for spec in ("none", "fp16", "bf16", "topk(ratio=0.003)+ef(decay=0.9)", "onebit"):
        codec = parse(spec)
        twin = by_id(codec.id, codec.level)
        assert type(twin) is type(codec) and twin.level == codec.level and twin.units == codec.units
    assert by_id(16, 3000).level == 3000


@pytest.mark.parametrize(
    ("id_", "level"), [(99, 0), (0, 1), (1, 7), (32, 1), (16, 0), (16, 1_000_001), (16, 2**32 - 1)]
)
def test_by_id_refuses_what_no_peer_of_ours_sends(id_, level):
    with pytest.raises(CodecError):
        by_id(id_, level)


def test_every_topk_level_survives_the_header():
    for level in (1, 2, 3, 7, 9999, 10_000, 123_457, 999_999, 1_000_000):
        assert by_id(16, level).level == level
        assert parse(by_id(16, level).spec).level == level


def test_properties_the_runtime_relies_on():
    assert [parse(s).units for s in ("none", "fp16", "bf16")] == ["mean"] * 3
    assert [parse(s).units for s in ("topk(ratio=0.1)", "onebit", "onebit+ef(decay=0)")] == ["sum"] * 3
    assert [parse(s).error_feedback for s in ("none", "fp16", "onebit", "onebit+ef(decay=0)")] == [0, 0, 1, 0]


def test_error_survives_pickling_and_is_typed():
    with pytest.raises(CodecError) as caught:
        parse("topk(ratio=2)")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.field, copy.got, str(copy)) == ("topk.ratio", "2", str(caught.value))


def test_taken_names_and_ids_are_refused():
    class Clash(Cast):
        id, name = 77, "fp16"

    with pytest.raises(CodecError, match="not in use"):
        register(Clash)
