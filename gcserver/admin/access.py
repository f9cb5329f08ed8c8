"""What the servers for operators are given to tell who may use them, and where either side's certificates are.

What may live here: those values. What may not: imports that cost anything; making them (`gcserver.runtime.access`),
using them (`guard.py`, `exposition.py`, `certificates.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcserver.admin.audit_log import AuditLog
    from gcserver.admin.certificates import Certificates


def _uncounted(kind: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the CA's certificates, ours and our key are, in PEM form."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Access:
    """Who is let in. Without ``certificates`` whoever reaches the address may do everything: a Unix socket that file
    permissions guard, or loopback. ``count`` hears the kind of each refusal."""

    certificates: Certificates | None = None
    audit: AuditLog | None = None
    count: Callable[[str], None] = _uncounted


#: for an address that is guarded by other means
OPEN = Access()
