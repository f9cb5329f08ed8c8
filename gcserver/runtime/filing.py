"""A thread for files that nobody waits for, such as profiles, which may lie on a disk that does not answer.

What may live here: the thread, what waits for it, and how long the daemon's end waits for it. What may not: files.

A network's file system may hang for minutes. Whatever else the daemon does in threads (asking etcd, whose answer a job
waits for) must not stand behind that, nor may the daemon's end; so this is a thread of its own, and one that does not
keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

#: So much may wait for the thread; a profile is up to some megabytes.
MOST: Final = 32
#: How long, s, the daemon's end waits for what is still to be done.
PATIENCE: Final = 5.0


class Filing:
    """``do`` is called in the loop's thread. ``warn`` takes a line for the log, once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0

    def do(self, work: Callable[[], T], then: Callable[[T], None] = lambda _: None) -> bool:
        """``work`` in the thread, behind what was given before, and ``then`` in the loop with what it returns.

        False if it will not be done, which is said: too much waits already, or no thread can be had.
        """
        if self._waiting >= MOST:
            self._warn(f"the disk of plan.profiles does not answer: {MOST} reads and writes wait, more are left out")
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="filing", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._warn(f"profiles are neither read nor written: {error}")
                return False
            self._thread = thread
        self._waiting += 1
        loop = asyncio.get_running_loop()

        def tell(done: list[T]) -> None:
            self._waiting -= 1
            for result in done:
                then(result)

        def job() -> None:
            done: list[T] = []
            try:
                done.append(work())
            except Exception:
                log.exception("what was to be read or written was not")
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to be told
                loop.call_soon_threadsafe(tell, done)

        self._queue.put(job)
        return True

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def close(self) -> None:
        """Wait until all is done, `PATIENCE` at most. Nothing is told any more."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._warn("the disk of plan.profiles does not answer: the last profiles are given up")
