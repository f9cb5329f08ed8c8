"""Who a process is, from arguments, torch and launchers' variables."""

from __future__ import annotations

import pytest

from gcclient.ranks import World, find_label, find_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (3, 5, 1, 2)),
        (MPI, (2, 4, 0, 2)),
        (SLURM, (6, 7, 0, 1)),
        ({**SLURM, "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 7, 1, 2)),
        ({**TORCHRUN, **MPI}, (3, 5, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1)),
        ({}, (0, 1, 0, 1)),
    ],
    ids=["torchrun", "mpi", "slurm, last node", "slurm, second node", "torchrun wins", "batch script", "nothing"],
)
def test_launchers(environ: dict[str, str], expected: tuple[int, ...]) -> None:
    world = find_world(None, None, None, None, environ)
    assert (world.rank, world.size, world.local_rank, world.local_size) == expected


def test_arguments_win_and_launchers_fill_in_only_what_fits_them() -> None:
    assert find_world(1, 2, None, None, TORCHRUN) == World(1, 2, 0, 1, "arguments of init()")
    assert find_world(3, 5, None, None, TORCHRUN).local_rank == 1
    assert find_world(3, 5, 0, 4, TORCHRUN).local_size == 4


def test_torch_wins_over_launchers() -> None:
    assert find_world(None, None, None, None, TORCHRUN, (0, 2)).size == 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="both rank and world_size"):
        find_world(1, None, None, None, {})
    with pytest.raises(ValueError, match="rank 2 of 2"):
        find_world(2, 2, None, None, {})
    with pytest.raises(ValueError, match="local rank 3 of 2"):
        find_world(0, 2, 3, 2, {})


@pytest.mark.parametrize(
    ("environ", "label"),
    [
        ({"GC_JOB": "mine", "TORCHELASTIC_RUN_ID": "x"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "run7", "SLURM_JOB_ID": "9"}, "run7"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "h:1"),
        ({"SLURM_JOB_ID": "9"}, "slurm-9"),
        ({}, "default"),
    ],
)
def test_label(environ: dict[str, str], label: str) -> None:
    assert find_label(environ, World(0, 1, 0, 1, "")) == label


@pytest.mark.parametrize(
    ("more", "label"), [({}, "default"), ({"SLURM_JOB_ID": "9"}, "slurm-9"), ({"GC_JOB": "mine"}, "mine")]
)
def test_a_torchrun_for_each_machine_has_no_name_for_the_job(more: dict[str, str], label: str) -> None:
    """``--standalone`` draws a run id, and a port, for the machine alone."""
    environ = TORCHRUN | {"TORCHELASTIC_RUN_ID": "6712bf1d", "MASTER_ADDR": "localhost", "MASTER_PORT": "4711"}
    assert find_label(environ, find_world(None, None, None, None, environ)) == "6712bf1d"
    assert find_label(environ | more, find_world(5, 12, 1, 4, environ)) == label
