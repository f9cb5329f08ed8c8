"""What worker functions share: joining a job, steps until the parent has seen enough, what they come to in few bytes,
computing that takes its time.

What may live here: what several files of worker functions do alike. What may not: the functions themselves, models and
how they are trained, what the parent does with its workers (`cluster.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gcclient
from tests.integration.cluster import mark


class Slow(torch.autograd.Function):
    """Changes nothing and takes ``seconds`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


def start() -> int:
    """Join the job; returns the rank. torch has a default process group then: a DDP model needs one, also where a hook
    does all the communication."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    gcclient.init(deadline=60, seed=5)
    return dist.get_rank()


def digest(*tensors: torch.Tensor) -> str:
    """A hash of the elements of tensors, bit by bit; not of their shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def steps_until(stop: str) -> Iterator[int]:
    """The numbers of steps from 0 on, one at least, until the file ``stop`` is there. Marks every step that is over.

    Rank 0 looks for it, and tells the others by way of gloo: all stop after the same step.
    """
    rank, step = dist.get_rank(), 0
    over = torch.zeros(1)
    while not over.item():
        yield step
        step += 1
        mark(f"step {step}")
        over.fill_(float(rank == 0 and Path(stop).exists()))
        dist.all_reduce(over)
