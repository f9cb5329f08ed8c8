"""What `gcctl` takes of a daemon at most: of one message, and of a stream that it keeps until its end.

What may live here: these bounds and counting. What may not: what the messages say.

A daemon keeps far less; whoever says more is none, and must not fill the memory of the operator's machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gcserver.admin.exits import CtlError
from gcserver.values import human_size

#: of a message, bytes: the tensors of a model that has 100,000 take a sixth of it
MOST_OF_MESSAGE: Final = 64 << 20
#: of the log, bytes: a daemon keeps 4 MiB of text
MOST_OF_LOG: Final = 64 << 20
#: of a trace, bytes: some ten million spans
MOST_OF_TRACE: Final = 1 << 30


class TooMuch(CtlError):
    """A stream goes on and on. ``str()`` says how much was taken."""


def bounded(call: Any, most: int, what: str) -> Iterator[Any]:
    """The messages of a stream, up to ``most`` bytes of them. Raises :class:`TooMuch` and grpc.RpcError."""
    taken = 0
    for message in call:
        taken += message.ByteSize()
        if taken > most:
            call.cancel()
            raise TooMuch(f"{what} of more than {human_size(most)} is no daemon's; is the address right?")
        yield message
