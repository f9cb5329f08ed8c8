"""What the servers for operators are given to tell who may use them.

What may live here: that value. What may not: imports that cost anything; making it (`gcserver.runtime.access`), using
it (`guard.py`, `exposition.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcserver.admin.audit_log import AuditLog
    from gcserver.admin.certificates import Certificates


def _uncounted(kind: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Access:
    """Who is let in. Without ``certificates`` whoever reaches the address may do everything: a Unix socket that file
    permissions guard, or loopback. ``count`` hears the kind of each refusal."""

    certificates: Certificates | None = None
    audit: AuditLog | None = None
    count: Callable[[str], None] = _uncounted


#: for an address that is guarded by other means
OPEN = Access()
