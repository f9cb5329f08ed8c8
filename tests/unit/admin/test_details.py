"""What the dashboard shows of a job: layers, plan, a step."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gcserver.admin.details import MOST_BARS, MOST_LAYERS, MOST_RULES, breakdown, covered, details
from gcserver.admin.planning import TimelineJob
from gcserver.admin.source import PlanRule, PlanStatus, TensorStatus
from tests.unit.admin.source import DRAWN, JOB, PLAN, TENSORS

FIRST, *OTHERS = PLAN.domains
SEEN = replace(PLAN, domains=(replace(FIRST, predicted=DRAWN, measured=DRAWN[:2]), *OTHERS))


def test_of_a_job_with_a_plan() -> None:
    tensors = [replace(TENSORS[0], residual_norm=3.0, gradient_norm=2.0), TENSORS[1]]
    shown = details(JOB, tensors, SEEN)
    assert (shown["id"], shown["label"]) == (JOB.id, "gpt")
    layers = shown["layers"]
    assert (layers["tensors"], layers["raw"], layers["ratio"]) == (2, 4256, 2.0), "of what was sent"
    assert [(t["name"], t["ratio"], t["error"]) for t in layers["shown"]] == [
        ("wte.weight", 2.0, 1.5), ("ln.bias", None, None),
    ]  # fmt: skip
    plan = shown["plan"]
    assert (plan["mode"], plan["quality"], plan["says"], plan["version"]) == ("auto", "fast", "measures the link", 2)
    (domain,) = plan["domains"]
    assert (domain["label"], domain["version"], domain["coming"]) == ("world", 1, [{"step": 44, "version": 2}])
    assert [g["why"] for g in domain["groups"]] == ["rule wte*", "no rule matches; small: to everyone at once"]
    assert domain["forecast"]["expected"] == 0.25 and domain["controllers"][0]["ratio"] == 0.015
    (step,) = shown["steps"]
    assert (step["domain"], step["seconds"], step["expected"]) == ("world", 0.2, 0.25)
    assert step["predicted"]["end"] == 0.25 and step["predicted"]["left_out"] == 0
    assert step["measured"]["bars"] == [["a compute", "compute", 0.0, 0.2], ["a out", "wte.weight", 0.1, 0.15]]
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_of_a_job_of_which_nothing_is_known() -> None:
    shown = details(JOB, [], PlanStatus("gpt", JOB.id))
    assert shown["layers"] == {"tensors": 0, "raw": 0, "ratio": None, "shown": []}
    assert shown["plan"]["domains"] == shown["steps"] == []


def test_what_is_not_finite_is_not_shown_as_a_number() -> None:
    tensors = [
        replace(TENSORS[0], residual_norm=math.nan, gradient_norm=1.0),
        replace(TENSORS[1], residual_norm=1.0, gradient_norm=math.inf),
    ]
    shown = details(JOB, tensors, SEEN)
    assert [(t["held"], t["error"]) for t in shown["layers"]["shown"]] == [(None, None), (1.0, None)]
    json.dumps(shown, allow_nan=False)
    tiny = [replace(TENSORS[0], residual_norm=1e300, gradient_norm=1e-300)]
    assert details(JOB, tiny, SEEN)["layers"]["shown"][0]["error"] is None


def test_a_step_that_nobody_could_predict_is_expected_to_take_nothing_known() -> None:
    assert FIRST.forecast is not None
    for expected in (0.0, math.inf):
        forecast = replace(FIRST.forecast, expected_seconds=expected)
        shown = details(JOB, TENSORS, replace(PLAN, domains=(replace(FIRST, forecast=forecast),)))
        assert shown["steps"][0]["expected"] is shown["plan"]["domains"][0]["forecast"]["expected"] is None
        json.dumps(shown, allow_nan=False)


def test_it_is_bounded_and_the_largest_are_shown() -> None:
    many = [TensorStatus(f"t{i}", "d", "float32", (i,), 4 * i, "none", 4 * i) for i in range(MOST_LAYERS + 50)]
    bars = tuple(
        TimelineJob(f"encode {i}", "lane 0", "a", i, i + (2.0 if i == 7 else 1.0)) for i in range(MOST_BARS + 9)
    )
    rules = tuple(PlanRule(str(i), "none") for i in range(MOST_RULES + 1))
    plan = replace(PLAN, domains=(replace(FIRST, measured=bars, rules=rules),))
    shown = details(JOB, many, plan)
    assert shown["layers"]["tensors"] == MOST_LAYERS + 50
    assert [t["name"] for t in shown["layers"]["shown"]] == [f"t{i}" for i in range(50, MOST_LAYERS + 50)]
    measured = shown["steps"][0]["measured"]
    assert measured["left_out"] == 9 and len(measured["bars"]) == MOST_BARS and measured["end"] == MOST_BARS + 9
    assert any(bar[1] == "encode 7" for bar in measured["bars"])
    assert len(shown["plan"]["domains"][0]["rules"]) == MOST_RULES


def test_a_steps_parts_are_for_how_long_anything_of_a_kind_went_on() -> None:
    jobs = [
        TimelineJob("push w", "push", "a", 0.3, 0.3), TimelineJob("push v", "push", "a", 0.2, 0.2),
        TimelineJob("encode w", "lane 0", "a", 0.3, 0.5), TimelineJob("encode v", "lane 1", "a", 0.4, 0.6),
        TimelineJob("decode w", "lane 0", "a", 0.9, 1.0), TimelineJob("exchange w", "exchange", "a", 0.5, 0.9),
        TimelineJob("warp w", "lane 0", "a", 0.0, 0.1), TimelineJob("compute v", "worker", "a", 0.0, 0.2),
    ]  # fmt: skip
    found = {p["what"]: (pytest.approx(p["seconds"]), p["count"]) for p in breakdown(jobs)}
    assert found == {
        "compute": (0.2, 1), "encode": (0.3, 2), "exchange": (0.4, 1), "decode": (0.1, 1), "warp": (0.1, 1),
    }  # fmt: skip
    assert list(found) == ["compute", "encode", "exchange", "decode", "warp"], "in the order of a step"
    assert breakdown([]) == []


def test_the_union_of_intervals() -> None:
    assert covered([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (1.0, 2.5)]) == 3.5
    assert covered([]) == 0.0
