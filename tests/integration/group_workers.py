"""What the workers of test_groups.py do: torch's own collectives over the backend `gc`, in processes of their own.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient.api import current
from gcclient.places import SHAPES
from tests.integration.workers import digest, start, steps_until


def _labels() -> list[str]:
    return sorted(domain.declared.label for domain in current().domains.values())


def plain() -> dict[str, Any]:
    """Every collective; how many of them the daemon carried, and what differs from the exact result."""
    rank, wrong = start(), []
    size = dist.get_world_size()
    everyone, some = dist.new_group(backend="gc"), dist.new_group([0, 2], backend="gc")
    total = sum(range(1, size + 1))

    def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if got.dtype != wanted.dtype or not torch.equal(got, wanted):
            wrong.append(f"{what}: {got.flatten()[:4]} for {wanted.flatten()[:4]}")

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for shape in ((), (0,), (30, 1000)):
            tensor = torch.ones(shape, dtype=dtype) * (rank + 1)
            dist.all_reduce(tensor, group=everyone)
            check(f"sum {dtype} {shape}", tensor, torch.full(shape, total, dtype=dtype))
    tensor = torch.full((7,), float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=everyone)
    check("average", tensor, torch.full((7,), (size - 1) / 2))
    works = []
    for turn in range(10):
        works.append((turn, torch.full((4,), float(turn + rank))))
        works[-1] = (*works[-1], dist.all_reduce(works[-1][1], group=everyone, async_op=True))
    for turn, tensor, work in reversed(works):
        work.wait()
        if not (work.is_completed() and work.is_success()):
            wrong.append("a work that is over does not say so")
        check("async", tensor, torch.full((4,), float(turn * size + sum(range(size)))))
        check("future", work.get_future().wait()[0], tensor)
    strided = torch.zeros(4, 6)[:, ::2].fill_(float(rank + 1))
    dist.all_reduce(strided, group=everyone)
    check("strided", strided, torch.full((4, 3), float(total)))
    if rank in (0, 2):
        tensor = torch.full((9,), float(rank + 1))
        dist.all_reduce(tensor, group=some)
        check("of some", tensor, torch.full((9,), 4.0))
    carried = gcclient.stats()["calls"]
    # From here on it is gloo.
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=everyone)
    check("maximum", tensor, torch.full((3,), float(size - 1)))
    for whole in (torch.zeros(4, 6), torch.zeros(6, 4).t()):
        strided = whole[:, ::2].fill_(float(rank))
        work = dist.all_reduce(strided, dist.ReduceOp.MAX, group=everyone, async_op=True)
        check("strided maximum", work.get_future().wait()[0], torch.full((4, 3), float(size - 1)))
        if not (work.is_completed() and work.is_success()):
            wrong.append("a strided maximum that is over does not say so")
        dist.reduce(strided, 1, group=everyone)
        dist.broadcast(strided.mul_(2), 1, group=everyone)
        check("strided reduce and broadcast", strided, torch.full((4, 3), float(size * (size - 1) * 2)))
        check("memory in between", whole[:, 1::2], torch.zeros(4, 3))
    flags = torch.tensor([rank == 1, False])
    dist.all_reduce(flags, group=everyone)
    check("bool", flags, torch.tensor([True, False]))
    dist.broadcast(tensor.fill_(rank), 2, group=everyone)
    check("broadcast", tensor, torch.full((3,), 2.0))
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=everyone)
    check("all_gather", torch.stack(parts)[:, 0], torch.arange(float(size)))
    part = torch.zeros(1)
    dist.reduce_scatter(part, [torch.full((1,), float(r)) for r in range(size)], group=everyone)
    check("reduce_scatter", part, torch.full((1,), float(rank * size)))
    if rank < 2:
        if rank:
            dist.recv(tensor, 0, group=everyone)
            check("recv", tensor, torch.full((3,), 5.0))
        else:
            dist.send(tensor.fill_(5.0), 1, group=everyone)
    dist.barrier(group=everyone)
    behind = gcclient.stats()["calls"] - carried
    labels = _labels()
    gcclient.shutdown()
    return {"wrong": wrong, "carried": carried, "behind": behind, "labels": labels, "name": dist.get_backend(everyone)}


def lengths() -> dict[str, Any]:
    """All-reduces of more shapes than have places of their own, and one of which ranks have different shapes."""
    rank, size, wrong = start(), dist.get_world_size(), []
    group = dist.new_group(backend="gc")
    ramp = torch.arange(2000.0)
    for elements in range(1000, 1000 + SHAPES + 30):
        tensors = [ramp[:elements] * (rank + 1) + turn for turn in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for turn, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            if not torch.equal(tensor, ramp[:elements] * sum(range(1, size + 1)) + turn * size):
                wrong.append(f"{elements} elements, turn {turn}")
    (domain,) = current().domains.values()
    sections, refused = len(domain.sections), ""
    try:
        dist.all_reduce(torch.ones(10, 20 if rank == 3 else 21), group=group)
    except gcclient.TensorMismatch as error:
        refused = str(error)
    gcclient.shutdown()
    return {"wrong": wrong, "sections": sections, "refused": refused}


def _net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(50 * step + rank))


def _train(model: nn.Module, rank: int, steps: int = 4, skip: Any = None) -> list[torch.Tensor]:
    """Returns the parameters, whole; ``skip(step)`` is told before each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        keep = skip(step) if skip is not None else False
        model(_batch(rank, step)).pow(2).mean().backward()
        if not keep:
            optimizer.step()
            optimizer.zero_grad()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def ddp() -> dict[str, Any]:
    """DDP over gloo, over `gc`, and over `gc` with its gradients attached."""
    rank = start()
    group = dist.new_group(backend="gc")
    theirs = _train(DistributedDataParallel(_net(), bucket_cap_mb=0.01), rank)  # type: ignore[arg-type]
    model = DistributedDataParallel(_net(), process_group=group, bucket_cap_mb=0.01)  # type: ignore[arg-type]
    ours = _train(model, rank)
    carried = gcclient.stats()["calls"]
    attached = DistributedDataParallel(_net(), process_group=group)
    gcclient.attach(attached, compression="topk(ratio=0.1)")
    compressed = _train(attached, rank)
    result = {
        "difference": _difference(ours, theirs),
        "carried": carried,
        "calls": gcclient.stats()["calls"] - carried,
        "steps": gcclient.stats()["steps"],
        "compressed": _difference(compressed, theirs),
        "hashes": [digest(*ours), digest(*compressed)],
        "labels": _labels(),
    }
    gcclient.shutdown()
    return result


def _sharded(mesh: Any) -> nn.Module:
    net = _net()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hsdp() -> dict[str, Any]:
    """fully_shard over two replicas of two shards: over gloo, over `gc`, accumulated, and attached."""
    rank = start()
    names = ("replicate", "shard")
    theirs = _train(_sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=names)), rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={"replicate": "gc"})
    ours = _train(_sharded(mesh), rank)
    carried = gcclient.stats()["calls"]
    model = _sharded(mesh)

    def every_other(step: int) -> bool:
        model.set_requires_all_reduce(step % 2 == 1)  # type: ignore[operator]
        return step % 2 == 0

    _train(model, rank, skip=every_other)
    accumulated = gcclient.stats()["calls"] - carried
    attached = _sharded(mesh)
    gcclient.attach(attached, compression="topk(ratio=0.1)")
    before = gcclient.stats()["calls"]
    compressed = _train(attached, rank)
    result = {
        "difference": _difference(ours, theirs),
        "carried": carried,
        "accumulated": accumulated,
        "attached": gcclient.stats()["calls"] - before,
        "compressed": _difference(compressed, theirs),
        "hashes": [digest(*ours), digest(*compressed)],
        "labels": _labels(),
        "left": len(gcclient.backend.marked),
    }
    refused = _sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    try:
        gcclient.attach(refused)
    except ValueError as error:
        result["refused"] = str(error)
    gcclient.shutdown()
    return result


def hsdp_in_part() -> dict[str, Any]:
    """Two layers compressed by codecs of their own and one excluded, after a warm-up of two steps: how far the
    gradients of each are from gloo's."""
    rank = start()
    names = ("replicate", "shard")
    theirs = _sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    ours = _sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={"replicate": "gc"}))
    split = ""
    try:
        gcclient.attach(ours, exclude=["*.bias"])
    except ValueError as error:
        split = str(error)
    gcclient.attach(ours, {"*": "topk(ratio=0.05)", "2.*": "fp16"}, exclude=["4"], warmup_steps=2)
    far: list[dict[str, float]] = []
    for step in range(4):
        gradients = []
        for model in (theirs, ours):
            model.zero_grad()
            model(_batch(rank, step)).pow(2).mean().backward()
            gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})  # type: ignore[union-attr]
        exact, got = gradients
        far.append({n: float((got[n] - exact[n]).norm() / exact[n].norm()) for n in exact})
    declared = [(d.declared.label.split()[0], d.declared.codec) for d in current().domains.values()]
    gcclient.shutdown()
    return {"far": far, "split": split, "declared": sorted(declared)}


def hsdp_until(stop: str, pause: float, **options: Any) -> dict[str, Any]:
    """Train replicas of one shard until the file ``stop`` is there; ``pause`` seconds before each step."""
    rank = start()
    names = ("replicate", "shard")
    model = _sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=names, backend_override={"replicate": "gc"}))
    gcclient.attach(model, **options)
    for step in steps_until(stop):
        time.sleep(pause)
        model.zero_grad()
        model(_batch(rank, step)).pow(2).mean().backward()
    advice = gcclient.advise()
    stats = gcclient.stats()
    grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    gcclient.shutdown()
    return {
        "steps": step + 1, "counted": stats["steps"], "hash": digest(*grads), "rows": len(advice.rows),
    }  # fmt: skip


def fsdp1() -> dict[str, Any]:
    """FSDP1's hybrid sharding with the group between nodes given."""
    rank = start()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def trained(backend: str) -> list[torch.Tensor]:
        outer = [dist.new_group([r, r + 2], backend=backend) for r in (0, 1)][rank % 2]
        model = FullyShardedDataParallel(
            _net(), process_group=(inner, outer), sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"), use_orig_params=True,
        )  # fmt: skip
        _train(model, rank)
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    theirs = trained("gloo")
    ours = trained("gc")
    result = {"difference": _difference(ours, theirs), "hash": digest(*ours), "carried": gcclient.stats()["calls"]}
    gcclient.shutdown()
    return result


def fsdp2() -> dict[str, Any]:
    """fully_shard within two nodes, replicas averaged by the hook: plain, accumulated, compressed."""
    rank = start()
    shards = dist.get_world_size() // 2
    names = ("replicate", "shard")
    both = init_device_mesh("cpu", (2, shards), mesh_dim_names=names)
    theirs = _train(_sharded(both), rank)

    def trained(compression: Any = None, **more: Any) -> tuple[list[torch.Tensor], gcclient.Replicas]:
        model = _sharded(both["shard"])
        replicas = gcclient.fsdp2(model, compression)
        return _train(model, rank, **more), replicas

    ours, replicas = trained()
    calls = gcclient.stats()["calls"]
    hashes, waited = [digest(*ours)], [replicas.waited]

    def accumulated(replicate: Any) -> list[torch.Tensor]:
        model = _sharded(both if replicate is None else both["shard"])
        found = None if replicate is None else replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(2):
            with _alone(model) if found is None else found.accumulate():
                model(_batch(rank, 0)).pow(2).mean().backward()
            model(_batch(rank, 1)).pow(2).mean().backward()
            model(_batch(rank, 2)).pow(2).mean().backward()  # added to what is there: its hook has to wait
            optimizer.step()
            optimizer.zero_grad()
        if found is not None:
            waited.append(found.waited)
        return [p.full_tensor().detach() for p in model.parameters()]

    reference, exact = accumulated(None), accumulated(gcclient.fsdp2)
    compressed, _ = trained("topk(ratio=0.1)")
    hashes.append(digest(*compressed))
    in_part, _ = trained({"*": "none", "2": "topk(ratio=0.05)"})
    hashes.append(digest(*in_part))
    far = [float((a - b).abs().max()) for a, b in zip(in_part, ours, strict=True)]
    labels = [] if gcclient.stats()["node"] == "" else _labels()
    ranks = list(replicas.ranks)
    refused = []
    for model in (_sharded(both), _net()):
        try:
            gcclient.fsdp2(model)
        except (TypeError, ValueError) as error:
            refused.append(str(error))
    gcclient.shutdown()
    return {
        "difference": _difference(ours, theirs),
        "accumulated": _difference(exact, reference),
        "compressed": _difference(compressed, theirs),
        "in_part": far,
        "hashes": hashes,
        "waited": waited,
        "calls": calls,
        "labels": labels,
        "ranks": ranks,
        "refused": refused,
    }


@contextmanager
def _alone(model: Any) -> Iterator[None]:
    """torch's own way to accumulate."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
