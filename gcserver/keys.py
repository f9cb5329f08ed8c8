"""Keys of daemons: the pair of one node, and the list of nodes that are admitted.

What may live here: making keys, the two kinds of files they are kept in, noticing that a file changed. What may not:
sockets (`runtime/transport.py`), who is let in by them (`runtime/guard.py`).

Keys are CURVE's (Curve25519), written in Z85 as ZeroMQ does: 40 characters. The list has one line ``NAME KEY`` a node,
and may be the same on all of them: `cat *.pub`. Lines that begin with ``#`` are comments. The file of a secret key has
one line ``gradcomm-secret-key NAME KEY``, so that no list is mistaken for one, nor the other way round.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gcserver.values import read_name

KEY_CHARACTERS: Final = 40
SECRET: Final = "gradcomm-secret-key"
#: Files are bounded before they are read; this holds more nodes than a cluster has.
MAX_FILE_BYTES: Final = 1 << 20
#: So many looks (a daemon takes two a second) have to find a list the same before a node that it lacks is let go.
LOOKS_TO_LOSE: Final = 10
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LINE: Final = f"NAME KEY, the key {KEY_CHARACTERS} characters of Z85 (a .pub file of `gcserver keygen`)"

#: Public keys in Z85 by node.
Admitted = Mapping[str, bytes]


class KeyFileError(ValueError):
    """A file of keys that cannot be used: names the file, what was expected, and what to do."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of node ``name`` in Z85."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)


def generate(name: str) -> KeyPair:
    """A new pair. Raises ValueError for what cannot be a node's name."""
    import zmq  # only commands that need keys load it

    name = read_name(name)
    public, secret = zmq.curve_keypair()
    return KeyPair(name, public, secret)


def write(pair: KeyPair, folder: Path) -> tuple[Path, Path]:
    """``NAME.key`` (mode 0600) and ``NAME.pub`` in ``folder``, which is made if need be. Returns both paths.

    Raises FileExistsError where either is there already, OSError where they cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret, public = folder / f"{pair.name}.key", folder / f"{pair.name}.pub"
    for path in (secret, public):
        if path.exists():
            raise FileExistsError(
                f"{path} is there already and is not overwritten: peers admit a node by its key; move it away for a "
                "new one"
            )
    _create(secret, f"# Of node {pair.name}. Whoever has it is that node: it stays on this machine.\n"
                    f"{SECRET} {pair.name} {pair.secret.decode()}\n", 0o600)  # fmt: skip
    _create(public, line(pair.name, pair.public) + "\n", 0o644)
    return secret, public


def line(name: str, public: bytes) -> str:
    """A node as it stands in the list."""
    return f"{name} {public.decode()}"


def _create(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_pair(path: Path) -> KeyPair:
    """The pair from the file of its secret key. Raises KeyFileError."""
    import zmq

    lines = _lines(path)
    words = lines[0][1].split() if len(lines) == 1 else []
    if len(words) != 3 or words[0] != SECRET or not _Z85.fullmatch(words[2]):
        raise KeyFileError(f"{path} is not the file of a secret key; `gcserver keygen` makes one (NAME.key)")
    try:
        secret = words[2].encode()
        return KeyPair(words[1], zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError) as error:
        raise KeyFileError(f"{path} holds no key: {error}; `gcserver keygen` makes one") from None


def exposed(path: Path) -> str:
    """Why others may read or replace a secret key, "" when they may not. Raises OSError.

    Its group may read it: that is how orchestrators hand a secret to a service.
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to uid {found.st_uid}, this daemon runs as uid {os.getuid()}"
    if mode & 0o037:
        return f"{path} has mode {mode:04o}: others may read or replace it"
    return ""


def read_admitted(path: Path) -> dict[str, bytes]:
    """Public keys by node, in the order of the list. Raises KeyFileError, naming the line."""
    found: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for number, text in _lines(path):
        where, words = f"{path}:{number}", text.split()
        if words[0] == SECRET:
            raise KeyFileError(f"{where} is a secret key; take it out of the list, and make that node a new one")
        if len(words) != 2 or not _Z85.fullmatch(words[1]) or not _decodes(words[1]):
            raise KeyFileError(f"{where}: expected {_LINE}")
        try:
            name, key = read_name(words[0]), words[1].encode()
        except ValueError as error:
            raise KeyFileError(f"{where}: {words[0]!r} is no node's name: {error}") from None
        if found.setdefault(name, key) != key:
            raise KeyFileError(f"{where}: {name} has another key further up; a node has one")
        if owners.setdefault(key, name) != name:
            raise KeyFileError(f"{where}: {owners[key]} has the same key; give each node its own")
    return found


def _decodes(text: str) -> bool:
    """Z85 has more groups of five characters than four bytes have values."""
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    for at in range(0, KEY_CHARACTERS, 5):
        value = 0
        for character in text[at : at + 5]:
            value = value * 85 + alphabet.index(character)
        if value >> 32:
            return False
    return True


def _lines(path: Path) -> list[tuple[int, str]]:
    """(number, text) of the lines with something in them. Raises KeyFileError."""
    try:
        # Looked at first: opening a pipe without a writer waits.
        if not stat.S_ISREG(path.stat().st_mode):
            raise KeyFileError(f"{path} is no regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("ascii")
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}; `gcserver keygen` makes keys") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is not ASCII text; expected lines of {_LINE}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise KeyFileError(f"{path} has more than {MAX_FILE_BYTES} bytes; expected lines of {_LINE}")
    numbered = ((n, x.strip()) for n, x in enumerate(text.splitlines(), 1))
    return [(n, x) for n, x in numbered if x and not x.startswith("#")]


class Watch:
    """The list of admitted nodes, looked at again and again."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self.path = path
        self._seen = self._used = self._look()
        self._rested = 0
        self.admitted = read_admitted(path)

    def changed(self, asked: bool = False) -> bool:
        """Whether ``admitted`` is new since the last call. Raises KeyFileError, once, for a list that cannot be used.

        A new file counts when two calls in a row found it the same, or :data:`LOOKS_TO_LOSE` where it lacks a node: one
        that is being written is a shorter list for as long as a busy disk takes, and jobs do not come back. A list that
        cannot be used changes nothing. ``asked``: read it now, whatever was seen of it before, and raise again.
        """
        now = self._look()
        self._rested, self._seen = self._rested + 1 if now == self._seen else 1, now
        if not asked and (now == self._used or self._rested < 2):
            return False
        try:
            found = read_admitted(self.path)
        except KeyFileError:
            self._used = now  # said once
            raise
        if not asked and self._rested < LOOKS_TO_LOSE and self.admitted.keys() - found.keys():
            return False
        self._used, before, self.admitted = now, self.admitted, found
        return found != before

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
