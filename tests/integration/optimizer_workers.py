"""What the workers of test_client_optimizer.py do: training with the optimizer wrapper, beside DDP, in its own process.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark
from tests.integration.ddp_workers import flatten, make_batch, make_model, make_scaler, train_overflowing
from tests.integration.workers import digest, start


def hook(net: nn.Module, groups: Any = None, **more: Any) -> DistributedDataParallel:
    """DDP; with groups, in torch's buckets as well as in the domain's layout."""
    sizes: dict[str, Any] = {"bucket_cap_mb": 0.3}
    if groups is not None:
        sizes = {"bucket_cap_mb_list": gcclient.bucket_caps(net, groups)}
    model = DistributedDataParallel(net, **sizes, **more)
    model.register_comm_hook(gcclient.state(model, groups=groups), gcclient.ddp_hook)
    return model


def make_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)


def wrap(net: nn.Module, rate: float = 0.05, momentum: float = 0.9, **more: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=momentum)
    return gcclient.DistributedOptimizer(optimizer, net.named_parameters(), **more)


def train(net: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> torch.Tensor:
    """The parameters of ``net`` after some steps by way of ``model``."""
    for step in range(steps):
        x, y = make_batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return flatten(net)


def _by_ddp(steps: int, rank: int, groups: Any = None) -> torch.Tensor:
    net = make_model()
    return train(net, hook(net, groups), make_sgd(net), steps, rank)


def _by_wrapper(steps: int, rank: int, groups: Any = None, hierarchy: bool = False) -> torch.Tensor:
    net = make_model()
    return train(net, net, wrap(net, groups=groups, hierarchy=hierarchy), steps, rank)


def _compared(net: nn.Module, same: nn.Module) -> dict[str, Any]:
    return {"difference": float((flatten(net) - flatten(same)).abs().max()), "hash": digest(flatten(net))}


def against_ddp(steps: int, groupings: list[Any], hierarchy: bool = False) -> dict[str, Any]:
    """The same training by DDP's hook and by the wrapper, and by both for each of ``groupings``."""
    rank = start()
    expected = _by_ddp(steps, rank)
    found = []
    for groups in groupings:
        made = [_by_wrapper(steps, rank, groups, hierarchy)]
        if groups is not None:
            made.append(_by_ddp(steps, rank, groups))
        found.append(
            {"difference": max(float((m - expected).abs().max()) for m in made), "hashes": [digest(m) for m in made]}
        )
    gcclient.shutdown()
    return {"found": found, "moved": float((expected - flatten(make_model())).abs().max())}


def accumulation(hierarchy: bool = False) -> dict[str, Any]:
    """Three backward passes a step, by backward_passes_per_step and by DDP's no_sync."""
    rank = start()
    net, same = make_model(), make_model()
    optimizer, model, plain = wrap(net, backward_passes_per_step=3, hierarchy=hierarchy), hook(same), make_sgd(same)
    for step in range(3):
        for part in range(3):
            x, y = make_batch(rank, 10 * step + part)
            nn.functional.cross_entropy(net(x), y).backward()
            model.require_backward_grad_sync = part == 2
            nn.functional.cross_entropy(model(x), y).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    result = _compared(net, same) | {"steps": gcclient.stats()["steps"]}
    gcclient.shutdown()
    return result


def clipped(hierarchy: bool = False) -> dict[str, Any]:
    """Averages clipped between synchronize() and step(), against the same with DDP."""
    rank = start()
    net, same = make_model(), make_model()
    optimizer, model, plain = wrap(net, groups=2, hierarchy=hierarchy), hook(same), make_sgd(same)
    norms = []
    for step in range(4):
        x, y = make_batch(rank, step)
        for each in (optimizer, plain):
            each.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        norms.append([float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (net, same)])
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    result = _compared(net, same) | {"norms": norms}
    gcclient.shutdown()
    return result


def scaled(hierarchy: bool = False) -> dict[str, Any]:
    """GradScaler with an overflow on rank 0 only: every rank must skip that step and lower its scale."""
    rank = start()
    net = make_model()
    scaler = make_scaler()
    optimizer = wrap(net, scaler=scaler, groups="layer-wise", hierarchy=hierarchy)
    result = train_overflowing(net, net, optimizer, scaler, rank)
    gcclient.shutdown()
    return result


def training(steps: int, compression: str, groups: Any, hierarchy: bool = False) -> dict[str, Any]:
    """Tells of its steps, so that the parent can kill daemons in between."""
    rank = start()
    net = make_model()
    optimizer = wrap(net, compression=compression, groups=groups, hierarchy=hierarchy)
    for step in range(steps):
        train(net, net, optimizer, 1, rank + 10 * step)
        mark(f"step {step}")
    reconnects = gcclient.stats()["reconnects"]
    gcclient.shutdown()
    return {"hash": digest(flatten(net)), "reconnects": reconnects}


class _Branches(nn.Module):
    """One branch used on even ranks, one on odd ones, one nowhere; the first layer on all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.left, self.right, self.never = (nn.Linear(6, 4) for _ in range(3))
        self.wide = nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        hidden = self.first(x)
        return self.wide((self.left if left else self.right)(hidden).double())


def branches(groupings: list[Any], hierarchy: bool = False) -> dict[str, Any]:
    """Gradients where ranks use different parameters, against DDP's; then a step in which only rank 0 has any."""
    rank = start()

    def batch(step: int) -> torch.Tensor:
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    same = _Branches()
    model = hook(same, find_unused_parameters=True)
    close, alone, missing = [], [], []
    for groups in groupings:
        net = _Branches()
        optimizer = wrap(net, rate=0.0, groups=groups, hierarchy=hierarchy)
        for step in range(3):
            optimizer.zero_grad()
            model.zero_grad()
            net(batch(step), rank % 2 == 0).pow(2).sum().backward()
            model(batch(step), rank % 2 == 0).pow(2).sum().backward()
            optimizer.step()
            for (name, a), b in zip(net.named_parameters(), same.parameters(), strict=True):
                if a.grad is None or b.grad is None:
                    close.append(a.grad is b.grad is None and name.startswith("never"))
                else:
                    close.append(torch.allclose(a.grad, b.grad, rtol=1e-6))
        optimizer.zero_grad()
        if rank == 0:
            net(batch(9), True).pow(2).sum().backward()
        optimizer.step()
        alone.append(digest(torch.cat([p.grad.flatten().double() for p in net.parameters() if p.grad is not None])))
        missing.append([name for name, p in net.named_parameters() if p.grad is None])
    gcclient.shutdown()
    return {"close": close, "alone": alone, "missing": missing}


def conserved(groupings: list[Any], compression: str, hierarchy: bool = False) -> dict[str, Any]:
    """What two tensors' gradients add up to, and what was delivered once residuals have run dry.

    ``rare`` is used by nobody for some steps in between, and must keep its residual meanwhile.
    """
    rank = start()
    found = []
    for groups in groupings:
        net = nn.ParameterDict({"often": torch.zeros(64, 64), "rare": torch.zeros(64, 64)})
        optimizer = wrap(net, rate=1.0, momentum=0.0, groups=groups, compression=compression, hierarchy=hierarchy)
        made = torch.Generator().manual_seed(rank)
        total = {name: torch.zeros(64, 64) for name in net}
        kept = True
        for step in range(24):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for name, parameter in net.items():
                gradient = torch.randn(64, 64, generator=made) * (step < 4)
                if name == "often" or not 4 <= step < 8:
                    total[name] += gradient
                    loss = loss + (parameter * gradient).sum()
            loss.backward()
            optimizer.step()
            kept &= (net["rare"].grad is None) is (4 <= step < 8)
        mean = gcclient.push_pull(torch.stack([total[name] for name in net]))
        sent = -torch.stack([p.detach() for p in net.values()])
        found.append({"difference": float((sent - mean).abs().max()), "size": float(mean.abs().max()), "kept": kept})
    gcclient.shutdown()
    return {"found": found}
