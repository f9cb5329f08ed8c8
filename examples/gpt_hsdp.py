"""A GPT sharded over the ranks of each node and replicated between nodes (HSDP): daemons carry what nodes exchange.

On both of two machines, each with a daemon; --shard says how many ranks share a model (default: those of a node).

export GLOO_SOCKET_IFNAME=INTERFACE
torchrun --nnodes=2 --nproc-per-node=2 --node-rank=RANK --master-addr=ADDRESS examples/gpt_hsdp.py
"""

import argparse

import gpt
import text
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gcclient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--shard", type=int, default=0)
parser.add_argument("--codec", default="fp16", help="any of docs/codecs.md that takes single elements")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
gcclient.init()
shard = args.shard or gcclient.local_size()
shape, names = (gcclient.size() // shard, shard), ("replicate", "shard")
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={"replicate": "gc"})
model = gpt.GPT(gpt.Shape(layers=args.layers, width=args.width), seed=args.seed)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
gcclient.attach(model, compression=args.codec)  # without this line shards are averaged losslessly
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = text.load().train
generator = torch.Generator().manual_seed(1000 * args.seed + gcclient.rank())  # every rank reads elsewhere
for step in range(1, args.steps + 1):
    inputs, targets = text.batch(tokens, 8, 64, generator)
    loss = gpt.loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

gcclient.shutdown()
dist.destroy_process_group()
