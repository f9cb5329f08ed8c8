"""What may be wrong with the files by which operators are known: for `gcserver doctor`, and before a daemon starts.

What may live here: that question, with answers that say what to do. What may not: judging certificates
(`admin/certificates.py`), other questions (`checks.py`).
"""

from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path
from typing import Final

from cryptography import x509

from gcserver.admin.access import Paths
from gcserver.admin.certificates import CertificateError, load, named
from gcserver.checks import Check

NAME: Final = "certificates"
#: A certificate that ends within this is worth a warning.
SOON: Final = dt.timedelta(days=30)


def certificates(ca: Path, certificate: Path, key: Path, now: dt.datetime | None = None) -> list[Check]:
    """The node's certificate, every CA, and who can read the key; one failure where they cannot be used."""
    moment = now or dt.datetime.now(dt.UTC)
    try:
        found = load(Paths(ca, certificate, key), moment)
    except CertificateError as error:
        return [
            Check(NAME, "fail", str(error), "see admin.ca, admin.cert and admin.key; `gcserver pki` makes such files")
        ]
    out = [_validity(f"{certificate} ({named(found.certificate)})", found.certificate, moment, "gcserver pki node")]
    out += [_validity(f"CA {named(each)} in {ca}", each, moment, "gcserver pki init") for each in found.ca]
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        out.append(
            Check(NAME, "warn", f"{key} can be used by others than its owner (mode {mode:o})", f"chmod 600 {key}")
        )
    return out


def _validity(what: str, certificate: x509.Certificate, now: dt.datetime, fix: str) -> Check:
    end = certificate.not_valid_after_utc
    left = end - now
    text = f"{what}: until {end:%Y-%m-%d}, {max(0, left.days)} days from now"
    if left <= dt.timedelta(0):
        return Check(
            NAME, "warn", f"{what} expired on {end:%Y-%m-%d}: nobody it signed for is let in", f"{fix} --force"
        )
    return (
        Check(NAME, "warn", text, f"make a new one in time: {fix} --force") if left < SOON else Check(NAME, "ok", text)
    )
