"""One rank of ``benchmarks.training``: trains one model by one system and logs a JSON line a step.

``python -m benchmarks.training_worker --task JSON --log FILE``, with torchrun's variables. What may live here: this one
run. What may not: starting ranks, comparing systems.

A line is ``{"step": n, "end": s, "sent": bytes, "cpu": s, "daemons": s, "loss": x}``: n counts from 1, ``end`` is the
system's monotonic clock (one for all ranks of a machine) after the optimizer's step, ``sent`` what the host has sent by
then, ``cpu`` and ``daemons`` the CPU time of this rank and, from the first timed step on and on rank 0 only, of all
daemons together, ``loss`` that of the batch before the step. A line ``{"asks": "links"}`` comes after the first
``unshaped`` steps, and ``{"asks": "turn"}`` after the timed ones of a rank that stays: the rank waits until it reads a
line. With ``go`` after a turn it makes a step that is not timed and as many timed ones as before, with anything else it
ends. Rank 0 says ``{"buckets": [bytes, ...]}``, DDP's, behind its timed steps, and ``{"held_out": loss}`` at the end
where that was asked for.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab import procfs
from benchmarks.models.workloads import HELD_OUT, WORKLOADS, Batches
from benchmarks.training_systems import LAYERS, MERGECOMP, MERGED, TORCH
from examples import gpt
from examples.train_gpt import sent_bytes
from gcserver.planner import mergecomp_groups as groups

POWERSGD_RANK = 4
LINKS, TURN, GO = "links", "turn", "go"  #: what ranks ask for, and the word with which they go on


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank is to do; crosses to it as JSON.

    unshaped: steps before the links get their rate, 0 if they have it from the start. settle: untimed steps after that.
    steps, seconds: at most so many timed steps, and none begun after so long (0: no such limit). buckets: as in
    ``benchmarks.training_systems``. caps: their sizes, MiB, where they were cut before (empty: torch's own). momentum:
    whether the optimizer may have one. stays: whether more turns may follow.
    """

    model: str
    comm: str
    codec: str
    buckets: str
    momentum: bool
    seed: int
    unshaped: int
    settle: int
    steps: int
    seconds: float
    held_out: bool
    daemons: tuple[int, ...] = ()  # pids of their first processes
    caps: tuple[float, ...] = ()
    stays: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


def ready_order(model: nn.Module, batches: Batches) -> list[nn.Parameter]:
    """The parameters in the order in which their gradients are complete; the model is left as it was."""
    probe = copy.deepcopy(model)
    order: list[int] = []
    for i, p in enumerate(probe.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    inputs, targets = batches.train(torch.Generator().manual_seed(0))
    gpt.loss(probe(inputs), targets).backward()
    parameters = list(model.parameters())
    return [parameters[i] for i in order]


def bucket_caps(buckets: str, model: nn.Module, batches: Batches) -> list[float] | None:
    """DDP's ``bucket_cap_mb_list``, MiB, for a kind of buckets; None for torch's own."""
    if buckets in (TORCH, MERGECOMP):
        return None
    nbytes = [p.numel() * p.element_size() for p in ready_order(model, batches)]
    if buckets == LAYERS:
        grouping = groups.layer_wise(len(nbytes))
    else:
        grouping = groups.naive(len(nbytes), 2 if buckets == MERGED else int(buckets))
    return groups.ddp_bucket_caps(grouping, nbytes)


def wrap(model: nn.Module, batches: Batches, task: Task) -> DistributedDataParallel:
    """The model under DDP, its gradients averaged as the task says."""
    buckets = "1" if task.comm == "ddp-powersgd" else task.buckets  # torch's hook fails on gloo with more than one
    caps: Any = list(task.caps) or bucket_caps(buckets, model, batches)
    # Two defaults of DDP's would cost every system the same and hide what is compared: gloo's broadcast of the norms'
    # running means before each step, and copies between gradients and buckets.
    ddp = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb_list=caps)
    if task.comm == "ddp-fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif task.comm == "ddp-powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        # two dense steps are the fewest it accepts with error feedback
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    elif task.comm in ("gradcomm", "auto"):
        import gcclient

        gcclient.init(seed=task.seed)
        ddp.register_comm_hook(gcclient.state(ddp, compression=task.codec or None), gcclient.ddp_hook)
    return ddp


class Trainer:
    """A model in training; every step is logged."""

    def __init__(self, task: Task, log: TextIO) -> None:
        workload = WORKLOADS[task.model]
        self.task, self.log, self.done = task, log, 0
        self.rank, self.store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        self.batches = workload.batches()
        self.ddp = wrap(workload.model(task.seed), self.batches, task)
        self.optimizer = workload.optimizer(self.ddp.module, task.momentum)
        # the same batches whoever communicates
        self.generator = torch.Generator().manual_seed(1000 * task.seed + self.rank)
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self.daemons = procfs.CpuClock()

    def write(self, **line: Any) -> None:
        print(json.dumps(line), file=self.log, flush=True)

    def step(self) -> None:
        alone = self.task.comm == "compute"
        inputs, targets = self.batches.train(self.generator)
        with self.ddp.no_sync() if alone else nullcontext():
            loss = gpt.loss(self.ddp(inputs), targets)
            loss.backward()
        self.optimizer.step()
        if alone:
            dist.barrier()  # any training in step waits for its slowest rank
        self.done += 1
        self.write(
            step=self.done,
            end=time.monotonic(),
            sent=sent_bytes(self.interface),
            cpu=time.process_time(),
            daemons=self.daemons.seconds(),
            loss=loss.item(),
        )

    def ask(self, what: str) -> str:
        """Waits, once all ranks are here, for a word of whoever started them; empty if there is none to come."""
        dist.barrier()
        self.write(asks=what)
        return sys.stdin.readline().strip()

    def train(self) -> None:
        """All steps of the task, turn by turn."""
        task = self.task
        for _ in range(task.unshaped):
            self.step()
        if task.unshaped:
            self.ask(LINKS)
        for i in range(task.settle):
            if self.rank == 0 and i == task.settle - 1:
                self.daemons = procfs.CpuClock(pid for first in task.daemons for pid in procfs.tree(first))
            self.step()
        self.timed()
        while task.stays and self.ask(TURN) == GO:
            self.step()  # after a pause
            self.timed()

    def timed(self) -> None:
        """The timed steps of a turn; rank 0 watches the clock."""
        task, start = self.task, time.monotonic()
        decided, last, key = not task.seconds, self.done + task.steps, f"last step after {self.done}"
        while self.done < last:
            self.step()
            # the others cannot pass the next step without rank 0, and see its word after that one
            if not decided and self.rank == 0 and time.monotonic() - start > task.seconds:
                last, decided = min(last, self.done + 1), True
                self.store.set(key, str(last))
            elif not decided and self.rank and self.store.check([key]):
                last, decided = int(self.store.get(key)), True
        if self.rank == 0:
            self.write(buckets=self.buckets())

    def held_out(self) -> float:
        """The mean loss of batches that were not trained on, of this rank's model."""
        self.ddp.eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            batches = (self.batches.held_out(generator) for _ in range(HELD_OUT))
            losses = [gpt.loss(self.ddp.module(inputs), targets).item() for inputs, targets in batches]
        return sum(losses) / len(losses)

    def buckets(self) -> list[int]:
        """Bytes of DDP's buckets, in the order of back-propagation once torch has seen that."""
        known = self.ddp._get_ddp_logging_data()
        sizes = known.get("rebuilt_bucket_sizes") or known["bucket_sizes"]
        return [int(size) for size in sizes.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, metavar="JSON")
    parser.add_argument("--log", required=True, metavar="FILE")
    args = parser.parse_args(argv)
    fields: dict[str, Any] = json.loads(args.task)
    task = Task(**fields | {name: tuple(fields[name]) for name in ("daemons", "caps")})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # ranks and address from torchrun's variables
    with open(args.log, "w") as log:
        trainer = Trainer(task, log)
        trainer.train()
        dist.barrier()
        if task.held_out and trainer.rank == 0:
            trainer.write(held_out=trainer.held_out())
        dist.barrier()
    if task.comm in ("gradcomm", "auto"):
        import gcclient

        gcclient.shutdown()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
