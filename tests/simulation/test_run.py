"""The command that plays seeds: figures, progress, what a violation prints.

What may live here: the command alone. What may not: which seeds must hold (`test_seeds.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulation import run
from tests.simulation.planted import planted
from tests.simulation.shape import LOSSY


def test_figures_and_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAY_EVERY", 0.0)
    monkeypatch.setattr(run, "BATCH", 2)
    assert run.main(["--seeds", "4", "--start", "2", "--jobs", "1", "--json", str(tmp_path / "f")]) == 0
    figures = json.loads((tmp_path / "f").read_text())
    assert (figures["start"], figures["seeds"], figures["violations"]) == (2, 4, [])
    assert figures["events"] > 100 and figures["steps"] > 4
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "4/4 seeds, 0 bad, 0:00 min left "
    assert said[0].startswith("2/4 seeds, 0 bad, ")


def test_a_share_of_the_worlds_loses_nodes() -> None:
    ordinary, losses = run.seeds(30, 1000)
    assert (ordinary, losses) == (range(30, 830), range(LOSSY + 30, LOSSY + 230))
    ordinary, losses = run.seeds(LOSSY, 300)
    assert (ordinary, len(losses)) == (range(LOSSY, LOSSY + 300), 0)


def test_a_violation_says_how_to_replay_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with planted("settled_by_one_lane"):
        assert run.main(["--seeds", "8", "--jobs", "1", "--json", str(tmp_path / "f")]) == 1
    (first, *_) = json.loads((tmp_path / "f").read_text())["violations"]
    assert first["replay"] == f"python -m tests.simulation.run --seed {first['seed']} --trace"
    assert first["replay"] in capsys.readouterr().out
