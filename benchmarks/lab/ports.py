"""Ports of loopback for tests and benchmarks that play side by side.

What may live here: choosing them. What may not: what listens on them.

What is chosen is bound some time later, by a process that has to start first. So that nobody else is given it
meanwhile, each process chooses from a block of its own: it holds a socket whose name is the block's. The kernel takes
the name away with the process, and names like ports belong to a network namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from typing import Final

#: Below the range the system hands out by itself, so that no outgoing connection takes one in the meantime, and below
#: that of private daemons.
FIRST: Final = 10_000
END: Final = 20_000
BLOCK: Final = 200


class PortsError(RuntimeError):
    """There are no ports to be had; ``str()`` says of which range, and what to do."""


class Block:
    """Ports that no other process chooses from while this object lives. Raises PortsError if each block is taken."""

    def __init__(self) -> None:
        for self.first in range(FIRST, END, BLOCK):
            self._held = socket.socket(socket.AF_UNIX)
            try:
                self._held.bind(f"\0gradcomm-lab-ports-{self.first}")
            except OSError:
                self._held.close()
            else:
                break
        else:
            raise PortsError(
                f"all blocks of ports from {FIRST} to {END} are other processes'; wait until some of those that test "
                "or measure here have ended"
            )
        self._next = self.first

    def take(self, count: int) -> int:
        """The first of ``count`` successive ports of 127.0.0.1 that nothing has bound right now; those that were taken
        before come last. Raises PortsError."""
        for _ in range(BLOCK if count <= BLOCK else 0):
            if self._next + count > self.first + BLOCK:
                self._next = self.first
            first = self._next
            self._next += 1
            if _free(first, count):
                self._next = first + count
                return first
        raise PortsError(
            f"no {count} successive free ports from {self.first} to {self.first + BLOCK}; ask for at most {BLOCK}, and "
            "end what listens there (`ss -ltnp`)"
        )

    def close(self) -> None:
        """Others may have it."""
        self._held.close()


def _free(first: int, count: int) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@functools.cache
def _block(pid: int) -> Block:
    return Block()


def free_ports(count: int) -> int:
    """The first of ``count`` successive ports of 127.0.0.1 that nothing has bound right now, and that no other process
    is given. Raises PortsError."""
    # by process: a fork has a block of its own
    return _block(os.getpid()).take(count)


def free_address() -> str:
    """One such port as an endpoint, ``tcp://127.0.0.1:PORT``. Raises PortsError."""
    return f"tcp://127.0.0.1:{free_ports(1)}"
