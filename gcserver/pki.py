"""A certificate authority for operators' connections: what `gcserver pki` makes.

What may live here: making keys and certificates, their files, and how a certificate carries a name and a role. What may
not: who may do what with a role (`admin/roles.py`), using certificates (`admin/certificates.py`), parsing arguments
(`pki_command.py`).

All certificates are X.509 version 3 over ECDSA P-256 (RFC 5280). A node's is for servers alone (extended key usage
serverAuth) and names the hosts and addresses it is reached by; an operator's is for clients alone (clientAuth) and has
one URI among its subject alternative names, ``urn:gradcomm:role:viewer`` or ``urn:gradcomm:role:operator``. The common
name of each is the node's or the operator's name.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gcserver.admin.certificates import UNREADABLE
from gcserver.admin.roles import ROLE_URN, ROLES, Role

#: Certificates hold from a little before they are made: the clocks of machines differ.
_EARLIER: Final = dt.timedelta(hours=1)
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class PkiError(Exception):
    """It cannot be made. ``str()`` says what was expected, what came and what to do."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class Files:
    """Where a pair was written, and until when it holds."""

    certificate: Path
    key: Path
    until: dt.datetime


# ---------------------------------------------------------------------------------------------- certificates
def authority(name: str, days: float, now: dt.datetime | None = None) -> Pair:
    """A new CA that signs for ``days`` days. Raises :class:`PkiError`."""
    _check_name(name, "the CA")
    key = ec.generate_private_key(ec.SECP256R1())
    begin, end = _validity(days, now)
    builder = _builder(_subject(name), key.public_key(), begin, end, _subject(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def node(ca: Pair, name: str, hosts: Sequence[str], days: float, now: dt.datetime | None = None) -> Pair:
    """A node's certificate, for a server reached by ``hosts``: names and IP addresses. Raises :class:`PkiError`."""
    _check_name(name, "a node")
    if not hosts:
        raise PkiError("expected at least one host name or IP address that operators reach the node by; got none")
    names = [_host(host) for host in dict.fromkeys(hosts)]
    return _issue(ca, name, x509.SubjectAlternativeName(names), ExtendedKeyUsageOID.SERVER_AUTH, days, now)


def operator(ca: Pair, name: str, role: Role, days: float, now: dt.datetime | None = None) -> Pair:
    """A certificate for a person or a program (such as Prometheus) with ``role``. Raises :class:`PkiError`."""
    _check_name(name, "an operator")
    if role not in ROLES:
        raise PkiError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    uri = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(ROLE_URN + role)])
    return _issue(ca, name, uri, ExtendedKeyUsageOID.CLIENT_AUTH, days, now)


def _issue(
    ca: Pair,
    name: str,
    names: x509.SubjectAlternativeName,
    purpose: x509.ObjectIdentifier,
    days: float,
    now: dt.datetime | None,
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    begin, end = _validity(days, now)
    last = ca.certificate.not_valid_after_utc
    if last <= begin + _EARLIER:
        raise PkiError(f"the CA's certificate held until {last:%Y-%m-%d}; make a new CA (`gcserver pki init`)")
    builder = _builder(_subject(name), key.public_key(), begin, min(end, last), ca.certificate.subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(names, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, begin: dt.datetime, end: dt.datetime, issuer: x509.Name
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _validity(days: float, now: dt.datetime | None) -> tuple[dt.datetime, dt.datetime]:
    if not 0 < days <= 36500:
        raise PkiError(f"days: expected more than 0 and at most 36500, got {days:g}")
    made = now or dt.datetime.now(dt.UTC)
    return made - _EARLIER, made + dt.timedelta(days=days)


def _check_name(name: str, whose: str) -> None:
    if not _NAME.fullmatch(name):
        raise PkiError(
            f"the name of {whose}: expected 1 to 64 letters, digits, '.', '_' or '-', the first and last a letter or "
            f"digit; got {name!r}"
        )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(text):
        raise PkiError(f"host: expected a host name or an IP address, without a port; got {text!r}")
    return x509.DNSName(text)


# ------------------------------------------------------------------------------------------------------ files
def init(folder: Path, name: str, days: float, force: bool = False) -> Files:
    """A new CA in ``folder``: ca.pem, ca.key. Raises :class:`PkiError`, OSError."""
    made = authority(name, days)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _write(folder, "ca", made, force)


def add_node(folder: Path, name: str, hosts: Sequence[str], days: float, force: bool = False) -> Files:
    """node-NAME.pem and node-NAME.key, signed by the CA in ``folder``. Raises :class:`PkiError`, OSError."""
    return _write(folder, f"node-{name}", node(load_authority(folder), name, hosts, days), force)


def add_operator(folder: Path, name: str, role: Role, days: float, force: bool = False) -> Files:
    """operator-NAME.pem and operator-NAME.key likewise. Raises :class:`PkiError`, OSError."""
    return _write(folder, f"operator-{name}", operator(load_authority(folder), name, role, days), force)


def load_authority(folder: Path) -> Pair:
    """The CA in ``folder``. Raises :class:`PkiError`."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        matching = key.public_key() == certificate.public_key()
    except FileNotFoundError:
        raise PkiError(f"{folder} holds no CA (ca.pem and ca.key); `gcserver pki init {folder}` makes one") from None
    except (OSError, *UNREADABLE) as error:
        raise PkiError(f"the CA in {folder} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not matching:
        raise PkiError(f"{folder}/ca.key is not the key of {folder}/ca.pem; put back the two that were made together")
    return Pair(certificate, key)


def _write(folder: Path, stem: str, made: Pair, force: bool) -> Files:
    """The key first, mode 0600: a certificate without its key would look complete."""
    files = Files(folder / f"{stem}.pem", folder / f"{stem}.key", made.certificate.not_valid_after_utc)
    for path in (files.key, files.certificate):
        if path.exists() and not force:
            raise PkiError(f"{path} is there already; --force puts a new one in its place")
    for path, text, mode in ((files.key, made.key_pem, 0o600), (files.certificate, made.certificate_pem, 0o644)):
        with _replacing(path, mode) as descriptor, open(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
    return files


@contextlib.contextmanager
def _replacing(path: Path, mode: int) -> Iterator[int]:
    """A descriptor for what takes ``path``'s place at once; never readable by more than ``mode`` says."""
    partial = path.with_name(f"{path.name}.new")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, mode)
        yield descriptor
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
