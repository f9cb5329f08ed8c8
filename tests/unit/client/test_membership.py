"""Jobs that go on without lost nodes, as a worker sees them: who is left, steps that are given up, results that wait.

What may live here: tests of `gcclient/membership.py` and of what follows from a loss on the worker's side. What may
not: who decides it (`tests/system/test_losses.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import gcclient
from gcclient.membership import Membership
from gcproto.lane_messages import Done
from gcproto.messages import EpochChanged, MemberInfo
from tests.unit.client.fake import FakeDaemon


@pytest.fixture
def lossy(daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    daemon.commits, daemon.size = True, 3
    gcclient.init(0, 3, socket=daemon.socket, job="unit", on_loss="skip")
    yield daemon
    gcclient.shutdown()


def member(rank: int) -> MemberInfo:
    return MemberInfo(f"n{rank}", "tcp://x:1", (2 * rank, 2 * rank + 1))


def test_epochs_only_go_forward_and_are_told_once() -> None:
    told: list[tuple[int, tuple[int, ...]]] = []
    m = Membership(callbacks=[lambda epoch, ranks: told.append((epoch, ranks))])
    m.on_epoch(1, (member(0), member(1), member(2)), 0)
    assert told == [], "the job has formed; nobody is lost"
    m.heard(3)
    m.on_epoch(3, (member(0), member(2)), 0)
    m.on_epoch(2, (member(0), member(1)), 0)
    assert told == [(3, (0, 1, 4, 5))] and m.ranks == (0, 1, 4, 5) and m.current
    m.heard(4)
    assert not m.current


def test_who_came_back_is_known_and_who_was_there_all_the_time() -> None:
    m = Membership()
    m.on_epoch(1, (member(0), member(1)), 0)
    assert m.eldest == 0 and m.came(0) == (0, 1, 2, 3)
    m.waiting = True
    m.on_epoch(2, (member(1),), 0)
    assert m.waiting and m.eldest == 2
    m.on_epoch(3, (MemberInfo("n0", "tcp://x:1", (0, 1), 3), member(1)), 1)
    assert not m.waiting and m.came(2) == (0, 1) and m.came(3) == () and m.eldest == 2


def test_a_callback_that_raises_keeps_nobody_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def fails(epoch: int, ranks: tuple[int, ...]) -> None:
        raise ValueError("of the script")

    m = Membership(callbacks=[fails, lambda epoch, ranks: told.append(epoch)])
    m.on_epoch(1, (member(0), member(1)), 0)
    m.on_epoch(2, (member(0),), 0)
    assert told == [2] and "on_change failed" in caplog.text and "of the script" in caplog.text


def test_size_and_rank_count_who_is_left(lossy: FakeDaemon) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    gcclient.on_change(lambda epoch, ranks: seen.append((epoch, ranks)))
    assert (gcclient.rank(), gcclient.size(), gcclient.stats()["epoch"]) == (0, 3, 1)
    lossy.say(-1, EpochChanged(2, (MemberInfo("fake", "tcp://x:1", (0,)), MemberInfo("other2", "tcp://x:1", (2,)))))
    lossy.wait(lambda: bool(seen))
    assert seen == [(2, (0, 2))] and (gcclient.rank(), gcclient.size()) == (0, 2)


def test_a_call_that_is_given_up_raises_and_the_next_one_does_not(lossy: FakeDaemon) -> None:
    lossy.skipping = True
    handle = gcclient.push_pull_async(torch.ones(3), "a")
    for _ in range(2):
        with pytest.raises(gcclient.StepSkipped, match="lost node"):
            gcclient.synchronize(handle)
    inside = torch.full((3,), 7.0)
    with pytest.raises(gcclient.StepSkipped):
        gcclient.push_pull_(inside, "a")
    assert torch.equal(inside, torch.full((3,), 7.0)), "as it was"
    lossy.skipping = False
    assert torch.equal(gcclient.push_pull(torch.ones(3), "a"), torch.ones(3))
    assert gcclient.stats()["skipped_steps"] == 2


def test_what_was_given_up_and_never_asked_for_does_not_keep_its_name_from_being_pushed(lossy: FakeDaemon) -> None:
    """Other ranks may have asked, and push."""
    lossy.skipping = True
    handle = gcclient.push_pull_async(torch.ones(3), "a")
    lossy.wait(lambda: handle.arrived)
    lossy.skipping = False
    assert torch.equal(gcclient.push_pull(torch.full((3,), 2.0), "a"), torch.full((3,), 2.0))
    with pytest.raises(gcclient.StepSkipped, match="push it again"):
        gcclient.synchronize(handle)


def test_an_optimizer_leaves_a_skipped_step_out(lossy: FakeDaemon) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.9))
    values = []
    for skipping in (False, True, False):
        lossy.skipping = skipping
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        values.append(float(weight.detach()[0]))
    assert values[0] == values[1] == -1.0 and values[2] < values[1]
    assert gcclient.stats()["skipped_steps"] == 1


def test_what_a_parameter_lacks_is_brought_before_any_result_comes(lossy: FakeDaemon) -> None:
    """Results come once the step is closed and held by all; with "fail" the first would be waited for."""
    used, unused = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    lossy.silent = True
    used.sum().backward()

    def announce() -> None:
        lossy.wait(lambda: sum(p.close for lane in (0, 1) for p in lossy.pushes(lane)) == 2)
        for lane in (0, 1):
            for p in lossy.pushes(lane):
                lossy.say(lane, Done(p.domain, p.step, p.keys))

    thread = threading.Thread(target=announce)
    thread.start()
    optimizer.step()
    thread.join()
    assert float(used.detach()[0]) == -1.0 and unused.grad is None


def test_a_result_in_the_arena_is_not_taken_before_it_is_announced(lossy: FakeDaemon) -> None:
    lossy.silent = True
    handle = gcclient.push_pull_async(torch.arange(3.0), "a")
    lossy.wait(lambda: bool(lossy.pushes(0)))
    lossy.crash(0)
    lossy.listen(0)
    lossy.wait(lambda: bool(lossy.pushes(0)))
    time.sleep(0.05)
    assert not gcclient.poll(handle), "it may not count"
    push = lossy.pushes(0)[0]
    lossy.say(0, Done(push.domain, push.step, push.keys))
    assert torch.equal(gcclient.synchronize(handle), torch.arange(3.0))


def test_a_broadcast_from_a_lost_root_is_an_error(lossy: FakeDaemon) -> None:
    lossy.say(-1, EpochChanged(2, (MemberInfo("fake", "tcp://x:1", (0,)),)))
    lossy.wait(lambda: gcclient.size() == 1)
    with pytest.raises(gcclient.PeerLost, match="rank 2, the root"):
        gcclient.broadcast_parameters({"w": torch.ones(2)}, root_rank=2)
