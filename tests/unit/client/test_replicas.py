"""The hook of `fully_shard` in a world of one: when it waits, and when the backward pass does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gcclient
from gcclient import replicas
from gcclient.api import current
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.older_torch import older


@pytest.fixture
def alone(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """Every rank has the same shard as another one, which is itself."""
    real = replicas._replicas

    def twice(place: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranks, places = real(place, size)
        return ranks * 2, places

    by_daemon = replicas._by_daemon
    monkeypatch.setattr(replicas, "_replicas", twice)
    monkeypatch.setattr(replicas, "_by_daemon", lambda session, ranks, codecs: by_daemon(session, (0,), codecs))
    return alone


def _sharded(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    fully_shard(net[0], mesh=mesh, **more)
    return fully_shard(net, mesh=mesh, **more)


def _step(net: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    net(torch.ones(2, 3, dtype=dtype)).pow(2).sum().backward()
    return [p.grad.full_tensor().clone() for p in net.parameters()]


def test_backward_goes_on_while_averages_are_awaited(alone: FakeDaemon) -> None:
    net = _sharded()
    wanted = _step(net)
    net.zero_grad()
    made = gcclient.fsdp2(net)
    assert all(torch.equal(a, b) for a, b in zip(_step(net), wanted, strict=True))
    assert (made.waited, made._under_way) == (0, [])
    labels = [d.declared.label for d in current().domains.values()]
    assert labels == ["exact", "fsdp.0"]


@pytest.mark.parametrize("version", ["2.8", "2.11"])
def test_an_older_torch(alone: FakeDaemon, version: str) -> None:
    net = _sharded()
    wanted = _step(net)
    net.zero_grad()
    with older(net, version):
        made = gcclient.fsdp2(net, {"*": "none"})
    assert all(torch.equal(a, b) for a, b in zip(_step(net), wanted, strict=True))
    assert (made.waited, made._under_way) == (0, [])
    (domain,) = (d for d in current().domains.values() if d.declared.label == "fsdp.0")
    assert sorted(s.section.tensors[0].name for s in domain.sections) == ["(root)", "0"]


def test_what_is_made_older_may_be_as_old_itself(alone: FakeDaemon) -> None:
    net = _sharded()
    with older(net, "2.11"), older(net, "2.11"), older(net, "2.8"):
        made = gcclient.fsdp2(net, {"*": "none"})
    _step(net)
    assert (made.waited, made._under_way) == (0, [])


@pytest.mark.parametrize("case", ["a gradient is there", "float64", "cast", "factor", "hook"])
def test_where_torch_reads_the_shard_at_once_the_hook_waits(alone: FakeDaemon, case: str) -> None:
    dtype = torch.float64 if case == "float64" else torch.float32
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if case == "cast" else MixedPrecisionPolicy()
    net, same = _sharded(dtype, mp_policy=policy), _sharded(dtype, mp_policy=policy)
    for each in (net, same):
        if case == "factor":
            each.set_gradient_divide_factor(2.0)
            each[0].set_gradient_divide_factor(2.0)
        if case == "hook":
            for p in each.parameters():
                p.register_post_accumulate_grad_hook(lambda p: p.grad._local_tensor.mul_(2))
    made = gcclient.fsdp2(net)
    waited = 0
    for again in range(2 if case == "a gradient is there" else 1):
        ours, theirs = _step(net, dtype), _step(same, dtype)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        waited += 0 if case == "a gradient is there" and not again else 2
    assert made.waited == waited


def test_gradients_add_up_within_accumulate(alone: FakeDaemon) -> None:
    net, same = _sharded(), _sharded()
    made = gcclient.fsdp2(net)
    calls = gcclient.stats()["calls"]
    with made.accumulate():
        net(torch.ones(2, 3)).pow(2).sum().backward()
    assert gcclient.stats()["calls"] == calls
    ours = _step(net)
    theirs = [2 * g for g in _step(same)]
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert gcclient.stats()["calls"] == calls + 2


def test_codecs_by_pattern(alone: FakeDaemon) -> None:
    """What has a codec of its own has a domain of its own."""
    net, same = _sharded(), _sharded()
    gcclient.fsdp2(net, {"*": "fp16", "0": "bf16"})
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(_step(net), _step(same), strict=True))
        net.zero_grad()
        same.zero_grad()
    domains = [d for d in current().domains.values() if d.declared.label.startswith("fsdp")]
    found = [(d.declared.codec, [s.section.tensors[0].name for s in d.sections], d.step) for d in domains]
    assert found == [("fp16", ["(root)"], 2), ("bf16", ["0"], 2)]
    with pytest.warns(UserWarning, match=r"compression: 'layers\.\*' matches the name of no parameter"):
        gcclient.fsdp2(_sharded(), {"layers.*": "fp16"})


def test_a_pattern_that_would_split_what_is_reduced_together_is_refused(alone: FakeDaemon) -> None:
    with pytest.raises(ValueError, match=r"compression: '\*\.bias' would split the fully_shard group '\(root\)'"):
        gcclient.fsdp2(_sharded(), {"*.bias": "fp16"})
    assert [d.declared.label for d in current().domains.values()] == []


def test_a_failure_comes_out_of_backward(alone: FakeDaemon) -> None:
    net = _sharded()
    gcclient.fsdp2(net)
    _step(net)
    net.zero_grad()
    current().fail(gcclient.PeerLost("node b is gone"))
    with pytest.raises((gcclient.PeerLost, RuntimeError), match="node b is gone"):
        _step(net)


def test_a_backward_pass_after_one_that_ended_by_an_exception_waits_too(alone: FakeDaemon) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ZeroDivisionError

    made = replicas.Replicas(nn.Linear(1, 1), (0, 1), lambda shard, name: _Slow(shard))  # type: ignore[arg-type,return-value]
    unit: Any = SimpleNamespace(
        force_sum_reduction_for_comms=False, gradient_divide_factor=None, _orig_dtype=None, fsdp_params=[]
    )
    average = made.hook(unit, "layer")
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: average(p.grad))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        (Fails.apply(weights[0]) + weights[1]).sum().backward()
    assert len(made._under_way) == 1
    ((lost, _),) = made._under_way
    weights[1].grad = None
    weights[1].sum().backward()
    assert weights[1].grad is not None and weights[1].grad.tolist() == [2.0] * 3
    assert made._under_way == [] and lost.over


class _Slow:
    """An average that is there when it is waited for: twice the shard."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self.over = False

    def finish(self) -> None:
        self.shard.mul_(2)
        self.over = True


def test_meshes_of_different_sizes_are_refused(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcclient.api.push_pull", lambda table, average: torch.tensor([[0, 2], [1, 2], [0, 1]]))
    with pytest.raises(ValueError, match=r"\[2, 2, 1\] ranks"):
        replicas._replicas(0, 2)
    monkeypatch.setattr("gcclient.api.push_pull", lambda table, average: torch.tensor([[0, 2], [1, 2], [0, 2], [1, 2]]))
    assert replicas._replicas(1, 2) == ((1, 3), (0, 1, 0, 1))


def test_a_model_without_replicas_exchanges_nothing(joined: FakeDaemon, torch_world: None) -> None:
    net = _sharded()
    made = gcclient.fsdp2(net)
    _step(net)
    assert made.ranks == (0,) and [d.declared.label for d in current().domains.values()] == ["exact"]
    with pytest.raises(TypeError, match="fully_shard was applied to"):
        gcclient.fsdp2(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="compression=3"):
        gcclient.fsdp2(net, 3)  # type: ignore[arg-type]
