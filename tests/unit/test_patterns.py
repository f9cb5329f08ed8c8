"""Which pattern of a plan counts for a name: tests of `proto/patterns.py`."""

from __future__ import annotations

import pytest

from gcproto import patterns
from gcproto.patterns import Patterns


def test_what_is_remembered_of_names_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "REMEMBERED", 2)
    index = Patterns(("a*", "ab", "*b", "[[]x]"))
    for _ in range(2):
        assert [index.last(name) for name in ("a", "ab", "b", "[x]", "c")] == [0, 2, 2, 3, -1]
