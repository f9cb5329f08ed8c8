"""Target: files of keys and certificates, and the certificates that operators show.

An input is what it is for and contents by file. Only the refusals of their readers may come of files; a certificate
that cannot be read gives nobody a role. A list of keys that is accepted is written down again and read as the same.
"""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import random
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gcserver import keys
from gcserver.admin import certificates
from gcserver.admin.access import Paths
from gcserver.admin.certificates import CertificateError
from gcserver.admin.roles import OPERATOR, ROLE_URN, ROLES
from gcserver.keys import KeyFileError
from tests.fuzz import mutate
from tests.unit.key_pairs import fixed_pair

_PAIRS: Final = tuple(map(fixed_pair, ("a", "b", "node-3.example")))
_LIST: Final = "# all nodes\n" + "".join(f"{keys.line(p.name, p.public)}\n" for p in _PAIRS)
_SECRET: Final = f"# Of node a.\n{keys.SECRET} a {_PAIRS[0].secret.decode()}\n"
#: Fixed, as signatures of Ed25519 are, so that an input is the same in every run.
_BEGIN, _END = dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2120, 1, 1, tzinfo=dt.UTC)
_NOW: Final = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
SERVER: Final = ("ca", "certificate", "key")


def _key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def _certificate(name: str, number: int, purpose: x509.ObjectIdentifier, names: list[x509.GeneralName]) -> bytes:
    """In PEM form, of key ``number``, signed by key 0 of "ca"."""
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, "ca"))
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).serial_number(number + 1)
    builder = builder.public_key(_key(number).public_key()).not_valid_before(_BEGIN).not_valid_after(_END)
    builder = builder.add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
    if names:
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(_key(0), None).public_bytes(serialization.Encoding.PEM)


@lru_cache(maxsize=1)
def valid() -> dict[str, bytes]:
    """One of each kind."""
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    role = [x509.UniformResourceIdentifier(ROLE_URN + OPERATOR)]
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return {
        "peers": _LIST.encode(),
        "secret": _SECRET.encode(),
        "ca": _certificate("ca", 0, ExtendedKeyUsageOID.SERVER_AUTH, []),
        "certificate": _certificate("a", 1, ExtendedKeyUsageOID.SERVER_AUTH, [*hosts]),
        "key": _key(1).private_bytes(*form),
        "shown": _certificate("alice", 2, ExtendedKeyUsageOID.CLIENT_AUTH, [*role]),
    }


class Credentials:
    """Their readers."""

    name = "credentials"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradcomm-fuzz-", dir="/dev/shm")
        self._root = Path(self._folder.name)
        for kind in ("peers", "secret", "server", "shown"):
            assert self.feed(msgspec.msgpack.encode((kind, {}))) == f"{kind} read"

    def close(self) -> None:
        self._folder.cleanup()

    # ----------------------------------------------------------------------------------------- inputs
    def draw(self, rng: random.Random) -> bytes:
        kind = rng.choice(("peers", "peers", "secret", "server", "server", "shown"))
        names = rng.sample(SERVER, rng.choice((1, 1, 2))) if kind == "server" else [kind]
        return msgspec.msgpack.encode((kind, {name: _spoiled(rng, name) for name in names}))

    # ---------------------------------------------------------------------------------------- feeding
    def feed(self, data: bytes) -> str:
        kind, contents = msgspec.msgpack.decode(data, type=tuple[str, dict[str, bytes]])
        for name, content in {**valid(), **contents}.items():
            (self._root / name).write_bytes(content)
        try:
            with warnings.catch_warnings():
                # Numbers that certificates should not have, and may.
                warnings.simplefilter("ignore")
                return f"{kind} {self._read(kind)}"
        except (KeyFileError, CertificateError):
            return f"{kind} refused"

    def _read(self, kind: str) -> str:
        path = self._root / kind
        if kind == "peers":
            admitted = keys.read_admitted(path)
            path.write_text("".join(f"{keys.line(name, key)}\n" for name, key in admitted.items()))
            assert keys.read_admitted(path) == admitted
        elif kind == "secret":
            pair = keys.read_pair(path)
            assert len(pair.public) == len(pair.secret) == keys.KEY_CHARACTERS
        elif kind == "server":
            certificates.load(Paths(*(self._root / name for name in SERVER)), _NOW)
        else:
            who = certificates.shown(path.read_bytes())
            if who.role is None:
                return "of nobody"
            assert who.role in ROLES
        return "read"


def _spoiled(rng: random.Random, name: str) -> bytes:
    content = valid()[name]
    if name in ("peers", "secret"):
        return mutate.spoil(rng, content, valid()[rng.choice(("peers", "secret"))])
    if rng.random() < 0.25:
        return mutate.spoil(rng, content, valid()[rng.choice(SERVER)])
    # Within the text: what is spoiled is the structure that it holds.
    first, *text, last = content.decode().splitlines()
    within = mutate.spoil(rng, base64.b64decode("".join(text)))
    if name == "shown" and rng.random() < 0.5:
        return within
    return "\n".join((first, base64.b64encode(within).decode(), last, "")).encode()
