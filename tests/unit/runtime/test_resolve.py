"""What the core is told of a codec.

What may live here: tests of `gcserver/runtime/resolve.py`. What may not: codecs.
"""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.bench import default_specs
from gcserver.runtime.resolve import resolve


def test_what_takes_whole_matrices_says_so() -> None:
    assert resolve("powersgd(rank=4)").whole
    assert not resolve("topk(ratio=0.01)").whole and not resolve("none").whole


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd"):
        resolve("zip")


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


def test_no_owner_keeps_state_where_nodes_keep_none() -> None:
    """The core marks an owner's state as written only along with the nodes'."""
    for spec in default_specs(np.ones(8, np.float32)):
        choice = resolve(spec)
        assert choice.feedback or not choice.owner_feedback, spec
