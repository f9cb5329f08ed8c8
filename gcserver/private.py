"""Private daemons: one for a single job, started without root by the job itself, gone when the job is.

What may live here: what such a daemon is given where nobody says otherwise (ports, cores, names), starting it, and the
election of who starts it where several processes ask (`python -m gcserver.private NAME`, for `gcclient.autostart`).
What may not: its folder (`private_folder.py`), what happens while it lives and when it ends (`keeper.py`), the job
(`gcrun.py`).
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gcproto.paths import SOCKET_NAME
from gcserver import config, derivedkeys, ports, private_folder, values
from gcserver.config import Config, ConfigError
from gcserver.derivedkeys import SecretError
from gcserver.private_folder import Door

#: A daemon is given this long to take connections, seconds: the first start of a release compiles its kernels.
START_FOR: Final = 300.0
#: Below the range from which systems give ports to those who do not ask for one.
_PORTS: Final = range(20_000, 32_000)
#: Somebody may take a port between our look and the daemon's start; so often another one is tried.
_ATTEMPTS: Final = 3
#: What it is given unless the job says otherwise: peers that are still in the job may need what it holds.
_DEFAULTS: Final = {"node.metrics": "", "node.stop_grace": "30s", "log.level": "warning"}
#: Keys that are not the job's to choose.
_CHOSEN: Final = ("node.socket", "node.state")


class StartError(RuntimeError):
    """A private daemon did not start; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class Private:
    """A private daemon that takes connections.

    ``hold``: a descriptor that keeps it alive; ``keeper``: its keeper's process; ``admin``: its node.admin; ``cores``:
    those its lanes are pinned to, if any.
    """

    folder: Path
    hold: int
    keeper: subprocess.Popen[bytes]
    admin: str
    cores: tuple[int, ...]

    @property
    def socket(self) -> Path:
        return self.folder / SOCKET_NAME


def open_streams() -> None:
    """Standard streams that are closed lead nowhere from now on.

    To be called before anything is opened: what got one of their numbers would be a keeper's own stream, a hold among
    it, and such a daemon never ends.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def start(flags: Mapping[str, str], environ: Mapping[str, str], file: Path | None, door: Door | None = None) -> Private:
    """Start a private daemon; returns once it takes connections of workers and, at a Unix socket, of operators.

    ``flags``: keys of the configuration as `gcserver run` takes them (``node.listen`` may have port 0: a free one),
    ``file``: a configuration. ``door``: where others find it. With GC_JOB_SECRET in ``environ`` its keys are derived
    from that. Raises ConfigError, SecretError, StartError, OSError.
    """
    if importlib.util.find_spec("zmq") is None:
        raise StartError("a private daemon needs what gradcomm[server] installs: pip install 'gradcomm[server]'")
    # These are of whatever daemon the machine has besides.
    environ = {name: text for name, text in environ.items() if name not in ("GC_NODE_SOCKET", "GC_NODE_STATE")}
    for attempt in range(1, _ATTEMPTS + 1):
        folder = private_folder.make()
        try:
            settings = _settings(flags, environ, file, folder.path)
            argv = [sys.executable, "-m", "gcserver.keeper", str(folder.path), str(folder.alive), str(folder.hold)]
            argv += [str(door.link) if door is not None else "", *settings.arguments(file)]
            keeper = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(folder.alive, folder.hold),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(folder.hold)
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        finally:
            os.close(folder.alive)
        made = Private(folder.path, folder.hold, keeper, settings.config.node.admin, settings.cores)
        try:
            _wait_ready(made)
            return made
        except StartError:
            os.close(made.hold)
            keeper.wait()
            node = settings.config.node
            if (
                not settings.free_port
                or attempt == _ATTEMPTS
                or ports.free(node.listen.host, node.listen.port, node.lanes + 1)
            ):
                raise
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _Settings:
    """``flags`` for the daemon and what they come to; ``free_port``: its ports were chosen here."""

    flags: Mapping[str, str]
    config: Config
    cores: tuple[int, ...]
    free_port: bool

    def arguments(self, file: Path | None) -> list[str]:
        words = [word for key, text in self.flags.items() for word in (f"--{key}", text)]
        return words + (["--config", str(file)] if file is not None else [])


def _keys(folder: Path, secret: bytes, said: Config, name: str) -> dict[str, str]:
    """Keys of this daemon and of the peers that it knows, as flags; more are admitted when workers name them."""
    for key in ("security.key", "security.peers"):
        if key in said.sources:
            raise ConfigError(
                f"{derivedkeys.VARIABLE} is set, from which private daemons derive their keys; leave out one of them",
                key, said.sources[key],
            )  # fmt: skip
    others = (peer.name for peer in said.cluster.peers)
    private, listed = derivedkeys.write(folder, secret, derivedkeys.PRIVATE, name, others)
    return {"security.key": str(private), "security.peers": str(listed)}


def _settings(flags: Mapping[str, str], environ: Mapping[str, str], file: Path | None, folder: Path) -> _Settings:
    for key in _CHOSEN:
        if key in flags:
            raise ConfigError("is chosen for every private daemon; leave it out", f"--{key}", "flag")
    listen = flags.get("node.listen", environ.get("GC_NODE_LISTEN", ""))
    any_port = listen.endswith(":0")
    secret = derivedkeys.of_environment(environ)
    # First what the job has said; port 0 has a meaning here only, and keys come later.
    first = {**({"node.listen": f"{listen[:-1]}1"} if any_port else {}), **({"insecure": "true"} if secret else {})}
    said = config.load(file, {**flags, **first}, environ)
    chosen = {
        **{key: text for key, text in _DEFAULTS.items() if key not in said.sources},
        "node.socket": str(folder / SOCKET_NAME),
        "node.state": str(folder / "state"),
    }
    if "node.name" not in said.sources:
        # A job may have several of them on one machine.
        chosen["node.name"] = f"{config.hostname()[:100]}-{secrets.token_hex(4)}"
    if secret:
        chosen |= _keys(folder, secret, said, chosen.get("node.name", said.node.name))
    if "node.admin" not in said.sources:
        chosen["node.admin"] = f"unix:{folder / 'admin.sock'}"
    free_port = any_port or "node.listen" not in said.sources
    if free_port:
        host = said.node.listen.host
        chosen["node.listen"] = str(values.Address(host, free_ports(host, said.node.lanes + 1)))
    cores: tuple[int, ...] = ()
    if "node.cores" not in said.sources:
        cores = private_folder.reserve_cores(folder, said.node.lanes, os.sched_getaffinity(0))
        if cores:
            chosen["node.cores"] = ",".join(map(str, cores))
    merged = {**flags, **chosen}
    return _Settings(merged, config.load(file, merged, environ), cores, free_port)


def free_ports(host: str, count: int) -> int:
    """The first of ``count`` ports in a row that nobody uses now. Raises StartError."""
    try:
        for _ in range(100):
            first = random.SystemRandom().choice(_PORTS)
            if ports.free(host, first, count):
                return first
    except OSError as error:
        raise StartError(f"{host} cannot be bound ({error.strerror}): set node.listen") from None
    raise StartError(
        f"found no {count} free ports in a row from {_PORTS.start} to {_PORTS.stop - 1} on {host}; set node.listen"
    )


def _wait_ready(made: Private) -> None:
    """Until the daemon takes connections, those of operators too: the job's first command may be gcctl.

    Where those have a port it is not asked: a connection without a handshake counts as a failed one.

    Raises StartError when its keeper ends before, or after START_FOR seconds.
    """
    # It takes operators last: once these answer, workers do.
    paths = [made.admin.removeprefix("unix:")] if made.admin.startswith("unix:") else []
    paths.append(str(made.socket))
    end = time.monotonic() + START_FOR
    while time.monotonic() < end:
        if made.keeper.poll() is not None:
            raise StartError(
                f"the private daemon did not start (exit status {made.keeper.returncode}); it says why above"
            )
        if all(map(_answers, paths)):
            return
        time.sleep(0.02)
    made.keeper.terminate()
    raise StartError(f"the private daemon took no connection at {' or '.join(paths)} within {START_FOR:g} s")


def _answers(path: str) -> bool:
    """Whether a Unix socket takes connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.connect(path)
        return True
    return False


def join(name: str, environ: Mapping[str, str]) -> tuple[Path, int]:
    """The private daemon that goes by ``name``, started if there is none.

    Returns its folder and a descriptor that keeps it alive. Raises what :func:`start` raises.
    """
    door = Door.named(name)
    with private_folder.locked(door.lock):
        found = door.enter()
        if found is not None:
            return found
        try:
            made = start({}, environ, config.named_file(environ), door)
        except BaseException:
            door.lock.unlink(missing_ok=True)
            raise
        # Its keeper reads by now, and what was held until then would hide that it does no more.
        hold = private_folder.join(made.folder)
        os.close(made.hold)
        door.open(made.folder)
        return made.folder, hold


def main() -> int:
    """``python -m gcserver.private NAME``: prints the folder of the private daemon of that name, and keeps the daemon
    alive until its standard input ends; or ``error:`` and why there is none."""
    open_streams()
    try:
        folder, _ = join(sys.argv[1], os.environ)
    except (ConfigError, SecretError, StartError, OSError) as error:
        # Once where people look, once for who asked.
        print(f"gradcomm: {error}", file=sys.stderr, flush=True)
        print("error:", " ".join(str(error).split()), flush=True)
        return 1
    print(folder, flush=True)
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
