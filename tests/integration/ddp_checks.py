"""What must come of the functions in ddp_workers.py, whichever way gradients go.

What may live here: assertions about what those return. What may not: having them run, what holds of one way only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.cluster import Outcome


def check_training(outcomes: Sequence[Outcome], steps: int, within: float = 1e-6) -> None:
    """Of ``against_gloo``. ``within``: how far gradients may be from gloo's, as a share."""
    values = [o.ok() for o in outcomes]
    for value in values:
        theirs, ours = value["loss"]
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert value["difference"] < within
        assert value["steps"] == steps
    assert len({v["hash"] for v in values}) == 1


def check_accumulation(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.ok() == {"equal": True, "steps": 3}


def check_scaled(outcomes: Sequence[Outcome]) -> None:
    values = [o.ok() for o in outcomes]
    for value in values:
        assert value["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert value["hashes"][0] == value["hashes"][1] != value["hashes"][2]
        assert value["hashes"] == values[0]["hashes"]


def check_branches(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        close = outcome.ok()["close"]
        assert all(close.values()), close


def check_used_early(values: Sequence[dict[str, Any]]) -> None:
    for value in values:
        assert "find_unused_parameters=True" in value["refused"] and "no_sync()" in value["refused"]
        assert value["found"] == [[2.0], [4.0]] * 2, "averages of what one rank used in its first pass, too"


def check_groups(outcomes: Sequence[Outcome]) -> None:
    values = [o.ok() for o in outcomes]
    assert [v["grad"] for v in values] == [[1.0], [2.0], [1.0], [2.0]]
    assert {v["total"] for v in values} == {6.0}


def check_failing(outcome: Outcome) -> None:
    """Of a rank that is left."""
    value = outcome.ok()
    assert value["later"] == "WorkerLost"
    assert "rank 1" in value["backward"] and "without shutdown" in value["backward"]
