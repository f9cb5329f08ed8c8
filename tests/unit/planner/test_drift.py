"""How far two profiles are apart."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest

from gcserver.planner.drift import drift, link_drift
from gcserver.planner.profile import LinkCost, Profile, ProfiledTensor

TENSORS = (ProfiledTensor("b", (1000, 1000), 1_000_000, "float32", 0.0), ProfiledTensor("a", (3,), 3, "float32", 0.5))
BASE = Profile("job", "ddp.0", 2, 1, 1, 0.5, TENSORS, LinkCost(1e-3, 1e8, 0.1, 20), 1 << 20, 64 << 10)


def but(**changes: Any) -> Profile:
    return msgspec.structs.replace(BASE, **changes)


def test_nothing_changed_is_no_drift() -> None:
    assert drift(BASE, BASE) == 0.0


@pytest.mark.parametrize(("forward", "expected"), [(0.6, 0.1), (1.5, 1.0), (0.0, 1.0)])
def test_computation_changes_by_its_ratio_both_ways(forward: float, expected: float) -> None:
    assert drift(BASE, but(forward=forward)) == pytest.approx(expected)
    assert drift(but(forward=forward), BASE) == pytest.approx(expected)


def test_the_link_counts_by_what_a_partition_takes() -> None:
    slow = drift(BASE, but(link=LinkCost(1e-3, 5e7, 0.1, 20)))
    seconds = (1 << 20) / 1e8
    assert slow == pytest.approx((1e-3 + 2 * seconds) / (1e-3 + seconds) - 1)
    assert drift(BASE, but(link=LinkCost(2e-3, 1e8, 0.1, 20))) < 0.1, "a latency ten times shorter than the transfer"


def test_a_guessed_link_has_not_changed() -> None:
    assert drift(BASE, but(link=LinkCost(1e-3, 1.0))) == 0.0
    assert drift(but(link=LinkCost(1e-3, 0.0, 0.0, 5)), BASE) == inf, "a measured one that moves nothing has"


@pytest.mark.parametrize(
    "other",
    [
        but(nodes=3),
        but(tensors=TENSORS[:1]),
        but(tensors=(TENSORS[0], msgspec.structs.replace(TENSORS[1], shape=(4,)))),
    ],
)
def test_another_job_is_infinitely_far(other: Profile) -> None:
    assert drift(BASE, other) == inf


def test_from_no_computation_to_some_is_infinitely_far() -> None:
    idle = but(forward=0.0, tensors=tuple(msgspec.structs.replace(t, ready=0.0) for t in TENSORS))
    assert drift(idle, BASE) == inf and drift(idle, idle) == 0.0


def test_a_link_that_was_a_guess_and_is_measured_changes_everything() -> None:
    guessed = but(link=LinkCost(1e-3, 1e8))
    assert drift(guessed, BASE) == inf
    assert drift(guessed, guessed) == 0.0


def test_the_links_part_is_told_apart_from_computation() -> None:
    slow = LinkCost(1e-3, 5e7, 0.1, 20)
    assert link_drift(BASE, but(forward=9.0)) == 0.0
    assert link_drift(BASE, but(link=slow, forward=9.0)) == link_drift(BASE, but(link=slow)) > 0.5
    assert link_drift(BASE, but(link=LinkCost(1e-3, 1.0))) == 0.0
