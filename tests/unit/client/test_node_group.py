"""A bucket cut into shards and put together again; the ranks of a node among themselves, as threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gcclient.hierarchy import Nodes, part
from gcclient.node_group import Cut, NodeGroup

SIZES = [7, 1, 0, 12, 3]
CPU = torch.device("cpu")


def _nodes(place: int, shards: int, local: int, weight: tuple[int, int] = (1, 1)) -> Nodes:
    return Nodes(tuple(range(local)), place, shards, (place,) if place < shards else (), weight)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_packing_lays_out_every_parameters_parts_by_shard(shards: int) -> None:
    buffer = torch.arange(float(sum(SIZES)))
    cut = Cut(SIZES, buffer, _nodes(shards - 1, shards, shards))
    cut.pack(buffer)
    parameters = buffer.split(SIZES)
    rows = cut.packed.view(shards, cut.width)
    for k, row in enumerate(rows):
        wanted = torch.cat([p[slice(*part(p.numel(), shards, k))] for p in parameters])
        assert torch.equal(row[: cut.lengths[k]], wanted)
        assert not row[cut.lengths[k] :].any()
    assert sum(cut.lengths) == buffer.numel()
    back = torch.full_like(buffer, -1.0)
    cut.unpack(back)
    assert torch.equal(back, buffer)
    last = [hi - lo for lo, hi in (part(n, shards, shards - 1) for n in SIZES)]
    assert cut.starts == [sum(last[:i]) for i in range(len(SIZES) + 1)]


def test_a_rank_beyond_the_shards_has_none() -> None:
    cut = Cut(SIZES, torch.zeros(sum(SIZES)), _nodes(2, 2, 3))
    assert cut.shard.numel() == 0 and cut.starts == []


class _Rank(threading.Thread):
    """One rank: sums two buckets, tells whether all was finite, and gives the sums out as if they were averages."""

    def __init__(self, nodes: Nodes, store: dist.Store, buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.nodes, self.store, self.buffers = nodes, store, buffers
        self.shards: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.finite: list[bool] = []
        self.greatest: list[float] = []
        self.error: Any = None
        self.start()

    def run(self) -> None:
        try:
            group = NodeGroup(self.nodes, CPU, self.store, 20.0)
            cuts = [Cut(SIZES, buffer, self.nodes) for buffer in self.buffers]
            for cut, buffer in zip(cuts, self.buffers, strict=True):
                cut.pack(buffer)
                group.sum(cut, group.packed())
                self.shards.append(cut.shard.clone())
            self.finite = [group.all_finite(self.nodes.place != 0), group.all_finite(True)]
            self.greatest = group.greatest([float(self.nodes.place), -1.0])
            for cut, buffer in zip(cuts, self.buffers, strict=True):
                self.given.append(torch.empty_like(buffer))
                group.give_out(cut, self.given[-1])
        except BaseException as error:
            self.error = error


def _run(local: int, shards: int, weight: tuple[int, int], dtype: torch.dtype) -> list[_Rank]:
    store = dist.HashStore()
    made = torch.Generator().manual_seed(1)
    ranks = []
    for place in range(local):
        buffers = [(torch.randn(sum(SIZES), generator=made) * 1000).to(dtype) for _ in range(2)]
        ranks.append(_Rank(_nodes(place, shards, local, weight), store, buffers))
    for rank in ranks:
        rank.join(60)
        assert not rank.is_alive() and rank.error is None, rank.error
    return ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("local", "shards", "weight"), [(1, 1, (2, 3)), (2, 1, (2, 3)), (2, 2, (1, 2)), (3, 2, (2, 5)), (3, 3, (1, 1))]
)
def test_sums_are_added_in_rank_order_and_given_out_to_all(
    local: int, shards: int, weight: tuple[int, int], dtype: torch.dtype
) -> None:
    ranks = _run(local, shards, weight, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for i in range(2):
        total = ranks[0].buffers[i].to(wide)
        for rank in ranks[1:]:
            total = total + rank.buffers[i].to(wide)
        total = total * weight[0] / weight[1]
        for place, rank in enumerate(ranks):
            wanted = torch.empty(0, dtype=wide)
            if place < shards:
                wanted = torch.cat([p[slice(*part(p.numel(), shards, place))] for p in total.split(SIZES)])
            assert rank.shards[i].dtype is wide
            assert torch.equal(rank.shards[i][: len(wanted)], wanted)
            assert torch.equal(rank.given[i], total.to(dtype))
    assert all(rank.finite == [False, True] and rank.greatest == [local - 1, -1] for rank in ranks)


def test_one_group_serves_both_where_they_must_not_go_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeGroup, "overlap", False)
    ranks = _run(3, 2, (1, 1), torch.float32)
    for rank in ranks:
        assert rank.finite == [False, True]
        total = sum(r.buffers[1] for r in ranks)
        assert isinstance(total, torch.Tensor) and torch.equal(rank.given[1], total)


def test_halves_that_overflow_when_added_do_not() -> None:
    store = dist.HashStore()
    full = torch.full((sum(SIZES),), 60_000.0, dtype=torch.float16)
    ranks = [_Rank(_nodes(place, 2, 2, (1, 2)), store, [full.clone()]) for place in range(2)]
    for rank in ranks:
        rank.join(60)
        assert rank.error is None and torch.equal(rank.given[0], full)
