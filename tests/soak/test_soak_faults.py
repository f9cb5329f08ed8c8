"""A minute of real faults, and some kills, as continuous integration runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import netns
from tests.soak import faults, kills

pytestmark = pytest.mark.soak


@pytest.mark.timeout(240)
def test_a_minute_of_faults_on_four_nodes(tmp_path: Path) -> None:
    if netns.shaping() is None:
        pytest.skip(netns.probe().reason)
    assert faults.main(["--seconds", "60", "--share", "0.5", "--page", str(tmp_path / "faults.html")]) == 0
    assert "<svg" in (tmp_path / "faults.html").read_text()


@pytest.mark.timeout(240)
def test_weights_survive_kills_with_some_codecs() -> None:
    specs = ["none", "topk(ratio=0.01)", "qsgd(bits=2)+ef", "powersgd(rank=4)"]
    assert kills.main(["--kills", "12", *(word for spec in specs for word in ("--codec", spec))]) == 0
