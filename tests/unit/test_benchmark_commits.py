"""The benchmark of commits: its arguments, its ratio. The measurement itself needs daemons."""

from __future__ import annotations

import pytest

from benchmarks import commits, turns


def test_the_ratio_is_of_time_with_commits_to_time_without() -> None:
    args = commits.parse(["--sizes", "4KiB", "--nodes", "3"])
    result = {"times": {"fail": [1.0, 2.0, 3.0], "shrink": [3.0, 3.0, 9.0]}, "cpu": {"fail": 0.001, "shrink": 0.002}}
    fail, shrink = turns.rows(result, args, 4096, "on_loss", commits.POLICIES)
    assert (fail["on_loss"], fail["ratio"], shrink["on_loss"], shrink["ratio"]) == ("fail", 1.0, "shrink", 1.5)
    assert (shrink["cpu_ms"], shrink["runs"], shrink["nodes"], shrink["bytes"]) == (2.0, 3, 3, 4096)
    assert commits.show(shrink).split() == ["4", "KiB", "shrink", "3.00", "s", "1.50", "2.00", "ms"]


def test_sizes_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert commits.parse([]).sizes == [4 << 10, 1 << 20, 64 << 20]
    assert commits.parse(["--quick"]).sizes == [4 << 10, 1 << 20]
    with pytest.raises(SystemExit):
        commits.parse(["--sizes", "much"])
    assert "--sizes" in capsys.readouterr().err
