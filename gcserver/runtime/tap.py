"""Hooks around what a lane does, there only while somebody listens: a lane that nobody looks at runs none of this.

What may live here: putting hooks in and taking them out, for any number of listeners. What may not: what is made of
what they hear (`steptrace.py`, `recording.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from gcserver.core import effects as fx
from gcserver.core import events as ev

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess

#: The effects that are timed.
HEARD: Final = (fx.Encode, fx.Accumulate, fx.Finalise, fx.Decode, fx.Send, fx.LogStep)


class Listener(Protocol):
    """Hears of events and effects; times are seconds of the monotonic clock."""

    def before(self, event: ev.LaneEvent, now: float) -> None:
        """An event from outside the lane is about to be handled."""

    def after(self, event: ev.LaneEvent, began: float, ended: float) -> None:
        """It was, and what followed from it."""

    def done(self, effect: Any, began: float, ended: float) -> None:
        """One of HEARD was carried out."""


class Tap:
    """The hooks of one lane process."""

    def __init__(self, process: LaneProcess) -> None:
        self._p = process
        self._listeners: tuple[Listener, ...] = ()
        self._plain: dict[type, Callable[[Any], object]] = {}

    def add(self, listener: Listener) -> None:
        """Listen from now on; twice is once."""
        if listener in self._listeners:
            return
        if not self._listeners:
            self._put_in()
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Listen no more; with the last listener the lane is as it was."""
        if listener not in self._listeners:
            return
        self._listeners = tuple(x for x in self._listeners if x is not listener)
        if not self._listeners:
            self._p.perform.update(self._plain)
            del self._p.feed  # the method of the class again

    def _put_in(self) -> None:
        self._plain = {kind: self._p.perform[kind] for kind in HEARD}
        for kind, act in self._plain.items():
            self._p.perform[kind] = self._timed(act)
        plain = self._p.feed

        def feed(event: ev.LaneEvent) -> None:
            began = time.monotonic()
            for listener in self._listeners:
                listener.before(event, began)
            plain(event)
            ended = time.monotonic()
            for listener in self._listeners:
                listener.after(event, began, ended)

        self._p.feed = feed  # type: ignore[method-assign]

    def _timed(self, act: Callable[[Any], object]) -> Callable[[Any], object]:
        def timed(effect: Any) -> object:
            began = time.monotonic()
            result = act(effect)
            ended = time.monotonic()
            for listener in self._listeners:
                listener.done(effect, began, ended)
            return result

        return timed
