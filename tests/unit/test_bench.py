"""The benchmark of codecs: what is measured, what rows say, that every codec can be measured, what the table shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gcserver import bench, cli
from gcserver.codecs import CodecError, names, parse

N = 4096
PARTS = {"codec", "system", "op", "elements", "data", "payload_bytes", "median_s", "runs", "gbs"}


def rows_of(specs: list[str], **more: object) -> list[bench.Row]:
    return [row for group in bench.measure(N, specs, seconds=0.01, **more) for row in group]  # type: ignore[arg-type]


def own(rows: list[bench.Row]) -> set[tuple[str, str]]:
    return {(row["codec"], row["op"]) for row in rows if row["system"] == "gradcomm"}


def test_every_registered_codec_has_a_spec() -> None:
    specs = bench.default_specs(bench.source("normal")(N))
    assert {parse(spec).name for spec in specs} == set(names())
    assert len(set(specs)) == len(specs)
    assert set(bench.VARIANTS) <= set(specs)


def test_every_target_is_of_a_codec_that_is_measured() -> None:
    specs = bench.default_specs(bench.source("normal")(N))
    assert {target.codec for target in bench.TARGETS} <= set(specs)


def test_a_threshold_is_where_one_in_a_hundred_is_above() -> None:
    sample = bench.source("laplace")(N)
    (spec,) = [spec for spec in bench.default_specs(sample) if spec.startswith("threshold")]
    above = np.abs(sample * bench.SCALE) > parse(spec).values()["value"]
    assert above.mean() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("kind", bench.DATA)
def test_data_are_of_unit_scale_and_always_the_same(kind: str) -> None:
    first, again = (bench.source(kind)(1 << 16) for _ in range(2))
    assert first.dtype == np.float32 and np.array_equal(first, again)
    assert first.std() == pytest.approx(1.0 if kind == "normal" else 2**0.5, rel=0.05)


def test_other_data_are_refused() -> None:
    with pytest.raises(CodecError, match="normal, laplace"):
        bench.source("cauchy")


def test_every_codec_can_be_measured_with_and_without_error_feedback() -> None:
    specs = bench.default_specs(bench.source("normal")(N))
    measured = own(rows_of(specs))
    for spec in specs:
        ops = {op for codec, op in measured if codec == spec}
        assert "encode" in ops
        assert parse(spec).rounds == 2 or {"decode", "decode_add"} <= ops
        assert not parse(spec).error_feedback or "encode+ef" in ops
    assert ("qsgd", "encode+ef") in measured and ("terngrad", "encode+ef") not in measured


def test_rows_are_flat_and_hold_the_ratio_to_every_peer() -> None:
    rows = rows_of(["topk(ratio=0.01)"])
    times = {(row["system"], row["op"]): row["median_s"] for row in rows}
    assert {("memcpy", "copy"), ("np.add", "add"), ("np.partition", "1 %")} <= set(times)
    for row in rows:
        assert set(row) == PARTS | {"x memcpy", "x np.add", "x np.partition"}
        assert row["x np.add"] == times["np.add", "add"] / row["median_s"]
        assert row["gbs"] == pytest.approx(4e-9 * N / row["median_s"])
        assert row["runs"] >= bench.LEAST or row["runs"] == 2
    assert json.loads(json.dumps(rows)) == rows


def test_a_peer_of_several_operations_is_compared_with_the_same_one() -> None:
    def peers(codec: object, buffers: bench.Buffers) -> list[bench.Operation]:
        return [bench.Operation("other", op, lambda: None) for op in ("encode", "decode_add")]

    rows = {row["op"]: row for row in rows_of(["fp16"], peers=peers) if row["system"] == "gradcomm"}
    assert "x other" in rows["encode"] and "x other" in rows["decode_add"] and "x other" not in rows["decode"]


def test_steps_read_one_state_write_the_other_and_see_new_gradients() -> None:
    codec = parse("topk(ratio=0.01)")
    buffers = bench.Buffers(N, bench.source("normal"), [codec])
    assert not np.array_equal(buffers.gradient(1), buffers.gradient(2))
    steps = bench.Steps(codec, buffers, 0)
    steps()
    x, residual = buffers.gradient(1) * np.float32(bench.SCALE), buffers.new[:N].copy()
    sent = np.zeros(N, np.float32)
    codec.decode(steps.out[: steps.nbytes], sent)
    np.testing.assert_array_equal(sent + residual, x)
    steps()
    assert np.array_equal(buffers.new[:N], residual)  # the second step read it and wrote the other one


@pytest.mark.parametrize(("n", "shape"), [(1 << 24, (4096, 4096)), (1, (1, 1)), (30, (5, 6)), (17, (4, 4))])
def test_matrices_are_nearly_square(n: int, shape: tuple[int, int]) -> None:
    assert bench.square(n) == shape


def test_what_rests_has_two_results_and_the_rest_at_least_three() -> None:
    import time

    acts = [bench.Operation("a", "slow", lambda: time.sleep(0.02)), bench.Operation("a", "fast", lambda: None)]
    slow, fast = bench.time_in_turn(acts, 0.03)
    assert len(slow) == 2 and bench.LEAST <= len(fast) <= bench.MOST


def test_targets_say_what_was_reached() -> None:
    row = {"codec": "onebit", "op": "encode", "system": "gradcomm", "x memcpy": 0.5}
    lines = bench.target_lines([row, {**row, "codec": "signsgd", "x memcpy": 0.61}])
    assert any(line.startswith("onebit ") and line.endswith("0.50x  no") for line in lines)
    assert any(line.startswith("signsgd ") and line.endswith("0.61x  yes") for line in lines)
    assert sum(line.endswith("not measured") for line in lines) == len(bench.TARGETS) - 2


def test_the_command_prints_the_table_and_writes_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = [
        "--elements",
        "4096",
        "--codecs",
        "fp16",
        "onebit",
        "--seconds",
        "0.05",
        "--targets",
        "--json",
        str(file),
    ]
    assert cli.main(["bench", "codecs", *options]) == 0
    shown = capsys.readouterr().out
    assert bench.HEAD in shown and "\nonebit " in shown and "  memcpy " in shown and "not measured" in shown
    written = json.loads(file.read_text())
    assert {"date", "cpu", "cores", "numpy"} <= set(written["machine"])
    assert ("fp16", "encode") in own(written["rows"])


@pytest.mark.parametrize("options", [["--codecs", "topk(ratio=7)"], ["--elements", "0"]])
def test_the_command_refuses_before_it_measures(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert cli.main(["bench", "codecs", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("gcserver: ") and captured.err.count("\n") == 1
