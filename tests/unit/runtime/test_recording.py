"""A lane's part of a trace: a real lane machine and executor behind a tap, and what is recorded of their work.

What may live here: tests of `gcserver/runtime/recording.py`. What may not: hooks by themselves (`test_tap.py`).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcproto.spans import Kind, Span, unpack
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.runtime.recording import AskRecord, LaneSpans, Recording, RecordSpans
from gcserver.runtime.tap import HEARD, Tap
from tests.unit.runtime.one_block import JOB, N, node

ID = (JOB, 0)
CODEC = ev.CodecChoice("none", 0, 0, False, False)


class Lane:
    """A lane process as far as a tap and a recording touch it: one block in memory, whose newest step is 5."""

    def __init__(self, folder: Path) -> None:
        self.executor, _ = node(folder)
        self.perform: dict[type, Any] = dict.fromkeys(HEARD, lambda e: None)
        steps = SimpleNamespace(settled=2, open={3: None, 5: None})
        machine: Any = SimpleNamespace(domains={ID: SimpleNamespace(steps=steps, finished={4: None})})
        self.sent: list[LaneSpans] = []
        self.recording = Recording(Tap(self), 2, machine, self.executor.domains, self.sent.append)  # type: ignore[arg-type]

    def feed(self, event: Any) -> None:
        """Nothing follows from it."""

    def run(self, step: int) -> None:
        """What a lane does in a step of a block that it owns."""
        data = Header(FrameType.DATA, Phase.CONTRIBUTION, job=JOB, step=step, sender=2, link_seq=9, payload_bytes=77)
        self.perform[fx.Encode](fx.Encode(ID, 0, step, CODEC, 0, 0, 1, None, 0, 0))
        self.feed(ev.FrameReceived(data))
        self.perform[fx.Accumulate](fx.Accumulate(ID, 0, step, 1, None, 0, 0, True, False))
        self.perform[fx.Finalise](fx.Finalise(ID, 0, step, CODEC, 0, 0, 1, 0, 2, False, 0, 0))
        again = Header(FrameType.DATA, Phase.AGGREGATE, flags=Flag.RESENT, job=JOB, step=step, link_seq=4)
        self.perform[fx.Send](fx.Send(2, again))
        self.perform[fx.Decode](fx.Decode(ID, 0, step, None, 0, 0, 2, 0, False, 1))
        self.perform[fx.LogStep](fx.LogStep(ID, step, False, 0, 0))

    def answer(self, number: int = 7) -> tuple[LaneSpans, list[Span]]:
        self.recording.take(AskRecord(5, number))
        answer = self.sent.pop()
        assert answer.request == 5 and not self.sent
        return answer, list(unpack(answer.data))


def test_every_kernel_and_frame_of_whole_steps_is_recorded(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    plain = dict(lane.perform)
    lane.recording.take(RecordSpans(7, b"", 0))
    for step in (5, 6):
        lane.run(step)
    # of the link itself, and of a process group that has left
    lane.feed(ev.FrameReceived(Header(FrameType.HEARTBEAT)))
    lane.perform[fx.Send](fx.Send(2, Header(FrameType.NACK)))
    lane.perform[fx.Encode](fx.Encode((JOB, 99), 0, 6, CODEC, 0, 0, 1, None, 0, 0))
    answer, spans = lane.answer()
    assert (answer.dropped, answer.firsts) == (0, ((JOB, 0, 6),))
    assert [(s.kind, s.peer, s.seq, s.nbytes) for s in spans] == [
        (Kind.ENCODE, 0, 0, 4 * N), (Kind.RECEIVE, 2, 9, 77), (Kind.ADD, 2, 0, 4 * N), (Kind.FINALISE, 0, 0, 4 * N),
        (Kind.SEND, 2, 4, 0), (Kind.DECODE, 0, 0, 4 * N),
    ]  # fmt: skip
    assert {(s.job, s.domain, s.step, s.key, s.place) for s in spans} == {(JOB, 0, 6, 0, 2)}
    assert [s.resent for s in spans if s.kind in (Kind.SEND, Kind.RECEIVE)] == [False, True]
    assert all(a.begin <= a.end <= b.begin for a, b in itertools.pairwise(spans))
    assert lane.perform == plain and "feed" not in vars(lane), "and then the lane is as it was"


def test_another_traces_number_gets_nothing_and_ends_the_one_there_is(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.recording.take(RecordSpans(7, b"", 0))
    lane.run(6)
    assert lane.answer(8) == (LaneSpans(5, 0, (), b""), [])
    assert lane.answer(7)[1] == []


def test_a_new_order_begins_anew(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.recording.take(RecordSpans(6, b"", 0))
    lane.run(6)
    lane.recording.take(RecordSpans(7, b"o" * 16, 0))
    lane.run(7)
    assert lane.answer()[1] == [], "of another job"
