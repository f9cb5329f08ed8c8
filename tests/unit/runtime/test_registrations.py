"""Workers' connections to the supervisor: what becomes of those that say what nobody can read."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import advice, messages, packed
from gcproto.channel import Channel, connect
from gcproto.messages import Fault, Reattach, Register, WhoAreYou
from gcproto.spans import WorkerSpans
from gcproto.states import AskStanding, Standing
from gcproto.timings import TensorTimes
from gcserver import keys
from gcserver.core import control_events as cx
from gcserver.core import resuming
from gcserver.runtime.registrations import Registrations
from gcserver.runtime.tickets import Tickets
from tests.unit.core.control_machine import formed
from tests.unit.key_pairs import fixed_pair

_decode = packed.Decoder[messages.ToWorker](messages.ToWorker)


class Supervisor:
    """As much of one as registrations use: readers are called when the test says so."""

    def __init__(self, path: Path) -> None:
        self.config = SimpleNamespace(node=SimpleNamespace(name="a", socket=path))
        self.machine = SimpleNamespace(connections={}, jobs={})
        self.loop = SimpleNamespace(
            add_reader=lambda fd, call, *args: self.readers.__setitem__(fd, (call, args)),
            remove_reader=lambda fd: self.readers.pop(fd, None),
            remove_writer=lambda fd: None,
        )
        self.readers: dict[int, Any] = {}
        self.registrations: Registrations
        self.fed: list[Any] = []
        self.measured: list[Any] = []
        self.profiler = SimpleNamespace(on_tensor_times=lambda *said: self.measured.append(said))
        self.recorded: list[Any] = []
        self.up: list[Any] = []
        self.traces = SimpleNamespace(
            on_worker=lambda *said: self.recorded.append(said), worker_up=lambda *who: self.up.append(who)
        )
        self.asked: list[Any] = []
        self.advising = SimpleNamespace(asked=lambda *said: self.asked.append(said))
        self.warnings: list[str] = []
        self.tickets = Tickets(path.parent)
        self.keys: Any = None
        self.counted: list[str] = []
        self.lanes = SimpleNamespace(sockets=lambda: ["lane0"])

    def count(self, name: str) -> None:
        self.counted.append(name)

    def feed(self, event: Any) -> None:
        self.fed.append(event)

    def warn_once(self, text: str) -> None:
        self.warnings.append(text)

    def turn(self) -> None:
        for call, args in list(self.readers.values()):
            call(*args)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    fake = Supervisor(tmp_path / "daemon.sock")
    registrations = fake.registrations = Registrations(fake)  # type: ignore[arg-type]
    registrations.start()
    yield fake
    registrations.close()


def _connected(supervisor: Supervisor) -> tuple[Channel[messages.ToWorker], socket.socket]:
    """(a worker's channel, its bare socket)"""
    channel = connect(str(supervisor.config.node.socket), _decode)
    supervisor.turn()
    return channel, channel._sock


@contextmanager
def _no_number_below(top: int) -> Iterator[None]:
    """While no descriptor below ``top`` is free but those that are closed meanwhile."""
    gc.collect()  # what earlier tests left would be closed at any time
    with ExitStack() as plugs:
        while (number := os.open(os.devnull, os.O_RDONLY)) < top:
            plugs.callback(os.close, number)
        os.close(number)
        yield


@pytest.mark.parametrize(("joined", "kind"), [(False, "JoinRefused"), (True, "NotRegistered")])
def test_what_cannot_be_read_is_answered_before_the_connection_is_closed(
    supervisor: Supervisor, joined: bool, kind: str
) -> None:
    worker, _ = _connected(supervisor)
    ours = max(supervisor.readers)
    if joined:
        supervisor.machine.connections[ours] = (b"j" * 16, 0)
    worker.send(WhoAreYou())
    supervisor.turn()
    worker.send(Register("job", 0.5, 1, 0, 1, 7))  # type: ignore[arg-type]
    supervisor.turn()
    ((fault, _),) = worker.receive()
    assert isinstance(fault, Fault) and fault.kind == kind and "$.rank" in fault.message and "version" in fault.advice
    assert supervisor.warnings and "Expected `int`" in supervisor.warnings[0]
    assert supervisor.fed == [cx.WorkerSaid(ours, WhoAreYou()), cx.WorkerGone(ours)]
    assert ours not in supervisor.readers
    worker.close()


def test_what_a_worker_recorded_goes_to_the_trace(supervisor: Supervisor) -> None:
    worker, _ = _connected(supervisor)
    spans = WorkerSpans(5, 0, (), b"")
    worker.send(spans)
    supervisor.turn()
    assert supervisor.recorded == [(max(supervisor.readers), spans)] and not supervisor.fed
    worker.close()


def test_what_a_worker_measured_goes_to_the_profiler(supervisor: Supervisor) -> None:
    worker, _ = _connected(supervisor)
    ours = max(supervisor.readers)
    times = TensorTimes(0, 4, (0, 20))
    worker.send(times)
    supervisor.turn()
    supervisor.machine.connections[ours] = (b"j" * 16, 1)
    worker.send(times)
    supervisor.turn()
    assert supervisor.measured == [(None, times), ((b"j" * 16, 1), times)] and not supervisor.fed
    worker.close()


def test_a_question_for_advice_is_answered_to_whoever_asked(supervisor: Supervisor) -> None:
    worker, _ = _connected(supervisor)
    ours = max(supervisor.readers)
    supervisor.machine.connections[ours] = (b"j" * 16, 1)
    worker.send(advice.AskAdvice(4))
    supervisor.turn()
    ((asker, question, tell),) = supervisor.asked
    assert (asker, question) == ((b"j" * 16, 1), advice.AskAdvice(4)) and not supervisor.fed
    tell(advice.Advised(4, "don't"))
    ((answer, _),) = worker.receive()
    assert answer == advice.Advised(4, "don't")
    with _no_number_below(ours):
        worker.close()
        supervisor.turn()
        other, sock = _connected(supervisor)
    assert max(supervisor.readers) == ours, "the number is another connection's now"
    tell(advice.Advised(4, "too late"))
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    other.close()


def test_the_same_complaint_is_the_same_text(supervisor: Supervisor) -> None:
    """So that it is logged once, however often such workers come back."""
    for _ in range(3):
        worker, sock = _connected(supervisor)
        sock.sendall(b"\x03\0\0\0abc")
        supervisor.turn()
        worker.close()
    assert len(supervisor.warnings) == 3 and len(set(supervisor.warnings)) == 1


def test_a_worker_comes_back_with_its_ticket_only(supervisor: Supervisor) -> None:
    """The number of a job and a rank, which operators see, are not enough."""
    job, mine = b"j" * 16, messages.Registered(b"j" * 16, 1, "a", (), (), 4096, 30.0)
    worker, _ = _connected(supervisor)
    ours = max(supervisor.readers)
    supervisor.machine.connections[ours] = (job, 1)
    supervisor.registrations.tell(cx.Tell(ours, mine))
    ((told, _),) = worker.receive()
    assert isinstance(told, messages.Registered) and told.lane_sockets == ("lane0",) and len(told.ticket) == 32
    assert supervisor.up == [(ours, job)], "a trace that is under way is to have it too"
    worker.close()
    supervisor.turn()
    supervisor.fed.clear()
    for wrong in (
        Reattach(job, 1, 7), Reattach(job, 0, 7, told.ticket), Reattach(b"k" * 16, 1, 7, told.ticket),
        Reattach(job, 1, 7, told.ticket[:-1]),
    ):  # fmt: skip
        worker, _ = _connected(supervisor)
        worker.send_all([wrong, WhoAreYou()])
        supervisor.turn()
        ((fault, _),) = worker.receive()
        assert isinstance(fault, Fault) and (fault.kind, fault.job) == ("NotAuthorised", wrong.job)
        assert f"rank {wrong.rank} " in fault.message and "init()" in fault.advice
        assert [type(e) for e in supervisor.fed] == [cx.WorkerGone], "nothing it says is heard, nor what follows"
        supervisor.fed.clear()
        worker.close()
    assert supervisor.counted == ["workers_refused"] * 4
    worker, _ = _connected(supervisor)
    back = Reattach(job, 1, 7, told.ticket)
    worker.send(back)
    supervisor.turn()
    assert supervisor.fed == [cx.WorkerSaid(max(supervisor.readers), back)]
    worker.close()


def test_a_worker_of_another_user_is_told_so(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "peer_uid", lambda self: os.getuid() + 1)
    worker, _ = _connected(supervisor)
    ((fault, _),) = worker.receive()
    assert isinstance(fault, Fault) and fault.kind == "NotAuthorised"
    assert f"this one is of uid {os.getuid() + 1}" in fault.message and "GC_NODE_SOCKET" in fault.advice
    assert len(supervisor.warnings) == 1 and supervisor.fed == [] and len(supervisor.readers) == 1
    worker.close()


A, B, C = (fixed_pair(name) for name in "abc")


def ring(own: keys.KeyPair, *admitted: keys.KeyPair) -> Any:
    known = {pair.name: pair.public for pair in admitted}
    return SimpleNamespace(pair=own, admitted=known, introduce=lambda published: None, derived=False)


@pytest.mark.parametrize(
    ("ours", "published", "why"),
    [
        (ring(A, B), (("b", C.public.decode()),), "b has another key"),
        (ring(A, B), (("b", B.public.decode()), ("c", C.public.decode())), "c is not in"),
        (ring(A, B), (("b", ""),), "b runs without keys"),
        (None, (("b", B.public.decode()),), "b runs with keys, and this node without"),
    ],
)
def test_a_job_with_a_node_whose_key_is_not_admitted_is_refused(
    supervisor: Supervisor, ours: Any, published: tuple[tuple[str, str], ...], why: str
) -> None:
    supervisor.keys = ours
    worker, _ = _connected(supervisor)
    worker.send(Register("job", 0, 2, 0, 1, 7, keys=published))
    supervisor.turn()
    ((fault, _),) = worker.receive()
    assert isinstance(fault, Fault) and fault.kind == "NotAuthorised"
    assert why in fault.message and "security.peers" in fault.advice
    assert supervisor.counted == ["keys_refused"] and not supervisor.fed
    worker.close()


@pytest.mark.parametrize(
    ("ours", "published"), [(ring(A, B), (("b", B.public.decode()),)), (ring(A), ()), (None, (("b", ""),)), (None, ())]
)
def test_admitted_keys_and_none_at_all_are_fine(
    supervisor: Supervisor, ours: Any, published: tuple[tuple[str, str], ...]
) -> None:
    supervisor.keys = ours
    worker, _ = _connected(supervisor)
    worker.send(Register("job", 0, 2, 0, 1, 7, keys=published))
    supervisor.turn()
    assert len(supervisor.fed) == 1 and not supervisor.counted
    worker.close()


@pytest.mark.parametrize(("ours", "key"), [(None, ""), (ring(A), A.public.decode())])
def test_a_daemon_says_its_public_key(supervisor: Supervisor, ours: Any, key: str) -> None:
    supervisor.keys = ours
    worker, _ = _connected(supervisor)
    registrations = Registrations.__new__(Registrations)
    registrations._s, registrations.channels = supervisor, {5: worker}  # type: ignore[assignment, dict-item]
    said: list[Any] = []
    registrations._send = lambda _, message: said.append(message)  # type: ignore[method-assign]
    registrations.tell(cx.Tell(5, messages.IAm("a", "tcp://a:1", 1)))
    assert said == [messages.IAm("a", "tcp://a:1", 1, key)]
    worker.close()


def test_how_far_a_domain_is_is_told_of_the_workers_own_job_only(supervisor: Supervisor) -> None:
    m = formed()
    (job,) = m.jobs.values()
    channel, _ = _connected(supervisor)
    supervisor.machine.jobs = m.jobs

    def asked(domain: int) -> Any:
        channel.send(AskStanding(domain))
        supervisor.turn()
        ((answer, _),) = channel.receive()
        return answer

    assert asked(0) == Standing(0), "it is in no job"
    (descriptor,) = supervisor.registrations.channels
    supervisor.machine.connections[descriptor] = (job.id, 0)
    assert asked(0) == Standing(0, 0, resuming.standing(job, job.domains[0]))
    assert asked(9) == Standing(9)
    supervisor.machine.connections[descriptor] = (b"another job", 0)
    assert asked(0) == Standing(0)
    channel.close()
