"""Sizes, tables and the JSON that every benchmark shares; rows of the allreduce benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import allreduce, common


@pytest.mark.parametrize(
    ("text", "size"), [("4KiB", 4096), ("64 MiB", 64 << 20), ("1.5GB", 1_500_000_000), ("17", 17), ("2mib", 2 << 20)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert common.read_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "4 parsecs", "KiB"])
def test_a_wrong_size_says_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        common.read_size(text)


def test_ranges_go_up_by_four_and_end_with_the_last() -> None:
    assert common.read_sizes("4KiB..256KiB") == [4096, 16384, 65536, 262144]
    assert common.read_sizes("1MiB..6MiB") == [1 << 20, 4 << 20, 6 << 20]
    assert common.read_sizes("1MiB,3MiB") == [1 << 20, 3 << 20]
    with pytest.raises(ValueError, match=r"FROM\.\.TO"):
        common.read_sizes("2MiB..1MiB")


@pytest.mark.parametrize("size", [1, 1000, 4096, 3 << 20, 1 << 30])
def test_a_shown_size_reads_back(size: int) -> None:
    assert common.read_size(common.show_size(size)) == size


def test_times_are_shown_with_three_digits() -> None:
    shown = [common.show_seconds(s) for s in (8.12e-4, 4.21e-3, 0.0373, 1.372, 137.0)]
    assert shown == ["812 us", "4.21 ms", "37.3 ms", "1.37 s", "137 s"]


def test_the_file_has_the_machine_and_flat_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    common.write_json(path, [common.median_row("gloo", [3.0, 1.0, 2.0], nodes=2)], command="x")
    written = json.loads(path.read_text())
    assert written["rows"] == [{"system": "gloo", "nodes": 2, "median_s": 2.0, "runs": 3}]
    assert written["command"] == "x"
    assert {"cpu", "cores", "torch", "date"} <= set(written["machine"])
    assert "cores" in common.describe(written["machine"])
    common.write_json(None, [])


def test_rows_compare_with_gloo_and_with_the_link() -> None:
    result = {
        "bytes": 100 << 20,
        "times": {"gradcomm": [1.0, 0.9, 1.1], "gradcomm new": [2.0] * 3, "gloo": [1.5] * 3},
        "cpu": {"gradcomm": 0.3, "gradcomm new": 0.4, "gloo": 0.2},
    }
    inplace, new, gloo = allreduce.rows_of(result, nodes=4, network="1gbit", codec="fp16")
    assert (inplace["system"], inplace["call"], inplace["codec"]) == ("gradcomm", "in place", "fp16")
    assert (new["system"], new["call"]) == ("gradcomm", "new tensor")
    assert inplace["ratio_gloo"] == pytest.approx(1.5)
    assert new["ratio_gloo"] == pytest.approx(0.75)
    assert gloo["ratio_gloo"] == 1.0
    assert gloo["codec"] == "none"
    assert inplace["cpu_s_per_gb"] == pytest.approx(0.3e9 / (100 << 20))
    assert inplace["cpu_ratio_gloo"] == pytest.approx(1.5)
    # 1.5 times the tensor crosses each link in 1 s, of 956 Mbit/s of payload
    assert inplace["link_share"] == pytest.approx(1.5 * 8 * (100 << 20) / 1e9 / (1448 / 1514))
    assert len(allreduce.show(inplace)) == len(allreduce.TABLE.head())


def test_rows_without_a_rate_have_no_link_share() -> None:
    result = {"bytes": 8, "times": {"gloo": [1.0]}, "cpu": {"gloo": 0.0}}
    (row,) = allreduce.rows_of(result, nodes=2, network="loopback", codec="none")
    assert "link_share" not in row
    assert allreduce.show(row).endswith("-")


@pytest.mark.long
def test_a_real_run_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    argv = ["--nodes", "2", "--sizes", "4KiB,300000", "--runs", "3", "--seconds", "0.1", "--json", str(path)]
    assert allreduce.main(argv) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["bytes"], r["system"], r["call"]) for r in rows] == [
        (size, *which)
        for size in (4096, 300_000)
        for which in (
            ("gradcomm", "in place"),
            ("gradcomm", "new tensor"),
            ("gradcomm", "resident"),
            ("gloo", "in place"),
        )
    ]
    assert all(r["runs"] >= 3 and r["median_s"] > 0 and r["cpu_s_per_gb"] > 0 for r in rows)
    assert "x gloo" in capsys.readouterr().out
