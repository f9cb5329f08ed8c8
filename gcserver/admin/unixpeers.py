"""Whose processes are connected to a Unix socket, from the system's own table of sockets.

What may live here: that table, as ``sock_diag(7)`` has it. What may not: which call came over which connection.

gRPC keeps the descriptors of its connections to itself, so nobody can be asked for SO_PEERCRED, and it calls all who
come over a Unix socket alike. The kernel lists every connection with the uid of whoever made its socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_ERROR, _DONE = 2, 3
_ESTABLISHED: Final = 1
#: UDIAG_SHOW_NAME, UDIAG_SHOW_PEER, UDIAG_SHOW_UID
_SHOW: Final = 0x1 | 0x4 | 0x40
#: attributes of an entry: UNIX_DIAG_NAME, UNIX_DIAG_PEER, UNIX_DIAG_UID
_NAME, _PEER, _UID = 0, 2, 7
_HEAD: Final = struct.Struct("=IHHII")
_ASK: Final = struct.Struct("=BBHIIIII")
_ENTRY: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_NUMBER: Final = struct.Struct("=I")
_BUFFER: Final = 1 << 16
#: The kernel answers at once; more than this would be a defect, seconds.
_PATIENCE: Final = 1.0

#: inode of a connected socket -> (name, inode of the one at the other end, uid); None: the kernel does not say
Connected = dict[int, tuple[bytes, int | None, int | None]]


def uids_at(path: str) -> frozenset[int]:
    """The uids of all who are connected to the socket that is bound at ``path`` now; empty where the system does not
    say (a kernel without ``unix_diag`` or before 5.3, a client in another network namespace)."""
    with contextlib.suppress(OSError):
        return _clients(_connected(), os.fsencode(path))
    return frozenset()


def _clients(table: Connected, name: bytes) -> frozenset[int]:
    """Accepted sockets have the name of the one that listens; who called is at their other ends."""
    callers = {peer for bound, peer, _ in table.values() if bound == name}
    return frozenset(uid for inode, (_, _, uid) in table.items() if inode in callers and uid is not None)


def _connected() -> Connected:
    """All connected Unix sockets of this network namespace. Raises OSError."""
    table: Connected = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_PATIENCE)
        ask = _ASK.pack(socket.AF_UNIX, 0, 0, 1 << _ESTABLISHED, 0, _SHOW, 0xFFFFFFFF, 0xFFFFFFFF)
        kernel.send(_HEAD.pack(_HEAD.size + len(ask), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + ask)
        while True:
            for kind, body in _messages(kernel.recv(_BUFFER)):
                if kind == _DONE:
                    return table
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "sock_diag")
                inode, entry = _entry(body)
                table[inode] = entry


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind, *_ = _HEAD.unpack_from(data, at)
        yield kind, data[at + _HEAD.size : at + length]
        at += max(_aligned(length), _HEAD.size)


def _entry(body: bytes) -> tuple[int, tuple[bytes, int | None, int | None]]:
    """(inode, what is said of it) of one socket."""
    inode = _ENTRY.unpack_from(body)[4]
    found: dict[int, bytes] = {}
    at = _ENTRY.size
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        found[kind] = body[at + _ATTRIBUTE.size : at + length]
        at += max(_aligned(length), _ATTRIBUTE.size)
    return inode, (found.get(_NAME, b"").rstrip(b"\0"), _number(found.get(_PEER)), _number(found.get(_UID)))


def _number(value: bytes | None) -> int | None:
    return None if value is None else int(_NUMBER.unpack(value)[0])


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
