"""What the workers of test_audit.py do: training with audits, by DDP or the optimizer wrapper, in its own process.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.cluster import mark
from tests.integration.ddp_workers import flatten, make_batch, make_model
from tests.integration.workers import digest, start


class Trainer:
    """A model, its optimizer, and what its steps came to."""

    def __init__(self, rank: int, compression: str, audit: gcclient.Audit | None, wrapper: bool = False) -> None:
        self.rank = rank
        self.inner = self.model = make_model()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.inner.parameters(), 0.02)
        self.losses: list[float] = []
        if wrapper:
            self.optimizer = gcclient.DistributedOptimizer(
                self.optimizer, self.inner.named_parameters(), compression, groups=2, audit=audit
            )
            return
        ddp = self.model = DistributedDataParallel(self.inner, bucket_cap_mb=0.3)  # type: ignore[arg-type]
        ddp.register_comm_hook(gcclient.state(ddp, compression=compression, audit=audit), gcclient.ddp_hook)

    def step(self) -> None:
        x, y = make_batch(self.rank, len(self.losses))
        # In place, as users do: an audit must not look at what training does with its gradients afterwards.
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()


def _local(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """This rank's gradients before any exchange."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    x, y = make_batch(rank, step)
    nn.functional.cross_entropy(alone(x), y).backward()
    return flatten(alone, grads=True)


def _error(delivered: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """Relative L2 error, cosine and ratio of norms, in double precision."""
    d, e = delivered.double(), exact.double()
    cosine = float(d @ e / (d.norm() * e.norm())) if d.any() else 0.0
    return [float((d - e).norm() / e.norm()), cosine, float(d.norm() / e.norm())]


def audited(compression: str, every: int, steps: int, window: int, wrapper: bool) -> dict[str, Any]:
    """Trains; after each step the newest audit, beside what one that ends there must find from gradients known here."""
    rank = start()
    trainer = Trainer(rank, compression, gcclient.Audit(every, window=window), wrapper)
    inner = trainer.inner
    found, expected, tensors = [], [], []
    exact: list[torch.Tensor] = []
    delivered: list[torch.Tensor] = []
    for step in range(steps):
        exact.append(gcclient.push_pull(_local(inner, rank, step)))
        trainer.step()
        delivered.append(flatten(inner, grads=True))
        sums = [torch.stack(x[-window:]).double().sum(0) for x in (delivered, exact)]
        expected.append(_error(*sums))
        at, each = 0, {}
        for name, p in inner.named_parameters():
            each[name] = _error(*(x[at : at + p.numel()] for x in sums))
            at += p.numel()
        tensors.append(each)
        found.append(gcclient.stats()["audit"])
    gcclient.shutdown()
    return {"found": found, "expected": expected, "tensors": tensors}


def unchanged(compression: str, steps: int, wrapper: bool) -> list[list[Any]]:
    """The same training without and with an audit of every step: losses and the model's hash."""
    rank = start()
    results = []
    for audit in (None, gcclient.Audit(every=1)):
        trainer = Trainer(rank, compression, audit, wrapper)
        for _ in range(steps):
            trainer.step()
        results.append([*trainer.losses, digest(flatten(trainer.model))])
    gcclient.shutdown()
    return results


def on_one_rank_only() -> str:
    """Rank 0 audits, the others do not: why the job ended."""
    rank = start()
    try:
        trainer = Trainer(rank, "none", gcclient.Audit(every=5) if rank == 0 else None)
        trainer.step()
    except RuntimeError:
        pass
    try:
        gcclient.push_pull(torch.ones(1))
    except gcclient.TensorMismatch as error:
        return str(error)
    return ""


def overflow(bad: int, steps: int) -> list[Any]:
    """One rank overflows in step ``bad``, which is void on all; audits over two steps of every four."""
    rank = start()
    trainer = Trainer(rank, "none", gcclient.Audit(every=4, window=2))
    reports = []
    for step in range(1, steps + 1):
        x, y = make_batch(rank, step)
        trainer.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trainer.model(x), y)
        (loss * float("inf") if (rank, step) == (0, bad) else loss).backward()
        reports.append(gcclient.stats()["audit"])
    gcclient.shutdown()
    return reports


def until_stopped(compression: str, stop: str) -> dict[str, Any]:
    """Trains until rank 0 sees the file ``stop``; marks "dense" once the job is, and some audits later.

    Audits as GC_AUDIT says.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    rank = start()
    trainer = Trainer(rank, compression, None)
    errors: dict[int, float] = {}
    ended = marked = False
    while not ended:
        trainer.step()
        report = gcclient.stats()["audit"]
        if report is not None:
            errors[report["step"]] = report["error"]
            since = report["dense_from"]
            if since is not None and report["step"] > since + 10 and not marked:
                mark("dense")
                marked = True
        ended = bool(gcclient.push_pull(torch.tensor([float(Path(stop).exists())]))[0] > 0)
    report = gcclient.stats()["audit"]
    gcclient.shutdown()
    return {
        "errors": [list(e) for e in errors.items()],
        "dense_from": report["dense_from"],
        "hash": digest(flatten(trainer.model)),
        "steps": len(trainer.losses),
    }
