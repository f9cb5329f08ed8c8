"""A classifier of digits under DistributedDataParallel; of each gradient the largest elements are sent.

gcrun -- torchrun --nproc-per-node=2 examples/digits_ddp.py
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
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--codec", default="topk(ratio=0.02)", help="any of docs/codecs.md")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
gcclient.init()
torch.manual_seed(args.seed)
convolutions = nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
model = nn.Sequential(*convolutions, nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))
ddp = DistributedDataParallel(model)
ddp.register_comm_hook(gcclient.state(ddp, compression=args.codec), gcclient.ddp_hook)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

generator = torch.Generator().manual_seed(1000 * args.seed + gcclient.rank())  # every rank draws its own digits
for step in range(1, args.steps + 1):
    pictures, labels = digits.batch(32, generator)
    loss = cross_entropy(ddp(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

pictures, labels = digits.batch(500, generator)
right = gcclient.allreduce((model(pictures).argmax(1) == labels).float().mean())
if gcclient.rank() == 0:
    print(f"of digits never seen {right.item():.1%} are told right", flush=True)
gcclient.shutdown()
dist.destroy_process_group()
