"""Which modules can be attached, and which of a module's memory is marked. Whole trainings: tests/integration."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import backend
from gcclient.api import current
from gcclient.attaching import _alone, _Marking
from gcclient.collectives import Collectives
from gcproto.messages import DeclareDomain
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.older_torch import older


def _labels(daemon: FakeDaemon) -> list[tuple[str, str]]:
    return [(m.label, m.codec) for m in daemon.heard[-1] if isinstance(m, DeclareDomain)]


def _sharded(**override: str) -> Any:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"), backend_override=override)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def test_ddp_gets_its_hook(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=dist.new_group(backend="gc"))
    options: dict[str, Any] = {"exclude": ["bias"], "warmup_steps": 3, "quality": "safe"}
    assert gcclient.attach(model, "fp16", backward_passes_per_step=2, **options) is not None
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert gcclient.stats()["steps"] == 1
    assert _labels(alone) == [("ddp.0", "fp16")]
    (declared,) = (m for m in alone.heard[-1] if isinstance(m, DeclareDomain))
    assert (declared.exclude, declared.warmup, declared.quality) == (("bias",), 3, "safe")


def test_every_sharded_module_is_a_tensor_of_its_own(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _sharded(replicate="gc")
    assert gcclient.attach(net, "fp16") is None
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    net(torch.ones(1, 3)).sum().backward()
    assert _labels(alone) == [("fsdp.0", "fp16")]
    (domain,) = (d for d in current().domains.values() if d.declared.label == "fsdp.0")
    tensors = {s.section.tensors[0].name: s.section.tensors[0].shape for s in domain.sections}
    assert tensors == {"(root)": (10,), "0": (16,)}
    assert backend.marked == {}


def test_an_older_torch(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _sharded(replicate="gc")
    with older(net, "2.8"), pytest.raises(RuntimeError, match=r"attach\(\) of modules .* needs torch 2\.9 or newer"):
        gcclient.attach(net, "fp16")
    assert _labels(alone) == []
    with older(net, "2.11"):
        assert gcclient.attach(net, {"0": "fp16", "(root)": "none"}) is None
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    net(torch.ones(1, 3)).sum().backward()
    assert sorted(_labels(alone)) == [("fsdp.0", "none"), ("fsdp.1", "fp16")]


def test_options_of_sharded_modules(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a codec of its own has a domain of its own; a step of the training is one of it for each module."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": "gc"})
    net: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    for layer in net[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    gcclient.attach(net, {"*": "fp16", "1.*": "bf16"}, exclude=["2.*"], warmup_steps=4)
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
    declared = [m for m in alone.heard[-1] if isinstance(m, DeclareDomain)]
    assert [(m.label, m.codec, m.exclude, m.warmup) for m in declared] == [
        ("fsdp.0", "fp16", ("(root)",), 8), ("fsdp.1", "bf16", (), 4),
    ]  # fmt: skip
    domains = {d.declared.label: d for d in current().domains.values()}
    assert [domains[f"fsdp.{n}"].step for n in (0, 1)] == [4, 2]
    assert {s.section.tensors[0].name for s in domains["fsdp.0"].sections} == {"(root)", "0"}


def test_with_a_quality_a_backward_pass_is_a_step(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which plans can be made."""
    net, same = _sharded(replicate="gc"), _sharded(replicate="gc")
    same.load_state_dict(net.state_dict())
    gcclient.attach(net, "fp16", quality="safe", warmup_steps=4)
    (domain,) = (d for d in current().domains.values() if d.declared.label == "fsdp.0")
    declared = domain.declared
    assert (declared.quality, declared.scoped, declared.warmup) == ("safe", True, 5)
    for _ in range(3):
        same(torch.ones(1, 3)).sum().backward()
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    for _ in range(3):
        net(torch.ones(1, 3)).sum().backward()
    # In the first pass tensors are declared, each with a step of its own.
    assert domain.step == domain.closed == gcclient.stats()["steps"] == 4
    for a, b in zip(net.parameters(), same.parameters(), strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


def test_where_steps_are_committed_no_pass_can_be_one(daemon: FakeDaemon, torch_world: None) -> None:
    """A result comes once its step is over, and torch waits for it in the middle of a pass."""
    daemon.commits = True
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    try:
        with pytest.raises(ValueError, match=r"quality='fast': automatic plans for fully_shard need on_loss='fail'"):
            gcclient.attach(_sharded(replicate="gc"), quality="fast")
        gcclient.attach(_sharded(replicate="gc"))
    finally:
        gcclient.shutdown()


def test_a_pattern_that_would_split_what_is_reduced_together_is_refused(alone: FakeDaemon) -> None:
    for given in ({"exclude": ["*.bias"]}, {"compression": {"*.bias": "fp16"}}):
        with pytest.raises(
            ValueError, match=r"would split the fully_shard group '\(root\)'.*'1.bias' match and '1.weight'"
        ):
            gcclient.attach(_sharded(replicate="gc"), **given)
    assert _labels(alone) == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"warmup_steps": 500_001}, ValueError, r"warmup_steps=500001: expected 0\.\.500000"),
        ({"compression": {"0": 3}}, TypeError, "compression=3"),
        ({"compression": {3: "fp16"}}, TypeError, "a pattern in compression"),
        ({"exclude": "0"}, TypeError, "exclude='0'"),
        ({"quality": "good"}, ValueError, "quality=good: expected one of safe, balanced, fast"),
    ],
)
def test_options_that_are_none(alone: FakeDaemon, given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gcclient.attach(_sharded(replicate="gc"), **given)


def test_codecs_by_pattern_are_for_sharded_modules(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=dist.new_group(backend="gc"))
    with pytest.raises(TypeError, match=r"compression=\{'weight': 'fp16'\}"):
        gcclient.attach(model, {"weight": "fp16"})


def test_a_module_is_attached_for_one_job(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    once, twice = _sharded(replicate="gc"), _sharded(replicate="gc")
    for net in (once, twice):
        gcclient.attach(net, "fp16")
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    once(torch.ones(1, 3)).sum().backward()
    gcclient.shutdown()
    first = _labels(alone)
    gcclient.init(0, 1, socket=alone.socket, job="again")
    with pytest.raises((gcclient.NotInitialized, RuntimeError), match="was shut down"):
        once(torch.ones(1, 3)).sum().backward()
    assert _labels(alone) == first, "nothing of it comes into the new job"
    backend.marked.clear()
    gcclient.attach(twice, "bf16")
    twice(torch.ones(1, 3)).sum().backward()
    assert _labels(alone) == [*first, ("fsdp.0", "bf16")] and backend.marked == {}


def test_a_ddp_model_is_attached_again_in_the_next_job(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    gcclient.attach(model, "fp16")
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="is attached already"):
        gcclient.attach(model, "bf16")
    assert _labels(alone) == [("ddp.0", "fp16")], "found before anything is declared"
    gcclient.shutdown()
    gcclient.init(0, 1, socket=alone.socket, job="again")
    with pytest.raises(RuntimeError, match=r"was shut down|not initialised"):
        model(torch.ones(1, 3)).sum().backward()
    state = gcclient.attach(model, "bf16")
    model(torch.ones(1, 3)).sum().backward()
    assert state is not None and state.session is current() and gcclient.stats()["steps"] == 1
    assert _labels(alone) == [("ddp.0", "fp16"), ("ddp.0", "bf16")]


def test_a_ddp_model_with_a_hook_of_somebody_elses_is_refused_before_anything_is_declared(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    declared = _labels(alone)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        gcclient.attach(model)
    assert _labels(alone) == declared


def test_what_is_reduced_besides_stays_lossless(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = dist.new_group(backend="gc")
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    gcclient.attach(_sharded(replicate="gc"), "fp16")
    dist.all_reduce(torch.ones(10), group=group)
    assert (f"group.{group.known_as}.0", "none") in _labels(alone)


class _Inner:
    """torch's own."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def test_memory_that_was_not_reduced_is_unmarked_with_the_next(joined: FakeDaemon) -> None:
    collectives = Collectives(current(), (0,))
    marking = _Marking(_Inner(), partial(_alone, collectives, collectives.domain("fsdp", "")), "layer")
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    kept = [marking.allocate((n,), **options) for n in (8, 4)]
    assert list(backend.marked) == [(kept[1].data_ptr(), 4)]
    marking.allocate((8,), **options)
    assert [numel for _, numel in backend.marked] == [8]
    backend.marked.clear()


def test_what_comes_into_the_place_of_memory_that_was_not_reduced_is_not_the_modules(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = dist.new_group(backend="gc")
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    collectives = Collectives(current(), (0,))
    domain = collectives.domain("fsdp", "fp16")
    marking = _Marking(_Inner(), partial(_alone, collectives, domain), "layer")
    place = np.zeros(5, np.float32)  # memory that a tensor gives back and another one gets
    monkeypatch.setattr(_Inner, "allocate", lambda self, size, *, dtype, device: torch.from_numpy(place))
    kept: Any = marking.allocate((5,), dtype=torch.float32, device=torch.device("cpu"))
    dist.all_reduce(kept, group=group)
    assert domain.step == 1, "the module's"
    del kept
    marking.allocate((5,), dtype=torch.float32, device=torch.device("cpu"))
    dist.all_reduce(torch.from_numpy(place), group=group)
    assert domain.step == 1 and backend.marked == {}


@pytest.mark.parametrize(
    "given",
    [
        {"whole": True},
        {"groups": 2},
        {"scaler": object()},
        {"audit": gcclient.Audit()},
        {"backward_passes_per_step": 2},
        {"hierarchy": True},
        {"node_codec": "onebit"},
    ],
)
def test_what_only_ddp_has_is_refused_elsewhere(alone: FakeDaemon, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}=.*DistributedDataParallel only"):
        gcclient.attach(_sharded(replicate="gc"), **given)


def test_other_modules_and_other_meshes_are_refused(alone: FakeDaemon) -> None:
    with pytest.raises(TypeError, match="fully_shard was applied to"):
        gcclient.attach(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'\(root\)' is not replicated through the backend 'gc'"):
        gcclient.attach(_sharded())
    with pytest.raises(TypeError, match="compression=3"):
        gcclient.attach(_sharded(replicate="gc"), 3)  # type: ignore[arg-type]
