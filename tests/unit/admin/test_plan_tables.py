"""Plans as tables: what is not known is not a number. What whole answers look like is in `test_gcctl.py`."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec

from gcproto import admin_pb2 as pb
from gcserver.admin import convert, plan_tables
from gcserver.planner.profile import LevelErrors
from tests.unit.admin.source import PLAN, PROFILE
from tests.unit.planner.live_profiles import gpt


def test_a_step_that_is_not_known_is_not_shown_as_none_at_all() -> None:
    answer = convert.plain(convert.plan(PLAN))
    considered = answer["domains"][0]["forecast"]["considered"]
    assert re.search(r"powersgd\(rank=4\) +300 ms  slower by 20 %", plan_tables.plan(answer))
    considered[0] |= {"expected_seconds": 0.0, "reason": "its cost was not measured"}
    assert re.search(r"powersgd\(rank=4\) +-     its cost was not measured", plan_tables.plan(answer))


def test_a_link_that_was_not_measured_is_said_to_be_a_guess() -> None:
    def link(samples: int) -> str:
        seen = convert.plain(convert.alike(pb.DomainProfile, replace(PROFILE, link_samples=samples)))
        text = plan_tables.profile({"domains": [seen]})
        return next(line for line in text.splitlines() if line.startswith("link"))

    assert re.search("100 Mbit/s .noise 2%, 40 samples., 100 µs one way$", link(40))
    assert "not measured" in link(0) and "100 Mbit/s assumed" in link(0) and "samples" not in link(0)


def test_error_curves_are_shown_by_family_over_all_tensors() -> None:
    """Norms of errors are added as such; a tensor without a level counts with its own next below."""
    given = LevelErrors("a", tuple(range(1, 21)), tuple(30.0 / level for level in range(1, 21)), tuple(range(1, 21)))
    errors = {"powersgd": (given, LevelErrors("b", (1, 4), (40.0, 10.0), (1000.0, 4000.0))), "topk": ()}
    text = msgspec.json.encode(msgspec.structs.replace(gpt(), errors=errors)).decode()
    seen = convert.plain(convert.alike(pb.DomainProfile, replace(PROFILE, json=text)))
    rows = [line.split() for line in plan_tables.profile({"domains": [seen]}).splitlines() if line[:8] == "powersgd"]
    assert [row[1] for row in rows] == ["1", "4", "6", "9", "12", "15", "17", "20"]
    assert rows[0] == ["powersgd", "1", "2", "50", "0.978", "KiB"]
    assert rows[-1] == ["powersgd", "20", "2", "10.11", "3.93", "KiB"]


def test_a_profile_that_cannot_be_read_has_no_error_curves() -> None:
    torn = '{"errors": {"topk": [{"name": "a", "levels": [1], "errors": [], "sizes": [1]}]}}'
    for text in ("", "{", '{"errors": 3}', torn):
        seen = convert.plain(convert.alike(pb.DomainProfile, replace(PROFILE, json=text)))
        assert "FAMILY" not in plan_tables.profile({"domains": [seen]})
        assert re.search(r"optimizer +not known to stand late gradients\n", plan_tables.profile({"domains": [seen]}))


def test_a_profile_says_what_is_known_of_the_optimizer() -> None:
    text = msgspec.json.encode(gpt()).decode()
    seen = convert.plain(convert.alike(pb.DomainProfile, replace(PROFILE, json=text)))
    assert re.search(r"optimizer +stands late gradients\n", plan_tables.profile({"domains": [seen]}))


def test_what_no_rule_is_for_takes_one_line() -> None:
    answer = convert.plain(convert.plan(PLAN))
    answer["domains"][0] |= {"note": "declared lossless"}
    assert "\ndeclared lossless (8 tensors; --json has them)\n" in plan_tables.plan(answer)
    assert "wte" not in plan_tables.plan(answer)


def test_a_proposal_that_is_not_in_force_is_not_about_to_be_measured() -> None:
    answer = convert.plain(convert.plan(PLAN))
    forecast = answer["domains"][0]["forecast"]
    forecast |= {"plan_version": 0, "measured_seconds": 0.0, "alphas": [1.0]}
    text = plan_tables.plan(answer)
    assert "only proposed" in text and "not yet" not in text and "notches" not in text


def test_an_expectation_of_nothing_is_none() -> None:
    answer = convert.plain(convert.plan(PLAN))
    answer["domains"][0]["forecast"] |= {"expected_seconds": 0.0, "dense_seconds": 0.0, "compute_seconds": 0.0}
    text = plan_tables.plan(answer)
    assert re.search(r"step +expected -, measured", text) and "compression -, any exchange - (expected)" in text


def test_where_another_node_plans_nobody_is_said_to_make_the_plans() -> None:
    answer = convert.plain(convert.plan(replace(PLAN, mode="static", planner="node b plans for job 'gpt'")))
    assert "made by  node b plans for job 'gpt'\n" in plan_tables.plan(answer)
    answer["planner"] = ""
    assert "made by  operators\n" in plan_tables.plan(answer)
