"""What each quality takes, the order of loss, and that what the planner knows of codecs is what the codecs say."""

from __future__ import annotations

import pytest

from gcproto.modes import QUALITIES
from gcserver import codecs
from gcserver.codecs import registry
from gcserver.planner.errors import TableError
from gcserver.planner.families import (
    LADDER,
    SPARSE,
    TWO_EXCHANGES,
    candidates,
    error_families,
    first_step,
    ladder,
    late_steps,
    loss,
    parse,
    refused,
)

#: a spec of every codec with a parameter that has no default
GIVEN = {"topk", "randomk", "dgc", "redsync", "gaussiank", "sidco-e", "sidco-gp", "sidco-p"}


def every_codec() -> list[codecs.Codec]:
    values = {"threshold": "threshold(value=0.1)", **{name: f"{name}(ratio=0.01)" for name in GIVEN}}
    return [codecs.parse(values.get(name, name)) for name in registry.names() if name not in registry.FOREIGN]


def test_codecs_are_what_the_planner_takes_them_for() -> None:
    known = every_codec()
    assert {c.name for c in known if c.rounds == 2} == TWO_EXCHANGES
    assert {c.name for c in known if c.layout == "matrix"} == TWO_EXCHANGES
    assert {c.name for c in known if c.levels == (1, 1_000_000)} == SPARSE
    assert {c.name for c in known if c.levels == (1, 1_000_000) and c.name != "randomk"} == SPARSE - {"randomk"}


@pytest.mark.parametrize("spec", [s for quality in QUALITIES for s in LADDER[quality]])
def test_every_rung_is_a_codec_and_keeps_its_meaning_when_printed(spec: str) -> None:
    printed = codecs.parse(spec).spec
    assert parse(printed).key == parse(spec).key
    assert parse(printed).level == parse(spec).level
    if parse(spec).level:
        assert parse(spec).level == codecs.parse(spec).level & 0xFFFFF or parse(spec).name in ("qsgd", "powersgd")


def test_a_ladder_holds_the_rungs_below_it_in_the_order_of_loss() -> None:
    assert ladder("safe") == ("none", "fp16", "bf16", "qsgd(bits=8)")
    assert set(ladder("safe")) < set(ladder("balanced")) < set(ladder("fast"))
    for quality in QUALITIES:
        rungs = ladder(quality)
        assert [s.text for s in sorted(map(parse, rungs), key=loss)] == list(rungs)
        assert [s.text for s in candidates(rungs, quality)] == list(rungs)


def test_no_quality_takes_signs_or_votes() -> None:
    for codec in every_codec():
        if codec.finalise == "vote" or codec.name in ("onebit", "efsignsgd"):
            assert all(refused(parse(codec.spec), quality) for quality in QUALITIES)


@pytest.mark.parametrize(("spec", "takes"), [
    ("none", "safe balanced fast"), ("bf16", "safe balanced fast"),
    ("qsgd(bits=8)", "safe balanced fast"), ("qsgd(bits=5)", "balanced fast"), ("qsgd(bits=3)", ""),
    ("qsgd(bits=8,bucket=1024,kind=maxmin)", "safe balanced fast"), ("qsgd(bits=8,bucket=64,kind=l2)", ""),
    ("powersgd(rank=8)+ef", "balanced fast"), ("powersgd(rank=2)", ""),
    ("powersgd(rank=16,values=16)", "balanced fast"), ("powersgd(rank=16,packed=1)", ""),
    ("sidco-e(ratio=0.02)", "balanced fast"), ("topk(ratio=0.001)", "fast"), ("topk(ratio=0.0001)", ""),
    ("topk(ratio=0.01,packed=1)", "balanced fast"), ("topk(ratio=0.01,values=8)", ""),
    ("sidco-e(ratio=0.01,packed=1,values=16)", "balanced fast"), ("sidco-e(ratio=0.005,values=16)", "fast"),
    ("sidco-e(ratio=0.01,values=32)", "balanced fast"), ("qsgd(bits=8,values=16)", ""),
    ("topk(ratio=0.01)+ef(decay=0.9)", ""), ("topk(ratio=0.01)+momentum", ""), ("dgc(ratio=0.01)", ""),
])  # fmt: skip
def test_what_a_quality_takes(spec: str, takes: str) -> None:
    assert " ".join(q for q in QUALITIES if not refused(parse(spec), q)) == takes


def test_at_one_ratio_sidco_stands_before_topk_and_a_larger_ratio_before_both() -> None:
    order = ["topk(ratio=0.01)", "sidco-e(ratio=0.01)", "topk(ratio=0.05)", "qsgd(bits=4)", "signum", "none"]
    assert [s.text for s in sorted(map(parse, order), key=loss)] == [
        "none", "qsgd(bits=4)", "topk(ratio=0.05)", "sidco-e(ratio=0.01)", "topk(ratio=0.01)", "signum",
    ]  # fmt: skip


def test_at_one_ratio_rounded_values_are_the_lossier_ones() -> None:
    order = ["sidco-e(ratio=0.01,packed=1,values=16)", "sidco-e(ratio=0.01,packed=1)"]
    assert [s.text for s in sorted(map(parse, order), key=loss)] == order[::-1]
    assert [parse(s).width for s in order] == [16, 32] and parse("qsgd(bits=8)").width == 32
    ranks = ["powersgd(rank=4)", "powersgd(rank=16,values=16)", "powersgd(rank=16)"]
    assert [s.text for s in sorted(map(parse, ranks), key=loss)] == ranks[::-1]


@pytest.mark.parametrize(("a", "b", "same"), [
    ("topk(ratio=0.01)", "topk(ratio=0.010)+ef", True), ("topk(ratio=0.01)", "topk(ratio=0.02)", False),
    ("qsgd(bits=8)", "qsgd(bits=8,bucket=1024,kind=maxmin)", True), ("qsgd(bits=8)", "qsgd(bits=8)+ef", False),
    ("topk(ratio=0.01)", "topk(ratio=0.01)+ef(decay=0)", False), ("topk(ratio=0.01)", "sidco-e(ratio=0.01)", False),
])  # fmt: skip
def test_which_specs_mean_the_same(a: str, b: str, same: bool) -> None:
    assert (parse(a).key == parse(b).key) is same


@pytest.mark.parametrize(("spec", "level"), [("topk(ratio=0.001)", 1000), ("qsgd(bits=4)", 4), ("powersgd(rank=3)", 3),
                                             ("none", 0), ("sidco-e(ratio=0.05)", 50_000)])  # fmt: skip
def test_levels_of_specs(spec: str, level: int) -> None:
    assert parse(spec).level == level


def test_under_which_names_errors_are_looked_for() -> None:
    assert error_families(parse("sidco-e(ratio=0.1)")) == ("sidco-e", "sidco", "topk")
    assert error_families(parse("qsgd(bits=4)")) == ("qsgd", "qsgd")


@pytest.mark.parametrize("text", ["", "topk(", "(x)", "topk(ratio=much)", "topk(ratio)", "topk(ratio=inf)"])
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(TableError, match="spec"):
        parse(text)


def test_an_unknown_quality_is_refused() -> None:
    with pytest.raises(TableError, match="safe, balanced, fast"):
        ladder("best")


@pytest.mark.parametrize(
    ("spec", "tolerant", "others"),
    [
        ("none", 0, 0), ("fp16", 0, 0), ("qsgd(bits=4)", 0, 0),
        ("powersgd(rank=32)", 0, 0), ("powersgd(rank=16,values=16)", 0, 0),
        ("powersgd(rank=15)", 100, 1000), ("powersgd(rank=4)", 100, 1000),
        ("sidco-e(ratio=0.05)", 1000, 1000), ("topk(ratio=0.01)", 1000, 1000),
    ],
)  # fmt: skip
def test_from_which_step_on_a_spec_is_in_question(spec: str, tolerant: int, others: int) -> None:
    """By how much it sends late, and by whether the optimizer is known to stand that."""
    assert [first_step(parse(spec), 100, stands) for stands in (True, False)] == [tolerant, others]
    assert [first_step(parse(spec), 0, stands) for stands in (True, False)] == [0, 0], "nothing waits"
    for stands in (True, False):
        assert first_step(parse(spec), 100, stands) in {0, *(step for _, step in late_steps(100, stands))}
