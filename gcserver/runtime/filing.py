"""Threads for files that may lie on a disk that does not answer, as profiles do: nothing else stands behind them.

What may live here: the threads, what waits for them, how long anybody waits. What may not: files.

A network's file system may hang for minutes. Whatever else the daemon does in threads (asking etcd, whose answer a job
waits for) must not wait for that, nor may the daemon's end; so these are threads of their own, and none that keeps the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

#: So much may wait behind what the disk has not answered for `ANSWERS`; a profile is up to some megabytes.
MOST: Final = 32
#: How long, s, a read or a write may take before the disk counts as one that does not answer.
ANSWERS: Final = 5.0
#: How long, s, the daemon's end waits for what is still to be done.
PATIENCE: Final = 2.0


class Filing:
    """One thread for what nobody waits for, in order. ``do`` and ``close`` are called in the loop's thread. ``warn``
    takes a line for the log, once."""

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        #: since when the thread is at what it does
        self._began: float | None = None
        self._closed = False

    def do(self, what: str, work: Callable[[], T], then: Callable[[T], None] = lambda _: None) -> bool:
        """``work`` in the thread, behind what was given before, and ``then`` in the loop with what it returns;
        ``what`` is its name in the log.

        False if it will not be done, which is said: the disk does not answer and much waits already, no thread can be
        had, or the daemon has come to its end.
        """
        began = self._began
        if self._closed:
            return False
        if self._waiting >= MOST and began is not None and self._clock() - began > ANSWERS:
            self._warn(
                f"the disk of plan.profiles does not answer, and {MOST} reads and writes of profiles wait for it: more "
                "are left out until it does"
            )
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="filing", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._warn(f"profiles are neither read nor written as long as there is no thread for it: {error}")
                return False
            self._thread = thread
        self._waiting += 1
        loop = asyncio.get_running_loop()

        def tell(done: list[T]) -> None:
            self._waiting -= 1
            for result in () if self._closed else done:
                then(result)

        def job() -> None:
            done: list[T] = []
            try:
                done.append(work())
            except Exception:
                log.exception("%s could not be read or written", what)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to be told
                loop.call_soon_threadsafe(tell, done)

        self._queue.put(job)
        return True

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._began = self._clock()
            job()
            self._began = None

    def close(self) -> None:
        """Wait until all is done, `PATIENCE` at most. Nothing is taken any more, and nobody told."""
        self._closed = True
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._warn("the disk of plan.profiles does not answer: the last profiles are given up")


def patiently(what: str, work: Callable[[], T], instead: T) -> T:
    """What ``work`` returns, or ``instead`` where the disk has not answered after `ANSWERS` seconds, which is logged,
    or where no thread can be had. For who has no loop. Raises what ``work`` raises."""
    done: list[T] = []
    failed: list[BaseException] = []

    def job() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=job, name="patiently", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("%s: %s", what, error)
        return instead
    thread.join(ANSWERS)
    if failed:
        raise failed[0]
    if not done:
        log.warning("%s: the disk does not answer, it is done without", what)
    return done[0] if done else instead
