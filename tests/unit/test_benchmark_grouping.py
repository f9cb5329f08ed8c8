"""The grouping benchmark: its arguments, its ratios. The measurement itself needs daemons."""

from __future__ import annotations

import pytest

from benchmarks import grouping


def test_ratios_are_of_whole_steps_and_of_what_is_beyond_computing() -> None:
    args = grouping.parse(["--layers", "3"])
    times = {"compute": [1.0, 1.0], "layer-wise": [5.0, 5.0], "2": [2.0, 2.0], "default": [0.5, 0.5]}
    rows = grouping.rows_of({"times": times, "bytes": 7}, args, "none")
    assert [r["grouping"] for r in rows] == list(times)
    assert [r["ratio_layer_wise"] for r in rows] == [5.0, 1.0, 2.5, 10.0]
    assert [r.get("exchange_ratio_layer_wise") for r in rows] == [None, 1.0, 4.0, None]
    assert {r["tensors"] for r in rows} == {6}
    assert grouping.show(rows[2]).split() == ["2", "2.00", "s", "1.00", "s", "2.50", "4.00"]


def test_codecs_and_groupings_are_lists() -> None:
    assert grouping.parse([]).codec == ["none", "topk(ratio=0.01)"]
    args = grouping.parse(["--codec", "fp16", "--codec", "qsgd(bits=8)", "--groupings", "default,3"])
    assert (args.codec, args.groupings) == (["fp16", "qsgd(bits=8)"], ("default", "3"))


def test_what_is_no_grouping_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grouping.parse(["--groupings", "default,best"])
    assert "got best" in capsys.readouterr().err
