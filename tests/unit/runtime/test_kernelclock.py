"""The clock around a lane's arithmetic: which steps it times, and under which name.

What may live here: tests of `gcserver/runtime/kernelclock.py`. What may not: what the calls compute.
"""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gcserver.core.effects import Accumulate, Decode, Encode, Finalise
from gcserver.runtime import kernelclock
from gcserver.runtime.kernelclock import EARLY, SAMPLE, KernelClock
from gcserver.runtime.lanelink import KernelTime, LaneLink
from gcserver.runtime.resolve import resolve
from tests.unit.runtime.one_block import JOB, N, encode, node, push, random

KEY = (JOB, 0)


class Round:
    """One node that is its block's owner goes through rounds; every call of its kernels takes a second."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor, self.memory = node(tmp_path)
        self.clock = KernelClock(self.executor)
        self.now = 0.0
        monkeypatch.setattr(kernelclock, "perf_counter", self._tick)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def run(self, spec: str, step: int) -> np.ndarray:
        choice = resolve(spec)
        codec = (choice.id, choice.level)
        push(self.memory, random(step))
        mine = encode(self.executor, spec, step, 0)
        for member in (0, 1):
            self.executor.accumulate(Accumulate(KEY, 0, step, member, mine.handle, *codec, member == 0, False))
        done = self.executor.finalise(Finalise(KEY, 0, step, choice, 5, 0, 1, 0, 2, False, 2, 0))
        self.executor.decode(Decode(KEY, 0, step, done.handle, *codec, 1, 2, False))
        return np.frombuffer(self.memory.blocks[0].output, np.float32).copy()

    def times(self) -> list[KernelTime]:
        reports = self.clock.take()
        assert all(r.domain == KEY for r in reports)
        return sorted((t for r in reports for t in r.times), key=lambda t: t.what)


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Round:
    return Round(tmp_path, monkeypatch)


def test_one_step_in_many_is_timed(rounds: Round) -> None:
    timed = []
    for step in range(1, 3 * SAMPLE + 1):
        rounds.run("fp16", step)
        if rounds.times():
            timed.append(step)
    assert timed == [EARLY, SAMPLE, 2 * SAMPLE, 3 * SAMPLE]


def test_calls_are_summed_by_codec_operation_and_size(rounds: Round) -> None:
    for step in (SAMPLE, 2 * SAMPLE):
        rounds.run("fp16", step)
    # One decode of the first contribution, one of the aggregate, a step.
    assert rounds.times() == [
        KernelTime("fp16", "decode", N, 4, 4.0),
        KernelTime("fp16", "decode_add", N, 2, 2.0),
        KernelTime("fp16", "encode", N, 2, 2.0),
        KernelTime("fp16", "finalise", N, 2, 2.0),
    ]
    assert not rounds.clock.take(), "each is told once"


def test_the_supervisor_hears_the_sums(rounds: Round) -> None:
    rounds.run("fp16", SAMPLE)
    reports = rounds.clock.take()
    ours, theirs = (LaneLink(end) for end in socket.socketpair())
    theirs.send(*reports)
    assert ours.receive() == reports and len(reports[0].times) == 4
    for link in (ours, theirs):
        link.channel.close()


def test_dense_blocks_are_not_timed(rounds: Round) -> None:
    rounds.run("none", SAMPLE)
    assert not rounds.times()


def test_the_results_are_the_calls_own(rounds: Round) -> None:
    timed = rounds.run("fp16", SAMPLE)
    assert np.array_equal(rounds.run("fp16", SAMPLE + 1), random(SAMPLE + 1).astype(np.float16).astype(np.float32))
    assert np.array_equal(timed, random(SAMPLE).astype(np.float16).astype(np.float32))


def test_sums_are_bounded(rounds: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernelclock, "MAX_SUMS", 2)
    rounds.run("fp16", SAMPLE)
    assert len(rounds.times()) == 2


def test_both_exchanges_of_a_block_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(kernelclock, "perf_counter", lambda: float(next(ticks)))
    blocks = {0: SimpleNamespace(block=SimpleNamespace(elements=N))}
    call = lambda e: e.stage  # noqa: E731
    executor = SimpleNamespace(
        encode=call, accumulate=call, finalise=call, decode=call, domains={KEY: SimpleNamespace(blocks=blocks)}
    )
    clock = KernelClock(executor)  # type: ignore[arg-type]
    choice = resolve("powersgd(rank=4)")
    for stage in (0, 1):
        found = executor.encode(Encode(KEY, 0, SAMPLE, choice, 5, 0, 1, None, 2, 0, stage))
        assert found == stage
        executor.accumulate(Accumulate(KEY, 0, SAMPLE, 0, 1, choice.id, choice.level, True, False, stage))
        executor.finalise(Finalise(KEY, 0, SAMPLE, choice, 5, 0, 1, 0, 2, False, 2, 0, stage))
    (report,) = clock.take()
    assert report.times == (
        KernelTime(choice.spec, "encode", N, 1, 2.0), KernelTime(choice.spec, "decode_add", N, 1, 2.0),
    )  # fmt: skip
