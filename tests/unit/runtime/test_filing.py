"""The thread for files: order, what hangs, what is too much, and the end.

What may live here: tests of `gcserver/runtime/filing.py` with work that waits for an event. What may not: profiles.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from gcserver.runtime import filing
from gcserver.runtime.filing import MOST, Filing

Case = Callable[[Filing, list[str]], Awaitable[None]]


def played(case: Case) -> list[str]:
    """What is warned of."""
    warnings: list[str] = []

    async def play() -> None:
        await case(Filing(warnings.append), warnings)

    asyncio.run(asyncio.wait_for(play(), 60))
    return warnings


def test_work_is_done_in_order_in_one_other_thread_and_told_of_in_the_loop() -> None:
    async def case(files: Filing, _: list[str]) -> None:
        told: list[tuple[int, int, int]] = []
        done = asyncio.Event()
        for number in range(3):
            assert files.do(
                lambda n=number: (n, threading.get_ident()), lambda r: told.append((*r, threading.get_ident()))
            )
        files.do(lambda: None, lambda _: done.set())
        await done.wait()
        (elsewhere,), (here,) = {t for _, t, _ in told}, {t for _, _, t in told}
        assert [n for n, _, _ in told] == [0, 1, 2] and elsewhere != here == threading.get_ident()
        files.close()

    assert not played(case)


def test_what_fails_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    async def case(files: Filing, _: list[str]) -> None:
        told, done = [], asyncio.Event()
        files.do(lambda: 1 // 0, told.append)
        files.do(lambda: "next", lambda r: (told.append(r), done.set()))
        await done.wait()
        assert told == ["next"]
        files.close()

    assert not played(case)
    assert "ZeroDivisionError" in caplog.text


def test_a_disk_that_hangs_takes_so_much_and_keeps_neither_other_threads_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filing, "PATIENCE", 0.05)
    answers, done = threading.Event(), []

    async def case(files: Filing, warnings: list[str]) -> None:
        assert all(files.do(lambda: done.append(answers.wait())) for _ in range(MOST))
        assert not files.do(lambda: done.append(True)) and f"{MOST} reads and writes wait" in warnings[-1]
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, lambda: "etcd") == "etcd"
        assert files._thread is not None and files._thread.daemon, "it does not keep the process"
        files.close()
        assert "given up" in warnings[-1] and not done
        answers.set()
        files._thread.join(30)

    assert len(played(case)) == 2
    assert len(done) == MOST, "a disk that answers after all gets the rest, with nobody to be told"


def test_after_a_disk_has_answered_there_is_room_again() -> None:
    async def case(files: Filing, warnings: list[str]) -> None:
        answers, done = threading.Event(), asyncio.Event()
        for _ in range(MOST - 1):
            files.do(answers.wait)
        files.do(lambda: None, lambda _: done.set())
        assert not files.do(lambda: None)
        answers.set()
        await done.wait()
        assert files.do(lambda: None)
        files.close()

    assert len(played(case)) == 1


def test_where_no_thread_can_be_had_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def case(files: Filing, _: list[str]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none)
            assert not files.do(lambda: None)
        done = asyncio.Event()
        assert files.do(lambda: None, lambda _: done.set()), "later there is one"
        await done.wait()
        files.close()

    assert played(case) == ["profiles are neither read nor written: can't start new thread"]


def test_what_was_never_used_ends_at_once() -> None:
    async def case(files: Filing, _: list[str]) -> None:
        files.close()
        assert files._thread is None

    assert not played(case)
