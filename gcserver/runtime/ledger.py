"""What a supervisor must find again after it died: jobs, and each domain's step ledger.

What may live here: their files. What may not: what is in them (`gcserver.core.job`, `steering.py`, `planning.py`).

    jobs/<job>/job.msgpack       a JobMemory, replaced atomically
    jobs/<job>/steering.msgpack  controllers as `steering.py` saves them, replaced atomically
    jobs/<job>/planning.msgpack  how `planning.py` stands with the job's plans, replaced atomically
    jobs/<job>/<domain>.ledger   settled watermark, step ready up to, voided steps, plan switches; mapped, written in
                                 place
    reserve                      nothing: memory for these files when none is left

The ledger's watermark is written last: a kill in between leaves the step unsettled, and settling it again
writes the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from gcproto.packed import UNREADABLE
from gcserver.core.control_events import DomainLedger, JobMemory
from gcserver.core.events import DomainKey
from gcserver.runtime.statefiles import MemoryDamaged, map_file, private_directory, replace_file

log = logging.getLogger("gcserver")
VOIDS: Final = 1024
SWITCHES: Final = 256
#: No job has so many of either: a count beyond it is damaged.
MOST: Final = 1 << 40
LEDGER = np.dtype(
    [
        ("magic", "u8"),
        ("settled", "u8"),
        ("void_count", "u8"),
        ("switch_count", "u8"),
        ("ready", "u8"),
        ("reserved", "u8", 3),
        ("voids", "u8", VOIDS),
        ("switches", "u8", (SWITCHES, 2)),
    ]
)
MAGIC: Final = 0x3147444C4347
#: Held back for the files of jobs that run, where another one takes all there is.
RESERVE: Final = 1 << 20
LEDGER_BYTES: Final = -(-LEDGER.itemsize // 4096) * 4096


@dataclass(slots=True)
class Ledger:
    """The step ledger of one domain."""

    path: Path
    _data: Any = None

    def __post_init__(self) -> None:
        file = map_file(self.path, LEDGER_BYTES)
        self._data = np.frombuffer(file.view, LEDGER, 1)
        if int(self._data["magic"][0]) != MAGIC:
            self._data["magic"] = MAGIC

    def read(self) -> DomainLedger:
        """What it says. Raises MemoryDamaged."""
        d = self._data[0]
        if max(d["void_count"], d["switch_count"]) > MOST:
            raise MemoryDamaged(f"{self.path}: {d['void_count']} void steps and {d['switch_count']} changes of plan")
        voids = sorted(int(v) for v in d["voids"] if 0 < v <= d["settled"])
        count = int(d["switch_count"])
        newest = [d["switches"][i % SWITCHES] for i in range(max(0, count - SWITCHES), count)]
        switches = [(0, 0), *((int(first), int(plan)) for first, plan in newest)]
        settled = int(d["settled"])
        while len(switches) > 1 and switches[1][0] <= settled:
            switches.pop(0)
        return DomainLedger(settled, tuple(voids), tuple(switches), int(d["ready"]))

    def make_ready(self, step: int) -> None:
        """This node holds every aggregate up to ``step``."""
        self._data["ready"] = step

    def take_up(self, settled: int, switches: tuple[tuple[int, int], ...]) -> None:
        """A domain that this node comes into: what is settled, and (first step, version) of the plans after it."""
        d = self._data
        d["voids"] = 0
        known = [switch for switch in switches if switch != (0, 0)][-SWITCHES:]
        for i, switch in enumerate(known):
            d["switches"][0, i] = switch
        d["switch_count"], d["void_count"], d["ready"], d["settled"] = len(known), 0, settled, settled

    def settle(self, step: int, void: bool, plan: int, lag: int) -> None:
        d = self._data
        if void:
            count = int(d["void_count"][0])
            d["voids"][0, count % VOIDS] = step
            d["void_count"] = count + 1
        count = int(d["switch_count"][0])
        last = int(d["switches"][0, (count - 1) % SWITCHES, 1]) if count else 0
        if plan != last:
            d["switches"][0, count % SWITCHES] = (step + lag, plan)
            d["switch_count"] = count + 1
        d["settled"] = step


def _read(path: Path) -> bytes:
    """A file's content; empty if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@dataclass(slots=True)
class JobStore:
    """All jobs of one daemon, under its state directory."""

    state: Path
    ledgers: dict[DomainKey, Ledger] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------ the reserve
    def keep_reserve(self) -> None:
        """Hold some memory back, if there is any: what one job takes must not keep the others' from being written."""
        path = self.state / "reserve"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(descriptor, 0, RESERVE)
        except OSError:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _write(self, path: Path, content: bytes) -> None:
        """Replace a file that a job cannot do without; where no memory is left for it, with that of the reserve. Raises
        OSError."""
        try:
            replace_file(path, content)
        except OSError as error:
            reserve = self.state / "reserve"
            if error.errno != errno.ENOSPC or not reserve.exists():
                raise
            reserve.unlink(missing_ok=True)
            try:
                replace_file(path, content)
            except OSError:
                self.keep_reserve()  # it was not enough, and may be for another
                raise

    # ------------------------------------------------------------------------------------------- files
    def generation(self) -> int:
        """A number that lives exactly as long as this memory does."""
        path = self.state / "generation"
        private_directory(self.state)
        try:
            return int(path.read_text())
        except (FileNotFoundError, ValueError):
            number = int.from_bytes(os.urandom(7), "little")
            replace_file(path, str(number).encode())
            return number

    def lanes(self, lanes: int) -> int:
        """How many lanes what is remembered here was laid out for; ``lanes`` if nothing is."""
        path = self.state / "lanes"
        if any((self.state / "jobs").glob("*")):
            with contextlib.suppress(FileNotFoundError, ValueError):
                return int(path.read_text())
        replace_file(path, str(lanes).encode())
        return lanes

    def directory(self, job: bytes) -> Path:
        return self.state / "jobs" / job.hex()

    def save(self, job: bytes, memory: JobMemory) -> None:
        path = self.directory(job) / "job.msgpack"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(path, msgspec.msgpack.encode(memory))

    def save_steering(self, job: bytes, saved: bytes) -> None:
        self._write(self.directory(job) / "steering.msgpack", saved)

    def steering(self, job: bytes) -> bytes:
        """What was saved last; empty if nothing was."""
        return _read(self.directory(job) / "steering.msgpack")

    def save_planning(self, job: bytes, saved: bytes) -> None:
        """Raises OSError: a job goes on without it, so that the reserve is not for this."""
        replace_file(self.directory(job) / "planning.msgpack", saved)

    def planning(self, job: bytes) -> bytes:
        """What was saved last; empty if nothing was."""
        return _read(self.directory(job) / "planning.msgpack")

    def forget(self, job: bytes) -> None:
        for key in [k for k in self.ledgers if k[0] == job]:
            del self.ledgers[key]
        shutil.rmtree(self.directory(job), ignore_errors=True)
        self.keep_reserve()

    def take_up(self, domain: DomainKey, settled: int, switches: tuple[tuple[int, int], ...]) -> None:
        """A domain that this node comes into, with nothing that a lane of an earlier time may have left."""
        for path in self.directory(domain[0]).glob(f"{domain[1]:08x}.*.*"):
            path.unlink(missing_ok=True)
        self.ledger(domain).take_up(settled, switches)

    def ledger(self, domain: DomainKey) -> Ledger:
        found = self.ledgers.get(domain)
        if found is None:
            found = self.ledgers[domain] = Ledger(self.directory(domain[0]) / f"{domain[1]:08x}.ledger")
        return found

    def load(self) -> list[tuple[JobMemory, tuple[DomainLedger, ...]]]:
        """Every job an earlier life left; a directory without a usable memory of that very job is removed."""
        found = []
        for directory in sorted((self.state / "jobs").glob("*")):
            try:
                memory = _memory(directory)
                ledgers = tuple(self.ledger((memory.record.job, d.domain)).read() for d, _ in memory.domains)
            except MemoryDamaged as error:
                log.error("a job of an earlier life cannot be used and is dropped: %s", error)
                self.ledgers = {key: known for key, known in self.ledgers.items() if key[0].hex() != directory.name}
                shutil.rmtree(directory, ignore_errors=True)
                self.keep_reserve()
                continue
            found.append((memory, ledgers))
        return found


def _memory(directory: Path) -> JobMemory:
    """What was saved of the job that a directory is named after. Raises MemoryDamaged."""
    path = directory / "job.msgpack"
    try:
        memory = msgspec.msgpack.decode(path.read_bytes(), type=JobMemory)
    except (OSError, *UNREADABLE) as error:
        raise MemoryDamaged(f"{path}: {error}") from error
    if memory.record.job.hex() != directory.name:
        raise MemoryDamaged(f"{path} is of job {memory.record.job.hex()}")
    return memory
