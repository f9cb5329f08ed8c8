"""A world of one whose group `gc` is given collectives that nobody waits for, run as a program of its own.

What may live here: the calls of `test_backend.py` whose failure would be that they never return.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import gcclient  # noqa: F401  # has torch know the backend


def main(store: str, calls: int) -> None:
    """Each of gloo's works is let go where gloo is done with it, in its own thread, with the tensors in it."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    group: Any = dist.new_group(backend="gc")
    for _ in range(calls):
        group.allreduce([torch.ones(1)])
        group.broadcast([torch.ones(1)])
        group.allgather([[torch.ones(1)]], [torch.ones(1)])
        group.barrier()
    dist.destroy_process_group()
    print("returned")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
