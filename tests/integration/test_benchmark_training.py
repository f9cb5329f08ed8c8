"""One cell of the training benchmark with a tiny model: real ranks, real daemons, on plain loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


def run(path: Path, *argv: str) -> dict[str, dict[str, Any]]:
    assert training.main(["--models", "tiny", "--nodes", "2", *argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    return {row["method"]: row for row in rows}


def test_a_cell_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = "compute,topk(ratio=0.01)@layers,none@2,topk(ratio=0.01)@mergecomp"
    argv = ("--rates", "loopback", "--systems", systems, "--steps", "4", "--rounds", "1")
    rows = run(tmp_path / "speed.json", *argv)
    assert list(rows) == systems.split(",")
    assert all(row["runs"] == 4 and 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] for row in rows.values())
    # A model of 0.1 M parameters. Loopback counts all sides' bytes, so a host's share is the mean, and other tests', so
    # that there is no upper bound.
    assert rows["none@2"]["step_bytes"] > 300_000
    assert rows["topk(ratio=0.01)@layers"]["step_bytes"] > 0
    assert len(rows["topk(ratio=0.01)@layers"]["ddp_buckets"]) > len(rows["none@2"]["ddp_buckets"]) == 2
    assert sum(rows["topk(ratio=0.01)@mergecomp"]["ddp_buckets"]) == sum(rows["none@2"]["ddp_buckets"])
    assert "the best static system" in capsys.readouterr().out


def test_those_that_stay_are_timed_in_every_round(tmp_path: Path) -> None:
    argv = ["--models", "tiny", "--nodes", "2", "--rates", "loopback", "--stay", "--rounds", "3", "--steps", "4"]
    argv += ["--systems", "auto@merged,compute,ddp,topk(ratio=0.01)@layers", "--auto-warmup", "20"]
    path = tmp_path / "stay.json"
    assert training.main([*argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    turn = ["compute", "ddp", "topk(ratio=0.01)@layers", "auto@merged"]
    assert [(row["round"], row["method"]) for row in rows] == [(i, method) for i in range(3) for method in turn]
    assert all(row["runs"] == 4 and 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] for row in rows)
    assert {row["method"]: row["ddp_buckets"] for row in rows[:4]} == {r["method"]: r["ddp_buckets"] for r in rows[8:]}
    assert all(row["step_bytes"] > 300_000 for row in rows if row["method"] == "ddp")


def test_losses_of_exact_averages_agree(tmp_path: Path) -> None:
    argv = ("--mode", "loss", "--network", "loopback", "--systems", "ddp,none", "--steps", "15", "--seeds", "1")
    rows = run(tmp_path / "loss.json", *argv)
    for key in ("loss", "loss_held_out"):
        assert rows["none"][key] == pytest.approx(rows["ddp"][key], rel=1e-3)
    assert 1.0 < rows["ddp"]["loss"] < 4.5
