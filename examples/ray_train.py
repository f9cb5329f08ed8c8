"""Ray Train: a daemon on each node, with keys, which the node's first worker starts and which ends with that worker.

On a Ray cluster with gradcomm[server] on every node; where there is none, Ray makes one of this machine. Copy
start_daemon.

python examples/ray_train.py --workers 2
"""

import argparse
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import gcclient

#: What gcrun runs: a shell that reads a pipe which the worker holds open, and so ends with the worker, whatever becomes
#: of that. Ray kills a worker's children and its process group with it: gcrun, whose end is a SIGTERM to the shell, but
#: not the shell, which is in a session of its own and has the keys to remove.
HOLD = """trap '' TERM; echo "$GC_NODE_SOCKET"; read -r _; rm -rf "$0" """


def gather(mine: Any) -> list[Any]:
    """Of each worker, in rank order; over gloo, whatever Ray chose for gradients."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, dist.new_group(backend="gloo"))
    return everyone


def start_daemon() -> subprocess.Popen[str] | None:
    """Start this node's daemon, and set GC_NODE_SOCKET to its socket. Every worker calls it, the node's first gets the
    daemon's gcrun: closing its input ends the daemon. Raises RuntimeError where it did not start, or nodes differ."""
    node, first = get_context().get_node_rank(), get_context().get_local_rank() == 0
    name = f"ray-{node}-{secrets.token_hex(4)}"  # one machine may have daemons of several jobs
    daemon, socket, keys, security = None, "", "", []
    secret = set(gather(bool(os.environ.get("GC_JOB_SECRET"))))  # where nodes have one, gcrun derives keys from it
    if len(secret) > 1:
        raise RuntimeError("GC_JOB_SECRET is set on some nodes only: give it to all or to none")
    if secret == {False}:
        public = ""
        if first:
            keys = tempfile.mkdtemp(prefix="gradcomm-ray-")  # which nobody else can read; HOLD removes it
            keygen = [sys.executable, "-m", "gcserver.cli", "keygen", "--name", name, "--folder", keys]
            subprocess.run(keygen, check=True, stdout=subprocess.DEVNULL)
            public = Path(keys, f"{name}.pub").read_text()
        admitted = "".join(gather(public))
        if first:
            Path(keys, "peers").write_text(admitted)
            security = ["--security.key", f"{keys}/{name}.key", "--security.peers", f"{keys}/peers"]
    if first:
        flags = ["--node.name", name, "--node.listen", f"tcp://{ray.util.get_node_ip_address()}:0", *security]
        argv = [sys.executable, "-m", "gcclient.run", *flags, "--", "sh", "-c", HOLD, keys]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        daemon = subprocess.Popen(argv, **pipes, start_new_session=True)
        socket = daemon.stdout.readline().strip()
        if not socket:
            shutil.rmtree(keys, ignore_errors=True)
            raise RuntimeError(f"the daemon of {name} did not start; gcrun says why in this worker's log")
    sockets = {where: each for where, each in gather((node, socket)) if each}
    os.environ["GC_NODE_SOCKET"] = sockets[node]
    return daemon


def train(config: dict[str, Any]) -> list[str]:
    """A worker; Ray has initialised torch.distributed. Returns of each rank its daemon, and what it came to."""
    daemon = start_daemon()
    gcclient.init()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    gcclient.attach(model, compression=config["codec"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(gcclient.rank())  # every rank draws its own data
    losses = []
    for step in range(1, config["steps"] + 1):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x).squeeze(1) - x[:, :8].sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if gcclient.rank() == 0 and (step % 10 == 1 or step == config["steps"]):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digest, node = hashlib.sha256(weights).hexdigest()[:16], gcclient.stats()["node"]
    ranks = gather(f"node {node}, loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}")
    gcclient.shutdown()
    dist.barrier()  # the daemon of a node's first worker serves them all
    if daemon is not None:
        daemon.communicate()  # closes its input, and waits for its end
    return ranks


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=101)
parser.add_argument("--codec", default="topk(ratio=0.02)", help="any of docs/codecs.md")
parser.add_argument("--retries", type=int, default=0, help="how often to begin anew, with new daemons, after a failure")
parser.add_argument("--results", help="Ray's storage_path: a folder that all nodes reach (default: ~/ray_results)")

if __name__ == "__main__":
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "codec": args.codec},
        scaling_config=ScalingConfig(num_workers=args.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=args.results, failure_config=FailureConfig(args.retries)),
    )
    for rank, came_to in enumerate(trainer.fit().return_value):
        print(f"rank {rank}: {came_to}", flush=True)
