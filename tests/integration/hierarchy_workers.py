"""What the workers of test_hierarchy.py do: DDP models whose gradients are made up, in shards and without.

What may live here: functions that return plain data. What may not: assertions that the parent can make, training that
`ddp_workers.py` has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient.api import current
from tests.integration.ddp_workers import flatten, make_batch, make_model
from tests.integration.workers import digest, start

#: some of one element, some that shards cut unevenly, some of several blocks
SHAPES = [(250, 201), (5,), (1,), (), (3, 15_001), (401, 7), (2, 3, 5)]


class Made(nn.Module):
    """A module whose gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES])

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, grads, strict=True)]).sum()


#: values of one element: as many whole numbers around 0
PERIOD: Final = 19


@functools.cache
def _values(phase: int) -> list[torch.Tensor]:
    """Whole numbers, another one for each element's neighbours. Not to be written to."""
    return [
        ((torch.arange(math.prod(shape)) * 7 + i + phase) % PERIOD - PERIOD // 2).view(shape).float()
        for i, shape in enumerate(SHAPES)
    ]


def _whole(rank: int, step: int, times: int = 1) -> list[torch.Tensor]:
    """Whole numbers, another one for each element's neighbours, ranks and steps. The caller's to write to."""
    return [values * times for values in _values((3 * rank + 5 * step) % PERIOD)]


def _ddp(compression: str, hierarchy: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = DistributedDataParallel(Made(dtype), bucket_cap_mb=0.2)
    state = gcclient.state(model, compression=compression, hierarchy=hierarchy, **options)
    model.register_comm_hook(state, gcclient.ddp_hook)
    return model


def _grads(model: Any, grads: list[torch.Tensor]) -> torch.Tensor:
    """A backward pass; float64 of all averages."""
    model.zero_grad()
    model([g.to(p.dtype) for g, p in zip(grads, model.parameters(), strict=True)]).backward()
    return flatten(model, grads=True).double()


def _average(make: Callable[[int], list[torch.Tensor]]) -> torch.Tensor:
    size = dist.get_world_size()
    total = sum(torch.cat([g.flatten().double() for g in make(rank)]) for rank in range(size))
    assert isinstance(total, torch.Tensor)
    return total / size


def lossless() -> dict[str, Any]:
    """Averages of whole numbers by dtype, what of them differs from the exact ones; of any numbers, by how much."""
    rank = start()
    size = dist.get_world_size()
    off, bytes_, hashes = {}, {}, []
    for dtype in (torch.float32, torch.bfloat16):
        model = _ddp("none", True, dtype)
        before = gcclient.stats()
        # DDP makes other buckets after the first step.
        wrong = 0
        for step in range(4):
            found = _grads(model, _whole(rank, step, size))
            wrong += int((found != _average(lambda r, step=step: _whole(r, step, size))).sum())
            hashes.append(digest(found))
        after = gcclient.stats()
        off[str(dtype)] = wrong
        bytes_[str(dtype)] = [(after[k] - before[k]) // 4 for k in ("bytes_pushed", "bytes_pulled")]

    def any_numbers(rank: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=made) for shape in SHAPES]

    found = _grads(_ddp("none", True), any_numbers(rank))
    hashes.append(digest(found))
    labels = [d.declared.label for d in current().domains.values() if d.declared.scoped]
    gcclient.shutdown()
    return {
        "wrong": off,
        "bytes": bytes_,
        "hashes": hashes,
        "labels": labels,
        "error": float((found - _average(any_numbers)).abs().max()),
        "elements": sum(math.prod(s) for s in SHAPES),
    }


def held_back(compression: str, steps: int) -> dict[str, Any]:
    """The same gradient in every step, whose averages are added up: how far their sum is off the exact one after each
    of them, in shards and without; in units of the largest gradient."""
    rank = start()
    exact = _average(lambda r: _whole(r, 0))
    off, hashes = [], []
    for hierarchy in (False, True):
        model, total = _ddp(compression, hierarchy), torch.zeros_like(exact)
        each = []
        for step in range(1, steps + 1):
            total += _grads(model, _whole(rank, 0))
            each.append(float((total - step * exact).abs().max() / exact.abs().max()))
        off.append(each)
        hashes.append(digest(total))
    gcclient.shutdown()
    return {"off": off, "hashes": hashes}


def void() -> dict[str, Any]:
    """One element of one rank's gradient is not finite in the second of many steps, of which all but the first and the
    third bring zeros. What was delivered in steps that count, less the averages of those two."""
    rank = start()
    size = dist.get_world_size()
    model = _ddp("topk(ratio=0.3)", True)
    total, seen = torch.zeros(0), []
    for step in range(12):
        made = _whole(rank, step, size if step < 3 else 0)
        if step == 1 and rank == 0:
            made[0][0, 0] = math.inf
        found = _grads(model, made)
        seen.append(bool(found.isfinite().all()))
        if step != 1:
            total = found if not step else total + found
    exact = _average(lambda r: _whole(r, 0, size)) + _average(lambda r: _whole(r, 2, size))
    nonfinite = gcclient.stats()["nonfinite_steps"]
    gcclient.shutdown()
    return {"off": float((total - exact).abs().max()), "finite": seen, "nonfinite": nonfinite, "hash": digest(total)}


def options() -> dict[str, Any]:
    """Steps of several passes, a warm-up and tensors that are left out, under a codec that delivers little else."""
    rank = start()
    size = dist.get_world_size()
    more = {"exclude": ["weights.1", "weights.4"], "warmup_steps": 2, "backward_passes_per_step": 2}
    model = _ddp("topk(ratio=0.01)", True, **more)
    exact = []
    for step in range(4):
        model.zero_grad()
        for part in range(2):
            model(_whole(rank, 10 * step + part, size)).backward()
        wanted = sum(_average(lambda r, s=10 * step + part: _whole(r, s, size)) for part in range(2))
        assert isinstance(wanted, torch.Tensor)
        parts = wanted.split([p.numel() for p in model.parameters()])
        exact.append(
            [torch.equal(p.grad.double().flatten(), w) for p, w in zip(model.parameters(), parts, strict=True)]
        )
    steps = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {"exact": exact, "steps": steps}


def differing(what: str, odd: int) -> dict[str, Any]:
    """Rank ``odd`` declares something else than all others: ``what`` of the options, or another model."""
    other = start() == odd
    try:
        if what == "model":
            model = DistributedDataParallel(nn.Linear(4, 3))
            shown = nn.Linear(4, 5) if other else model
            gcclient.state(shown, dist.group.WORLD, hierarchy=True)
        elif what == "hierarchy":
            _ddp("none", not other)
        else:
            _ddp("fp16" if other else "none", True)
    except gcclient.TensorMismatch as error:
        return {"told": str(error)}
    return {"told": ""}


def resumed() -> dict[str, Any]:
    """Training that goes on from a checkpoint in a new job, beside that which was not interrupted."""
    rank = start()

    def make(weights: dict[str, torch.Tensor] | None, hierarchy: bool = True) -> Any:
        net = make_model()
        if weights is not None:
            net.load_state_dict(weights)
        model = DistributedDataParallel(net, bucket_cap_mb=0.3)
        state = gcclient.state(model, compression="topk(ratio=0.02)", warmup_steps=1, hierarchy=hierarchy)
        model.register_comm_hook(state, gcclient.ddp_hook)
        return model

    def train(model: Any, first: int) -> str:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(first, first + 4):
            x, y = make_batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return digest(flatten(model))

    model = make(None)
    train(model, 0)
    saved, weights = gcclient.state_dict(), {k: v.clone() for k, v in model.module.state_dict().items()}
    undisturbed = train(model, 4)
    gcclient.shutdown()
    gcclient.init(deadline=60, seed=6)
    gcclient.load_state_dict(saved)
    again = train(make(weights), 4)
    gcclient.shutdown()
    gcclient.init(deadline=60, seed=6)
    fresh = train(make(weights), 4)
    dropped = gcclient.stats()["states_dropped"]
    gcclient.shutdown()
    gcclient.init(deadline=60, seed=6)
    gcclient.load_state_dict(saved)
    try:
        make(weights, hierarchy=False)
        told = ""
    except gcclient.StateMismatch as error:
        told = str(error)
    gcclient.shutdown()
    return {"hashes": [undisturbed, again], "fresh": fresh, "dropped": dropped, "flat": told}
