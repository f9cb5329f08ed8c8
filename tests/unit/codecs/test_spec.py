"""Spec strings: what parses, what it prints as, and what a refusal says."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.codecs import Codec, CodecError, Param, by_id, names, parse, register
from gcserver.codecs.base import BY_NAME
from gcserver.codecs.casts import Cast
from gcserver.codecs.spec import DECORATORS

#: wire ids are for ever
IDS = {
    "none": 0, "fp16": 1, "bf16": 2,
    "topk": 16, "randomk": 17, "dgc": 18, "threshold": 19, "redsync": 20, "gaussiank": 21,
    "sidco-e": 22, "sidco-gp": 23, "sidco-p": 24,
    "onebit": 32, "signsgd": 33, "signum": 34, "efsignsgd": 35,
    "qsgd": 48, "terngrad": 49, "natural": 50,
    "powersgd": 64,
}  # fmt: skip


def test_names_and_ids_in_order():
    assert {name: BY_NAME[name].id for name in names()} == IDS
    assert all(IDS[a] < IDS[b] for a, b in pairwise(names()))


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
        ("topk(ratio=1)+ef(decay=-0.0)", "topk(ratio=1)+ef(decay=0)"),
        ("topk(ratio=0.000001)", "topk(ratio=1e-06)+ef"),
        ("topk(ratio=1e-1)+ef(decay=1e+0)", "topk(ratio=0.1)+ef"),
        ("topk(ratio=0.1)+momentum", "topk(ratio=0.1)+ef+momentum(m=0.9)"),
        ("topk(ratio=0.1)+momentum(m=0.5)+ef(decay=0.9)", "topk(ratio=0.1)+ef(decay=0.9)+momentum(m=0.5)"),
        ("topk(ratio=0.1)+momentum(nesterov=1)", "topk(ratio=0.1)+ef+momentum(m=0.9,nesterov=1)"),
        ("topk(ratio=0.1)+momentum(m=0,nesterov=1)", "topk(ratio=0.1)+ef"),
        ("onebit", "onebit+ef"),
        ("onebit+ef", "onebit+ef"),
        ("onebit+ef(decay=0.5)", "onebit+ef(decay=0.5)"),
        ("signsgd", "signsgd"),
        ("signum", "signum(beta=0.9)"),
        ("signum(beta=0.123456789012345)", "signum(beta=0.123456789012345)"),
        ("efsignsgd", "efsignsgd+ef"),
        ("sidco-e(ratio=0.001)+ef(decay=0.9)", "sidco-e(ratio=0.001)+ef(decay=0.9)"),
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
        ("gzip", "none, fp16, bf16, topk, "),
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
        ("topk(ratio=0.1)+", "name, or name"),
        ("topk(ratio=0.1)+ef+ef", "at most one ef"),
        ("topk(ratio=0.1)+ef(decay=1.5)", r"\[0, 1\]"),
        ("topk(ratio=0.1)+ef(half=1)", "one of decay"),
        ("topk(ratio=0.1)+ef(decay=0)+momentum", "momentum only together with error feedback"),
        ("topk(ratio=0.1)+momentum+momentum", "at most one momentum"),
        ("topk(ratio=0.1)+momentum(m=1)", r"\[0, 0.9999\]"),
        ("topk(ratio=0.1)+momentum(nesterov=0.5)", r"a whole number in \[0, 1\]"),
        ("topk(ratio=0.1)+momentum(beta=1)", "one of m, nesterov"),
        ("onebit+momentum", "momentum applies to topk"),
        ("signum+ef", "ef applies to topk"),
        ("signum(beta=1)", r"\[0, 0.9999\]"),
        ("fp16+ef", "expected none, got 'ef'; ef applies to topk"),
        ("fp16+twice", "expected none, got 'twice'"),
        ("fp16(x=1)", "one of none"),
    ],
)
def test_refusals_say_what_is_accepted(spec, says):
    with pytest.raises(CodecError, match=says):
        parse(spec)


def values(param):
    """Texts within a parameter's range, the ends among them."""
    if param.words:
        return st.sampled_from(param.words)
    ends = [param.low, param.high, *([param.default] if param.default is not None else [])]
    if param.integer:
        return st.one_of(st.sampled_from(ends), st.integers(int(param.low), int(param.high))).map(lambda v: str(int(v)))
    return st.one_of(st.sampled_from(ends), st.floats(param.low, param.high)).map(repr)


@st.composite
def specs(draw, cls):
    """A spec of a class with drawn parameters and the decorators it takes."""

    def term(name, params):
        given = [(p.name, draw(values(p))) for p in params if p.default is None or draw(st.booleans())]
        return f"{name}({', '.join(f'{k}={v}' for k, v in given)})"

    text = term(cls.name, cls.params)
    for decorator, takes in (("ef", cls.keeps_residual), ("momentum", cls.takes_momentum)):
        if takes and draw(st.booleans()):
            text += f" + {term(decorator, DECORATORS[decorator][0])}"
    return text


@pytest.mark.parametrize("name", names())
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_printed_parses_to_an_equal_codec(name, data):
    spec = data.draw(specs(BY_NAME[name]))
    refusal = None
    try:
        codec = parse(spec)
    except CodecError as error:
        refusal = error
    if refusal is not None:
        # Combinations may be refused (momentum without error feedback, ...), single values in range may not.
        assert refusal.field.startswith(("decorator", name)) and refusal.got not in ("nothing", "")
        return
    assert vars(parse(codec.spec)) == vars(codec)
    decoder = by_id(codec.id, codec.level)
    assert type(decoder) is type(codec) and decoder.level == codec.level


@pytest.mark.parametrize("name", names())
def test_values_out_of_range_are_refused_naming_the_range(name):
    cls = BY_NAME[name]
    needed = {p.name: p for p in cls.params if p.default is None}
    for param in cls.params:
        others = "".join(f",{n}={p.low}" for n, p in needed.items() if n != param.name)
        wrong = ["no-such-word", ""] if param.words else [repr(param.high * 2 + 1), repr(param.low - 1), "nan", "x"]
        wrong += [repr(param.low + 0.5)] if param.integer and param.high > param.low else []
        for text in wrong:
            with pytest.raises(CodecError) as caught:
                parse(f"{name}({param.name}={text}{others})")
            assert caught.value.field == f"{name}.{param.name}"
            assert str(caught.value.expected) == param.allowed
            assert all(str(word) in param.allowed for word in param.words)


def test_parameters_that_are_words_or_whole_numbers():
    word = Param("norm", "l2", 0, 0, "how a bucket is scaled", words=("l2", "max"))
    assert word.read("q", "max") == "max"
    whole = Param("bits", 4, 2, 8, "bits an element", integer=True)
    assert whole.read("q", "8") == 8
    for param, text, says in (
        (word, "l1", r"q.norm: expected one of l2, max \(how a bucket is scaled\), got 'l1'"),
        (whole, "2.5", r"q.bits: expected a whole number in \[2, 8\] \(bits an element\), got 2.5"),
        (whole, "9", r"\[2, 8\]"),
    ):
        with pytest.raises(CodecError, match=says):
            param.read("q", text)


@pytest.mark.parametrize("name", names())
def test_every_codec_declares_what_the_runtime_reads(name):
    cls = BY_NAME[name]
    assert cls.units in ("mean", "sum") and cls.layout in ("flat", "matrix") and cls.rounds in (1, 2)
    assert cls.finalise in ("mean", "vote") and isinstance(cls.conserves, bool)
    assert cls.levels[0] <= cls.levels[1]
    assert cls.keeps_residual <= cls.conserves, "a residual is what was not delivered"
    assert not cls.takes_momentum or cls.keeps_residual


def test_by_id_is_enough_to_decode():
    for spec in ("none", "fp16", "bf16", "topk(ratio=0.003)+ef(decay=0.9)", "onebit", "signum(beta=0.5)"):
        codec = parse(spec)
        twin = by_id(codec.id, codec.level)
        assert type(twin) is type(codec) and twin.level == codec.level and twin.units == codec.units


@pytest.mark.parametrize(("id_", "level"), [(99, 0), (0, 1), (1, 7), (32, 1), (16, 0), (33, 1), (34, 2), (35, 1)])
def test_by_id_refuses_what_no_peer_of_ours_sends(id_, level):
    with pytest.raises(CodecError):
        by_id(id_, level)


def test_every_topk_level_survives_the_header():
    for level in (1, 2, 3, 7, 9999, 10_000, 123_457, 999_999, 1_000_000):
        codec = parse(f"topk(ratio={level / 1e6!r})")
        twin = by_id(16, codec.level)
        assert twin.level == codec.level and parse(twin.spec).level == codec.level


def test_state_sizes():
    for spec, floats in (
        ("fp16", 0),
        ("onebit", 10),
        ("onebit+ef(decay=0)", 0),
        ("topk(ratio=0.1)", 10),
        ("topk(ratio=0.1)+momentum", 20),
    ):
        assert parse(spec).state_floats(10, 2) == floats


def test_error_survives_pickling_and_is_typed():
    with pytest.raises(CodecError) as caught:
        parse("topk(ratio=2)")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.field, copy.got, str(copy)) == ("topk.ratio", "2", str(caught.value))


def test_taken_names_and_ids_are_refused():
    class SameName(Cast):
        id, name = 77, "fp16"

    class SameId(Cast):
        id, name = 1, "fp17"

    for cls in (SameName, SameId):
        with pytest.raises(CodecError, match="not in use by Fp16"):
            register(cls)
    assert "fp17" not in names() and isinstance(by_id(1, 0), Codec)
