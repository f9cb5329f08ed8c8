"""The benchmark of encryption: its arguments, its ratios. The measurement itself needs daemons."""

from __future__ import annotations

import pytest

from benchmarks import security


def test_ratios_are_of_time_without_keys_and_of_time_with_the_first_number_of_lanes() -> None:
    args = security.parse(["--size", "1000000000", "--lanes", "1,4", "--network", "1gbit"])
    times = {"plain": ([1.0, 2.0, 3.0], [1.0]), "curve": ([4.0, 4.0, 9.0], [2.0])}
    each = {security.label(s, lanes): times[s][i] for s in times for i, lanes in enumerate(args.lanes)}
    cpu = {security.label(s, lanes): 0.5 * lanes for s in times for lanes in args.lanes}
    result = {"times": each, "cpu": cpu}
    rows = security.rows_of(result, args, "none")
    assert [(r["system"], r["lanes"], r["ratio"], r["ratio_lanes"]) for r in rows] == [
        ("plain", 1, 1.0, 1.0), ("curve", 1, 0.5, 1.0), ("plain", 4, 1.0, 2.0), ("curve", 4, 0.5, 2.0)
    ]  # fmt: skip
    assert (rows[0]["gbs"], rows[1]["gbs"], rows[3]["cpu_s_per_gb"], rows[1]["runs"]) == (0.5, 0.25, 2.0, 3)
    assert security.show(rows[3]).split() == ["none", "curve", "4", "2.00", "s", "0.500", "0.50", "2.00", "2.00"]


def test_codecs_are_listed_and_sizes_read() -> None:
    assert security.parse([]).codec == ["none", "topk(ratio=0.01)"] and security.parse([]).size == 64 << 20
    assert security.parse([]).lanes == [1, 2]
    quick = security.parse(["--quick", "--codec", "fp16"])
    assert (quick.codec, quick.size, quick.turns) == (["fp16"], 16 << 20, 3)


@pytest.mark.parametrize(("option", "value"), [("--size", "much"), ("--lane-share", "2"), ("--lane-share", "half")])
def test_what_cannot_be_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        security.parse([option, value])
    assert option in capsys.readouterr().err
