"""Doorbells, and copies that are only queued: none is rung for before it is there, and nobody stands still for that."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import timing
from gcclient.api import current
from gcclient.bell import Bell, all_of
from gcclient.domain import RING_BYTES
from tests.late_copies import Stream, late_copies
from tests.unit.client.fake import FakeDaemon


class Owner:
    """Whom a bell belongs to."""

    def __init__(self) -> None:
        self.bell = Bell(self.failed)
        self.errors: list[str] = []

    def failed(self, error: Exception) -> None:
        self.errors.append(str(error))


def test_what_is_there_is_rung_for_at_once_in_the_callers_thread() -> None:
    heard: list[str] = []
    Owner().bell.ring(None, lambda: heard.append(threading.current_thread().name))
    assert heard == [threading.current_thread().name]
    assert "gcclient-bell" not in [thread.name for thread in threading.enumerate()]


def test_nothing_overtakes_what_waits() -> None:
    owner, there, heard = Owner(), threading.Event(), list[int]()
    owner.bell.ring(there.wait, partial(heard.append, 1))
    owner.bell.ring(None, partial(heard.append, 2))
    assert not owner.bell.wait_quiet(0.02) and heard == []
    there.set()
    assert owner.bell.wait_quiet(10) and heard == [1, 2]
    owner.bell.ring(None, partial(heard.append, 3))
    assert heard == [1, 2, 3], "at once again"


def test_what_goes_wrong_is_told_and_the_next_one_rings() -> None:
    def raising() -> None:
        raise OSError("no such device")

    owner, heard = Owner(), list[int]()
    owner.bell.ring(raising, partial(heard.append, 1))
    owner.bell.ring(lambda: None, partial(heard.append, 2))
    assert owner.bell.wait_quiet(10)
    assert (owner.errors, heard) == (["no such device"], [2])


def test_its_thread_ends_with_it() -> None:
    owner = Owner()
    owner.bell.ring(lambda: None, lambda: None)
    assert owner.bell.wait_quiet(10)
    del owner
    gc.collect()
    until = time.monotonic() + 10
    while "gcclient-bell" in [thread.name for thread in threading.enumerate()] and time.monotonic() < until:
        time.sleep(0.005)
    assert "gcclient-bell" not in [thread.name for thread in threading.enumerate()]


def test_all_of_some_waits() -> None:
    said: list[int] = []
    assert all_of([None, None]) is None
    for count in (1, 3):
        said.clear()
        wait = all_of([None, *(partial(said.append, i) for i in range(count))])
        assert wait is not None
        wait()
        assert said == list(range(count))


# ------------------------------------------------------------------------------------ pushing
@pytest.fixture
def late() -> Iterator[Stream]:
    with late_copies() as stream:
        yield stream
        stream.going.set()


def test_a_large_tensor_is_rung_for_in_parts_none_of_which_is_early(joined: FakeDaemon, late: Stream) -> None:
    """The fake daemon copies inputs to outputs when it hears of them."""
    tensor = torch.randn(3 * 2 * RING_BYTES // 4)
    for _ in range(3):
        tensor += 1
        assert torch.equal(gcclient.push_pull(tensor, "large"), tensor)
    assert late.copies and len([push for push in joined.pushes(0) if push.step == 1]) > 1


def test_who_pushes_does_not_wait_for_copies(joined: FakeDaemon, late: Stream) -> None:
    gcclient.push_pull(torch.ones(1000), "declared")
    tensor = torch.arange(1000.0)
    late.going.clear()
    handle = gcclient.push_pull_async(tensor, "declared")
    later = gcclient.push_pull_async(torch.ones(1000, dtype=torch.int64), average=False)
    assert not any(push.step == 2 and push.keys for lane in (0, 1) for push in joined.pushes(lane))
    late.going.set()
    assert torch.equal(gcclient.synchronize(handle), tensor)
    assert torch.equal(gcclient.synchronize(later), torch.ones(1000, dtype=torch.int64))


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(700, 900), nn.Tanh(), nn.Linear(900, 700), nn.Linear(700, 5))


def _train(net: nn.Module, step: Any, rounds: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(4)
    for _ in range(rounds):
        net.zero_grad()
        net(torch.randn(8, 700)).square().mean().backward()
        step()
    return [p.detach().clone() for p in net.parameters()]


def test_ddp_and_the_optimizer_train_as_they_do_alone(alone: FakeDaemon, late: Stream) -> None:
    def sgd(net: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    net = _model()
    wanted = _train(net, sgd(net).step)
    net = _model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(gcclient.state(ddp), gcclient.ddp_hook)
    assert all(map(torch.equal, _train(ddp, sgd(net).step), wanted))
    assert late.settled, "a step was measured, in which each gradient's time is to say when it was computed"
    for groups in (None, "layer-wise", 2):
        net = _model()
        wrapped = gcclient.DistributedOptimizer(sgd(net), net.named_parameters(), groups=groups)
        assert all(map(torch.equal, _train(net, wrapped.step), wanted))


def test_a_step_that_is_not_measured_is_not_waited_for(alone: FakeDaemon, late: Stream) -> None:
    net = _model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(gcclient.state(ddp), gcclient.ddp_hook)
    _train(ddp, lambda: None, timing.FIRST - 1)
    assert late.copies and not late.settled
    _train(ddp, lambda: None, 1)
    assert late.settled


def test_a_copy_that_fails_ends_the_job(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch, late: Stream) -> None:
    gcclient.push_pull(torch.ones(1000), "declared")

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("tests.late_copies.LateMemory.queued", lambda self: broken)
    handle = gcclient.push_pull_async(torch.ones(1000), "declared")
    with pytest.raises(gcclient.GradcommError, match="could not be copied from their device: an illegal memory"):
        gcclient.synchronize(handle)


def test_leaving_waits_for_what_is_on_its_way(daemon: FakeDaemon, late: Stream) -> None:
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    gcclient.push_pull(torch.ones(1000), "declared")
    late.going.clear()
    gcclient.push_pull_async(torch.ones(1000), "declared")
    assert current().bell.wait_quiet(0.01) is False
    threading.Timer(0.1, late.going.set).start()
    gcclient.shutdown()
    assert any(push.step == 2 and push.keys for lane in (0, 1) for push in daemon.pushes(lane))
