"""Memory of large results: valid while held in any form, used again afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import gcclient
from gcclient import results
from gcclient.results import LEAST, Results
from tests.unit.client.fake import FakeDaemon

LARGE = LEAST // 4 + 3  # float32 elements


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Memory must come back by itself, not when the collector happens to run."""
    gc.disable()
    yield
    gc.enable()


def _pushed(value: float, elements: int = LARGE) -> torch.Tensor:
    return gcclient.push_pull(torch.full((elements,), value), f"t{elements}")


def test_results_stay_as_they_are_while_later_calls_run(joined: FakeDaemon) -> None:
    held = [_pushed(float(i)) for i in range(7)]
    part = _pushed(70.0)[5:9]
    array = _pushed(80.0).view(-1)[:3].numpy()
    storage = _pushed(90.0).untyped_storage()
    handle = gcclient.push_pull_async(torch.full((LARGE,), 95.0), "handle")
    for i in range(12):
        assert torch.equal(_pushed(100.0 + i), torch.full((LARGE,), 100.0 + i))
    assert all(torch.equal(held[i], torch.full((LARGE,), float(i))) for i in range(7))
    assert part.tolist() == [70.0] * 4 and array.tolist() == [80.0] * 3
    assert torch.equal(torch.tensor([], dtype=torch.float32).set_(storage), torch.full((LARGE,), 90.0))
    assert torch.equal(gcclient.synchronize(handle), torch.full((LARGE,), 95.0))


def test_dropped_results_are_used_again(joined: FakeDaemon) -> None:
    places = {_pushed(float(i)).data_ptr() for i in range(6)}
    assert len(places) == 1
    first = _pushed(1.0)
    assert first.data_ptr() in places
    view = first[1:2]
    del first
    assert _pushed(2.0).data_ptr() not in places
    assert float(view) == 1.0
    del view
    assert any(_pushed(3.0).data_ptr() in places for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_result_is_like_any_other_tensor(dtype: torch.dtype) -> None:
    made = Results().like(torch.zeros(2 << 20, dtype=dtype))
    assert made.dtype is dtype and made.shape == (2 << 20,) and made.data_ptr() % 64 == 0
    assert made.is_contiguous() and made.untyped_storage().nbytes() == made.nbytes and not made.requires_grad


def _address(pool: Results, nbytes: int) -> int:
    return pool.like(torch.empty(nbytes, dtype=torch.uint8)).data_ptr()


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Results()
    made = [pool.like(torch.empty(LEAST, dtype=torch.uint8)) for _ in range(results.MOST_BUFFERS + 5)]
    del made
    assert len(pool._idle) == results.MOST_BUFFERS and not pool._returned
    monkeypatch.setattr(results, "MOST_BYTES", 5 * LEAST)
    made = [pool.like(torch.empty(2 * LEAST, dtype=torch.uint8)) for _ in range(4)]
    del made
    assert sum(b.nbytes for b in pool._idle) <= 5 * LEAST and len(pool._idle) == 2
    kept = [b.ctypes.data for b in pool._idle]
    _address(pool, 5 * LEAST)  # with its alignment more than may be kept: not from the pool
    assert [b.ctypes.data for b in pool._idle] == kept


def test_a_small_result_does_not_take_a_large_buffer() -> None:
    pool = Results()
    large = _address(pool, 8 * LEAST)
    assert not large <= _address(pool, 2 * LEAST) < large + 8 * LEAST
    assert _address(pool, 5 * LEAST) == large
    small = torch.empty(LEAST - 1, dtype=torch.uint8)
    kept = len(pool._idle)
    assert pool.like(small).shape == small.shape
    assert len(pool._idle) == kept


def test_a_result_outlives_its_pool() -> None:
    pool = Results()
    made = pool.like(torch.empty(LEAST, dtype=torch.uint8)).fill_(7)
    del pool
    assert bool((made == 7).all())


def test_results_come_and_go_in_several_threads() -> None:
    pool, wrong = Results(), []

    def caller(which: int) -> None:
        held = []
        for i in range(200):
            value = (which * 50 + i) % 251
            made = pool.like(torch.empty(LEAST, dtype=torch.uint8))
            made[::4096] = value
            held.append((made, value))
            if len(held) > 3:
                old, expected = held.pop(0)
                if not bool((old[::4096] == expected).all()):
                    wrong.append(which)

    threads = [threading.Thread(target=caller, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not pool._returned and len(pool._idle) <= results.MOST_BUFFERS
