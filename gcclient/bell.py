"""Doorbells in order: lanes hear of blocks once their inputs are really in the arena.

What may live here: waiting for a device's copies without keeping the thread that computes, the order of doorbells. What
may not: what a doorbell says (`domain.py`), copies (`device.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from gcclient.inorder import InOrder

#: returns once what it is about has come to pass; may be called in any thread, and raises what went wrong
Wait = Callable[[], object]


def all_of(waits: Iterable[Wait | None]) -> Wait | None:
    """What waits for all of them, where there is anything to wait for."""
    some = [wait for wait in waits if wait is not None]
    if len(some) < 2:
        return some[0] if some else None

    def wait() -> None:
        for one in some:
            one()

    return wait


class Bell:
    """Rings for blocks at once where their inputs are there, else from a thread that waits for them, and from then on
    from that thread, until it has nothing left to do: whoever rings twice is heard in that order.

    ``failed``: a method of whom the bell belongs to; called, in that thread, with what waiting or ringing raises.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        # The thread ends with the bell, and must not be what keeps that and its owner.
        self._failed = weakref.WeakMethod(failed)
        self._thread: InOrder | None = None
        self._left = 0
        self._quiet = threading.Condition()

    def ring(self, wait: Wait | None, ring: Callable[[], None]) -> None:
        """Call ``ring`` after ``wait``, and after all that this thread had rung before."""
        with self._quiet:
            if later := wait is not None or self._left > 0:
                if self._thread is None:
                    self._thread = InOrder("gcclient-bell", partial(_report, self._failed))
                self._left += 1
                self._thread.put(partial(self._ring, wait, ring))
        if not later:
            ring()

    def _ring(self, wait: Wait | None, ring: Callable[[], None]) -> None:
        try:
            if wait is not None:
                wait()
            ring()
        finally:
            with self._quiet:
                self._left -= 1
                self._quiet.notify_all()

    def wait_quiet(self, seconds: float) -> bool:
        """Until all was rung for, for so long at most; whether it was."""
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._left, seconds)


def _report(failed: weakref.WeakMethod[Callable[[Exception], None]], error: Exception) -> None:
    if (owner := failed()) is not None:
        owner(error)
