"""One system of the training benchmark: what its log says, its daemons, and its turns, with ranks that are made up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import training_run, training_systems
from benchmarks.lab import daemons, netns, workers
from benchmarks.training_worker import Task


def test_a_step_lasts_from_the_end_of_one_to_the_end_of_the_next_on_the_slowest_rank() -> None:
    ends = ([0.0, 5.0, 6.0, 7.0, 8.0], [0.5, 4.0, 6.5, 7.0, 9.0])
    logs: list[list[dict[str, Any]]] = [
        [
            {
                "step": i + 1,
                "end": e,
                "sent": 100 * i * (rank + 1),
                "loss": 4.0 - i + rank,
                "cpu": 2.0 * i,
                "daemons": 0,
            }
            for i, e in enumerate(times)
        ]
        for rank, times in enumerate(ends)
    ]
    logs[0].insert(1, {"asks": "links"})
    logs[0].append({"held_out": 1.5})
    lines = training_run.Lines.of(logs, untimed=2)
    assert lines.seconds() == [1.5, 0.5, 2.0]
    assert lines.sent() == 150
    logs[0][-2]["daemons"] = 12.0
    assert training_run.Lines.of(logs, untimed=2).cpu_seconds() == (2.0, 2.0)
    assert len(training_run.Lines.of(logs, untimed=0).seconds()) == 4  # where the first begins nobody knows
    assert lines.losses() == [4.5, 3.5, 2.5, 1.5, 0.5]
    task = Task("tiny", "gradcomm", "none", "torch", True, 3, 1, 1, 3, 0.0, True)
    row = training_run.speed_row(lines)
    assert (row["median_s"], row["p10_s"], row["p90_s"], row["runs"]) == (
        1.5,
        pytest.approx(0.7),
        pytest.approx(1.9),
        3,
    )
    trained = training_run.loss_row(lines, task)
    assert (trained["seed"], trained["steps"], trained["loss"], trained["loss_held_out"]) == (3, 5, 2.5, 1.5)
    assert trained["losses"] == lines.losses()
    assert not any("planning" in key for key in (*row, *trained)), "nothing was planned"
    planned = training_run.loss_row(dataclasses.replace(lines, planning={"start": 2.0, "errors": 0.5}), task)
    assert planned == trained | {"train_s": 8.5, "planning_start_s": 2.0, "planning_errors_s": 0.5}


class Standing:
    """Stands in for daemons and for workers; those of the first run fail."""

    made: ClassVar[list[Standing]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.hosts, self.settings, self.lines = (), {"plan.mode": "auto"}, [[{"step": 1}]]
        self.ended = False

    def __enter__(self) -> Standing:
        self.made.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def wait(self, *_: object) -> None:
        if len(self.made) == 2:
            raise workers.WorkerError("it died")


def test_a_run_that_failed_leaves_no_daemons_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Standing, "made", [])
    monkeypatch.setattr(daemons, "Daemons", Standing)
    monkeypatch.setattr(workers, "Workers", Standing)
    task, auto = Task("tiny", "auto", "", "torch", True, 3, 0, 1, 3, 0.0, False), training_systems.read("auto")
    with training_run.Stage(netns.Loopback(1), None, {}, tmp_path) as stage:
        with pytest.raises(workers.WorkerError):
            stage.run(auto, task, lambda *_: None)
        assert [standing.ended for standing in Standing.made] == [True, True]
        for _ in range(2):
            stage.run(auto, task, lambda *_: None)
        assert [standing.ended for standing in Standing.made] == [True, True, False, True, True]  # the daemons stay
    assert all(standing.ended for standing in Standing.made)


class Staying(Standing):
    """Stands in for ranks that stay: a step of 1 s for each that they are to make, then they ask for another turn."""

    def __init__(self, name: str, argv: list[str], *_: object) -> None:
        super().__init__()
        self.task, self.words = json.loads(argv[-1]), 0
        self.lines: list[list[dict[str, Any]]] = [[]]

    def say(self, word: str) -> None:
        assert word == "go"
        self.words += 1

    def wait(self, timeout: float, on_lines: Any, until: Any) -> None:
        assert not until()
        for _ in range(self.task["steps"] + (1 if self.words else self.task["settle"])):
            done = sum("step" in line for line in self.lines[0])
            step = {"step": done + 1, "end": done + 100 * self.words, "sent": 0, "cpu": 0, "daemons": 0, "loss": 1.0}
            self.lines[0].append(step)
            on_lines()
        self.lines[0].append({"asks": "turn"})
        assert until()


def test_those_that_stay_take_another_turn_and_the_pause_before_it_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Standing, "made", [])
    monkeypatch.setattr(daemons, "Daemons", Standing)
    monkeypatch.setattr(workers, "Workers", Staying)
    task = Task("tiny", "gradcomm", "none", "torch", True, 3, 0, 4, 3, 0.0, False, stays=True)
    systems, heard = training_systems.read_list("none,compute"), []
    with training_run.Stage(netns.Loopback(1), None, {}, tmp_path) as stage:
        for system in (*systems, *systems):
            lines = stage.run(system, task, lambda *step: heard.append(step))
            assert lines.seconds() == [1.0, 1.0, 1.0]
        assert len(Standing.made) == 3, "daemons and ranks, and ranks without any"
        assert not any(standing.ended for standing in Standing.made)
    assert all(standing.ended for standing in Standing.made)
    assert heard[6:8] == [(7, 7), (1, 7)]
    assert heard[-4:] == [(1, 4), (2, 4), (3, 4), (4, 4)]
