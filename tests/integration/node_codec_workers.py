"""What the workers of test_node_codec.py do: DDP models in shards, with a codec between the workers of a node.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient.hierarchy import part
from gcclient.sharded import ShardState
from tests.integration.cluster import mark
from tests.integration.hierarchy_workers import SHAPES, Made
from tests.integration.workers import digest, start

#: small enough for a node's messages to have both: parts that are encoded, and others
NAMES = [f"weights.{i}" for i in range(len(SHAPES))]


def _grads(rank: int, step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=made) for shape in SHAPES]


class _Training:
    """A model whose gradients are made up, and what became of them."""

    def __init__(self, node_codec: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model: Any = DistributedDataParallel(Made(dtype), bucket_cap_mb=0.4)
        options = {"compression": "none", "hierarchy": True} | options
        state = gcclient.state(self.model, node_codec=node_codec, **options)
        assert isinstance(state, ShardState)
        self.state = state
        self.model.register_comm_hook(state, gcclient.ddp_hook)

    def step(self, grads: list[torch.Tensor]) -> torch.Tensor:
        self.model.zero_grad()
        self.model([g.to(p.dtype) for g, p in zip(grads, self.model.parameters(), strict=True)]).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def held_back(self) -> torch.Tensor:
        """float64: what this worker holds back of every element of the model."""
        codec = self.state._codec
        assert codec is not None
        gcclient.state_dict()  # waits until it is settled
        out = []
        for name, shape in zip(NAMES, SHAPES, strict=True):
            n = math.prod(shape)
            whole = torch.zeros(n, dtype=torch.float64)
            for k in range(codec.nodes.shards):
                held = codec._held.get((name, k))
                if held is not None and held.settled is not None:
                    whole[slice(*part(n, codec.nodes.shards, k))] += held.settled.double()
            out.append(whole)
        return torch.cat(out)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Over all ranks, by torch itself."""
    total = values.double().clone()
    dist.all_reduce(total)
    return total


def conserved(node_codec: str, steps: int, dtype: str = "float32") -> dict[str, Any]:
    """The sum of all averages and of what is held back, less that of the gradients' averages, in units of the largest
    gradient; how much is held back; what a worker sent others of its node; a hash of all averages."""
    rank = start()
    size = dist.get_world_size()
    training = _Training(node_codec, getattr(torch, dtype))
    brought = came = torch.zeros(1, dtype=torch.float64)
    first = 0.0
    for step in range(steps):
        grads = [g.to(getattr(torch, dtype)) for g in _grads(rank, step)]
        found = training.step(grads).double()
        mine = torch.cat([g.flatten().double() for g in grads])
        if not step:
            first = float((found - _sum(mine) / size).abs().max())
        came, brought = came + found, brought + mine
    held = _sum(training.held_back()) / size
    stats = gcclient.stats()
    gcclient.shutdown()
    return {
        "off": float((came + held - _sum(brought) / size).abs().max()),
        "first": first,
        "held": float(held.abs().max()),
        "sent": stats["bytes_within_node"] / steps,
        "elements": sum(math.prod(s) for s in SHAPES),
        "hash": digest(came),
    }


def void(node_codec: str) -> dict[str, Any]:
    """A run in which one rank's gradient is not finite in the third step, and one without that step: the same bits."""
    rank = start()
    last = dist.get_world_size() - 1
    hashes, seen = [], []
    for disturbed in (False, True):
        training = _Training(node_codec, compression="topk(ratio=0.1)")
        delivered = []
        for step in range(5):
            if disturbed and step == 2:
                bad = _grads(rank, 99)
                if rank == last:
                    for grad in bad[:1]:
                        grad[0, 0] = math.inf  # of the first shard, which is another worker's
                seen.append(bool(training.step(bad).isfinite().all()))
            delivered.append(training.step(_grads(rank, step)).clone())
        hashes.append(digest(*delivered))
    nonfinite = gcclient.stats()["nonfinite_steps"]
    gcclient.shutdown()
    return {"hashes": hashes, "finite": seen, "nonfinite": nonfinite}


def options() -> dict[str, Any]:
    """A warm-up, a tensor that is left out, steps of two passes: which tensors' averages are exact in which step."""
    rank = start()
    size = dist.get_world_size()
    training = _Training("topk(ratio=0.01)", exclude=["weights.4"], warmup_steps=2, backward_passes_per_step=2)

    def whole(rank: int, step: int) -> list[torch.Tensor]:
        return [(g * 8).round() * size for g in _grads(rank, step)]

    exact = []
    for step in range(4):
        training.model.zero_grad()
        for again in range(2):
            training.model(whole(rank, 10 * step + again)).backward()
        wanted = _sum(
            torch.cat(
                [(a + b).flatten() for a, b in zip(whole(rank, 10 * step), whole(rank, 10 * step + 1), strict=True)]
            )
        )
        parts = (wanted / size).split([math.prod(s) for s in SHAPES])
        exact.append(
            [torch.equal(p.grad.double().flatten(), w) for p, w in zip(training.model.parameters(), parts, strict=True)]
        )
    gcclient.shutdown()
    return {"exact": exact}


def differing(odd: int, other: str | None) -> dict[str, Any]:
    """Rank ``odd`` asks for another codec within nodes."""
    rank = start()
    try:
        _Training(other if rank == odd else "onebit")
    except gcclient.TensorMismatch as error:
        return {"told": str(error)}
    return {"told": ""}


def resumed(node_codec: str, compression: str) -> dict[str, Any]:
    """Steps that go on from a checkpoint in a new job, beside those that were not interrupted; and what is said where
    it does not fit."""
    rank = start()

    def go_on(training: _Training, first: int) -> str:
        return digest(*[training.step(_grads(rank, step)).clone() for step in range(first, first + 3)])

    def again(given: dict[str, Any] | None, codec: str | None, strict: bool = True) -> str:
        gcclient.shutdown()
        gcclient.init(deadline=60, seed=6)
        if given is not None:
            gcclient.load_state_dict(given, strict)
        try:
            return go_on(_Training(codec, compression=compression, warmup_steps=2), 3)
        except (gcclient.StateMismatch, RuntimeError) as error:
            # Who has nothing to lose by it goes on, until it notices that others do not.
            return str(error)

    training = _Training(node_codec, compression=compression, warmup_steps=2)
    go_on(training, 0)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in gcclient.state_dict().items()}
    within = {k: v for k, v in saved.items() if "/node" in k}
    undisturbed = go_on(training, 3)
    out: dict[str, Any] = {"undisturbed": undisturbed, "again": again(saved, node_codec)}
    unread = gcclient.state_dict()
    out["later"] = sorted(k for k in unread if "/node" in k)
    out["lost"] = again({k: v for k, v in saved.items() if k not in within}, node_codec)
    out["fresh"] = again(None, node_codec)
    out["without"] = again(saved, None)
    out["dropped"] = [again(saved, None, strict=False) != undisturbed, gcclient.stats()["states_dropped"]]
    gcclient.shutdown()
    gcclient.init(deadline=60, seed=6)
    gcclient.load_state_dict(saved)
    kept = gcclient.state_dict()  # of a model that is not declared
    out["kept"] = all(
        torch.equal(v, kept[k]) if isinstance(v, torch.Tensor) else v == kept[k] for k, v in within.items()
    )
    gcclient.shutdown()
    return out | {"keys": sorted(within)}


def training(node_codec: str, steps: int) -> dict[str, Any]:
    """Steps with a mark after each, for who kills daemons meanwhile."""
    rank = start()
    made, delivered = _Training(node_codec, compression="topk(ratio=0.05)"), []
    for step in range(steps):
        delivered.append(made.step(_grads(rank, step % 3)).clone())
        mark(f"step {step}")
    reconnects = gcclient.stats()["reconnects"]
    gcclient.shutdown()
    return {"hash": digest(*delivered), "reconnects": reconnects}
