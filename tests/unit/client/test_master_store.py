"""The store at which ranks of mpirun and srun meet: real ones, on loopback, a thread a rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from benchmarks.lab.ports import free_ports
from gcclient import master_store, rendezvous
from gcclient.errors import JoinRefused, StepTimeout
from gcclient.master_store import address, meet
from gcclient.ranks import OPEN_MPI, SLURM, World
from gcclient.rendezvous import Place

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def world(rank: int, size: int = 3, source: str = SLURM) -> World:
    return World(rank, size, 0, 1, source)


def place(rank: int, turn: int = 0) -> Place:
    return Place(f"n{rank}", f"tcp://10.0.0.{rank}:{turn + 1}", token=f"{turn}" if rank == 0 else "")


def each(ranks: int, call: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(call, range(ranks)))


@pytest.fixture
def at() -> tuple[str, int]:
    return "127.0.0.1", free_ports(1)


def test_it_is_for_launchers_that_bring_none_and_where_somebody_says_where() -> None:
    assert address(world(1, source=OPEN_MPI), MASTER) == ("10.0.0.1", 29500) == address(world(0), MASTER)
    assert address(world(1, source="RANK, WORLD_SIZE"), MASTER) is None
    assert address(world(1), {"MASTER_ADDR": "10.0.0.1"}) is None and address(world(1), {}) is None
    for wrong in ("abc", "0", "65536", "-1"):
        with pytest.raises(ValueError, match=f"MASTER_PORT: .*'{wrong}'"):
            address(world(1), MASTER | {"MASTER_PORT": wrong})


def test_all_learn_all_places_again_and_again_at_the_same_port(at: tuple[str, int]) -> None:
    """Of the meeting they are at: what was said at the one before is gone, whoever comes back first."""

    def meetings(rank: int) -> list[tuple[Place, ...]]:
        return [meet(at, "k", world(rank), place(rank, turn), 90) for turn in range(8)]

    wanted = [tuple(place(rank, turn) for rank in range(3)) for turn in range(8)]
    assert each(3, meetings) == [wanted] * 3
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(at)


def test_who_comes_first_waits_for_rank_0_and_says_so(at: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_store, "_SAY_EVERY", 0.1)
    said = threading.Event()
    monkeypatch.setattr(master_store.log, "warning", lambda text, *words: said.set() if "rank 0 at" in text else None)

    def call(rank: int) -> object:
        assert rank > 0 or said.wait(30)
        return meet(at, "k", world(rank, 2), place(rank), 30)

    assert each(2, call) == [(place(0), place(1))] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_who_never_comes_is_named(at: tuple[str, int], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_EVERY", timedelta(seconds=0.05))
    with pytest.raises(StepTimeout) as caught:
        meet(at, "k", world(rank, 2), place(rank), 0.3)
    assert caught.value.missing == (f"rank {1 - rank}",) and caught.value.phase == "join"
    assert rank == 0 or "MASTER_ADDR is" in str(caught.value)


def test_a_port_that_another_has_is_refused(at: tuple[str, int]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", at[1]))
        taken.listen()
        with pytest.raises(JoinRefused, match=f"port {at[1]}.*MASTER_PORT a port that is free"):
            meet(at, "k", world(0, 2), place(0), 5)
