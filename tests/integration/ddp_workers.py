"""What the workers of test_client_ddp.py and of the kill tests do: DDP training, in its own process.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient.api import current
from tests.integration.cluster import mark
from tests.integration.workers import digest, start


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 8 * 8, 400), nn.ReLU(), nn.Linear(400, 10),
    )  # fmt: skip


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 1, 8, 8, generator=made)
    return x, (x.mean(dim=(1, 2, 3)) * 40).long().clamp(-4, 5) + 4


def flatten(model: nn.Module, grads: bool = False) -> torch.Tensor:
    return torch.cat([(p.grad if grads else p.detach()).flatten() for p in model.parameters()])  # type: ignore[union-attr]


def _train(
    steps: int,
    hook: bool,
    compression: str | None = None,
    rank: int = 0,
    tell: str = "",
    whole: bool | None = None,
    hierarchy: bool = False,
) -> tuple[nn.Module, list[float], torch.Tensor]:
    """Returns the model, the losses and the first step's averaged gradients."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.3)  # type: ignore[arg-type]
    if hook:
        state = gcclient.state(model, compression=compression, whole=whole, hierarchy=hierarchy)
        model.register_comm_hook(state, gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses, first = [], torch.empty(0)
    for step in range(steps):
        x, y = make_batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if not step:
            first = flatten(model, grads=True).clone()
        optimizer.step()
        losses.append(loss.item())
        if tell:
            mark(f"{tell} {step}")
    return model, losses, first


def against_gloo(steps: int, hierarchy: bool = False) -> dict[str, Any]:
    """The same training twice, by torch's all-reduce and by the hook."""
    rank = start()
    _, theirs, their_first = _train(steps, hook=False, rank=rank)
    model, ours, our_first = _train(steps, hook=True, rank=rank, hierarchy=hierarchy)
    scale = their_first.abs().clamp_min(1e-3)
    result = {
        "loss": (theirs[-1], ours[-1]),
        "first_loss": ours[0],
        "difference": float(((our_first - their_first).abs() / scale).max()),
        "hash": digest(flatten(model)),
        "steps": gcclient.stats()["steps"],
    }
    gcclient.shutdown()
    return result


def layouts(steps: int) -> dict[str, Any]:
    """The same training with blocks that cut tensors and with blocks that do not; the largest block of each."""
    rank = start()
    hashes = [digest(flatten(_train(steps, True, "none", rank, whole=whole)[0])) for whole in (False, True)]
    spaces = [d.space for d in current().domains.values() if d.declared.scoped]
    largest = [max(b.nbytes for blocks in space.blocks for b in blocks) for space in spaces]
    gcclient.shutdown()
    return {"hashes": hashes, "largest": largest}


def training(steps: int, compressions: list[str], hierarchy: bool = False) -> dict[str, Any]:
    """One model a codec, one after the other; tells of its steps, so that the parent can kill daemons in between."""
    rank = start()
    hashes, losses = [], []
    for compression in compressions:
        model, each, _ = _train(steps, True, compression, rank, tell=compression, hierarchy=hierarchy)
        hashes.append(digest(flatten(model)))
        losses.append(each[-1])
    reconnects = gcclient.stats()["reconnects"]
    gcclient.shutdown()
    return {"hashes": hashes, "losses": losses, "reconnects": reconnects}


def under_way(steps: int) -> list[int]:
    """How many blocks' averages are still to come after each backward pass, where the second node is late to close."""
    rank = start()
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.3)  # type: ignore[arg-type]
    state = gcclient.state(model, hierarchy=True)
    model.register_comm_hook(state, gcclient.ddp_hook)
    if rank >= 2:
        close = state._close

        def late(*args: Any) -> None:
            time.sleep(0.2)
            close(*args)

        state._close = late
    found = []
    for step in range(steps):
        x, y = make_batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        found.append(sum(not place.done for place in state.domain.blocks.values()))
    gcclient.shutdown()
    return found


def accumulation(hierarchy: bool = False) -> dict[str, Any]:
    """no_sync for two of three backward passes: local gradients add up, then one exchange."""
    rank = start()
    results = []
    for hook in (False, True):
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.3)  # type: ignore[arg-type]
        if hook:
            model.register_comm_hook(gcclient.state(model, hierarchy=hierarchy), gcclient.ddp_hook)
        for round_ in range(3):
            model.zero_grad()
            with model.no_sync():
                for part in range(2):
                    x, y = make_batch(rank, 10 * round_ + part)
                    nn.functional.cross_entropy(model(x), y).backward()
            x, y = make_batch(rank, 10 * round_ + 2)
            nn.functional.cross_entropy(model(x), y).backward()
        results.append(flatten(model, grads=True))
    steps = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {"equal": torch.allclose(*results, rtol=1e-6, atol=1e-7), "steps": steps}


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)


def train_overflowing(
    net: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, rank: int
) -> dict[str, Any]:
    """Four steps of ``net`` by way of ``model``, the second with an overflow on rank 0: scale and hash after each."""
    scales, hashes = [], []
    for step in range(4):
        x, y = make_batch(rank, step)
        if step == 1 and rank == 0:
            x = x * math.inf
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        hashes.append(digest(flatten(net)))
    return {"scales": scales, "hashes": hashes, "nonfinite": gcclient.stats()["nonfinite_steps"]}


def scaled(hierarchy: bool = False) -> dict[str, Any]:
    """GradScaler with an overflow on rank 0 only: every rank must skip that step and lower its scale."""
    rank = start()
    net = make_model()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    scaler = make_scaler()
    model.register_comm_hook(gcclient.state(model, scaler=scaler, hierarchy=hierarchy), gcclient.ddp_hook)
    result = train_overflowing(net, model, torch.optim.SGD(model.parameters(), 0.05), scaler, rank)
    gcclient.shutdown()
    return result


class _Branches(nn.Module):
    """One branch unused on some ranks, one unused everywhere, one in float64, one embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sparse = nn.Embedding(20, 6, sparse=True)
        self.left, self.right, self.never = (nn.Linear(6, 4) for _ in range(3))
        self.wide = nn.Linear(4, 2).double()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, index: torch.Tensor, left: bool) -> torch.Tensor:
        hidden = self.sparse(index)
        return self.wide((self.left if left else self.right)(hidden).double())


def branches(hierarchy: bool = False) -> dict[str, Any]:
    """Unused parameters, mixed dtypes, sparse gradients; gradients against gloo's."""
    rank = start()
    results = []
    for hook in (False, True):
        model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
        if hook:
            model.register_comm_hook(gcclient.state(model, hierarchy=hierarchy), gcclient.ddp_hook)
        for step in range(3):
            model.zero_grad()
            model(torch.arange(5) + rank + step, rank % 2 == 0).pow(2).sum().backward()
        grads = {
            n: None if p.grad is None else p.grad.to_dense().double().flatten().tolist()
            for n, p in model.module.named_parameters()
        }
        results.append(grads)
    gcclient.shutdown()
    close = {
        n: (a is None) == (b is None) and (a is None or torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-6))
        for (n, a), b in zip(results[0].items(), results[1].values(), strict=True)
    }
    return {"close": close}


def used_early() -> dict[str, Any]:
    """A branch that only the first pass of rank 0 uses, accumulated within no_sync; what the state refuses of it."""
    rank = start()
    torch.manual_seed(3)
    net = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("early", "late")})

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.net[name](x)

    model = DistributedDataParallel(Either(), find_unused_parameters=True)
    try:
        gcclient.state(model, backward_passes_per_step=2)
        refused = ""
    except ValueError as error:
        refused = str(error)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    found = []
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.full((1, 3), 4.0), "late" if rank else "early").sum().backward()
        model(torch.full((1, 3), 2.0), "late").sum().backward()
        found += [sorted(set(each.weight.grad.flatten().tolist())) for each in net.values()]
    gcclient.shutdown()
    return {"refused": refused, "found": found}


def a_world_each(ending: str) -> dict[str, Any]:
    """torch's world is this rank alone, the job has more: what is averaged and refused, and what then ends the job."""
    rank = int(os.environ["RANK"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gcclient.init(rank, int(os.environ["WORLD_SIZE"]), 0, 1, deadline=60)
    plain, found = nn.Linear(3, 2), []
    for model in (DistributedDataParallel(plain, find_unused_parameters=True), plain):
        try:
            gcclient.state(model)
        except ValueError as error:
            found.append(str(error))
    model = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    model(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()
    weight = model.module.weight.grad
    if ending == "sparse":
        model = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    else:
        model = DistributedDataParallel(nn.ModuleDict({n: nn.Linear(3, 2) for n in ("0", "1")}), static_graph=True)
        model.module.forward = lambda x: model.module[str(rank)](x.float())
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    try:
        model(torch.arange(3)).sum().backward()
    except RuntimeError as error:
        found.append(str(error))
    later = ""
    try:
        gcclient.push_pull(torch.ones(1))
    except gcclient.GradcommError as error:
        later = type(error).__name__
    gcclient.shutdown()
    return {"average": sorted(set(weight.flatten().tolist())), "refused": found, "later": later}


def groups(hierarchy: bool = False) -> dict[str, Any]:
    """Two data-parallel groups of two ranks each, at once; each averages only its own. One may be on one node."""
    rank = start()
    mine = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(nn.Linear(4, 3), process_group=mine)
    model.register_comm_hook(gcclient.state(model, hierarchy=hierarchy), gcclient.ddp_hook)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 4), float(rank))).sum().backward()
    grad = model.module.weight.grad
    total = gcclient.push_pull(torch.tensor([float(rank)]), "all", average=False)
    gcclient.shutdown()
    return {"grad": sorted(set(grad.flatten().tolist())), "total": float(total)}


def failing(hierarchy: bool = False) -> dict[str, Any]:
    """Rank 1 dies within training; the others' backward() must raise with the text, and the next call typed."""
    rank = start()
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.3)  # type: ignore[arg-type]
    model.register_comm_hook(gcclient.state(model, hierarchy=hierarchy), gcclient.ddp_hook)
    for step in range(100):
        if rank == 1 and step == 3:
            os._exit(9)
        x, y = make_batch(rank, step)
        model.zero_grad()
        try:
            nn.functional.cross_entropy(model(x), y).backward()
        except RuntimeError as error:
            try:
                gcclient.push_pull(torch.ones(1))
            except gcclient.GradcommError as later:
                return {"step": step, "backward": str(error), "later": type(later).__name__}
    return {}


def _lesson(rank: int, step: int, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, teacher.shape[1], generator=made)
    return x, (x @ teacher.t()).argmax(1)


def every_codec(rates: dict[str, float], steps: int) -> dict[str, Any]:
    """One small model a codec spec, trained at that learning rate; by spec: first and last losses, hash."""
    rank = start()
    teacher = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    found: dict[str, Any] = {}
    for spec, rate in rates.items():
        torch.manual_seed(11)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
        model.register_comm_hook(gcclient.state(model, compression=spec), gcclient.ddp_hook)
        # DGC and momentum correction bring a momentum of their own.
        optimizer = torch.optim.SGD(model.parameters(), rate)
        losses = []
        for step in range(steps):
            x, y = _lesson(rank, step, teacher)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        edge = steps // 8
        found[spec] = {
            "first": sum(losses[:edge]) / edge,
            "last": sum(losses[-edge:]) / edge,
            "hash": digest(flatten(model)),
        }
    gcclient.shutdown()
    return found
