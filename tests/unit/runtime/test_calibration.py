"""Costs of codecs: measured once, remembered.

What may live here: tests of `gcserver/runtime/calibration.py`. What may not: how fast anything is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver.codecs import CodecError, parse
from gcserver.planner.profile import CodecCost
from gcserver.runtime import calibration
from gcserver.runtime.calibration import costs

SIZES = (1 << 12, 1 << 14)
SPECS = ("none", "topk(ratio=0.01)", "powersgd(rank=4)", "qsgd(bits=8)", "powersgd(rank=4,values=16)")


def measure(folder: Path, specs: tuple[str, ...] = SPECS) -> tuple[dict[str, CodecCost], list[str]]:
    measured: list[str] = []
    found = costs(specs, folder, lambda spec, done, total: measured.append(spec), 0.004, SIZES)
    return found, measured


def test_every_operation_of_every_spec_is_measured(tmp_path: Path) -> None:
    found, measured = measure(tmp_path)
    assert tuple(found) == SPECS
    assert measured == [parse(spec).spec for spec in SPECS]
    for each in found.values():
        for op in calibration.OPERATIONS:
            curve = getattr(each, op)
            assert [n for n, _ in curve.points] == list(SIZES)
            assert all(seconds > 0 for _, seconds in curve.points)
    assert found["none"].ratio == 1.0
    assert found["topk(ratio=0.01)"].ratio == pytest.approx(0.02, rel=0.05)
    assert found["qsgd(bits=8)"].ratio == pytest.approx(0.25, rel=0.05)
    # P and Q of a square matrix of 128 x 128
    assert found["powersgd(rank=4)"].ratio == pytest.approx(4 * 256 / 128**2)
    assert found["powersgd(rank=4,values=16)"].ratio == pytest.approx(2 * 256 / 128**2 + 2 / 128**2)


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    before, _ = measure(tmp_path, SPECS[:2])
    after, measured = measure(tmp_path, SPECS[:3])
    assert measured == ["powersgd(rank=4)+ef"]
    assert {spec: after[spec] for spec in before} == before
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert set(calibration.costs(("none",), None, seconds=0.001, sizes=SIZES)) == {"none"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"none": {"encode": 1}}', b'{"none+x": null}', b'{"\xff": {}}']
)
def test_a_broken_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    before, _ = measure(tmp_path, ("none",))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    after, measured = measure(tmp_path, ("none",))
    assert measured == ["none"]
    assert set(after) == set(before)
    assert measure(tmp_path, ("none",))[1] == []


def test_another_processor_measures_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, ("none",))
    monkeypatch.setattr(calibration, "cpu_model", lambda: "another")
    assert measure(tmp_path, ("none",))[1] == ["none"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found, measured = measure(tmp_path / "file", ("none",))
    assert measured == ["none"] and found["none"].ratio == 1.0


def test_two_ways_to_write_a_spec_are_one_measurement(tmp_path: Path) -> None:
    found, measured = measure(tmp_path, ("topk(ratio=0.01)", "topk(ratio=1e-2)+ef"))
    assert len(measured) == 1
    assert found["topk(ratio=0.01)"] == found["topk(ratio=1e-2)+ef"]


def test_what_is_no_spec_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CodecError):
        measure(tmp_path, ("none", "topq"))
    assert not list(tmp_path.iterdir())
