"""Whether TCP ports are free, for daemons whose ports nobody has chosen.

What may live here: asking the system. What may not: from which range they are taken (`private.py`,
`deploy/slurm/job_daemon.py`), addresses as text (`values.py`).
"""

from __future__ import annotations

import errno
import socket
from typing import Final

_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)


def free(host: str, first: int, count: int) -> bool:
    """Whether ``count`` ports from ``first`` on can be bound now. Raises OSError where ``host`` is no address of this
    machine, as no other port would do there either."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As a daemon binds them: connections of the one before it, which ended, are not in its way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                return False
    return True
