"""Several machines on one: network namespaces joined by a bridge, every link shaped both ways with ``tc tbf``.

What may live here: building, shaping and removing the network, and how to run a command on one of its hosts. What may
not: what is run there.

The namespaces have no names. Each is kept by a process that reads from a pipe of ours, and a namespace without
processes is removed by the kernel with its interfaces; so nothing can be left behind, not even after SIGKILL, and any
number of labs can exist side by side with the same addresses. Without root the same is done inside one user namespace
(``unshare -Urn``), where util-linux allows it. ``nsenter`` runs commands on a host: no ``ip netns``, which would need a
writable /run.

    switch namespace:  br0 -- port0, port1, ...        each port and each eth0: tbf at the lab's rate
    host i:            eth0 10.77.0.(i+1)/24, lo
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Literal

from benchmarks.lab import processes
from gcproto.rates import read_rate

Means = Literal["root", "userns"]
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
NETWORK = "10.77.0"
#: Networks without a rate, as benchmarks are told them; the second has no namespaces either.
UNSHAPED: Final = ("unshaped", "loopback")


class LabError(RuntimeError):
    """A command that builds or changes the lab failed; ``str()`` holds the command and what it said."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether links can be shaped here: by which means (None: they cannot), and why, in one sentence."""

    means: Means | None
    reason: str


def bits_per_second(rate: str) -> int:
    """``"100mbit"``, ``"8000bit"`` as bits per second; ValueError saying what is accepted."""
    return round(8 * read_rate(rate))


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of a lab: its address, the interface that carries it, and how commands get there."""

    index: int
    address: str
    interface: str
    enter: tuple[str, ...] = ()  # nothing on plain loopback

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as it has to be started from outside; it keeps its pid and ends with the thread that starts it."""
        return [*self.enter, *processes.dies_with_parent(argv)]

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Runs ``argv`` on this host; options as in :func:`benchmarks.lab.processes.start`."""
        return processes.start(self.command(argv), **options)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables for programs on this host: gloo is told its interface, since host names mean nothing here."""
        env = dict(os.environ if base is None else base)
        env["GLOO_SOCKET_IFNAME"] = self.interface
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that addresses have no names
        env["PATH"] = os.pathsep.join((env.get("PATH", os.defpath), *processes.SBIN))
        return env


class Loopback:
    """The fallback with the interface of :class:`Lab`: every host is this machine, and nothing is shaped."""

    means: Means | None = None

    def __init__(self, nodes: int) -> None:
        self.hosts = tuple(Host(i, "127.0.0.1", "lo") for i in range(nodes))

    def set_rate(self, rate: str | None) -> None:
        """Loopback has no rate; ValueError for anything but None."""
        if rate is not None:
            raise ValueError(f"loopback cannot be shaped to {rate}")

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Lab(processes.Owner):
    """``nodes`` hosts on one switch, a context manager; ``rate`` None leaves the links unshaped.

    means: "root" or "userns", by default what :func:`probe` found. Raises LabError where neither works.
    """

    def __init__(self, nodes: int, rate: str | None = None, means: Means | None = None) -> None:
        if not 1 <= nodes <= 250:
            raise ValueError(f"nodes {nodes}: expected 1 to 250, all in one /24")
        if rate is not None:
            bits_per_second(rate)  # a wrong rate is refused before anything exists
        self.nodes, self.rate, self.hosts = nodes, rate, ()
        self.means: Means | None = means or shaping()
        self._keepers: list[subprocess.Popen[Any]] = []
        self._enter_switch: tuple[str, ...] = ()
        self._shaped: set[int] = set()
        if self.means is None:
            raise LabError(probe().reason)

    hosts: tuple[Host, ...]

    def close(self) -> None:
        """Ends the processes that keep the namespaces; the kernel removes the rest. Twice is no error."""
        with processes.uninterrupted():
            keepers, self._keepers = self._keepers, []
            for keeper in keepers:
                if keeper.stdin is not None:
                    keeper.stdin.close()
                if keeper.stdout is not None:
                    keeper.stdout.close()
            processes.end(keepers, grace=1.0)

    def set_rate(self, rate: str | None, only: Host | None = None) -> None:
        """Shapes every link, or that of one host, both ways, from now on; None takes the shaping away. Live connections
        notice at once. ``rate`` of the lab stays that of all links."""
        how = [] if rate is None else tbf(bits_per_second(rate))
        for host in self.hosts if only is None else (only,):
            if host.index in self._shaped:
                # Before another rate too: a segment that waits in the queue may be longer than the new, smaller bucket,
                # and would never leave it.
                self._shape(host, "del")
            if rate is not None:
                self._shape(host, "replace", how)
        if only is None:
            self.rate = rate

    def _shape(self, host: Host, verb: str, how: Sequence[str] = ()) -> None:
        self._run([*host.enter, _tool("tc"), "qdisc", verb, "dev", "eth0", "root", *how])
        self._run([*self._enter_switch, _tool("tc"), "qdisc", verb, "dev", f"port{host.index}", "root", *how])
        (self._shaped.discard if verb == "del" else self._shaped.add)(host.index)

    def shared_memory(self, nbytes: int) -> tuple[tuple[Host, ...], Path]:
        """A /dev/shm of ``nbytes`` that the lab has to itself: the hosts as commands see it on them (their working
        directory is /), and the folder in which it is seen from here. It goes with the lab.
        """
        mount = f'mount -t tmpfs -o size={nbytes},mode=1777 shm /dev/shm && shift && exec "$@"'
        inside = self._enter_switch if self.means == "userns" else ()
        pid = self._keep([*inside, _tool("unshare"), "-m", "sh", "-c", mount, "sh"])
        enter = (_tool("nsenter"), "-t", str(pid), "-m", "--")
        return tuple(replace(h, enter=(*h.enter, *enter)) for h in self.hosts), Path(f"/proc/{pid}/root/dev/shm")

    def _open(self) -> None:
        root = self.means == "root"
        switch = self._keep([_tool("unshare"), "-n" if root else "-Urn"])
        self._enter_switch = _enter(switch, root)
        self._run([*self._enter_switch, _tool("ip"), "link", "add", "br0", "type", "bridge"])
        self._run([*self._enter_switch, _tool("ip"), "link", "set", "br0", "up"])
        hosts = []
        for i in range(self.nodes):
            pid = self._keep([*self._enter_switch, _tool("unshare"), "-n"])
            enter = _enter(pid, root)
            ip, port = _tool("ip"), f"port{i}"
            peer = ["type", "veth", "peer", "name", "eth0", "netns", str(pid)]
            self._run([*self._enter_switch, ip, "link", "add", port, *peer])
            self._run([*self._enter_switch, ip, "link", "set", port, "master", "br0", "up"])
            self._run([*enter, ip, "address", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth0"])
            self._run([*enter, ip, "link", "set", "lo", "up"])
            self._run([*enter, ip, "link", "set", "eth0", "up"])
            hosts.append(Host(i, f"{NETWORK}.{i + 1}", "eth0", enter))
        self.hosts = tuple(hosts)
        self.set_rate(self.rate)

    def _keep(self, prefix: Sequence[str]) -> int:
        """Starts a process in a new namespace that waits for the end of its input; its pid, once it is inside."""
        waiter = processes.dies_with_parent(["sh", "-c", "echo inside; exec cat"], "KILL")
        keeper = processes.start(
            [*prefix, "--", *waiter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        line = keeper.stdout.readline()
        if line != b"inside\n":
            raise LabError(f"{' '.join(prefix)}: {_said(keeper.stderr)}")
        keeper.stderr.close()
        return keeper.pid

    @staticmethod
    def _run(argv: Sequence[str]) -> None:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def open_lab(nodes: int, rate: str | None = None) -> Lab | Loopback:
    """A lab where one can be had, else loopback; whether it is shaped is seen from ``means``."""
    return Lab(nodes, rate) if shaping() else Loopback(nodes)


def rate_of(network: str) -> str | None:
    """The rate of a network as benchmarks are told it: a rate, or one of :data:`UNSHAPED`."""
    return None if network in UNSHAPED else network


def open_network(nodes: int, network: str) -> Lab | Loopback:
    """The hosts of a network as benchmarks are told it. Raises LabError where it needs namespaces and none can be."""
    return Loopback(nodes) if network == "loopback" else Lab(nodes, rate_of(network))


@functools.cache
def probe() -> Probe:
    """Tries it: builds a lab of one host as root, or else in a user namespace, and removes it again (0.1 s)."""
    missing = sorted({f"{tool} ({package})" for tool, package in TOOLS.items() if processes.which(tool) is None})
    if missing:
        return Probe(None, f"no network lab: {', '.join(missing)} not installed")
    said = []
    ways: list[Means] = ["root", "userns"] if os.geteuid() == 0 else ["userns"]
    for means in ways:
        try:
            with Lab(1, "100mbit", means=means):
                return Probe(means, "namespaces and tbf work as " + ("root" if means == "root" else "a plain user"))
        except (LabError, OSError) as error:
            said.append(f"{means}: {error}")
    return Probe(None, f"no network lab: {'; '.join(said)}")


def shaping() -> Means | None:
    """By which means links can be shaped here, None if they cannot; :func:`probe` says why."""
    return probe().means


def tbf(bits: int) -> list[str]:
    """Arguments of a token bucket at ``bits`` per second.

    The bucket holds 1 ms of traffic, so that even a message of a few hundred kB meets the rate and not the bucket, but
    never less than 32 KiB: smaller ones cost CPU time, since large segments must be cut up. The queue holds 50 ms.
    """
    burst = max(32 * 1024, bits // 8000)
    return ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "50ms"]


def _enter(pid: int, root: bool) -> tuple[str, ...]:
    user = () if root else ("-U", "--preserve-credentials")
    return (_tool("nsenter"), "-t", str(pid), *user, "-n", "--")


def _tool(name: str) -> str:
    path = processes.which(name)
    if path is None:
        raise LabError(f"{name} ({TOOLS[name]}) is not installed")
    return path


def _said(stream: IO[bytes]) -> str:
    return stream.read().decode(errors="replace").strip() or "it ended without a word"
