"""Training on a machine of `test_systemd.py`: the same twice, left alone and then slowly enough to be disturbed.

What may live here: one script that the machine's users run. What may not: assertions that the test can make.

Usage: systemd_worker.py FOLDER STEPS. FOLDER/RANK gets a line a step of the second time, FOLDER/RANK.json the digests
of the weights after each time. Steps are slow until there is FOLDER/undisturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gcclient


def trained(steps: int, rank: int, log: Path, pause: float = 0.0, until: Path | None = None) -> str:
    """A digest of the weights after ``steps`` steps; with ``pause`` seconds after each while there is no ``until``."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10))
    plain = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    optimizer = gcclient.DistributedOptimizer(plain, named_parameters=net.named_parameters(), compression="onebit")
    made = torch.Generator().manual_seed(rank)
    with log.open("w") as file:
        for step in range(1, steps + 1):
            x, y = torch.randn(16, 64, generator=made), torch.randint(0, 10, (16,), generator=made)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            print(step, file=file, flush=True)
            if until is not None and not until.exists():
                time.sleep(pause)
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    gcclient.init(deadline=60, seed=5)
    rank = gcclient.rank()
    alone = trained(steps, rank, Path(os.devnull))
    disturbed = trained(steps, rank, folder / str(rank), 0.02, folder / "undisturbed")
    (folder / f"{rank}.json").write_text(json.dumps([alone, disturbed]))
    gcclient.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
