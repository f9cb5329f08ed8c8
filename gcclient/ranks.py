"""Which worker this process is: rank, world size, place on its machine, and the job's label.

What may live here: reading arguments, an initialised torch.distributed and launchers' variables. What may
not: sockets, the daemon, the store (`rendezvous.py` corrects the local part once daemons are known).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: where ranks of launchers are learned that bring no store
OPEN_MPI, SLURM = "OMPI_COMM_WORLD_*", "SLURM_PROCID, SLURM_NTASKS"
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class World:
    """Global rank and size, rank and number of workers on this node, and where that was learned."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: str

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size} (from "
                f"{self.source}): ranks start at 0 and end below the size, and local_size is at most size"
            )


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Tasks on this node from SLURM_STEP_TASKS_PER_NODE, such as ``2(x3),1``: nodes may have unequal numbers."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            counts: list[int] = []
            for count, times in _TASKS.findall(environ[name]):
                counts.extend([int(count)] * int(times or 1))
            node = int(environ.get("SLURM_NODEID", "0"))
            if node < len(counts):
                return counts[node]
    return int(environ.get("SLURM_NTASKS_PER_NODE", "1"))


def _from_launcher(environ: Mapping[str, str]) -> World | None:
    get = environ.get
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        # Without the local part (a hand-made launch) one worker a node is the only safe reading.
        return World(rank, size, int(get("LOCAL_RANK", "0")), int(get("LOCAL_WORLD_SIZE", "1")), "RANK, WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" in environ:
        return World(
            int(environ["OMPI_COMM_WORLD_RANK"]),
            int(environ["OMPI_COMM_WORLD_SIZE"]),
            int(get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
            int(get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
            OPEN_MPI,
        )
    # Inside a batch script, but not under srun, SLURM_PROCID is 0 and no step is set: that is one process.
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ and "SLURM_STEP_ID" in environ:
        return World(
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_NTASKS"]),
            int(get("SLURM_LOCALID", "0")),
            _slurm_local_size(environ),
            SLURM,
        )
    return None


def find_world(
    rank: int | None,
    size: int | None,
    local_rank: int | None,
    local_size: int | None,
    environ: Mapping[str, str],
    distributed: tuple[int, int] | None = None,
) -> World:
    """Who this process is: arguments first, then ``distributed`` (rank, size of torch's default group), then
    torchrun's, Open MPI's or Slurm's variables, then 0 of 1. Raises ValueError on what does not fit together."""
    if (rank is None) != (size is None):
        raise ValueError(f"give both rank and world_size or neither, got rank={rank}, world_size={size}")
    launched = _from_launcher(environ)
    if rank is not None and size is not None:
        source = "arguments of init()"
    elif distributed is not None:
        (rank, size), source = distributed, "torch.distributed"
    elif launched is not None:
        rank, size, source = launched.rank, launched.size, launched.source
    else:
        rank, size, source = 0, 1, "nothing set: a single process"
    same = launched is not None and (launched.rank, launched.size) == (rank, size)
    if local_rank is None:
        local_rank = launched.local_rank if launched is not None and same else 0
    if local_size is None:
        local_size = launched.local_size if launched is not None and same else local_rank + 1
    return World(rank, size, local_rank, local_size, source)


def find_label(environ: Mapping[str, str], world: World) -> str:
    """The job's name: GC_JOB, torchrun's run id, Slurm's job id, the rendezvous address, else ``default``.

    torchrun without ``--rdzv-id`` calls every job ``none``; the rendezvous address tells those apart. A launcher that
    started a part of the ``world`` alone, as a torchrun for each machine, has no name for all of it.
    """
    if environ.get("GC_JOB"):
        return environ["GC_JOB"]
    launched = _from_launcher(environ)
    whole = launched is None or launched.size == world.size
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if whole and run not in ("", "none"):
        return run
    if environ.get("SLURM_JOB_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}"
    if whole and environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return "default"
