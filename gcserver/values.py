"""How people write and read values: sizes, durations, addresses, lists of cores.

What may live here: turning text into a value and a value into text, nothing else. It is shared by the configuration,
the commands and the tables of `gcctl`, so that what one prints another accepts. What may not: which keys
there are (`config.py`), I/O, name resolution.

Every reader takes what a TOML file, a flag or a variable holds and raises :class:`ValueError` whose text says what
would be accepted; the caller adds which key it was and where it came from.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

# Durations are read by the client too.
from gcproto.durations import DURATION_FORM as DURATION_FORM
from gcproto.durations import read_duration as read_duration

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")

NAME_FORM: Final = "1 to 128 letters, digits, '.', '_' or '-', the first and last a letter or digit"
SIZE_FORM: Final = 'a size such as 65536, "64KiB" or "4MiB"'
TCP_FORM: Final = "tcp://host:port"
ENDPOINT_FORM: Final = "host:port"
CORES_FORM: Final = '"auto", a list such as [0, 1], or "0-3,6"'


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A TCP address. ``str()`` gives ``tcp://host:port``, an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.endpoint}"

    @property
    def endpoint(self) -> str:
        """``host:port``, as gRPC and HTTP spell it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def plus(self, offset: int) -> Address:
        """The address ``offset`` ports further: lane i of a daemon listens at ``listen.plus(i)``."""
        return Address(self.host, self.port + offset)

    @property
    def wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A host name other than localhost counts as reachable by others."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def overlaps(self, other: Address) -> bool:
        """Whether both could not be bound at once (as far as the text tells)."""
        return self.port == other.port and (self.host == other.host or self.wildcard or other.wildcard)


def read_name(raw: object) -> str:
    """The name of a node."""
    if not isinstance(raw, str) or not _NAME.fullmatch(raw.strip()):
        raise ValueError(f"expected {NAME_FORM}")
    return raw.strip()


def read_endpoint(raw: object, form: str = ENDPOINT_FORM) -> Address:
    """``host:port``, ``[v6]:port``, ``*:port``; a ``tcp://`` in front is allowed."""
    if not isinstance(raw, str):
        raise ValueError(f"expected {form}")
    host, colon, port = raw.strip().removeprefix("tcp://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"expected {form}, and between brackets an IPv6 address") from None
    elif host == "*":
        host = "0.0.0.0"
    elif ":" in host:
        raise ValueError(f"expected {form}; an IPv6 host goes between brackets: [::1]:7470")
    elif not _HOST.fullmatch(host):
        raise ValueError(f"expected {form}")
    if not colon or not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"expected {form}, the port from 1 to 65535")
    return Address(host, int(port))


def read_tcp(raw: object) -> Address:
    """``tcp://host:port``."""
    if not isinstance(raw, str) or not raw.strip().startswith("tcp://"):
        raise ValueError(f"expected {TCP_FORM}")
    return read_endpoint(raw, TCP_FORM)


def read_size(raw: object) -> int:
    """Bytes. K, M, G and T are powers of 1024, with or without "iB"."""
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError(f"expected {SIZE_FORM}")
    found = _SIZE.fullmatch(str(raw).strip())
    if found is None:
        raise ValueError(f"expected {SIZE_FORM}")
    value = float(found[1]) if "." in found[1] else int(found[1])
    value *= 1024 ** _POWERS[found[2].lower().rstrip("b").rstrip("i")]
    if value != int(value):
        raise ValueError(f"expected {SIZE_FORM}, a whole number of bytes")
    return int(value)


def read_bool(raw: object) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in words:
        return words[raw.strip().lower()]
    raise ValueError("expected true or false")


def read_int(raw: object, low: int, high: int) -> int:
    """A whole number within [low, high]."""
    expected = f"expected a whole number from {low} to {high}"
    if isinstance(raw, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", raw, re.ASCII):
        raw = int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
        raise ValueError(expected)
    return raw


def read_list(raw: object, expected: str) -> list[str]:
    """A list of texts from a list, from "a,b", or from a list as TOML writes it inside a flag or variable."""
    items: object = raw
    if isinstance(raw, str):
        listed = _toml_list(raw)
        items = [part for part in raw.split(",") if part.strip()] if listed is None else listed
    if not isinstance(items, list) or not all(isinstance(i, str) and i.strip() for i in items):
        raise ValueError(f"expected {expected}")
    return [item.strip() for item in items]


def _toml_list(text: str) -> list[object] | None:
    """The list that TOML would read; None where it would not, as for the glob ``[ab]*``."""
    if not text.strip().startswith("["):
        return None
    try:
        found = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return None
    return found["x"] if set(found) == {"x"} and isinstance(found["x"], list) else None


def read_cores(raw: object) -> tuple[int, ...] | None:
    """Core numbers in ascending order; None for "auto"."""
    if isinstance(raw, str):
        text = raw.strip()
        if text == "auto":
            return None
        if (listed := _toml_list(text)) is not None:
            return read_cores(listed)
        if not re.fullmatch(r"[0-9]+(-[0-9]+)?(\s*,\s*[0-9]+(-[0-9]+)?)*", text, re.ASCII):
            raise ValueError(f"expected {CORES_FORM}")
        cores: set[int] = set()
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            low, high = int(first), int(last or first)
            if not low <= high < 65536:
                raise ValueError(f"expected {CORES_FORM}, ranges ascending")
            cores.update(range(low, high + 1))
        return tuple(sorted(cores))
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"expected {CORES_FORM}")
    if any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in raw):
        raise ValueError(f"expected {CORES_FORM}")
    return tuple(sorted(set(raw)))


def toml_value(value: object) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    escaped = "".join(f"\\u{ord(c):04x}" if c in '"\\' or c < " " or c == "\x7f" else c for c in str(value))
    return f'"{escaped}"'


def show_size(size: int) -> str:
    """The shortest text that :func:`read_size` turns back into exactly ``size`` bytes."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


def show_duration(seconds: float) -> str:
    """The shortest text that :func:`read_duration` turns back into exactly ``seconds``."""
    text = format(Decimal(repr(seconds)), "f")  # repr alone would write 1e-05
    return text.removesuffix(".0") + "s"


def show_cores(cores: tuple[int, ...] | list[int]) -> str:
    """Core numbers as ranges: ``0-3,6``."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def human_size(size: float) -> str:
    """A size for a person, three digits: ``1.43 GiB``. Not meant to be read back exactly."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"


def human_duration(seconds: float) -> str:
    """A duration for a person: ``120 ms``, ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``; of what is no number
    of seconds (``inf``, ``nan``) what it is."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, big, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small_size
            return f"{whole // size} {big} {rest} {small}" if rest else f"{whole // size} {big}"
    return f"{seconds:.3g} s"
