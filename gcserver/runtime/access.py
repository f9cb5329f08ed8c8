"""Who is let in where operators connect, as the configuration says it.

What may live here: making certificates and audit log of a daemon from its configuration, and what their troubles are
counted as. What may not: what they do (`gcserver.admin`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gcserver.admin.access import Access, Paths

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: kinds of errors: files of certificates that cannot be used, lines of the audit log that could not be written
UNUSABLE: Final = "certificates_unusable"
AUDIT_LOST: Final = "audit_log_lost"


def access(s: Supervisor) -> Access:
    """What both servers need. Raises OSError, whose text is all, where a file cannot be used."""
    files, path = s.config.admin.files, s.config.admin.audit_log
    certificates = audit = None
    if files is not None:
        # Imported late: most daemons on one machine have no certificates.
        from gcserver.admin.certificates import CertificateError, Certificates

        def unusable() -> None:
            s.loop.call_soon_threadsafe(s.count, UNUSABLE)  # handshakes happen in threads of gRPC's

        try:
            certificates = Certificates(Paths(*files), unusable)
        except CertificateError as error:
            raise OSError(str(error)) from None
    if path is not None and s.config.node.admin:
        from gcserver.admin.audit_log import AuditLog

        audit = AuditLog(path, lambda: s.count(AUDIT_LOST))
    return Access(certificates, audit, s.count)
