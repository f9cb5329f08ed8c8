"""What a Slurm job of `test_slurm.py` trains: sums over its ranks, a daemon killed between them.

What may live here: one script that torchrun starts. What may not: assertions that the test can make.

Usage: slurm_worker.py FOLDER. FOLDER/RANK.json gets the sums, the user, what `gcctl peers` says of this rank's daemon,
and that daemon's process before and after.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gcclient

#: how `gcctl` ends where no daemon answers
UNREACHABLE = 3


def peers() -> dict[str, Any]:
    """What `gcctl peers` prints. A daemon that came back serves its workers a moment before operators."""
    for _ in range(100):
        asked = subprocess.run(["gcctl", "peers", "--json"], capture_output=True, text=True)
        if asked.returncode != UNREACHABLE:
            break
        time.sleep(0.2)
    assert asked.returncode == 0, asked.stderr
    return dict(json.loads(asked.stdout))


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    gcclient.init(deadline=60)
    rank, socket = gcclient.rank(), f"--node.socket={os.environ['GC_NODE_SOCKET']}"
    sums, lives = [], []
    for step in range(1, 5):
        total = gcclient.push_pull(torch.full((1000,), float(step * (rank + 1))), "x", average=False)
        sums += total.unique().tolist()
        if step in (1, 4):
            # the daemon, not its keeper, which has the same arguments
            daemon = subprocess.run(["pgrep", "-f", f"gcserver run .*{socket}"], capture_output=True, text=True)
            lives.append(sorted(daemon.stdout.split(), key=int)[-1])
        if step == 1 and rank == 1:
            os.kill(int(lives[0]), signal.SIGKILL)
    found = {"sums": sums, "lives": lives, "user": getpass.getuser(), **peers()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gcclient.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
