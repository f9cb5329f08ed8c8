"""Looks at what the `ucx` transport needs of a machine.

What may live here: whether the system's libucp is there and can be used as it is told to, answered as in `checks.py`.
What may not: using it (`runtime/ucp.py`).
"""

from __future__ import annotations

import os

from gcserver.checks import Check
from gcserver.config import Config
from gcserver.config_keys import UCX


def library(config: Config) -> list[Check]:
    """Whether the lanes could speak UCX; empty where they are not asked to."""
    if config.node.transport != UCX:
        return []
    # Imported here: who does not ask for UCX need not wait for its declarations.
    from gcserver.runtime import ucp, ucxenviron

    try:
        ucxenviron.refuse_shared_memory(os.environ)
        return [Check("ucx", "ok", f"UCX {ucp.version()}")]
    except ucp.UcpUnusable as error:
        return [Check("ucx", "fail", error.why, error.fix)]
