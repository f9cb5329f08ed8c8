"""The tables of the configuration as typed values.

What may live here: one class for each table. What may not: how values are read (`config_keys.py`), how they combine and
what must hold between them (`config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gcserver.config_keys import ZMQ, Peer
from gcserver.values import Address


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """``node.*``: this daemon. ``cores`` None means all it may use; ``admin`` and ``metrics`` empty mean off;
    ``stop_grace`` in seconds."""

    name: str
    listen: Address
    advertise: Address
    socket: Path
    state: Path
    admin: str
    metrics: Address | None
    lanes: int
    cores: tuple[int, ...] | None
    stop_grace: float
    transport: str = ZMQ

    @property
    def control(self) -> Address:
        """Where the control link listens: the port after the last lane's."""
        return self.listen.plus(self.lanes)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``cluster.*``: the other daemons. ``lease`` in seconds; ``etcd``: URLs, without a slash at the end."""

    peers: tuple[Peer, ...]
    lease: float
    etcd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """``security.*``: files of this node's secret key and of the nodes that are admitted; both or neither."""

    key: Path | None
    peers: Path | None


@dataclass(frozen=True, slots=True)
class JobConfig:
    """``job.*``: what jobs formed here get. ``deadline`` in seconds."""

    deadline: float
    on_loss: str


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """``codec.*``. ``default`` is a spec string such as ``topk(ratio=0.01)``."""

    default: str


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """``plan.*``: who makes the plans of jobs formed here (see `modes.py`). ``exclude``: globs of tensors' names.

    ``late_after``: steps before plans use codecs that send late, by codec and optimizer (`families.first_step`).
    ``controller``: what steers levels, such as ``dc2-da2``; "none": nothing does. ``probe_every``: seconds from one
    round of probes of the link to the next; 0: none. ``profiles``: directory of the profiles of jobs; None: none is
    kept.
    """

    mode: str
    quality: str
    warmup_steps: int
    late_after: int
    exclude: tuple[str, ...]
    controller: str
    probe_every: float
    profiles: Path | None


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """``admin.*``: who is let in where operators connect. Files in PEM form; ``ca``, ``cert`` and ``key`` are all given
    or all None. ``audit_log``: None: none is kept."""

    ca: Path | None
    cert: Path | None
    key: Path | None
    audit_log: Path | None

    @property
    def files(self) -> tuple[Path, Path, Path] | None:
        """The CA, the certificate and its key; None without TLS."""
        return None if self.ca is None or self.cert is None or self.key is None else (self.ca, self.cert, self.key)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``log.*``. ``level`` is one of debug, info, warning, error, ``format`` console or json."""

    level: str
    format: str
