"""Single looks at the machine: one function, one question, one answer that says what is wrong and how to mend it.

What may live here: questions about ports, sockets, names, memory, limits, cores and clocks. Every function returns what
it found and changes nothing; none may take longer than the timeout it is given. What may not: which questions are
asked when, and how answers are shown (`doctor.py`).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import os
import resource
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import IAm, ToWorker, WhoAreYou
from gcproto.packed import Decoder, MessageError
from gcserver import ports
from gcserver.config import Config, Peer
from gcserver.runtime import shortage
from gcserver.values import Address, human_size, read_endpoint, show_cores

_STA_UNSYNC: Final = 0x40
_CAP_IPC_LOCK: Final = 14
_TMPFS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. ``fix`` says what to do and is empty when all is well."""

    name: str
    result: Literal["ok", "warn", "fail"]
    text: str
    fix: str = ""

    @property
    def fatal(self) -> bool:
        return self.result == "fail"


# ------------------------------------------------------------------------------------------------ addresses
def bound_addresses(config: Config) -> list[tuple[str, str, Address]]:
    """(what, key, address) of everything the daemon listens on over TCP."""
    node = config.node
    bound = [(f"lane {i}", "node.listen", node.listen.plus(i)) for i in range(node.lanes)]
    bound.append(("the control link", "node.listen", node.control))
    if node.admin and not node.admin.startswith("unix:"):
        bound.append(("the admin service", "node.admin", read_endpoint(node.admin)))
    if node.metrics is not None:
        bound.append(("metrics", "node.metrics", node.metrics))
    return bound


def port_free(what: str, key: str, address: Address) -> Check:
    """Whether the address can be bound now."""
    name = "ports"
    try:
        ports.bind(address.host, address.port)
    except socket.gaierror as error:
        return Check(name, "fail", f"{address.host!r} of {what} does not resolve: {error.strerror}", f"correct {key}")
    except OSError as error:
        text = f"{address.endpoint} for {what} "
        if error.errno == errno.EADDRINUSE:
            fix = f"stop what uses it (`ss -ltnp 'sport = :{address.port}'` shows it) or set another {key}"
            return Check(name, "fail", text + "is in use", fix)
        if error.errno == errno.EADDRNOTAVAIL:
            return Check(name, "fail", text + "is no address of this machine", f"set {key} to one (`ip address`)")
        if error.errno == errno.EACCES:
            return Check(name, "fail", text + "may be bound by root only", f"set {key} to a port from 1024 on")
        return Check(name, "fail", f"{text}cannot be bound: {error.strerror}", f"set another {key}")
    return Check(name, "ok", f"{address.endpoint} for {what} is free")


def resolve(host: str, timeout: float) -> list[str]:
    """The addresses of a host. Raises OSError, TimeoutError when the name service takes longer than ``timeout``."""

    answer: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.append(sorted({str(entry[4][0]) for entry in found}))
        except OSError as error:
            answer.append(error)

    # getaddrinfo knows no timeout: it gets a thread, which is left behind when it hangs
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    if not answer:
        raise TimeoutError
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def advertised(config: Config, timeout: float) -> Check:
    """Whether what peers are told leads to this machine from theirs."""
    told, name = config.node.advertise, "advertise"
    fix = "set node.advertise to an address of this machine that the others reach (`ip address`)"
    if config.node.listen.loopback:
        return Check(name, "ok", f"{told}: for daemons on this machine only")
    try:
        found = resolve(told.host, timeout)
    except TimeoutError:
        return Check(name, "warn", f"{told.host!r} did not resolve within {timeout:g} s", fix)
    except OSError as error:
        return Check(name, "fail", f"{told.host!r}, which peers are told, does not resolve here: {error.strerror}", fix)
    if any(Address(ip, told.port).loopback for ip in found):
        text = f"peers are told {told}, which is {found[0]}: on each of them that means itself"
        return Check(name, "fail", text, fix)
    return Check(name, "ok", f"{told} ({', '.join(found)})")


# ---------------------------------------------------------------------------------------------------- peers
def peer_names(config: Config) -> list[Check]:
    """Peers that have this node's name or address, but not both."""
    wrong: list[Check] = []
    for peer in config.cluster.peers:
        own = peer.name == config.node.name
        here = peer.address in (config.node.advertise, config.node.listen)
        if own and not here:
            text = f"{peer} has this node's name, but this node is at {config.node.advertise}"
            wrong.append(Check("peers", "fail", text, "give one of the two another node.name, or correct the address"))
        elif here and not own:
            text = f"{peer} has this node's address, but this node is {config.node.name!r}"
            wrong.append(Check("peers", "fail", text, "correct node.name or cluster.peers"))
    return wrong


def peer_reachable(peer: Peer, timeout: float) -> Check:
    """Whether a TCP connection to the peer's first lane can be made."""
    began = time.monotonic()
    where, port = f"{peer.name} at {peer.address}", peer.address.port
    try:
        found = resolve(peer.address.host, timeout)
        with socket.create_connection((found[0], port), max(timeout - (time.monotonic() - began), 0.1)):
            return Check("peers", "ok", f"{where} answers after {(time.monotonic() - began) * 1e3:.1f} ms")
    except socket.gaierror as error:
        return Check(
            "peers", "fail", f"{where} does not resolve: {error.strerror}", "correct the host in cluster.peers"
        )
    except ConnectionRefusedError:
        return Check("peers", "warn", f"{where}: nothing listens there", f"start gcserver on {peer.name}")
    except TimeoutError:
        fix = f"check that {peer.name} is up and that no firewall drops TCP port {port} and the lanes' ports after it"
        return Check("peers", "fail", f"{where} did not answer within {timeout:g} s", fix)
    except OSError as error:
        return Check("peers", "fail", f"{where} cannot be reached: {error.strerror}", "check address and routes")


# --------------------------------------------------------------------------------------------------- socket
def ask_daemon(path: Path, timeout: float) -> IAm | None:
    """Who serves the socket; None when nobody does. Raises TimeoutError when something is there and is silent."""
    deadline = time.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(os.fspath(path))
        channel: Channel[ToWorker] = Channel(sock, Decoder(ToWorker))
        channel.send(WhoAreYou())
        # select() knows no descriptor beyond 1,023, and a process may have more.
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poller.poll(1000 * left):
                for message, _ in channel.receive():
                    if isinstance(message, IAm):
                        return message
        raise TimeoutError
    except (FileNotFoundError, ConnectionRefusedError, ChannelClosed):
        return None
    except MessageError:
        raise TimeoutError from None
    finally:
        sock.close()


def socket_served(path: Path, timeout: float) -> Check:
    """Whether another daemon serves the workers' socket already."""
    name = "socket"
    try:
        who = ask_daemon(path, timeout)
    except TimeoutError:
        fix = f"see who holds it (`ss -lxp src {path}`), or set another node.socket"
        return Check(name, "fail", f"something that is not an answering daemon listens on {path}", fix)
    except OSError as error:
        return Check(name, "fail", f"{path}: {error.strerror}", "set another node.socket, or correct its permissions")
    if who is not None:
        text = f"daemon {who.node!r} at {who.address} already serves {path}"
        return Check(name, "fail", text, "stop it, or give this one its own node.socket, node.name and ports")
    return Check(name, "ok", f"{path} is not served yet")


def admin_socket_served(path: Path, timeout: float) -> Check:
    """Whether another process accepts connections on the Unix socket of ``node.admin``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return Check("ports", "ok", f"unix:{path} for the admin service is free")
        except OSError as error:
            fix = "set another node.admin, or correct its permissions"
            return Check("ports", "fail", f"unix:{path} for the admin service: {error.strerror or error}", fix)
    fix = f"stop that process (`ss -lxp src {path}` shows it), or set another node.admin"
    return Check("ports", "fail", f"unix:{path} for the admin service is served by another process", fix)


def directory_usable(name: str, key: str, directory: Path) -> Check:
    """Whether files can be put into ``directory``, or it can be made, and nobody else can."""
    there = _existing(directory)
    info = there.stat()
    if not stat.S_ISDIR(info.st_mode):
        return Check(name, "fail", f"{there} is no directory", f"remove it, or set another {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        held = f"of uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}"
        text = f"{there} ({held}) cannot be written by uid {os.getuid()}"
        return Check(name, "fail", text, f"set another {key}, or change its owner")
    if there == directory and info.st_uid not in (os.getuid(), 0):
        text = f"{there} belongs to uid {info.st_uid}, who could replace what this daemon puts there"
        return Check(name, "fail", text, f"set another {key}, or change its owner")
    if there == directory and info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        return Check(name, "fail", f"{there} can be written by everybody", f"chmod o-w {there}, or set another {key}")
    return Check(name, "ok", f"{directory} is usable" if there == directory else f"{directory} can be created")


def _existing(path: Path) -> Path:
    """The path itself or the nearest directory above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


# --------------------------------------------------------------------------------------------------- memory
def shared_memory(config: Config, need: int = 0) -> Check:
    """Whether the file system of ``node.state`` holds ``need`` bytes; at least what one partition of a job takes.

    A daemon with jobs to take up again has their memory already, and must not be kept from it: then it is a warning.
    """
    there, name = _existing(config.node.state), "shared memory"
    system = os.statvfs(there)
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    least = one_partition(config)
    mount, kind = mount_of(there)
    has = f"{mount} has {human_size(size)}, {human_size(free)} of it free"
    larger = (
        f"enlarge it (`mount -o remount,size=... {mount}`; docker run --shm-size=...; a Memory emptyDir in Kubernetes)"
    )
    if free < max(need, least):
        what = "this model needs" if need > least else "one partition needs"
        text = f"{has}, {what} {human_size(max(need, least))}"
        if not need and any((config.node.state / "jobs").glob("*")):
            return Check(name, "warn", f"{text}: the jobs in {config.node.state} go on, new ones will not fit", larger)
        return Check(name, "fail", text, larger)
    if kind not in _TMPFS:
        text = f"{config.node.state} lies on {mount}, a {kind}: every gradient would be written to it"
        return Check(name, "warn", text, "set node.state to a directory on a tmpfs such as /dev/shm")
    if free < 8 * least:
        return Check(name, "warn", f"{has}: room for small models only", larger)
    return Check(name, "ok", has + (f"; this model needs {human_size(need)}" if need else ""))


def one_partition(config: Config) -> int:
    """Bytes a job of one partition takes: input, output, both residuals in two versions, the retained payload."""
    return 7 * config.partition_bytes


def mount_of(path: Path) -> tuple[str, str]:
    """(mount point, kind) of the file system that holds ``path``; ("?", "?") where the system does not say."""
    best = ("?", "?")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return best
    real = os.path.realpath(path)
    for line in lines:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and (best[0] == "?" or len(mount) >= len(best[0])):
            best = (mount, kind)
    return best


def locked_memory(need: int) -> Check:
    """Whether ``need`` bytes may be locked, which registering memory with a network or graphics card takes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    if _has_capability(_CAP_IPC_LOCK):
        return Check("memlock", "ok", f"the limit of {human_size(soft)} does not bind this process (CAP_IPC_LOCK)")
    if soft >= need:
        return Check("memlock", "ok", f"{human_size(soft)}")
    text = f"only {human_size(soft)} may be locked, {human_size(need)} would be needed to pin the shared memory"
    return Check("memlock", "warn", text, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit file")


def _has_capability(bit: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(held >> bit & 1)


# --------------------------------------------------------------------------------------------- the machine
def open_files(config: Config) -> Check:
    """Whether the daemon may hold as many descriptors as its peers, lanes, workers and chunks need."""
    soft = shortage.descriptors()
    # a socket pair a peer, 64 workers with their channels, chunk files; measured daemons stay well below
    need = 256 + 8 * len(config.others)
    if soft != resource.RLIM_INFINITY and soft < need:
        fix = f"ulimit -Hn {max(1024, need)}, or LimitNOFILE= in the unit file"
        return Check("open files", "warn", f"at most {soft}, {need} may be needed", fix)
    return Check("open files", "ok", f"at most {soft}")


def cores(wanted: tuple[int, ...] | None, lanes: int) -> Check:
    """Whether the daemon may run on the cores it is told, and there is one for each lane."""
    allowed = sorted(os.sched_getaffinity(0))
    usable = [c for c in allowed if wanted is None or c in wanted]
    if not usable:
        text = (
            f"node.cores is {show_cores(wanted or ())}, but the system lets this process use {show_cores(allowed)} only"
        )
        return Check("cores", "fail", text, "set node.cores to some of those, or to auto")
    missing = [c for c in wanted or () if c not in allowed]
    if missing:
        text = f"cores {show_cores(missing)} of node.cores may not be used; {show_cores(usable)} remain"
        return Check("cores", "warn", text, "correct node.cores, or the cpuset of the container or unit")
    if len(usable) < lanes:
        return Check("cores", "warn", f"{lanes} lanes share cores {show_cores(usable)}", "lower node.lanes")
    quota = cpu_quota()
    if quota is not None and quota < lanes:
        text = f"the cgroup grants {quota:g} cores for {lanes} lanes: they will be stopped in the middle of steps"
        return Check("cores", "warn", text, "raise the CPU limit to whole cores, one per lane")
    return Check("cores", "ok", f"{show_cores(usable)} for {lanes} lane{'s' if lanes > 1 else ''}")


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores granted by the cgroup (version 2), None without a limit."""
    try:
        granted, period = (root / "cpu.max").read_text().split()
        return None if granted == "max" else int(granted) / int(period)
    except (OSError, ValueError):
        return None


def clock() -> Check:
    """Whether the monotonic clock is one; whether the wall clock is set by the network."""
    info = time.get_clock_info("monotonic")
    if not info.monotonic or info.adjustable:
        return Check("clock", "fail", f"the monotonic clock ({info.implementation}) can jump", "use a Linux kernel")
    synchronised = _clock_synchronised()
    if synchronised is False:
        text = "monotonic; the wall clock is not synchronised: steps do not depend on it, comparing logs does"
        return Check("clock", "warn", text, "run chrony or systemd-timesyncd on every node")
    return Check("clock", "ok", "monotonic" + (", wall clock synchronised" if synchronised else ""))


def _clock_synchronised() -> bool | None:
    """What the kernel says (adjtimex); None where it cannot be asked."""
    timex = ctypes.create_string_buffer(256)  # struct timex; modes = 0 only reads
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
            return None
    except (AttributeError, OSError):
        return None
    at = 5 * ctypes.sizeof(ctypes.c_long)  # modes (padded), offset, freq, maxerror, esterror come before status
    return not int.from_bytes(timex.raw[at : at + 4], "little") & _STA_UNSYNC


def in_parallel(questions: Sequence[Callable[[], Check]]) -> list[Check]:
    """Answers in the order of the questions, asked at the same time."""
    if not questions:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(32, len(questions))) as pool:
        return list(pool.map(lambda ask: ask(), questions))
