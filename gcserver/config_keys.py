"""The keys of the configuration: what each is for, how its value is read, its default.

What may live here: one table with one entry per key, the readers that only a key needs, and what is said about a key
that does not exist. What may not: how file, flags and variables combine and what must hold between keys
(`config.py`), values that commands read too (`values.py`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gcproto.manifest import PAGE
from gcproto.modes import MODES, QUALITIES, STATIC
from gcserver import values
from gcserver.core.control_config import POLICIES
from gcserver.logsetup import CONSOLE, FORMATS
from gcserver.planner import controllers
from gcserver.values import Address

MIN_PARTITION: Final = 256 << 10
MAX_PARTITION: Final = 64 << 20
MAX_LANES: Final = 64
_ONCE: Final = "every node has one name and one address"
#: What the lanes of two nodes may speak.
ZMQ: Final = "zmq"
UCX: Final = "ucx"
TRANSPORTS: Final = (ZMQ, UCX)
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another daemon of the cluster and where it listens."""

    name: str
    address: Address

    def __str__(self) -> str:
        return f"{self.name}={self.address}"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: how its value is read (ValueError says what is accepted), what it is for, its default.

    ``default`` is what one would write in the file; None means derived, and ``derived`` says from what.
    """

    name: str
    read: Callable[[object], Any]
    accepts: str
    about: str
    default: object = None
    derived: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return "GC_" + self.name.upper().replace(".", "_")


# ------------------------------------------------------------------------------------------------ readers
def _text(raw: object, expected: str) -> str:
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
        raise ValueError(f"expected {expected}")
    return raw.strip()


def _path(raw: object) -> Path:
    try:
        path = Path(_text(raw, "an absolute path")).expanduser()
    except RuntimeError:
        # "~" of a user that this machine does not have
        raise ValueError("expected an absolute path, or ~ and a user of this machine") from None
    if not path.is_absolute():
        raise ValueError("expected an absolute path")
    return path


def _socket_path(raw: object) -> Path:
    path = _path(raw)
    # sun_path of unix(7): 108 bytes with the final zero; the lanes' sockets lie beside this one
    if len(os.fsencode(path)) > 95:
        raise ValueError("expected a path of at most 95 bytes (the system's limit for socket names)")
    return path


def _admin(raw: object) -> str:
    expected = 'host:port, unix:/path, or "" to turn it off'
    if not isinstance(raw, str):
        raise ValueError(f"expected {expected}")
    text = raw.strip()
    if text.startswith("unix:"):
        return f"unix:{_socket_path(text.removeprefix('unix:').removeprefix('//'))}"
    return values.read_endpoint(text, expected).endpoint if text else ""


def _metrics(raw: object) -> Address | None:
    expected = 'host:port, or "" to turn it off'
    if isinstance(raw, str) and not raw.strip():
        return None
    return values.read_endpoint(raw, expected)


def _peers(raw: object) -> tuple[Peer, ...]:
    expected = 'a list such as ["b=tcp://host:7470"], or "b=tcp://host:7470,c=tcp://host:7470"'
    peers = []
    for item in values.read_list(raw, expected):
        name, equals, address = item.partition("=")
        try:
            if not equals:
                raise ValueError("expected name=tcp://host:port")
            peers.append(Peer(values.read_name(name), values.read_tcp(address)))
        except ValueError as error:
            raise ValueError(f"{item!r}: {error}") from None
    for i, peer in enumerate(peers):
        for other in peers[:i]:
            if other.name == peer.name:
                raise ValueError(f"{peer.name!r} is there twice, as {other.address} and as {peer.address}; {_ONCE}")
            if other.address == peer.address:
                raise ValueError(f"{peer.address} is there twice, as {other.name!r} and as {peer.name!r}; {_ONCE}")
    return tuple(peers)


def _partition(raw: object) -> int:
    size = values.read_size(raw)
    if not MIN_PARTITION <= size <= MAX_PARTITION or size % PAGE:
        raise ValueError("expected 256KiB to 64MiB, a multiple of 4096 bytes")
    return size


def _path_or_none(raw: object) -> Path | None:
    if isinstance(raw, str) and not raw.strip():
        return None
    try:
        return _path(raw)
    except ValueError:
        raise ValueError('expected an absolute path, or "" for none') from None


def _etcd(raw: object) -> tuple[str, ...]:
    expected = 'expected URLs of etcd\'s members such as "http://10.0.0.1:2379"'
    if isinstance(raw, str):
        raw = [part for part in raw.split(",") if part.strip()]
    if not isinstance(raw, list | tuple):
        raise ValueError(expected)
    urls = tuple(_text(url, expected.removeprefix("expected ")).rstrip("/") for url in raw)
    for url in urls:
        if not re.fullmatch(r"https?://[^/\s?#@]+", url):
            raise ValueError(expected)
    return urls


def _codec(raw: object) -> str:
    spec = _text(raw, 'a codec spec such as "none", "fp16" or "topk(ratio=0.01)"')
    if spec == "none":
        return spec
    from gcserver.codecs import parse  # numba is loaded only where a codec has to be checked

    return parse(spec).spec


def _one_of(words: tuple[str, ...]) -> Callable[[object], str]:
    def read(raw: object) -> str:
        if not isinstance(raw, str) or raw.strip().lower() not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return raw.strip().lower()

    return read


def _globs(raw: object) -> tuple[str, ...]:
    return tuple(values.read_list(raw, 'a list such as ["*.bias", "head.*"], or "*.bias,head.*"'))


def _controller(raw: object) -> str:
    return controllers.read(_text(raw, f"one of {', '.join(controllers.NAMES)}")).text


def _within(read: Callable[[object], float], low: float, high: float, show: Callable[[Any], str]) -> Any:
    def bounded(raw: object) -> float:
        value = read(raw)
        if not low <= value <= high:
            raise ValueError(f"expected {show(low)} to {show(high)}")
        return value

    return bounded


def _duration(low: float, high: float) -> Callable[[object], float]:
    bounded: Callable[[object], float] = _within(values.read_duration, low, high, values.show_duration)
    return bounded


KEYS: Final[tuple[Key, ...]] = (
    Key("node.name", values.read_name, "a name unique in the cluster", "Name of this node.", derived="the host name"),
    Key(
        "node.listen", values.read_tcp, values.TCP_FORM,
        "Where other daemons reach this one: lane i takes port + i, the control link the port after the last lane.",
        "tcp://127.0.0.1:7470",
    ),
    Key(
        "node.advertise", values.read_tcp, values.TCP_FORM,
        "The address that peers are told, where it differs from the one bound (NAT, or listening on 0.0.0.0).",
        derived="node.listen, with the host name in place of 0.0.0.0",
    ),
    Key(
        "node.socket", _socket_path, "an absolute path", "Unix socket of the workers on this machine.",
        derived="$XDG_RUNTIME_DIR/gradcomm/daemon.sock, else /tmp/gradcomm-<uid>/daemon.sock",
    ),
    Key(
        "node.state", _path, "an absolute path, on a tmpfs",
        "Directory of the shared memory files: gradients, residuals and the ledger a restarted daemon resumes from.",
        derived="/dev/shm/gradcomm-<uid>/<node.name>",
    ),
    Key(
        "node.admin", _admin, 'host:port, unix:/path or ""',
        "gRPC service of the operator (gcctl); empty: off.", "127.0.0.1:7460",
    ),
    Key("node.metrics", _metrics, 'host:port or ""', "Metrics and dashboard over HTTP; empty: off.", "127.0.0.1:7461"),
    Key(
        "node.lanes", lambda raw: values.read_int(raw, 1, MAX_LANES), f"1 to {MAX_LANES}",
        "Server processes of this daemon, each with cores and connections of its own. The same on every node.", 1,
    ),
    Key(
        "node.transport", _one_of(TRANSPORTS), ", ".join(TRANSPORTS),
        "What lanes speak to each other: ZeroMQ over TCP, or the system's UCX for RDMA. The same on every node.", ZMQ,
    ),
    Key(
        "node.cores", values.read_cores, values.CORES_FORM,
        "Cores the lanes are pinned to, as far as the system lets the daemon use them; auto pins nothing.", "auto",
    ),
    Key(
        "node.stop_grace", _duration(0, 3600), "0s to 3600s",
        "How long SIGTERM waits for jobs to end before it leaves them to the next life of this daemon.", "2s",
    ),
    Key(
        "admin.ca", _path_or_none, 'an absolute path or ""',
        "Certificates of the CA whose operators are let in (PEM); with admin.cert and admin.key, node.admin and "
        "node.metrics speak TLS.", "",
    ),
    Key("admin.cert", _path_or_none, 'an absolute path or ""', "Certificate of this node for operators (PEM).", ""),
    Key("admin.key", _path_or_none, 'an absolute path or ""', "Private key of admin.cert (PEM).", ""),
    Key(
        "admin.audit_log", _path_or_none, 'an absolute path or ""',
        "File that gets a line for every attempt to change something through node.admin; empty: none is kept.", "",
    ),
    Key(
        "cluster.peers", _peers, '["name=tcp://host:port", ...]',
        "The other daemons. One list for all nodes will do: a node skips itself. Not needed under torchrun.", [],
    ),
    Key(
        "cluster.lease", _duration(1, 3600), "1s to 3600s",
        "A peer that has been silent for this long counts as dead.", "30s",
    ),
    Key(
        "cluster.etcd", _etcd, '["http://host:port", ...]',
        "Members of the etcd that decides who is left of a job with skip or shrink. The same on every node.", [],
    ),
    Key(
        "security.key", _path_or_none, 'an absolute path or ""',
        "File of this node's secret key, made by `gcserver keygen`; with it all traffic between daemons is encrypted.",
        "",
    ),
    Key(
        "security.peers", _path_or_none, 'an absolute path or ""',
        "File of the public keys of all nodes that are admitted, a line each; read again when it changes.", "",
    ),
    Key(
        "job.deadline", _duration(1, 7 * 86400), "1s to 604800s",
        "What bounds every wait of a job whose workers do not say otherwise.", "1800s",
    ),
    Key(
        "job.on_loss", _one_of(POLICIES), ", ".join(POLICIES),
        "What a job does when a node is lost: it ends; the rest skip the step under way; the rest run it again.",
        "fail",
    ),
    Key("codec.default", _codec, 'a codec spec such as "topk(ratio=0.01)"', "Codec of jobs that name none.", "none"),
    Key(
        "plan.mode", _one_of(MODES), ", ".join(MODES),
        "Who makes the plans of jobs that do not say: operators, or the planner with all or one of its parts.", STATIC,
    ),
    Key("plan.quality", _one_of(QUALITIES), ", ".join(QUALITIES), "What automatic plans may lose.", "balanced"),
    Key(
        "plan.warmup_steps", lambda raw: values.read_int(raw, 0, 1_000_000), "0 to 1000000",
        "Steps a job makes before its first automatic plan; until then codec.default holds.", 10,
    ),
    Key(
        "plan.late_after", lambda raw: values.read_int(raw, 0, 1_000_000_000), "0 to 1000000000",
        "Steps a model makes before automatic plans of quality balanced use low rank below 16, and ten times as many "
        "before they use sparsifiers: both send most of a gradient steps later. With optimizers that are not known to "
        "stand that, low rank below 16 waits ten times as long, too, and sparsifiers are never used.",
        100,
    ),
    Key(
        "plan.exclude", _globs, '["GLOB", ...]',
        "Names of tensors that automatic plans leave uncompressed.", [],
    ),
    Key(
        "plan.controller", _controller, 'a controller such as "none", "dc2-da2" or "dc2-da5(k_max=0.2)"',
        "What steers each node's compression by the delays it sees, in jobs that begin here.", "none",
    ),
    Key(
        "plan.probe_every", _duration(0, 86400), "0s to 86400s",
        "How often the link is measured where a planned job's frames are too small to tell; 0s: never.", "120s",
    ),
    Key(
        "plan.profiles", _path_or_none, 'an absolute path or ""',
        "Directory of the profiles of jobs, from which the next run of a job starts; empty: none is kept.",
        derived="$CACHE_DIRECTORY/profiles, else $XDG_CACHE_HOME/gradcomm/profiles, else ~/.cache/gradcomm/profiles",
    ),
    Key(
        "partition_bytes", _partition, "256KiB to 64MiB, a multiple of 4096",
        "Largest unit of transfer and aggregation.", "8MiB",
    ),
    Key(
        "min_compress_bytes", _within(values.read_size, 0, 1 << 40, values.show_size), values.SIZE_FORM,
        "A group of tensors that is smaller than this travels uncompressed.", "64KiB",
    ),
    Key(
        "insecure", values.read_bool, "true or false",
        "Allow addresses that other machines can reach although nothing there is encrypted or authenticated.", False,
    ),
    Key("log.level", _one_of(_LEVELS), ", ".join(_LEVELS), "How much is logged.", "info"),
    Key(
        "log.format", _one_of(FORMATS), ", ".join(FORMATS),
        "How it is written to stderr: as text for people, or as one JSON object a line.", CONSOLE,
    ),
)  # fmt: skip

BY_NAME: Final = {key.name: key for key in KEYS}
BY_VARIABLE: Final = {key.variable: key for key in KEYS}


def unknown(name: str) -> str:
    """What is said about a key that does not exist."""
    near = difflib.get_close_matches(name, BY_NAME, 1, 0.6)
    if not near:
        near = [full for full in BY_NAME if full.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    hint = f"did you mean {near[0]}?" if near else "`gcserver config --defaults` lists every key"
    return f"unknown key; {hint}"
