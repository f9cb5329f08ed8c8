"""What the workers of test_checkpoint.py do: train several models, save, load, go on.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import gcclient
from gcclient.api import current
from tests.integration.cluster import mark
from tests.integration.workers import digest

#: so often, so that a daemon that is killed meanwhile is killed in the middle of one
SAVES = 30


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 64, generator=made)
    return x, x[:, :8].cumsum(1)


class Trained:
    """One model, trained by the optimizer wrapper."""

    def __init__(self, number: int, compression: str | None) -> None:
        torch.manual_seed(number)
        self.model: Any = nn.Sequential(
            nn.Linear(64, 640), nn.Tanh(), nn.Linear(640, 120), nn.Tanh(), nn.Linear(120, 8)
        )
        self.compression = compression

    def declare(self, groups: Any = None) -> None:
        """All ranks together."""
        inner, named = torch.optim.SGD(self.model.parameters(), 0.02), self.model.named_parameters()
        self.optimizer = gcclient.DistributedOptimizer(
            inner, named, compression=self.compression, warmup_steps=1, groups=groups
        )

    def step(self, rank: int, step: int) -> None:
        x, y = _batch(rank, step)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def hash(self) -> str:
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return digest(flat)


def train(
    compressions: list[str | None], steps: list[int], save: str = "", load: str = "", seed: int | None = None
) -> dict[str, Any]:
    """Train a model for each codec from step ``steps[0]`` up to before ``steps[1]``, beside tensors that are pushed by
    themselves: one in the first step only, two in an order that changes at step 4. ``load``, ``save``: folders of
    checkpoints before the first step and after the last; what is saved is asked for many times.

    Then train on for three steps. Returns a hash of each model's weights before and after those.
    """
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=seed)
    rank = dist.get_rank()
    models = [Trained(number, compression) for number, compression in enumerate(compressions)]
    if load:
        reader = dcp.FileSystemReader(load)
        state: dict[str, Any] = {
            "models": {str(i): m.model.state_dict() for i, m in enumerate(models)},
            "gradcomm": gcclient.state_template(reader.read_metadata()),
        }
        dcp.load(state, storage_reader=reader)
        for number, model in enumerate(models):
            model.model.load_state_dict(state["models"][str(number)])
        gcclient.load_state_dict(state["gradcomm"])
        mark("loaded")
    for model in models:
        model.declare()
    mark("declared")
    pushed = []

    def run(first: int, last: int) -> list[str]:
        for step in range(first, last):
            for model in models:
                model.step(rank, step)
            single = torch.linspace(-1, 1, 30_000) * torch.cos(torch.arange(30_000.0) * (step + rank))
            for name in ("once", "single", "other")[step > 1 :][:: -1 if step > 3 else 1]:
                pushed.append(gcclient.push_pull(single, name, compression="qsgd(bits=2)+ef"))
        single_hash = digest(torch.stack(pushed))
        pushed.clear()
        return [*(model.hash() for model in models), single_hash]

    before = run(*steps)
    held = 0
    if save:
        mine = gcclient.state_dict()
        mark("saving")
        for _ in range(SAVES):
            again = gcclient.state_dict()
            assert mine.keys() == again.keys()
            assert all(_same(mine[key], again[key]) for key in mine)
        held = sum(t.numel() for t in mine.values() if isinstance(t, torch.Tensor))
        models_now = {str(i): m.model.state_dict() for i, m in enumerate(models)}
        dcp.save({"models": models_now, "gradcomm": mine}, checkpoint_id=save)
    after = run(steps[1], steps[1] + 3)
    stats = gcclient.stats()
    gcclient.shutdown()
    return {"before": before, "after": after, "held": held, "dropped": stats["states_dropped"]}


def _held(state: dict[str, Any], name: str, elements: int) -> torch.Tensor:
    """What all nodes together hold back of a tensor, whichever of them has it, and on which side. All ranks call it."""
    held = torch.zeros(elements, dtype=torch.float64, device="cpu")  # as states are
    for key, values in state.items():
        if f"/{name}[" in key and key.endswith("]"):
            first, last = key.rsplit("[", 1)[1].removesuffix("]").split(":")
            held[int(first) : int(last)] += values
    return gcclient.push_pull(held, average=False)


def advised(codec: str) -> dict[str, Any]:
    """In one job a model is trained and saved, in the next one its head is another: what StateMismatch advises is done,
    and the model trained on."""
    torch.set_num_threads(1)
    gcclient.init(deadline=60, seed=5, job=f"{os.environ['GC_JOB']}.before")
    rank = gcclient.rank()
    first = Trained(1, codec)
    first.declare()
    for step in range(1, 4):
        first.step(rank, step)
    state = gcclient.state_dict()
    before = _held(state, "0.weight", 64 * 640)
    gcclient.shutdown()
    gcclient.init(deadline=60, seed=6, job=f"{os.environ['GC_JOB']}.after")
    gcclient.load_state_dict(state)
    other = Trained(1, codec)
    other.model[4] = nn.Sequential(nn.Linear(120, 12), nn.Linear(12, 8))
    refused = ""
    try:
        other.declare()
    except gcclient.StateMismatch as error:
        refused = str(error)
    gcclient.load_state_dict(state, strict=False)
    other.declare()
    domains = [domain.declared for domain in current().domains.values()]
    now = gcclient.state_dict()
    kept = _held(now, "0.weight", 64 * 640)
    for step in range(4, 6):
        other.step(rank, step)
    result = {
        "refused": refused,
        "held": float(before.norm()),
        "lost": float((kept - before).norm()),
        "new": sorted(k for k, v in now.items() if "/4." in k and isinstance(v, torch.Tensor) and bool(v.any())),
        "labels": [declared.label for declared in domains],
        "steps": [declared.resumed is not None and declared.resumed.steps for declared in domains],
        "hash": other.hash(),
    }
    gcclient.shutdown()
    return result


def regrouped(codec: str, groups: list[Any]) -> dict[str, Any]:
    """A model is trained for some steps by one job after the other, each with groups of its own and what the one before
    held back. Returns the norm of that, of what was not there any more, and how many blocks each job cut."""
    torch.set_num_threads(1)
    trained, state = Trained(1, codec), None
    names = {name: p.numel() for name, p in trained.model.named_parameters()}
    held, lost, blocks = [], [], []
    before: dict[str, torch.Tensor] = {}
    for number, cut in enumerate(groups):
        gcclient.init(deadline=60, seed=number, job=f"{os.environ['GC_JOB']}.{number}")
        if state is not None:
            gcclient.load_state_dict(state)
        trained.declare(cut)
        rank, domain = gcclient.rank(), next(iter(current().domains.values()))
        blocks.append(len(domain.blocks))
        if state is not None:
            now = gcclient.state_dict()
            lost.append(sum(float((_held(now, n, e) - before[n]).norm()) for n, e in names.items()))
        for step in range(1, 4):
            trained.step(rank, step)
        state = gcclient.state_dict()
        before = {name: _held(state, name, elements) for name, elements in names.items()}
        held.append(sum(float(values.norm()) for values in before.values()))
        gcclient.shutdown()
    return {"held": held, "lost": lost, "blocks": blocks, "hash": trained.hash()}


def by_torch(kind: str, overlap: bool, steps: list[int], save: str = "", load: str = "") -> dict[str, Any]:
    """A model whose state and whose optimizer's torch's own functions get and set, trained from step ``steps[0]`` up to
    before ``steps[1]`` and then for three steps more. Rank 0 asks for the optimizer's state after each step, the others
    do not. ``load``, ``save``: as :func:`train` has them. Returns a hash of the weights at either end."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=5)
    rank = dist.get_rank()
    trained = Trained(1, "topk(ratio=0.02)")
    model, make = trained.model, {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}[kind]
    inner: Any = make(model.parameters(), 0.01)
    room: dict[str, Any] = {}
    if load:
        reader = dcp.FileSystemReader(load)
        room["model"], room["optimizer"] = get_state_dict(model, inner)
        room["gradcomm"] = gcclient.state_template(reader.read_metadata())
        dcp.load(room, storage_reader=reader)
        gcclient.load_state_dict(room["gradcomm"])
    trained.optimizer = gcclient.DistributedOptimizer(
        inner, model.named_parameters(), compression=trained.compression, overlap_forward=overlap
    )
    if load:
        set_state_dict(model, trained.optimizer, model_state_dict=room["model"], optim_state_dict=room["optimizer"])
    hashes = []
    for first, last in (steps, [steps[1], steps[1] + 3]):
        for step in range(first, last):
            trained.step(rank, step)
            trained.optimizer.zero_grad()
            if rank == 0:
                get_optimizer_state_dict(model, trained.optimizer)
        hashes.append(trained.hash())
        if save and not hashes[1:]:
            weights, states = get_state_dict(model, trained.optimizer)
            saved = {"model": weights, "optimizer": states, "gradcomm": gcclient.state_dict()}
            dcp.save(saved, checkpoint_id=save)
    trained.optimizer.state_dict()  # which waits until the last step has been counted
    exchanged = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {"hashes": hashes, "steps": exchanged}
