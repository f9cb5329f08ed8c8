"""The soak for half a minute, as continuous integration runs it: exact, and flat in memory and descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import throughput


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_two_jobs_for_thirty_seconds_are_exact_and_flat(tmp_path: Path) -> None:
    assert throughput.main(["--seconds", "30", "--jobs", "2", "--plot", str(tmp_path / "soak.png")]) == 0
