"""A lane that cannot serve one domain: that one ends here at once, and what others need is done.

What may live here: tests of `gcserver/runtime/endings.py` and of how `gcserver/runtime/lane.py` carries out effects and
takes messages when one of them fails. What may not: what is short (`test_shortage.py`), which codec failed
(`test_codecfaults.py`).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcproto.manifest import Section
from gcproto.wire import FrameType, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control_events import OpenSection
from gcserver.core.events import CodecChoice
from gcserver.runtime import lane as lanes
from gcserver.runtime.endings import domain_of
from gcserver.runtime.lane import LaneProcess
from gcserver.runtime.lanelink import AddPeer, LaneTrouble
from gcserver.runtime.statefiles import MemoryDamaged, MemoryShort

POOR, RICH = (b"p" * 16, 0), (b"r" * 16, 0)
MINE = CodecChoice("acme(ratio=0.1)", 40000, 100_000, True, False)
NONE = CodecChoice("none", 0, 0, False, False)
MEMORY = SimpleNamespace(space=SimpleNamespace(sections=[], blocks=[]))


class Machine:
    """Answers events with effects that the test has laid out."""

    def __init__(self) -> None:
        self.answers: list[list[Any]] = []
        self.heard: list[Any] = []
        self.domains: dict[Any, Any] = {}
        self.ended: dict[bytes, None] = {}
        self.links: dict[int, Any] = {}
        self.config = SimpleNamespace(quiet_after=5.0)

    def on(self, event: Any, now: float) -> list[Any]:
        self.heard.append(event)
        return self.answers.pop(0) if self.answers else []


class Lane:
    """A lane process over such a machine: what it did, and what it said to its supervisor."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.done: list[Any] = []
        self.said: list[Any] = []
        self.forgotten: list[Any] = []
        setup: Any = SimpleNamespace(hello=SimpleNamespace(lane=0), listen="", state="", secured=False)
        link: Any = SimpleNamespace(send=lambda *said: self.said.extend(said), channel=SimpleNamespace(backlog=False))
        self.process = LaneProcess(setup, self.machine, None, link, socket.socket())  # type: ignore[arg-type]
        self.process.executor.domains.update({POOR: MEMORY, RICH: MEMORY})  # type: ignore[dict-item]
        for kind in (fx.CommitOutput, fx.Notify, fx.Release, fx.Flip, fx.Encode):
            self.process.perform[kind] = self.done.append

    def fails(self, kind: type, error: Exception) -> None:
        """Effects of this kind do, for the poor domain."""

        def perform(effect: Any) -> None:
            if domain_of(effect) == RICH:
                self.done.append(effect)
            else:
                raise error

        self.process.perform[kind] = perform

    def feed(self, *answers: list[Any]) -> None:
        """An event, and what the machine answers it and those that follow."""
        self.machine.answers = list(answers)
        self.process.feed(ev.Tick())

    def close(self) -> None:
        self.process.workers.listener.close()
        self.process.poller.close()


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    monkeypatch.setattr(lanes, "lane_transport", lambda *_: SimpleNamespace(open=lambda *_: None))
    made = Lane()
    yield made
    made.close()


def commit(domain: Any) -> fx.CommitOutput:
    return fx.CommitOutput(domain, 0, 1, False, 0)


def decode(domain: Any = POOR, codec: int = 0) -> fx.Decode:
    return fx.Decode(domain, 0, 1, 7, codec, 0, 2, 0, False)


def encode(domain: Any, codec: CodecChoice = MINE) -> fx.Encode:
    return fx.Encode(domain, 0, 1, codec, 0, 0, 1, None, 0, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("64 MiB"), "OutOfMemory"),
        (MemoryShort(errno.ENOSPC, "no room"), "OutOfMemory"),
        (MemoryShort(errno.EMFILE, "no files"), "OutOfDescriptors"),
        (MemoryDamaged("block 7"), "PeerLost"),
    ],
)
def test_the_others_go_on(lane: Lane, error: Exception, kind: str) -> None:
    lane.fails(fx.Decode, error)
    flips = [fx.Flip(domain, 0, 1, 0, False) for domain in (POOR, RICH)]
    lane.process.counters.rounds.update({POOR[0]: 3, RICH[0]: 4})
    lane.feed([commit(RICH), decode(), commit(POOR), fx.Release(7), flips[1]], [fx.Release(8)])
    # Its output slot holds no average: it must not be committed.
    assert lane.done == [commit(RICH), fx.Release(7), flips[1], fx.Release(8)]
    assert lane.machine.heard[1:] == [ev.DomainClosed(POOR)]
    assert list(lane.process.executor.domains) == [RICH] and lane.process.counters.rounds == {RICH[0]: 4}
    (trouble,) = lane.said
    assert isinstance(trouble, LaneTrouble) and (trouble.job, trouble.kind) == (POOR[0], kind) and trouble.advice
    lane.feed(flips)
    assert lane.done[4:] == [flips[1]], "nothing more of it is done"
    lane.process.orders.take(ev.DomainClosed(POOR))
    assert not lane.process.endings.over


def test_a_codec_that_raises_ends_its_domain_with_the_traceback_in_the_log(lane: Lane) -> None:
    lane.fails(fx.Encode, ZeroDivisionError("by zero"))
    lane.feed([encode(RICH), encode(POOR), commit(POOR), fx.Release(3), encode(RICH)])
    assert lane.done == [encode(RICH), fx.Release(3), encode(RICH)], "nothing is committed of what failed"
    assert list(lane.process.executor.domains) == [RICH]
    fault, log = lane.said
    assert isinstance(fault, fx.ReportFault) and (fault.domain, fault.kind, fault.step) == (POOR, "CodecError", 1)
    assert fault.message.endswith("ZeroDivisionError: by zero")
    assert isinstance(log, LaneTrouble) and not log.job and "Traceback" in log.message


def test_what_waits_of_the_domain_meets_one_that_is_closed(lane: Lane) -> None:
    """So its machine releases the payloads that were made meanwhile."""
    lane.fails(fx.Decode, MemoryError())
    made = ev.Encoded(POOR, 0, 1, 5, 64, 0, False)
    lane.process.perform[fx.Encode] = lambda effect: lane.process.queue.append(made)
    lane.feed([encode(POOR), decode()])
    assert lane.machine.heard[1:] == [ev.DomainClosed(POOR), made]


@pytest.mark.parametrize("effect", [encode(POOR, NONE), commit(POOR), fx.Count("x"), fx.Release(3)])
def test_a_defect_of_the_daemon_ends_the_lane(lane: Lane, effect: Any) -> None:
    lane.fails(type(effect), ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        lane.feed([effect])
    assert not lane.said and POOR in lane.process.executor.domains


def test_a_lane_without_memory_for_itself_ends(lane: Lane) -> None:
    """Its next life takes up from the files."""
    lane.fails(fx.Count, MemoryError())
    with pytest.raises(MemoryError):
        lane.feed([fx.Count("x")])
    assert not lane.said


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryShort(errno.ENOSPC, "no room"), "OutOfMemory"),
        (MemoryError(), "OutOfMemory"),
        (MemoryDamaged("block 7"), "PeerLost"),
    ],
)
def test_a_section_without_memory_that_can_be_used_ends_its_domain(lane: Lane, error: Exception, kind: str) -> None:
    memory: Any = SimpleNamespace(space=SimpleNamespace(sections=[]), open_section=raising(error))
    lane.process.executor.domains[POOR] = memory
    lane.process.orders.take(OpenSection(POOR, Section(0, ())))
    assert [(said.job, said.kind) for said in lane.said] == [(POOR[0], kind)]
    assert lane.machine.heard == [ev.DomainClosed(POOR)] and list(lane.process.executor.domains) == [RICH]
    lane.process.orders.take(OpenSection(POOR, Section(1, ())))
    assert len(lane.said) == 1, "what was on its way is of nothing that is there"


def test_a_domain_that_cannot_be_had_is_not_opened_again(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Any = ev.DomainOpened(SimpleNamespace(id=POOR), (), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(lane.process.orders, "_open_domain", raising(MemoryShort(errno.ENOSPC, "no room")))
    lane.process.orders.take(opened)
    monkeypatch.undo()
    lane.process.orders.take(opened)
    assert [said.kind for said in lane.said] == ["OutOfMemory"] and lane.machine.heard == [ev.DomainClosed(POOR)]


def test_a_message_of_no_domain_that_fails_ends_the_lane(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane.process.transport, "open", raising(MemoryError()))
    with pytest.raises(MemoryError):
        lane.process.orders.take(AddPeer("b", "tcp://127.0.0.1:1"))
    assert not lane.said


def test_frames_are_of_the_domain_in_their_header() -> None:
    of_a_job = Header(FrameType.DATA, sender=1, incarnation=1, job=POOR[0], domain=3)
    assert domain_of(fx.Send(2, of_a_job)) == (POOR[0], 3)
    assert domain_of(fx.Send(2, Header(FrameType.HELLO, sender=1, incarnation=1, job=wire.NO_JOB))) is None
