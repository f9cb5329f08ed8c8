"""The daemon of one Slurm job on one node: `job_daemon.py start` in the prolog, `job_daemon.py stop` in the epilog.

What may live here: where its files lie, keys of the job's nodes, starting it as the job's user and again when it dies,
ending it. What may not: settings of a site (`gradcomm.conf`), what a daemon does. Root runs it, with Slurm's variables,
in gcserver's Python.

A job's files are in /run/gradcomm/slurm/JOB.NODE, which is its user's and only its user may enter: once that is so,
root opens nothing in it. What root has to know of the job lies beside it. Keys are derived from a secret that is the
same on all nodes and that root alone can read: so every node knows the keys of a job's nodes, without a word between
them, and nobody else does. Exit status: 0, whatever happened; 1 would have Slurm take the node out of service. What
went wrong is in `log`, in the job's folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gcserver import config, derivedkeys, ports
from gcserver.config import ConfigError
from gcserver.lives import PAUSE, Lives
from gcserver.private_folder import locked
from gcserver.values import Address

RUN = Path("/run/gradcomm/slurm")
CACHE = Path("/var/cache/gradcomm/slurm")
SHARED_MEMORY = Path("/dev/shm")
#: A user's first daemon on a node compiles kernels; then it takes a second or two.
READY_WITHIN = 300.0
STOPS_WITHIN = 10.0
#: Of a log, which is its user's, no more is read: a daemon that starts well says so early.
MOST_LOG = 1 << 20
READY = b"ready: node"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon of a job on a node has its files."""

    job: str
    node: str

    @property
    def folder(self) -> Path:
        return RUN / f"{self.job}.{self.node}"

    @property
    def state(self) -> Path:
        return SHARED_MEMORY / f"gradcomm-slurm-{self.job}.{self.node}"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pid(self) -> Path:
        """The process group of the daemon and its keeper. Not in the folder, which is the user's: root ends it."""
        return RUN / f"{self.job}.{self.node}.pid"

    @property
    def ports(self) -> Path:
        """The first port that was chosen for it, and the first that was not."""
        return RUN / f"{self.job}.{self.node}.ports"


def place(environ: Mapping[str, str]) -> Place:
    """Of the job and the node that Slurm's variables name."""
    return Place(environ["SLURM_JOB_ID"], environ["SLURMD_NODENAME"])


def write_keys(folder: Path, secret: bytes, job: str, node: str, nodes: Sequence[str]) -> list[str]:
    """This node's key and the list of the job's nodes, in ``folder``. Returns the flags that name them."""
    private, listed = derivedkeys.write(folder, secret, f"gradcomm slurm job key\0{job}", node, nodes)
    return [f"--security.key={private}", f"--security.peers={listed}"]


def address_of(node: str) -> str:
    """Where other nodes reach this one."""
    try:
        return str(socket.getaddrinfo(node, None, socket.AF_INET)[0][4][0])
    except OSError:
        return str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])


def choose_ports(where: Place, address: str, first: int, count: int) -> int:
    """The first of ``count`` free TCP ports in a row, from ``first`` on, that no other job has been given: its daemon
    may not have bound them yet. Raises OSError."""
    with locked(RUN / "ports.lock"):
        given: set[int] = set()
        for file in RUN.glob("*.ports"):
            with suppress(OSError, ValueError):  # its job is over, or there was no room to write it
                begin, end = map(int, file.read_text().split())
                given.update(range(begin, end))
        for start in range(first, 65537 - count):
            if given.isdisjoint(range(start, start + count)) and ports.free(address, start, count):
                where.ports.write_text(f"{start} {start + count}")
                return start
    raise OSError(f"there are no {count} free ports in a row from {first} on at {address}")


def command(where: Place, settings: Mapping[str, str], nodes: Sequence[str]) -> list[str]:
    """What starts the daemon; writes its keys. ``settings`` are the site's. Raises OSError, ValueError, ConfigError."""
    base = settings.get("GRADCOMM_CONFIG")
    site = config.load(Path(base) if base else None, {}, {})
    address = settings.get("GRADCOMM_ADDRESS") or address_of(where.node)
    first = int(settings.get("GRADCOMM_FIRST_PORT", "17470"))
    listen = Address(address, choose_ports(where, address, first, site.node.lanes + 1))
    secret = settings.get("GRADCOMM_SECRET")
    protection = ["--insecure=true"]
    if secret:
        protection = write_keys(where.folder, Path(secret).read_bytes(), where.job, where.node, nodes)
    return [
        str(Path(sys.executable).with_name("gcserver")),
        "run",
        *([f"--config={base}"] if base else []),
        f"--node.name={where.node}",
        f"--node.listen={listen}",
        f"--node.socket={where.folder}/daemon.sock",
        f"--node.admin=unix:{where.folder}/admin.sock",
        f"--node.state={where.state}",
        "--node.metrics=",
        # below that it would not say that it is ready
        *(["--log.level=info"] if site.log.level in ("warning", "error") else []),
        *protection,
    ]


def start(environ: Mapping[str, str]) -> None:
    """Until the daemon is ready, has ended, or takes too long."""
    where, user = place(environ), pwd.getpwuid(int(environ["SLURM_JOB_UID"]))
    # the folders on the way are root's, and everybody may pass
    RUN.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    where.ports.unlink(missing_ok=True)
    cache = CACHE / str(user.pw_uid)
    cache.mkdir(mode=0o700, exist_ok=True)
    try:
        make_folder(where.folder)
    except OSError as error:
        print(f"gradcomm: no daemon was started: {error}", file=sys.stderr)
        return
    with where.log.open("w+") as log:
        try:
            make_folder(where.state)
            os.chown(where.state, user.pw_uid, user.pw_gid, follow_symlinks=False)
            argv = command(where, environ, environ["GRADCOMM_NODES"].split())
        except (OSError, ValueError, ConfigError) as error:
            print(f"no daemon was started: {error}", file=log)
            return
        finally:
            # the folder last: what is in it could be something else from then on
            for path in (cache, *where.folder.iterdir(), where.folder):
                os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
        process = subprocess.Popen(
            [sys.executable, __file__, "keep", *argv],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", umask=0o077, start_new_session=True,
            user=user.pw_uid, group=user.pw_gid, extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
            env={"PATH": "/usr/bin:/bin", "CACHE_DIRECTORY": str(cache), "NUMBA_CACHE_DIR": str(cache / "kernels")},
        )  # fmt: skip
        where.pid.write_text(str(process.pid))
        end = time.monotonic() + READY_WITHIN
        # Not by its name, which its user may by now have given to a pipe, or to what is not the user's to read.
        while process.poll() is None and time.monotonic() < end and READY not in os.pread(log.fileno(), MOST_LOG, 0):
            time.sleep(0.1)


def make_folder(folder: Path) -> None:
    """A new folder of root's, whatever was in its place: something of an earlier life of the job that its user still
    writes to, or, where everybody may write, of a stranger. Raises OSError."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            shutil.rmtree(folder)
        else:
            folder.unlink()
    folder.mkdir(mode=0o700)


def keep(argv: Sequence[str]) -> int:
    """The daemon, started again when it dies, since running jobs wait for it; its last exit status.

    SIGTERM, which the epilog sends to the whole group, ends it for good.
    """
    ending: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    lives = Lives()
    while True:
        began = time.monotonic()
        daemon = subprocess.Popen(argv)
        if ending:
            # The signal came when there was none.
            daemon.terminate()
        status = daemon.wait()
        if ending or not lives.another(status, time.monotonic() - began):
            return status
        print(f"the daemon died ({status}); starting it again", file=sys.stderr, flush=True)
        time.sleep(PAUSE)


def stop(environ: Mapping[str, str]) -> None:
    """End the daemon, as a job's end should find it without jobs, and remove all that is left of it."""
    where = place(environ)
    try:
        group = int(where.pid.read_text())
    except (OSError, ValueError):
        group = 0
    for number, patience in ((signal.SIGTERM, STOPS_WITHIN), (signal.SIGKILL, 1.0)):
        end = time.monotonic() + patience
        if _lives(group, where):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(group, number)
        while _lives(group, where) and time.monotonic() < end:
            time.sleep(0.05)
    for folder in (where.folder, where.state):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (where.pid, where.ports):
        file.unlink(missing_ok=True)


def _lives(group: int, where: Place) -> bool:
    """Whether the job's daemon or its keeper is in the group; numbers of groups that ended are given again."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            if f"--node.socket={where.folder}/daemon.sock".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # it has ended meanwhile
    return False


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        sys.exit(keep(sys.argv[2:]))
    {"start": start, "stop": stop}[sys.argv[1]](os.environ)
