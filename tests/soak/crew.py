"""The workers of the soak's job, as torchrun would have them: started together, all started again when one has failed.

What may live here: their processes, their lives, what they log. What may not: faults, judging.

Every new life has the same name, its ranks on other nodes (they move by one), other gradients, and begins at the last
checkpoint: steps go back. Whatever an earlier life left in a daemon and is served to a later one gives a wrong result.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import daemons, netns, processes, workers
from tests.soak.record import Failure, Life, Log, Record

#: A checkpoint is "written" after so many steps.
CHECKPOINT = 10


class Crew(processes.Owner):
    """One worker a host, ``hosts[i]`` beside ``cluster[i]``; puts what happens into ``record``."""

    def __init__(self, hosts: Sequence[netns.Host], cluster: daemons.Daemons, folder: Path, record: Record) -> None:
        self.hosts, self.cluster, self.folder, self.record = tuple(hosts), cluster, folder, record
        self.label = daemons.job_name("faults")
        self.stop_file = folder / "stop"
        self.workers: list[subprocess.Popen[Any]] = []
        self._logs: list[Log] = []

    @property
    def life(self) -> Life:
        """The newest."""
        return self.record.lives[-1]

    def start(self) -> None:
        """The next life of the job. None may be running."""
        number, size = len(self.record.lives), len(self.hosts)
        done = self.record.lives[-1].last if number else 0
        nodes = tuple((rank + number) % size for rank in range(size))
        life = Life(number, nodes, done // CHECKPOINT * CHECKPOINT + 1, time.monotonic())
        folder = self.folder / f"life{number}"
        folder.mkdir()
        self._logs = [Log(folder / f"{rank}.jsonl", rank) for rank in range(size)]
        argv = [sys.executable, "-m", "tests.soak.fault_worker", "--first", str(life.first)]
        argv += ["--seed", str(self.record.seed + number), "--stop", str(self.stop_file)]
        self.workers = []
        for rank, node in enumerate(nodes):
            env = self.cluster[node].environment(self.label) | workers.alone(rank, size)
            log = ["--log", str(self._logs[rank].path)]
            with (folder / f"{rank}.txt").open("wb") as output:
                self.workers.append(self.hosts[node].start([*argv, *log], env=env, stdout=output, stderr=output))
        self.record.lives.append(life)

    def update(self) -> None:
        """Reads what the workers have logged since."""
        for log in self._logs:
            log.update(self.life, self.record.failures)

    @property
    def failed(self) -> bool:
        """Whether a worker of this life has ended otherwise than in good order."""
        return any(w.poll() for w in self.workers)

    @property
    def gone(self) -> bool:
        """Whether all have ended."""
        return all(w.poll() is not None for w in self.workers)

    def rank_on(self, node: int) -> int:
        """The rank whose worker is on a node."""
        return self.life.nodes.index(node)

    def bury(self, excused: Sequence[int]) -> None:
        """Ends what is left of a failed life. Ranks that were told nothing are noted as such, but not the ``excused``:
        those that a fault itself killed."""
        processes.end(self.workers, grace=1.0)
        self.update()
        told = {f.rank for f in self.record.failures if f.life == self.life.number}
        for rank in set(range(len(self.hosts))) - told - set(excused):
            self.record.failures.append(
                Failure(self.life.number, rank, time.monotonic(), "", False, self._output(rank))
            )

    def stop(self) -> None:
        """Lets the workers leave after their next step."""
        self.stop_file.touch()

    def close(self) -> None:
        """Ends those that run."""
        processes.end(self.workers, grace=2.0)

    def _open(self) -> None:
        self.start()

    def _output(self, rank: int) -> str:
        path = self.folder / f"life{self.life.number}" / f"{rank}.txt"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""
