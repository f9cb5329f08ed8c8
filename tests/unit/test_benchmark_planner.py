"""What `benchmarks.planner` says of its targets, and that small cases go on where they were left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import planner, traces
from benchmarks.common import Row
from gcserver.planner.baselines import CRIPPLED, SYSTEMS
from gcserver.planner.costs import clusters, codec_costs
from gcserver.planner.espresso import prepare, select
from gcserver.planner.options import Constraints


def selected(**more: Any) -> Row:
    """A case in which every target is met."""
    others = {f"{name}_s": 2.0 for name in SYSTEMS | CRIPPLED}
    return {
        "system": "espresso", "model": "LSTM", "cluster": "pcie+25g", "nodes": 8, "codec": "dgc", "median_s": 0.0009,
        "offload_s": 0.0001, "iteration_s": 1.0, "upper_bound_s": 0.95, "least_s": 0.97, **others, **more,
    }  # fmt: skip


def small(gap: float) -> Row:
    return {"system": "exhaustive", "gap": gap}


def test_targets_that_are_met_take_a_line_each() -> None:
    said = planner.verdicts([selected(), small(0.0), small(0.02)])
    assert said == [
        "select in less than the paper's time: met in 1 of 1",
        "offload in less than the paper's time: met in 1 of 1",
        f"never worse than a baseline: met in {len(SYSTEMS | CRIPPLED)} of {len(SYSTEMS | CRIPPLED)}",
        "within 10% of the upper bound with 64 GPUs: met in 1 of 1",
        "above exhaustive search: met, mean 1.00%, worst 2.00% of 2 cases",
    ]


def test_what_falls_short_is_named() -> None:
    worse = selected(median_s=0.0025, offload_s=0.002, fp32_s=0.8, upper_bound_s=0.8, least_s=0.9)
    said = planner.verdicts([selected(), worse, small(0.09)])
    where = "  LSTM, pcie+25g, 8 nodes, dgc: "
    for text in (
        "select in less than the paper's time: missed in 1 of 2", f"{where}2.5 ms of 1", f"{where}2 ms of 1",
        f"{where}fp32 by 25.00%", f"{where}25.0%, no plan below 12.5%",
        "above exhaustive search: missed, mean 9.00%, worst 9.00% of 1 cases",
    ):  # fmt: skip
        assert text in said
    assert planner.verdicts([selected(model="ncf", nodes=2)]) == [
        f"never worse than a baseline: met in {len(SYSTEMS | CRIPPLED)} of {len(SYSTEMS | CRIPPLED)}"
    ], "the paper has no time for NCF, and two nodes are no 64 GPUs"


def test_small_cases_go_on_where_they_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(seconds=1.1, steps={"algorithm 2": 1.2})
    monkeypatch.setattr(planner, "prepare", lambda *given: None)
    monkeypatch.setattr(planner, "select", lambda trace, space: found)
    monkeypatch.setattr(planner, "compile_table", lambda *given: None)
    monkeypatch.setattr(planner, "exhaustive", lambda *given: (1.0, None, 7))
    models = traces.read(["LSTM", "vgg16"])
    whole = list(planner.optimality(models, 12, seed=3))
    assert [row["tensors"] for row in whole[:5]] == [2, 2, 3, 4, 5]
    assert whole[0]["gap"] == pytest.approx(0.1) and len({row["model"] for row in whole}) > 2
    assert list(planner.optimality(models, 12, seed=3, done=7)) == whole[7:]


def test_fewer_options_are_searched_beside_all_and_what_they_gain_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = traces.read(["LSTM"])
    gpu, _, cpu, _ = clusters(2)
    row = planner.restricted(trace, gpu, codec_costs("dgc", gpu))
    assert {f"{name}_s" for name in planner.RESTRICTED} < row.keys()
    alone = select(trace, prepare(gpu, codec_costs("dgc", gpu), Constraints(gpu=False)))
    assert row["cpu alone_s"] == alone.seconds >= row["iteration_s"]
    without = planner.restricted(trace, cpu, codec_costs("dgc", cpu))
    assert {n for n in planner.RESTRICTED if f"{n}_s" in without} == {"no flat", "once"}, "one device there is"
    planner.print_restricted([row, {**without, "once_s": without["iteration_s"] / 1.25}])
    said = capsys.readouterr().out
    assert "shorter with fewer options: 1 of 6" in said and "LSTM cpu+10g 2 nodes dgc: once by 25.00%" in said
