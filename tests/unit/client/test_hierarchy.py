"""Who has which shard, what a node's sum counts, and which models cannot be exchanged so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gcclient.audit import Audit
from gcclient.hierarchy import Nodes, nodes_of, part, read_hierarchy, summed_as
from gcclient.parameters import Model, Options
from gcproto.messages import MemberInfo


def _model(tensors: list[torch.Tensor], ranks: tuple[int, ...], options: Options) -> Model:
    return Model("ddp", [(str(i), t) for i, t in enumerate(tensors)], ranks, options)


def _members(*nodes: tuple[int, ...]) -> list[MemberInfo]:
    return [MemberInfo(f"n{i}", "tcp://127.0.0.1:1", ranks) for i, ranks in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "shards", "weight"),
    [
        (((0, 1), (2, 3)), 2, (1, 2)),
        (((0,), (1, 2)), 1, (2, 3)),
        (((0, 1), (2, 3, 4)), 2, (2, 5)),
        (((0, 3, 4), (1, 2), (5, 6, 7)), 2, (3, 8)),
        (((0, 1, 2),), 3, (1, 3)),
    ],
)
def test_as_many_shards_as_the_smallest_node_has_ranks(
    nodes: tuple[tuple[int, ...], ...], shards: int, weight: tuple[int, int]
) -> None:
    world = [r for node in nodes for r in node]
    seen = {r: Nodes.of(_members(*nodes), world, r) for r in world}
    for node in nodes:
        for place, rank in enumerate(node):
            found = seen[rank]
            assert (found.local, found.place, found.shards, found.weight) == (node, place, shards, weight)
            assert found.has_shard is (place < shards) and not found.flat
            same = tuple(sorted(other[place] for other in nodes)) if place < shards else ()
            assert found.peers == same
    # The average over a shard's ranks of sums that count so is the average over all.
    above, below = weight
    assert above / below / len(nodes) == pytest.approx(1 / len(world))


def test_only_the_ranks_of_the_domain_count() -> None:
    found = Nodes.of(_members((0, 1, 2), (3, 4), (5,)), (0, 2, 3, 4), 2)
    assert (found.local, found.place, found.peers, found.weight) == ((0, 2), 1, (2, 4), (1, 2))


@pytest.mark.parametrize(("elements", "shards"), [(0, 2), (1, 2), (7, 2), (10, 3), (5, 7), (64, 4)])
def test_parts_cover_every_element_once(elements: int, shards: int) -> None:
    parts = [part(elements, shards, k) for k in range(shards)]
    assert [i for lo, hi in parts for i in range(lo, hi)] == list(range(elements))
    sizes = [hi - lo for lo, hi in parts]
    assert max(sizes) - min(sizes) <= 1


def test_halves_are_summed_as_floats() -> None:
    wide = [summed_as(t) for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    assert wide == [torch.float32, torch.float32, torch.float32, torch.float64]


def test_what_hierarchy_may_be() -> None:
    assert [read_hierarchy(x) for x in (True, False, "auto")] == [True, False, "auto"]
    with pytest.raises(ValueError, match="hierarchy='on': expected True, False or 'auto'"):
        read_hierarchy("on")
    with pytest.raises(TypeError, match="hierarchy=1: expected True, False or 'auto', got a int"):
        read_hierarchy(1)


def _session(*nodes: tuple[int, ...], commits: bool = False) -> Any:
    size = sum(map(len, nodes))
    job = SimpleNamespace(members=_members(*nodes), commits=commits)
    return SimpleNamespace(job=job, me=SimpleNamespace(rank=0, size=size))


CPU = [torch.zeros(3)]


@pytest.fixture
def world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


@pytest.mark.parametrize(
    ("commits", "tensors", "options", "why"),
    [
        (True, CPU, Options(), "needs on_loss='fail'"),
        (False, CPU, Options(audit=Audit(every=5)), "does not go with audit"),
        (False, CPU, Options(whole=True), "does not go with whole=True"),
        (False, CPU, Options(codec="powersgd(rank=2)"), "codecs of whole matrices"),
        (False, [torch.zeros(1), torch.zeros(1, device="meta")], Options(), "on one device, got cpu, meta"),
        (False, [torch.zeros(1, device="meta")], Options(), "on cpu and cuda, got meta"),
    ],
)
def test_what_does_not_go_with_it_is_refused_or_does_without(
    world_of_four: None,
    caplog: pytest.LogCaptureFixture,
    commits: bool,
    tensors: list[torch.Tensor],
    options: Options,
    why: str,
) -> None:
    session, ranks = _session((0, 1), (2, 3), commits=commits), (0, 1, 2, 3)
    with pytest.raises(ValueError, match=r"hierarchy=True: .*leave hierarchy out, or give 'auto'") as refused:
        nodes_of(session, True, _model(tensors, ranks, options))
    assert why in str(refused.value)
    with caplog.at_level(logging.INFO, "gcclient"):
        assert nodes_of(session, "auto", _model(tensors, ranks, options)) is None
    assert why in caplog.text
    assert nodes_of(session, False, _model(tensors, ranks, options)) is None


def test_torch_has_to_span_the_job(world_of_four: None) -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed over all ranks of the job"):
        nodes_of(_session((0, 1), (2, 3, 4)), True, _model(CPU, (0, 1, 2, 3, 4), Options()))
    found = nodes_of(_session((0, 1), (2, 3)), True, _model(CPU, (0, 1, 2, 3), Options()))
    assert found is not None and found.shards == 2


@pytest.mark.parametrize(
    ("nodes", "device", "why"),
    [
        (((0, 1), (2, 3)), "cuda:0", ""),
        (((0,), (1, 2, 3)), "cuda:0", "some node has one worker only"),
        (((0, 1), (2, 3)), "cpu", "gradients are on the CPU"),
    ],
)
def test_auto_wants_two_workers_a_node_and_cuda(
    world_of_four: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: tuple[tuple[int, ...], ...],
    device: str,
    why: str,
) -> None:
    tensors: Any = [SimpleNamespace(device=torch.device(device))]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with caplog.at_level(logging.INFO, "gcclient"):
        found = nodes_of(_session(*nodes), "auto", _model(tensors, (0, 1, 2, 3), Options()))
    assert (found is None) is bool(why) and why in caplog.text
    assert nodes_of(_session(*nodes), True, _model(tensors, (0, 1, 2, 3), Options())) is not None


def test_cuda_wants_nccl(world_of_four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: Any = [SimpleNamespace(device=torch.device("cuda:0"))]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="needs NCCL for gradients on cuda"):
        nodes_of(_session((0, 1), (2, 3)), True, _model(tensors, (0, 1, 2, 3), Options()))


def test_one_worker_a_node_has_nothing_to_sum(world_of_four: None) -> None:
    session = _session((0,), (1,), (2,), (3,), commits=True)
    assert nodes_of(session, True, _model(CPU, (0, 1, 2, 3), Options())) is None
