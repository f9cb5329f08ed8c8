"""push_pull of single tensors: layout, doorbells, handles."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gcclient
from gcclient import windows
from gcclient.api import current, current_calls
from gcclient.call_domains import CALLS, EXACT
from gcclient.places import PLACES, places_for
from gcproto import lane_messages, messages
from gcproto.lane_messages import MapSection
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.wire import Flag
from tests.unit.client.fake import PARTITION, FakeDaemon


def test_named_and_unnamed_tensors_live_in_two_domains(joined: FakeDaemon) -> None:
    gcclient.push_pull(torch.ones(3), "weight")
    gcclient.push_pull(torch.ones(3))
    domains = [m for m in joined.heard[-1] if isinstance(m, DeclareDomain)]
    assert domains == [
        DeclareDomain("calls", CALLS, (0,), False, ""),
        DeclareDomain("exact", EXACT, (0,), False, "none"),
    ]
    sections = [(m.domain, m.section.tensors[0].name) for m in joined.heard[-1] if isinstance(m, DeclareSection)]
    assert sections == [(CALLS, "weight"), (EXACT, "push_pull.noname.0")]


def _unnamed_keys(joined: FakeDaemon) -> list[int]:
    pushes = sorted((p for lane in (0, 1) for p in joined.pushes(lane) if p.keys), key=lambda p: p.step)
    return [key for p in pushes for key in p.keys]


@pytest.mark.parametrize("at_once", [True, False])
def test_unnamed_places_take_turns_whenever_results_are_fetched(joined: FakeDaemon, at_once: bool) -> None:
    """Ranks that poll fetch results at different times, and must still use the same places."""
    handles = []
    for i in range(2 * PLACES + 1):
        handles.append(gcclient.push_pull_async(torch.full((3,), float(i))))
        if at_once:
            gcclient.synchronize(handles[-1])
        else:
            assert [h.over for h in handles] == [j <= i - PLACES for j in range(i + 1)]
    assert [float(gcclient.synchronize(h)[0]) for h in handles] == [float(i) for i in range(2 * PLACES + 1)]
    gcclient.push_pull(torch.ones(3, dtype=torch.float64))
    names = [m.section.tensors[0].name for m in joined.heard[-1] if isinstance(m, DeclareSection)]
    assert names == [f"push_pull.noname.{i}" for i in range(PLACES + 1)]
    joined.wait(lambda: len(_unnamed_keys(joined)) == 2 * PLACES + 2)
    keys = _unnamed_keys(joined)
    assert len(set(keys)) == PLACES + 1 and keys[:PLACES] == keys[PLACES : 2 * PLACES] and keys[0] == keys[2 * PLACES]


def test_large_unnamed_tensors_have_fewer_places(joined: FakeDaemon) -> None:
    assert [places_for(n) for n in (0, 4, 1 << 20, 2 << 20, 4 << 20, 1 << 30)] == [PLACES, PLACES, 8, 4, 2, 2]
    values = [float(i) for i in range(3)]
    handles = [gcclient.push_pull_async(torch.full((1 << 20,), v)) for v in values]
    assert [h.over for h in handles] == [True, False, False]
    assert [set(gcclient.synchronize(h).tolist()) for h in handles] == [{v} for v in values]


def test_both_sides_compute_the_same_layout(joined: FakeDaemon) -> None:
    for elements in (1, 100, 70_000, 0, 1_000_000, 3):
        tensor = torch.randn(elements)
        assert torch.equal(gcclient.push_pull(tensor, f"t{elements}"), tensor)
    ours, theirs = current().domains[CALLS], joined.domains[CALLS]
    assert ours.space.blocks == theirs.space.blocks
    assert [a.plan.chunks for a in ours.arenas] == [p.chunks for p in theirs.plans]
    assert [a.plan.slots for a in ours.arenas] == [p.slots for p in theirs.plans]
    assert [[len(m) for m in a.maps] for a in ours.arenas] == [p.chunks for p in theirs.plans]
    asked = [m for lane in (0, 1) for m in joined.heard[lane] if isinstance(m, MapSection)]
    assert {(m.domain, m.index) for m in asked} == {(CALLS, i) for i in (0, 1, 2, 4, 5)}


def test_every_lane_hears_the_close_once_and_last(joined: FakeDaemon) -> None:
    big = torch.randn(5 * PARTITION // 4)
    gcclient.push_pull(torch.ones(3), "small")
    gcclient.push_pull(big, "big", average=False)
    gcclient.push_pull(torch.zeros(0), "empty")
    joined.wait(lambda: all(sum(p.close for p in joined.pushes(lane)) == 3 for lane in (0, 1)))
    blocks = current().domains[CALLS].space.blocks
    for lane in (0, 1):
        pushes = joined.pushes(lane)
        assert [p.step for p in pushes] == sorted(p.step for p in pushes)
        for step, section in ((1, 0), (2, 1), (3, 2)):
            mine = [p for p in pushes if p.step == step]
            assert [p.close for p in mine] == [False] * (len(mine) - 1) + [True]
            keys = [k for p in mine for k in p.keys]
            assert keys == [b.key for b in reversed(blocks[section]) if b.lane == lane]
            assert all(p.flags == (0 if step == 2 else Flag.AVERAGE) for p in mine)


def test_large_tensors_are_announced_while_they_are_copied(joined: FakeDaemon) -> None:
    gcclient.push_pull(torch.randn(6 << 20), "big")
    assert all(len([p for p in joined.pushes(lane) if p.keys]) >= 8 for lane in (0, 1))


def test_results_arrive_in_place_and_elsewhere(joined: FakeDaemon) -> None:
    base = torch.arange(12.0).view(3, 4)
    new = gcclient.push_pull(base.t(), "t")
    assert new.shape == (4, 3) and torch.equal(new, base.t()) and new.data_ptr() != base.data_ptr()
    assert gcclient.push_pull_(base, "b") is base
    handle = gcclient.push_pull_async_(base, "b")
    assert gcclient.synchronize(handle).data_ptr() == base.data_ptr()
    assert gcclient.synchronize(handle).data_ptr() == base.data_ptr()


def test_a_second_push_of_a_name_fetches_the_first_result(joined: FakeDaemon) -> None:
    first = gcclient.push_pull_async(torch.tensor([1.0]), "t")
    second = gcclient.push_pull_async(torch.tensor([2.0]), "t")
    assert first.over and not second.over
    assert [float(gcclient.synchronize(h)) for h in (second, first)] == [2.0, 1.0]


def test_poll_does_not_wait(joined: FakeDaemon) -> None:
    joined.silent = True
    handle = gcclient.push_pull_async(torch.ones(3), "t")
    joined.wait(lambda: bool(joined.pushes(0)))
    assert not gcclient.poll(handle)
    key = joined.pushes(0)[0].keys
    joined.say(0, lane_messages.Done(CALLS, 1, key))
    joined.wait(lambda: gcclient.poll(handle))
    assert torch.equal(gcclient.synchronize(handle), torch.ones(3))


def test_outdated_and_unknown_announcements_are_ignored(joined: FakeDaemon) -> None:
    gcclient.push_pull(torch.ones(3), "t")
    joined.silent = True
    handle = gcclient.push_pull_async(torch.ones(3), "t")
    joined.wait(lambda: len(joined.pushes(0)) == 2)
    for done in (
        lane_messages.Done(CALLS, 1, (0,)),
        lane_messages.Done(CALLS, 2, (12345,)),
        lane_messages.Done(99, 2, (0,)),
    ):
        joined.say(0, done)
    assert not gcclient.poll(handle)
    joined.say(0, lane_messages.Done(CALLS, 2, (0,)))
    gcclient.synchronize(handle)


def test_what_cannot_be_pushed_is_refused_with_what_would_do(joined: FakeDaemon) -> None:
    with pytest.raises(ValueError, match="average=False"):
        gcclient.push_pull(torch.ones(2, dtype=torch.int64), "n")
    with pytest.raises(ValueError, match="view_as_real"):
        gcclient.push_pull(torch.ones(2, dtype=torch.complex64), "c")
    with pytest.raises(ValueError, match="to_dense"):
        gcclient.push_pull(torch.ones(2).to_sparse(), "s")
    with pytest.raises(ValueError, match="'meta'"):
        gcclient.push_pull(torch.ones(2, device="meta"), "m")


@pytest.mark.parametrize(
    "function",
    [gcclient.push_pull, gcclient.push_pull_, gcclient.push_pull_async, gcclient.push_pull_async_],
)
def test_name_and_average_may_change_places_and_nothing_else_is_either(joined: FakeDaemon, function: Any) -> None:
    for arguments in ((b"weight",), (3,), (None, "weight"), ("weight", None), (True, False), (True, b"weight")):
        with pytest.raises(TypeError, match=r"name=\.\.\., average="):
            function(torch.ones(3), *arguments)
    assert gcclient.stats()["calls"] == 0
    for arguments, named, flags in [
        (("weight", False), True, 0),
        ((False, "weight"), True, 0),
        ((True, "weight"), True, int(Flag.AVERAGE)),
        ((False,), False, 0),
        ((True, None), False, int(Flag.AVERAGE)),
    ]:
        for lane in (0, 1):
            joined.heard[lane].clear()
        outcome = function(torch.ones(3), *arguments)
        if not isinstance(outcome, torch.Tensor):
            gcclient.synchronize(outcome)
        (push,) = [p for lane in (0, 1) for p in joined.pushes(lane) if p.keys]
        assert (push.domain, push.flags) == (CALLS if named else EXACT, flags)


def test_calls_from_several_threads(joined: FakeDaemon) -> None:
    wrong: list[int] = []

    def caller(which: int) -> None:
        for i in range(50):
            value = float(1000 * which + i)
            if not torch.equal(gcclient.push_pull(torch.full((500,), value), f"t{which}"), torch.full((500,), value)):
                wrong.append(which)

    threads = [threading.Thread(target=caller, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(t.is_alive() for t in threads)
    # A result says nothing of the lane that had no block of that step, and may not have read its end of it yet.
    joined.wait(lambda: all(joined.pushes(lane)[-1].step == 200 for lane in (0, 1)))
    for lane in (0, 1):
        steps = [p.step for p in joined.pushes(lane)]
        assert steps == sorted(steps) and set(steps) == set(range(1, 201))


def test_a_tensor_that_changed_is_announced_as_a_contradiction(joined: FakeDaemon) -> None:
    """The daemon knows the agreed tensor and can name the difference on every rank."""
    gcclient.push_pull(torch.ones(3), "t")
    joined.answer = lambda m: (
        messages.Fault(b"", "TensorMismatch", "differs") if isinstance(m, DeclareSection) else None
    )
    with pytest.raises(gcclient.TensorMismatch, match="differs"):
        gcclient.push_pull(torch.ones(4), "t")
    assert joined.heard[-1][-1].section.tensors[0].shape == (4,)
    assert joined.heard[-1][-1].section.index == 0


def test_a_resident_tensor_is_pushed_from_where_it_is(joined: FakeDaemon) -> None:
    elements = 5 * PARTITION // 8 + 3  # several blocks, on both lanes, the last one small
    resident = gcclient.empty("w", elements)
    values = torch.arange(float(elements))
    for turn in (1.0, 2.0):
        resident.copy_(values * turn)
        tensor = current_calls()._named[False, "w"]
        assert b"".join(p.input.tobytes() for p in tensor.places) == resident.numpy().tobytes()
        assert len({p.block.lane for p in tensor.places}) == 2
        got = gcclient.push_pull(resident)
        assert torch.equal(got, values * turn) and got.data_ptr() != resident.data_ptr()
    assert gcclient.push_pull_(resident) is resident
    assert gcclient.empty("w", elements).data_ptr() == resident.data_ptr()
    for other in (values, torch.ones(3), torch.ones(elements, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"lives in the arena .* shape \[{elements}\] .* got shape"):
            gcclient.push_pull(other, "w")
    with pytest.raises(ValueError, match="complex64"):
        gcclient.empty("c", 3, dtype=torch.complex64)
    gcclient.shutdown()
    resident.fill_(7.0)  # still memory of ours
    assert float(resident.sum()) == 7.0 * elements


def test_a_function_that_another_library_put_in_the_place_of_mremap_is_not_called(
    joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of UCX loses the address that memory is to be mapped at."""

    def replaced(*arguments: object) -> int:
        raise AssertionError(arguments)

    monkeypatch.setattr(windows._libc, "mremap", replaced, raising=False)
    resident = gcclient.empty("w", 5 * PARTITION // 8)
    resident.fill_(3.0)
    assert torch.equal(gcclient.push_pull(resident), resident)


def test_a_view_of_a_resident_tensor_is_a_tensor_like_any_other(joined: FakeDaemon) -> None:
    """It begins where the resident does, which says nothing about what it is."""
    resident = gcclient.empty("w", 6, 4)
    resident.copy_(torch.arange(24.0).view(6, 4))
    views = {
        "flat": resident.view(-1), "row": resident[0], "element": resident[0, 0], "turned": resident.t(),
        "bits": resident.view(torch.int32), "skipping": resident[::2], "nothing": resident[:0],
    }  # fmt: skip
    for view in views.values():
        assert torch.equal(gcclient.push_pull(view, average=view.is_floating_point()), view)
        with pytest.raises(ValueError, match=r"'w' lives in the arena .* as shape \[6, 4\] strides \[4, 1\] .*; got "):
            gcclient.push_pull(view, "w", average=view.is_floating_point())
    for same in (resident, resident.detach(), resident[:], resident.view(6, 4)):
        assert torch.equal(gcclient.push_pull(same), resident)
        assert torch.equal(gcclient.push_pull(same, "w"), resident)
    declared = [m for m in joined.heard[-1] if isinstance(m, DeclareSection)]
    assert [m.domain for m in declared] == [CALLS] + [EXACT] * len(views)


def test_an_unnamed_empty_tensor_is_no_resident(joined: FakeDaemon) -> None:
    assert gcclient.empty("nothing", 0).numel() == 0
    assert gcclient.push_pull(torch.ones(0)).numel() == 0
    assert gcclient.push_pull(gcclient.empty("one", 2).fill_(3.0)).tolist() == [3.0, 3.0]
    names = [m.section.tensors[0].name for m in joined.heard[-1] if isinstance(m, DeclareSection)]
    assert names == ["nothing", "push_pull.noname.0", "one"]
