"""The thread for files: order, what hangs, what is too much, and the end.

What may live here: tests of `gcserver/runtime/filing.py` with work that waits for an event. What may not: profiles.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from gcserver.runtime import filing
from gcserver.runtime.filing import ANSWERS, MOST, Filing, patiently


@dataclass
class Played:
    """What is warned of, and a clock that the test moves."""

    warnings: list[str] = field(default_factory=list)
    now: float = 100.0


Case = Callable[[Filing, Played], Awaitable[None]]


def played(case: Case) -> list[str]:
    """What is warned of."""
    found = Played()

    async def play() -> None:
        await case(Filing(found.warnings.append, lambda: found.now), found)

    asyncio.run(asyncio.wait_for(play(), 60))
    return found.warnings


def hung(files: Filing) -> threading.Event:
    """The thread is at something that goes on until the event is set."""
    began, answers = threading.Event(), threading.Event()
    assert files.do("a", lambda: (began.set(), answers.wait()))
    assert began.wait(30)
    return answers


def test_work_is_done_in_order_in_one_other_thread_and_told_of_in_the_loop() -> None:
    async def case(files: Filing, _: Played) -> None:
        told: list[tuple[int, int, int]] = []
        done = asyncio.Event()
        for number in range(3):
            assert files.do(
                "a", lambda n=number: (n, threading.get_ident()), lambda r: told.append((*r, threading.get_ident()))
            )
        files.do("a", lambda: None, lambda _: done.set())
        await done.wait()
        (elsewhere,), (here,) = {t for _, t, _ in told}, {t for _, _, t in told}
        assert [n for n, _, _ in told] == [0, 1, 2] and elsewhere != here == threading.get_ident()
        files.close()

    assert not played(case)


def test_what_fails_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    async def case(files: Filing, _: Played) -> None:
        told, done = [], asyncio.Event()
        files.do("a", lambda: 1 // 0, told.append)
        files.do("a", lambda: "next", lambda r: (told.append(r), done.set()))
        await done.wait()
        assert told == ["next"]
        files.close()

    assert not played(case)
    assert "ZeroDivisionError" in caplog.text


def test_however_much_comes_at_once_a_disk_that_answers_gets_it() -> None:
    async def case(files: Filing, played: Played) -> None:
        answers, done = hung(files), []
        played.now += ANSWERS
        assert all(files.do("a", lambda: done.append(True)) for _ in range(MOST + 8))
        answers.set()
        files.close()
        assert len(done) == MOST + 8

    assert not played(case)


def test_a_disk_that_hangs_takes_so_much_and_keeps_neither_other_threads_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filing, "PATIENCE", 0.05)
    done: list[bool] = []
    told: list[None] = []

    async def case(files: Filing, played: Played) -> None:
        answers = hung(files)
        assert all(files.do("a", lambda: done.append(True), told.append) for _ in range(MOST - 1))
        played.now += 2 * ANSWERS
        assert not files.do("a", lambda: done.append(True))
        assert f"{MOST} reads and writes of profiles wait" in played.warnings[-1]
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, lambda: "etcd") == "etcd"
        assert files._thread is not None and files._thread.daemon, "it does not keep the process"
        files.close()
        assert "given up" in played.warnings[-1] and not done
        assert not files.do("a", lambda: done.append(True)), "nothing is taken any more"
        answers.set()
        files._thread.join(30)
        await asyncio.sleep(0)

    assert len(played(case)) == 2
    assert len(done) == MOST - 1 and not told, "a disk that answers after all gets the rest, with nobody to be told"


def test_after_a_disk_has_answered_there_is_room_again() -> None:
    async def case(files: Filing, played: Played) -> None:
        answers, done = hung(files), asyncio.Event()
        for _ in range(MOST - 2):
            files.do("a", lambda: None)
        files.do("a", lambda: None, lambda _: done.set())
        played.now += 2 * ANSWERS
        assert not files.do("a", lambda: None)
        answers.set()
        await done.wait()
        assert files.do("a", lambda: None)
        files.close()

    assert len(played(case)) == 1


def test_where_no_thread_can_be_had_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def case(files: Filing, _: Played) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none)
            assert not files.do("a", lambda: None)
        done = asyncio.Event()
        assert files.do("a", lambda: None, lambda _: done.set()), "later there is one"
        await done.wait()
        files.close()

    (said,) = played(case)
    assert said.startswith("profiles are neither read nor written") and "can't start new thread" in said


def test_what_was_never_used_ends_at_once() -> None:
    async def case(files: Filing, _: Played) -> None:
        files.close()
        assert files._thread is None

    assert not played(case)


def test_who_has_no_loop_waits_so_long_and_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert patiently("costs", lambda: 3, 0) == 3
    with pytest.raises(ZeroDivisionError):
        patiently("costs", lambda: 1 // 0, 0)
    assert not caplog.records
    monkeypatch.setattr(filing, "ANSWERS", 0.05)
    answers = threading.Event()
    assert patiently("costs could not be read", lambda: answers.wait(), "instead") == "instead"
    answers.set()
    assert "costs could not be read: the disk does not answer" in caplog.text
