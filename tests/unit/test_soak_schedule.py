"""The schedule of faults: the same for a seed, complete by rounds, within the times it was given."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.soak import faults, injectors
from tests.soak.injectors import INJECTORS
from tests.soak.schedule import BRIEF, KINDS, Kind, Times, limit, plan

TIMES = Times(deadline=15.0, lease=10.0, gap=(1.0, 2.0), hold=(0.5, 1.5), margin=5.0)


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    first, again, other = (list(islice(plan(seed, 4, TIMES), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert [f.number for f in first] == list(range(1, 51))


def test_every_round_has_every_kind_once() -> None:
    faults_ = list(islice(plan(7, 4, TIMES), 3 * len(KINDS)))
    for start in range(0, len(faults_), len(KINDS)):
        assert sorted(f.kind for f in faults_[start : start + len(KINDS)]) == sorted(KINDS)


def test_where_and_how_long_stay_within_bounds() -> None:
    drawn = list(islice(plan(3, 3, TIMES), 400))
    assert {f.node for f in drawn} == {0, 1, 2}
    for f in drawn:
        assert f.other in {0, 1, 2} - {f.node}
        assert 1.0 <= f.gap <= 2.0
        base = {"moment": 0.0, "while": 0.0, "lease": 10.0, "deadline": 15.0}[KINDS[f.kind].lasts]
        if KINDS[f.kind].lasts == "moment":
            assert f.hold == 0.0
        else:
            assert base + 0.5 <= f.hold <= base + 1.5


def test_only_the_kinds_asked_for() -> None:
    assert {f.kind for f in islice(plan(1, 2, TIMES, ("reset", "rate")), 20)} == {"reset", "rate"}


@pytest.mark.parametrize(("kinds", "nodes", "match"), [
    (("reset", "flood"), 4, "flood.*expected some of kill-worker"),
    ((), 4, "none"),
    (("reset",), 1, "at least 2"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(kinds: tuple[str, ...], nodes: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan(1, nodes, TIMES, kinds)


def test_every_kind_can_be_done_and_says_what_it_may_do() -> None:
    assert set(INJECTORS) == set(KINDS)
    for kind in KINDS.values():
        assert (kind.ends == "never") == (not kind.errors), kind


def test_the_brief_kinds_need_no_lease_and_no_deadline_to_pass() -> None:
    assert set(KINDS) - set(BRIEF) == {"stall-worker", "isolation"}


def test_each_kind_has_its_limit() -> None:
    assert limit(KINDS["kill-worker"], TIMES) == 5.0
    assert limit(KINDS["isolation"], TIMES) == 15.0
    assert limit(KINDS["stall-worker"], TIMES) == 20.0
    assert limit(KINDS["corruption"], TIMES) == 20.0
    assert limit(Kind("x", "", "while", "maybe", frozenset({"StepTimeout"})), TIMES) == 20.0


def test_what_a_machine_lacks_the_programs_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors.processes, "which", lambda program: None if program == "nft" else f"/bin/{program}")
    assert injectors.impossible() == {"partition": "nft", "isolation": "nft", "loss": "nft"}
    assert set(faults.settings(600, 1, "100mbit").kinds) == set(KINDS) - {"partition", "isolation", "loss"}
    assert faults.settings(600, 1, "100mbit", ["loss"]).kinds == ("loss",)  # asked for: it will say what it lacks


def test_a_short_run_has_short_faults_and_a_long_one_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors.processes, "which", lambda program: f"/bin/{program}")
    brief, full = faults.settings(60, 1, "100mbit"), faults.settings(600, 1, "100mbit")
    assert brief.kinds == BRIEF and full.kinds == tuple(KINDS)
    assert brief.times.hold[1] < full.times.hold[1]
    assert brief.calm == 5.0 and full.calm == 30.0
    assert faults.settings(60, 1, "100mbit", ["rate"]).kinds == ("rate",)
