"""The daemon's certificate, its key and the CA of operators: read, judged, and read again when the files change.

What may live here: what the files hold and whether that can be used; whose a certificate is. What may not: making
certificates (`gcserver.pki`), who may do what (`roles.py`), servers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gcserver.admin.access import Paths
from gcserver.admin.roles import ROLE_URN, ROLES, Role

#: A file of certificates is bounded before it is read: a slip may name anything.
MAX_FILE: Final = 1 << 20
#: What comes of certificates and keys that are damaged, or of a kind nobody here knows. They have no base in common.
UNREADABLE: Final = (
    ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)  # fmt: skip
log = logging.getLogger("gcserver.admin")


class CertificateError(Exception):
    """Files that cannot be used. ``str()`` says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a certificate is: its common name, its role if it has one, until when it holds."""

    name: str
    role: Role | None
    until: dt.datetime


def identity(certificate: x509.Certificate) -> Identity:
    """A certificate that says nothing of this kind has the name "" and no role. One of UNREADABLE where it
    cannot be read."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    uris = _alternatives(certificate, x509.UniformResourceIdentifier)
    roles = [role for role in ROLES if ROLE_URN + role in uris]
    name = str(names[0].value) if names else ""
    return Identity(name, roles[-1] if roles else None, certificate.not_valid_after_utc)


def shown(raw: bytes) -> Identity:
    """Whose certificate a client has shown, in PEM or DER form. One that cannot be read has no name and no role."""
    try:
        read_as = x509.load_pem_x509_certificate if raw.startswith(b"-----") else x509.load_der_x509_certificate
        return identity(read_as(raw))
    except UNREADABLE:
        return Identity("", None, dt.datetime.max.replace(tzinfo=dt.UTC))


def hosts(certificate: x509.Certificate) -> list[str]:
    """The names and addresses a server with this certificate may be reached by."""
    return _alternatives(certificate, x509.DNSName) + _alternatives(certificate, x509.IPAddress)


def _alternatives(certificate: x509.Certificate, kind: type[Any]) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        return [str(value) for value in extension.value.get_values_for_type(kind)]
    except (x509.ExtensionNotFound, *UNREADABLE):
        return []


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held when they were read. ``tls``: the same for a server of Python's own."""

    ca: tuple[x509.Certificate, ...]
    certificate: x509.Certificate
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    tls: ssl.SSLContext


def load(paths: Paths, now: dt.datetime | None = None) -> Material:
    """Read and judge all three. Raises :class:`CertificateError`."""
    moment = now or dt.datetime.now(dt.UTC)
    ca_pem, certificate_pem, key_pem = (read(path) for path in (paths.ca, paths.certificate, paths.key))
    ca, chain = parse(paths.ca, ca_pem), parse(paths.certificate, certificate_pem)
    own = chain[0]
    check_key(paths.certificate, own, paths.key, key_pem)
    if not _allows(own, ExtendedKeyUsageOID.SERVER_AUTH):
        raise CertificateError(f"{paths.certificate} is no server's certificate; `gcserver pki node` makes one")
    if not hosts(own):
        raise CertificateError(
            f"{paths.certificate} names no host that the daemon is reached by; make one with `gcserver pki node --host`"
        )
    check_validity(paths.certificate, own, moment)
    if not signed_by(chain, ca):
        raise CertificateError(
            f"{paths.certificate} ({named(own)}) is not signed by the CA in {paths.ca}; name the CA that made it"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # Not the text: around certificates it may hold words in any language.
        context.load_verify_locations(cadata=b"".join(c.public_bytes(serialization.Encoding.DER) for c in ca))
        context.load_cert_chain(paths.certificate, paths.key)
    except (OSError, ValueError) as error:
        raise CertificateError(f"{paths.certificate} and {paths.key} cannot be used: {error}") from None
    return Material(tuple(ca), own, ca_pem, certificate_pem, key_pem, context)


def read(path: Path) -> bytes:
    """A file's bytes. Raises :class:`CertificateError`."""
    try:
        # Looked at first: opening a pipe without a writer waits.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CertificateError(f"{path} is no regular file; expected certificates or a key in PEM form")
        with path.open("rb") as file:
            held = file.read(MAX_FILE + 1)
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from None
    if len(held) > MAX_FILE:
        raise CertificateError(f"{path} has more than {MAX_FILE} bytes; expected certificates or a key in PEM form")
    return held


def parse(path: Path, pem: bytes) -> list[x509.Certificate]:
    """The certificates in PEM text, at least one. Raises :class:`CertificateError`."""
    with contextlib.suppress(*UNREADABLE):
        found = x509.load_pem_x509_certificates(pem)
        for certificate in found:
            identity(certificate)
        return found
    raise CertificateError(f"{path} holds no certificate in PEM form; `gcserver pki` makes such files")


def check_key(where: Path, certificate: x509.Certificate, path: Path, pem: bytes) -> None:
    """Raises :class:`CertificateError` unless ``pem`` is the certificate's key."""
    try:
        key = serialization.load_pem_private_key(pem, None).public_key()
    except UNREADABLE:
        raise CertificateError(f"{path} holds no private key in PEM form without a passphrase") from None
    try:
        same = key == certificate.public_key()
    except UNREADABLE as error:
        raise CertificateError(f"{where} holds a key of no known kind ({error}); `gcserver pki` makes one") from None
    if not same:
        raise CertificateError(f"{path} is not the key of {where}; give the two that were made together")


def check_validity(path: Path, certificate: x509.Certificate, now: dt.datetime) -> None:
    """Raises :class:`CertificateError` unless the certificate holds now."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise CertificateError(
            f"{path} ({named(certificate)}) expired on {end:%Y-%m-%d %H:%M} UTC; make a new one with `gcserver pki`"
        )
    if now < begin:
        raise CertificateError(
            f"{path} ({named(certificate)}) holds from {begin:%Y-%m-%d %H:%M} UTC on; is this machine's clock right?"
        )


def signed_by(chain: list[x509.Certificate], ca: list[x509.Certificate]) -> bool:
    """Whether a CA signed the first certificate, or one of the others which in turn was signed so."""
    at = chain[0]
    for _ in chain:
        if any(_issued(at, by) for by in ca):
            return True
        above = next((by for by in chain if by is not at and _issued(at, by)), None)
        if above is None:
            return False
        at = above
    return False


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


def _allows(certificate: x509.Certificate, purpose: x509.ObjectIdentifier) -> bool:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except (x509.ExtensionNotFound, *UNREADABLE):
        return True
    return purpose in extension.value


def named(certificate: x509.Certificate) -> str:
    """A certificate for a message: its common name, quoted."""
    return repr(identity(certificate).name)


class Certificates:
    """The newest usable certificates. Files are looked at before every handshake, from whichever thread makes it.

    What cannot be used (half of a renewal, an expired one) leaves those in force that were; it is said once in the log
    and counted by ``unusable``.
    """

    def __init__(self, paths: Paths, unusable: Callable[[], None] = lambda: None) -> None:
        """Raises :class:`CertificateError`."""
        self.paths = paths
        self._unusable = unusable
        self._lock = threading.Lock()
        self._seen = self._state()
        self._material = load(paths)

    def current(self) -> Material:
        """Never raises."""
        with self._lock:
            state = self._state()
            if state == self._seen:
                return self._material
            self._seen = state
            try:
                self._material = load(self.paths)
            except CertificateError as error:
                self._unusable()
                log.warning("%s; the certificate that was read before stays in force", error)
            else:
                end = self._material.certificate.not_valid_after_utc
                log.info("the certificate of node.admin was read anew, it holds until %s", f"{end:%Y-%m-%d}")
            return self._material

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when a file does."""
        states: list[tuple[int, int, int] | None] = []
        for path in (self.paths.ca, self.paths.certificate, self.paths.key):
            try:
                found = os.stat(path)
                states.append((found.st_ino, found.st_mtime_ns, found.st_size))
            except OSError:
                states.append(None)
        return tuple(states)
