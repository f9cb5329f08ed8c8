"""Workers' connections to a lane: what nobody can read, and whose arenas a worker may name."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import lane_messages, packed
from gcproto.channel import MAX_DESCRIPTORS, Channel, ChannelClosed
from gcproto.lane_messages import MAX_KEYS, Attach, Mapped, MapSection, Push
from gcproto.messages import Fault
from gcproto.states import PIECE, AskStates, BlockStates, GiveStates
from gcserver.core import events as ev
from gcserver.runtime import laneworkers
from gcserver.runtime.checkpoints import Unfit
from gcserver.runtime.laneworkers import LaneWorkers, Worker
from gcserver.runtime.statefiles import map_file
from gcserver.runtime.tickets import Tickets

_decode_lane = packed.Decoder[lane_messages.FromLaneWorker](lane_messages.FromLaneWorker)
_decode_worker = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)
OURS, THEIRS = b"o" * 16, b"t" * 16


def descriptors(of: str) -> int:
    """How many this process has open of files whose path has this in it, without what earlier tests left to be
    collected; of others their threads may close some at any time."""
    gc.collect()
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += of in os.readlink(f"/proc/self/fd/{number}")
    return found


class Lane:
    """As much of a lane process as its workers' connections use: two jobs of one rank each, with an arena each."""

    def __init__(self, folder: Path) -> None:
        self.tickets = Tickets(folder)
        self.said: list[str] = []
        self.counted: list[str] = []
        self.fed: list[Any] = []
        self.domains: dict[tuple[bytes, int], Any] = {}
        for job, fill in ((OURS, b"ours"), (THEIRS, b"them")):
            chunk = map_file(folder / f"{job[:1].decode()}.chunk", 4096)
            chunk.view[:4] = fill
            self.domains[job, 0] = SimpleNamespace(opened=1, chunks=[chunk], config=SimpleNamespace(ranks=(0,)))
        process: Any = SimpleNamespace(
            poller=select.epoll(), trouble_once=self.said.append, feed=self.fed.append,
            counters=SimpleNamespace(count=lambda name, peer: self.counted.append(name)),
            executor=SimpleNamespace(domains=self.domains), machine=SimpleNamespace(ended=set()),
            reports=SimpleNamespace(began={}),
        )  # fmt: skip
        self.process = process
        self.workers = LaneWorkers(process, socket.socket(), self.tickets)
        self.channels: list[Channel[Any]] = []

    def connected(self) -> tuple[Channel[Any], Worker]:
        here, there = socket.socketpair()
        theirs, worker = Channel(there, _decode_worker), Worker(Channel(here, _decode_lane, 0))
        self.workers.connections[here.fileno()] = worker
        self.process.poller.register(here.fileno(), select.EPOLLIN)
        self.channels.append(theirs)
        return theirs, worker

    def attached(self, job: bytes = OURS) -> tuple[Channel[Any], Worker]:
        theirs, worker = self.connected()
        theirs.send(Attach(job, 0, self.tickets.ticket(job, 0)))
        self.workers.serve(worker, select.EPOLLIN)
        return theirs, worker

    def told(self, theirs: Channel[Any], worker: Worker, *messages: Any) -> Fault:
        """What the worker is told before it is sent away."""
        theirs.send_all(messages)
        self.workers.serve(worker, select.EPOLLIN)
        assert worker not in self.workers.connections.values()
        ((fault, descriptors),) = theirs.receive()
        assert isinstance(fault, Fault) and descriptors == []
        with pytest.raises(ChannelClosed):
            theirs.receive()
        return fault


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path)
    yield made
    for channel in made.channels:
        channel.close()
    for worker in list(made.workers.connections.values()):
        worker.channel.close()
    made.workers.listener.close()
    made.process.poller.close()


def held(descriptor: int) -> bytes:
    found = os.pread(descriptor, 4, 0)
    os.close(descriptor)
    return found


def test_what_cannot_be_read_is_answered_before_the_connection_is_closed(lane: Lane) -> None:
    theirs, worker = lane.connected()
    fault = lane.told(theirs, worker, Attach(b"j" * 16, "first"))  # type: ignore[arg-type]
    assert fault.kind == "NotRegistered" and "$.rank" in fault.message
    assert len(lane.said) == 1 and "$.rank" in lane.said[0]


def test_each_worker_is_handed_the_arena_of_its_own_job(lane: Lane) -> None:
    """The same message on both connections: which job is meant is the connection's, not the message's."""
    for job, fill in ((OURS, b"ours"), (THEIRS, b"them"), (OURS, b"ours")):
        theirs, worker = lane.attached(job)
        theirs.send(MapSection(0, 0, 0))
        lane.workers.serve(worker, select.EPOLLIN)
        ((mapped, descriptors),) = theirs.receive()
        assert mapped == Mapped(0, 0, 0, (4096,)) and [held(d) for d in descriptors] == [fill]
        theirs.close()
        lane.workers.serve(worker, select.EPOLLIN)


@pytest.mark.parametrize("then", [MapSection(0, 0, 0), Push(0, 1, (0,), True)])
def test_a_job_that_one_has_no_ticket_of_cannot_be_named(lane: Lane, then: Any) -> None:
    ours = lane.tickets.ticket(OURS, 0)
    for attach in (
        Attach(THEIRS, 0), Attach(THEIRS, 0, ours), Attach(OURS, 1, ours),
        Attach(THEIRS, -1, lane.tickets.ticket(THEIRS, -1)),
    ):  # fmt: skip
        theirs, worker = lane.connected()
        fault = lane.told(theirs, worker, attach, then)
        assert (fault.kind, fault.job) == ("NotAuthorised", attach.job) and f"rank {attach.rank} " in fault.message
        assert lane.fed == [] and lane.workers.ranks == {}
    assert lane.counted == ["workers_refused"] * 4


def test_a_connection_is_of_one_job(lane: Lane) -> None:
    """A worker of ours that would name another job's arena by attaching again, were it to have that ticket even."""
    theirs, worker = lane.attached()
    fault = lane.told(theirs, worker, Attach(THEIRS, 0, lane.tickets.ticket(THEIRS, 0)), MapSection(0, 0, 0))
    assert fault.kind == "NotRegistered" and "attached a second time" in fault.message


@pytest.mark.parametrize("first", [MapSection(0, 0, 0), Push(0, 1, (0,), True)])
def test_nothing_is_done_for_who_has_not_attached(lane: Lane, first: Any) -> None:
    theirs, worker = lane.connected()
    assert "first message was no Attach" in lane.told(theirs, worker, first).message
    assert lane.fed == [] and lane.workers.waiting_maps == [] and lane.workers.waiting_pushes == []


def test_the_descriptors_of_who_is_sent_away_are_closed(lane: Lane) -> None:
    theirs, worker = lane.connected()
    before = descriptors("/dev/null")
    with open("/dev/null") as null:
        theirs.send(Attach(THEIRS, 0), [null.fileno()] * 5)
        theirs.send(MapSection(0, 0, 0), [null.fileno()] * 5)
    lane.workers.serve(worker, select.EPOLLIN)
    assert descriptors("/dev/null") == before and worker not in lane.workers.connections.values()


def test_what_waits_for_a_worker_is_bounded(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laneworkers, "MAX_WAITING", 5)
    theirs, worker = lane.attached()
    pushes = [Push(7, step, (0,), True) for step in range(3)]
    maps = [MapSection(7, i, 0) for i in range(2)]
    theirs.send_all([*pushes, *maps])
    lane.workers.serve(worker, select.EPOLLIN)
    assert (len(lane.workers.waiting_pushes), len(lane.workers.waiting_maps), worker.waiting) == (3, 2, 5)
    lane.domains[OURS, 7] = SimpleNamespace(opened=0, config=SimpleNamespace(ranks=(0,)), chunks=[])
    lane.workers.domain_opened()
    assert worker.waiting == 2 and [e.step for e in lane.fed if isinstance(e, ev.Pushed)] == [0, 1, 2]
    lane.workers.section_opened()
    assert worker.waiting == 2, "they wait on"
    fault = lane.told(theirs, worker, *[MapSection(8, i, 0) for i in range(4)])
    assert "more than 5 of its messages wait" in fault.message


def test_who_asks_for_arenas_and_does_not_read_is_sent_away(lane: Lane) -> None:
    """Each answer that is not read keeps a descriptor of the daemon's open."""
    _, worker = lane.attached()
    worker.channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    before = descriptors(".chunk")
    while worker.channel.unsent_descriptors < MAX_DESCRIPTORS:
        lane.workers._map(worker, MapSection(0, 0, 0))
    with pytest.raises(laneworkers.Unwelcome, match="does not read the answers"):
        lane.workers._map(worker, MapSection(0, 0, 0))
    assert worker.channel.unsent_descriptors == MAX_DESCRIPTORS
    assert before < descriptors(".chunk") <= before + MAX_DESCRIPTORS
    # So it is where requests had to wait, for the first of them.
    lane.workers.waiting_maps = [(worker, MapSection(0, 0, 0))] * (MAX_DESCRIPTORS + 2)
    lane.workers.section_opened()
    assert worker not in lane.workers.connections.values() and descriptors(".chunk") == before
    assert lane.counted == ["workers_refused"]


def test_who_is_gone_is_handed_nothing(lane: Lane) -> None:
    """Descriptors for a closed connection would be closed by nobody."""
    _, worker = lane.attached()
    lane.workers.waiting_maps = [(worker, MapSection(0, 0, 0))]
    lane.workers.drop_job(OURS)
    before = descriptors(".chunk")
    lane.workers.section_opened()
    assert descriptors(".chunk") == before and lane.counted == []


@pytest.mark.parametrize(
    "wrong",
    [
        Push(0, 1, (0,) * (MAX_KEYS + 1), True), Push(-1, 1, (0,), True), Push(0, -1, (0,), True),
        Push(0, 1, (-1,), True), MapSection(-1, 0, 0), MapSection(0, -1, 0), MapSection(0, 0, -1),
        AskStates(0, 0, False, -1, 0), AskStates(0, 0, False, 0, 1 << 63),
        GiveStates(0, 0, False, 0, -1, 0, True, b""), GiveStates(0, 0, False, 0, 1, -1, True, b""),
        GiveStates(0, 0, False, 0, 1, 0, True, bytes(4 * PIECE + 1)),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_numbers_out_of_range_are_no_message(lane: Lane, wrong: Any) -> None:
    data = packed.encode(wrong)
    with pytest.raises(packed.MessageError, match="Expected"):
        _decode_lane(data)


def test_states_are_answered_one_at_a_time_and_once_all_else_is_read(lane: Lane) -> None:
    """What a worker asks waits for its step, its answer until the socket takes it: never more than one of either."""
    theirs, worker = lane.attached()
    answer = BlockStates(0, 0, False, 0, 1, 0, True, bytes(4))
    ready: list[bool] = []
    lane.workers._checkpoints.answer = lambda job, rank, q: answer if ready else None  # type: ignore[method-assign]
    theirs.send(AskStates(0, 0, False, 0, 3))
    lane.workers.serve(worker, select.EPOLLIN)
    lane.workers.answer_all()
    assert worker.states is not None and theirs.receive() == []
    ready.append(True)
    worker.channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    while not worker.channel.backlog:
        worker.channel.send(answer)
    lane.workers.answer_all()
    assert worker.states is not None, "something else is on its way"
    received = 0
    while worker.states is not None:
        received += len(theirs.receive())
        lane.workers.serve(worker, select.EPOLLOUT)
    assert received


def test_who_asks_for_states_before_it_has_the_last_answer_is_sent_away(lane: Lane) -> None:
    lane.workers._checkpoints.answer = lambda job, rank, q: None  # type: ignore[method-assign]
    theirs, worker = lane.attached()
    fault = lane.told(theirs, worker, AskStates(0, 0, False, 0, 3), AskStates(0, 0, False, 0, 3))
    assert fault.kind == "NotRegistered" and "before it has the last answer" in fault.message
    assert lane.counted == ["workers_refused"]
    lane.workers.answer_all()


def test_what_is_unfit_to_be_taken_is_told_and_the_connection_closed(lane: Lane) -> None:
    def unfit(job: bytes, rank: int, question: Any) -> Any:
        if not waits:
            raise Unfit(job, "it brings 3 floats")

    waits = [True]
    lane.workers._checkpoints.answer = unfit  # type: ignore[method-assign]
    theirs, worker = lane.attached()
    theirs.send(AskStates(0, 0, False, 0, 3))
    lane.workers.serve(worker, select.EPOLLIN)
    waits.clear()
    lane.workers.section_opened()
    ((fault, _),) = theirs.receive()
    assert isinstance(fault, Fault) and "it brings 3 floats" in fault.message
    assert worker not in lane.workers.connections.values()
