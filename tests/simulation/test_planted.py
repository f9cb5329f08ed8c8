"""A simulation that finds nothing proves nothing: each fault planted in the core must be caught.

What may live here: the bound within which it is caught. What may not: the faults (`planted.py`).
"""

from __future__ import annotations

import pytest

from tests.simulation import planted_epochs
from tests.simulation.planted import PLANTED, planted
from tests.simulation.run import play
from tests.simulation.shape import LOSSY

#: seeds within which each is caught; most are within five
BOUND = 250
#: the kinds the project promises to catch
PROMISED = {
    "double_count",
    "stale_round_accepted",
    "lost_frame_never_resent",
    "old_epoch_accepted",
    "flip_before_settle",
    "credit_returned_twice",
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_fault_is_caught(name: str) -> None:
    first = LOSSY if name in planted_epochs.NAMES else 0
    with planted(name):
        caught = next((o for s in range(first, first + BOUND) if (o := play(s, PLANTED[name][3])).error), None)
    assert caught is not None, f"{name} went unnoticed over {BOUND} seeds"


def test_every_promised_kind_is_planted() -> None:
    assert set(PLANTED) >= PROMISED
