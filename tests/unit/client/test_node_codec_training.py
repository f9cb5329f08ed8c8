"""A DDP model in shards with a codec within the node: a worker of real code, and another one that a thread plays.

What may live here: steps, what is declared, said and saved. What may not: messages by themselves
(`test_node_codec.py`), several real workers (`tests/integration/test_node_codec.py`).
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import ddp, sharded
from gcclient.hierarchy import Nodes, part
from gcclient.node_codec import Layout, Message, NodeCodec
from gcclient.node_group import Cut, NodeGroup
from gcclient.parameters import Parameter
from gcproto.dtypes import DType
from gcproto.lane_messages import Done
from gcproto.messages import DeclareDomain
from tests.unit.client import fake
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.remembering import Memory

N = 6_001
CPU = torch.device("cpu")


class Net(nn.Module):
    """One parameter, whose gradient is what the module is called with."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.weight * grad).sum()


class Other(threading.Thread):
    """The node's second rank: brings ``brings[step]``, and notes its shards of sums, which are their averages too, what
    it was given, and whether the step counted."""

    def __init__(self, shards: int, spec: str, store: dist.Store, brings: list[torch.Tensor], warmup: int) -> None:
        super().__init__(daemon=True)
        self.nodes = Nodes((0, 1), 1, shards, (1,) if shards > 1 else (), (1, 1))
        self.codec = NodeCodec(spec, "ddp.0", self.nodes, 1, {"weight": N})
        self.codec.leave_out((), warmup)
        self.store, self.brings = store, brings
        self.sums: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.counted: list[bool] = []
        self.steps = self.error = None
        self.start()

    def run(self) -> None:
        try:
            group = NodeGroup(self.nodes, CPU, self.store, 20.0)
            self.steps = self.codec.steps = int(group.greatest([self.codec.steps])[0])  # type: ignore[assignment]
            for buffer in self.brings:
                cut = Cut([N], buffer, self.nodes)
                cut.pack(buffer)
                layout = Layout(self.codec, [Parameter("weight", buffer, DType.F32, ())], cut)
                if self.codec.steps < self.codec.warmup:
                    group.sum(cut, None)
                else:
                    message = Message(self.codec, layout, self.codec.steps, 1.0, self.codec.settled)
                    group.sum_encoded(cut, None, message)
                finite = True
                if self.nodes.has_shard:
                    self.sums.append(cut.shard.clone())
                    finite = group.all_finite(bool(cut.shard.isfinite().all()))
                self.given.append(torch.empty(N))
                group.give_out(cut, self.given[-1])
                counts = finite
                if not self.nodes.has_shard and self.codec.steps >= self.codec.warmup:
                    counts = group.all_counted(True)
                self.counted.append(counts)
                self.codec.settle(counts)
                self.codec.steps += 1
        except BaseException as error:
            self.error = error  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon says what is not finite."""
    copy, wrong = fake.FakeDomain.copy, set[int]()

    def looked_at(self: fake.FakeDomain, key: int, step: int) -> None:
        copy(self, key, step)
        block = self.blocks[key]
        slot = self.plans[block.lane].slots[key]
        memory = memoryview(self.maps[block.lane][slot.chunk])[slot.output :][: block.nbytes]
        values = torch.frombuffer(bytearray(memory), dtype=torch.float64 if block.nbytes == 8 else torch.float32)
        if not values.isfinite().all():
            wrong.add(step)

    def done(domain: int, step: int, keys: tuple[int, ...], skipped: bool, epoch: int) -> Done:
        return Done(domain, step, keys, step in wrong, skipped, epoch)

    monkeypatch.setattr(fake.FakeDomain, "copy", looked_at)
    monkeypatch.setattr(fake, "Done", done)


@pytest.fixture
def told(alone: FakeDaemon) -> Memory:
    return Memory(alone)


def _two(
    monkeypatch: pytest.MonkeyPatch, shards: int, spec: str, brings: list[torch.Tensor], **options: Any
) -> tuple[Any, Any, Other]:
    """This process as the node's first rank."""
    monkeypatch.setattr(ddp, "nodes_of", lambda *_: Nodes((0, 1), 0, shards, (0,), (1, 1)))
    store, others = dist.HashStore(), []

    def group(nodes: Nodes, place: torch.device, _: dist.Store, limit: float) -> NodeGroup:
        others.append(Other(shards, spec, store, brings, options.get("warmup_steps", 0)))
        return NodeGroup(nodes, place, store, limit)

    monkeypatch.setattr(sharded, "NodeGroup", group)
    model = DistributedDataParallel(Net())
    state = gcclient.state(model, hierarchy=True, node_codec=spec, **options)
    model.register_comm_hook(state, gcclient.ddp_hook)
    return model, state, others[0]


def _step(model: Any, grad: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(grad).backward()
    found: torch.Tensor = model.module.weight.grad
    return found.clone()


def _grads(count: int, seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(N, generator=made) for _ in range(count)]


@pytest.mark.parametrize("shards", [1, 2])
def test_steps_go_encoded_and_what_is_held_back_comes_later(
    told: Memory, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    mine, others = _grads(5, 1), _grads(5, 2)
    model, state, other = _two(monkeypatch, shards, "onebit", others, warmup_steps=1)
    came = [_step(model, grad) for grad in mine]
    saved = gcclient.state_dict()  # once the last step is settled
    other.join(20)
    assert other.error is None and not other.is_alive()
    for found, given in zip(came, other.given, strict=True):
        assert torch.equal(found, given), "all workers have the same bytes"
    assert torch.equal(came[0], mine[0] + others[0]), "the warm-up"
    assert not torch.equal(came[1], mine[1] + others[1])
    held = other.codec._held["weight", 0].settled
    lo, hi = part(N, shards, 0)
    assert held is not None
    left = sum(came)[lo:hi] + held - sum(mine)[lo:hi] - sum(others)[lo:hi]  # type: ignore[index]
    assert left.abs().max() < 1e-4
    sent = gcclient.stats()["bytes_within_node"]
    dense, short = ((N + 1) // 2 * 4, state._codec.codec.exact_bytes(N - N // 2)) if shards > 1 else (0, 0)
    assert dense + 4 * short <= sent <= dense + 4 * (short + 32)
    keys = [key for key in saved if "/node" in key]
    assert keys == [
        "rank 0/ddp.0/node",
        *(f"rank 0/ddp.0/node/weight[{a}:{b}]" for a, b in [part(N, 2, 1)] if shards > 1),
    ]
    assert state._codec.steps == other.codec.steps == 5


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("which", ["mine", "other"])
def test_a_void_step_leaves_residuals_as_they_were(
    told: Memory, monkeypatch: pytest.MonkeyPatch, shards: int, which: str
) -> None:
    """Of the worker without a shard too, which has no results of its own to tell by."""
    mine, others = _grads(5, 1), _grads(5, 2)
    (mine if which == "mine" else others)[2][5] = math.nan  # of the first shard
    model, state, other = _two(monkeypatch, shards, "onebit", others)
    kept = []
    for grad in mine:
        _step(model, grad)
        gcclient.state_dict()
        kept.append({k: h.settled.clone() for k, h in state._codec._held.items() if h.settled is not None})
    other.join(20)
    assert other.error is None
    assert other.counted == [True, True, False, True, True]
    if shards > 1:
        (one,) = kept[1]
        assert torch.equal(kept[1][one], kept[2][one]) and not torch.equal(kept[2][one], kept[3][one])
        assert kept[4][one].isfinite().all()
    assert all(h.settled is not None and h.settled.isfinite().all() for h in other.codec._held.values())


def test_a_failed_job_ends_the_wait_for_what_counts(told: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    model, state, _ = _two(monkeypatch, 2, "onebit", _grads(1, 2))
    told.daemon.silent = True
    failed = threading.Timer(0.5, lambda: sharded.failing(state.session)(RuntimeError("gone")))
    monkeypatch.setattr(sharded, "TOLD_WITHIN", 0.0)
    failed.start()
    with pytest.raises(RuntimeError, match="gone"):
        _step(model, _grads(1, 1)[0])
    assert state._codec.settled.wait(10)
    assert all(h.settled is None for h in state._codec._held.values())
    with pytest.raises(gcclient.GradcommError, match="gone"):
        gcclient.state_dict()


def test_it_is_agreed_on_and_goes_on_from_a_checkpoint(told: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = _grads(3, 1), _grads(3, 2)
    model, state, other = _two(monkeypatch, 2, "qsgd(bits=4)+ef", others, exclude=["x"], compression="fp16")
    labels = [m.label for m in told.daemon.heard[-1] if isinstance(m, DeclareDomain)]
    assert labels[0] == "ddp.0 in 2 shards a node, codec fp16, within nodes qsgd(bits=4)+ef, all but x"
    assert state._codec.origin == b"o" * 16, "what the daemon draws from"
    for grad in mine:
        _step(model, grad)
    saved = {k: v for k, v in gcclient.state_dict().items() if "/node" in k or k == "format"}
    held = state._codec.held()
    gcclient.shutdown()
    other.join(20)
    gcclient.init(0, 1, socket=told.daemon.socket, job="unit")
    gcclient.load_state_dict(saved)
    assert gcclient.state_dict().keys() == saved.keys(), "what is not declared yet is kept"
    _, again, _ = _two(monkeypatch, 2, "qsgd(bits=4)+ef", [])
    assert again._codec.steps == 3
    now = again._codec.held()
    assert now.about == held.about and all(torch.equal(v, now.values[k]) for k, v in held.values.items())
    for strict in (True, False):
        gcclient.shutdown()
        gcclient.init(0, 1, socket=told.daemon.socket, job="unit")
        gcclient.load_state_dict(saved, strict)
        if strict:
            with pytest.raises(gcclient.StateMismatch, match=r"'fp16' never does.*shutdown\(\) and init\(\) first"):
                _two(monkeypatch, 2, "fp16", [])
        else:
            _two(monkeypatch, 2, "fp16", [])
            assert gcclient.stats()["states_dropped"] == 1


def test_what_is_not_used_is_said(alone: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gcclient")
    gcclient.state(DistributedDataParallel(Net()), hierarchy="auto", node_codec="onebit")
    assert "node_codec='onebit' is not used: workers of a node send each other nothing here" in caplog.text
    with pytest.raises(ValueError, match="only with hierarchy"):
        gcclient.attach(DistributedDataParallel(Net()), node_codec="onebit")


def test_what_encodes_nothing_is_said(
    told: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gcclient")
    _two(monkeypatch, 2, "onebit", [], exclude=["weight"])
    assert "node_codec='onebit' encodes nothing of ddp.0" in caplog.text
