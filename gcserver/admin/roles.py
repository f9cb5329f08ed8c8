"""Who may call what: the one table of methods and the roles they need.

What may live here: roles, how a certificate spells them, the table. What may not: certificates (`certificates.py`),
refusing anybody (`guard.py`), imports that cost anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Role = Literal["viewer", "operator"]
VIEWER: Final = "viewer"
OPERATOR: Final = "operator"
#: from the least to the most that may be done
ROLES: Final[tuple[Role, ...]] = (VIEWER, OPERATOR)
#: A certificate has a role as a URI among its subject alternative names: this, then the role.
ROLE_URN: Final = "urn:gradcomm:role:"

#: Every method the server offers, by its name on the wire. What is not here is refused to everybody. Whatever needs an
#: operator changes something, and is written to the audit log.
METHODS: Final[Mapping[str, Role]] = {
    "/gradcomm.admin.v1.AdminService/GetStatus": VIEWER,
    "/gradcomm.admin.v1.AdminService/ListPeers": VIEWER,
    "/gradcomm.admin.v1.AdminService/ListJobs": VIEWER,
    "/gradcomm.admin.v1.AdminService/ListTensors": VIEWER,
    "/gradcomm.admin.v1.AdminService/GetPlan": VIEWER,
    "/gradcomm.admin.v1.AdminService/GetProfile": VIEWER,
    "/gradcomm.admin.v1.AdminService/Advise": VIEWER,
    "/gradcomm.admin.v1.AdminService/GetTrace": VIEWER,
    "/gradcomm.admin.v1.AdminService/GetLogs": VIEWER,
    "/gradcomm.admin.v1.AdminService/SetCodec": OPERATOR,
    "/gradcomm.admin.v1.AdminService/SetPlan": OPERATOR,
    "/gradcomm.admin.v1.AdminService/Replan": OPERATOR,
    "/gradcomm.admin.v1.AdminService/SetController": OPERATOR,
    "/gradcomm.admin.v1.AdminService/StartTrace": OPERATOR,
    "/gradcomm.admin.v1.AdminService/StopTrace": OPERATOR,
    "/gradcomm.admin.v1.AdminService/Drain": OPERATOR,
    "/grpc.health.v1.Health/Check": VIEWER,
    "/grpc.health.v1.Health/Watch": VIEWER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": VIEWER,
}
#: what `/metrics`, `/healthz`, `/readyz` and the dashboard need
METRICS: Final[Role] = VIEWER


def suffices(held: Role | None, needed: Role) -> bool:
    """Whether who has role ``held`` (None: none at all) may do what needs ``needed``."""
    return held is not None and ROLES.index(held) >= ROLES.index(needed)
