"""Hostile inputs in the share that every run of the tests has time for, and all that ever broke something.

`make fuzz` feeds more; a running daemon is fed in `tests/integration/test_fuzz.py`.
"""

from __future__ import annotations

import math
import random
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fuzz import harness
from tests.fuzz.spread import Slice, merged, run_all, slices, turn
from tests.fuzz.targets import LIVE, TARGETS, share

QUICK = [name for name in TARGETS if name != LIVE]
#: of a target whose inputs are slow; others get as many times more as their share is larger
FEW = 60


@pytest.mark.parametrize("name", QUICK)
def test_nothing_but_documented_outcomes_comes_of_hostile_inputs(name: str) -> None:
    count = FEW * share(name)
    result = harness.run(TARGETS[name], 1, range(count), count)
    assert not result.failures, "\n".join(f"{f.error}\n  {f.command}" for f in result.failures)
    assert result.inputs == count
    # Neither all refused nor all taken: such inputs would test little.
    assert len(result.outcomes) > 1


@pytest.mark.parametrize(
    "path", [p for name in QUICK for p in harness.kept(name)], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_what_once_broke_a_target_is_refused(path: Path) -> None:
    target = TARGETS[path.parent.name]()
    try:
        assert harness.feed(target, harness.read(path))
    finally:
        target.close()


def test_a_kept_input_names_its_target() -> None:
    kept = {p.parent.name for p in harness.CORPUS.glob("*/*")}
    assert kept <= set(TARGETS)
    assert all(p.suffix == ".hex" for p in harness.CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", ["config", "credentials", "payloads", "frames"])
def test_an_input_can_be_made_again(name: str) -> None:
    first, second = (TARGETS[name](), TARGETS[name]())
    try:
        for index in (0, 7):
            drawn = [t.draw(harness.generator(name, 3, index)) for t in (first, second)]
            assert drawn[0] == drawn[1]
        assert first.draw(harness.generator(name, 3, 0)) != first.draw(harness.generator(name, 4, 0))
    finally:
        first.close()
        second.close()


class Weak:
    """A target with the defects that the harness is there to find: at 3 it raises, at 5 it hangs, it keeps all."""

    name = "weak"
    held: list[bytearray]

    def __init__(self, keep: int = 0) -> None:
        self.keep, self.held = keep, []

    def draw(self, rng: random.Random) -> bytes:
        return bytes([rng.randrange(4)])

    def feed(self, data: bytes) -> str:
        if data[0] == 3:
            raise KeyError("three")
        while data[0] == 5:
            pass
        self.held.append(bytearray(b"x") * self.keep)
        return str(data[0])

    def close(self) -> None:
        pass


def test_what_raises_is_a_failure_with_its_input_and_the_command_that_makes_it_again() -> None:
    result = harness.run(Weak, 0, range(40), 40, most=2)
    assert [f.data for f in result.failures] == [b"\3", b"\3"]
    first = result.failures[0]
    assert "KeyError" in first.error and f"--target weak --seed 0 --at {first.index}" in first.command
    assert Weak().draw(harness.generator("weak", 0, first.index)) == b"\3"
    assert set(result.outcomes) <= {"0", "1", "2"}


def test_what_hangs_is_stopped() -> None:
    with harness.watched(0.05) as start:
        start()
        with pytest.raises(harness.Hang):
            Weak().feed(b"\5")


class Steady(Weak):
    """One that neither raises nor hangs."""

    def draw(self, rng: random.Random) -> bytes:
        return bytes([rng.randrange(3)])


def test_memory_that_grows_with_the_inputs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETTLED", 10)
    # More than what tests before this one have freed, which a process takes again before it grows.
    grown = harness.run(lambda: Steady(8 << 20), 0, range(100), 100)
    assert ["Grown" in f.error for f in grown.failures] == [True]
    assert not harness.run(Steady, 0, range(100), 100).failures


def test_descriptors_that_grow_with_the_inputs_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETTLED", 10)
    opened: list[socket.socket] = []

    class Leaking(Steady):
        def feed(self, data: bytes) -> str:
            opened.append(socket.socket(socket.AF_UNIX))
            return super().feed(data)

    try:
        (failure,) = harness.run(Leaking, 0, range(100), 100).failures
    finally:
        for sock in opened:
            sock.close()
    assert "Grown: 90 more descriptors" in failure.error


def test_inputs_are_spread_over_all_targets_and_add_up() -> None:
    todo = slices(list(TARGETS), 100_000, 0, 2)
    assert sum(s.count for s in todo) == 100_000
    assert {s.target for s in todo} == set(TARGETS)
    for name in TARGETS:
        mine = sorted((s.first, s.count) for s in todo if s.target == name)
        assert mine[0][0] == 0
        assert all(a + n == b for (a, n), (b, _) in pairwise(mine))


def test_processes_feed_their_slices_and_one_that_ends_is_told_of() -> None:
    part = Slice("metrics", 0, 5, 7)
    (result,) = run_all([part], 1)
    assert (result.target, result.inputs, result.failures) == ("metrics", 7, [])
    (lost,) = run_all([Slice("no such target", 0, 0, 1)], 1)
    assert "the process ended with 1 at this input" in lost.failures[0].error


def test_the_memory_of_a_target_is_that_of_the_slice_that_grew_most() -> None:
    mib = 1 << 20
    less, least, more = (harness.Result("frames", 5, resident=m, peak=m[0]) for m in ((9, 8), (9 * mib, 0), (1, 3)))
    (shrunk,) = merged([least, less])
    assert (shrunk.inputs, shrunk.resident, shrunk.peak) == (10, (9, 8), 9 * mib), "also where all became smaller"
    (grown,) = merged([least, more, less])
    assert grown.resident == (1, 3)


def test_a_saved_input_is_read_back(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    harness.write(tmp_path / "weak" / "x.hex", data, "an error\nof two lines")
    assert harness.read(tmp_path / "weak" / "x.hex") == data


def test_where_time_is_short_every_slice_has_its_share() -> None:
    """All of a slow machine's time went to the first targets, and the last had none of their inputs."""
    waiting = [Slice("plans", 1, 0, 100, until=160.0) for _ in range(6)]
    first = turn(waiting[0], 6, 2, now=100.0)
    assert first.until == pytest.approx(120.0) and first.count == 100
    assert turn(waiting[1], 2, 2, now=130.0).until == 160.0, "who comes last may take all that is left"
    assert turn(Slice("plans", 1, 0, 100), 6, 2, now=100.0).until == math.inf
