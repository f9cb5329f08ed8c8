"""Plans as tables: what is not known is not a number. What whole answers look like is in `test_gcctl.py`."""

from __future__ import annotations

import re

from gcserver.admin import convert, plan_tables
from tests.unit.admin.source import PLAN


def test_a_step_that_is_not_known_is_not_shown_as_none_at_all() -> None:
    answer = convert.plain(convert.plan(PLAN))
    considered = answer["domains"][0]["forecast"]["considered"]
    assert re.search(r"powersgd\(rank=4\) +300 ms  slower by 20 %", plan_tables.plan(answer))
    considered[0] |= {"expected_seconds": 0.0, "reason": "its cost was not measured"}
    assert re.search(r"powersgd\(rank=4\) +-     its cost was not measured", plan_tables.plan(answer))
