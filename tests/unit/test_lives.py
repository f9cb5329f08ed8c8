"""Which daemons that have ended are started again."""

from __future__ import annotations

import pytest

from gcserver.lives import MOST, YOUNG, Lives

OLD = YOUNG + 1


@pytest.mark.parametrize(
    ("ends", "another"),
    [
        ([(0, OLD)], [False]),
        ([(0, 1.0)], [False]),
        ([(2, 1.0)], [False]),
        ([(1, OLD)], [True]),
        ([(-9, 1.0)] * MOST, [True] * (MOST - 1) + [False]),
        ([(-9, 1.0), (-9, OLD), (-9, 1.0), (-9, 1.0), (-9, 1.0)], [True, True, True, True, False]),
        ([(-9, 1.0), (1, 1.0), (1, 1.0)], [True, True, False]),
        ([(-9, OLD)] * 5, [True] * 5),
    ],
    ids=[
        "drained", "drained at once", "cannot start", "gave up later", "dies at once", "lived longer in between",
        "cannot start again at once", "dies now and then",
    ],
)  # fmt: skip
def test_who_is_started_again(ends: list[tuple[int, float]], another: list[bool]) -> None:
    lives = Lives()
    assert [lives.another(*end) for end in ends] == another
