"""What gcclient counts, step by step beside the loss, in TensorBoard or Weights & Biases.

gcrun -- torchrun --nproc-per-node=2 examples/trackers.py --to tensorboard
tensorboard --logdir out/runs
"""

import argparse
import os
import time

import digits
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gcclient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--to", choices=("tensorboard", "wandb"), default="tensorboard")
parser.add_argument("--folder", default="out/runs")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--codec", default="topk(ratio=0.02)", help="any of docs/codecs.md")
args = parser.parse_args()

gcclient.init()
torch.manual_seed(0)  # the same weights on all ranks
model = nn.Sequential(nn.Flatten(), nn.Linear(digits.SIZE**2, 256), nn.ReLU(), nn.Linear(256, 10))
inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
audit = gcclient.Audit(every=10, window=5)  # how far what arrives is from the exact average
optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), compression=args.codec, audit=audit)

log = finish = lambda *nothing: None
if gcclient.rank() == 0 and args.to == "tensorboard":
    from torch.utils.tensorboard import SummaryWriter

    writer, finish = SummaryWriter(args.folder), lambda: writer.close()
    log = lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]  # noqa: E731
elif gcclient.rank() == 0:
    import wandb

    os.makedirs(args.folder, exist_ok=True)
    mode = os.environ.get("WANDB_MODE", "offline")  # `wandb sync` sends it later; WANDB_MODE=online at once
    run = wandb.init(project="gradcomm", dir=args.folder, mode=mode, config=vars(args))
    log, finish = run.log, run.finish

generator = torch.Generator().manual_seed(gcclient.rank())
before, began = gcclient.stats(), time.perf_counter()
for step in range(1, args.steps + 1):
    pictures, labels = digits.batch(32, generator)
    loss = cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    now, ended = gcclient.stats(), time.perf_counter()  # counts since init(): what a step did is a difference
    values = {
        "loss": loss.item(),
        "gradcomm/step_seconds": ended - began,
        "gradcomm/wait_seconds": now["wait_seconds"] - before["wait_seconds"],
        "gradcomm/gradient_bytes": now["bytes_pushed"] - before["bytes_pushed"],
        "gradcomm/reconnects": now["reconnects"],
    }
    if now["audit"] is not None and now["audit"] != before["audit"]:
        values |= {"gradcomm/error": now["audit"]["error"], "gradcomm/cosine": now["audit"]["cosine"]}
    log(values, step)
    before, began = now, ended
    if gcclient.rank() == 0 and (step % 10 == 1 or step == args.steps):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

finish()
gcclient.shutdown()
