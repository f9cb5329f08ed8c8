"""Hooks on a lane: any number of listeners, in any order, and nothing left behind.

What may live here: tests of `gcserver/runtime/tap.py`. What may not: what listeners make of what they hear.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.runtime.tap import HEARD, Tap

DOMAIN = (b"j" * 16, 0)
STEP = fx.LogStep(DOMAIN, 1, False, 0, 0)


class Lane:
    """A lane process as far as a tap touches it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.perform: dict[type, Any] = dict.fromkeys((*HEARD, fx.Flip), self.seen.append)

    def feed(self, event: Any) -> None:
        self.seen.append(event)
        self.perform[fx.LogStep](STEP)


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def before(self, event: Any, now: float) -> None:
        self.heard.append("before")

    def after(self, event: Any, began: float, ended: float) -> None:
        assert began <= ended
        self.heard.append("after")

    def done(self, effect: Any, began: float, ended: float) -> None:
        assert effect is STEP and began <= ended
        self.heard.append("done")


def test_what_follows_from_an_event_is_heard_within_it() -> None:
    lane, listener = Lane(), Listener()
    tap = Tap(lane)  # type: ignore[arg-type]
    tap.add(listener)
    tap.add(listener)
    lane.feed(ev.Tick())
    lane.perform[fx.Flip](1)
    assert listener.heard == ["before", "done", "after"]
    assert lane.seen == [ev.Tick(), STEP, 1], "and everything is done as before"


@pytest.mark.parametrize("first", [0, 1])
def test_listeners_come_and_go_in_any_order(first: int) -> None:
    lane, listeners = Lane(), [Listener(), Listener()]
    plain = dict(lane.perform)
    tap = Tap(lane)  # type: ignore[arg-type]
    for listener in listeners:
        tap.add(listener)
    tap.remove(listeners[first])
    lane.feed(ev.Tick())
    assert [len(x.heard) for x in listeners] == [3 * (first == 1), 3 * (first == 0)]
    for listener in (*listeners, *listeners):
        tap.remove(listener)
    assert lane.perform == plain and "feed" not in vars(lane), "a lane that nobody looks at is as it was"
