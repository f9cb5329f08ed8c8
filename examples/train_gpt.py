"""Trains a small GPT with plain DistributedDataParallel, its gradients averaged by gloo or by gradcomm.

On two machines, each with a daemon (``gcserver run ...``; the README has the whole recipe):

    torchrun --nnodes=2 --nproc-per-node=1 --node-rank=0 --master-addr=FIRST examples/train_gpt.py --comm gradcomm

What gradcomm needs of a program are the three lines in ``wrap``. What may live here: one training run. What may not:
comparing runs (``examples.demo``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __package__ in (None, ""):  # torchrun starts this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import gpt, text


def wrap(model: torch.nn.Module, comm: str, codec: str | None) -> DistributedDataParallel:
    """The model under DDP; with gradcomm, whose daemon compresses as ``codec`` says (None: as it is configured)."""
    ddp = DistributedDataParallel(model)
    if comm == "gradcomm":
        import gcclient

        gcclient.init()
        ddp.register_comm_hook(gcclient.state(ddp, compression=codec), gcclient.ddp_hook)
    return ddp


def sent_bytes(interface: str) -> int:
    """What has left this machine through ``interface`` since it is up, in bytes with all headers; -1 if unknown.

    Loopback carries what both sides send, so its count is divided by the ranks.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8]) // (dist.get_world_size() if interface == "lo" else 1)
    return -1


def train(ddp: DistributedDataParallel, data: text.Text, args: argparse.Namespace, log: TextIO | None) -> None:
    """Runs until ``args.steps`` or ``args.seconds``; one JSON line a step into ``log``.

    A line holds the step (from 1), the time since the first step began, s, the bytes this machine had sent by then,
    and the loss of this rank's batch before the step, nats a character.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    optimizer = gpt.Optimizer(ddp.module)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # the same batches whoever communicates
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    dist.barrier()
    start, step, last = time.perf_counter(), 0, args.steps
    while not last or step < last:
        step += 1
        inputs, targets = text.batch(data.train, args.batch, args.context, generator)
        with ddp.no_sync() if args.comm == "off" else nullcontext():
            loss = gpt.loss(ddp(inputs), targets)
            loss.backward()
        optimizer.step()
        passed, value = time.perf_counter() - start, loss.item()
        if log is not None:
            print(json.dumps({"step": step, "s": passed, "sent": sent_bytes(interface), "loss": value}), file=log)
            log.flush()
        if rank == 0 and not args.quiet and step % 10 == 0:
            print(f"step {step}  {passed:.1f} s  loss {value:.3f}", flush=True)
        # Rank 0 watches the clock. The others cannot pass the next step without it, and see its word after that one.
        if args.seconds and not last:
            if rank == 0 and passed > args.seconds:
                last = step + 1
                store.set("last step", str(last))
            elif rank and store.check(["last step"]):
                last = int(store.get("last step"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--comm", choices=("gloo", "gradcomm", "off"), default="gradcomm", help="who averages gradients"
    )
    parser.add_argument("--codec", help='such as none, fp16, onebit or "topk(ratio=0.01)" (default: the daemon\'s)')
    parser.add_argument("--steps", type=int, default=0, help="stop after this many")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this long")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step (default 4)")
    parser.add_argument("--context", type=int, default=64, help="characters a sequence (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, metavar="FILE", help="one JSON line a step; {rank} stands for the rank")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    if not args.steps and not args.seconds:
        parser.error("one of --steps and --seconds is needed")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")  # ranks and address from torchrun's variables
    model = gpt.GPT(gpt.Shape(context=args.context), seed=args.seed)
    ddp = wrap(model, args.comm, args.codec)
    log = open(str(args.log).format(rank=dist.get_rank()), "w") if args.log else None  # noqa: SIM115
    try:
        train(ddp, text.load(), args, log)
    finally:
        if log is not None:
            log.close()
    dist.barrier()
    if args.comm == "gradcomm":
        import gcclient

        gcclient.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
