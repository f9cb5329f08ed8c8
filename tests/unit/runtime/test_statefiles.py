"""Files that outlive a process.

What may live here: tests of `gcserver/runtime/statefiles.py` that need no full file system. What may not: those
(`tests/integration/test_memory.py`).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from gcserver.runtime.statefiles import incarnation, latest


def test_lives_are_numbered_upwards_also_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10**18, 10**18 + 5, 10**18 - 3600 * 10**9, 10**18 - 3600 * 10**9, 10**19]
    monkeypatch.setattr("gcserver.runtime.statefiles.time.time_ns", lambda: clock.pop(0))
    lives = [incarnation(tmp_path / "lane0.incarnation") for _ in range(5)]
    assert lives == sorted(set(lives)) and (lives[0], lives[-1]) == (10**18, 10**19)
    assert all(b - a >= 1 << 20 for a, b in pairwise(lives)), "a life numbers what it begins"
    assert (tmp_path / "lane0.incarnation").stat().st_mode & 0o777 == 0o600


def test_another_nodes_life_may_be_a_day_ahead_of_this_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcserver.runtime.statefiles.time.time_ns", lambda: 10**18)
    assert latest() == 10**18 + 24 * 3600 * 10**9


@pytest.mark.parametrize("content", ["", "zwei", "-"])
def test_a_file_that_says_nothing_and_one_that_cannot_be_written_keep_nobody_from_starting(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcserver.runtime.statefiles.time.time_ns", lambda: 1 << 40)
    path = tmp_path / "supervisor.incarnation"
    path.write_text(content)
    assert incarnation(path) == 1 << 40
    assert incarnation(tmp_path / "not there" / "supervisor.incarnation") == 1 << 40
