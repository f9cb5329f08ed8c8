"""Training that goes on when a machine is lost, and takes it back: one torchrun for each machine, DDP within it,
gradcomm between them.

    torchrun --standalone --nproc-per-node=1 examples/elastic.py --machine 0 --machines 3     # on the first machine
    torchrun --standalone --nproc-per-node=1 examples/elastic.py --machine 1 --machines 3     # on the second one, ...

Each torchrun knows its own machine only, so that the loss of another one does not end it. Daemons need `cluster.peers`
(torch's store is each machine's own) and `cluster.etcd`. A machine that was lost comes back by starting its daemon and
the same torchrun again. docs/elastic.md explains every line that is not usual.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=int, required=True, help="this machine's number, from 0")
    parser.add_argument("--machines", type=int, required=True, help="how many machines there are at first")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # this machine's workers
    workers, local = dist.get_world_size(), dist.get_rank()
    gcclient.init(
        rank=args.machine * workers + local,
        world_size=args.machines * workers,
        local_rank=local,
        local_size=workers,
        job=os.environ.get("GC_JOB", "elastic"),
        on_loss="shrink",
    )
    gcclient.on_change(lambda epoch, ranks: print(f"epoch {epoch}: {len(ranks)} workers", flush=True))

    torch.manual_seed(args.machine)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = torch.zeros((), dtype=torch.int64)  # steps

    def synchronise() -> None:
        """All that training needs, from a rank that has it: at the start of a job, and when somebody comes back."""
        root = gcclient.root_rank()
        gcclient.broadcast_parameters({**model.state_dict(), "steps done": done}, root)
        gcclient.broadcast_optimizer_state(optimizer, root)

    synchronise()  # DDP does that for weights, and within a machine only
    ddp = DistributedDataParallel(model, broadcast_buffers=False)  # buffers, too, would go round one machine only
    state = gcclient.state(ddp)
    ddp.register_comm_hook(state, gcclient.ddp_hook)

    target = torch.randn(64, generator=torch.Generator().manual_seed(0))
    while done < args.steps:
        done += 1
        step = int(done)
        # Who brings what follows from size() and rank(), which change with a loss and when somebody comes back.
        data = torch.Generator().manual_seed(step * 1000 + gcclient.rank())
        inputs = torch.randn(32, 64, generator=data)
        loss = (ddp(inputs).squeeze(1) - inputs @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not state.skipped:  # with on_loss="skip" a step may be given up
            optimizer.step()
        print(f"step {step} of {gcclient.size()} workers: loss {float(loss.detach()):.4f}", flush=True)
        if gcclient.admit():  # lost machines come back here: after their first synchronise() they are where all are
            synchronise()
        time.sleep(args.pause)

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}", flush=True)
    gcclient.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
