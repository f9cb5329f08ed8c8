"""What the core is told of a codec.

What may live here: tests of `gcserver/runtime/resolve.py`. What may not: codecs.
"""

from __future__ import annotations

import pytest

from gcserver.runtime.resolve import resolve


def test_what_takes_whole_matrices_says_so() -> None:
    assert resolve("powersgd(rank=4)").whole
    assert not resolve("topk(ratio=0.01)").whole and not resolve("none").whole


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd"):
        resolve("zip")
