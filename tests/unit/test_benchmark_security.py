"""The benchmark of encryption: its arguments, its ratios. The measurement itself needs daemons."""

from __future__ import annotations

import pytest

from benchmarks import security


def test_the_ratio_is_of_time_without_keys_to_time_with_them() -> None:
    args = security.parse(["--size", "1000000000", "--set", "node.lanes=2", "--network", "1gbit"])
    result = {"times": {"plain": [1.0, 2.0, 3.0], "curve": [4.0, 4.0, 9.0]}, "cpu": {"plain": 0.5, "curve": 1.5}}
    plain, curve = security.rows_of(result, args, "none")
    assert (plain["ratio"], curve["ratio"]) == (1.0, 0.5)
    assert (plain["gbs"], curve["gbs"]) == (0.5, 0.25)
    assert (curve["cpu_s_per_gb"], curve["lanes"], curve["runs"]) == (1.5, 2, 3)
    assert security.show(curve).split() == ["none", "curve", "2", "4.00", "s", "0.250", "0.50", "1.50"]


def test_codecs_are_listed_and_sizes_read() -> None:
    assert security.parse([]).codec == ["none", "topk(ratio=0.01)"] and security.parse([]).size == 64 << 20
    quick = security.parse(["--quick", "--codec", "fp16"])
    assert (quick.codec, quick.size, quick.turns) == (["fp16"], 16 << 20, 3)


def test_what_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        security.parse(["--size", "much"])
    assert "--size" in capsys.readouterr().err
