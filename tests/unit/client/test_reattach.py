"""A daemon or lane that goes away and comes back: what is said again, what is not lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import gcclient
from gcclient import domain as domain_module
from gcclient.api import current
from gcproto import lane_messages
from gcproto.lane_messages import Attach, MapSection
from gcproto.messages import DeclareDomain, DeclareSection, Reattach
from gcserver.core import job as job_module
from tests.unit.client.fake import TICKET, FakeDaemon


def test_a_lane_hears_of_unfinished_steps_again_in_order(joined: FakeDaemon) -> None:
    gcclient.push_pull(torch.ones(3), "a")
    joined.silent = joined.deaf = True
    handles = [gcclient.push_pull_async(torch.full((3,), 2.0 + i), n) for i, n in enumerate("a")]
    before = [m for m in joined.heard[0] if isinstance(m, lane_messages.Push)]
    joined.wait(lambda: len(joined.pushes(0)) == 2)
    before = joined.pushes(0)
    joined.crash(0)
    time.sleep(0.05)
    joined.silent = joined.deaf = False
    joined.listen(0)
    assert torch.equal(gcclient.synchronize(handles[0]), torch.full((3,), 2.0))
    assert isinstance(joined.heard[0][0], Attach) and joined.heard[0][0].rank == 0
    assert joined.pushes(0) == before
    assert gcclient.stats()["reconnects"] == 1


def test_a_result_announced_to_nobody_is_found_in_its_header(joined: FakeDaemon) -> None:
    """The lane wrote the output and died before it could ring."""
    joined.silent = True
    handle = gcclient.push_pull_async(torch.arange(3.0), "a")
    joined.wait(lambda: bool(joined.pushes(0)))
    joined.crash(0)
    joined.deaf = True
    joined.listen(0)
    assert torch.equal(gcclient.synchronize(handle), torch.arange(3.0))


def test_doorbells_are_kept_for_as_long_as_a_step_may_be_unsettled(joined: FakeDaemon) -> None:
    assert domain_module.KEEP_CALLS >= job_module.CALL_LAG
    assert domain_module.KEEP_SCOPED >= job_module.SCOPED_LAG
    for _ in range(domain_module.KEEP_CALLS + 50):
        gcclient.push_pull(torch.ones(3), "a")
    for journal in current().domains[0].journal:
        steps = [p.step for p in journal]
        # perhaps one more: the last result may have come after the last pruning
        assert len(steps) in (domain_module.KEEP_CALLS, domain_module.KEEP_CALLS + 1)
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_the_supervisor_hears_of_everything_declared_again(joined: FakeDaemon) -> None:
    gcclient.push_pull(torch.ones(3), "a")
    gcclient.push_pull(torch.ones(3), "b")
    gcclient.push_pull(torch.ones(3))
    declared = [m for m in joined.heard[-1] if isinstance(m, DeclareDomain | DeclareSection)]
    joined.crash(2)
    time.sleep(0.05)
    joined.listen(2)
    joined.wait(lambda: len(joined.heard[2]) >= 1 + len(declared))
    first, *rest = joined.heard[2]
    assert isinstance(first, Reattach) and (first.job, first.rank, first.ticket) == (b"j" * 16, 0, TICKET)
    for lane in (0, 1):
        assert joined.heard[lane][0] == Attach(b"j" * 16, 0, TICKET), "lanes are shown it too"
    by_domain = sorted(rest, key=lambda m: m.domain)
    assert by_domain == sorted(declared, key=lambda m: m.domain)
    gcclient.push_pull(torch.ones(3), "c")


def test_everything_at_once_while_calls_go_on(joined: FakeDaemon) -> None:
    stop = threading.Event()

    def breaker() -> None:
        while not stop.is_set():
            for index in (0, 2, 1):
                joined.crash(index)
                time.sleep(0.01)
                joined.listen(index)
                time.sleep(0.06)

    thread = threading.Thread(target=breaker)
    thread.start()
    try:
        i = 0
        while gcclient.stats()["reconnects"] < 12:
            i += 1
            name = f"t{i % 7}" if i % 10 else f"new{i}"
            value = torch.full((40_000,), float(i))
            assert torch.equal(gcclient.push_pull(value, name), value)
    finally:
        stop.set()
        thread.join()


def test_an_idle_worker_comes_back_by_itself(joined: FakeDaemon) -> None:
    """A daemon gives up workers that stay away: one in a long checkpoint must not."""
    gcclient.push_pull(torch.ones(3), "a")
    joined.crash(2)
    joined.listen(2)
    joined.wait(lambda: any(isinstance(m, Reattach) for m in joined.heard[2]))


def test_an_unanswered_request_for_memory_is_repeated(joined: FakeDaemon) -> None:
    joined.deaf = True
    worker = threading.Thread(target=lambda: gcclient.push_pull(torch.ones(3), "a"))
    worker.start()
    joined.wait(lambda: any(isinstance(m, DeclareDomain) for m in joined.heard[-1]))
    joined.crash(2)
    joined.deaf = False
    joined.answer = lambda m: None if not isinstance(m, MapSection) else lane_messages.Mapped(99, 0, 0, ())
    joined.listen(2)
    joined.wait(lambda: any(isinstance(m, MapSection) for m in joined.heard[0]))
    joined.answer = lambda m: None
    joined.crash(0)
    joined.listen(0)
    worker.join(10)
    assert not worker.is_alive()
    assert [type(m) for m in joined.heard[0][:2]] == [Attach, MapSection]


def test_a_daemon_that_stays_away_is_a_lost_peer(daemon: FakeDaemon) -> None:
    daemon.deadline = 0.3
    gcclient.init(0, 1, socket=daemon.socket)
    daemon.silent = True
    handle = gcclient.push_pull_async(torch.ones(3), "a")
    daemon.crash(0)
    with pytest.raises(gcclient.PeerLost, match="lane 0 of the daemon") as caught:
        gcclient.synchronize(handle)
    assert caught.value.phase == "attach" and caught.value.elapsed >= 0.3
    gcclient.shutdown()
