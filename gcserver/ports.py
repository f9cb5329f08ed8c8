"""Whether TCP ports are free.

What may live here: asking the system. What may not: from which range ports are taken that nobody has chosen
(`private.py`, `deploy/slurm/job_daemon.py`), what is said of one that is not free (`checks.py`).
"""

from __future__ import annotations

import errno
import socket
from typing import Final

_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)


def bind(host: str, port: int) -> None:
    """Bind as a daemon would, and let go. Raises the OSError that it would get, gaierror for a name nobody knows."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port that is only in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def free(host: str, first: int, count: int) -> bool:
    """Whether ``count`` ports from ``first`` on can be bound now. Raises OSError where ``host`` is no address of this
    machine, as no other port would do there either."""
    try:
        for port in range(first, first + count):
            bind(host, port)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True
