"""TLS as `gcctl` speaks it: which files it uses, and why a connection came to nothing.

What may live here: files, credentials, the words for each way in which certificates can be wrong. What may not: calls
and their answers (`gcctl_calls.py`), who says which files (`gcctl_settings.py`), what the daemon makes of a certificate
(`certificates.py`, `guard.py`).
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final

from gcserver import values
from gcserver.admin.access import Paths
from gcserver.admin.contexts import check_key
from gcserver.admin.exits import CtlError, Exit
from gcserver.admin.gcctl_settings import TLS, SettingError, Value, tls_paths

#: How long looking for the reason of a failed connection may take, seconds.
_PROBE: Final = 3.0


class TlsRefused(CtlError):
    """No connection can come of these certificates. ``str()`` says why and what to do."""

    status = Exit.DENIED


def files(given: Mapping[str, Value], address: str) -> Paths | None:
    """The files to use, of what was given by option; None for none. A Unix socket needs none: its mode says who may
    connect. Raises :class:`~gcserver.admin.gcctl_settings.SettingError`, and ContextError for a key that is exposed.
    """
    if address.startswith("unix:") or not given:
        return None
    missing = [f"{option} ({variable})" for option, variable, *_ in TLS if option not in given]
    if missing:
        sources = ", ".join(value.source for value in given.values())
        raise SettingError(f"{sources}: expected all three files; missing: {', '.join(missing)}")
    paths = tls_paths(given)
    for value, path in zip(
        (given[option] for option, *_ in TLS), (paths.ca, paths.certificate, paths.key), strict=True
    ):
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise SettingError(f"{value.source}: {path} is no file that uid {os.getuid()} can read")
    key = given["--tls-key"]
    if key.of_context:
        check_key(key.source, paths.key)
    return paths


def credentials(use: Paths, now: dt.datetime | None = None) -> Any:
    """gRPC's credentials. Raises :class:`TlsRefused` for files that no daemon would accept."""
    import grpc

    from gcserver.admin import certificates as known

    try:
        ca_pem, certificate_pem, key_pem = (known.read(path) for path in (use.ca, use.certificate, use.key))
        known.parse(use.ca, ca_pem)
        own = known.parse(use.certificate, certificate_pem)[0]
        known.check_key(use.certificate, own, use.key, key_pem)
        known.check_validity(use.certificate, own, now or dt.datetime.now(dt.UTC))
    except known.CertificateError as error:
        raise TlsRefused(str(error)) from None
    return grpc.ssl_channel_credentials(ca_pem, key_pem, certificate_pem)


def why_not(address: str, use: Paths | None) -> str:
    """Why no connection to ``host:port`` came about, where that has to do with TLS; "" where it has not."""
    where = values.read_endpoint(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if use is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        try:
            context.load_verify_locations(use.ca)
            context.load_cert_chain(use.certificate, use.key)
        except OSError as error:  # gRPC's library takes keys that OpenSSL finds too short
            return f"{use.ca}, {use.certificate} and {use.key} cannot be used: {error}"
    try:
        with socket.create_connection((where.host, where.port), _PROBE) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=where.host) as secure:
                    return _refused(address, use, secure)
            except ssl.SSLCertVerificationError as error:
                return _not_verified(address, use, error)
            except (ssl.SSLError, ConnectionResetError):
                return "" if use is None else f"{address} speaks no TLS: leave out --tls-ca, --tls-cert and --tls-key"
    except (OSError, ValueError):  # a name that no host can have is a ValueError
        return ""


def _refused(address: str, use: Paths | None, secure: ssl.SSLSocket) -> str:
    """The daemon's certificate is in order. One that takes ours says something; else it closes the connection."""
    if use is None:
        options = ", ".join(f"{option} ({variable})" for option, variable, *_ in TLS)
        return f"{address} speaks TLS and wants a certificate: give {options}"
    try:
        if secure.recv(1):
            return ""
    except OSError:
        pass
    from gcserver.admin import certificates as known

    chain = known.parse(use.certificate, known.read(use.certificate))
    if not known.signed_by(chain, known.parse(use.ca, known.read(use.ca))):
        return (
            f"{address} refused the certificate {use.certificate}: it is not signed by the CA in {use.ca}; have one "
            "made by that CA (`gcserver pki operator`)"
        )
    return (
        f"{address} refused the certificate {use.certificate}: it must be an operator's (`gcserver pki operator`), "
        "made by the CA of the daemon's admin.ca, and both clocks must be right"
    )


def _not_verified(address: str, use: Paths | None, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message
    ca = use.ca if use else ""
    if "expired" in said:
        return f"the certificate of {address} has expired: make the node a new one (`gcserver pki node`)"
    if "mismatch" in said:
        host = address.rpartition(":")[0]
        return (
            f"the certificate of {address} is for other names ({said}): connect by one that is in it, or make the node "
            f"one with --host {host} (`gcserver pki node`)"
        )
    return f"the certificate of {address} is not signed by the CA in {ca} ({said}): name the CA that made it"
