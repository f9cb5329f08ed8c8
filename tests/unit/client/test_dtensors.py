"""Tensors whose elements are not in memory of their own, DTensors above all: refused by name, before anything is sent.

What may live here: such tensors given to everything that takes tensors, in a world of one. What may not: models of
them that are exchanged (`test_replicas.py`, `test_attaching.py`, `tests/integration/test_meshes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gcclient
from gcclient import device, objects, optimizer
from gcclient.api import current
from gcclient.hierarchy import Nodes
from tests.unit.client.fake import FakeDaemon

WHY = "it is a DTensor, which has no memory of its own: give tensor.to_local\\(\\)"


class Subclass(torch.Tensor):
    """With memory, as most are."""


def _dtensor(*shape: int) -> torch.Tensor:
    return distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (1,)), [Shard(0)])


def _sharded() -> Any:
    return fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))


def test_what_has_memory_is_not_refused(alone: FakeDaemon) -> None:
    local = _dtensor(3, 2).to_local()
    for tensor in (local, torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Subclass)):
        assert device.elsewhere(tensor) == ""
        assert torch.equal(gcclient.push_pull(tensor), tensor.detach())
    assert device.elsewhere(torch.empty(0).as_subclass(Subclass)) == ""
    for tensor in (_dtensor(3, 2), _dtensor(0, 2), nn.Parameter(_dtensor(3, 2))):
        assert "to_local()" in device.elsewhere(tensor)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_others_without_memory_have_no_local_part() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    assert device.elsewhere(fake) == (
        "it is a FakeTensor, which has no memory of its own: give a plain torch.Tensor of its values"
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda t: gcclient.push_pull(t, "w"),
        lambda t: gcclient.push_pull_async_(t),
        lambda t: gcclient.grouped_allreduce([t]),
        lambda t: gcclient.allgather(t),
        lambda t: gcclient.state(nn.ParameterDict({"w": t})),
        lambda t: gcclient.DistributedOptimizer(torch.optim.SGD([t], 0.1)),
    ],
    ids=["push_pull", "asynchronous", "allreduce", "allgather", "state", "optimizer"],
)
def test_it_is_refused_before_anything_is_declared(alone: FakeDaemon, call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=WHY):
        call(nn.Parameter(_dtensor(3, 2)))
    assert not alone.domains and not current().models


def test_a_sharded_model_is_refused_by_its_optimizer(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=f"tensor 'bias' cannot be exchanged: {WHY}.*gcclient.fsdp2 or gcclient.attach"):
        gcclient.DistributedOptimizer(inner, model.named_parameters())
    monkeypatch.setattr(optimizer, "nodes_of", lambda *_: Nodes((0,), 0, 1, (0,), (1, 1)))
    with pytest.raises(TypeError, match=WHY):
        gcclient.DistributedOptimizer(inner, model.named_parameters(), hierarchy=True)
    assert not alone.domains and not current().models


def test_broadcasts_and_values_refuse_it_on_every_rank(alone: FakeDaemon) -> None:
    """By what ranks tell each other before any of it travels."""
    model = _sharded()
    with pytest.raises(TypeError, match=f"'weight' on rank 0 cannot be broadcast: {WHY}"):
        gcclient.broadcast_parameters(model.state_dict())
    with pytest.raises(TypeError, match=WHY):
        gcclient.broadcast(_dtensor(2))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    with pytest.raises(TypeError, match=rf"rank 0: a tensor of shape \[2, 3\] cannot be sent to other ranks: {WHY}"):
        gcclient.broadcast_optimizer_state(adam)
    for call in (gcclient.broadcast_object, gcclient.allgather_object):
        with pytest.raises(TypeError, match=rf"rank 0: .*{WHY}"):
            call({"a": [_dtensor(2)]})
    assert gcclient.allgather_object(1) == [1]


def test_so_it_is_without_a_daemon(torch_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_DISABLE", "1")
    gcclient.init(0, 1)
    try:
        model = _sharded()
        with pytest.raises(TypeError, match=WHY):
            gcclient.push_pull(_dtensor(2))
        with pytest.raises(TypeError, match=WHY):
            gcclient.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(TypeError, match=WHY):
            gcclient.broadcast_parameters(model.state_dict())
    finally:
        gcclient.shutdown()


def test_whatever_keeps_a_value_from_being_encoded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise OSError("gone")

    def fails(tensor: torch.Tensor) -> Any:
        raise RuntimeError("the device has failed")

    assert objects.to_text(Odd(a=1)) == (b'{"error": "a value cannot be sent to other ranks: gone"}', [])
    monkeypatch.setattr(objects, "host_bytes", fails)
    for value in (torch.ones(2), {"a": (torch.ones(2),)}):
        with pytest.raises(TypeError, match="a value cannot be sent to other ranks: the device has failed"):
            objects.decode(objects.encode(value))
