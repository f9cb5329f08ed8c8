"""What operators see: the supervisor's state as the admin service and the metrics want it.

What may live here: reading the supervisor. What may not: changing it, except by the requests it offers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor


class _Nothing:
    async def stop(self) -> None:
        pass


async def start_admin(supervisor: Supervisor) -> Any:
    return _Nothing()
