"""Memory of CPU tensors: shared with them, and left as it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import gcclient
from gcclient.device import SAMPLED, HostMemory, complete, future_for, host_bytes, sample, unchanged
from gcproto import lane_messages
from tests.unit.client.fake import FakeDaemon

ELEMENTS = 70_000  # more than one block of the fake daemon's


def test_bytes_share_the_tensors_memory_and_hold_it() -> None:
    base = torch.arange(6, dtype=torch.int16)
    flat = base[2:5]
    shared = host_bytes(flat, flat.data_ptr())
    assert shared.tobytes() == np.array([2, 3, 4], np.int16).tobytes()
    shared[:2] = 255
    assert base.tolist() == [0, 1, -1, 3, 4, 5]
    assert host_bytes(torch.empty(0), 0).size == 0
    alive = weakref.ref(flat)
    del flat
    gc.collect()
    assert alive() is not None and shared.nbytes == 6
    del shared
    assert alive() is None


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 300, 4096, 70_000])
def test_a_sample_is_a_few_elements_from_all_over_the_memory(elements: int) -> None:
    tensor = torch.arange(elements, dtype=torch.int32)
    places = np.frombuffer(sample(tensor), np.int32)
    assert min(elements, SAMPLED) // 3 <= len(places) <= SAMPLED
    assert len({*np.diff(places)}) <= 1
    assert places[0] == 0 and elements - places[-1] <= elements // SAMPLED + 2
    assert elements < 4096 or len({*(places % 64)}) > 1, "not of one column"


def test_a_sample_of_memory_without_gaps_is_of_it_in_whatever_order_elements_are() -> None:
    tensor = torch.randn(2, 3, 5, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert sample(tensor) == sample(tensor.permute(0, 2, 3, 1)) == sample(tensor.clone()) != sample(tensor + 1)
    assert sample(tensor[:, 1:2, :1]) == b"" == sample(torch.ones(1).expand(3)), "what has gaps has none"
    assert sample(torch.empty(0, 3)) == b"" == sample(torch.ones(3, device="meta"))
    tensor.untyped_storage().resize_(8)
    assert sample(tensor) == b""


def test_a_tensor_that_was_pushed_can_still_be_resized(joined: FakeDaemon) -> None:
    pushed, in_place, parameter = (torch.ones(ELEMENTS) for _ in range(3))
    gcclient.push_pull(pushed, "a")
    gcclient.push_pull_(in_place, "b")
    gcclient.broadcast_parameters({"w": parameter})
    for tensor in (pushed, in_place, parameter):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0


def test_a_result_goes_where_the_tensor_is_by_then(joined: FakeDaemon) -> None:
    """Sharded training frees parameters and allocates them again, at another address."""
    whole = torch.arange(ELEMENTS + 7.0)
    tensor = whole[7:]
    joined.silent = True
    handle = gcclient.push_pull_async_(tensor, "a", average=False)
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    joined.wait(lambda: all(joined.pushes(lane) for lane in (0, 1)))
    for lane in (0, 1):
        for push in joined.pushes(lane):
            joined.say(lane, lane_messages.Done(push.domain, push.step, push.keys))
    joined.wait(lambda: gcclient.poll(handle))
    for smaller in (0, size - 4):
        storage.resize_(smaller)
        with pytest.raises(ValueError, match=f"{4 * ELEMENTS} bytes was resized to {smaller} .* synchronize first"):
            gcclient.synchronize(handle)
    storage.resize_(size + 4096)
    assert gcclient.synchronize(handle) is not None
    assert torch.equal(tensor, torch.arange(7.0, ELEMENTS + 7.0))


def test_a_tensor_that_only_says_it_is_negated_is_exchanged_as_what_it_says(joined: FakeDaemon) -> None:
    values = torch.arange(4.0)
    negated = torch._neg_view(values)
    assert torch.equal(gcclient.push_pull(negated, "n"), -values)
    assert torch.equal(gcclient.push_pull_(negated, "n"), -torch.arange(4.0))
    assert torch.equal(values, torch.arange(4.0))


def test_whoever_waits_for_a_result_hears_that_its_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_result: Any = torch.futures.Future.set_result

    def fails(self: torch.futures.Future[torch.Tensor], result: object) -> None:
        if isinstance(result, torch.Tensor):  # errors, which are set in this way too, are on no device
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        set_result(self, result)

    monkeypatch.setattr(torch.futures.Future, "set_result", fails)
    result = torch.ones(3)
    future = future_for(result)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        complete(future, result, HostMemory(result))
    assert future.done(), "else it would be waited for"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        future.wait()


def test_a_result_that_is_there_stays() -> None:
    result = torch.ones(3)
    future = unchanged(result)
    with pytest.raises(RuntimeError):
        complete(future, result + 1, HostMemory(result))
    assert future.wait() is result
