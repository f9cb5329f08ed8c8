"""The words for who makes plans."""

from __future__ import annotations

import pytest

from gcproto import modes
from gcserver.config_keys import KEYS
from gcserver.planner.auto import PARTS


def test_every_automatic_mode_is_all_parts_or_one() -> None:
    assert set(modes.MODES) == {modes.STATIC, modes.AUTO, *PARTS}


def test_what_the_configuration_starts_from_are_such_words() -> None:
    defaults = {key.name: key.default for key in KEYS}
    assert not modes.unknown(str(defaults["plan.mode"]), str(defaults["plan.quality"]))
    assert (defaults["plan.mode"], defaults["plan.quality"]) == (modes.STATIC, modes.BALANCED)


@pytest.mark.parametrize(
    ("mode", "quality", "text"),
    [("", "", ""), ("auto", "fast", ""), ("clever", "", "plan='clever': expected one of static, auto"),
     ("auto", "best", "quality='best': expected one of safe, balanced, fast")],
)  # fmt: skip
def test_other_words_are_named(mode: str, quality: str, text: str) -> None:
    assert modes.unknown(mode, quality).startswith(text) and bool(modes.unknown(mode, quality)) == bool(text)
