"""Who makes a call: by certificate where connections have one, else by what the system knows of the connection.

What may live here: that, for gRPC's contexts. What may not: what a caller may do (`roles.py`), refusing one
(`guard.py`).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gcserver.admin.roles import OPERATOR, Role
from gcserver.admin.unixpeers import uids_at

_ESTABLISHED: Final = "01"
_TABLES: Final = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: a certificate's common name, or "" without one. ``peer``: the address as gRPC spells it.

    ``until``: when the certificate expires, None without one. ``path``: the Unix socket it came over, "" for others.
    """

    name: str
    role: Role | None
    peer: str
    until: dt.datetime | None = None
    path: str = ""

    def expired(self, now: dt.datetime) -> bool:
        return self.until is not None and now > self.until

    @property
    def who(self) -> str:
        """For the audit log: the certificate's name, else the uid of a connection from this machine, else the peer.

        Of a Unix socket only the uids of all who are connected are known, and of an address of this machine those of
        all who are connected from there: where these are several, it was one of them.
        To be asked while the caller waits for its answer; who is gone is not in the system's tables any more.
        """
        if self.until is not None:
            return self.name or self.peer
        uids = uids_at(self.path) if self.path else uids_of(self.peer)
        return " or ".join(f"uid {uid}" for uid in sorted(uids)) or self.peer


def caller(context: Any, tls: bool, path: str = "") -> Caller:
    """Who calls. ``tls``: connections come with certificates; without them the address alone was let in.

    ``path``: of the Unix socket that is served, "" for TCP.
    """
    peer = urllib.parse.unquote(context.peer())
    if not tls:
        return Caller("", OPERATOR, peer, path=path)
    # Imported late: a daemon without certificates does not need what reads them.
    from gcserver.admin.certificates import shown

    pem = context.auth_context().get("x509_pem_cert")
    if not pem:
        return Caller("", None, peer)
    who = shown(pem[0])
    return Caller(who.name, who.role, peer, who.until)


def uids_of(peer: str, tables: dict[int, Path] = _TABLES) -> set[int]:
    """The uid of the process at the other end of a loopback TCP connection (``ipv4:127.0.0.1:40000``), from the
    system's table of sockets, with others' that use the same port for other connections; none for other connections
    and where the system does not say."""
    kind, _, endpoint = peer.partition(":")
    host, _, port = endpoint.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return set()
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return set()
    if not address.is_loopback:
        return set()
    spelled = [(address.version, _in_table(address.packed, int(port)))]
    if address.version == 4:  # a socket of IPv6 may be connected to an IPv4 address, as gRPC's are
        spelled.append((6, _in_table(bytes(10) + b"\xff\xff" + address.packed, int(port))))
    found = set()
    for version, local in spelled:
        try:
            lines = tables[version].read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # What was closed stays in the table for a minute, and is said to be root's.
            if len(fields) > 7 and fields[1] == local and fields[3] == _ESTABLISHED:
                found.add(int(fields[7]))
    return found


def _in_table(packed: bytes, port: int) -> str:
    """An address as /proc/net/tcp prints it: 32-bit words in the machine's order."""
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
