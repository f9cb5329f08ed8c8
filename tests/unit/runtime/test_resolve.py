"""What the core is told of a codec.

What may live here: tests of `gcserver/runtime/resolve.py`. What may not: codecs.
"""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.bench import default_specs
from gcserver.codecs import CodecError
from gcserver.runtime.resolve import resolve


def test_what_takes_whole_matrices_says_so() -> None:
    assert resolve("powersgd(rank=4)").whole
    assert not resolve("topk(ratio=0.01)").whole and not resolve("none").whole


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd"):
        resolve("zip")


def test_a_third_partys_codec_that_fails_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(spec: str) -> object:
        return 1 // 0

    monkeypatch.setattr("gcserver.codecs.parse", fails)
    with pytest.raises(CodecError, match=r"does not fail.*'theirs\(x=1\)': ZeroDivisionError"):
        resolve("theirs(x=1)")


@pytest.mark.parametrize(
    ("spec", "node", "owner"),
    [
        ("none", False, False),
        ("fp16", False, False),
        ("topk(ratio=0.01)", True, True),
        ("topk(ratio=0.01)+ef(decay=0)", False, False),
        ("signum", True, False),
        ("powersgd", True, False),
        ("qsgd", False, False),
    ],
)
def test_who_keeps_state(spec: str, node: bool, owner: bool) -> None:
    choice = resolve(spec)
    assert (choice.feedback, choice.feedback and choice.owner_feedback) == (node, owner)


@pytest.mark.parametrize(
    ("spec", "levels", "own", "exact", "tunable", "drains"),
    [
        ("none", (0, 0), 0, 0, False, True),
        ("bf16", (0, 0), 0, 0, False, True),
        ("topk(ratio=0.01)", (1, 1_000_000), 10_000, 1_000_000, True, False),
        ("redsync(ratio=0.5)", (1, 1_000_000), 500_000, 1_000_000, True, False),
        ("randomk(ratio=0.01)", (1, 1_000_000), 10_000, 1_000_000, False, False),
        ("qsgd(bits=3)", (2, 8), 3, 8, False, False),
        ("qsgd(levels=15,bucket=64,kind=l2)+ef", (5, 8), 5, 8, False, False),
        ("natural(bits=8)", (8, 9), 8, 9, False, False),
        ("terngrad", (0, 0), 2, 0, False, False),
        ("powersgd(rank=3)", (1, 3), 3, 65, False, False),
        ("onebit", (0, 0), 0, 0, False, False),
    ],
)
def test_what_levels_mean(
    spec: str, levels: tuple[int, int], own: int, exact: int, tunable: bool, drains: bool
) -> None:
    choice = resolve(spec)
    assert (choice.levels, choice.own, choice.exact) == (levels, own, exact)
    assert (choice.tunable, choice.drains) == (tunable, drains)


def test_no_owner_keeps_state_where_nodes_keep_none() -> None:
    """The core marks an owner's state as written only along with the nodes'."""
    for spec in default_specs(np.ones(8, np.float32)):
        choice = resolve(spec)
        assert choice.feedback or not choice.owner_feedback, spec
