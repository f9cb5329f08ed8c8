"""A lane without memory for one domain: that one ends here at once, and what others need is done.

What may live here: tests of how `gcserver/runtime/lane.py` carries out effects when memory runs short. What may not:
what is short (`test_shortage.py`).
"""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.runtime.lane import LaneProcess
from gcserver.runtime.lanelink import LaneTrouble
from gcserver.runtime.statefiles import MemoryShort

POOR, RICH = (b"p" * 16, 0), (b"r" * 16, 0)


class Machine:
    """Answers events with effects that the test has laid out."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.heard: list[Any] = []
        self.ended: dict[bytes, None] = {}

    def on(self, event: Any, now: float) -> list[Any]:
        self.heard.append(event)
        return self.answers.pop(0) if self.answers else []


def process(machine: Machine) -> tuple[Any, list[Any], list[Any]]:
    """(a lane over this machine, what it did, what it said to its supervisor)"""
    setup: Any = SimpleNamespace(hello=SimpleNamespace(lane=0))
    lane: Any = LaneProcess(setup, machine, SimpleNamespace(reset=None), SimpleNamespace(), socket.socket())  # type: ignore[arg-type]
    done: list[Any] = []
    said: list[Any] = []
    for kind in (fx.CommitOutput, fx.Notify, fx.Release, fx.Flip):
        lane.perform[kind] = done.append
    lane.send_up = lambda *messages: said.extend(messages)
    return lane, done, said


def close(lane: Any) -> None:
    lane.workers.listener.close()
    lane.poller.close()


def commit(domain: Any) -> fx.CommitOutput:
    return fx.CommitOutput(domain, 0, 1, False, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("64 MiB"), "OutOfMemory"),
        (MemoryShort(errno.ENOSPC, "no room"), "OutOfMemory"),
        (MemoryShort(errno.EMFILE, "no files"), "OutOfDescriptors"),
    ],
)
def test_the_others_go_on(error: Exception, kind: str) -> None:
    decode = fx.Decode(POOR, 0, 1, 7, 0, 0, 2, 0, False)
    flips = [fx.Flip(domain, 0, 1, 0, False) for domain in (POOR, RICH)]
    machine = Machine([commit(RICH), decode, commit(POOR), fx.Release(7), flips[1]], [fx.Release(8)], flips)
    lane, done, said = process(machine)

    def poor(effect: Any) -> None:
        raise error

    lane.perform[fx.Decode] = poor
    lane.feed(ev.Tick())
    # Its output slot holds no average: it must not be committed.
    assert done == [commit(RICH), fx.Release(7), flips[1], fx.Release(8)]
    assert machine.heard[1:] == [ev.DomainClosed(POOR)]
    (trouble,) = said
    assert isinstance(trouble, LaneTrouble) and (trouble.job, trouble.kind) == (POOR[0], kind) and trouble.advice
    lane.feed(ev.Tick())
    assert done[4:] == [flips[1]], "nothing more of it is done"
    lane._from_supervisor(ev.DomainClosed(POOR))
    assert not lane.given_up
    close(lane)


def test_a_lane_without_memory_for_itself_ends() -> None:
    """Its next life takes up from the files."""
    lane, _, _ = process(Machine([fx.Count("x")]))

    def none(effect: Any) -> None:
        raise MemoryError

    lane.perform[fx.Count] = none
    with pytest.raises(MemoryError):
        lane.feed(ev.Tick())
    close(lane)
