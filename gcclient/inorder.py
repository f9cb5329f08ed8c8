"""A thread that does what it is given, one thing after the other.

What may live here: that. What may not: what is done.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class InOrder:
    """Does jobs in the order in which they are given, in a thread of its own, for as long as it is held.

    ``failed`` is called in that thread with what a job raises; the next ones are done all the same.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A wait within torch must not keep a process that has failed from ending.
        threading.Thread(target=_work, args=(self._jobs, failed), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, job: Job) -> None:
        self._jobs.put(job)


def _work(jobs: queue.SimpleQueue[Job | None], failed: Callable[[Exception], None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception as error:
            failed(error)
        del job  # what it holds may be what the end of this thread waits for
