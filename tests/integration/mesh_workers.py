"""What the workers of test_meshes.py do: models of which only the data-parallel part goes through daemons.

What may live here: functions that return plain data. What may not: assertions that the parent can make.

Ranks 0 and 1 are on one node, 2 and 3 on another. The data-parallel dimension of meshes comes first, so its groups span
nodes, and what is parallel otherwise stays within one, on gloo. Each model is trained beside a twin without DDP, whose
gradients are gathered and averaged here: in the daemons' order, those of a node first, so bit by bit.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient.api import current
from tests.integration.workers import digest, start

STEPS = 3


class Net(nn.Module):
    """Two layers, of which the first may be split by columns and the second by rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def _batch(which: int, step: int) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(50 * step + which))


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Before the first forward pass: for that torch puts DTensors in the place of a wrapped model's parameters."""
    return {n.removeprefix("module."): p for n, p in model.named_parameters()}


def _gradients(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Taken out of the parameters; of DTensors this rank's part."""
    found = {n: p.grad for n, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    return {n: g.to_local() if isinstance(g, DTensor) else g for n, g in found.items()}


def _averaged(gradients: dict[str, torch.Tensor], group: Any = None) -> dict[str, torch.Tensor]:
    """Over a group of which each node has as many ranks, one or two."""
    size, found = dist.get_world_size(group), {}
    for name, gradient in gradients.items():
        parts = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(parts, gradient.contiguous(), group=group)
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        found[name] = parts[0] / size
    return found


def _wrapped(module: nn.Module, **where: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **where)
    model.register_comm_hook(gcclient.state(model, compression="none"), gcclient.ddp_hook)  # type: ignore[no-untyped-call]
    return model


def _labels() -> list[str]:
    return sorted(domain.declared.label for domain in current().domains.values())


def _result(got: dict[str, torch.Tensor], differ: list[str], **more: Any) -> dict[str, Any]:
    """What a rank saw, of the gradients ``got`` in its last step; it leaves the job."""
    result = more | {
        "shapes": {n: list(g.shape) for n, g in got.items()},
        "differ": differ,
        "labels": _labels(),
        "steps": gcclient.stats()["steps"],
        "hash": digest(*got.values()),
    }
    gcclient.shutdown()
    return result


def _differ(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """The names of those that are not the same bit by bit."""
    return [n for n in ours.keys() | theirs.keys() if n not in ours or n not in theirs or not ours[n].equal(theirs[n])]


def tensor_parallel() -> dict[str, Any]:
    """Two replicas of a model of which two ranks have half each, by torch's own DTensors."""
    start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, place = mesh["dp"], mesh["dp"].get_local_rank()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    alone, ours = (parallelize_module(Net(3), mesh["tp"], plan) for _ in range(2))
    whole = Net(3)
    refused = ""
    try:
        gcclient.state(ours, group=dp.get_group())
    except TypeError as error:
        refused = str(error)
    model = _wrapped(ours, device_mesh=dp)
    names = {each: _named(each) for each in (whole, alone, model)}
    differ, far = list[str](), 0.0
    for step in range(STEPS):
        for each in (alone, model):
            each(_batch(place, step)).pow(2).mean().backward()
        got = _gradients(names[model])
        differ += _differ(got, _averaged(_gradients(names[alone]), dp.get_group()))
        # And that is half of what the model as a whole has: rows of the first layer's weight.
        for k in range(2):
            (whole(_batch(k, step)).pow(2).mean() / 2).backward()
        half = _gradients(names[whole])["up.weight"].chunk(2)[mesh["tp"].get_local_rank()]
        far = max(far, float((got["up.weight"] - half).abs().max()))
    return _result(got, differ, refused=refused, far=far)


def pipeline_parallel() -> dict[str, Any]:
    """Two replicas of a model whose second half is another rank's: activations go there, their gradients come back."""
    rank = start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh["dp"], mesh["pp"]
    place, stage, other = dp.get_local_rank(), pp.get_local_rank(), rank ^ 1
    torch.manual_seed(7)
    halves = [nn.Linear(24, 48), nn.Linear(48, 5)]
    alone, model = halves[stage], _wrapped(copy.deepcopy(halves[stage]), process_group=dp.get_group())

    def run(module: nn.Module, step: int) -> None:
        if stage == 0:
            out = torch.tanh(module(_batch(place, step)))
            dist.send(out.detach(), other, group=pp.get_group())
            back = torch.empty_like(out)
            dist.recv(back, other, group=pp.get_group())
            out.backward(back)
        else:
            came = torch.empty(6, 48)
            dist.recv(came, other, group=pp.get_group())
            module(came.requires_grad_()).pow(2).mean().backward()
            dist.send(came.grad, other, group=pp.get_group())  # type: ignore[arg-type]

    differ = list[str]()
    for step in range(STEPS):
        run(alone, step)
        run(model, step)
        got = _gradients(_named(model))
        differ += _differ(got, _averaged(_gradients(_named(alone)), dp.get_group()))
    return _result(got, differ)


def expert_parallel() -> dict[str, Any]:
    """Two experts, each on two ranks, beside layers that all four ranks share: half of a rank's rows goes to each."""
    start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dp, ep = mesh["dp"], mesh["ep"]
    torch.manual_seed(9)
    shared, experts = Net(5), [nn.Linear(8, 8) for _ in range(2)]
    expert = experts[ep.get_local_rank()]
    ours = _wrapped(copy.deepcopy(shared)), _wrapped(copy.deepcopy(expert), process_group=dp.get_group())

    def run(trunk: nn.Module, mine: nn.Module, step: int) -> None:
        rows = trunk(_batch(dist.get_rank(), step))
        sent = all_to_all_single(torch.empty_like(rows), rows, group=ep.get_group())
        back = all_to_all_single(torch.empty_like(rows), mine(sent), group=ep.get_group())
        back.pow(2).mean().backward()

    differ = list[str]()
    for step in range(STEPS):
        run(shared, expert, step)
        run(*ours, step)
        common, own = (_gradients(_named(each)) for each in ours)
        differ += _differ(common, _averaged(_gradients(_named(shared))))
        differ += _differ(own, _averaged(_gradients(_named(expert)), dp.get_group()))
    return _result(own, differ, common=digest(*common.values()))
