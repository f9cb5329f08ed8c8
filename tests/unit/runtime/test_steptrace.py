"""Tracing one step on a lane: what is recorded, from when to when, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

from gcproto.wire import FrameType, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import CodecChoice
from gcserver.runtime.steptrace import AskTrace, StepTracer, TracedStep
from gcserver.runtime.tap import Tap

DOMAIN = (b"j" * 16, 16)
OTHER = (b"j" * 16, 17)
NONE = CodecChoice("none", 0, 0, False, False)


class Lane:
    """A lane process as far as a tracer touches it."""

    def __init__(self) -> None:
        self.fed: list[Any] = []
        self.done: list[Any] = []
        self.sent: list[TracedStep] = []
        self.perform = dict.fromkeys(
            (fx.Encode, fx.Accumulate, fx.Finalise, fx.Decode, fx.Send, fx.LogStep), self.done.append
        )

    def feed(self, event: Any) -> None:
        self.fed.append(event)

    def send_up(self, message: TracedStep) -> None:
        self.sent.append(message)


def tracer_of(lane: Lane) -> StepTracer:
    return StepTracer(Tap(lane), 1, lane.send_up)  # type: ignore[arg-type]


def data(step: int, key: int) -> Header:
    return Header(FrameType.DATA, job=DOMAIN[0], domain=DOMAIN[1], step=step, key=key)


def run(lane: Lane, step: int, domain: tuple[bytes, int] = DOMAIN) -> None:
    """A step of one block that is encoded, sent, comes back and is decoded."""
    lane.feed(ev.Pushed(domain, 0, step, (7,), True))
    lane.perform[fx.Encode](fx.Encode(domain, 7, step, NONE, 0, 0, 1, None, 0, 0))
    lane.perform[fx.Send](fx.Send(1, data(step, 7)))
    lane.feed(ev.FrameReceived(data(step, 7)))
    lane.perform[fx.Decode](fx.Decode(domain, 7, step, None, 0, 0, 2, 0, False))
    lane.perform[fx.LogStep](fx.LogStep(domain, step, False, 0, 0))


def test_the_step_after_the_next_end_of_one_is_traced_and_no_other() -> None:
    lane = Lane()
    plain = dict(lane.perform)
    tracer = tracer_of(lane)
    tracer.on_ask(AskTrace(5, DOMAIN))
    for step in (3, 4, 5):
        run(lane, step)
    (traced,) = lane.sent
    assert (traced.request, traced.domain, traced.step) == (5, DOMAIN, 4)
    assert [(j.what, j.resource, j.key) for j in traced.jobs] == [
        ("push", "push", 7), ("encode", "lane 1", 7), ("exchange", "exchange", 7), ("decode", "lane 1", 7),
    ]  # fmt: skip
    assert all(0 <= j.start <= j.end for j in traced.jobs)
    assert traced.jobs[2].start <= traced.jobs[2].end <= traced.jobs[3].start
    # Everything was passed on, and the hooks are gone.
    assert len(lane.fed) == 6 and len(lane.done) == 12
    assert lane.perform == plain and "feed" not in vars(lane)


def test_who_asks_for_what_is_being_traced_gets_that() -> None:
    """Steps that last longer than from one question to the next would never be told otherwise."""
    lane = Lane()
    tracer = tracer_of(lane)
    tracer.on_ask(AskTrace(5, DOMAIN))
    run(lane, 3)
    tracer.on_ask(AskTrace(6, DOMAIN))
    run(lane, 4)
    (traced,) = lane.sent
    assert (traced.request, traced.step) == (6, 4) and traced.zero > 0.0


def test_a_step_that_is_given_up_makes_way_for_the_next() -> None:
    """It never ends here: what is skipped with a lost node is reported by nobody."""
    lane = Lane()
    tracer = tracer_of(lane)
    tracer.on_ask(AskTrace(5, DOMAIN))
    run(lane, 3)
    lane.feed(ev.Pushed(DOMAIN, 0, 4, (7,), True))
    run(lane, 5)
    assert not lane.sent, "what was noted of step 4 is no part of step 5"
    run(lane, 6)
    (traced,) = lane.sent
    assert (traced.step, {j.what for j in traced.jobs}) == (6, {"push", "encode", "exchange", "decode"})


def test_other_domains_leave_no_trace() -> None:
    lane = Lane()
    tracer = tracer_of(lane)
    tracer.on_ask(AskTrace(1, DOMAIN))
    lane.perform[fx.LogStep](fx.LogStep(DOMAIN, 1, False, 0, 0))
    lane.feed(ev.Pushed(OTHER, 0, 2, (9,), True))
    lane.perform[fx.Encode](fx.Encode(OTHER, 9, 2, NONE, 0, 0, 1, None, 0, 0))
    run(lane, 2)
    assert {j.key for j in lane.sent[0].jobs} == {7}


def test_a_domain_that_closes_ends_its_trace() -> None:
    lane = Lane()
    tracer = tracer_of(lane)
    tracer.on_ask(AskTrace(1, DOMAIN))
    tracer.forget(OTHER)
    assert "feed" in vars(lane)
    tracer.forget(DOMAIN)
    assert "feed" not in vars(lane) and not lane.sent
