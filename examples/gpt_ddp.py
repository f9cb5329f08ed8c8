"""A GPT over the bytes of source code, under DistributedDataParallel; gradients travel as one bit an element.

gcrun -- torchrun --nproc-per-node=2 examples/gpt_ddp.py
"""

import argparse

import gpt
import text
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gcclient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--codec", default="onebit", help="any of docs/codecs.md")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
gcclient.init()
model = gpt.GPT(gpt.Shape(layers=args.layers, width=args.width), seed=args.seed)
ddp = DistributedDataParallel(model)
# The first steps' gradients say the most: they travel whole. So does the embedding's, in which few rows are not zero.
state = gcclient.state(ddp, compression=args.codec, warmup_steps=5, exclude=["token.*"])
ddp.register_comm_hook(state, gcclient.ddp_hook)
optimizer = gpt.Optimizer(model)

tokens = text.load().train
generator = torch.Generator().manual_seed(1000 * args.seed + gcclient.rank())  # every rank reads elsewhere
for step in range(1, args.steps + 1):
    inputs, targets = text.batch(tokens, 8, 64, generator)
    loss = gpt.loss(ddp(inputs), targets)
    loss.backward()
    optimizer.step()  # clips, and clears the gradients too
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

gcclient.shutdown()
dist.destroy_process_group()
