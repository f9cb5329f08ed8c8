"""The benchmark of traces: its arguments, its ratio. The measurement itself needs daemons."""

from __future__ import annotations

from benchmarks import tracing, turns


def test_the_ratio_is_of_time_with_a_trace_to_time_without() -> None:
    args = tracing.parse(["--sizes", "1MiB", "--codec", "none"])
    result = {"times": {"plain": [2.0, 2.0, 3.0], "traced": [3.0, 2.5, 2.5]}, "cpu": {"plain": 0.001, "traced": 0.002}}
    plain, traced = turns.rows(result, args, 1 << 20, "way", ("plain", "traced"), codec=args.codec)
    assert (plain["way"], plain["ratio"], traced["way"], traced["ratio"]) == ("plain", 1.0, "traced", 1.25)
    assert (traced["cpu_ms"], traced["runs"], traced["codec"], traced["bytes"]) == (2.0, 3, "none", 1 << 20)
    assert tracing.show(traced).split() == ["1", "MiB", "traced", "2.50", "s", "1.250", "2.00", "ms"]


def test_quick_is_fewer_of_everything_that_was_not_named() -> None:
    assert tracing.parse([]).sizes == [4 << 10, 1 << 20, 64 << 20]
    quick = tracing.parse(["--quick"])
    assert (quick.sizes, quick.turns, quick.calls) == ([4 << 10, 1 << 20], 3, 5)
    assert tracing.parse(["--quick", "--sizes", "16MiB"]).sizes == [16 << 20]
