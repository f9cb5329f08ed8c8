"""Which failures end a job and are its codec's, and what is said of them.

What may live here: tests of `gcserver/runtime/codecfaults.py`, and of what a lane does about such a failure. What may
not: real daemons (`tests/integration/test_broken_codec.py`).
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import CodecChoice
from gcserver.runtime.codecfaults import codec_fault
from gcserver.runtime.lane import LaneProcess
from gcserver.runtime.lanelink import LaneTrouble
from gcserver.runtime.statefiles import MemoryShort

ONE, OTHER = (b"j" * 16, 16), (b"k" * 16, 16)
MINE = CodecChoice("acme(ratio=0.1)", 40000, 100_000, True, False)
NONE = CodecChoice("none", 0, 0, False, False)
SPACE = SimpleNamespace(
    sections=[SimpleNamespace(tensors=[SimpleNamespace(name="b"), SimpleNamespace(name="w")])],
    blocks=[(SimpleNamespace(key=0, tensor=0), SimpleNamespace(key=4096, tensor=1))],
)
DOMAINS: Any = {d: SimpleNamespace(space=SPACE) for d in (ONE, OTHER)}


def encode(domain: tuple[bytes, int] = ONE, codec: CodecChoice = MINE) -> fx.Encode:
    return fx.Encode(domain, 4096, 7, codec, 0, 0, 1, None, 0, 0)


def decode(codec: int = 40000, key: int = 4096) -> fx.Decode:
    return fx.Decode(ONE, key, 7, None, codec, 100_000, 2, 0, False)


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (encode(), "codec acme(ratio=0.1) failed encoding block 4096 (w): ZeroDivisionError: by zero"),
        (decode(), "codec 40000, level 100000 failed decoding block 4096 (w): ZeroDivisionError: by zero"),
        (decode(key=9), "codec 40000, level 100000 failed decoding block 9: ZeroDivisionError: by zero"),
    ],
)
def test_a_fault_names_codec_block_and_exception(effect: Any, said: str) -> None:
    fault = codec_fault(effect, ZeroDivisionError("by zero"), DOMAINS)
    assert fault is not None
    assert (fault.domain, fault.kind, fault.step, fault.message) == (ONE, "CodecError", 7, said)
    assert "the daemon's log" in fault.advice


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (encode(codec=NONE), KeyError("x")),
        (decode(codec=0), KeyError("x")),
        (fx.Release(3), KeyError("x")),
        (encode(), MemoryShort(28, "no space")),
        (encode((b"z" * 16, 1)), KeyError("x")),
    ],
)
def test_what_is_not_a_codecs_doing_is_a_defect(effect: Any, error: Exception) -> None:
    assert codec_fault(effect, error, DOMAINS) is None


class Lane:
    """A lane process as far as carrying out effects goes; ``planned``: effects of each event."""

    feed = LaneProcess.feed
    _carry_out = LaneProcess._carry_out
    _forget_domain = LaneProcess._forget_domain

    def __init__(self, planned: dict[Any, list[Any]]) -> None:
        self.done: list[Any] = []
        self.sent: list[Any] = []
        self.closed: list[Any] = []
        self.heard: list[Any] = []
        self.queue: deque[Any] = deque()
        self.broken: list[Any] = []
        self.delays = SimpleNamespace(on=lambda event, now: None)
        self.counters = SimpleNamespace(rounds={ONE[0]: 3, OTHER[0]: 4})
        self.reports = self.tracer = SimpleNamespace(forget=lambda domain: None)
        self.executor = SimpleNamespace(domains=dict(DOMAINS), close=self.closed.append)
        self.machine = SimpleNamespace(on=lambda event, now: self.heard.append(event) or planned.get(event, []))
        kinds = (fx.Decode, fx.CommitOutput, fx.Release)
        self.perform: dict[type, Any] = {fx.Encode: self.encode} | dict.fromkeys(kinds, self.done.append)

    def encode(self, effect: fx.Encode) -> None:
        if effect.domain == ONE:
            raise ZeroDivisionError
        self.done.append(effect)
        self.queue.append("encoded")

    def send_up(self, *messages: Any) -> None:
        self.sent += messages


def test_a_lane_closes_that_domain_and_serves_the_others() -> None:
    commit = fx.CommitOutput(ONE, 4096, 7, False, 0)
    lane = Lane({"push": [encode(OTHER), encode(), commit, fx.Release(3), encode(OTHER)]})
    lane.feed("push")  # type: ignore[arg-type]
    assert lane.done == [encode(OTHER), fx.Release(3), encode(OTHER)], "nothing is committed of what failed"
    assert lane.heard == ["push", "encoded", "encoded", ev.DomainClosed(ONE)]
    assert lane.closed == [ONE] and lane.counters.rounds == {OTHER[0]: 4} and not lane.broken
    fault, log = lane.sent
    assert isinstance(fault, fx.ReportFault) and fault.message.endswith("ZeroDivisionError")
    assert isinstance(log, LaneTrouble) and not log.job and "Traceback" in log.message


def test_a_defect_of_the_daemon_ends_the_lane_as_before() -> None:
    lane = Lane({"push": [encode(codec=NONE)]})
    with pytest.raises(ZeroDivisionError):
        lane.feed("push")  # type: ignore[arg-type]
    assert not lane.sent and not lane.closed
