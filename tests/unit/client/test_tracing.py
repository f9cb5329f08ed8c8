"""What a worker records while its daemon wants it: real calls and training against a fake daemon.

What may live here: tests of `gcclient/tracing.py` and where it is called. What may not: which steps count
(`tests/unit/test_spans.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import device
from gcclient.api import current
from gcclient.collectives import Collectives
from gcproto.messages import Reattach
from gcproto.spans import WORKER_RECORDS, EndTrace, Kind, Span, TraceOrder, WorkerSpans, unpack
from tests.unit.client.fake import FakeDaemon

NUMBER = 77


@pytest.fixture
def alone(joined: FakeDaemon, tmp_path: Path) -> Iterator[FakeDaemon]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield joined
    dist.destroy_process_group()


def order(steps: int = 0) -> None:
    session = current()
    session.on_message(-1, TraceOrder(NUMBER, session.job.job, steps, 60.0), [])


def sent(daemon: FakeDaemon) -> list[WorkerSpans]:
    return [m for m in daemon.heard[-1] if isinstance(m, WorkerSpans)]


def recorded(daemon: FakeDaemon) -> tuple[WorkerSpans, list[Span]]:
    """What the worker says when it is asked."""
    before = len(sent(daemon))
    current().on_message(-1, EndTrace(NUMBER), [])
    daemon.wait(lambda: len(sent(daemon)) > before)
    message = sent(daemon)[-1]
    assert message.number == NUMBER
    return message, list(unpack(message.data))


def ddp() -> Callable[[], object]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 300), nn.Linear(300, 7)), bucket_cap_mb=0.01)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    return lambda: model(torch.ones(3, 30)).sum().backward()


def wrapped(overlap: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Linear(30, 300)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 30)).sum().backward()
        optimizer.step()

    return step


def calls() -> Callable[[], object]:
    return lambda: gcclient.push_pull(torch.ones(1000), "w")


def reductions() -> Callable[[], object]:
    group = Collectives(current(), (0,))
    return lambda: group.start(torch.ones(1000), average=True).finish()


WAYS = {
    "ddp": ddp, "optimizer": lambda: wrapped(False), "overlap": lambda: wrapped(True), "calls": calls,
    "reductions": reductions,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_each_block_is_ready_pushed_and_pulled_in_this_order(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def complete(*result: Any) -> None:
        device_complete(*result)
        time.sleep(0.02)  # the backward pass goes on before the thread that reads does

    device_complete = device.complete
    monkeypatch.setattr(device, "complete", complete)
    step = WAYS[way]()
    step()
    order()
    for _ in range(3):
        step()
    step()  # with overlap, what a step brought is taken in the next one
    message, spans = recorded(alone)
    assert message.dropped == 0 and {(s.place, s.job) for s in spans} == {(0, current().job.job)}
    by_step: dict[tuple[int, int], dict[int, list[Span]]] = {}
    for s in spans:
        by_step.setdefault((s.domain, s.step), {}).setdefault(s.key, []).append(s)
    firsts = {domain: first for _, domain, first in message.firsts}
    whole = sorted(by_step)[: -1 if way == "overlap" else None]
    assert len(whole) >= 3 and all(number >= firsts[domain] >= 2 for domain, number in whole)
    for blocks in (by_step[key] for key in whole):
        for of in blocks.values():
            assert sorted(s.kind for s in of) == [Kind.READY, Kind.PUSH, Kind.PULL]
            ready, push, pull = sorted(of, key=lambda s: s.kind)
            assert ready.begin <= ready.end <= push.begin <= push.end
            assert push.begin <= pull.begin <= pull.end and ready.nbytes == pull.nbytes > 0
        first = sorted((s.begin, s.end) for of in blocks.values() for s in of if s.kind == Kind.READY)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(first)), "one after the other"


def test_nothing_is_recorded_before_it_is_wanted_nor_after(alone: FakeDaemon) -> None:
    step = calls()
    step()
    tracing = current().tracing
    assert not tracing.on and tracing.end() is None
    order(steps=1)
    assert tracing.on
    step()
    _, spans = recorded(alone)
    assert len(spans) == 3 and not tracing.on
    step()
    current().on_message(-1, EndTrace(NUMBER), [])
    assert len(sent(alone)) == 1, "asked again it has nothing more to say"


def test_the_oldest_make_way_in_a_worker_that_is_traced_for_long(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcclient.tracing.WORKER_RECORDS", 6)
    step = calls()
    order()
    for _ in range(4):
        step()
    message, spans = recorded(alone)
    assert (message.dropped, len(spans)) == (6, 6) and WORKER_RECORDS > 6
    assert {s.step for s in spans} == {3, 4}


def test_who_leaves_hands_over_what_it_has(daemon: FakeDaemon) -> None:
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    step = calls()
    order()
    step()
    gcclient.shutdown()
    daemon.wait(lambda: len(sent(daemon)) == 1)
    assert [s.kind for s in unpack(sent(daemon)[0].data)] == [Kind.READY, Kind.PUSH, Kind.PULL]


def test_a_daemon_that_came_back_wants_no_trace(joined: FakeDaemon) -> None:
    step = calls()
    step()
    order()
    joined.crash(2)
    joined.listen(2)
    joined.wait(lambda: any(isinstance(m, Reattach) for m in joined.heard[2]))
    joined.wait(lambda: not current().tracing.on)
    step()
    assert not sent(joined)


def back(daemon: FakeDaemon) -> None:
    """The connection breaks, and the worker is registered again."""
    daemon.hang_up(-1)
    daemon.wait(lambda: not current().tracing.on)


def test_a_connection_that_breaks_costs_nothing_of_the_trace(joined: FakeDaemon) -> None:
    step = calls()
    order()
    step()
    back(joined)
    order()
    step()
    message, spans = recorded(joined)
    assert message.firsts == ((current().job.job, spans[0].domain, 1),), "steps are whole from the first on"
    kinds = [Kind.READY, Kind.PUSH, Kind.PULL]
    assert [(s.step, s.kind) for s in spans] == [(n, kind) for n in (1, 2) for kind in kinds]


def test_a_trace_that_ended_while_the_worker_was_away_is_handed_over_when_it_is_back(joined: FakeDaemon) -> None:
    step = calls()
    order()
    step()
    back(joined)
    step()
    _, spans = recorded(joined)
    assert {s.step for s in spans} == {1}


def test_another_trace_after_a_broken_connection_begins_anew(joined: FakeDaemon) -> None:
    step = calls()
    order()
    step()
    back(joined)
    session = current()
    session.on_message(-1, TraceOrder(NUMBER + 1, session.job.job, 0, 60.0), [])
    step()
    session.on_message(-1, EndTrace(NUMBER + 1), [])
    joined.wait(lambda: bool(sent(joined)))
    (message,) = sent(joined)
    assert message.number == NUMBER + 1 and {s.step for s in unpack(message.data)} == {2}
