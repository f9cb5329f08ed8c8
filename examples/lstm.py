"""A language model of two LSTM layers, without DDP: the optimizer averages gradients, clipped before each step.

gcrun -- torchrun --nproc-per-node=2 examples/lstm.py
"""

import argparse

import text
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gcclient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--codec", default="sidco-e(ratio=0.02)", help="any of docs/codecs.md")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

gcclient.init()  # torch.distributed is not needed
torch.manual_seed(args.seed + gcclient.rank())
embedding, head = nn.Embedding(text.VOCABULARY, args.width), nn.Linear(args.width, text.VOCABULARY)
lstm = nn.LSTM(args.width, args.width, num_layers=2)
model = nn.ModuleDict({"embedding": embedding, "lstm": lstm, "head": head})
gcclient.broadcast_parameters(model.state_dict())  # rank 0's weights for all
inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), compression=args.codec)

# Eight places a rank, from each of which it reads on and on: int64[characters, 8].
tokens = text.load().train.long()
own = tokens.tensor_split(8 * gcclient.size())[gcclient.rank() :: gcclient.size()]
streams = torch.stack([stream[: len(own[-1])] for stream in own], dim=1)
hidden = None
for step in range(1, args.steps + 1):
    at = 32 * (step - 1) % (len(streams) - 33)
    out, hidden = lstm(embedding(streams[at : at + 32]), hidden)
    hidden = tuple(h.detach() for h in hidden)  # what was read before is known, and not learned from again
    loss = cross_entropy(head(out).flatten(0, 1), streams[at + 1 : at + 33].flatten())
    optimizer.zero_grad()
    loss.backward()  # gradients go out as they become ready
    optimizer.synchronize()  # averages are in .grad, on every rank the same
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

gcclient.shutdown()
