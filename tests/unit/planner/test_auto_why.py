"""Rows of a decision: who is in which, how long its exchange takes, what another option would change."""

from __future__ import annotations

import numpy as np

from gcserver.planner.auto_why import explain
from gcserver.planner.live import ALL, OWNER, BlockOption, Live
from gcserver.planner.profile import CodecCost, Curve
from tests.unit.planner.live_profiles import plain

MILLION = 1_000_000
SPEC = "topk(ratio=0.0125)"
FREE = {SPEC: CodecCost(Curve(((0, 0.0),)), Curve(((0, 0.0),)), Curve(((0, 0.0),)), 0.025)}


def test_rows_by_group_and_option() -> None:
    """Two tensors in one group, one dense and one compressed; both are ready at once, a third much later."""
    profile = plain([MILLION] * 3, [0.0, 0.0, 10.0], codecs=FREE, owners=[0, 1, 0])
    live = Live(profile, ((0, 1), (2,)))
    options = [[BlockOption(s, c)] * 3 for s, c in (("none", OWNER), ("none", ALL), (SPEC, OWNER), (SPEC, ALL))]
    columns = np.array([0, 3, 0], np.int64)
    rows = explain(live, live.table(options), columns, options, live.brought, ("", "", ""))
    assert [(r.tensors, r.bytes, r.codec, r.scheme) for r in rows] == [
        (("t0",), 4 * MILLION, "none", OWNER), (("t1",), 4 * MILLION, SPEC, ALL), (("t2",), 4 * MILLION, "none", OWNER),
    ]  # fmt: skip
    assert round(rows[2].seconds, 3) == 2.0
    # the first two hide behind computing whatever they use; the last is waited for
    assert rows[0].why == "compressing would not shorten the step"
    assert rows[1].why == "compressed with the others"
    everyone = explain(live, live.table(options), np.array([0, 0, 3], np.int64), options, live.brought, ("",) * 3)
    assert everyone[1].why == "dense would make the step 975 ms longer, scheme owner 25 ms"


def test_what_was_forced_says_by_what() -> None:
    profile = plain([MILLION] * 2, [0.0, 1.0], codecs=FREE)
    live = Live(profile, ((0, 1),))
    options = [[BlockOption("none", scheme)] * 2 for scheme in (OWNER, ALL)]
    table = live.table(options)
    rows = explain(live, table, np.zeros(2, np.int64), options, live.brought, ("excluded", ""))
    assert [row.why for row in rows] == ["excluded"]
    plain_rows = explain(live, table, np.ones(2, np.int64), options, live.brought, ("", ""))
    assert plain_rows[0].why.startswith("dense, as the whole plan is")


def test_a_tensor_is_in_the_row_of_the_block_that_holds_most_of_it() -> None:
    profile = plain([10, MILLION], [0.0, 1.0], codecs=FREE)
    live = Live(profile, ((0,), (1,)))
    options = [[BlockOption("none", scheme)] * 2 for scheme in (OWNER, ALL)]
    rows = explain(live, live.table(options), np.zeros(2, np.int64), options, live.brought, ("", ""))
    # ten numbers go to everyone at once, whatever was asked for
    assert [(r.tensors, r.scheme) for r in rows] == [(("t0",), ALL), (("t1",), OWNER)]
