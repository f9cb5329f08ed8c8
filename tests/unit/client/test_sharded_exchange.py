"""A wrapped optimizer in shards, on a node of one worker: what is declared and pushed, in which order, failures.

What may not live here: what several workers of a node do together (`tests/integration/test_sharded_optimizer.py`).
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from gcclient import optimizer as making
from gcclient.api import current
from gcclient.hierarchy import Nodes
from gcclient.node_group import Cut, NodeGroup
from gcclient.parameters import Parameter
from gcclient.sharded_exchange import FULL, ShardLayout, bundles_of
from gcproto.dtypes import DType
from gcproto.lane_messages import Done, Push
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.shard_threads import check_threads_end_with
from tests.unit.client.wrapped import backward, equal, make_model, pushes, wrap


@pytest.fixture(autouse=True)
def a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node of one worker where another one has more."""
    monkeypatch.setattr(making, "nodes_of", lambda *given: Nodes((0,), 0, 1, (0,), (1, 1)) if given[1] else None)


def _layout(optimizer: Any) -> ShardLayout:
    layout = optimizer._averaging.layout
    assert isinstance(layout, ShardLayout)
    return layout


def _parameters(*elements: int, dtype: DType = DType.F32) -> list[Parameter]:
    return [Parameter(f"p{i}", torch.empty(n, device="meta"), dtype, ()) for i, n in enumerate(elements)]


def _names(bundles: list[list[Parameter]]) -> list[list[str]]:
    return [[p.name for p in bundle] for bundle in bundles]


def test_bundles_are_in_the_order_of_back_propagation_and_not_too_small() -> None:
    mib = 1 << 18  # float32
    parameters = _parameters(mib, mib, 5 * mib, mib, 3 * mib, 2 * mib)
    named = [p.name for p in parameters]
    assert FULL == 4 << 20
    assert _names(bundles_of(parameters, None, named)) == [["p5", "p4"], ["p3", "p2"], ["p1", "p0"]]
    assert _names(bundles_of(parameters[::-1], 2, named)) == [["p5", "p4", "p3"], ["p2", "p1", "p0"]]
    assert _names(bundles_of(parameters, "layer-wise", named[:])) == [[n] for n in reversed(named)]


def test_a_bundle_has_one_dtype() -> None:
    parameters = _parameters(3, 3, 3, 3)
    mixed = [Parameter(p.name, p.tensor, DType.F64 if i in (1, 2) else p.dtype, ()) for i, p in enumerate(parameters)]
    assert _names(bundles_of(mixed, None, [p.name for p in mixed])) == [["p3", "p0"], ["p2", "p1"]]
    groups = [["p3", "p2"], ["p1", "p0"]]
    assert _names(bundles_of(mixed, groups, [p.name for p in mixed])) == [["p3"], ["p2"], ["p1"], ["p0"]]


@pytest.mark.parametrize("groups", [None, "layer-wise", 2])
def test_training_is_what_it_is_without_a_wrapper(alone: FakeDaemon, groups: object) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, groups=groups, hierarchy=True)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    domain = _layout(optimizer).domain
    every = sorted(b.key for blocks in domain.space.blocks for b in blocks)
    for step in (1, 2, 3):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            backward(m, step)
            o.step()
        assert domain.closed == domain.step == step
        alone.wait(lambda step=step: sum(p.close for p in pushes(alone, step)) == 2)
        assert sorted(k for p in pushes(alone, step) for k in p.keys) == every
        assert all(p.flags == Flag.AVERAGE for p in pushes(alone, step))
    assert equal(model, same)
    stats, size = gcclient.stats(), sum(p.nbytes for p in model.parameters())
    assert (stats["steps"], stats["bytes_pushed"], stats["bytes_pulled"]) == (3, 3 * size, 3 * size)


def test_all_ranks_agree_on_the_whole_model_before_shards_are_declared(alone: FakeDaemon) -> None:
    options = {"compression": "topk(ratio=0.1)", "exclude": ["*.bias"], "warmup_steps": 3, "quality": "fast"}
    wrap(make_model(), hierarchy=True, **options)
    agreed, shard = (m for m in alone.heard[-1] if isinstance(m, DeclareDomain))
    assert agreed.label == "optimizer.0 in 1 shards a node, codec topk(ratio=0.1), all but *.bias"
    assert (agreed.codec, agreed.quality, agreed.warmup) == ("none", "fast", 3)
    assert (shard.codec, shard.quality, shard.warmup, shard.exclude) == ("topk(ratio=0.1)", "fast", 3, ("*.bias",))


def test_a_bundle_is_summed_as_soon_as_it_and_those_before_are_there(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order in which gradients come."""
    model = make_model()
    optimizer = wrap(model, groups="layer-wise", hierarchy=True)
    bundles = _layout(optimizer).bundles
    packed: list[int] = []
    pack = Cut.pack

    def noted(self: Cut, buffer: torch.Tensor) -> None:
        packed.append(next(i for i, bundle in enumerate(bundles) if bundle.cut is self))
        pack(self, buffer)

    monkeypatch.setattr(Cut, "pack", noted)
    names = dict(model.named_parameters())
    expected = []
    for name, went in (("2.bias", 0), ("4.bias", 1), ("0.weight", 1), ("4.weight", 3), ("2.weight", 4), ("0.bias", 6)):
        names[name].sum().backward()
        expected.append(went)
        assert packed == list(range(went)), name
    assert bundles[0].parameters[0].name == "4.bias"
    optimizer.step()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())  # type: ignore[arg-type]


def test_what_nobody_uses_is_not_pushed_and_has_no_gradient(alone: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model, groups="layer-wise", hierarchy=True)
    layout = _layout(optimizer)
    model[2].weight.sum().backward()
    optimizer.step()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["2.weight"]
    pushed = {k for p in pushes(alone, 1) for k in p.keys}
    used = next(p for p in layout.parameters if p.name == "2.weight")
    assert layout.note is not None
    assert pushed == {piece.place.block.key for piece in (*used.pieces, *layout.note.pieces)}
    optimizer.zero_grad()
    optimizer.step()  # nobody has anything
    assert all(p.grad is None for p in model.parameters())
    assert layout.domain.closed == 2 and gcclient.stats()["steps"] == 2
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def test_sums_are_pushed_as_such(alone: FakeDaemon) -> None:
    optimizer = wrap(model := make_model(), op=gcclient.Sum, hierarchy=True)
    backward(model)
    optimizer.step()
    assert {p.flags for p in pushes(alone, 1)} == {0}


def test_gradients_are_left_alone_until_the_step(alone: FakeDaemon) -> None:
    model = make_model()
    optimizer: Any = wrap(model, hierarchy=True)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"the gradient of '4\.bias' was changed after backward\(\)"):
        optimizer.step()


def test_gradients_of_any_layout(alone: FakeDaemon) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Embedding(9, 4, sparse=True)).to(memory_format=torch.channels_last)
    same = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Embedding(9, 4, sparse=True)).to(memory_format=torch.channels_last)
    same.load_state_dict(net.state_dict())
    optimizer = wrap(net, hierarchy=True)
    for m in (net, same):
        made = torch.Generator().manual_seed(4)
        x = torch.randn(2, 3, 8, 8, generator=made).to(memory_format=torch.channels_last)
        loss = m[0](x).pow(2).sum() + m[1](torch.arange(4)).pow(2).sum()
        with nullcontext() if m is same else pytest.warns(UserWarning, match="exchanged as a dense one"):
            loss.backward()
    optimizer.synchronize()  # type: ignore[attr-defined]
    for a, b in zip(net.parameters(), same.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad.to_dense())


def test_where_averages_must_not_go_beside_sums_all_sums_of_a_step_come_first(
    alone: FakeDaemon, in_turn: list[str]
) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, groups=3, hierarchy=True)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for m, o in ((model, optimizer), (same, plain)):
        backward(m)
        o.step()
    assert in_turn == ["sum"] * 3 + ["greatest"] + ["give_out"] * 3
    assert equal(model, same)


def test_a_failure_among_the_nodes_ranks_ends_the_job(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcclient.sharded.TOLD_WITHIN", 0.0)

    def broken(self: NodeGroup, said: list[float]) -> list[float]:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(NodeGroup, "greatest", broken)
    optimizer = wrap(model := make_model(), hierarchy=True)
    backward(model)
    with pytest.raises(gcclient.GradcommError, match="could not exchange gradients among themselves: Connection"):
        optimizer.step()
    with pytest.raises(gcclient.GradcommError, match="look at the logs of this node's other ranks"):
        backward(model)


def test_threads_end_with_the_wrapper(alone: FakeDaemon) -> None:
    def stepped() -> torch.optim.Optimizer:
        optimizer = wrap(model := make_model(), hierarchy=True)
        backward(model)
        optimizer.step()
        return optimizer

    check_threads_end_with(stepped)


def test_steps_of_single_parameters_do_not_go_with_it(alone: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"hierarchy=True does not go with overlap_forward=True: .*leave one of them"):
        wrap(make_model(), hierarchy=True, overlap_forward=True)
    with caplog.at_level(logging.INFO, "gcclient"):
        optimizer: Any = wrap(make_model(), hierarchy="auto", overlap_forward=True)
    assert "not summed within the node first: it does not go with overlap_forward=True" in caplog.text
    assert not isinstance(optimizer._averaging.layout, ShardLayout)
    with pytest.raises(ValueError, match="hierarchy='on'"):
        wrap(make_model(), hierarchy="on")
    assert len(current().domains) == 1


def test_a_step_is_over_once_it_is_back_who_has_gradients(alone: FakeDaemon) -> None:
    """Also where all have all: it must not be pushed again while its round is under way, which a lane that restarts
    takes up anew from what is in the arena."""
    model = make_model()
    optimizer = wrap(model, hierarchy=True)
    layout, held = _layout(optimizer), []
    assert layout.note is not None
    note = {piece.place.block.key for piece in layout.note.pieces}

    def answer(message: Any) -> Done | None:
        if not (isinstance(message, Push) and note.intersection(message.keys)):
            return None
        assert note.issuperset(message.keys)
        held.append(message)
        return Done(message.domain, message.step, ())

    alone.answer = answer
    backward(model, 1)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    alone.wait(lambda: bool(held) and all(bundle.over.is_set() for bundle in layout.bundles))
    stepping.join(0.2)
    assert stepping.is_alive()
    for message in held:
        for key in message.keys:
            alone.domains[message.domain].copy(key, message.step)
        lane = next(i for i in range(alone.lanes) if message in alone.heard[i])
        alone.say(lane, Done(message.domain, message.step, message.keys))
    stepping.join(10)
    assert not stepping.is_alive()
