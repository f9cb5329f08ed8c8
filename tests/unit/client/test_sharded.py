"""A DDP model declared in shards, on a node of one worker: what is declared and pushed, steps, failures.

What may not live here: what several workers of a node do together (`tests/integration/test_hierarchy.py`).
"""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import ddp, device
from gcclient.advice import domain_of
from gcclient.api import current
from gcclient.buckets import Backward, State
from gcclient.hierarchy import Nodes
from gcclient.node_group import Cut, NodeGroup
from gcclient.sharded import ShardState
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.wire import Flag
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.shard_threads import check_threads_end_with


@pytest.fixture(autouse=True)
def a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node of one worker where another one has more."""
    monkeypatch.setattr(ddp, "nodes_of", lambda *_: Nodes((0,), 0, 1, (0,), (1, 1)))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 7))


def _state(model: nn.Module, **options: object) -> ShardState:
    state = gcclient.state(model, hierarchy=True, **options)  # type: ignore[arg-type]
    assert isinstance(state, ShardState)
    return state


def test_all_ranks_agree_on_the_whole_model_before_shards_are_declared(alone: FakeDaemon) -> None:
    net = _net().bfloat16()
    options = {"compression": "topk(ratio=0.1)", "exclude": ["*.bias"], "warmup_steps": 3, "groups": 2}
    state = _state(DistributedDataParallel(net), **options)
    agreed, shard = (m for m in alone.heard[-1] if isinstance(m, DeclareDomain))
    assert agreed.label == "ddp.0 in 1 shards a node, codec topk(ratio=0.1), all but *.bias"
    assert (agreed.codec, agreed.warmup, agreed.whole) == ("none", 3, False)
    assert (shard.codec, shard.warmup, shard.exclude, shard.whole) == ("topk(ratio=0.1)", 3, ("*.bias",), False)
    sections = {
        which: [m.section for m in alone.heard[-1] if isinstance(m, DeclareSection) and m.domain == which]
        for which in (agreed.domain, shard.domain)
    }
    (whole,) = sections[agreed.domain]
    names = [n for n, _ in reversed(list(net.named_parameters()))]
    assert [t.name for t in whole.tensors] == names and whole.elements == 0
    assert {t.name: t.shape for t in whole.tensors} == {n: (0, *p.shape) for n, p in net.named_parameters()}
    shapes = {t.name: t.shape for s in sections[shard.domain] for t in s.tensors}
    assert shapes == {n: (p.numel(),) for n, p in net.named_parameters()}
    assert {s.dtype.label for s in sections[shard.domain]} == {"float32"}, "halves are summed as floats"
    assert state.domain.id == shard.domain


def test_advice_is_about_the_domain_that_has_the_gradients(alone: FakeDaemon) -> None:
    net = _net()
    state = _state(DistributedDataParallel(net))
    assert domain_of(current(), net) == domain_of(current(), state) == state.domain.id
    agreed = next(d for d in current().domains.values() if d is not state.domain)
    agreed.gradients = -1  # as on a rank without a shard
    assert domain_of(current(), net) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_is_one_step(alone: FakeDaemon, dtype: torch.dtype) -> None:
    net, plain = _net().to(dtype), _net().to(dtype)
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    state = _state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    for step in (1, 2, 3):
        x = torch.randn(4, 20).to(dtype)
        for m in (model, plain):
            m.zero_grad()
            m(x).sum().backward()
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        # Closed when backward() is over: a checkpoint may follow.
        assert state.domain.closed == state.domain.step == step
        alone.wait(lambda step=step: all(sum(p.close for p in alone.pushes(i)) == step for i in (0, 1)))
        pushed = [p for lane in (0, 1) for p in alone.pushes(lane) if p.step == step]
        every = [b.key for blocks in state.domain.space.blocks for b in blocks]
        assert sorted(k for p in pushed for k in p.keys) == sorted(every)
        assert all(p.flags == Flag.AVERAGE for p in pushed)
    stats = gcclient.stats()
    size = sum(p.numel() for p in net.parameters()) * 4
    assert (stats["steps"], stats["bytes_pushed"], stats["bytes_pulled"]) == (3, 3 * size, 3 * size)


def test_the_backward_pass_does_not_wait_for_sums(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bucket is brought while the first is still being summed."""
    brought, go_on = [], threading.Event()
    summed = NodeGroup.sum

    def slowly(self: NodeGroup, cut: Cut, packed: object) -> None:
        assert go_on.wait(10)
        summed(self, cut, packed)

    packed = Cut.pack

    def pack(self: Cut, buffer: torch.Tensor) -> None:
        brought.append(self)
        packed(self, buffer)
        if len(brought) == 3:
            go_on.set()

    monkeypatch.setattr(NodeGroup, "sum", slowly)
    monkeypatch.setattr(Cut, "pack", pack)
    model = DistributedDataParallel(_net(), bucket_cap_mb_list=[0.01, 0.3, 0.3])
    model.register_comm_hook(_state(model), gcclient.ddp_hook)
    model(torch.randn(2, 20)).sum().backward()
    assert len(brought) == 3


def test_a_sparse_bucket_that_comes_last_does_not_end_the_pass_before_its_step(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the pass wait for that within the hook, also where torch's own reduction is over at once."""
    closing = ShardState._close

    def slowly(self: ShardState, scope: Backward | None, ended: threading.Event) -> None:
        time.sleep(0.1)
        closing(self, scope, ended)

    monkeypatch.setattr(ShardState, "_close", slowly)
    monkeypatch.setattr(State, "sparse", lambda self, bucket, buffer: device.unchanged(buffer))
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)))
    state = _state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    for step in (1, 2):
        model(torch.arange(4)).sum().backward()
        assert state.domain.closed == step


def test_passes_scale_and_sparse_gradients(alone: FakeDaemon) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    net, plain = Net(), Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = DistributedDataParallel(net)
    state = _state(model, backward_passes_per_step=2, scaler=scaler)
    model.register_comm_hook(state, gcclient.ddp_hook)

    def train(x: torch.Tensor) -> None:
        for m in (model, plain):
            (m(x).pow(2).sum() * 256.0).backward()

    train(torch.arange(4))
    with pytest.warns(UserWarning, match="sparse gradients are averaged by torch's own all-reduce"):
        train(torch.arange(3, 8))
    assert state.domain.closed == 1
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad.to_dense(), b.grad.to_dense())
    assert alone.domains[state.domain.id].scales == {1: {256.0}}


def test_attach_takes_it_for_ddp(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(_net())
    assert isinstance(gcclient.attach(model, hierarchy=True), ShardState)
    model(torch.randn(2, 20)).sum().backward()
    assert gcclient.stats()["steps"] == 1


def test_where_averages_must_not_go_beside_sums_all_sums_of_a_step_come_first(
    alone: FakeDaemon, in_turn: list[str]
) -> None:
    net = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 200), nn.Linear(200, 300), nn.Linear(300, 2))
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb_list=[0.001, 0.1, 0.1])
    state = _state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    with pytest.warns(UserWarning, match="sparse gradients"):
        model(torch.arange(4)).sum().backward()
    plain(torch.arange(4)).sum().backward()
    count = in_turn.count("sum")
    assert count > 1 and in_turn == ["sum"] * count + ["give_out"] * count
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad.to_dense(), b.grad.to_dense())
    names = [t.name for t in threading.enumerate()]
    assert "gcclient-sums" in names and state.domain.closed == 1


def test_a_failure_among_the_nodes_ranks_ends_the_job(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcclient.sharded.TOLD_WITHIN", 0.0)

    def broken(self: NodeGroup, cut: Cut, packed: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(NodeGroup, "sum", broken)
    model = DistributedDataParallel(_net())
    model.register_comm_hook(_state(model), gcclient.ddp_hook)
    with pytest.raises(RuntimeError, match=r"could not exchange gradients among themselves: Connection closed"):
        model(torch.randn(2, 20)).sum().backward()
    with pytest.raises(gcclient.GradcommError, match="look at the logs of this node's other ranks"):
        gcclient.push_pull(torch.ones(1))


def test_threads_end_with_the_state(alone: FakeDaemon) -> None:
    def stepped() -> DistributedDataParallel:
        model = DistributedDataParallel(_net())
        model.register_comm_hook(_state(model), gcclient.ddp_hook)
        model(torch.randn(2, 20)).sum().backward()
        return model

    check_threads_end_with(stepped)
