"""What the benchmark of predictions makes of plans and steps, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prediction
from benchmarks.prediction import Plan, Watch
from gcproto import admin_pb2
from gcserver.planner.families import DENSE, ladder
from gcserver.runtime import calibration


def answer(forecast_of: int, in_force: int, since: int = 13) -> admin_pb2.GetPlanResponse:
    groups = [
        admin_pb2.GroupForecast(bytes=10, codec="fp16"),
        admin_pb2.GroupForecast(bytes=900, codec="topk(ratio=0.01)"),
    ]
    forecast = admin_pb2.Forecast(plan_version=forecast_of, expected_seconds=0.2, dense_seconds=1.0, groups=groups)
    planned = admin_pb2.DomainPlan(plan_version=in_force, since_step=since, forecast=forecast)
    return admin_pb2.GetPlanResponse(domains=[admin_pb2.DomainPlan(plan_version=in_force), planned])


def test_the_planners_plans_are_heard_as_they_come_into_force() -> None:
    watch = Watch()
    watch.hear(admin_pb2.GetPlanResponse(), 3)
    assert (watch.dense, watch.plans) == (None, {})
    watch.hear(answer(0, 0), 12)
    assert (watch.dense, watch.plans, watch.changed) == (1.0, {}, 12), "proposed, and dense is better"
    watch.hear(answer(2, 1, since=5), 13)
    assert watch.plans == {}, "the one in force is not the one that was forecast"
    for step in (14, 20):
        watch.hear(answer(2, 2), step)
        assert watch.plans == {2: Plan(2, 13, "topk(ratio=0.01)", 0.2)}, "by what most of it uses"
        assert watch.changed == 13
    watch.hear(answer(0, 3, since=30), 31)
    assert (list(watch.plans), watch.since, watch.changed) == ([2], {1: 5, 2: 13, 3: 30}, 30), (
        "and the one before is back"
    )


def watch_of(plans: list[Plan]) -> Watch:
    return Watch(1.0, {p.version: p for p in plans}, {p.version: p.since for p in plans})


def test_steps_after_a_plan_was_taken_back_are_not_its_own() -> None:
    watch = watch_of([Plan(1, 13, "onebit", 0.2), Plan(3, 60, "fp16", 0.3)])
    watch.since[2] = 40
    took = {step: 0.2 if step < 40 else 0.9 if step < 60 else 0.3 for step in range(2, 80)}
    assert [(row["plan"], row["median_s"], row["runs"]) for row in prediction.rows(watch, took)] == [
        (0, 0.2, 10), (1, 0.2, 25), (3, 0.3, 18)
    ]  # fmt: skip


def test_steps_belong_to_the_plan_they_were_made_under() -> None:
    plans = [Plan(1, 13, "onebit", 0.2), Plan(2, 25, "none", 0.4), Plan(3, 40, "fp16", 0.3)]
    took = {step: 1.1 if step < 13 else 0.25 if step < 25 else 0.4 for step in range(2, 44)}
    took[13] = took[14] = 9.0  # taking hold
    dense, first, second = prediction.rows(watch_of(plans), took, model="demo")
    assert (dense["plan"], dense["codec"], dense["expected_s"], dense["runs"]) == (0, "none", 1.0, 10)
    assert dense["error"] == pytest.approx(0.1)
    assert (first["plan"], first["median_s"], first["runs"], first["model"]) == (1, 0.25, 10, "demo")
    assert first["error"] == pytest.approx(0.25)
    assert (second["plan"], second["runs"]) == (2, 13)
    assert second["error"] == pytest.approx(0.0), "and the third plan had too few steps to say anything"
    assert prediction.show(first).split() == ["1", "onebit", "200", "ms", "250", "ms", "10", "+25", "%", "MISSED"]
    assert prediction.show(dense).endswith("met (fitted)"), "the planner had seen these steps"
    assert [row["fitted"] for row in (dense, first, second)] == [True, False, True]
    assert prediction.rows(Watch(), took) == []


def test_arguments_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--models", "lenet"], ["--rates", "fast"], ["--nodes", "none"], ["--set", "x"]):
        with pytest.raises(SystemExit):
            prediction.main(argv)
        assert "expected" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_run_on_loopback(tmp_path: Path) -> None:
    out, folder = tmp_path / "prediction.json", tmp_path / "profiles"
    # What codecs cost is found here by the daemons, which would take some seconds each to measure it well.
    calibration.costs((DENSE, *ladder("fast")), folder, seconds=0.008)
    argv = ["--models", "tiny", "--rates", "loopback", "--steps", "10", "--set", "plan.warmup_steps=6"]
    argv += ["--set", f"plan.profiles={folder}"]
    assert prediction.main([*argv, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["plan"] for row in rows][:1] == [0], "dense steps come first"
    for row in rows:
        assert row["model"] == "tiny"
        assert row["expected_s"] > 0
        assert row["error"] == pytest.approx(row["median_s"] / row["expected_s"] - 1)
