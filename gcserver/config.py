"""The configuration of a daemon: one TOML file, every key also a flag and a variable.

What may live here: the typed result, how file, flags and variables combine, what must hold between keys, and writing it
all down again. What may not: the single keys (`config_keys.py`), how a value is written (`values.py`), whether the
machine can satisfy it (`doctor.py`), and anything that acts on it.

``node.socket`` in the file is ``--node.socket`` on the command line and ``GC_NODE_SOCKET`` in the environment; a flag
wins over a variable, a variable over the file, the file over the default. An unknown key and a bad value are
:class:`ConfigError`, which names the key, where it came from and what is accepted.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gcproto import paths
from gcserver import values
from gcserver.config_keys import BY_NAME, BY_VARIABLE, KEYS, UCX, Key, Peer, unknown
from gcserver.config_tables import (
    AdminConfig,
    ClusterConfig,
    CodecConfig,
    JobConfig,
    LogConfig,
    NodeConfig,
    PlanConfig,
    SecurityConfig,
)
from gcserver.logsetup import Voice
from gcserver.values import Address, toml_value

__all__ = [
    "Config", "NodeConfig", "AdminConfig", "ClusterConfig", "SecurityConfig", "JobConfig", "CodecConfig", "PlanConfig",
    "LogConfig", "Peer", "ConfigError", "load", "named_file", "to_toml", "describe",
    "value_of", "hostname",
]  # fmt: skip

#: What the names of our variables begin with, apart from those of keys without a table.
_PREFIXES: Final = tuple(sorted({f"GC_{key.name.partition('.')[0].upper()}_" for key in KEYS if "." in key.name}))
_TLS_KEYS: Final = ("admin.ca", "admin.cert", "admin.key")
#: A file is bounded before it is read: a slip may name anything.
_MAX_FILE_BYTES: Final = 1 << 20


class ConfigError(Exception):
    """A configuration that cannot be used. ``key`` is empty when no single key is to blame."""

    def __init__(self, message: str, key: str = "", source: str = "") -> None:
        self.key = key
        self.source = source
        where = f" ({source})" if source else ""
        super().__init__(f"{key}{where}: {message}" if key else f"{message}{where}")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a daemon is told. Sizes in bytes, durations in seconds."""

    node: NodeConfig
    cluster: ClusterConfig
    security: SecurityConfig
    job: JobConfig
    codec: CodecConfig
    plan: PlanConfig
    admin: AdminConfig
    log: LogConfig
    partition_bytes: int
    min_compress_bytes: int
    insecure: bool
    #: key -> where its value came from; keys at their default are absent
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def others(self) -> tuple[Peer, ...]:
        """The peers without this node itself, which a list shared by all nodes contains."""
        return tuple(p for p in self.cluster.peers if p.name != self.node.name)

    def voice(self, lane: int | None = None) -> Voice:
        """How the processes of this daemon log; ``lane``: which of them it is for, None: none."""
        return Voice(self.node.name, self.log.level, self.log.format, lane)


# ---------------------------------------------------------------------------------------------- combining
def load(
    file: Path | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration from a TOML file, flags (key -> text) and variables. Raises :class:`ConfigError`."""
    given: dict[str, tuple[object, str]] = {}
    if file is not None:
        given.update(_from_file(file))
    given.update(_from_environ(environ or {}))
    for name, text in (flags or {}).items():
        if name not in BY_NAME:
            raise ConfigError(unknown(name), f"--{name}", "flag")
        given[name] = (text, "flag")
    read: dict[str, Any] = {}
    for key in KEYS:
        raw, source = given.get(key.name, (key.default, "default"))
        if raw is None:
            continue
        try:
            read[key.name] = key.read(raw)
        except ValueError as error:
            got = f"got {raw!r}"
            said = str(error) if str(error).endswith(got) else f"{error}; {got}"
            raise ConfigError(said, key.name, source) from None
    return _build(read, {name: source for name, (_, source) in given.items()})


def named_file(environ: Mapping[str, str]) -> Path | None:
    """The file that the environment names where no flag does."""
    return Path(environ["GC_CONFIG"]) if environ.get("GC_CONFIG") else None


def _from_environ(environ: Mapping[str, str]) -> Iterable[tuple[str, tuple[object, str]]]:
    for variable, text in environ.items():
        if variable in BY_VARIABLE:
            yield BY_VARIABLE[variable].name, (text, f"variable {variable}")
        elif variable.startswith(_PREFIXES):
            # Only what looks like a slip is refused: Kubernetes puts variables of its own beside ours
            # (GC_NODE_SERVICE_HOST for a service called gc-node).
            near = difflib.get_close_matches(variable, BY_VARIABLE, 1, 0.85)
            if near:
                raise ConfigError(f"unknown variable; did you mean {near[0]}?", variable, "environment")


def _from_file(file: Path) -> Iterable[tuple[str, tuple[object, str]]]:
    try:
        # Looked at first: opening a pipe without a writer waits.
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError("is no regular file; give a TOML file", str(file))
        with file.open("rb") as opened:
            raw = opened.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError(f"a configuration has at most {values.show_size(_MAX_FILE_BYTES)}", str(file))
        text = raw.decode()
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(file)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", str(file)) from None
    except (ValueError, RecursionError) as error:
        # Of numbers with thousands of digits and of nested lists the parser says so in its own way.
        raise ConfigError(f"is not TOML: {error}", str(file)) from None
    for name, value in _flatten(tree):
        source = f"{file}:{_line(text, name)}".removesuffix(":0")
        if name not in BY_NAME:
            raise ConfigError(unknown(name), name, source)
        yield name, (value, source)


def _flatten(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for part, value in tree.items():
        name = prefix + part
        # a table where a value belongs is left whole, so that the key's own reader refuses it
        if isinstance(value, dict) and name not in BY_NAME:
            yield from _flatten(value, name + ".")
        else:
            yield name, value


def _line(text: str, name: str) -> int:
    """The line of a key in TOML text, or of its table; 0 if it is written in some other way."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(#.*)?", line):
            table = header[1] + "."
        elif (pair := re.match(r"\s*([\w.-]+)\s*=", line)) and table + pair[1] == name:
            return number
    return 0


def _build(read: dict[str, Any], sources: dict[str, str]) -> Config:
    """Derived defaults, and what must hold between keys."""
    name = read.get("node.name") or hostname()
    listen, lanes = read["node.listen"], read["node.lanes"]
    advertise = read.get("node.advertise")
    if advertise is None:
        advertise = Address(hostname(), listen.port) if listen.wildcard else listen
    state = read.get("node.state") or Path(f"/dev/shm/gradcomm-{os.getuid()}") / name
    node = NodeConfig(
        name, listen, advertise, read.get("node.socket") or Path(paths.default_socket()), state,
        read["node.admin"], read["node.metrics"], lanes, read["node.cores"], read["node.stop_grace"],
        read["node.transport"],
    )  # fmt: skip
    config = Config(
        node, ClusterConfig(read["cluster.peers"], read["cluster.lease"], read["cluster.etcd"]),
        SecurityConfig(read["security.key"], read["security.peers"]),
        JobConfig(read["job.deadline"], read["job.on_loss"]), CodecConfig(read["codec.default"]),
        PlanConfig(
            read["plan.mode"], read["plan.quality"], read["plan.warmup_steps"], read["plan.late_after"],
            read["plan.exclude"], read["plan.controller"], read["plan.probe_every"],
            read["plan.profiles"] if "plan.profiles" in read else _profiles(),
        ),
        AdminConfig(read["admin.ca"], read["admin.cert"], read["admin.key"], read["admin.audit_log"]),
        LogConfig(read["log.level"], read["log.format"]), read["partition_bytes"], read["min_compress_bytes"],
        read["insecure"], sources,
    )  # fmt: skip
    _check(config)
    return config


def hostname() -> str:
    """The machine's name as far as it can be a node's name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("._-")[:128].rstrip("._-")
    return name or "localhost"


def _profiles() -> Path | None:
    """Where profiles are kept when nobody says; None where there is no place for them."""
    if service := os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]:  # set by systemd, a list
        return Path(service) / "profiles"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache"))
    return cache / "gradcomm" / "profiles" if cache.is_absolute() else None


def _check(config: Config) -> None:
    node, sources = config.node, config.sources

    def refuse(key: str, message: str) -> None:
        raise ConfigError(message, key, sources.get(key, "default"))

    if config.job.on_loss != "fail" and not config.cluster.etcd:
        refuse(
            "job.on_loss", f"{config.job.on_loss} needs an etcd to decide who is left; set cluster.etcd on every node"
        )
    for key, address in (("node.listen", node.listen), ("node.advertise", node.advertise)):
        if address.port + node.lanes > 65535:
            refuse(key, f"{node.lanes} lanes and the control link take the ports from {address.port} on, beyond 65535")
    if node.advertise.wildcard:
        refuse("node.advertise", f"{node.advertise} is no address a peer could connect to; name this machine's own")
    used = [(f"lane {i}", "node.listen", node.listen.plus(i)) for i in range(node.lanes)]
    used.append(("the control link", "node.listen", node.control))
    admin = values.read_endpoint(node.admin) if node.admin and not node.admin.startswith("unix:") else None
    for what, key, extra in (("the admin service", "node.admin", admin), ("metrics", "node.metrics", node.metrics)):
        if extra is None:
            continue
        for other, _, address in used:
            if extra.overlaps(address):
                refuse(key, f"port {extra.port} of {what} is also the port of {other}; choose another")
        used.append((what, key, extra))
    _check_keys(config, refuse)
    _check_operators(config, admin, refuse)


def _check_operators(config: Config, admin: Address | None, refuse: Callable[[str, str], None]) -> None:
    """Certificates are given whole, and an address that others reach needs them."""
    missing = [key for key in _TLS_KEYS if value_of(config, key) == ""]
    if 0 < len(missing) < len(_TLS_KEYS):
        given = next(key for key in _TLS_KEYS if key not in missing)
        refuse(given, f"expected {', '.join(_TLS_KEYS)} together, and {' and '.join(missing)} is missing")
    if config.insecure or not missing:
        return
    for key, bound in (("node.admin", admin), ("node.metrics", config.node.metrics)):
        if bound is not None and not bound.loopback:
            refuse(
                key, f"{bound.endpoint} can be reached by other machines, and nothing says who may use it: set "
                f"{', '.join(_TLS_KEYS)} (`gcserver pki` makes such files), bind 127.0.0.1"
                f"{' or a Unix socket' if key == 'node.admin' else ''}, or on a network you trust set "
                "insecure = true (--insecure, GC_INSECURE=1)",
            )  # fmt: skip


def _check_keys(config: Config, refuse: Callable[[str, str], None]) -> None:
    """Keys are given whole, and an address that others reach needs them."""
    security, listen = config.security, config.node.listen
    if security.key is not None and security.peers is None:
        refuse("security.key", "a node with a key admits those in security.peers, which is not set; set both")
    if security.peers is not None and security.key is None:
        refuse("security.peers", "this node has no key of its own: make one (`gcserver keygen`) and set security.key")
    if config.node.transport == UCX and ":" in listen.host:
        refuse("node.listen", f"{listen} is an IPv6 address, and UCX is used over IPv4 only; name an IPv4 address")
    if config.node.transport == UCX and security.key is not None and not config.insecure:
        refuse(
            "node.transport", "UCX can neither encrypt nor authenticate, so gradients would travel in the clear "
            "although security.key is set. On a network you trust set insecure = true (--insecure, GC_INSECURE=1): the "
            "keys then protect the control link only; or set node.transport to zmq",
        )  # fmt: skip
    if not listen.loopback and security.key is None and not config.insecure:
        refuse(
            "node.listen", f"{listen.endpoint} can be reached by other machines, and without keys nothing is "
            "encrypted or authenticated. Make keys (`gcserver keygen` on each node, then security.key and "
            "security.peers; for private daemons GC_JOB_SECRET is enough); or, on a network you trust, set insecure = "
            "true (--insecure, GC_INSECURE=1); or bind 127.0.0.1",
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- describing
def value_of(config: Config, name: str) -> object:
    """The value of a key as one would write it in the file."""
    part: Any = config
    for attribute in name.split("."):
        part = getattr(part, attribute)
    if name in ("node.stop_grace", "cluster.lease", "job.deadline"):
        return values.show_duration(part)
    if name in ("partition_bytes", "min_compress_bytes"):
        return values.show_size(part)
    if name == "node.cores":
        return "auto" if part is None else list(part)
    if name == "node.metrics":
        return "" if part is None else part.endpoint
    if name in ("plan.profiles", "security.key", "security.peers") or name.startswith("admin."):
        return "" if part is None else str(part)
    if isinstance(part, tuple):
        return [str(item) for item in part]
    return part if isinstance(part, bool | int) else str(part)


def to_toml(config: Config) -> str:
    """A file that gives this configuration; a value that is not the default says where it came from."""
    return _document(lambda key: _line_of(key, value_of(config, key.name), config.sources.get(key.name, "")))


def describe() -> str:
    """Every key with its meaning, form, flag and variable at its default, as a file to start from.

    A derived default is commented out, so that the file means the same on every machine.
    """

    def lines(key: Key) -> str:
        about = f"# {key.about}\n# {key.accepts}; {key.flag}, {key.variable}\n"
        bare = key.name.rpartition(".")[2]
        if key.default is None:
            return f"{about}# {bare} = <{key.derived}>\n"
        return f"{about}{bare} = {toml_value(key.default)}\n"

    return _document(lines, "\n")


def _line_of(key: Key, value: object, source: str) -> str:
    return f"{key.name.rpartition('.')[2]} = {toml_value(value)}" + (f"  # {source}\n" if source else "\n")


def _document(lines: Callable[[Key], str], between: str = "") -> str:
    """All keys in TOML order: those without a table first, then one table after another."""
    tables: dict[str, list[str]] = {"": []}
    for key in KEYS:
        tables.setdefault(key.name.rpartition(".")[0], []).append(lines(key))
    parts = [(f"[{table}]\n" if table else "") + between.join(entries) for table, entries in tables.items()]
    return "\n".join(parts)
