"""What the benchmark of steered jobs says of its runs, and how it changes links; no lab, no daemon.

What may live here: tests of `benchmarks/dc2_live.py`. What may not: controllers.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import dc2_live
from benchmarks.dc2_live import Live, System, Weather
from benchmarks.lab.netns import LabError
from examples.runs import Method, Record, Step


def live(name: str, durations: list[float], losses: list[float], ratios: list[tuple[float, float]]) -> Live:
    ends = list(itertools.accumulate(durations))
    steps = [
        Step(i + 1, end, loss, (0, 0) if i == 0 else (2_000_000, 4_000_000))
        for i, (end, loss) in enumerate(zip(ends, losses, strict=True))
    ]
    record = Record(Method(name, "gradcomm"), steps)
    return Live(dc2_live.system(name, "topk"), record, [(0.0, 1e8), (3.0, 1e7)], [ratios, [(0.5, 0.2)] * bool(ratios)])


FALLING = [4.0, 3.0, 2.0, 1.0, 1.0, 1.0]


def test_systems_by_name() -> None:
    assert dc2_live.system("none", "dgc") == System("none", "none")
    assert dc2_live.system("uniform-0.001", "dgc") == System("uniform-0.001", "dgc(ratio=0.001)", "none", 0.001)
    assert dc2_live.system("da5", "topk") == System("da5", "topk(ratio=0.1)", "dc2-da5")
    for wrong in ("da6", "uniform", "uniform-2", "uniform-x", "0.1"):
        with pytest.raises(ValueError, match="expected none, uniform-RATIO"):
            dc2_live.system(wrong, "topk")


def test_a_run_in_numbers() -> None:
    steered = live("da2", [1.0, 1.0, 2.0, 2.0, 4.0, 4.0], FALLING, [(0.5, 0.1), (5.0, 0.02)])
    r = dc2_live.row(steered, 2.5, nodes=2)
    assert (r["system"], r["nodes"], r["steps"]) == ("da2", 2, 6)
    assert (r["median_s"], r["mean_s"], r["step_bytes"]) == (3.0, 3.0, 3_000_000)
    assert r["ratio_mean"] == pytest.approx((0.1 + 3 * 0.02) / 4), "steps ended after 4, 6, 10 and 14 s"
    assert r["ratio_means"] == [r["ratio_mean"], pytest.approx(0.2)], "of each host"
    assert r["loss_end"] == pytest.approx(2.0), "of all, since there are fewer than ten"
    assert r["seconds_to_loss"] == 6.0, "the first four steps have a mean of 2.5"
    assert dc2_live.row(steered, 0.5)["seconds_to_loss"] is None
    words = dc2_live.line(r).split()
    assert words == ["da2", "6", "3.00", "s", "4.00", "s", "3.00", "0.0400", "0.2000", "2.000", "6.00", "s"]


def test_a_ratio_that_never_changes_and_none() -> None:
    uniform = dc2_live.row(live("uniform-0.001", [1.0] * 6, FALLING, []), 0.0)
    plain = dc2_live.row(live("none", [1.0] * 6, FALLING, []), 0.0)
    assert (uniform["ratio_mean"], plain["ratio_mean"]) == (0.001, None)
    assert dc2_live.line(plain).split()[-4:] == ["-", "-", "2.000", "-"]


def test_a_run_too_short_to_say_anything_is_an_error() -> None:
    with pytest.raises(ValueError, match="da2: expected more than 3 steps, got 3: run longer"):
        dc2_live.row(live("da2", [1.0] * 3, FALLING[:3], []), 1.0)


def test_all_race_to_a_loss_that_each_but_none_reached() -> None:
    runs = {
        "none": live("none", [9.0] * 2, [4.0, 4.0], []),
        "da2": live("da2", [1.0] * 6, FALLING, []),
        "da5": live("da5", [1.0] * 5, FALLING[:5], []),
    }
    assert dc2_live.target(runs) == pytest.approx(2.2)
    assert dc2_live.target({"none": runs["none"]}) == 4.0


def test_ratios_are_read_from_a_daemons_log() -> None:
    log = (
        "2026-11-21 10:00:00,250 DEBUG n0: domain 1 tuned: notch -1, level 100000\n"
        "2026-11-21 10:00:00,300 INFO n0: job train formed, 2 ranks (n0: 1, n1: 1)\n"
        "2026-11-21 10:00:01,500 DEBUG n0: domain 1 tuned: notch -1, level 5000\n"
        "2026-11-21 10:00:02,000 DEBUG n0: domain 1 tuned: notch -1, level 0\n"
    )
    (first, one), (second, two) = dc2_live.tuned(log)
    assert (one, two, second - first) == (0.1, 0.005, pytest.approx(1.25))


def test_links_change_in_turn_once_the_run_has_begun() -> None:
    shaped: list[str] = []
    with Weather(shaped.append, [1e8, 5e7, 1e7], 0.001) as weather:
        assert shaped == ["100000000bit"], "before anything starts"
        weather.begin()
        weather._thread.join(10.0)
    assert shaped == ["100000000bit", "50000000bit", "10000000bit"]
    assert [rate for _, rate in weather.changed] == [1e8, 5e7, 1e7]
    with Weather(shaped.append, [1e8, 5e7], 1000.0) as never:
        pass
    assert not never.changed


def test_a_lab_that_fails_is_not_silent() -> None:
    def shape(rate: str) -> None:
        if rate != "100bit":
            raise LabError("tc: no")

    def change() -> None:
        with Weather(shape, [100.0, 10.0], 0.001) as weather:
            weather.begin()
            weather._thread.join(10.0)

    with pytest.raises(LabError, match="tc: no"):
        change()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = {
        "none": live("none", [1.0] * 4, FALLING[:4], []),
        "uniform-0.1": live("uniform-0.1", [1.0] * 5, FALLING[:5], []),
        "da2": live("da2", [1.0] * 6, FALLING, [(0.5, 0.1), (4.5, 0.02)]),
    }
    dc2_live.plot(tmp_path / "deep" / "live.png", {2: runs, 4: runs})
    assert (tmp_path / "deep" / "live.png").read_bytes().startswith(b"\x89PNG")


def test_arguments_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    args = dc2_live.parse(["--nodes", "2,4", "--systems", "none,da4", "--base", "1gbit", "--seeds", "3,4"])
    assert args.nodes == [2, 4] and [s.name for s in args.systems] == ["none", "da4"]
    assert [p.seed for p in args.profiles] == [3, 4]
    assert set(args.profiles[0].rates(1000.0)) == {1e9, 5e8, 2e8, 1e8}
    for wrong in (["--systems", "da9"], ["--base", "fast"], ["--nodes", "two"], ["--period", "0"]):
        with pytest.raises(SystemExit):
            dc2_live.parse(wrong)
    assert "expected none, uniform-RATIO" in capsys.readouterr().err
