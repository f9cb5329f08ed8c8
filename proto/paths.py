"""Where a daemon and its workers meet when nobody says otherwise.

What may live here: default paths both sides compute alike. What may not: creating, opening or removing
anything.
"""

from __future__ import annotations

import os
from typing import Final

SOCKET_NAME: Final = "daemon.sock"
#: In the folder of a private daemon: a FIFO that whoever needs the daemon holds open for writing.
USERS: Final = "users"


def default_socket(node: str = "") -> str:
    """The supervisor's Unix socket, used without ``node.socket`` (GC_NODE_SOCKET).

    ``$XDG_RUNTIME_DIR/gradcomm/daemon.sock``, or ``/tmp/gradcomm-<uid>/daemon.sock`` where no runtime
    directory is set. ``node`` keeps several daemons of one user apart: ``daemon-<node>.sock``.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = os.path.join(runtime, "gradcomm") if runtime else f"/tmp/gradcomm-{os.getuid()}"
    return os.path.join(folder, f"daemon-{node}.sock" if node else SOCKET_NAME)
