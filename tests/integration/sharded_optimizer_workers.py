"""What the workers of test_sharded_optimizer.py do: wrapped optimizers whose node sums first, beside those without.

What may live here: functions that return plain data. What may not: assertions that the parent can make, training that
`optimizer_workers.py` has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gcclient
from gcclient.api import current
from tests.integration.ddp_workers import flatten, make_batch, make_model
from tests.integration.hierarchy_workers import SHAPES, Made, _average, _whole
from tests.integration.optimizer_workers import make_sgd, train, wrap
from tests.integration.workers import digest, start

NAMES = [f"weights.{i}" for i in range(len(SHAPES))]
GROUPINGS: list[Any] = [None, 2, [NAMES[3:], NAMES[:3]]]


def _wrapped(net: nn.Module, hierarchy: bool = True, **options: Any) -> Any:
    return wrap(net, rate=0.0, momentum=0.0, hierarchy=hierarchy, **options)


def _backward(net: nn.Module, grads: list[torch.Tensor], which: list[int] | None = None) -> None:
    """Gradients of all parameters, or of some, computed in that order."""
    weights: Any = list(net.parameters())
    for i in range(len(grads)) if which is None else which:
        (weights[i] * grads[i].to(weights[i].dtype)).sum().backward()


def lossless() -> dict[str, Any]:
    """Averages and sums of whole numbers, by groupings and dtypes: what differs from the exact ones, and from those
    without shards; bytes handed over, and how many collectives of the node that took."""
    rank = start()
    size = dist.get_world_size()
    wrong, differ, bytes_, bundles, hashes = 0, 0, [], [], []
    for dtype in (torch.float32, torch.bfloat16):
        for groups in GROUPINGS:
            for op in (gcclient.Average, gcclient.Sum):
                # Sums of as many must be whole numbers that a half can hold.
                times = size if op is gcclient.Average else 1
                nets = [Made(dtype), Made(dtype)]
                optimizers = [_wrapped(net, way, groups=groups, op=op) for net, way in zip(nets, (True, False))]  # noqa: B905
                for step in range(3):
                    made, found = _whole(rank, step, times), []
                    for net, optimizer in zip(nets, optimizers, strict=True):
                        optimizer.zero_grad()
                        before = gcclient.stats()["bytes_pushed"]
                        _backward(net, made, sorted(range(len(SHAPES)), key=lambda i: (i * (3 + 2 * rank) + rank) % 7))
                        optimizer.step()
                        after = gcclient.stats()
                        found.append(flatten(net, grads=True).double())
                        bytes_.append(after["bytes_pushed"] - before)
                    exact = _average(lambda r, s=step, t=times: _whole(r, s, t))
                    exact *= 1 if op is gcclient.Average else size
                    wrong += int((found[0] != exact).sum())
                    differ += int((found[0] != found[1]).sum())
                    hashes.append(digest(found[0]))
                bundles.append(len(optimizers[0]._averaging.layout.bundles))
    labels = [d.declared.label for d in current().domains.values() if d.declared.scoped]
    gcclient.shutdown()
    elements = sum(math.prod(s) for s in SHAPES)
    return {
        "wrong": wrong, "differ": differ, "bytes": bytes_[:2], "hashes": hashes, "labels": labels[:2],
        "bundles": bundles, "elements": elements,
    }  # fmt: skip


def unused() -> dict[str, Any]:
    """Parameters that some ranks use and others do not, another set in every step, in an order of each rank's own."""
    rank = start()
    size = dist.get_world_size()
    wrong, missing, hashes = 0, [], []
    for groups in GROUPINGS:
        net = Made()
        optimizer = _wrapped(net, groups=groups)
        for step in range(8):
            users = [
                {r for r in range(size) if (r * 3 + i * 5 + step * 7) % 4 > 1 and (i + step) % 5} for i in range(7)
            ]
            made = [_whole(r, step, size) for r in range(size)]
            optimizer.zero_grad()
            mine = [i for i in range(7) if rank in users[i]]
            _backward(net, made[rank], mine[:: -1 if rank % 2 else 1])
            optimizer.step()
            for i, parameter in enumerate(net.parameters()):
                if not users[i]:
                    wrong += parameter.grad is not None
                    continue
                exact = sum(made[r][i] for r in users[i]) / size
                wrong += parameter.grad is None or not torch.equal(parameter.grad, exact)  # type: ignore[arg-type]
            missing.append(sum(not u for u in users))
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            hashes.append(digest(torch.cat([g.flatten() for g in grads])) if grads else "")
    steps = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {"wrong": int(wrong), "missing": missing, "hashes": hashes, "steps": steps}


def void() -> dict[str, Any]:
    """One element of one rank's gradient is not finite in the second of many steps, in which nobody uses one parameter
    and rank 0 alone another. What was delivered in steps that count, less the averages of those that brought any."""
    rank = start()
    size = dist.get_world_size()
    net = Made()
    optimizer = _wrapped(net, compression="topk(ratio=0.3)", groups="layer-wise")
    total, seen = [torch.zeros(shape) for shape in SHAPES], []
    for step in range(14):
        made = _whole(rank, step, size if step < 3 else 0)
        which = [i for i in range(7) if step != 1 or (i != 2 and (i != 5 or rank == 0))]
        if step == 1 and rank == 0:
            made[0][0, 0] = math.inf
        optimizer.zero_grad()
        _backward(net, made, which)
        optimizer.step()
        grads = [p.grad for p in net.parameters()]
        seen.append([g is None or bool(g.isfinite().all()) for g in grads])
        if step != 1:
            total = [t + g for t, g in zip(total, grads, strict=True) if g is not None]
    exact = _average(lambda r: _whole(r, 0, size)) + _average(lambda r: _whole(r, 2, size))
    nonfinite = gcclient.stats()["nonfinite_steps"]
    gcclient.shutdown()
    found = torch.cat([t.flatten().double() for t in total])
    return {"off": float((found - exact).abs().max()), "finite": seen, "nonfinite": nonfinite, "hash": digest(found)}


def options() -> dict[str, Any]:
    """Steps of two passes after one that only adds up, a warm-up, tensors that are left out and a quality, under a
    codec that delivers little else: of which parameters averages are exact."""
    rank = start()
    size = dist.get_world_size()
    net = Made()
    more = {"exclude": ["weights.1", "weights.4"], "warmup_steps": 2, "backward_passes_per_step": 2, "quality": "safe"}
    optimizer = _wrapped(net, compression="topk(ratio=0.01)", **more)
    exact = []
    for step in range(4):
        optimizer.zero_grad()
        with optimizer.no_sync():
            _backward(net, _whole(rank, 10 * step, size))
        for part in (1, 2):
            _backward(net, _whole(rank, 10 * step + part, size))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        wanted = sum(_average(lambda r, s=10 * step + part: _whole(r, s, size)) for part in range(3))
        assert isinstance(wanted, torch.Tensor)
        parts = wanted.split([p.numel() for p in net.parameters()])
        exact.append([torch.equal(p.grad.double().flatten(), w) for p, w in zip(net.parameters(), parts, strict=True)])  # type: ignore[union-attr]
    stats = gcclient.stats()
    quality = {d.declared.quality for d in current().domains.values() if d.declared.scoped}
    gcclient.shutdown()
    return {"exact": exact, "steps": stats["steps"], "quality": sorted(quality)}


def resumed() -> dict[str, Any]:
    """Training that goes on from a checkpoint in a new job, beside that which was not interrupted."""
    rank = start()

    def make(weights: dict[str, torch.Tensor] | None) -> tuple[nn.Module, Any]:
        net = make_model()
        if weights is not None:
            net.load_state_dict(weights)
        plain = make_sgd(net)
        plain.param_groups[0]["momentum"] = 0.0
        wrapped = gcclient.DistributedOptimizer(
            plain, net.named_parameters(), compression="topk(ratio=0.02)", warmup_steps=1, hierarchy=True
        )
        return net, wrapped

    net, optimizer = make(None)
    train(net, net, optimizer, 4, rank)
    saved, weights = gcclient.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    undisturbed = digest(train(net, net, optimizer, 4, rank))
    found = []
    for load in (True, False):
        gcclient.shutdown()
        gcclient.init(deadline=60, seed=6)
        if load:
            gcclient.load_state_dict(saved)
        net, optimizer = make(weights)
        found.append(digest(train(net, net, optimizer, 4, rank)))
    dropped = gcclient.stats()["states_dropped"]
    gcclient.shutdown()
    return {"undisturbed": undisturbed, "again": found[0], "fresh": found[1], "dropped": dropped}


def differing(odd: int) -> dict[str, Any]:
    """Rank ``odd`` wants no shards."""
    other = start() == odd
    try:
        _wrapped(Made(), not other)
    except gcclient.TensorMismatch as error:
        return {"told": str(error)}
    return {"told": ""}


def failing() -> dict[str, Any]:
    """Rank 1 leaves without a word in the middle of training: what the others are told."""
    rank = start()
    net = make_model()
    optimizer = wrap(net, hierarchy=True)
    for step in range(6):
        if rank == 1 and step == 3:
            import os

            os._exit(3)
        x, y = make_batch(rank, step)
        try:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        except gcclient.GradcommError as error:
            return {"kind": type(error).__name__, "told": str(error), "step": step}
    return {}
