"""Workers' logs as the soak reads them while they grow, and the oracle's gradients."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.soak.fault_worker import SHAPES
from tests.soak.record import Failure, Life, Log
from tests.soak.worker import Gradients, differing


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    life, failures = Life(2, (0, 1), 11, 0.0), list[Failure]()
    log = Log(tmp_path / "1.jsonl", 1)
    log.update(life, failures)  # there is none yet
    with log.path.open("w") as file:

        def write(**line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        write(t=1.0, joined=1)
        write(t=2.0, step=11, wrong=0)
        file.write('{"t": 3.0, "step"')
        file.flush()
        log.update(life, failures)
        assert life.joined == {1: 1.0} and life.steps[1] == [(2.0, 11, 0)]
        file.write(': 12, "wrong": 5}\n')
        write(t=4.0, error="PeerLost", typed=True, text="nothing heard")
        log.update(life, failures)
        log.update(life, failures)
    assert life.steps[1] == [(2.0, 11, 0), (3.0, 12, 5)]
    assert failures == [Failure(2, 1, 4.0, "PeerLost", True, "nothing heard")]
    assert not life.left


def test_a_step_is_complete_when_the_last_rank_has_it() -> None:
    life = Life(0, (0, 1), 11, 0.0)
    assert life.last == 10
    life.steps[0] = [(1.0, 11, 0), (2.0, 12, 0)]
    assert life.complete() == [] and life.last == 10
    life.steps[1] = [(1.5, 11, 0)]
    assert life.complete() == [1.5] and life.last == 11
    life.steps[1].append((1.9, 12, 0))
    assert life.complete() == [1.5, 2.0] and life.last == 12


def test_gradients_of_another_life_step_or_rank_average_to_something_else() -> None:
    life, later = Gradients(4, 1, SHAPES), Gradients(4, 2, SHAPES)
    averages = [*life.average(5), *later.average(5), *life.average(6)]
    third = len(SHAPES)
    for ours, theirs, next_ in zip(averages[:third], averages[third : 2 * third], averages[2 * third :], strict=True):
        assert differing(ours, theirs) > 0.9 * ours.numel()
        assert differing(ours, next_) > 0.9 * ours.numel()


def test_averages_are_exact_in_single_and_half_precision() -> None:
    gradients = Gradients(4, 3, SHAPES)
    by_tensor = zip(*(gradients.pushed(rank, 9) for rank in range(4)), strict=True)
    for pushed, want in zip(by_tensor, gradients.average(9), strict=True):
        assert differing(torch.stack(pushed).sum(0) / 4 + 0.0, want) == 0
        assert differing(want.half().float(), want) == 0
