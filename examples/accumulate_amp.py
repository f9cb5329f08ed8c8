"""Gradient accumulation and mixed precision: several backward passes in fp16, one exchange, one step.

gcrun -- torchrun --nproc-per-node=2 examples/accumulate_amp.py
"""

import argparse

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gcclient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--passes", type=int, default=4, help="backward passes a step")
parser.add_argument("--codec", default="topk(ratio=0.02)", help="any of docs/codecs.md")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
gcclient.init()
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Flatten(), nn.Linear(digits.SIZE**2, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=50)  # too much at first: it finds its scale
# The scaler goes to gcclient too: what a codec holds back is kept unscaled. Instead of `backward_passes_per_step` the
# passes before the last may be put into `with ddp.no_sync():`.
state = gcclient.state(ddp, compression=args.codec, scaler=scaler, backward_passes_per_step=args.passes)
ddp.register_comm_hook(state, gcclient.ddp_hook)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

generator = torch.Generator().manual_seed(1000 * args.seed + gcclient.rank())  # every rank draws its own digits
for step in range(1, args.steps + 1):
    total = 0.0
    for _ in range(args.passes):
        pictures, labels = digits.batch(16, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(ddp(pictures), labels) / args.passes
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)  # averages, and the same ones on every rank: all skip the same steps
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {total:.4f} scale {scaler.get_scale():g}", flush=True)

gcclient.shutdown()
dist.destroy_process_group()
