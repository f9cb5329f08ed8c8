"""The benchmark of training on a GPU: its arguments, what it reads from traces, that it runs where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import gpu_training as bench


def test_systems_are_a_list_in_which_codecs_have_arguments() -> None:
    args = bench.parse(["--device", "cpu", "--systems", "ddp,fsdp2:topk(ratio=0.01,values=16), hsdp"])
    assert args.systems == ("ddp", "fsdp2:topk(ratio=0.01,values=16)", "hsdp")
    assert (args.layers, args.width, args.batch) == (4, 256, 32)
    assert bench.parse(["--device", "cuda", "--width", "64"]).width == 64
    assert bench.parse(["--device", "cuda"]).batch == 8192


def test_a_plan_of_the_daemons_has_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.parse(["--systems", "compute,ddp,hook:auto"]).systems[-1] == "hook:auto"
    for others in ("hook:none", "hsdp", "optimizer:auto"):
        with pytest.raises(SystemExit):
            bench.parse(["--systems", f"ddp,hook:auto,{others}"])
        assert f"beside one KIND:auto, got hook:auto, {others}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hook", "hook:", "horovod", "ddp,none", "fsdp2:auto"])
def test_what_is_no_system_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--systems", text])
    assert "expected some of compute, ddp, hsdp, hook:CODEC" in capsys.readouterr().err


def test_intervals() -> None:
    found = bench.united([(5, 7), (1, 2), (2, 3), (6, 6.5), (10, 11)])
    assert found == [(1, 3), (5, 7), (10, 11)]
    assert bench.united([]) == []
    assert bench.common_time(found, [(0, 1.5), (2.5, 6), (6.5, 12)]) == 0.5 + 0.5 + 1 + 0.5 + 1
    assert bench.common_time(found, []) == 0


def test_copies_that_hide_behind_kernels() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("kernel", "gemm", 0, 100e3),
        event("kernel", "add", 50e3, 20e3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 80e3, 40e3),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200e3, 40e3),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 500e3),
        event("cpu_op", "aten::copy_", 0, 500e3),
        {"ph": "M", "name": "process_name"},
    ]
    assert bench.copies_of(events, 2) == pytest.approx({"copies_s": 0.04, "hidden": 0.25})
    none = bench.copies_of(events[:2], 2)
    assert none["copies_s"] == 0 and math.isnan(none["hidden"])


@pytest.mark.long
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real daemons, every kind of system."""
    systems = "compute,ddp,hook:none,optimizer:none,fsdp2:none,hsdp,hook:onebit"
    asked = ["--device", "cpu", "--systems", systems, "--layers", "2", "--width", "96", "--runs", "2"]
    assert bench.main([*asked, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["system"] for row in rows] == systems.split(",")
    assert all(row["alike"] and row["median_s"] > 0 and row["runs"] == 2 for row in rows)
    assert [row["off"] < 1e-6 for row in rows[1:]] == [True] * 5 + [False]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-7:]] == systems.split(",")


@pytest.mark.long
def test_a_plan_is_made_without_a_gpu(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--systems", "compute,ddp,optimizer:auto", "--runs", "2", "--auto-warmup", "40"]
    assert bench.main([*asked, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["compute", "ddp", "optimizer:auto"]
    assert all(row["alike"] and row["median_s"] > 0 for row in rows)
