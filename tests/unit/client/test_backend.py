"""The backend `gc` in a world of one that says it is two: what is carried, and how failures come out of torch."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import backend
from gcclient.api import current
from gcclient.collectives import Collectives
from gcclient.places import PLACES
from gcproto.lane_messages import Done
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.wire import Flag
from tests.unit.client.fake import PARTITION, FakeDaemon

NO = torch.ones(2)


@pytest.fixture
def group(torch_world: None, monkeypatch: pytest.MonkeyPatch) -> backend.Group:
    made: Any = dist.new_group(backend="gc")
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    return made


def _domains(daemon: FakeDaemon) -> list[DeclareDomain]:
    return [m for m in daemon.heard[-1] if isinstance(m, DeclareDomain)]


def _flags(daemon: FakeDaemon) -> list[int]:
    return [push.flags for lane in range(daemon.lanes) for push in daemon.pushes(lane) if push.keys]


def test_a_group_is_of_torch_and_of_the_backend(group: backend.Group) -> None:
    assert isinstance(group, dist.ProcessGroup)
    assert dist.get_backend(group) == "gc"
    assert group.ranks == (0,)
    backend.register()
    assert dist.Backend.backend_list.count("gc") == 1


def test_reductions_are_steps_of_a_lossless_domain(joined: FakeDaemon, group: backend.Group) -> None:
    tensor = torch.arange(5.0)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    (domain,) = _domains(joined)
    assert (domain.label, domain.scoped, domain.codec) == (f"group.{group.known_as}.0", False, "none")
    assert _flags(joined) == [0, int(Flag.AVERAGE)]
    assert torch.equal(tensor, torch.arange(5.0))
    assert current().domains[domain.domain].step == 2
    assert gcclient.stats()["bytes_pulled"] == 40


@pytest.mark.parametrize(
    ("tensor", "average", "carried"),
    [
        (NO, False, True),
        (NO.half(), True, True),
        (NO.int(), False, True),
        (NO.int(), True, False),
        (NO.bool(), False, False),
        (NO.to(torch.complex64), False, False),
        (NO.to_sparse(), False, False),
        (NO.to("meta"), False, False),
    ],
)
def test_what_is_carried(tensor: torch.Tensor, average: bool, carried: bool) -> None:
    assert backend._carried(tensor, average) is carried


def test_what_is_not_carried_needs_no_daemon(group: backend.Group) -> None:
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(torch.ones(2, dtype=torch.bool), group=group)
    dist.broadcast(tensor, 0, group=group)
    assert tensor.tolist() == [3.0]
    with pytest.raises(gcclient.NotInitialized, match=r"gcclient.init\(\)"):
        dist.all_reduce(tensor, group=group)


def test_who_calls_gloo_does_not_keep_its_worker_from_being_done(tmp_path: Path) -> None:
    """Its worker lets a work go with its queue locked, and needs the GIL to let go of the tensors."""
    calls = [sys.executable, "-m", "tests.unit.client.gloo_calls", str(tmp_path / "store"), "1000"]
    done = subprocess.run(calls, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "returned\n"


def test_results_are_written_where_elements_do_not_lie_in_a_row(joined: FakeDaemon, group: backend.Group) -> None:
    whole = torch.arange(12.0).view(3, 4)
    for _ in range(PLACES):  # to be declared before nobody answers
        dist.all_reduce(torch.ones(2, 3), group=group)
    with joined.pause():
        work = dist.all_reduce(whole.t()[1:3], group=group, async_op=True)
        assert work is not None
        whole.zero_()
    work.wait()
    assert whole[:, 1:3].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert whole[:, 0].tolist() == [0.0] * 3


def test_what_gloo_fails_of_a_copy_is_raised_and_the_tensor_is_left_alone(
    group: backend.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []

    def allreduce(self: object, tensors: list[torch.Tensor], *options: Any) -> dist.Work:
        given.extend(t.zero_() for t in tensors)
        return backend.Failed(RuntimeError("a peer is gone"))

    monkeypatch.setattr(dist.ProcessGroup, "allreduce", allreduce)
    tensor = torch.ones(3, 4)[:, ::2]
    work = group.allreduce([tensor], dist.ReduceOp.MAX)
    assert given[0].shape == (6,) and given[0].is_contiguous() and tensor.eq(1).all()
    assert work.is_completed() and not work.is_success()
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            wait()


def test_a_failure_is_raised_where_it_is_waited_for(joined: FakeDaemon, group: backend.Group) -> None:
    joined.silent = True
    under_way = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert under_way is not None and not under_way.is_completed()
    current().fail(gcclient.PeerLost("node b is gone"))
    assert under_way.is_completed() and not under_way.is_success()
    later = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert later is not None
    for work in (under_way, later):
        with pytest.raises(gcclient.PeerLost, match="node b"):
            work.wait()
        with pytest.raises(RuntimeError, match="node b"):
            work.get_future().wait()
    assert later.is_completed() and not later.is_success()


def test_gloo_is_asked_for_sums_alone(group: backend.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of averages it knows nothing before some release of torch, not even in a group of one."""
    monkeypatch.setattr(backend.Group, "size", lambda self: 1)
    asked: list[Any] = []
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda self, tensors, *options: asked.append(options))
    group.allreduce([torch.ones(2)], dist.ReduceOp.AVG)
    group.allreduce([torch.ones(2)], dist.ReduceOp.MAX)
    assert asked == [(), (dist.ReduceOp.MAX,)]


def test_whatever_keeps_a_reduction_from_beginning_is_raised_where_it_is_waited_for(
    joined: FakeDaemon, group: backend.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's reducer does not outlive an exception where it begins one."""
    dist.all_reduce(torch.ones(3), group=group)
    gcclient.shutdown()
    without = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    gcclient.init(0, 1, socket=joined.socket, job="again")

    def start(*given: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(Collectives, "start", start)
    beyond = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert without is not None and beyond is not None
    with pytest.raises(gcclient.NotInitialized):
        without.wait()
    with pytest.raises(OSError, match="no more memory"):
        beyond.wait()


def test_backward_says_why_it_failed(joined: FakeDaemon, group: backend.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as alone:
        alone.setattr(backend.Group, "size", lambda self: 1)
        model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    model(torch.ones(1, 3)).sum().backward()
    assert gcclient.stats()["calls"] == 1
    current().fail(gcclient.PeerLost("node b is gone"))
    with pytest.raises(RuntimeError, match="node b is gone"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_step_that_was_given_up_is_raised(joined: FakeDaemon, group: backend.Group) -> None:
    joined.skipping = True
    with pytest.raises(gcclient.StepSkipped, match="given up"):
        dist.all_reduce(torch.ones(3), group=group)
    joined.skipping = False
    assert gcclient.stats()["skipped_steps"] == 1
    for _ in range(PLACES):  # its place is used again
        dist.all_reduce(torch.ones(3), group=group)


def test_what_was_given_up_does_not_stop_what_comes_next(joined: FakeDaemon) -> None:
    collectives = Collectives(current(), (0,))
    domain = collectives.domain("fsdp", "")
    joined.skipping = True
    given_up = collectives.start(torch.ones(4), True, domain, "layer")
    joined.wait(lambda: given_up.over)
    joined.skipping = False
    collectives.start(torch.ones(4), True, domain, "layer").finish()
    with pytest.raises(gcclient.StepSkipped, match="reduce again"):
        given_up.finish()


def test_a_result_that_does_not_fit_any_more_is_raised_and_frees_its_place(
    joined: FakeDaemon, group: backend.Group
) -> None:
    for _ in range(PLACES):  # to be declared before nobody answers
        dist.all_reduce(torch.ones(3), group=group)
    tensor = torch.ones(3)
    with joined.pause():
        work = dist.all_reduce(tensor, group=group, async_op=True)
        tensor.untyped_storage().resize_(0)
    assert work is not None
    with pytest.raises(ValueError, match="was resized to 0"):
        work.wait()
    for _ in range(PLACES):
        dist.all_reduce(torch.ones(3), group=group)


def test_what_was_given_up_is_over_when_every_lane_has_said_so(joined: FakeDaemon) -> None:
    """Until then a lane may use the places, and nothing else may be pushed from there."""
    joined.silent = True
    given_up = Collectives(current(), (0,)).start(torch.ones(2 * PARTITION // 4), False)
    joined.wait(lambda: all(any(p.keys for p in joined.pushes(lane)) for lane in (0, 1)))
    for lane in (0, 1):
        assert not given_up.over
        (push,) = (p for p in joined.pushes(lane) if p.keys)
        joined.say(lane, Done(push.domain, push.step, push.keys, skipped=True))
        blocks = [p for p in given_up.tensor.places if p.block.lane == lane]
        joined.wait(lambda blocks=blocks: all(p.op is None for p in blocks))  # type: ignore[misc]
    joined.wait(lambda: given_up.over)
    with pytest.raises(gcclient.StepSkipped):
        given_up.finish()
    assert gcclient.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("shape", [(0,), (4,), (3, 100_000)])
def test_what_is_over_keeps_no_memory(joined: FakeDaemon, group: backend.Group, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    kept = weakref.ref(tensor.untyped_storage())
    dist.all_reduce(tensor, group=group)
    del tensor
    gc.collect()
    # The thread that finished the collective may be about to let go of it.
    joined.wait(lambda: kept() is None)


def test_torchs_world_has_to_be_the_jobs(
    joined: FakeDaemon, group: backend.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    with pytest.raises(gcclient.JoinRefused, match="spans 4 ranks and the job 1"):
        dist.all_reduce(torch.ones(3), group=group)


def test_a_new_session_declares_anew(joined: FakeDaemon, group: backend.Group) -> None:
    dist.all_reduce(torch.ones(3), group=group)
    gcclient.shutdown()
    gcclient.init(0, 1, socket=joined.socket, job="again")
    dist.all_reduce(torch.ones(3), group=group)
    assert [d.label for d in _domains(joined)] == [f"group.{group.known_as}.0"] * 2


def test_groups_of_the_same_ranks_are_told_apart_by_torchs_names(joined: FakeDaemon, group: backend.Group) -> None:
    """Ranks may use them in different orders first: what is whose must not depend on it."""
    other: Any = dist.new_group(backend="gc")
    for each in (other, group, other):
        dist.all_reduce(torch.ones(3), group=each)
    assert group.known_as != other.known_as
    assert [d.label for d in _domains(joined)] == [f"group.{each.known_as}.0" for each in (other, group)]


def test_a_name_that_torch_gives_again_is_of_another_group(joined: FakeDaemon, group: backend.Group) -> None:
    dist.all_reduce(torch.ones(3), group=group)
    again: Any = dist.new_group(backend="gc")
    again.known_as = group.known_as
    dist.all_reduce(torch.ones(3), group=again)
    assert [d.label for d in _domains(joined)] == [f"group.{group.known_as}.{n}" for n in (0, 1)]


def test_disabled_it_is_gloo(group: backend.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_DISABLE", "1")
    gcclient.init(0, 1, job="unit")
    try:
        tensor = torch.full((2,), 6.0)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        assert tensor.tolist() == [3.0, 3.0], "gloo has one rank, and is told two"
        assert gcclient.stats()["calls"] == 0
    finally:
        gcclient.shutdown()


def test_named_tensors_are_the_same_from_call_to_call(joined: FakeDaemon) -> None:
    collectives = Collectives(current(), (0,))
    domain = collectives.domain("fsdp", "fp16")
    for _ in range(3):
        collectives.start(torch.ones(4), True, domain, "layer").finish()
    with pytest.raises(ValueError, match=r"'layer' shape \[5\].* was 'layer' shape \[4\]"):
        collectives.start(torch.ones(5), True, domain, "layer")
    (declared,) = _domains(joined)
    assert (declared.label, declared.codec) == ("fsdp.0", "fp16")
    assert sum(isinstance(m, DeclareSection) for m in joined.heard[-1]) == 1
